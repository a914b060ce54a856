// SPDX-License-Identifier: Apache-2.0
// Keeps the twin out of the way of serving: its work stays within a share of one core, and ends at once when steps run late
// because of it, when the daemon stops, or when the question has changed.
#pragma once

#include <cstdint>
#include <functional>
#include <mutex>
#include <optional>
#include <string_view>

#include "manifests/result.h"
#include "policies/time.h"

namespace rubato {

enum class TwinWork : std::uint8_t { Idle, Working };

/// Do steps run late, and because of the twin? The lanes' threads tell it of each step, the tuning thread when the twin works,
/// and asks. A step is late when it took half as long again as predicted (and not just a moment), or when it alone broke the ITL
/// target although the prediction did not. Some steps are late on any machine: only what is well above the share of late steps
/// while the twin was idle is laid to its charge, so that a noisy machine does not lock it out. One step that took several times
/// as long as predicted is enough by itself. Thread-safe; no call waits for more than a few operations.
class LateSteps {
 public:
  void set_itl_target(Duration target);
  /// decode_rows: that the step had; a step without one breaks nobody's ITL.
  void on_step(std::int32_t decode_rows, Duration predicted, Duration took);

  /// Looks at steps that end from here on.
  void set_twin_work(TwinWork work);
  /// Only ever true while the twin works.
  [[nodiscard]] bool late() const;

  static constexpr int steps_looked_at = 16;  // the last so many since the twin began
  static constexpr int late_steps_min = 4;    // of them, before it is blamed

 private:
  [[nodiscard]] bool is_late(std::int32_t decode_rows, Duration predicted, Duration took) const;

  mutable std::mutex mutex_;
  Duration itl_target_{};  // zero: none
  TwinWork work_ = TwinWork::Idle;
  std::uint32_t recent_ = 0;    // while working: one bit a step, the newest lowest
  std::int32_t seen_ = 0;       // while working, at most steps_looked_at
  double idle_late_share_ = 0;  // recent, 0..1
  bool far_too_late_ = false;   // one step, since the twin began
};

/// Why the twin was told to end.
enum class TwinStop : std::uint8_t {
  Stopping,     // the daemon stops, or serving drains or has failed
  Superseded,   // what is asked has changed
  ServingLate,  // steps run late
  HeldOff,      // they did a moment ago
  TimeUp,       // it has worked for work_max
};
[[nodiscard]] std::string_view to_string(TwinStop stop);

/// What the pace reads and does. Injected, so that tests run on clocks of their own.
struct TwinPaceHooks {
  std::function<TimePoint()> now;
  std::function<Duration()> thread_time;  // CPU time of the calling thread
  std::function<void(Duration)> sleep;    // of the calling thread
  std::function<bool()> stopping = {};    // asked at every look; cheap
  std::function<bool()> superseded = {};  // asked every superseded_interval
};

/// The twin's go_on. Not thread-safe; the tuning thread owns it.
class TwinPace {
 public:
  /// late must outlive it.
  TwinPace(TwinPaceHooks hooks, LateSteps& late);

  /// 1..100, of one core.
  void set_core_percent(std::int32_t percent) { core_percent_ = percent; }
  [[nodiscard]] std::int32_t core_percent() const { return core_percent_; }

  /// Between these two the twin may be asked; go_on() is then asked as often as it likes. Once false, it stays false until the
  /// next begin(). It sleeps in pieces of sleep_max, so that no end is noticed later than that.
  void begin();
  [[nodiscard]] bool go_on();
  void end();

  /// CPU time of all decisions in which the twin worked.
  [[nodiscard]] Duration cpu_used() const { return cpu_used_; }
  /// Why the work since begin() was ended; empty: it was not.
  [[nodiscard]] std::optional<TwinStop> stopped() const { return stopped_; }

  static constexpr Duration look_interval = std::chrono::milliseconds(1);
  static constexpr Duration superseded_interval = std::chrono::milliseconds(50);
  static constexpr Duration sleep_max = std::chrono::milliseconds(5);
  static constexpr Duration unused_max = std::chrono::milliseconds(20);  // of its share that it may catch up on
  static constexpr Duration work_max = std::chrono::seconds(30);
  /// After late steps nothing is simulated for so long: doubled each time, halved by work that could finish.
  static constexpr Duration hold_off_min = std::chrono::seconds(2);
  static constexpr Duration hold_off_max = std::chrono::seconds(60);

 private:
  [[nodiscard]] std::optional<TwinStop> reason_to_stop(TimePoint now);
  [[nodiscard]] bool keep_to_share(TimePoint now);
  [[nodiscard]] bool stop(TwinStop reason, TimePoint now);

  const TwinPaceHooks hooks_;
  LateSteps& late_;
  std::int32_t core_percent_ = 50;

  struct Work {
    TimePoint begin;
    Duration thread_time_at_begin{};
    TimePoint share_begin;         // the share is counted from here on
    Duration share_thread_time{};  // thread time at share_begin
    TimePoint looked_at;
    TimePoint superseded_at;  // when that was asked last
  };
  std::optional<Work> work_;
  std::optional<TwinStop> stopped_;
  Duration cpu_used_{};
  Duration hold_off_ = hold_off_min;
  std::optional<TimePoint> held_until_;
};

/// CPU time of the calling thread.
[[nodiscard]] Duration thread_cpu_time();
/// nice 10 for the calling thread alone. Internal: the system said no.
[[nodiscard]] Result<void> lower_thread_priority();

}  // namespace rubato
