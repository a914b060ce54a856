// SPDX-License-Identifier: Apache-2.0
// One lane alone, for callers with one backend and one thread: benches, golden runs, tests.
#pragma once

#include "engine/lanes.h"

namespace rubato::engine {

struct LaneOptions {
  policies::SchedulerLimits limits;
  Settings initial;
};

/// Lanes with a single one. Not thread-safe; one thread calls everything.
class Lane {
 public:
  /// backend must outlive the lane.
  Lane(Backend& backend, const LaneOptions& options)
      : lanes_({&backend}, {.limits = {.each = options.limits}, .initial = options.initial}) {}

  Result<void> add(Request request) { return lanes_.add(std::move(request)); }
  bool cancel(SequenceId id) { return lanes_.cancel(id); }
  void apply(const Settings& settings) { lanes_.apply(settings, TimePoint{}); }

  /// Plans, runs and books one step. False when there was nothing to do. now() is called three times.
  template <class Clock>
  bool step(Clock&& now) {
    if (!lanes_.begin_step(only, now())) return false;
    lanes_.run_step(only, now());
    lanes_.end_step(only, now());
    return true;
  }

  [[nodiscard]] std::span<const TokenEvent> events() const { return lanes_.events(only); }
  [[nodiscard]] const StepRecord& record() const { return lanes_.record(only); }
  [[nodiscard]] const std::optional<Error>& failure() const { return lanes_.failure(); }
  [[nodiscard]] const policies::LaneGroup& group() const { return lanes_.group(); }
  [[nodiscard]] policies::SchedulerCounts counts() const { return lanes_.group().counts(only).scheduler; }
  [[nodiscard]] Backend& backend() { return lanes_.backend(only); }
  [[nodiscard]] Lanes& lanes() { return lanes_; }
  void check_integrity() const { lanes_.check_integrity(); }

 private:
  static constexpr LaneIndex only{0};
  Lanes lanes_;
};

}  // namespace rubato::engine
