// SPDX-License-Identifier: Apache-2.0
// Live traffic cut into windows for the tuner, by the rules of tuner/window_cut.h.
#pragma once

#include <cstdint>
#include <mutex>
#include <unordered_map>

#include "daemon/observer.h"
#include "tuner/tuner.h"
#include "tuner/window_cut.h"

namespace rubato {

/// The lane thread writes through Observer, the tuning thread opens and closes windows. One mutex, held for appends, and for
/// copies of the samples; percentiles are taken outside of it.
class LatencyWindows final : public Observer {
 public:
  /// samples_max bounds each kind of sample per window; once full, every further one replaces a pseudo-random earlier one.
  explicit LatencyWindows(std::size_t samples_max = 1 << 16);

  void on_request(std::int32_t choices) override;
  void on_arrival(const Arrival& arrival) override;
  void on_rejected(TimePoint now, std::int32_t choices) override;
  void on_token_gap(SequenceId id, Duration gap) override;
  void on_first_token(const Arrival& arrival, Duration ttft) override;
  void on_request_end(const RequestRecord& record) override;
  void on_step(const engine::StepRecord& record, const policies::SchedulerCounts& counts) override;
  void on_settings(const Settings& settings, TimePoint now) override;

  /// Drops what has been sampled and starts anew at now. Only requests that arrived at or after `since` are judged and sampled:
  /// those from before a change of settings carry the old settings' delays.
  void open(TimePoint now, TimePoint since);
  /// True when other settings have become current since open() or close().
  [[nodiscard]] bool settings_changed() const;
  /// Requests judged since open(), unfinished ones past a target not counted.
  [[nodiscard]] std::int32_t judged_so_far() const;
  /// The window from open() to now; sampling goes on until the next open().
  [[nodiscard]] tuner::Window close(TimePoint now);
  /// The open window, as close() would give it; nothing is closed, and no request is counted by it.
  [[nodiscard]] tuner::Window so_far(TimePoint now) const;

 private:
  mutable std::mutex mutex_;
  tuner::WindowCut cut_;
  std::unordered_map<SequenceId, tuner::WindowCut::Place> in_flight_;
};

}  // namespace rubato
