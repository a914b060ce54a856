// SPDX-License-Identifier: Apache-2.0
// What the twin and the watch over the load learn from: arrivals, starts, ends and steps, collected on the lanes' threads and
// handed to the tuning thread in batches.
#pragma once

#include <cstddef>
#include <cstdint>
#include <mutex>
#include <vector>

#include "daemon/observer.h"
#include "daemon/twin_pace.h"
#include "tuner/twin/step_law.h"

namespace rubato {

/// A request's first token has come.
struct FeedStart {
  SequenceId id;
  std::int32_t cached_tokens = 0;  // of its prompt: came from the prefix cache

  friend bool operator==(const FeedStart&, const FeedStart&) = default;
};

struct FeedEnd {
  SequenceId id;
  TimePoint time;
  std::int32_t output_tokens = 0;

  friend bool operator==(const FeedEnd&, const FeedEnd&) = default;
};

/// Everything since the last one, each kind in the order in which the lanes told it. Whoever takes arrivals first, then starts,
/// then ends, never hears of a request before it came.
struct FeedBatch {
  std::vector<Arrival> arrivals;
  std::vector<FeedStart> starts;
  std::vector<FeedEnd> ends;
  std::vector<tuner::StepSample> steps;
};

/// The newest capacity_max items. Room for all of them is taken at the start: pushing never allocates.
template <class T>
class FeedRing {
 public:
  explicit FeedRing(std::size_t capacity_max) : capacity_max_(capacity_max) { items_.reserve(capacity_max); }

  /// How many were dropped for it: 0 or 1.
  std::uint64_t push(const T& item) {
    if (items_.size() < capacity_max_) {
      items_.push_back(item);
      return 0;
    }
    items_[oldest_] = item;
    oldest_ = (oldest_ + 1) % capacity_max_;
    return 1;
  }
  /// Changes places with an empty one of the same capacity.
  void swap(FeedRing& other) noexcept {
    items_.swap(other.items_);
    std::swap(oldest_, other.oldest_);
  }
  /// Appends everything to out, oldest first, and is empty.
  void move_to(std::vector<T>& out) {
    const auto oldest = items_.begin() + static_cast<std::ptrdiff_t>(oldest_);
    out.insert(out.end(), oldest, items_.end());
    out.insert(out.end(), items_.begin(), oldest);
    items_.clear();
    oldest_ = 0;
  }

 private:
  std::size_t capacity_max_;
  std::vector<T> items_;
  std::size_t oldest_ = 0;  // once full
};

/// Thread-safe. The lanes' threads write, one thread drains. One mutex, held for one append, or for a swap.
class TwinFeed final : public Observer {
 public:
  explicit TwinFeed(std::size_t requests_max = 8192, std::size_t steps_max = 16384);

  void on_request(std::int32_t /*choices*/) override {}
  void on_arrival(const Arrival& arrival) override;
  void on_rejected(TimePoint /*now*/, std::int32_t /*choices*/) override {}
  void on_token_gap(SequenceId /*id*/, Duration /*gap*/) override {}
  void on_first_token(const Arrival& arrival, Duration ttft) override;
  void on_request_end(const RequestRecord& record) override;
  void on_step(const engine::StepRecord& record, const policies::SchedulerCounts& counts) override;
  void on_settings(const Settings& /*settings*/, TimePoint /*now*/) override {}

  /// Replaces what batch held.
  void drain(FeedBatch& batch);
  /// Items that had to go because nobody drained; since the start.
  [[nodiscard]] std::uint64_t dropped() const;
  [[nodiscard]] LateSteps& late_steps() { return late_steps_; }

 private:
  struct Rings {
    FeedRing<Arrival> arrivals;
    FeedRing<FeedStart> starts;
    FeedRing<FeedEnd> ends;
    FeedRing<tuner::StepSample> steps;

    Rings(std::size_t requests_max, std::size_t steps_max)
        : arrivals(requests_max), starts(requests_max), ends(requests_max), steps(steps_max) {}
  };

  LateSteps late_steps_;
  Rings spare_;  // the draining thread's
  mutable std::mutex mutex_;
  Rings rings_;
  std::uint64_t dropped_ = 0;
};

}  // namespace rubato
