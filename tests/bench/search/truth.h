// SPDX-License-Identifier: Apache-2.0
// What the studied engine really costs: a roofline of an 8B BF16 model on one H200 with overheads and scatter, and the ways in
// which it may differ from what somebody expected.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "tuner/twin/simulation.h"

namespace rubato::study {

enum class TruthKind : std::uint8_t { Nominal, Faster, Slower, NoAttention, Overhead, Drift, Quirk };

[[nodiscard]] const std::vector<TruthKind>& all_truths();
[[nodiscard]] std::string name_of(TruthKind kind);
[[nodiscard]] std::optional<TruthKind> truth_named(const std::string& name);

/// Seconds. A step takes launch + the larger of weights and tokens * token + attention * pair + context * kv + decode rows * row,
/// times the factors and a lognormal draw. Steps that run in a shape pay for all its tokens.
struct Roofline {
  double launch = 1.2e-3;
  double weights = 4.3e-3;  // 16.1 GB at 3.75 TB/s: a step of few tokens costs no less
  double token = 26e-6;     // 16.1 GFLOP at 620 TFLOP/s
  double pair = 1.2e-9;     // 0.52 MFLOP, half of them behind the causal mask, at 220 TFLOP/s
  double kv = 36e-9;        // 131 kB at 3.6 TB/s
  double row = 4e-6;        // sampling and bookkeeping
  double scatter = 0.03;    // standard deviation of the log
  double factor = 1;        // on everything
  double drift_per_hour = 0;
  std::int32_t quirk_bucket = 0;  // steps in this shape, or, without shapes, within an eighth below, take quirk_factor as long
  double quirk_factor = 1;
};

[[nodiscard]] Roofline roofline(TruthKind kind);

class Truth final : public tuner::StepCost {
 public:
  explicit Truth(TruthKind kind) : roofline_(roofline(kind)) {}
  [[nodiscard]] Duration duration(const tuner::SimulatedStep& step) const override;

 private:
  Roofline roofline_;
};

/// The value that a standard normal variable stays below with this probability, 0 < probability < 1; error below 5e-4.
[[nodiscard]] double normal_quantile(double probability);

}  // namespace rubato::study
