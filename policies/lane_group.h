// SPDX-License-Identifier: Apache-2.0
// The scheduling core of a node: one scheduler per lane, the KV pools that lanes share, and which lane each sequence belongs to
// in the mode of the moment. The engine and the twin run this same code. Like everything here it is pure and deterministic: steps
// of several lanes may be open at once, but its calls come one after another (the engine holds a lock, the twin needs none).
//
// Where a sequence belongs follows from the role of its lane alone, and nothing else ties it to one:
// - Mixed: everything. Prefill: what has tokens to compute before it samples. Decode: running decodes. Spare: nothing.
// - A sequence that is not where it belongs goes on where it is, as a prefill or a decode like any other, until it can move. So a
//   change of mode, share or roles takes effect at each lane's next step, interrupts nobody, and a full lane costs others time,
//   never a stall.
// - Between lanes of one pool a move is a change of owner: block table and state slot go along, zero bytes are copied, nothing is
//   computed again. Between pools the blocks are copied: the full ones while the sequence still runs, the last few and the
//   recurrent state while it stands still.
// - Each pool has a prefix cache of its own. What arrives by copy is found there once its next step is booked.
// - A prefill does not run its last chunk before it has a decode slot, nor holds one before it needs it (Reservation).
// - An order to copy carries an epoch. Whatever has become of the sequence meanwhile, an answer with another epoch changes
//   nothing, so that no sequence is adopted twice and no block is freed while a copy may still write it.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "manifests/engine_spec.h"
#include "manifests/result.h"
#include "manifests/settings.h"
#include "policies/ids.h"
#include "policies/scheduler.h"

namespace rubato::policies {

/// Mixed: prefills and decodes. Spare: a second lane on a device that runs one in this mode.
enum class LaneRole : std::uint8_t { Mixed, Prefill, Decode, Spare };

/// Fixed at start. One pool per device. On one device there may be two lanes, which share its pool: the first has the whole
/// device in mode Chunked and decodes in mode Disaggregated, the second prefills. Several devices have one lane each; in mode
/// Disaggregated the first prefill_devices of them prefill.
struct LaneGroupLimits {
  SchedulerLimits each;      // max_model_len, max_num_seqs, token_tile: of each lane; block_count, state_count: of each pool;
                             // max_waiting: of all
  std::int32_t devices = 1;  // >= 1
  std::int32_t lanes_per_device = 1;                  // 2 only on one device
  std::int32_t max_handoffs = 64;                     // copies on their way at once, and finished prefills that wait for a slot
  Duration handoff_lease = std::chrono::seconds(10);  // after so long without an answer a copy counts as failed
  Lockstep lockstep = Lockstep::Off;
};

/// Blocks, and at last the state, to be copied from one lane's pool to another's. blocks stays valid until the order is answered;
/// it may be empty where there is a state.
struct CopyOrder {
  std::uint64_t epoch = 0;
  LaneIndex from;
  LaneIndex to;
  std::span<const BlockCopy> blocks;
  std::optional<StateCopy> state{};  // with the last order of a sequence whose model has recurrent layers
};

/// Totals since the start, for metrics and status; none resets.
struct HandoffCounts {
  std::uint64_t moved = 0;              // by change of owner
  std::uint64_t copied = 0;             // by copy
  std::uint64_t blocks = 0;             // copied
  std::uint64_t failed = 0;             // copies that failed; their sequences went on where they were and are tried again
  std::uint64_t expired = 0;            // of those: no answer within the lease
  std::uint64_t late_answers = 0;       // to orders that had been given up
  Duration copying{};                   // from a copy's first order to its adoption, summed
  std::uint64_t reservation_waits = 0;  // prefills that waited for a decode slot before their last chunk
  Duration reservation_waiting{};       // summed
  std::uint64_t switches = 0;           // changes of mode, roles or reservation
  std::uint64_t switches_done = 0;      // of those: every sequence is where it belongs. One overtaken by the next ends with it
  Duration last_switch{};               // from the last of them until then
};

/// Rounds of lanes that step together, over all roles.
struct LockstepCounts {
  std::uint64_t rounds = 0;
  Duration stepping{};  // of every lane with a step, summed
  Duration waiting{};   // of those lanes for the slowest of their round, summed: the price of imbalance
};

/// One lane now.
struct LaneCounts {
  LaneRole role = LaneRole::Mixed;
  SchedulerCounts scheduler;
  std::int32_t to_move = 0;   // sequences that belong to another lane
  std::int32_t reserved = 0;  // decode slots held by prefills of this lane
};

/// Not thread-safe, but steps of different lanes overlap: between plan(lane) and complete(lane) everything may be called but
/// plan() and complete() of that lane. Nothing here allocates once warm but add().
class LaneGroup {
 public:
  LaneGroup(const LaneGroupLimits& limits, const Settings& initial);
  ~LaneGroup();
  LaneGroup(LaneGroup&&) noexcept;
  LaneGroup& operator=(LaneGroup&&) noexcept;

