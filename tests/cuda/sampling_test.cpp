// SPDX-License-Identifier: Apache-2.0
// Sampling on the device against SamplingState::sample on the host: the same tokens and the same bits of every log-probability,
// for every setting and kind of logits, whatever else is in the batch.
#include "engine/cuda/sampling.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "tests/cuda/device_rows.h"
#ifdef RUBATO_CUDA_EMULATED
#include "tests/cuda_host/control.h"
#endif

namespace rubato::engine::cuda {
namespace {

constexpr float infinity = std::numeric_limits<float>::infinity();

/// One row that samples.
struct Draw {
  SamplingParameters parameters;
  Values logits;
  std::vector<TokenId> prompt{0};
  std::vector<TokenId> output{};
  std::int64_t position = 5;
};

SamplingState state_of(const Draw& draw) {
  SamplingState state(draw.parameters, draw.prompt, static_cast<std::int32_t>(draw.logits.size()));
  for (const TokenId token : draw.output) state.append(token);
  return state;
}

struct Outcome {
  bool valid = false;
  Sample sample;
};

std::string text_of(const Outcome& outcome) {
  if (!outcome.valid) return "invalid";
  std::string text = "token " + std::to_string(outcome.sample.token);
  const auto add = [&text](TokenId token, float logprob) {
    text +=
        " " + std::to_string(token) + ":" + std::to_string(logprob) + "/" + std::to_string(std::bit_cast<std::uint32_t>(logprob));
  };
  add(outcome.sample.token, outcome.sample.logprob);
  for (const TokenLogprob& top : outcome.sample.top) add(top.token, top.logprob);
  return text;
}

Outcome on_host(const Draw& draw, const std::vector<TokenId>& end_tokens) {
  const SamplingState state = state_of(draw);
  Values logits = draw.logits;
  Outcome outcome;
  outcome.valid = state.sample(logits, draw.position, end_tokens, outcome.sample);
  return outcome;
}

/// The regions of sampling for one shape, in memory of exactly the stated sizes, and the pinned side of both copies.
class SamplingDevice {
 public:
  SamplingDevice(const Stream& stream, const SamplingShape& shape)
      : stream_(stream),
        shape_(shape),
        host_staging_(PinnedMemory::make(sampling_staging_bytes(shape)).value()),
        host_results_(PinnedMemory::make(result_bytes()).value()),
        staging_(DeviceMemory::make(sampling_staging_bytes(shape)).value()),
        scratch_(DeviceMemory::make(sampling_scratch_bytes(shape)).value()),
        results_(DeviceMemory::make(result_bytes()).value()) {
    std::memset(host_results_.data(), unwritten, static_cast<std::size_t>(result_bytes()));
    copy_and_wait(stream_, results_.data(), host_results_.data(), static_cast<std::size_t>(result_bytes()),
                  cudaMemcpyHostToDevice);
  }

  std::int64_t stage(const std::vector<Draw>& draws, const std::vector<TokenId>& end_tokens) {
    std::vector<SamplingState> states;
    for (const Draw& draw : draws) states.push_back(state_of(draw));
    std::vector<SamplingInput> inputs;
    for (std::size_t i = 0; i < draws.size(); ++i) inputs.push_back({.state = &states[i], .position = draws[i].position});
    const std::int64_t bytes = write_sampling(shape_, inputs, end_tokens, host_staging_.data());
    EXPECT_LE(bytes, sampling_staging_bytes(shape_));
    if (bytes > 0) {
      copy_and_wait(stream_, staging_.data(), host_staging_.data(), static_cast<std::size_t>(bytes), cudaMemcpyHostToDevice);
    }
    return bytes;
  }
  void queue(const BatchCounts* counts, const Accumulators& logits) const {
    sample(stream_.get(), shape_, counts, logits,
           {.staging = staging_.data(), .scratch = scratch_.data(), .results = reinterpret_cast<SampledRow*>(results_.data())});
  }
  [[nodiscard]] std::vector<SampledRow> rows() {
    copy_and_wait(stream_, host_results_.data(), results_.data(), static_cast<std::size_t>(result_bytes()),
                  cudaMemcpyDeviceToHost);
    std::vector<SampledRow> rows(static_cast<std::size_t>(shape_.max_rows));
    std::memcpy(rows.data(), host_results_.data(), static_cast<std::size_t>(result_bytes()));
    return rows;
  }
  [[nodiscard]] static bool is_unwritten(const SampledRow& row) {
    std::byte bytes[sizeof(SampledRow)];
    std::memcpy(bytes, &row, sizeof(row));
    return std::all_of(std::begin(bytes), std::end(bytes), [](std::byte b) { return b == std::byte{unwritten}; });
  }

