// SPDX-License-Identifier: Apache-2.0
// The online step-time model: how long a step with these rows will take. Recursive least squares on the features that dominate a
// transformer step, kept per lane. Policy Deadline asks it every step; the twin (later) simulates with it.
#pragma once

#include <array>
#include <cstdint>

#include "policies/time.h"

namespace rubato::policies {

/// What a step costs, summed over its rows. Additive: a planner adds a row's share and asks again.
struct StepFeatures {
  std::int32_t tokens = 0;         // all tokens of the step
  std::int32_t decode_rows = 0;    // rows of one token that samples
  std::int32_t prefill_rows = 0;   // chunk rows
  double attention = 0;            // sum over chunks of count * (begin + count): query-key pairs of prefill work
  double context = 0;              // sum over decode rows of their context length: KV tokens read

  void add_decode(std::int32_t context_tokens);
  void add_chunk(std::int32_t begin, std::int32_t count);
};

/// Least squares with forgetting over [1, tokens, attention, decode_rows, context]; coefficients are kept non-negative on use, so that
/// predictions never fall when work is added. Cost of observe() and predict(): constant, no allocation.
class StepTimeModel {
 public:
  StepTimeModel();

  /// Feeds one executed step. Steps far outside the model's spread count less (a page fault, a stolen core). Non-positive or
  /// non-finite durations are ignored.
  void observe(const StepFeatures& features, Duration duration);

  /// Expected duration, at least 0. Before the first observation: a fixed, pessimistic guess per token.
  [[nodiscard]] Duration predict(const StepFeatures& features) const;

  /// Root mean square of recent prediction errors.
  [[nodiscard]] Duration spread() const;

  [[nodiscard]] std::uint64_t observation_count() const { return observation_count_; }

  /// Seconds per unit of each feature, in the order of the class comment.
  static constexpr int coefficient_count = 5;
  [[nodiscard]] std::array<double, coefficient_count> coefficients() const;

 private:
  std::array<double, coefficient_count> coefficients_{};
  std::array<std::array<double, coefficient_count>, coefficient_count> covariance_{};
  double error_variance_ = 0;
  std::uint64_t observation_count_ = 0;
};

}  // namespace rubato::policies
