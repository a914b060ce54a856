// SPDX-License-Identifier: Apache-2.0
// What sequences keep on one device: KV blocks and slots of recurrent state, with the lanes that take from them. Private to
// policies/.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "policies/block_pool.h"
#include "policies/scheduler.h"
#include "policies/state_pool.h"

namespace rubato::policies {

/// What holds blocks and states besides the lanes' sequences: copies.
struct HeldElsewhere {
  std::vector<BlockId> blocks;
  std::vector<StateId> states;
  std::vector<StateId> pinned;  // snapshots
};

struct KvPool {
  explicit KvPool(const SchedulerLimits& limits);

  /// What admission decides on, over all lanes. A block counts once, however many share it.
  [[nodiscard]] PoolLoad load() const;
  /// CHECKs that every taken block and slot has its owners and no others: lanes' sequences and plans, and others.
  void check_integrity(const HeldElsewhere& others = {}) const;
  /// Free blocks that no older sequence waits for.
  [[nodiscard]] std::int32_t free_for(std::uint64_t ticket) const;

  /// As the pools', noting whose contents are dead from now on.
  [[nodiscard]] BlockId take();
  void give(BlockId block);
  /// Gives back a sequence's blocks, in the order that is best for the prefix cache.
  void give_table(std::span<const BlockId> table);
  [[nodiscard]] StateId take_state();
  void give_state(StateId state);
  [[nodiscard]] StateId begin_snapshot(const BlockHash& hash);
  void drop_snapshot(StateId state);
  /// Counts of both pools, filled into those of a scheduler or a group.
  void add_counts(SchedulerCounts& counts) const;

  BlockPool blocks;
  StatePool states;
  const bool caching;
  const bool blocks_hold_keys;
  std::vector<Scheduler::State*> lanes;
  std::vector<BlockId> freed;  // dead since somebody last looked; without capacity: nobody does
  std::vector<StateId> freed_states;
  std::int32_t arriving_blocks = 0;  // taken for sequences whose copies are on their way here
  std::int32_t arriving = 0;         // such sequences
  std::int32_t buried_blocks = 0;    // of sequences that ended while a copy was reading them

 private:
  void note(BlockId block) {
    if (freed.size() < freed.capacity()) freed.push_back(block);
  }
  void note(StateId state) {
    if (freed_states.size() < freed_states.capacity()) freed_states.push_back(state);
  }
  void check_blocks(const HeldElsewhere& others) const;
  void check_states(const HeldElsewhere& others) const;
};

}  // namespace rubato::policies
