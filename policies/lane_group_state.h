// SPDX-License-Identifier: Apache-2.0
// What a LaneGroup keeps between calls: its lanes' schedulers, the pools, and the copies on their way. Private to policies/. Who
// belongs where and who gets a decode slot is in lane_group_moves.cpp, copies in lane_group_copies.cpp.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <unordered_map>
#include <vector>

#include "policies/lane_group.h"
#include "policies/scheduler_state.h"

namespace rubato::policies {

/// The copy of one sequence's blocks and state to another pool, from the first order until it is adopted there, or until nobody
/// can be writing its blocks any more.
struct Handoff {
  enum class Stage : std::uint8_t {
    Free,
    Open,  // the sequence is still in lane `from`
    Dead,  // it ended, or the copy was given up: only blocks are left, until the open order is answered or its lease is over
  };
  Stage stage = Stage::Free;
  std::uint64_t epoch = 0;
  LaneIndex from;
  LaneIndex to;
  Slot slot = 0;                        // in lane `from`, while Open
  std::vector<BlockId> target_blocks;   // taken from the pool of `to`
  std::vector<BlockId> source_blocks;   // Dead: what the open order still reads
  std::optional<StateId> target_state;  // models with recurrent layers, as the next two
  std::optional<StateId> source_state;
  std::optional<StateId> source_start;  // pinned
  std::vector<BlockCopy> order;         // open: not answered yet
  bool order_open = false;
  std::optional<StateCopy> state_order;  // with the open order
  bool state_copied = false;
  std::int32_t copied = 0;    // blocks
  std::int32_t promised = 0;  // blocks that the target's admission counts for it
  TimePoint began;
  TimePoint ordered;
  std::optional<TimePoint> given_up;  // Dead by the lease: blocks are freed a lease later
};

struct LaneGroup::State {
  State(const LaneGroupLimits& limits_in, const Settings& initial);

  using Lane = Scheduler::State;
  Lane& at(LaneIndex lane) { return *lanes[static_cast<std::size_t>(lane.value)]; }
  [[nodiscard]] const Lane& at(LaneIndex lane) const { return *lanes[static_cast<std::size_t>(lane.value)]; }
  [[nodiscard]] LaneRole role(LaneIndex lane) const { return roles[static_cast<std::size_t>(lane.value)]; }
  [[nodiscard]] std::int32_t lane_count() const { return static_cast<std::int32_t>(lanes.size()); }
  [[nodiscard]] std::int32_t device_of(LaneIndex lane) const { return limits.devices == 1 ? 0 : lane.value; }
  KvPool& pool_of(LaneIndex lane) { return *pools[static_cast<std::size_t>(device_of(lane))]; }
  [[nodiscard]] const KvPool& pool_of(LaneIndex lane) const { return *pools[static_cast<std::size_t>(device_of(lane))]; }

  // Life of sequences (lane_group.cpp).
  Result<void> add(const SequenceRequest& request);
  bool cancel(SequenceId id);
  void apply(const Settings& settings_in, TimePoint now);
  const StepPlan& plan(LaneIndex lane, TimePoint now);
  void complete(LaneIndex lane, std::span<const RowOutcome> outcomes, TimePoint now, Duration duration);
  void abandon(LaneIndex lane);
  void bury(LaneIndex lane, Slot slot);
  void bury_cancelled(LaneIndex lane);
  [[nodiscard]] std::int32_t waiting() const;
  [[nodiscard]] std::int32_t sequence_count() const { return static_cast<std::int32_t>(lane_of.size()); }

