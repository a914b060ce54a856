// SPDX-License-Identifier: Apache-2.0
// Synthetic models with recurrent layers do real work: their logits stay finite and in proportion, and what came first is still
// felt much later.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "engine/model/config.h"
#include "engine/model/weights.h"
#include "engine/reference/backend.h"
#include "manifests/names.h"
#include "manifests/settings.h"

namespace rubato::engine {
namespace {

constexpr std::int32_t length = 200;

SyntheticModel small(Architecture architecture) {
  SyntheticModel model{.architecture = architecture, .hidden_size = 64, .layers = 8, .vocabulary = 128};
  model.mamba_head_size = 16;
  model.mamba_groups = 2;
  model.state_size = 32;
  if (architecture == Architecture::Hybrid) model.heads = 4, model.kv_heads = 2, model.feed_forward = 96;
  return model;
}

/// Logits after the last of length tokens, of which the first is given.
std::vector<float> last_logits(const ModelConfig& config, TokenId first) {
  const auto weights = make_synthetic_weights(config, 1, DataType::Float32);
  auto backend = make_reference_backend(
      config, *weights,
      {.block_count = 16, .state_count = 1, .max_tokens_per_step = length, .max_rows = 1, .max_model_len = length});
  EXPECT_TRUE(backend) << backend.error().message;
  (*backend)->capture_logits(true);
  std::vector<TokenId> tokens(static_cast<std::size_t>(length));
  for (std::size_t i = 0; i < tokens.size(); ++i) tokens[i] = static_cast<TokenId>((i * 37 + i * i) % 128);
  tokens[0] = first;
  std::vector<BlockId> blocks;
  for (std::int32_t block = 0; block * kv_block_tokens < length; ++block) blocks.push_back({block});
  const SamplingState sampling({.temperature = 0.0}, {}, config.vocabulary);
  StepRow row{.position = 0, .tokens = tokens, .blocks = blocks, .sampling = &sampling};
  row.state = StateUse{.from = {}, .to = StateId{0}, .save = {}};
  StepResult result;
  EXPECT_TRUE((*backend)->run(std::vector<StepRow>{row}, result));
  return result.logits;
}

class Recurrent : public testing::TestWithParam<Architecture> {};

TEST_P(Recurrent, synthetic_logits_are_finite_and_remember_the_first_token) {
  const ModelConfig config = *synthetic_model_config(small(GetParam()));
  const std::vector<float> one = last_logits(config, 5);
  const std::vector<float> two = last_logits(config, 6);
  double most = 0;
  double change = 0;
  for (std::size_t i = 0; i < one.size(); ++i) {
    ASSERT_TRUE(std::isfinite(one[i]));
    most = std::max(most, std::abs(static_cast<double>(one[i])));
    change = std::max(change, std::abs(static_cast<double>(one[i]) - static_cast<double>(two[i])));
  }
  EXPECT_GT(most, 0.5);
  EXPECT_LT(most, 50);
  EXPECT_GT(change, 1e-3 * most);
}

INSTANTIATE_TEST_SUITE_P(Architectures, Recurrent, testing::Values(Architecture::Mamba2, Architecture::Hybrid),
                         [](const auto& each) { return std::string(to_string(each.param)); });

}  // namespace
}  // namespace rubato::engine
