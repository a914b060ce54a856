// SPDX-License-Identifier: Apache-2.0
// Exact samples of what live traffic got, cut into windows for the tuner. Requests that are still unfinished are judged by what
// they got so far: a saturated engine must not look good because only its easy requests finished, nor a good one bad because
// misses show early and long answers end late.
#pragma once

#include <cstdint>
#include <mutex>
#include <optional>
#include <unordered_map>
#include <vector>

#include "daemon/observer.h"
#include "manifests/engine_spec.h"
#include "tuner/tuner.h"

namespace rubato {

/// The lane thread writes through Observer, the tuning thread opens and closes windows. One mutex, held for appends only; closing
/// a window swaps the samples out first.
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

 private:
  struct InFlight {
    TimePoint arrival;
    Duration ttft_target{};
    Duration itl_target{};
    std::optional<Duration> ttft{};
    std::int32_t gaps = 0;
    std::int32_t wide_gaps = 0;  // above the target
    bool counted = false;        // already judged a miss in an earlier window; not judged again

    /// Nearest rank over its own gaps so far, as at its end.
    [[nodiscard]] bool itl_missed() const { return gaps - wide_gaps < (gaps * 99 + 99) / 100; }
  };
  struct Samples {
    std::vector<Duration> ttft;
    std::vector<Duration> itl;
    std::vector<TimePoint> arrivals;
    std::int64_t prompt_tokens = 0;
    std::int64_t output_tokens = 0;
    std::int32_t arrival_count = 0;
    std::int32_t finished = 0;
    std::int32_t judged = 0;
    std::int32_t good = 0;
    std::int32_t rejected = 0;
    std::int32_t ttft_misses = 0;
    std::int32_t itl_misses = 0;
    std::int32_t waiting_begin = 0;
  };

  void keep(std::vector<Duration>& samples, Duration sample);
  void judge_unfinished(InFlight& request, TimePoint now, tuner::Window& window);

  const std::size_t samples_max_;
  mutable std::mutex mutex_;
  Samples samples_;
  std::unordered_map<SequenceId, InFlight> in_flight_;
  TimePoint opened_{};
  TimePoint since_{};
  std::uint64_t settings_number_ = 0;
  bool settings_changed_ = false;
  std::int32_t waiting_ = 0;
  std::uint64_t replacement_state_ = 1;
};

}  // namespace rubato
