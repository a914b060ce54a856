// SPDX-License-Identifier: Apache-2.0
// Constrained expected improvement: which candidate promises most over the best known score, weighed by the chance that it keeps
// attainment at a floor. A sweep over a given candidate set, so that every proposal is legal and the same inputs give the same
// answer.
#pragma once

#include <cstddef>
#include <optional>
#include <span>

#include "tuner/gaussian_process.h"

namespace rubato::tuner {

/// E[max(0, f - best)] for f ~ N(mean, variance).
[[nodiscard]] double expected_improvement(const Prediction& prediction, double best);

/// P(f >= floor) for f ~ N(mean, variance).
[[nodiscard]] double probability_at_least(const Prediction& prediction, double floor);

struct AcquisitionOptions {
  double best = 0;  // score to improve on
  double safe_probability_min =
      0.2;                        // candidates less likely to keep the floor are worth nothing; 0.5: none is predicted below it
  std::optional<double> floor{};  // lowest predicted attainment (transformed as the constraint process is); empty: no constraint
};

/// What is predicted of one candidate.
struct Outcome {
  Prediction score;
  Prediction attainment;  // transformed as the constraint process is
};

struct Pick {
  std::size_t index = 0;  // into the candidates
  double value = 0;       // constrained expected improvement
};

/// The constrained expected improvement of one candidate.
[[nodiscard]] double constrained_improvement(const Outcome& candidate, const AcquisitionOptions& options);

/// The candidate of the largest constrained expected improvement, the first of equals. Empty without candidates.
[[nodiscard]] std::optional<Pick> pick_best(std::span<const Outcome> candidates, const AcquisitionOptions& options);

}  // namespace rubato::tuner
