// SPDX-License-Identifier: Apache-2.0
// How two lanes divide the compute threads ("cores") of one CPU device while both are in a step. The whole cores of a share are
// the lane's own; the one core of which each is due a fraction belongs to them in turn. Accounting alone: time and share are
// handed in, core_gate.h applies the answer to threads.
//
// What this protects: the two together never begin a task on more threads than the device has, and over some milliseconds each
// has its share of thread time. What it does not: threads are not pinned to processors; a task that has begun is finished first,
// so that for at most one task's time a changeover may overlap; memory bandwidth and the outer caches are shared by both, so that
// a decode step, which mostly reads weights, is slowed by a prefill beside it whatever the shares. Holding a core is what counts
// as use, whether or not the lane had tasks for it.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "policies/time.h"

namespace rubato::engine::cpu {

/// One of the two lanes on a device.
enum class Side : std::uint8_t { First, Second };
inline constexpr std::array sides{Side::First, Side::Second};

[[nodiscard]] constexpr Side other(Side side) {
  return side == Side::First ? Side::Second : Side::First;
}
[[nodiscard]] constexpr std::size_t index_of(Side side) {
  return side == Side::First ? 0 : 1;
}

/// Not thread-safe. Shares are those of the first side, 1..99 percent; the second has the rest. Time may stand still but
/// not go back; what goes back counts as standing still.
class CoreShare {
 public:
  /// In this time the shared core goes round once: long against a task and a changeover, short against a decode step.
  static constexpr Duration round = std::chrono::milliseconds(4);
  /// A side that is ahead of its share (because its tasks are longer than its turn) waits no longer than this for it to fall
  /// due, and a round on top; what it is ahead beyond that is forgotten.
  static constexpr Duration memory = std::chrono::milliseconds(40);

  /// cores >= 1.
  explicit CoreShare(std::int32_t cores);

  /// A step of side begins, or ends. A side that begins while the other is in a step takes its own cores at once and waits its
  /// turn for the shared one.
  void begin(Side side, std::int32_t percent, TimePoint now);
  void end(Side side, TimePoint now);

  /// Between two tasks of side: takes up a new share, and gives the shared core away when side's turn is over. Only who holds
  /// the core gives it away, because no one else knows that it is between two tasks.
  void turn(Side side, std::int32_t percent, TimePoint now);

  /// side, which slept until it got the shared core, goes on: what it took to wake up counts as nobody's use.
  void resume(Side side, TimePoint now);

  /// Threads that side may begin tasks on. All of them while the other side is in no step; none while it waits for its turn.
  [[nodiscard]] std::int32_t cores(Side side) const;

  /// Both are in a step.
  [[nodiscard]] bool contended() const { return in_step_[0] && in_step_[1]; }

  /// The earliest time at which turn(side) gives something away, as shares stand; TimePoint::max() for none.
  [[nodiscard]] TimePoint next_turn(Side side) const;

 private:
  void settle(TimePoint now);
  void split(std::int32_t percent);
  [[nodiscard]] std::int64_t ahead(Side side) const { return side == Side::First ? lead_ : -lead_; }
  [[nodiscard]] std::int64_t turn_length() const;

  const std::int32_t cores_;
  std::array<bool, 2> in_step_{};
  std::int32_t percent_ = 0;                 // that the split stands for
  std::array<std::int32_t, 2> own_{};        // whole cores
  std::array<std::int32_t, 2> fractions_{};  // hundredths of the shared core that each is due; both 0: no core is shared
  Side holder_ = Side::First;                // of the shared core
  TimePoint since_{};                        // until here lead_ is right
  // By how much the first side has held the shared core for longer than it was due, in hundredths of nanoseconds; the second is
  // behind by as much. Kept from one time that both are in a step to the next.
  std::int64_t lead_ = 0;
};

}  // namespace rubato::engine::cpu
