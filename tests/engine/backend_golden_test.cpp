// SPDX-License-Identifier: Apache-2.0
// A trained model against answers computed in double precision elsewhere: greedy tokens, and the first step's logits.
#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <ostream>

#include "engine/cpu/backend.h"
#include "engine/reference/backend.h"
#include "tests/engine/backend_harness.h"

namespace rubato::engine {
namespace {

struct Golden {
  std::string folder;
  DataType dtype;
  Result<std::unique_ptr<Backend>> (*make)(const ModelConfig&, WeightSource&, const BackendOptions&);
  double logit_tolerance;
};

void PrintTo(const Golden& golden, std::ostream* out) {
  *out << golden.folder << (golden.dtype == DataType::BFloat16 ? " in bf16" : " in f32");
}

class BackendGolden : public testing::TestWithParam<Golden> {};

std::vector<TokenId> generate(Backend& backend, const std::vector<TokenId>& prompt, std::size_t count, Logits& first_logits) {
  const SamplingState greedy({.temperature = 0.0}, {}, backend.config().vocabulary);
  std::vector<BlockId> blocks;
  for (std::int32_t block = 0; block < 16; ++block) blocks.push_back({15 - block});
  std::vector<TokenId> output;
  std::vector<TokenId> pending = prompt;
  std::int32_t position = 0;
  StepResult result;
  while (output.size() < count) {
    const StepRow row{.position = position, .tokens = pending, .blocks = blocks, .sampling = &greedy};
    EXPECT_TRUE(backend.run(std::span(&row, 1), result));
    if (output.empty()) first_logits = result.logits;
    position += static_cast<std::int32_t>(pending.size());
    output.push_back(result.samples[0].token);
    pending = {output.back()};
  }
  return output;
}

TEST_P(BackendGolden, greedy_tokens_and_first_logits_are_reproduced) {
  const Golden& golden = GetParam();
  const std::filesystem::path folder = std::filesystem::path(RUBATO_SOURCE_DIR "/../shared/data/models") / golden.folder;
  if (!std::filesystem::exists(folder)) GTEST_SKIP() << folder << " is absent";
  const ModelConfig config = read_model_config(folder).value();
  const std::unique_ptr<WeightSource> weights = open_safetensors(folder).value();
  const BackendOptions options{.dtype = golden.dtype,
                               .block_count = 16,
                               .max_tokens_per_step = 64,
                               .max_rows = 1,
                               .max_model_len = 256,
                               .threads = 1,
                               .poison = true};
  const std::unique_ptr<Backend> backend = golden.make(config, *weights, options).value();
  backend->capture_logits(true);
  std::ifstream file(folder / "golden.json");
  const nlohmann::json answers = nlohmann::json::parse(file);
  for (const nlohmann::json& answer : answers.at("prompts")) {
    const auto want = answer.at("output_token_ids").get<std::vector<TokenId>>();
    const auto want_logits = answer.at("first_step_logits").get<std::vector<double>>();
    Logits logits;
    EXPECT_EQ(generate(*backend, answer.at("prompt_token_ids").get<std::vector<TokenId>>(), want.size(), logits), want);
    ASSERT_EQ(logits.size(), want_logits.size());
    for (std::size_t i = 0; i < want_logits.size(); ++i) EXPECT_NEAR(logits[i], want_logits[i], golden.logit_tolerance);
  }
}

// The BF16 model's smallest margin between the best two logits is 0.0025, less than BF16 arithmetic can promise; it is run in
// F32.
INSTANTIATE_TEST_SUITE_P(Stories, BackendGolden,
                         testing::Values(Golden{"stories260k", DataType::Float32, make_cpu_backend, 5e-4},
                                         Golden{"stories260k", DataType::Float32, make_reference_backend, 5e-4},
                                         Golden{"stories260k-bf16", DataType::Float32, make_cpu_backend, 5e-4},
                                         Golden{"stories260k-bf16", DataType::BFloat16, make_cpu_backend, 0.15},
                                         Golden{"stories260k-bf16", DataType::BFloat16, make_reference_backend, 5e-4}));

}  // namespace
}  // namespace rubato::engine
