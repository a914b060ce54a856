// SPDX-License-Identifier: Apache-2.0
// Sampling against a plain sorted-list oracle in double precision, and the rules a client can see: ties, masks, penalties, raw
// logprobs, noise keyed by seed and position alone.
#include "engine/sampling.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <numeric>
#include <random>
#include <set>

#include "engine/sampling_cut.h"
#include "engine/sampling_kernels.h"

namespace rubato::engine {
namespace {

using testing::ElementsAre;

std::vector<float> random_logits(std::size_t size, float spread, std::uint32_t seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal(0, spread);
  std::vector<float> logits(size);
  for (float& logit : logits) logit = normal(random);
  return logits;
}

Sample sample_once(const SamplingParameters& parameters, std::vector<float> logits, std::int64_t position = 5,
                   std::vector<TokenId> prompt = {0}, std::vector<TokenId> ends = {}, std::vector<TokenId> output = {}) {
  SamplingState state(parameters, prompt, static_cast<std::int32_t>(logits.size()));
  for (const TokenId token : output) state.append(token);
  Sample sample;
  EXPECT_TRUE(state.sample(logits, position, ends, sample));
  return sample;
}

/// The kept set as one would write it down: sort, cut, in doubles.
std::set<TokenId> kept_by_sorting(const std::vector<float>& logits, const SamplingParameters& p) {
  std::vector<TokenId> order(logits.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](TokenId a, TokenId b) { return logits[a] > logits[b]; });
  std::vector<double> weight;
  for (const TokenId token : order)
    weight.push_back(std::exp((double{logits[token]} - double{logits[order[0]]}) / p.temperature));
  std::size_t count = 0;
  while (count < weight.size() && weight[count] >= p.min_p) ++count;
  if (p.top_k > 0 && static_cast<std::size_t>(p.top_k) < count) {
    std::size_t end = static_cast<std::size_t>(p.top_k);
    while (end < count && logits[order[end]] == logits[order[end - 1]]) ++end;
    count = end;
  }
  if (p.top_p < 1) {
    const double total = std::accumulate(weight.begin(), weight.begin() + static_cast<std::ptrdiff_t>(count), 0.0);
    double before = 0;
    std::size_t kept = 0;
    while (kept < count && before < p.top_p * total) before += weight[kept++];
    count = std::max<std::size_t>(1, kept);
  }
  return {order.begin(), order.begin() + static_cast<std::ptrdiff_t>(count)};
}

TEST(SamplingGreedy, takes_the_largest_and_the_lowest_id_among_equals) {
  for (const std::size_t size : {1U, 2U, 15U, 16U, 17U, 33U, 1000U}) {
    for (std::size_t first = 0; first < size; ++first) {
      std::vector<float> logits(size, -1.0F);
      for (std::size_t i = first; i < size; i += 3) logits[i] = 2.0F;
      EXPECT_EQ(sample_once({.temperature = 0}, logits).token, static_cast<TokenId>(first)) << size;
    }
  }
  EXPECT_EQ(sample_once({.temperature = 0}, {-0.0F, 0.0F, -1.0F}).token, 0);
  EXPECT_EQ(sample_once({.temperature = 0, .logit_bias = {{2, 1.0F}}}, {1.0F, 1.0F, 0.0F}).token, 0);  // the slower path agrees
}

TEST(Sampling, logits_that_are_not_finite_are_refused_wherever_they_stand) {
  for (const float bad : {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity(),
                          -std::numeric_limits<float>::infinity()}) {
    for (const std::size_t at : {0U, 16U, 36U}) {
      for (const double temperature : {0.0, 1.0}) {
        std::vector<float> logits = random_logits(37, 1, 1);
        logits[at] = bad;
        const SamplingState state({.temperature = temperature}, std::vector<TokenId>{0}, 37);
        Sample sample;
        EXPECT_FALSE(state.sample(logits, 0, {}, sample)) << bad << " at " << at;
      }
    }
  }
}

TEST(Sampling, every_token_masked_is_refused) {
  const SamplingState state({.temperature = 1, .min_new_tokens = 1, .stop_token_ids = {1}}, std::vector<TokenId>{0}, 2);
  std::vector<float> logits{1, 2};
  Sample sample;
  EXPECT_FALSE(state.sample(logits, 0, std::vector<TokenId>{0}, sample));
}

TEST(Sampling, exp_is_accurate_and_ends_in_zero) {
  for (float distance = 0; distance <= kernels::distance_max; distance += 0.0137F) {
    float weight = 0;
    kernels::weights(std::span<const float>(&distance, 1), kernels::distance_max, &weight);
    const double expected = std::exp(-static_cast<double>(distance));
    EXPECT_NEAR(weight, expected, expected * 3e-7) << distance;
  }
  const float beyond[] = {87.1F, 1e30F, std::numeric_limits<float>::infinity()};
  float weights[3] = {1, 1, 1};
  kernels::weights(beyond, kernels::distance_max, weights);
  EXPECT_THAT(weights, ElementsAre(0.0F, 0.0F, 0.0F));
}

TEST(Sampling, logarithms_are_within_a_few_units_of_the_last_place) {
  std::mt19937 random(1);
  std::uniform_real_distribution<double> exponent(0, 22);
  for (int i = 0; i < 20000; ++i) {
    const double x = std::exp2(exponent(random));
    const double expected = std::log(x);
    EXPECT_NEAR(kernels::natural_log(x), expected, expected * 4e-16 + 1e-18) << x;
  }
  EXPECT_EQ(kernels::natural_log(1), 0);
}

TEST(Sampling, a_share_of_the_mass_is_never_nothing_nor_more_than_all) {
  constexpr std::int64_t all = std::int64_t{1} << 41;
  EXPECT_EQ(kernels::mass_of(1), all);
  EXPECT_EQ(kernels::share_of(all, 0.5), all / 2);
  EXPECT_EQ(kernels::share_of(all + 1, 0.5), all / 2 + 1);  // half a unit more than half: the next whole one
  EXPECT_EQ(kernels::share_of(all, 1e-300), 1);
  EXPECT_EQ(kernels::share_of((std::int64_t{1} << 62) - 1, std::nextafter(1.0, 0.0)), (std::int64_t{1} << 62) - 512);
}

struct CutCase {
  double temperature;
  std::int32_t top_k;
  double top_p;
  double min_p;
};

class SamplingCut : public testing::TestWithParam<CutCase> {};

TEST_P(SamplingCut, keeps_the_set_that_sorting_keeps) {
  const auto [temperature, top_k, top_p, min_p] = GetParam();
  const SamplingParameters parameters{.temperature = temperature, .top_k = top_k, .top_p = top_p, .min_p = min_p};
  for (std::uint32_t seed = 1; seed <= 4; ++seed) {
    for (const std::size_t size : {3U, 50U, 1500U}) {
      std::vector<float> logits = random_logits(size, 3, seed);
      if (seed % 2 == 0) {
        for (float& logit : logits) logit = std::round(logit);  // many ties
      }
      Cut cut = min_p > 0 ? keep_min_p(min_p) : keep_all();
      const Distribution distribution{.logits = logits,
                                      .top = *std::max_element(logits.begin(), logits.end()),
                                      .inverse_temperature = static_cast<float>(1 / temperature)};
      if (top_k > 0) cut = keep_top_k(distribution, cut, top_k);
      if (top_p < 1) cut = keep_top_p(distribution, cut, top_p);
      std::set<TokenId> drawn;
      for (int i = 0; i < 3000; ++i) drawn.insert(*draw(distribution, cut, i / 3000.0));
      const std::set<TokenId> kept = kept_by_sorting(logits, parameters);
      for (const TokenId token : drawn) EXPECT_TRUE(kept.contains(token)) << token << " seed " << seed << " size " << size;
      // Tokens with a weight that 3,000 even steps cannot miss must have been drawn.
      double total = 0;
      for (const TokenId token : kept) total += std::exp((logits[token] - distribution.top) / temperature);
      for (const TokenId token : kept) {
        if (std::exp((logits[token] - distribution.top) / temperature) / total > 2.0 / 3000) {
          EXPECT_TRUE(drawn.contains(token)) << token << " seed " << seed << " size " << size;
        }
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Settings, SamplingCut,
                         testing::Values(CutCase{1.0, 0, 1.0, 0}, CutCase{1.0, 1, 1.0, 0}, CutCase{0.7, 5, 1.0, 0},
                                         CutCase{1.0, 100000, 1.0, 0}, CutCase{1.0, 0, 0.9, 0}, CutCase{1.3, 0, 0.5, 0},
                                         CutCase{1.0, 0, 1e-9, 0}, CutCase{1.0, 0, 0.999, 0}, CutCase{1.0, 0, 1.0, 0.1},
                                         CutCase{2.0, 0, 1.0, 1.0}, CutCase{0.8, 40, 0.95, 0.05}, CutCase{1.0, 2, 0.99, 0}));

TEST(Sampling, equal_logits_over_a_large_vocabulary_are_cut_exactly) {
  const std::vector<float> logits(151936, 1.0F);
  const Distribution distribution{.logits = logits, .top = 1.0F, .inverse_temperature = 1};
  const Cut cut = keep_top_p(distribution, keep_all(), 0.25);
  EXPECT_EQ(*draw(distribution, cut, 0), 0);
  EXPECT_EQ(*draw(distribution, cut, 0.99999999), 151936 / 4 - 1);
}

TEST(Sampling, draws_follow_the_distribution) {
  const std::vector<float> logits = random_logits(12, 1.2F, 3);
  double total = 0;
  for (const float logit : logits) total += std::exp(logit / 0.9);
  std::map<TokenId, int> counts;
  constexpr int draw_count = 60000;
  for (int i = 0; i < draw_count; ++i) {  // seeds and positions both vary: neither may correlate
    ++counts[sample_once({.temperature = 0.9, .seed = static_cast<std::uint64_t>(i % 300)}, logits, i / 300).token];
  }
  double chi_square = 0;
  for (std::size_t i = 0; i < logits.size(); ++i) {
    const double expected = draw_count * std::exp(logits[i] / 0.9) / total;
    const double difference = counts[static_cast<TokenId>(i)] - expected;
    chi_square += difference * difference / expected;
  }
  EXPECT_LT(chi_square, 31.3);  // 11 degrees of freedom: exceeded by chance once in a thousand
}

TEST(Sampling, noise_is_a_function_of_seed_and_position_alone) {
  const std::vector<float> logits = random_logits(200, 1, 9);
  const SamplingParameters parameters{.temperature = 1, .seed = 42};
  std::set<TokenId> at_positions;
  std::set<TokenId> of_seeds;
  for (std::int64_t position = 0; position < 40; ++position) {
    const TokenId token = sample_once(parameters, logits, position).token;
    EXPECT_EQ(token, sample_once(parameters, logits, position, {1, 2, 3}).token);
    at_positions.insert(token);
    SamplingParameters other = parameters;
    other.seed = 42 + static_cast<std::uint64_t>(position);  // choices of one request have neighbouring seeds
    of_seeds.insert(sample_once(other, logits, 7).token);
  }
  EXPECT_GT(at_positions.size(), 20U);
  EXPECT_GT(of_seeds.size(), 20U);
}

TEST(Sampling, penalties_see_prompt_and_output_as_the_interface_says) {
  const std::vector<float> logits{2.0F, 1.9F, -1.0F, -1.1F};
  const auto greedy = [&](SamplingParameters parameters, std::vector<TokenId> prompt, std::vector<TokenId> output) {
    parameters.temperature = 0;
    return sample_once(parameters, logits, 5, std::move(prompt), {}, std::move(output)).token;
  };
  EXPECT_EQ(greedy({.repetition_penalty = 1.5}, {0}, {}), 1);  // prompt counts for repetition
  EXPECT_EQ(greedy({.presence_penalty = 0.5}, {0}, {}), 0);    // but not for presence
  EXPECT_EQ(greedy({.presence_penalty = 0.5}, {3}, {0}), 1);
  EXPECT_EQ(greedy({.frequency_penalty = 0.06}, {3}, {0}), 0);
  EXPECT_EQ(greedy({.frequency_penalty = 0.06}, {3}, {0, 0}), 1);  // frequency adds up
  EXPECT_EQ(greedy({.presence_penalty = 0.06}, {3}, {0, 0}), 0);   // presence does not
  EXPECT_EQ(greedy({.presence_penalty = -0.2}, {3}, {1}), 1);      // negative penalties encourage
  EXPECT_EQ(greedy({.repetition_penalty = 2}, {0, 1}, {}), 0);     // 1.0 and 0.95 stay above the negatives
  EXPECT_EQ(greedy({.repetition_penalty = 2, .logit_bias = {{0, -5}, {1, -5}}}, {2}, {}), 3);  // a negative logit is multiplied
}

TEST(Sampling, end_tokens_are_masked_until_enough_tokens_were_generated) {
  const std::vector<float> logits{1, 9, 8, 2};
  const SamplingParameters parameters{.temperature = 0, .min_new_tokens = 2, .stop_token_ids = {2}};
  EXPECT_EQ(sample_once(parameters, logits, 5, {0}, {1}, {}).token, 3);
  EXPECT_EQ(sample_once(parameters, logits, 5, {0}, {1}, {3}).token, 3);
  EXPECT_EQ(sample_once(parameters, logits, 5, {0}, {1}, {3, 3}).token, 1);
  // A bias cannot lift the mask.
  EXPECT_EQ(sample_once({.temperature = 0, .logit_bias = {{1, 100.0F}}, .min_new_tokens = 1}, logits, 5, {0}, {1}).token, 2);
}

TEST(Sampling, bias_forces_padded_ids_and_ignores_ids_outside_the_vocabulary) {
  EXPECT_EQ(sample_once({.temperature = 0, .logit_bias = {{3, 100.0F}, {4, 100.0F}, {-1, 100.0F}}}, {1, 2, 3, 0}).token, 3);
}

TEST(Sampling, several_biases_of_one_token_add_up) {
  const SamplingState state({.logit_bias = {{3, 1.0F}, {1, 2.0F}, {3, 0.5F}, {9, 1.0F}}}, std::vector<TokenId>{0}, 5);
  EXPECT_THAT(state.parameters().logit_bias, ElementsAre(std::pair(1, 2.0F), std::pair(3, 1.5F)));
}

TEST(Sampling, zeros_of_either_sign_are_equal) {
  const std::vector<float> logits{-0.0F, 0.0F, -0.0F, -200.0F};
  std::set<TokenId> seen;
  for (std::uint64_t seed = 0; seed < 60; ++seed)
    seen.insert(sample_once({.top_k = 3, .top_p = 0.9, .seed = seed}, logits).token);
  EXPECT_EQ(seen, (std::set<TokenId>{0, 1, 2}));
}

TEST(Sampling, logprobs_are_of_the_raw_distribution) {
  const std::vector<float> logits = random_logits(3000, 2, 11);
  double total = 0;
  for (const float logit : logits) total += std::exp(static_cast<double>(logit));
  std::vector<TokenId> order(logits.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](TokenId a, TokenId b) { return logits[a] > logits[b]; });

  for (const double temperature : {0.0, 0.6}) {
    SamplingParameters parameters{.temperature = temperature,
                                  .top_p = 0.8,
                                  .presence_penalty = 1.5,
                                  .repetition_penalty = 1.3,
                                  .logit_bias = {{17, 40.0F}},
                                  .seed = 3,
                                  .top_logprobs = 20};
    const Sample sample = sample_once(parameters, logits, 5, {order[0], 17}, {}, {order[1]});
    EXPECT_EQ(sample.token, 17);  // forced by the bias, penalised as part of the prompt, reported raw
    EXPECT_NEAR(sample.logprob, logits[17] - std::log(total), 1e-5);
    ASSERT_EQ(sample.top.size(), 20U);
    for (std::size_t i = 0; i < 20; ++i) {
      EXPECT_EQ(sample.top[i].token, order[i]);
      EXPECT_NEAR(sample.top[i].logprob, logits[order[i]] - std::log(total), 1e-5);
    }
    parameters.top_logprobs = 0;
    const Sample alone = sample_once(parameters, logits, 5, {order[0], 17}, {}, {order[1]});
    EXPECT_EQ(alone.logprob, sample.logprob);
    EXPECT_TRUE(alone.top.empty());
    parameters.top_logprobs = -1;
    EXPECT_EQ(sample_once(parameters, logits, 5, {order[0], 17}, {}, {order[1]}).token, sample.token);
  }
}

TEST(Sampling, equal_logits_in_the_top_list_stand_in_the_order_of_ids) {
  const Sample sample = sample_once({.temperature = 0, .top_logprobs = 3}, std::vector<float>(200, 0.5F));
  ASSERT_EQ(sample.top.size(), 3U);
  EXPECT_EQ(sample.top[0].token, 0);
  EXPECT_EQ(sample.top[1].token, 1);
  EXPECT_EQ(sample.top[2].token, 2);
  EXPECT_NEAR(sample.top[0].logprob, -std::log(200.0), 1e-6);
  EXPECT_EQ(sample_once({.temperature = 0, .top_logprobs = 20}, {1, 2, 3}).top.size(), 3U);
}

TEST(Sampling, tiny_temperatures_are_greedy_and_huge_ones_stay_valid) {
  const std::vector<float> logits = random_logits(100, 3, 5);
  const TokenId best = sample_once({.temperature = 0}, logits).token;
  EXPECT_EQ(sample_once({.temperature = 1e-9}, logits).token, best);
  EXPECT_EQ(sample_once({.temperature = 1e-4}, logits).token, best);
  std::set<TokenId> seen;
  for (int i = 0; i < 300; ++i)
    seen.insert(sample_once({.temperature = 1e6, .seed = static_cast<std::uint64_t>(i)}, logits).token);
  EXPECT_GT(seen.size(), 80U);
}

}  // namespace
}  // namespace rubato::engine
