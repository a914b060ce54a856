// SPDX-License-Identifier: Apache-2.0
// What a window measures, defined once: the daemon cuts live traffic with it, the simulation its own. Exact samples; requests
// that are still unfinished are judged by what they got so far: a saturated engine must not look good because only its easy
// requests finished, nor a good one bad because misses show early and long answers end late.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "policies/time.h"
#include "tuner/tuner.h"

namespace rubato::tuner {

/// What one request has got so far.
struct RequestSoFar {
  TimePoint arrival;
  Duration ttft_target{};
  Duration itl_target{};
  std::optional<Duration> ttft{};
  std::int32_t gaps = 0;
  std::int32_t wide_gaps = 0;  // above the target
  bool counted = false;        // already judged a miss in an earlier window; not judged again

  void first_token(Duration since_arrival) { ttft = since_arrival; }
  /// Between two tokens.
  void gap(Duration length) {
    ++gaps;
    wide_gaps += length > itl_target ? 1 : 0;
  }
  /// By nearest rank over its own gaps so far, as at its end.
  [[nodiscard]] bool itl_missed() const { return gaps - wide_gaps < (gaps * 99 + 99) / 100; }
};

/// One request at its end.
struct EndedRequest {
  TimePoint arrival;
  Duration ttft{};  // its age at the end where it got no token
  Duration itl_p99{};
  std::int32_t output_tokens = 0;
  bool ttft_missed = false;
  bool itl_missed = false;
  bool good = false;
};

/// A window whose percentiles have yet to be taken: what has to be copied under a lock, so that measure() need not run under it.
struct WindowSamples {
  Window window;  // all that needs no sorting
  std::vector<Duration> ttft;
  std::vector<Duration> itl;
  std::vector<TimePoint> arrivals;
};

/// Percentiles (nearest rank) and the variation of the intervals between arrivals.
[[nodiscard]] Window measure(WindowSamples samples);

/// Not thread-safe. Memory: samples_max samples of each kind, and a record per request in flight.
class WindowCut {
 public:
  /// Where a request's record is: from arrived() until it has ended. Reused.
  struct Place {
    std::uint32_t value = 0;
  };

  /// samples_max bounds each kind of sample per window; once full, every further one replaces a pseudo-random earlier one.
  explicit WindowCut(std::size_t samples_max = 1 << 16) : samples_max_(samples_max) {}

  [[nodiscard]] Place arrived(const RequestSoFar& request, std::int32_t prompt_tokens);
  [[nodiscard]] RequestSoFar& at(Place place) { return records_[place.value].request; }
  [[nodiscard]] const RequestSoFar& at(Place place) const { return records_[place.value].request; }
  /// Refused at the door: judged, and a miss of the TTFT target.
  void rejected(std::int32_t requests);
  /// Ends and is judged. Without a place: one that never arrived.
  void ended(std::optional<Place> place, const EndedRequest& end);
  /// Ends without a verdict.
  void left(Place place);
  void waiting(std::int32_t requests) { waiting_ = requests; }
  void settings(std::uint64_t number);

  /// Drops what has been sampled and starts anew at now. Only requests that arrived at or after `since` are judged and sampled:
  /// those from before a change of settings carry the old settings' delays.
  void open(TimePoint now, TimePoint since);
  /// True when other settings have become current since open() or close().
  [[nodiscard]] bool settings_changed() const { return settings_changed_; }
  /// Requests judged since open(), unfinished ones past a target not counted.
  [[nodiscard]] std::int32_t judged_so_far() const { return window_.judged; }
  [[nodiscard]] std::size_t in_flight() const { return live_.size(); }

  /// The window from open() to now; sampling goes on until the next open(). A miss is final and counted once; an unfinished
  /// request that is good so far counts for this window and is judged again at its end.
  [[nodiscard]] WindowSamples close(TimePoint now);
  /// What close() would give; nothing is closed, and no request is marked as counted.
  [[nodiscard]] WindowSamples so_far(TimePoint now) const;

 private:
  struct Record {
    RequestSoFar request;
    std::uint32_t live_place = 0;  // in live_
  };
  /// What means are made of at the end.
  struct Sums {
    std::int64_t prompt_tokens = 0;
    std::int64_t output_tokens = 0;
    std::int32_t accepted = 0;
    std::int32_t finished = 0;
  };

  void keep(std::vector<Duration>& samples, Duration sample, std::uint64_t& replacement) const;
  void forget(Place place);
  /// Adds an unfinished request to what a window holds. True: it was judged a miss.
  bool judge(const RequestSoFar& request, TimePoint now, WindowSamples& into, std::uint64_t& replacement) const;
  void finish(TimePoint now, WindowSamples& samples) const;
  void start(TimePoint now);

  std::size_t samples_max_;
  std::vector<Record> records_;
  std::vector<std::uint32_t> free_;
  std::vector<std::uint32_t> live_;  // places in flight, in no order
  Window window_;                    // counts so far
  Sums sums_;
  std::vector<Duration> ttft_;
  std::vector<Duration> itl_;
  std::vector<TimePoint> arrivals_;
  TimePoint opened_{};
  TimePoint since_{};
  std::uint64_t settings_number_ = 0;
  bool settings_changed_ = false;
  std::int32_t waiting_ = 0;
  std::uint64_t replacement_ = 1;
};

}  // namespace rubato::tuner
