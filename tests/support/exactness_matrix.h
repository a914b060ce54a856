// SPDX-License-Identifier: Apache-2.0
// The whole matrix of the exactness contract on small models: every way to cut, place, interrupt and reuse a sequence, on any
// backend.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "engine/backend.h"
#include "engine/exactness.h"
#include "engine/model/config.h"
#include "engine/model/weights.h"

namespace rubato::test {

struct MatrixModel {
  std::string name;
  SyntheticModel synthetic;
};

/// One of each kind: attention, recurrent layers with shared B and C, and both.
inline std::vector<MatrixModel> matrix_models() {
  return {{"llama",
           {.architecture = Architecture::Llama,
            .hidden_size = 48,
            .layers = 2,
            .heads = 4,
            .kv_heads = 2,
            .head_size = 12,
            .feed_forward = 80,
            .vocabulary = 67}},
          {"mamba2",
           {.architecture = Architecture::Mamba2,
            .hidden_size = 40,
            .layers = 3,
            .mamba_heads = 6,
            .mamba_head_size = 12,
            .mamba_groups = 2,
            .state_size = 24,
            .vocabulary = 67}},
          {"hybrid",
           {.architecture = Architecture::Hybrid,
            .hidden_size = 48,
            .layers = 4,
            .heads = 4,
            .kv_heads = 2,
            .head_size = 12,
            .feed_forward = 64,
            .attention_every = 2,
            .mamba_heads = 4,
            .mamba_head_size = 16,
            .state_size = 16,
            .vocabulary = 67}}};
}

/// Every combination of the axes.
inline std::vector<engine::ExactnessCase> whole_matrix() {
  using Case = engine::ExactnessCase;
  std::vector<Case> cases;
  for (const std::int32_t chunk : {1 << 20, 1, 7, 64, 100, 256, 90}) {
    for (const std::int32_t company : {0, 32}) {
      for (const Case::Route route :
           {Case::Route::OneLane, Case::Route::TwoLanes, Case::Route::OtherPlace, Case::Route::OtherPool}) {
        for (const Case::Reuse reuse : {Case::Reuse::Nothing, Case::Reuse::HalfThePrompt, Case::Reuse::WholePrompt}) {
          for (const std::int32_t preemptions : {0, 2}) {
            for (const Case::Steps steps : {Case::Steps::Eager, Case::Steps::Shapes}) {
              cases.push_back({.chunk = chunk,
                               .chunks = chunk == 90 ? Case::Chunks::Random : Case::Chunks::Equal,
                               .company = company,
                               .route = route,
                               .reuse = reuse,
                               .preemptions = preemptions,
                               .share_percent = 10 + 40 * static_cast<std::int32_t>(cases.size() % 3),
                               .steps = steps});
            }
          }
        }
      }
    }
  }
  return cases;
}

/// A device of the matrix: its backends, and what they were made with.
struct MatrixDevice {
  std::vector<std::unique_ptr<engine::Backend>> backends;
  engine::ExactnessTarget target;
};

/// Sizes that leave room for 32 others on each of two lanes.
inline engine::BackendOptions matrix_options(const engine::ModelConfig& config, DataType dtype) {
  return {.dtype = dtype,
          .block_count = 256,
          .state_count = config.mamba2 ? 72 : 0,
          .max_tokens_per_step = 320,
          .max_rows = 40,
          .max_model_len = 320,
          .poison = true};
}

using MakeBackend = std::function<Result<std::unique_ptr<engine::Backend>>(const engine::ModelConfig&, engine::WeightSource&,
                                                                           const engine::BackendOptions&)>;

/// Two lanes on one device, and another device with the same weights.
inline MatrixDevice make_matrix_device(const MatrixModel& model, const engine::BackendOptions& options, const MakeBackend& make) {
  MatrixDevice device;
  const engine::ModelConfig config = *engine::synthetic_model_config(model.synthetic);
  for (int i = 0; i < 2; ++i) {
    const auto weights = engine::make_synthetic_weights(config, 7, options.dtype);
    Result<std::unique_ptr<engine::Backend>> backend = make(config, *weights, options);
    EXPECT_TRUE(backend) << backend.error().message;
    if (!backend) return device;
    device.backends.push_back(std::move(*backend));
  }
  Result<std::unique_ptr<engine::Backend>> sibling = device.backends[0]->make_sibling();
  EXPECT_TRUE(sibling) << sibling.error().message;
  if (!sibling) return device;
  device.backends.push_back(std::move(*sibling));
  device.target = {.lanes = {device.backends[0].get(), device.backends[2].get()},
                   .other_device = device.backends[1].get(),
                   .options = options,
                   .prompt_tokens = 270,
                   .new_tokens = 12,
                   .seed = 5};
  return device;
}

/// Runs the cases; all must give the bits of the reference.
inline void expect_exact(engine::ExactnessChecker& checker, const engine::ExactnessReference& reference,
                         const std::vector<engine::ExactnessCase>& cases) {
  for (const engine::ExactnessCase& way : cases) {
    ASSERT_TRUE(checker.applies(way)) << way.name();
    Result<std::optional<engine::ExactnessDifference>> difference = checker.run(way, reference);
    ASSERT_TRUE(difference) << way.name() << ": " << difference.error().message;
    EXPECT_FALSE(*difference) << way.name() << ": " << (*difference)->text();
  }
}

}  // namespace rubato::test