  // Where sequences belong (lane_group_moves.cpp).
  [[nodiscard]] static bool belongs(LaneRole role, const Sequence& sequence);
  [[nodiscard]] Duration outstanding(LaneIndex lane) const;
  [[nodiscard]] LaneIndex lane_for_new(std::int32_t known, std::span<const BlockHash> prefix) const;
  [[nodiscard]] bool better_left(LaneIndex lane, Slot slot, LaneIndex to) const;
  [[nodiscard]] std::int32_t room(LaneIndex lane) const;
  [[nodiscard]] std::int32_t free_decode_slots() const;
  [[nodiscard]] std::int32_t reserved_in(LaneIndex lane) const;
  [[nodiscard]] std::int32_t to_move(LaneIndex lane) const;
  [[nodiscard]] std::optional<LaneIndex> decode_lane_for(LaneIndex from) const;
  [[nodiscard]] std::optional<LaneIndex> prefill_lane_for(LaneIndex from) const;
  void settle(TimePoint now);
  void collect_strays(LaneIndex lane);
  void move_sequence(LaneIndex from, Slot slot, LaneIndex to);
  void relocate(LaneIndex from, Slot slot, TimePoint now);
  void open_gates(LaneIndex lane, TimePoint now);
  void want_slots(LaneIndex lane, TimePoint now);
  void grant_slots(TimePoint now);
  void count_wait(Sequence& sequence, TimePoint now);
  [[nodiscard]] static bool ends_next(const Sequence& sequence, const KnobValues& knobs);
  void take_waiting(LaneIndex lane);
  [[nodiscard]] bool takes_new_work(LaneIndex lane) const {
    return role(lane) == LaneRole::Mixed || role(lane) == LaneRole::Prefill;
  }

  // Copies (lane_group_copies.cpp).
  [[nodiscard]] bool begin_copy(LaneIndex from, Slot slot, LaneIndex to, TimePoint now);
  std::optional<CopyOrder> next_copy(TimePoint now);
  void copied(std::uint64_t epoch, const Result<void>& outcome, TimePoint now);
  void expire(TimePoint now);
  void advance(Handoff& handoff, TimePoint now);
  [[nodiscard]] bool still_wanted(const Handoff& handoff) const;
  [[nodiscard]] bool freeze(Handoff& handoff);
  void make_order(Handoff& handoff, TimePoint now);
  [[nodiscard]] std::int32_t blocks_ready(const Handoff& handoff) const;
  [[nodiscard]] bool lacks_state(const Handoff& handoff) const;
  [[nodiscard]] bool has_order(const Handoff& handoff) const;
  void adopt(Handoff& handoff, TimePoint now);
  void let_go(Handoff& handoff, TimePoint retry);
  void free_handoff(Handoff& handoff);
  [[nodiscard]] Handoff* handoff_of(LaneIndex lane, Slot slot);
  /// That with this order open.
  [[nodiscard]] std::optional<std::size_t> find_order(std::uint64_t epoch) const;

  // Rounds of data-parallel lanes that step together (lane_group_lockstep.cpp).
  struct Round {
    /// InVain: it had nothing to run, so that the others need not wait for it, but may still come in.
    enum class Turn : std::uint8_t { Open, InVain, Taken };
    std::vector<Turn> turns;  // by lane
    std::int32_t held = 0;    // rounds in a row in which prefills waited for those of other lanes
    Duration longest{};
    Duration sum{};
    std::int32_t steps = 0;
  };
  [[nodiscard]] bool in_lockstep(LaneIndex lane) const;
  [[nodiscard]] bool may_step(LaneIndex lane);
  void begin_round(LaneRole role);
  void leave_round(LaneIndex lane, Round::Turn turn, Duration duration);

  void check_integrity() const;

  LaneGroupLimits limits;
  Settings settings;
  std::vector<std::shared_ptr<KvPool>> pools;  // by device
  std::vector<std::unique_ptr<Lane>> lanes;
  std::vector<LaneRole> roles;
  std::unordered_map<SequenceId, LaneIndex> lane_of;  // of every sequence that has not ended
  std::uint64_t changes = 0;
  std::uint64_t next_ticket = 1;
  std::uint64_t next_ready = 1;

  std::vector<Handoff> handoffs;  // max_handoffs of them
  std::uint64_t next_epoch = 1;
  HandoffCounts counts;
  std::optional<TimePoint> switching_since;

  std::array<Round, 4> rounds;  // by LaneRole
  LockstepCounts lockstep;

  // Scratch, reserved once.
  struct Claim {
    LaneIndex lane;
    Slot slot = 0;
    std::uint64_t ready = 0;
    std::uint64_t ticket = 0;
  };
  static void sort_by_readiness(std::vector<Claim>& claims);
  std::vector<Claim> strays;
  std::vector<Claim> wanting;
  std::vector<BlockId> moving_blocks;
  std::vector<BlockId> freed;
  std::vector<StateId> freed_states;
  StepPlan nothing;
};

}  // namespace rubato::policies
