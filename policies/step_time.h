// SPDX-License-Identifier: Apache-2.0
// The online step-time model: how long a step with these rows will take. Recursive least squares on the features that dominate a
// transformer step, kept per lane. Policy Deadline asks it every step; the twin starts its lanes with copies of it.
#pragma once

#include <array>
#include <cstdint>

#include "policies/time.h"

namespace rubato::policies {

/// What a step costs, summed over its rows. Additive: a planner adds a row's share and asks again.
struct StepFeatures {
  std::int32_t tokens = 0;        // all tokens of the step
  std::int32_t decode_rows = 0;   // rows of one token that samples
  std::int32_t prefill_rows = 0;  // chunk rows
  double attention = 0;           // sum over chunks of count * (begin + count): query-key pairs of prefill work
  double context = 0;             // sum over decode rows of their context length: KV tokens read

  void add_decode(std::int32_t context_tokens);
  void add_chunk(std::int32_t begin, std::int32_t count);
  void remove_chunk(std::int32_t begin, std::int32_t count);
};

/// Recursive least squares over [1, tokens, attention, decode_rows, context], on relative errors, so that short decode steps
/// count as much as long prefill steps. It forgets only in the direction of what it sees: after an hour of decodes alone it still
/// knows what a prefill costs, and constant input cannot wind it up. The coefficients in use are the best non-negative ones, so
/// predictions never fall when work is added. Cost of observe() and predict(): constant, no allocation.
class StepTimeModel {
 public:
  StepTimeModel();

  static constexpr int coefficient_count = 5;
  using Vector = std::array<double, coefficient_count>;
  using Matrix = std::array<Vector, coefficient_count>;

  /// A model that starts from what is known already, as a calibration file tells: coefficients() and spread() are these until it
  /// observes. It believes them like some 16 steps of its own, so that a machine that differs is learnt within a few dozen. Each
  /// coefficient is finite and not negative, the spread not negative. Nothing but zeros says nothing: a model that knows nothing.
  [[nodiscard]] static StepTimeModel from_coefficients(const Vector& coefficients, Duration spread);

  /// Feeds one executed step. Steps far outside the model's spread count less (a page fault, a stolen core). Non-positive
  /// durations are ignored: the model stays exactly as it is.
  void observe(const StepFeatures& features, Duration duration);

  /// Expected duration, at least 0. Before the first observation: a fixed, pessimistic guess per token.
  [[nodiscard]] Duration predict(const StepFeatures& features) const;

  /// Most tokens, at most max_count, that a chunk starting at position begin may add to the step so that predict() stays within
  /// limit.
  [[nodiscard]] std::int32_t largest_chunk(const StepFeatures& step, std::int32_t begin, std::int32_t max_count,
                                           Duration limit) const;

  /// Root mean square of recent prediction errors, outliers at their reduced weight.
  [[nodiscard]] Duration spread() const;

  /// By how much recent steps with prefills took longer than predicted, relative to that: the standard deviation where errors are
  /// even on both sides; more where the model is too fast for them, less where it is too slow.
  [[nodiscard]] double relative_overrun() const;

  [[nodiscard]] std::uint64_t observation_count() const { return observation_count_; }

  /// Seconds per unit of each feature, in the order of the class comment; none is negative.
  [[nodiscard]] Vector coefficients() const { return coefficients_; }

 private:
  void learn(const Vector& relative_input, double relative_error, double weight);
  [[nodiscard]] bool speed_has_changed(double relative_error, double bound);

  Vector estimate_{};      // per scaled feature, may be negative
  Matrix information_{};   // inverse covariance of estimate_, in units of the relative error
  Vector coefficients_{};  // per feature, the best non-negative ones
  double relative_variance_ = 0;
  std::int32_t surprises_ = 0;  // in a row: above zero for steps that took too long, below for too short ones
  double error_variance_ = 0;   // seconds squared
  double overrun_variance_ = 0;
  std::uint64_t prefill_count_ = 0;  // steps that it was learnt from
  std::uint64_t observation_count_ = 0;
};

}  // namespace rubato::policies
