// SPDX-License-Identifier: Apache-2.0
// The tuning loop: cuts live traffic into windows, asks the tuner what comes next and makes it current through the control side.
// It owns the order of settling, measuring and deciding; what to decide is the tuner's, what is allowed is the control side's.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "daemon/control/tuning_target.h"
#include "daemon/latency_windows.h"
#include "tuner/tuner.h"

namespace rubato {

/// Core without a thread: tick() is called with the time. The tuning thread owns it.
class TuningLoop {
 public:
  /// journal may be null. All must outlive the loop.
  TuningLoop(control::TuningTarget& target, LatencyWindows& windows, tuner::Journal* journal, std::string model_key,
             TimePoint now);

  /// Does what is due at now: follows changed targets, opens a window once settled, closes it when it is long enough and holds
  /// enough requests (or has waited four times as long), and acts on the tuner's decision.
  void tick(TimePoint now);

 private:
  [[nodiscard]] tuner::TunerOptions options_for(const control::TuningInput& input) const;
  void act(const tuner::Decision& decision, TimePoint now);
  void report(std::optional<tuner::Window> window);

  control::TuningTarget& target_;
  LatencyWindows& windows_;
  const std::string model_key_;
  std::uint64_t revision_ = 0;
  TuningSpec tuning_;
  tuner::Tuner tuner_;
  std::uint64_t settings_number_ = 0;
  TimePoint changed_;                    // since when the current settings run
  std::optional<TimePoint> settled_at_;  // while settling: when the next window opens
  TimePoint opened_;
};

}  // namespace rubato
