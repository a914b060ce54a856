// SPDX-License-Identifier: Apache-2.0
// Constrained expected improvement: how much a candidate promises over the best known score, weighed by the chance that it keeps
// attainment at a floor.
#pragma once

#include <optional>

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

/// The constrained expected improvement of one candidate.
[[nodiscard]] double constrained_improvement(const Outcome& candidate, const AcquisitionOptions& options);

}  // namespace rubato::tuner
