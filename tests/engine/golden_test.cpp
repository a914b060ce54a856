// SPDX-License-Identifier: Apache-2.0
// A real trained model, greedily, through lane and backend: every token of every golden prompt and the log-probabilities beside
// them.
#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>

#include "engine/cpu/backend.h"
#include "engine/lane.h"
#include "engine/reference/backend.h"
#include "tests/support/golden_streams.h"
#include "tests/support/lane_client.h"

namespace rubato::engine {
namespace {

enum class Which : std::uint8_t { Cpu, Reference };

struct GoldenCase {
  const char* name;
  const char* folder;
  Which which;
  DataType dtype;
  std::int32_t threads;
  double logprob_tolerance;
};

class Golden : public testing::TestWithParam<GoldenCase> {};

TEST_P(Golden, greedy_output_equals_every_golden_prompt) {
  const GoldenCase& golden_case = GetParam();
  const std::filesystem::path folder = std::filesystem::path(RUBATO_SOURCE_DIR "/../shared/data/models") / golden_case.folder;
  if (!std::filesystem::exists(folder)) GTEST_SKIP() << "needs " << folder;
  const auto config = read_model_config(folder);
  ASSERT_TRUE(config) << config.error().message;
  auto weights = open_safetensors(folder);
  ASSERT_TRUE(weights) << weights.error().message;
  ASSERT_TRUE(check_weights(*config, **weights));
  const BackendOptions options{.dtype = golden_case.dtype,
                               .block_count = 64,
                               .max_tokens_per_step = 64,
                               .max_rows = 8,
                               .max_model_len = 512,
                               .threads = golden_case.threads,
                               .poison = true};
  auto backend = golden_case.which == Which::Cpu ? make_cpu_backend(*config, **weights, options)
                                                 : make_reference_backend(*config, **weights, options);
  ASSERT_TRUE(backend) << backend.error().message;
  (*backend)->capture_logits(true);
  Lane lane(**backend, {.limits = {.max_model_len = 512, .max_num_seqs = 8, .max_waiting = 16, .block_count = 64},
                        .initial = {.number = 1, .knobs = {.max_num_batched_tokens = 48, .max_num_seqs = 8}}});
  test::LaneClient client(lane);

  const auto streams = test::add_golden_prompts(client, folder, {.top_logprobs = 5});
  ASSERT_EQ(streams.size(), 5U);
  client.drain();
  test::expect_golden_tokens(client, streams);
  for (const auto& [id, prompt] : streams) {
    const test::ClientStream& stream = client.stream(id);
    const auto logprobs = prompt["output_logprobs"].get<std::vector<double>>();
    ASSERT_EQ(stream.samples.size(), logprobs.size());
    for (std::size_t token = 0; token < logprobs.size(); ++token) {
      EXPECT_NEAR(stream.samples[token].logprob, logprobs[token], golden_case.logprob_tolerance)
          << prompt["prompt"] << " token " << token;
      const auto top = prompt["top5_logprobs"][token].get<std::vector<std::pair<TokenId, double>>>();
      ASSERT_EQ(stream.samples[token].top.size(), top.size());
      for (std::size_t rank = 0; rank < top.size(); ++rank) {
        EXPECT_NEAR(stream.samples[token].top[rank].logprob, top[rank].second, golden_case.logprob_tolerance);
      }
    }
  }
  lane.check_integrity();
  EXPECT_TRUE(lane.group().idle());
}

INSTANTIATE_TEST_SUITE_P(
    Models, Golden,
    testing::Values(GoldenCase{"reference", "stories260k", Which::Reference, DataType::Float32, 1, 1e-3},
                    GoldenCase{"reference_of_bf16", "stories260k-bf16", Which::Reference, DataType::Float32, 1, 1e-3},
                    GoldenCase{"cpu_f32", "stories260k", Which::Cpu, DataType::Float32, 1, 1e-3},
                    GoldenCase{"cpu_f32_two_threads", "stories260k", Which::Cpu, DataType::Float32, 2, 1e-3},
                    GoldenCase{"cpu_f32_of_bf16", "stories260k-bf16", Which::Cpu, DataType::Float32, 1, 1e-3},
                    // BF16 activations and cache: the tokens hold, the log-probabilities move in the second decimal.
                    GoldenCase{"cpu_bf16", "stories260k-bf16", Which::Cpu, DataType::BFloat16, 2, 0.25}),
    [](const auto& parameter) { return std::string(parameter.param.name); });

}  // namespace
}  // namespace rubato::engine
