// SPDX-License-Identifier: Apache-2.0
#include "tuner/acquisition.h"

#include <cmath>

namespace rubato::tuner {

namespace {

double normal_density(double z) {
  return std::exp(-0.5 * z * z) / std::sqrt(2.0 * M_PI);
}
double normal_cumulative(double z) {
  return 0.5 * std::erfc(-z / std::sqrt(2.0));
}

}  // namespace

double expected_improvement(const Prediction& prediction, double best) {
  const double gain = prediction.mean - best;
  if (prediction.variance <= 0) return std::max(0.0, gain);
  const double deviation = std::sqrt(prediction.variance);
  const double z = gain / deviation;
  return std::max(0.0, gain * normal_cumulative(z) + deviation * normal_density(z));
}

double probability_at_least(const Prediction& prediction, double floor) {
  if (prediction.variance <= 0) return prediction.mean >= floor ? 1.0 : 0.0;
  return normal_cumulative((prediction.mean - floor) / std::sqrt(prediction.variance));
}

double constrained_improvement(const Outcome& candidate, const AcquisitionOptions& options) {
  const double value = expected_improvement(candidate.score, options.best);
  if (!options.floor) return value;
  const double safe = probability_at_least(candidate.attainment, *options.floor);
  return safe < options.safe_probability_min ? 0.0 : value * safe;
}

}  // namespace rubato::tuner
