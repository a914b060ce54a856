// SPDX-License-Identifier: Apache-2.0
// The choice of buckets against every possible choice, and what must hold of it whatever the histogram.
#include "policies/step_shapes.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>
#include <map>
#include <random>
#include <tuple>

#include "manifests/check.h"

namespace rubato::policies {
namespace {

using testing::ElementsAre;

using Steps = std::map<std::int32_t, std::int64_t>;  // how many steps had so many tokens

StepHistogram histogram_of(const Steps& steps, std::int32_t tokens_max = 4096) {
  StepHistogram histogram(tokens_max, 1 << 20);
  for (const auto& [tokens, count] : steps) {
    for (std::int64_t i = 0; i < count; ++i) histogram.observe(tokens);
  }
  return histogram;
}

/// Waste of buckets, said once more and as plainly as can be: one step after another.
std::int64_t waste_by_hand(Steps steps, const std::vector<std::int32_t>& buckets, const ShapeOptions& options) {
  for (const std::int32_t tokens : default_buckets(options).tokens) ++steps[tokens];
  std::int64_t waste = 0;
  for (const auto& [tokens, count] : steps) {
    if (tokens > options.budget) continue;
    std::int32_t bucket = std::numeric_limits<std::int32_t>::max();
    for (const std::int32_t one : buckets) {
      if (one >= tokens) bucket = std::min(bucket, one);
    }
    const bool decode = tokens <= std::min(options.max_num_seqs, options.budget);
    const bool runs = bucket != std::numeric_limits<std::int32_t>::max() && (decode || bucket <= 1.25 * tokens);
    waste += count * (runs ? bucket - tokens : options.eager_tokens);
  }
  return waste * StepHistogram::unit;
}

struct Best {
  std::int64_t waste = std::numeric_limits<std::int64_t>::max();
  std::vector<std::int32_t> buckets;
};

/// Every set of candidates that count_max allows.
Best best_of_all(const Steps& steps, const ShapeOptions& options) {
  const std::vector<std::int32_t> candidates = bucket_candidates(options);
  const std::vector<std::int32_t> decode = decode_buckets(options);
  CHECK(candidates.size() <= 16, candidates.size());
  Best best;
  for (std::uint32_t chosen = 0; chosen < 1U << candidates.size(); ++chosen) {
    std::vector<std::int32_t> buckets = decode;
    for (std::size_t i = 0; i < candidates.size(); ++i) {
      if ((chosen >> i & 1U) != 0) buckets.push_back(candidates[i]);
    }
    if (chosen != 0 && buckets.size() > static_cast<std::size_t>(options.count_max)) continue;
    const std::int64_t waste = waste_by_hand(steps, buckets, options);
    const auto rank = [](std::int64_t cost, const std::vector<std::int32_t>& set) { return std::tuple(cost, set.size(), set); };
    if (rank(waste, buckets) < rank(best.waste, best.buckets) || best.buckets.empty()) best = {waste, buckets};
  }
  return best;
}

TEST(StepBuckets, a_step_runs_in_the_smallest_bucket_that_wastes_at_most_a_quarter) {
  const StepBuckets buckets{.tokens = {8, 16, 128, 160}, .decode_max = 16};
  EXPECT_EQ(buckets.find(1), 0U);  // the decode range, whatever it pads
  EXPECT_EQ(buckets.find(8), 0U);
  EXPECT_EQ(buckets.find(9), 1U);
  EXPECT_EQ(buckets.find(17), std::nullopt);
  EXPECT_EQ(buckets.find(102), std::nullopt);  // 128 > 127.5
  EXPECT_EQ(buckets.find(103), 2U);
  EXPECT_EQ(buckets.find(128), 2U);  // 128 * 1.25 = 160
  EXPECT_EQ(buckets.find(129), 3U);
  EXPECT_EQ(buckets.find(160), 3U);
  EXPECT_EQ(buckets.find(161), std::nullopt);
  EXPECT_EQ(buckets.find(0), std::nullopt);
  EXPECT_EQ(StepBuckets{}.find(1), std::nullopt);
}

TEST(StepHistogram, old_steps_fade_and_weights_stay_bounded) {
  StepHistogram histogram(100, 10);
  for (int i = 0; i < 10; ++i) histogram.observe(7);
  EXPECT_EQ(histogram.weight(7), 5 * StepHistogram::unit);
  for (int i = 0; i < 9; ++i) histogram.observe(3);
  EXPECT_EQ(histogram.weight(3), 9 * StepHistogram::unit);
  for (int i = 0; i < 1000; ++i) histogram.observe(3);
  EXPECT_EQ(histogram.weight(7), 0);
  EXPECT_LE(histogram.total(), 20 * StepHistogram::unit);
  EXPECT_EQ(histogram.total(), histogram.weight(3));
}

TEST(StepHistogram, fading_halves_until_little_enough_is_left) {
  StepHistogram histogram = histogram_of({{8, 60}, {64, 20}});
  EXPECT_EQ(histogram.token_total(), (8 * 60 + 64 * 20) * StepHistogram::unit);
  histogram.fade(100);
  EXPECT_EQ(histogram.total(), 80 * StepHistogram::unit);
  histogram.fade(30);
  EXPECT_EQ(histogram.weight(8), 15 * StepHistogram::unit);
  EXPECT_EQ(histogram.weight(64), 5 * StepHistogram::unit);
  histogram.fade(0);
  EXPECT_EQ(histogram.total(), 0);
}

TEST(StepHistogram, larger_steps_count_as_the_largest) {
  StepHistogram histogram(100, 10);
  histogram.observe(5000);
  EXPECT_EQ(histogram.weight(100), StepHistogram::unit);
}

TEST(StepHistogram, what_the_old_budget_cut_is_expected_at_the_new_one) {
  StepHistogram histogram = histogram_of({{8, 5}, {60, 1}, {64, 7}});
  histogram.move_budget(64, 2048);
  EXPECT_EQ(histogram.weight(8), 5 * StepHistogram::unit);
  EXPECT_EQ(histogram.weight(60), StepHistogram::unit);
  EXPECT_EQ(histogram.weight(64), 0);
  EXPECT_EQ(histogram.weight(2048), 7 * StepHistogram::unit);
  histogram.move_budget(2048, 32);
  EXPECT_EQ(histogram.weight(32), 8 * StepHistogram::unit);
  EXPECT_EQ(histogram.weight(8), 5 * StepHistogram::unit);
  EXPECT_EQ(histogram.total(), 13 * StepHistogram::unit);
}

TEST(ShapeChoice, is_the_best_of_all_choices) {
  int eager_steps_left = 0;
  for (std::uint64_t seed = 1; seed <= 300; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    std::mt19937_64 random(seed);
    const auto draw = [&](int low, int high) { return std::uniform_int_distribution<int>(low, high)(random); };
    ShapeOptions options;
    options.max_num_seqs = draw(1, 40);
    options.token_tile = std::vector<int>{1, 8, 16, 16, 32}[static_cast<std::size_t>(draw(0, 4))];
    options.budget = options.max_num_seqs + draw(0, 9 * options.token_tile);
    options.count_max = draw(1, 12);
    options.eager_tokens = draw(0, 3) == 0 ? draw(0, 8) : draw(0, 200);
    Steps steps;
    for (int i = draw(0, 12); i > 0; --i) steps[draw(1, options.budget + 5)] += draw(1, 9);
    const ShapeChoice choice = choose_shapes(histogram_of(steps), options);
    const Best best = best_of_all(steps, options);
    EXPECT_EQ(choice.waste, best.waste);
    EXPECT_EQ(choice.buckets.tokens, best.buckets);  // among equals the fewest, then the smallest
    EXPECT_EQ(expected_waste(histogram_of(steps), choice.buckets, options), choice.waste);
    for (const auto& [tokens, count] : steps) eager_steps_left += choice.buckets.find(tokens) ? 0 : 1;
  }
  EXPECT_GT(eager_steps_left, 50);  // else the eager rule was never at stake
}

TEST(ShapeChoice, more_buckets_never_cost_more) {
  for (std::uint64_t seed = 1; seed <= 20; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    std::mt19937_64 random(seed);
    StepHistogram histogram(2048, 1 << 20);
    for (int i = 0; i < 300; ++i) histogram.observe(1 + static_cast<std::int32_t>(random() % (random() % 2 == 0 ? 64 : 2048)));
    ShapeOptions options{.budget = 2048, .max_num_seqs = 64, .eager_tokens = static_cast<std::int32_t>(random() % 300)};
    std::int64_t before = std::numeric_limits<std::int64_t>::max();
    for (options.count_max = 1; options.count_max <= 40; ++options.count_max) {
      const ShapeChoice choice = choose_shapes(histogram, options);
      EXPECT_LE(choice.waste, before);
      EXPECT_LE(choice.buckets.tokens.size(), static_cast<std::size_t>(std::max(options.count_max, 4)));
      before = choice.waste;
    }
  }
}

TEST(ShapeChoice, an_empty_histogram_gives_the_default_ladder) {
  const StepHistogram nothing(8192, 100);
  ShapeOptions options{.budget = 2048, .max_num_seqs = 64, .count_max = 32};
  EXPECT_THAT(choose_shapes(nothing, options).buckets.tokens,
              ElementsAre(8, 16, 32, 64, 128, 256, 384, 512, 640, 768, 896, 1024, 1280, 1600, 2000, 2048));
  options = {.budget = 500, .max_num_seqs = 6, .count_max = 32};
  EXPECT_THAT(choose_shapes(nothing, options).buckets.tokens, ElementsAre(6, 16, 32, 64, 128, 256, 384, 500));
  options.count_max = 5;  // a ladder too long is cut where it hurts least
  const ShapeChoice cut = choose_shapes(nothing, options);
  EXPECT_EQ(cut.buckets.tokens.size(), 5U);
  EXPECT_EQ(cut.buckets.tokens.front(), 6);
}

TEST(ShapeChoice, the_decode_range_is_always_kept_and_nothing_exceeds_the_budget) {
  for (const std::int32_t budget : {1, 2, 7, 8, 9, 40, 63, 64, 65, 100, 8192, 65536}) {
    for (const std::int32_t seqs : {1, 7, 8, 48, 64, 256, 1024}) {
      const ShapeOptions options{.budget = budget, .max_num_seqs = seqs, .count_max = 8};
      const StepBuckets buckets = choose_shapes(histogram_of({{budget, 50}, {90, 7}}, 65536), options).buckets;
      SCOPED_TRACE(testing::PrintToString(buckets.tokens) + " budget " + std::to_string(budget));
      EXPECT_EQ(buckets.decode_max, std::min(seqs, budget));
      EXPECT_TRUE(std::is_sorted(buckets.tokens.begin(), buckets.tokens.end()));
      EXPECT_TRUE(std::adjacent_find(buckets.tokens.begin(), buckets.tokens.end()) == buckets.tokens.end());
      EXPECT_LE(buckets.tokens.back(), budget);
      for (std::int32_t tokens = 1; tokens <= buckets.decode_max; ++tokens) EXPECT_TRUE(buckets.find(tokens)) << tokens;
      for (const std::int32_t bucket : buckets.tokens) {
        EXPECT_TRUE(bucket <= buckets.decode_max || bucket == budget || bucket % options.token_tile == 0) << bucket;
      }
    }
  }
}

TEST(ShapeChoice, a_budget_of_one_has_one_bucket) {
  const ShapeOptions options{.budget = 1, .max_num_seqs = 64, .count_max = 16};
  EXPECT_THAT(choose_shapes(histogram_of({{1, 3}}), options).buckets.tokens, ElementsAre(1));
  EXPECT_TRUE(bucket_candidates(options).empty());
}

TEST(ShapeChoice, a_budget_below_max_num_seqs_ends_the_decode_range) {
  const ShapeOptions options{.budget = 24, .max_num_seqs = 64, .count_max = 16};
  EXPECT_THAT(choose_shapes(histogram_of({{24, 3}}), options).buckets.tokens, ElementsAre(8, 16, 24));
}

TEST(ShapeChoice, buckets_go_where_the_steps_are) {
  const ShapeOptions options{.budget = 2048, .max_num_seqs = 32, .count_max = 6};
  const ShapeChoice choice = choose_shapes(histogram_of({{12, 900}, {700, 4000}, {704, 100}, {1504, 2000}, {2048, 10}}), options);
  EXPECT_THAT(choice.buckets.tokens, testing::IsSupersetOf({8, 16, 32, 704, 1504}));
}

TEST(ShapeChoice, costs_no_more_than_its_bound_whatever_the_budget) {
  for (const std::int32_t budget : {512, 4096, 8192, 65536, 1 << 19}) {
    const ShapeOptions options{.budget = budget, .max_num_seqs = 32, .count_max = 24};
    const auto candidates = static_cast<std::int64_t>(bucket_candidates(options).size());
    EXPECT_LE(candidates, shape_candidates_max);
    const ShapeChoice choice = choose_shapes(histogram_of({{budget, 3}, {budget / 3, 5}}, 1 << 19), options);
    EXPECT_LE(choice.evaluations, 21 * candidates * (candidates + 1) / 2);
    EXPECT_GT(choice.evaluations, 0);
  }
}

TEST(ShapeChoice, equal_histograms_give_equal_choices_whatever_the_order_of_their_steps) {
  const ShapeOptions options{.budget = 1024, .max_num_seqs = 16, .count_max = 10};
  std::vector<std::int32_t> steps;
  std::mt19937_64 random(5);
  for (int i = 0; i < 500; ++i) steps.push_back(1 + static_cast<std::int32_t>(random() % 1024));
  const auto choice_of = [&] {
    StepHistogram histogram(1024, 1 << 20);
    for (const std::int32_t tokens : steps) histogram.observe(tokens);
    return choose_shapes(histogram, options);
  };
  const ShapeChoice first = choice_of();
  std::shuffle(steps.begin(), steps.end(), random);
  const ShapeChoice second = choice_of();
  EXPECT_EQ(first.buckets, second.buckets);
  EXPECT_EQ(first.waste, second.waste);
}

}  // namespace
}  // namespace rubato::policies