  [[nodiscard]] std::int32_t lane_count() const;
  [[nodiscard]] std::int32_t device_of(LaneIndex lane) const;
  [[nodiscard]] LaneRole role(LaneIndex lane) const;
  /// As Scheduler's.
  [[nodiscard]] std::int32_t effective_max_len() const;

  /// As Scheduler's. The request goes to the lane, of those that take new work, that would have the least of it outstanding with
  /// it by its step-time model: what the lane's prefix cache has of the request is none.
  Result<void> add(const SequenceRequest& request);
  /// As Scheduler's, but allowed at any time. A sequence with a row in an open step ends when that step is booked: its row is
  /// answered like the others and what is answered does not matter. Blocks that a copy reads or writes are freed when it has
  /// ended.
  bool cancel(SequenceId id);
  /// Current for each lane from its next plan on.
  void apply(const Settings& settings, TimePoint now);
  [[nodiscard]] const Settings& settings() const;

  /// As Scheduler's. Also empty while everything of the lane waits for another lane: for a decode slot, blocks, or the others of
  /// a lockstep round; such a plan may still name preempted ones. Ask again when changes() has grown.
  const StepPlan& plan(LaneIndex lane, TimePoint now);
  /// As Scheduler's.
  void complete(LaneIndex lane, std::span<const RowOutcome> outcomes, TimePoint now, Duration duration);
  void abandon(LaneIndex lane);
  /// Sequences that lost their blocks when the lane's last step was booked, to an older one of another lane.
  [[nodiscard]] std::span<const SequenceId> preempted_at_end(LaneIndex lane) const;

  /// The next copy to carry out, oldest first; none: nothing to copy. Orders of one sequence follow one another, those of
  /// different sequences may be carried out at once.
  [[nodiscard]] std::optional<CopyOrder> next_copy(TimePoint now);
  /// Answers an order. After a failure the sequence goes on where it is, from blocks that are still its own; nothing is computed
  /// again. It is tried again a second later. An answer to an order that is not open changes nothing.
  void copied(std::uint64_t epoch, const Result<void>& outcome, TimePoint now);
  /// False once the order is no longer wanted: whoever carries it out stops before the next block.
  [[nodiscard]] bool wants(std::uint64_t epoch) const;
  /// Gives up orders without an answer for longer than the lease; their blocks are freed after another lease, when nobody who
  /// looks at wants() can still be writing.
  void expire(TimePoint now);

  /// From now on freed blocks are kept for take_freed(), as many as a pool has: for backends that poison dead contents. Whoever
  /// asks for it asks after each call, before a step or copy that was planned by it runs.
  void watch_freed();
  /// Blocks of a device whose contents have died since the last call: given back uncached, or cached and taken for something
  /// else. Valid until the next call of anything.
  [[nodiscard]] std::span<const BlockId> take_freed(std::int32_t device);
  /// The same for slots of recurrent state.
  [[nodiscard]] std::span<const StateId> take_freed_states(std::int32_t device);

  [[nodiscard]] LaneCounts counts(LaneIndex lane) const;
  /// Of all lanes and pools together; gaps are the largest.
  [[nodiscard]] SchedulerCounts totals() const;
  /// Grows whenever something has changed that another lane's plan may depend on. A plan that came out empty and changed nothing
  /// is no reason to ask the others again.
  [[nodiscard]] std::uint64_t changes() const;
  /// Whether plan(lane) could come out with a step now. False is certain, true is not.
  [[nodiscard]] bool may_have_work(LaneIndex lane) const;
  [[nodiscard]] const HandoffCounts& handoffs() const;
  [[nodiscard]] const LockstepCounts& lockstep() const;
  [[nodiscard]] std::int32_t sequence_count() const;
  [[nodiscard]] std::int32_t waiting() const;
  [[nodiscard]] std::int32_t copies_open() const;
  [[nodiscard]] const StepTimeModel& step_time(LaneIndex lane) const;
  /// As Scheduler's: a simulation starts with what a live lane has learnt.
  void adopt_step_time(LaneIndex lane, const StepTimeModel& model);
  [[nodiscard]] bool idle() const;

  /// Every lane's own, and: each block of each pool has one owner, no sequence is in two lanes, slots and copies add up.
  void check_integrity() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

/// What each lane does under these settings.
[[nodiscard]] LaneRole lane_role(const LaneGroupLimits& limits, const KnobValues& knobs, LaneIndex lane);

}  // namespace rubato::policies
