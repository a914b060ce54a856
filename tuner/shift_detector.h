// SPDX-License-Identifier: Apache-2.0
// Has the load moved? Two-sided CUSUM tests (Page 1954) on the logarithms of arrival rate, prompt length and output length and on
// the transformed attainment, each scaled by the noise that the window's request count implies.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>

#include "tuner/evidence.h"
#include "tuner/tuner.h"

namespace rubato::tuner {

/// What moved, and from where to where.
struct Shift {
  std::string feature;  // "arrival rate", "prompt length", "output length", "attainment", "burstiness"
  double before = 0;    // in the feature's own unit: per second, tokens, percent, e-folds between intervals
  double after = 0;
  /// What clients send has changed, not only how well they are served.
  [[nodiscard]] bool of_load() const { return feature != "attainment"; }
  [[nodiscard]] std::string text() const;  // `arrival rate moved from 4 to 8.1 per second`
};

/// Whether this window's attainment can be compared with those before it. Under a trial it cannot.
enum class SameSettings : std::uint8_t { Yes, No };

/// Calm: no more than about one false alarm in 1000 steady windows. Quick: a doubling shows within two windows of 40 requests.
/// After an alarm it starts anew from the window that raised it.
class ShiftDetector {
 public:
  /// Windows of fewer requests than the caller's minimum should not come here: their noise estimate is itself noise.
  std::optional<Shift> observe(const Window& window, const Evidence& evidence, SameSettings same_settings);

  /// The settings changed for good: the attainment starts a new baseline, the load features stay.
  void settings_changed();

  void reset();

 private:
  /// One feature's baseline and cumulative sums.
  struct Track {
    double baseline = 0;
    double baseline_variance = 0;  // of the estimate
    double scatter = 1;            // learnt ratio of seen to expected variance
    double up = 0;
    double down = 0;
    std::int32_t windows = 0;

    /// True when this value raises the alarm.
    bool observe(double value, double variance);
    void start(double value, double variance);
  };
  static constexpr std::size_t track_count = 4;
  std::array<Track, track_count> tracks_{};
};

}  // namespace rubato::tuner
