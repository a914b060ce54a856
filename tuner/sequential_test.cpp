// SPDX-License-Identifier: Apache-2.0
#include "tuner/sequential_test.h"

#include <algorithm>
#include <cmath>

namespace rubato::tuner {

bool already_worse(std::int32_t misses, std::int32_t judged, double incumbent_miss_share, const SequentialTestOptions& options) {
  if (judged < options.judged_min) return false;
  // A share of zero was measured on finitely many requests; taken literally one miss would prove everything.
  const double as_good = std::clamp(incumbent_miss_share, 0.02, 1.0);
  const double worse = as_good + options.harm;
  if (worse >= 1) return false;  // nothing left to lose that could be told apart
  const double missed = misses / options.dispersion;
  const double kept = (judged - misses) / options.dispersion;
  const double evidence = missed * std::log(worse / as_good) + kept * std::log((1 - worse) / (1 - as_good));
  return evidence >= std::log(1 / options.false_alarm);
}

}  // namespace rubato::tuner