 private:
  static constexpr unsigned char unwritten = 0xA5;
  [[nodiscard]] std::int64_t result_bytes() const { return shape_.max_rows * static_cast<std::int64_t>(sizeof(SampledRow)); }

  const Stream& stream_;
  SamplingShape shape_;
  PinnedMemory host_staging_, host_results_;
  DeviceMemory staging_, scratch_, results_;
};

Outcome outcome_of(const SampledRow& row) {
  Outcome outcome;
  outcome.valid = read_sample(row, outcome.sample);
  return outcome;
}

SamplingShape shape_of(const std::vector<Draw>& draws, std::int32_t max_rows) {
  return {.max_rows = max_rows,
          .vocabulary = static_cast<std::int32_t>(draws.front().logits.size()),
          .max_model_len = 4096,
          .cached_tokens = std::int64_t{4096} * max_rows};
}

Values flattened(const std::vector<Draw>& draws) {
  Values values;
  for (const Draw& draw : draws) values.insert(values.end(), draw.logits.begin(), draw.logits.end());
  return values;
}

class Sampling : public DeviceTest {
 protected:
  std::vector<Outcome> on_device(const std::vector<Draw>& draws, const std::vector<TokenId>& end_tokens = {}) {
    const auto rows = static_cast<std::int32_t>(draws.size());
    const SamplingShape shape = shape_of(draws, rows);
    SamplingDevice device(stream(), shape);
    device.stage(draws, end_tokens);
    const DeviceVector<BatchCounts> counts(stream(), std::vector<BatchCounts>{{.tokens = rows, .rows = rows, .selected = rows}});
    const DeviceRows logits(stream(), DataType::Float32, rows, shape.vocabulary, flattened(draws), {.gap = 3, .offset = 1});
    device.queue(counts.data(), logits.accumulators());
    wait();
    static_cast<void>(logits.read(stream()));  // checks the gaps
    std::vector<Outcome> outcomes;
    for (const SampledRow& row : device.rows()) outcomes.push_back(outcome_of(row));
    return outcomes;
  }

