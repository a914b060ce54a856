// SPDX-License-Identifier: Apache-2.0
// Recounts everything a scheduler keeps twice. Costs a pass over all slots and blocks: for tests and for a look at idle.
#include <algorithm>
#include <vector>

#include "manifests/check.h"
#include "policies/scheduler_state.h"

namespace rubato::policies {

void Scheduler::State::check_sequence(Slot slot) const {
  const Sequence& sequence = at(slot);
  const auto id = sequence.request.id.value;
  const auto found = slot_of.find(sequence.request.id);
  CHECK(found != slot_of.end() && found->second == slot, "sequence ", id, " is not where its id points");
  CHECK(!sequence.in_step || open, "sequence ", id, " is in a step that is not there");
  CHECK(sequence.known == sequence.request.prompt_tokens + sequence.sampled, "sequence ", id, " known=", sequence.known);
  CHECK(sequence.sampled < sequence.request.max_new_tokens, "sequence ", id, " sampled=", sequence.sampled);
  CHECK(sequence.computed >= 0 && sequence.computed < sequence.known, "sequence ", id, " computed=", sequence.computed);
  const bool waiting = sequence.place == Sequence::Place::Waiting;
  CHECK(!waiting || (sequence.pending && sequence.computed == 0), "sequence ", id, " waits with state");
  CHECK(sequence.pending || (sequence.sampled > 0 && sequence.remaining() == 1), "sequence ", id, " is no decode");
  const auto in_ticket_queue = std::count(pending_by_ticket.begin(), pending_by_ticket.end(), slot);
  const auto in_deadline_queue = std::count(pending_by_deadline.begin(), pending_by_deadline.end(), slot);
  const int expected = sequence.pending ? 1 : 0;
  CHECK(in_ticket_queue == expected && in_deadline_queue == expected, "sequence ", id, " queued ", in_ticket_queue, "/",
        in_deadline_queue);
  CHECK(std::count(running.begin(), running.end(), slot) == (waiting ? 0 : 1), "sequence ", id, " in running");
  if (waiting) return;
  const auto held = static_cast<std::int32_t>(table_of(sequence).size());
  CHECK(held >= blocks_for_tokens(sequence.computed), "sequence ", id, " held=", held, " computed=", sequence.computed);
  CHECK(!sequence.pending || held >= blocks_for_tokens(sequence.known), "sequence ", id, " held=", held,
        " known=", sequence.known);
  CHECK(held <= blocks_for_tokens(longest), "sequence ", id, " held=", held);
}

void Scheduler::State::mark_blocks(std::vector<std::uint8_t>& owned) const {
  for (const Slot slot : running) {
    for (const BlockId block : table_of(at(slot))) {
      CHECK(pool->blocks.is_taken(block), "block ", block.value, " is held and free");
      CHECK(owned[static_cast<std::size_t>(block.value)] == 0, "block ", block.value, " has two owners");
      owned[static_cast<std::size_t>(block.value)] = 1;
    }
  }
}

void Scheduler::State::check_integrity() const {
  std::size_t live = 0;
  for (std::size_t slot = 0; slot < sequences.size(); ++slot) {
    if (sequences[slot].place == Sequence::Place::Free) continue;
    check_sequence(static_cast<Slot>(slot));
    ++live;
  }
  CHECK(live == slot_of.size(), "live=", live, " ids=", slot_of.size());
  CHECK(live + free_slots.size() == sequences.size(), "live=", live, " free=", free_slots.size());
  CHECK(running.size() + free_tables.size() == tables.size(), "running=", running.size(), " free tables=", free_tables.size());

  const auto older = [this](Slot left, Slot right) { return at(left).ticket < at(right).ticket; };
  CHECK(std::is_sorted(running.begin(), running.end(), older));
  CHECK(std::is_sorted(pending_by_ticket.begin(), pending_by_ticket.end(), older));
  CHECK(std::is_sorted(pending_by_deadline.begin(), pending_by_deadline.end(),
                       [this](Slot left, Slot right) { return at(left).ttft_deadline < at(right).ttft_deadline; }));
}

void KvPool::check_integrity(std::span<const BlockId> others) const {
  blocks.check_integrity();
  std::vector<std::uint8_t> owned(static_cast<std::size_t>(blocks.block_count()), 0);
  for (const Scheduler::State* lane : lanes) lane->mark_blocks(owned);
  for (const BlockId block : others) {
    CHECK(blocks.is_taken(block) && owned[static_cast<std::size_t>(block.value)] == 0, "block ", block.value,
          " of a copy is free or has two owners");
    owned[static_cast<std::size_t>(block.value)] = 1;
  }
  const auto held = static_cast<std::int32_t>(std::count(owned.begin(), owned.end(), 1));
  CHECK(held + blocks.free_count() == blocks.block_count(), "held=", held, " free=", blocks.free_count(), " of ",
        blocks.block_count());
}

}  // namespace rubato::policies
