// SPDX-License-Identifier: Apache-2.0
// Applies a CoreShare to the threads of two lanes: every thread asks it between two tasks. Made only for a device with two lanes;
// a single lane never meets it.
#pragma once

#include <array>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>

#include "engine/cpu/core_share.h"

namespace rubato::engine::cpu {

/// Shared by the two sides' operations; outlives their workers. begin(), end() and pass() are called by a side's own thread, one
/// step at a time. While the other side is in no step, asking costs one load.
class CoreGate {
 public:
  using Clock = std::function<TimePoint()>;

  /// Without a clock every task is taken to last equally long.
  CoreGate(std::int32_t cores, Clock clock);

  /// Of that side, 1..99 percent. Any thread, one store; threads find it between two tasks.
  void use_share(Side side, std::int32_t percent);
  [[nodiscard]] std::int32_t share(Side side) const;

  void begin(Side side);
  void end(Side side);

  /// Between two tasks, or before an operation, on side's own thread: waits while side has no core. The wait ends when the other
  /// side's turn or step does, and looks again every other millisecond in case the share has changed.
  void pass(Side side);
  /// Between two tasks of another worker, 1 and up: whether it is within side's cores. Never waits but for a short critical
  /// section.
  [[nodiscard]] bool admits(Side side, std::int32_t worker);

  /// For workers that were not admitted: read changes() before asking, then sleep until it differs, which it does once side has
  /// more cores or wake() was called.
  [[nodiscard]] std::uint32_t changes(Side side) const { return seats_[index_of(side)].changes.load(); }
  void wait_for_change(Side side, std::uint32_t seen) const { seats_[index_of(side)].changes.wait(seen); }
  void wake(Side side);

 private:
  /// What threads of one side read.
  struct alignas(64) Seat {
    std::atomic<std::int32_t> cores{0};
    std::atomic<std::uint32_t> changes{0};
    std::atomic<TimePoint::rep> next_turn{0};
  };

  [[nodiscard]] TimePoint now();
  /// Takes the turn over when it is time to.
  void look(Side side);
  // With mutex_ held: a turn of share_; hands out what it says.
  void turn(Side side, std::int32_t percent, TimePoint time);
  void publish();

  const Clock clock_;
  std::atomic<TimePoint::rep> counted_{0};   // time without a clock
  std::atomic<std::int32_t> percent_{50};    // of the first side
  std::atomic<std::int32_t> published_{50};  // that share_ was told last
  std::atomic<bool> contended_{false};
  std::array<Seat, 2> seats_;

  std::mutex mutex_;
  std::condition_variable core_;  // a side without a core has one again
  CoreShare share_;
};

/// A side's place at a gate; without a gate it has all cores.
struct GateSide {
  CoreGate* gate = nullptr;
  Side side = Side::First;
};

}  // namespace rubato::engine::cpu