  void expect_host_bits(const std::vector<Draw>& draws, const std::string& what, const std::vector<TokenId>& end_tokens = {}) {
    const std::vector<Outcome> outcomes = on_device(draws, end_tokens);
    for (std::size_t i = 0; i < draws.size(); ++i) {
      EXPECT_EQ(text_of(outcomes[i]), text_of(on_host(draws[i], end_tokens))) << what << ", row " << i;
    }
  }
};

enum class Kind { Usual, Peaked, Ties, Flat, Close, Zeros };

Values logits_of(Kind kind, std::size_t size, std::uint32_t seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal(0, 2.5F);
  Values logits(size);
  for (float& logit : logits) {
    const float value = normal(random);
    switch (kind) {
      case Kind::Usual:
        logit = value;
        break;
      case Kind::Peaked:
        logit = value * 20;
        break;
      case Kind::Ties:
        logit = std::round(value);
        break;
      case Kind::Flat:
        logit = 1.25F;
        break;
      case Kind::Close:
        logit = 3 + value * 1e-4F;
        break;
      case Kind::Zeros:
        logit = value < 0 ? -0.0F : 0.0F;
        break;
    }
  }
  return logits;
}

/// Cuts of every kind and both ends of each.
std::vector<SamplingParameters> cut_settings() {
  return {{.temperature = 0},
          {.temperature = 1},
          {.temperature = 0.3},
          {.temperature = 1, .top_k = 1},
          {.temperature = 0.7, .top_k = 5},
          {.temperature = 1.5, .top_k = 50},
          {.temperature = 1, .top_k = 1000000},
          {.temperature = 1, .top_p = 0.9},
          {.temperature = 1, .top_p = 0.3},
          {.temperature = 1, .top_p = 1e-9},
          {.temperature = 1, .top_p = 0.999999},
          {.temperature = 1, .min_p = 0.1},
          {.temperature = 1, .min_p = 1},
          {.temperature = 0.8, .top_k = 40, .top_p = 0.95, .min_p = 0.02},
          {.temperature = 1, .top_k = 7, .top_p = 0.5},
          {.temperature = 2, .top_p = 0.9, .min_p = 0.3},
          {.temperature = 1, .top_k = 2500, .min_p = 0.25},
          {.temperature = 1e6, .top_k = 20, .top_p = 0.6}};
}

TEST_F(Sampling, every_cut_over_every_kind_of_logits_has_the_bits_of_the_host) {
  std::uint32_t seed = 1;
  for (const Kind kind : {Kind::Usual, Kind::Peaked, Kind::Ties, Kind::Flat, Kind::Close, Kind::Zeros}) {
    std::vector<Draw> draws;
    for (SamplingParameters parameters : cut_settings()) {
      parameters.seed = seed;
      parameters.top_logprobs = static_cast<std::int32_t>(seed % 4) - 1;
      draws.push_back({.parameters = parameters, .logits = logits_of(kind, 2600, seed), .position = seed});
      ++seed;
    }
    expect_host_bits(draws, "kind " + std::to_string(static_cast<int>(kind)));
  }
}

TEST_F(Sampling, any_size_of_vocabulary_will_do) {
  for (const std::size_t size : {1U, 5U, 31U, 33U, 1023U, 1024U, 1025U, 9001U}) {
    std::vector<Draw> draws;
    for (const SamplingParameters& parameters :
         {SamplingParameters{.temperature = 0, .top_logprobs = 20}, SamplingParameters{.temperature = 1},
          SamplingParameters{.temperature = 0.9, .top_k = 30, .top_p = 0.9, .top_logprobs = 5},
          SamplingParameters{.temperature = 1, .top_p = 0.97, .presence_penalty = 0.5}}) {
      draws.push_back({.parameters = parameters, .logits = logits_of(Kind::Usual, size, static_cast<std::uint32_t>(size))});
    }
    expect_host_bits(draws, "size " + std::to_string(size));
  }
}

TEST_F(Sampling, hundreds_of_stretches_add_up_in_order) {
  constexpr std::size_t size = 530'001;  // more stretches than are summed at a time
  expect_host_bits({{.parameters = {.temperature = 1, .seed = 3, .top_logprobs = 2}, .logits = logits_of(Kind::Usual, size, 3)},
                    {.parameters = {.temperature = 1, .top_p = 0.9, .seed = 4}, .logits = logits_of(Kind::Usual, size, 4)}},
                   "large vocabulary");
}

TEST_F(Sampling, draws_at_many_positions_are_those_of_the_host) {
  const Values logits = logits_of(Kind::Usual, 3000, 11);
  std::vector<Draw> draws;
  for (std::int64_t position = 0; position < 48; ++position) {
    draws.push_back({.parameters = {.temperature = 1.2, .top_p = position % 2 == 0 ? 1.0 : 0.8, .seed = 77},
                     .logits = logits,
                     .position = position});
  }
  expect_host_bits(draws, "positions");
}

TEST_F(Sampling, ties_at_the_cut_are_kept_in_the_order_of_ids_across_stretches) {
  std::vector<Draw> draws;
  for (const double top_p : {0.0001, 0.2, 0.34, 0.5, 0.9}) {
    for (std::uint64_t seed = 0; seed < 4; ++seed) {
      Values logits(5000, 0.5F);
      for (std::size_t i = 7; i < logits.size(); i += 50) logits[i] = 1.5F;
      draws.push_back({.parameters = {.temperature = 1, .top_p = top_p, .seed = seed}, .logits = std::move(logits)});
    }
  }
  expect_host_bits(draws, "ties");
}

TEST_F(Sampling, a_cut_among_more_near_tokens_than_the_list_holds_is_found_in_the_row) {
  std::vector<Draw> draws;
  for (const SamplingParameters& parameters :
       {SamplingParameters{.temperature = 1, .top_k = 5000}, SamplingParameters{.temperature = 1, .top_p = 0.7},
        SamplingParameters{.temperature = 1, .top_k = 5500, .top_p = 0.5},
        SamplingParameters{.temperature = 100, .top_p = 0.25}}) {
    draws.push_back({.parameters = parameters, .logits = logits_of(Kind::Close, 6000, 21)});
  }
  expect_host_bits(draws, "close");
}

TEST_F(Sampling, masks_biases_and_penalties_apply_in_the_order_of_the_host) {
  const std::vector<TokenId> end_tokens{2050, 4, 1030, 2, 4, 99999, -3};
  std::vector<Draw> draws;
  for (const double temperature : {0.0, 0.8}) {
    for (const std::int32_t min_new_tokens : {0, 3, 5}) {
      for (const double penalty : {0.0, 0.7, -0.4}) {
        SamplingParameters parameters{.temperature = temperature,
                                      .presence_penalty = penalty,
                                      .frequency_penalty = penalty / 3,
                                      .repetition_penalty = penalty == 0 ? 1.0 : 1.3,
                                      .logit_bias = {{1500, 6.5F}, {3, -100}, {2, 50}, {1500, 0.25F}, {5000, 100}},
                                      .seed = 9,
                                      .min_new_tokens = min_new_tokens,
                                      .stop_token_ids = {7, 2},
                                      .top_logprobs = 4};
        Draw draw{.parameters = parameters,
                  .logits = logits_of(Kind::Usual, 2100, 5),
                  .prompt = {1500, 3, 3, 8, 1499, 2099},
                  .output = {1500, 1500, 8, 1024}};
        for (const TokenId likely : {1500, 8, 1024, 7, 2, 4, 1030, 2050}) draw.logits[static_cast<std::size_t>(likely)] = 7.5F;
        draws.push_back(std::move(draw));
      }
    }
  }
  expect_host_bits(draws, "edits", end_tokens);
}

TEST_F(Sampling, logits_that_are_not_finite_fail_their_row_alone) {
  std::vector<Draw> draws;
  for (const float bad : {std::numeric_limits<float>::quiet_NaN(), infinity, -infinity}) {
    for (const std::size_t at : {0U, 1023U, 1024U, 2599U}) {
      SamplingParameters parameters{.temperature = at % 2 == 0 ? 0.0 : 1.0, .top_p = 0.9};
      if (at > 1000) parameters.top_logprobs = 3;
      if (at > 2000) parameters.logit_bias = {{static_cast<TokenId>(at), 1.0F}};
      draws.push_back({.parameters = parameters, .logits = logits_of(Kind::Usual, 2600, 2)});
      draws.push_back(draws.back());
      draws.back().logits[at] = bad;
    }
  }
  const std::vector<Outcome> outcomes = on_device(draws);
  for (std::size_t i = 0; i < draws.size(); i += 2) {
    EXPECT_EQ(text_of(outcomes[i]), text_of(on_host(draws[i], {})));
    EXPECT_FALSE(outcomes[i + 1].valid) << i;
  }
}

TEST_F(Sampling, every_token_masked_or_an_infinite_penalty_fails_the_row) {
  const SamplingParameters masking{.temperature = 1, .top_k = 2, .min_new_tokens = 1, .stop_token_ids = {1}, .top_logprobs = 1};
  SamplingParameters greedy = masking;
  greedy.temperature = 0;
  expect_host_bits({{.parameters = masking, .logits = {1, 2}}, {.parameters = greedy, .logits = {1, 2}}}, "masked", {0});
  expect_host_bits({{.parameters = {.temperature = 1, .repetition_penalty = 1e-38}, .logits = {1e6F, 2}}}, "infinite");
}

TEST_F(Sampling, a_row_has_the_same_bytes_alone_and_in_any_batch) {
  std::vector<Draw> draws;
  std::uint32_t seed = 100;
  for (SamplingParameters parameters : cut_settings()) {
    parameters.seed = ++seed;
    parameters.top_logprobs = static_cast<std::int32_t>(seed % 8) - 1;
    if (seed % 3 == 0) parameters.repetition_penalty = 1.2;
    draws.push_back({.parameters = parameters,
                     .logits = logits_of(seed % 2 == 0 ? Kind::Usual : Kind::Ties, 1700, seed),
                     .prompt = {1, 2, 3, 1600},
                     .position = seed});
  }
  const std::vector<Outcome> together = on_device(draws);
  for (std::size_t i = 0; i < draws.size(); ++i) {
    EXPECT_EQ(text_of(on_device({draws[i]})[0]), text_of(together[i])) << i;
  }
}

TEST_F(Sampling, rows_beyond_the_selected_are_left_as_they_are) {
  const std::vector<Draw> draws{
      {.parameters = {.temperature = 1, .top_p = 0.9, .top_logprobs = 2}, .logits = logits_of(Kind::Usual, 1500, 1)},
      {.parameters = {.temperature = 0, .logit_bias = {{3, 1.0F}}}, .logits = logits_of(Kind::Usual, 1500, 2)}};
  constexpr std::int32_t bucket = 5;
  SamplingDevice device(stream(), shape_of(draws, 8));
  device.stage(draws, {});
  Values values = flattened(draws);
  values.resize(bucket * 1500, 0.75F);
  const DeviceRows logits(stream(), DataType::Float32, bucket, 1500, values);
  const DeviceVector<BatchCounts> counts(stream(), std::vector<BatchCounts>{{.tokens = 9, .rows = 4, .selected = 2}});
  device.queue(counts.data(), logits.accumulators());
  wait();
  const std::vector<SampledRow> rows = device.rows();
  for (std::size_t i = 0; i < rows.size(); ++i) {
    if (i < draws.size()) {
      EXPECT_EQ(text_of(outcome_of(rows[i])), text_of(on_host(draws[i], {})));
    } else {
      EXPECT_TRUE(SamplingDevice::is_unwritten(rows[i])) << i;
    }
  }
  const Values after = logits.read(stream());
  EXPECT_TRUE(std::all_of(after.begin() + 2 * 1500, after.end(), [](float logit) { return logit == 0.75F; }));
}

TEST_F(Sampling, one_captured_graph_serves_every_batch) {
  constexpr std::int32_t bucket = 4;
  const auto batch_of = [](std::size_t rows, std::uint32_t seed) {
    std::vector<Draw> draws;
    const std::vector<SamplingParameters> settings{{.temperature = 0.3, .top_p = 0.5},
                                                   {.temperature = 2, .top_k = 40},
                                                   {.temperature = 0},
                                                   {.temperature = 1, .top_p = 0.9},
                                                   {.temperature = 2, .top_p = 0.6},
                                                   {.temperature = 0.5, .top_k = 9, .top_p = 0.8},
                                                   {.temperature = 1}};
    for (std::uint32_t i = 0; i < rows; ++i) {
      SamplingParameters parameters = settings[(seed + i) % settings.size()];
      parameters.seed = seed;
      parameters.top_logprobs = static_cast<std::int32_t>(i) - 1;
      if ((seed + i) % 2 == 0) parameters.presence_penalty = 0.4;
      draws.push_back({.parameters = parameters, .logits = logits_of(Kind::Usual, 1100, seed + i), .output = {1, 2}});
    }
    return draws;
  };
  SamplingDevice device(stream(), shape_of(batch_of(1, 0), bucket));
  const DeviceRows logits(stream(), DataType::Float32, bucket, 1100);
  const DeviceVector<BatchCounts> counts(stream(), std::vector<BatchCounts>(1));
  Result<Graph> graph = Graph::capture(stream(), [&]() -> Result<void> {
    device.queue(counts.data(), logits.accumulators());
    return {};
  });
  ASSERT_TRUE(graph.has_value()) << graph.error().message;
  for (std::uint32_t seed = 1; seed <= 14; ++seed) {
    const std::vector<Draw> draws = batch_of(1 + seed % bucket, seed);
    device.stage(draws, {});
    const Values values = flattened(draws);
    copy_and_wait(stream(), logits.data(), values.data(), values.size() * sizeof(float), cudaMemcpyHostToDevice);
    const BatchCounts now{.tokens = 4, .rows = 4, .selected = static_cast<std::int32_t>(draws.size())};
    copy_and_wait(stream(), counts.data(), &now, sizeof(now), cudaMemcpyHostToDevice);
    ASSERT_TRUE(graph->launch(stream()).has_value());
    wait();
    const std::vector<SampledRow> rows = device.rows();
    for (std::size_t i = 0; i < draws.size(); ++i) {
      EXPECT_EQ(text_of(outcome_of(rows[i])), text_of(on_host(draws[i], {}))) << "batch " << seed << ", row " << i;
    }
  }
}

#ifdef RUBATO_CUDA_EMULATED
TEST_F(Sampling, no_order_of_threads_and_blocks_changes_a_bit) {
  std::vector<Draw> draws;
  for (SamplingParameters parameters : cut_settings()) {
    parameters.top_logprobs = 3;
    parameters.frequency_penalty = 0.5;
    draws.push_back({.parameters = parameters, .logits = logits_of(Kind::Ties, 1300, 8), .output = {5, 6, 1024}});
  }
  for (std::uint64_t seed = 1; seed <= 5; ++seed) {
    cuda_host::set_seed(seed);
    expect_host_bits(draws, "seed " + std::to_string(seed));
  }
  EXPECT_EQ(cuda_host::fault_text(), "");
}
#endif

TEST_F(Sampling, staging_needs_no_more_bytes_than_rows_and_edits) {
  const std::vector<Draw> plain{{.parameters = {.temperature = 0}, .logits = Values(100, 1)}};
  SamplingDevice device(stream(), shape_of(plain, 4));
  EXPECT_EQ(device.stage(plain, {5}), 64);
  EXPECT_EQ(device.stage({}, {5}), 0);
  const std::vector<Draw> edited{{.parameters = {.temperature = 0,
                                                 .presence_penalty = 1,
                                                 .logit_bias = {{1, 1.0F}, {2, 1.0F}},
                                                 .min_new_tokens = 2,
                                                 .stop_token_ids = {5, 6}},
                                  .logits = Values(100, 1),
                                  .prompt = {9, 9, 8}}};
  EXPECT_EQ(device.stage(edited, {5}), 4 * 64 + (2 + 2 + 2) * 8);  // edits come after the room of all rows
}

}  // namespace
}  // namespace rubato::engine::cuda
