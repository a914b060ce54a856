// SPDX-License-Identifier: Apache-2.0
// Time as the decision code sees it: a value handed in, never asked for. The daemon feeds it from a steady clock, the twin and
// the simulation tests from virtual time.
#pragma once

#include <chrono>

#include "manifests/units.h"

namespace rubato {

/// A clock without now(): only its time_point is used, so that no room but daemon/ can read a clock by accident.
struct Timeline {
  using duration = Duration;
  using rep = duration::rep;
  using period = duration::period;
  using time_point = std::chrono::time_point<Timeline, duration>;
  static constexpr bool is_steady = true;
};

using TimePoint = Timeline::time_point;

[[nodiscard]] constexpr double to_seconds(Duration duration) {
  return std::chrono::duration<double>(duration).count();
}
[[nodiscard]] constexpr double to_milliseconds(Duration duration) {
  return std::chrono::duration<double, std::milli>(duration).count();
}
[[nodiscard]] constexpr Duration from_seconds(double seconds) {
  return std::chrono::duration_cast<Duration>(std::chrono::duration<double>(seconds));
}

}  // namespace rubato
