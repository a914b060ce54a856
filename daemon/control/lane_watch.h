// SPDX-License-Identifier: Apache-2.0
// What the Engine object shows of the lanes, and when: their numbers move with every step, and an object that moved along would
// be a new version for every reader and a conflict for every writer. So the object shows a sample, which is replaced at once when
// something of lasting meaning has changed and otherwise seldom. /metrics always has the numbers of the moment.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>

#include "daemon/control/events.h"
#include "daemon/control/wall_time.h"
#include "daemon/serving.h"

namespace rubato::control {

/// Not thread-safe; the reconciler's lock guards it.
class LaneWatch {
 public:
  /// Replaces the sample where it is due, and tells events of switches that have come to their end and copies that fail. Call it
  /// about every quarter of a second.
  void look(std::shared_ptr<const ServingStatus> status, TimePoint now, WallTime wall_now, EventLog& events);
  /// A window has closed: the object changes anyhow, so that a new sample is free.
  void window_closed() { window_closed_ = true; }

  /// Null until the first look.
  [[nodiscard]] const std::shared_ptr<const ServingStatus>& sample() const { return sample_; }

  /// How old a sample may become while numbers move: longer than a usual window, so that with traffic there is one version per
  /// window and not two.
  static constexpr std::chrono::seconds sample_age_max{20};
  /// The same while sequences move to where they belong after a switch.
  static constexpr std::chrono::seconds sample_age_max_switching{1};
  /// The same once everything has ended.
  static constexpr std::chrono::seconds sample_age_max_idle{2};
  static constexpr std::chrono::minutes failure_event_pause{1};

 private:
  void watch_switches(const ServingStatus& status, WallTime wall_now, EventLog& events);
  void watch_failures(const ServingStatus& status, TimePoint now, WallTime wall_now, EventLog& events);
  [[nodiscard]] bool due(const ServingStatus& status, TimePoint now) const;

  std::shared_ptr<const ServingStatus> sample_;
  TimePoint sampled_at_{};
  bool window_closed_ = false;

  // As of the last look at which no switch was under way.
  policies::HandoffCounts settled_;
  KnobValues settled_knobs_;
  bool switching_ = false;

  std::uint64_t failures_seen_ = 0;
  std::optional<TimePoint> failure_told_;
};

}  // namespace rubato::control
