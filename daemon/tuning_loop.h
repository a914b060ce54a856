// SPDX-License-Identifier: Apache-2.0
// The tuning loop: feeds the twin and the watch over the load, cuts live traffic into windows, asks the tuner what comes next and
// makes it current through the control side. It owns the order of settling, measuring and deciding; what to decide is the
// tuner's, what is allowed is the control side's.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "daemon/control/tuning_target.h"
#include "daemon/latency_windows.h"
#include "daemon/twin_feed.h"
#include "daemon/twin_pace.h"
#include "tuner/load_watch.h"
#include "tuner/tuner.h"
#include "tuner/twin/twin.h"

namespace rubato {

struct TuningLoopOptions {
  std::string model_key;
  Duration wall_at_zero{};                     // time since 1970 at TimePoint{}
  tuner::TwinOptions twin{};                   // but for the objectives, which are the target's
  std::filesystem::path calibration;           // the twin's step times are kept there; empty: nowhere
  TwinPaceHooks pace;                          // but for superseded, which is the loop's
  std::function<std::string()> unavailable{};  // why nothing can be tried or concluded now; an empty text: serving is well
};

/// Core without a thread: tick() is called with the time. The tuning thread owns it. A tick may take as long as the twin may work
/// (TwinPace), and ends soon after pace.stopping has become true.
class TuningLoop {
 public:
  /// journal may be null. All must outlive the loop.
  TuningLoop(control::TuningTarget& target, LatencyWindows& windows, TwinFeed& feed, tuner::Journal* journal,
             TuningLoopOptions options, TimePoint now);

  /// Does what is due at now: follows changed targets and the state of serving, answers a change of load at once, opens a window
  /// once settled, looks into it about once a second, closes it when it is long enough and holds enough requests (or has waited
  /// four times as long), and acts on the tuner's decision.
  void tick(TimePoint now);
  /// Keeps what would be lost with the process.
  void stop(TimePoint now);

  static constexpr Duration progress_interval = std::chrono::seconds(1);
  static constexpr Duration calibration_interval = std::chrono::minutes(1);
  /// A lane tells of an arrival at its next step only. The watch over the load is told so much later, to hear everything in
  /// order.
  static constexpr Duration watch_lag = std::chrono::milliseconds(500);

 private:
  struct LoadEvent {
    enum class Kind : std::uint8_t { Arrived, Ended };
    TimePoint time;
    Kind kind = Kind::Arrived;
    std::int32_t tokens = 0;
  };

  [[nodiscard]] tuner::TunerOptions options_for(const control::TuningInput& input) const;
  [[nodiscard]] TwinPaceHooks pace_hooks();
  void follow_input(const control::TuningInput& input);
  void take_feed(TimePoint now);
  void tell_watch(TimePoint now);
  void decide(TimePoint now);
  [[nodiscard]] bool follow_serving(TimePoint now);
  [[nodiscard]] bool ready_to_measure(TimePoint now);
  [[nodiscard]] bool answer_alarm(TimePoint now);
  [[nodiscard]] bool look_into_window(TimePoint now);
  void close_window(TimePoint now);
  void act(const tuner::Decision& decision, TimePoint now);
  void act_early(const tuner::Decision& decision, TimePoint now);
  void settle(TimePoint now);
  void report(std::optional<tuner::Window> window);
  void load_calibration();
  void save_calibration();

  control::TuningTarget& target_;
  LatencyWindows& windows_;
  TwinFeed& feed_;
  const TuningLoopOptions options_;
  std::uint64_t revision_ = 0;
  TuningSpec tuning_;
  tuner::Twin twin_;
  std::optional<tuner::LoadWatch> watch_;  // never empty; the tuner keeps its address
  TwinPace pace_;
  tuner::Tuner tuner_;

  FeedBatch batch_;
  std::vector<LoadEvent> load_events_;  // that the watch has not been told yet, in order of time
  TimePoint watched_until_;
  std::optional<tuner::LoadAlarm> alarm_;

  std::uint64_t settings_number_ = 0;
  TimePoint changed_;                    // since when the current settings run
  std::optional<TimePoint> settled_at_;  // while settling: when the next window opens
  TimePoint opened_;
  TimePoint looked_at_;
  bool frozen_ = false;

  TimePoint calibration_kept_at_;
  std::uint64_t steps_kept_ = 0;  // that the file knows
  bool calibration_failed_ = false;
};

}  // namespace rubato
