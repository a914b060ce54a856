// SPDX-License-Identifier: Apache-2.0
// Decisions under a mutex, a few hundred a second at most; between them threads read what was decided last.
#include "engine/cpu/core_gate.h"

#include <utility>

#include "manifests/check.h"

namespace rubato::engine::cpu {
namespace {

constexpr auto look_again = std::chrono::milliseconds(2);
constexpr Duration counted_task = std::chrono::microseconds(50);

}  // namespace

CoreGate::CoreGate(std::int32_t cores, Clock clock) : clock_(std::move(clock)), share_(cores) {
  publish();
}

void CoreGate::use_share(Side side, std::int32_t percent) {
  CHECK(percent >= 1 && percent <= 99, "percent=", percent);
  percent_.store(side == Side::First ? percent : 100 - percent, std::memory_order_relaxed);
}

std::int32_t CoreGate::share(Side side) const {
  const std::int32_t percent = percent_.load(std::memory_order_relaxed);
  return side == Side::First ? percent : 100 - percent;
}

TimePoint CoreGate::now() {
  if (clock_) return clock_();
  return TimePoint(Duration(counted_.fetch_add(counted_task.count(), std::memory_order_relaxed)) + counted_task);
}

void CoreGate::begin(Side side) {
  const std::scoped_lock lock(mutex_);
  const std::int32_t percent = percent_.load(std::memory_order_relaxed);
  share_.begin(side, percent, now());
  published_.store(percent, std::memory_order_relaxed);
  publish();
}

void CoreGate::end(Side side) {
  const std::scoped_lock lock(mutex_);
  share_.end(side, now());
  publish();
}

void CoreGate::look(Side side) {
  if (!contended_.load(std::memory_order_relaxed)) return;
  const TimePoint next(Duration(seats_[index_of(side)].next_turn.load(std::memory_order_relaxed)));
  const std::int32_t percent = percent_.load(std::memory_order_relaxed);
  const bool same_share = percent == published_.load(std::memory_order_relaxed);
  if (same_share && next == TimePoint::max()) return;
  const TimePoint time = now();
  if (same_share && time < next) return;
  const std::scoped_lock lock(mutex_);
  turn(side, percent, time);
}

void CoreGate::turn(Side side, std::int32_t percent, TimePoint time) {
  share_.turn(side, percent, time);
  published_.store(percent, std::memory_order_relaxed);
  publish();
}

void CoreGate::pass(Side side) {
  look(side);
  const std::atomic<std::int32_t>& cores = seats_[index_of(side)].cores;
  if (cores.load(std::memory_order_relaxed) > 0) return;
  std::unique_lock lock(mutex_);
  while (share_.cores(side) == 0) {
    core_.wait_for(lock, look_again);
    const std::int32_t percent = percent_.load(std::memory_order_relaxed);
    if (percent != published_.load(std::memory_order_relaxed)) turn(side, percent, now());
  }
  share_.resume(side, now());
  publish();
}

bool CoreGate::admits(Side side, std::int32_t worker) {
  look(side);
  return worker < seats_[index_of(side)].cores.load();
}

void CoreGate::wake(Side side) {
  std::atomic<std::uint32_t>& changes = seats_[index_of(side)].changes;
  changes.fetch_add(1);
  changes.notify_all();
}

void CoreGate::publish() {
  for (const Side side : sides) {
    Seat& seat = seats_[index_of(side)];
    const std::int32_t cores = share_.cores(side);
    const std::int32_t before = seat.cores.exchange(cores);
    seat.next_turn.store(share_.next_turn(side).time_since_epoch().count(), std::memory_order_relaxed);
    if (cores <= before) continue;
    wake(side);
    if (before == 0) core_.notify_all();
  }
  contended_.store(share_.contended(), std::memory_order_relaxed);
}

}  // namespace rubato::engine::cpu
