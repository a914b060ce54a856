// SPDX-License-Identifier: Apache-2.0
#include "policies/kv_pool.h"

#include "manifests/check.h"
#include "policies/scheduler_state.h"

namespace rubato::policies {

KvPool::KvPool(const SchedulerLimits& limits)
    : blocks(limits.block_count, limits.prefix_caching.enabled ? BlockPool::Finding::ByHash : BlockPool::Finding::None),
      states(limits.state_count),
      caching(limits.prefix_caching.enabled),
      blocks_hold_keys(limits.blocks_hold_keys) {}

PoolLoad KvPool::load() const {
  PoolLoad load{.block_count = blocks.block_count(),
                .committed_blocks = arriving_blocks + buried_blocks - blocks.shared_references(),
                .running = arriving + (buried_blocks > 0 ? 1 : 0)};
  for (const Scheduler::State* lane : lanes) {
    load.committed_blocks += lane->committed_blocks();
    load.running += lane->running_count();
  }
  return load;
}

// Blocks come free one by one, at the ends of steps of any lane: the first are for who has waited longest, or a lane with shorter
// steps would always be there first.
std::int32_t KvPool::free_for(std::uint64_t ticket) const {
  std::int32_t free = blocks.free_count();
  if (lanes.size() == 1) return free;
  for (const Scheduler::State* lane : lanes) {
    for (const Slot slot : lane->running) {
      const Sequence& other = lane->at(slot);
      if (other.ticket >= ticket) break;
      free -= other.starved ? 1 : 0;
    }
  }
  return free;
}

BlockId KvPool::take() {
  const std::uint64_t evicted = blocks.evicted();
  const BlockId block = blocks.take();
  if (blocks.evicted() != evicted) note(block);
  return block;
}

// What is cached lives on until the block is taken.
void KvPool::give(BlockId block) {
  blocks.give(block);
  if (!blocks.is_taken(block) && !blocks.is_cached(block)) note(block);
}

// Blocks are taken in the order in which they were given. A prefix without its head is worth nothing, so its tail is to go first.
void KvPool::give_table(std::span<const BlockId> table) {
  if (!caching) {
    for (const BlockId block : table) give(block);
    return;
  }
  for (auto block = table.rbegin(); block != table.rend(); ++block) give(*block);
}

StateId KvPool::take_state() {
  const std::uint64_t evicted = states.evicted();
  const StateId state = states.take();
  if (states.evicted() != evicted) note(state);
  return state;
}

void KvPool::give_state(StateId state) {
  states.give(state);
  note(state);
}

StateId KvPool::begin_snapshot(const BlockHash& hash) {
  const std::uint64_t evicted = states.evicted();
  const StateId state = states.begin_snapshot(hash);
  if (states.evicted() != evicted) note(state);
  return state;
}

void KvPool::drop_snapshot(StateId state) {
  states.drop_snapshot(state);
  note(state);
}

void KvPool::add_counts(SchedulerCounts& counts) const {
  counts.free_blocks += blocks.free_count();
  counts.block_count += blocks.block_count();
  counts.states_running += states.working_count();
  counts.states_snapshot += states.snapshot_count();
  counts.state_count += states.state_count();
  counts.evicted_snapshots += states.evicted();
  if (!blocks_hold_keys) return;  // then nothing is lost with one
  counts.cached_blocks += blocks.cached_count();
  counts.evicted_blocks += blocks.evicted();
}

}  // namespace rubato::policies
