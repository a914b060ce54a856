// SPDX-License-Identifier: Apache-2.0
// Judgements on evidence: are the objectives met, and is a trial better or worse than the incumbent beyond what chance explains.
// Pure functions; what follows from a judgement is decided in tuner.cpp.
#pragma once

#include <cstdint>
#include <string>

#include "manifests/engine_spec.h"
#include "tuner/evidence.h"

namespace rubato::tuner {

enum class Verdict : std::uint8_t {
  Met,      // the share of good requests is at the objective
  Unclear,  // below it, but chance explains that
  Missed,   // below it beyond chance
};

enum class Comparison : std::uint8_t { Better, Similar, Worse };

/// P(X <= successes) for X ~ Binomial(count, probability).
[[nodiscard]] double binomial_at_most(std::int32_t successes, std::int32_t count, double probability);

[[nodiscard]] Verdict judge(const Evidence& evidence, const ObjectivesSpec& objectives);

/// Worse: attainment or score lower beyond noise, or newly saturated without being better. Better: score higher beyond noise at
/// no lower attainment.
[[nodiscard]] Comparison compare(const Evidence& trial, const Evidence& incumbent);

/// The target that stands in the way: "the TTFT target of 500 ms", "the ITL target of 50 ms" or both.
[[nodiscard]] std::string missed_target(const Evidence& evidence, const ObjectivesSpec& objectives);

}  // namespace rubato::tuner
