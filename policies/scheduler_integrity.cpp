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

void Scheduler::State::check_integrity() const {
  pool.check_integrity();
  std::size_t live = 0;
  for (std::size_t slot = 0; slot < sequences.size(); ++slot) {
    if (sequences[slot].place == Sequence::Place::Free) continue;
    check_sequence(static_cast<Slot>(slot));
    ++live;
  }
  CHECK(live == slot_of.size(), "live=", live, " ids=", slot_of.size());
  CHECK(live + free_slots.size() == sequences.size(), "live=", live, " free=", free_slots.size());
  CHECK(running.size() + free_tables.size() == tables.size(), "running=", running.size(), " free tables=", free_tables.size());

  std::vector<std::uint8_t> owned(static_cast<std::size_t>(pool.block_count()), 0);
  std::int32_t held = 0;
  for (const Slot slot : running) {
    for (const BlockId block : table_of(at(slot))) {
      CHECK(pool.is_taken(block), "block ", block.value, " is held and free");
      CHECK(owned[static_cast<std::size_t>(block.value)] == 0, "block ", block.value, " has two owners");
      owned[static_cast<std::size_t>(block.value)] = 1;
      ++held;
    }
  }
  CHECK(held + pool.free_count() == pool.block_count(), "held=", held, " free=", pool.free_count(), " of ", pool.block_count());

  const auto older = [this](Slot left, Slot right) { return at(left).ticket < at(right).ticket; };
  CHECK(std::is_sorted(running.begin(), running.end(), older));
  CHECK(std::is_sorted(pending_by_ticket.begin(), pending_by_ticket.end(), older));
  CHECK(std::is_sorted(pending_by_deadline.begin(), pending_by_deadline.end(),
                       [this](Slot left, Slot right) { return at(left).ttft_deadline < at(right).ttft_deadline; }));
}

}  // namespace rubato::policies
