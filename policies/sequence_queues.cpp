// SPDX-License-Identifier: Apache-2.0
// How sequences move between waiting and running, and how blocks move with them.
#include <algorithm>

#include "manifests/check.h"
#include "policies/scheduler_state.h"

namespace rubato::policies {

void Scheduler::State::enter_pending(Slot slot) {
  Sequence& sequence = at(slot);
  CHECK(!sequence.pending);
  sequence.pending = true;
  const auto older = [this](Slot left, Slot right) { return at(left).ticket < at(right).ticket; };
  const auto sooner = [this](Slot left, Slot right) {
    const Sequence& a = at(left);
    const Sequence& b = at(right);
    return a.ttft_deadline != b.ttft_deadline ? a.ttft_deadline < b.ttft_deadline : a.ticket < b.ticket;
  };
  pending_by_ticket.insert(std::upper_bound(pending_by_ticket.begin(), pending_by_ticket.end(), slot, older), slot);
  pending_by_deadline.insert(std::upper_bound(pending_by_deadline.begin(), pending_by_deadline.end(), slot, sooner), slot);
}

void Scheduler::State::leave_pending(Slot slot) {
  Sequence& sequence = at(slot);
  CHECK(sequence.pending);
  sequence.pending = false;
  const auto erase = [slot](std::vector<Slot>& queue) {
    const auto place = std::find(queue.begin(), queue.end(), slot);
    CHECK(place != queue.end(), "slot ", slot);
    queue.erase(place);
  };
  erase(pending_by_ticket);
  erase(pending_by_deadline);
}

PoolLoad Scheduler::State::pool_load() const {
  PoolLoad load{.block_count = pool.block_count(), .committed_blocks = 0, .running = running_count()};
  for (const Slot slot : running) {
    load.committed_blocks += std::max(wanted(slot), static_cast<std::int32_t>(table_of(at(slot)).size()));
  }
  return load;
}

void Scheduler::State::admit(Slot slot) {
  Sequence& sequence = at(slot);
  CHECK(sequence.place == Sequence::Place::Waiting && !free_tables.empty());
  sequence.place = Sequence::Place::Running;
  sequence.table = free_tables.back();
  free_tables.pop_back();
  std::vector<BlockId>& table = table_of(sequence);
  for (std::int32_t needed = blocks_for_tokens(sequence.known); needed > 0; --needed) table.push_back(pool.take());
  const auto older = [this](Slot left, Slot right) { return at(left).ticket < at(right).ticket; };
  running.insert(std::upper_bound(running.begin(), running.end(), slot, older), slot);
}

void Scheduler::State::leave_running(Slot slot) {
  Sequence& sequence = at(slot);
  CHECK(sequence.place == Sequence::Place::Running);
  std::vector<BlockId>& table = table_of(sequence);
  for (const BlockId block : table) pool.give(block);
  table.clear();
  free_tables.push_back(sequence.table);
  const auto place = std::find(running.begin(), running.end(), slot);
  CHECK(place != running.end(), "slot ", slot);
  running.erase(place);
}

void Scheduler::State::preempt(Slot slot) {
  Sequence& sequence = at(slot);
  leave_running(slot);
  sequence.place = Sequence::Place::Waiting;
  sequence.waiting_since = planned_at;
  sequence.computed = 0;
  sequence.decode_gap = 0;
  sequence.preempted_now = true;
  if (!sequence.pending) enter_pending(slot);
  plan.preempted.push_back(sequence.request.id);
  ++preemptions;
}

// Makes the blocks of a decode reach its next token. Where none is free, the youngest running sequence without a row in this step
// gives up all of its own, provided it is younger than this one; if this one is the youngest, it gives way itself. False: no row
// for it now.
bool Scheduler::State::secure_block(Slot slot) {
  Sequence& sequence = at(slot);
  std::vector<BlockId>& table = table_of(sequence);
  const std::int32_t needed = blocks_for_tokens(sequence.computed + 1);
  if (static_cast<std::int32_t>(table.size()) >= needed) return true;
  if (pool.free_count() == 0) {
    const auto victim = std::find_if(running.rbegin(), running.rend(), [&](Slot other) { return !at(other).in_step; });
    CHECK(victim != running.rend());
    const bool younger = at(*victim).ticket > sequence.ticket;
    if (!younger && running.back() != slot) return false;
    preempt(younger ? *victim : slot);
    if (!younger) return false;
  }
  table.push_back(pool.take());
  return true;
}

}  // namespace rubato::policies
