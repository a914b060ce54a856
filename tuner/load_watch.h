// SPDX-License-Identifier: Apache-2.0
// Has the load moved? Watches single arrivals and ends, not windows: two-sided Page tests (Page 1954) on arrival rate,
// burstiness, prompt and output length, cut into slices of a second or more. Where one is suspicious, the Bayesian posterior of
// a single change within the last 256 slices (after Adams and MacKay 2007) confirms it and dates it. The rate of false alarms is
// given, the thresholds follow from it for requests that come independently or in bursts; a load whose rate wanders for tens of
// seconds raises more.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "policies/time.h"
#include "tuner/shift_detector.h"

namespace rubato::tuner {

struct LoadWatchOptions {
  double false_alarms_per_day = 1;  // under a load that does not move, over all features together; > 0
  Duration slice = std::chrono::seconds(1);
};

struct LoadAlarm {
  Shift shift;                // the feature that moved most, from where to where
  TimePoint since;            // most probable time of the change
  double probability = 0;     // posterior that there was one since then
  std::int32_t requests = 0;  // that came since
};

/// Not thread-safe. Deterministic. Constant memory; cost per slice bounded by the run lengths kept.
class LoadWatch {
 public:
  explicit LoadWatch(const LoadWatchOptions& options);
  ~LoadWatch();

  /// In order of time.
  void arrived(TimePoint at, std::int32_t prompt_tokens);
  void ended(TimePoint at, std::int32_t output_tokens);

  /// Closes the slices that are over. An alarm is given once; after it everything is learnt anew from `since` on. Silence is a
  /// load too: an engine without requests for long raises one alarm, not many.
  [[nodiscard]] std::optional<LoadAlarm> tick(TimePoint now);

  /// When the present load began, as far as is known: the last alarm's `since`, or the first arrival.
  [[nodiscard]] TimePoint phase_begin() const;
  /// Mean length of the phases between the last few alarms; empty before the second.
  [[nodiscard]] std::optional<Duration> phase_length() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace rubato::tuner
