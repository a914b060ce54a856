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
  CHECK(sequence.state.has_value() == (!waiting && limits.state_count > 0), "sequence ", id,
        " state=", sequence.state.has_value());
  CHECK(!sequence.start || (sequence.state && sequence.computed > 0), "sequence ", id, " begins from a snapshot of nothing");
  CHECK(waiting || sequence.expected == 0, "sequence ", id, " runs and expects ", sequence.expected);
  const auto hashes = static_cast<std::int32_t>(prefix_of(slot).size());
  CHECK(hashes * kv_block_tokens <= sequence.known, "sequence ", id, " has ", hashes, " hashes, known=", sequence.known);
  if (waiting) return;
  const auto held = static_cast<std::int32_t>(table_of(sequence).size());
  CHECK(held >= blocks_for_tokens(sequence.computed), "sequence ", id, " held=", held, " computed=", sequence.computed);
  CHECK(!sequence.pending || held >= blocks_for_tokens(sequence.known), "sequence ", id, " held=", held,
        " known=", sequence.known);
  CHECK(held <= blocks_for_tokens(longest), "sequence ", id, " held=", held);
}

void Scheduler::State::count_blocks(std::vector<std::int32_t>& references) const {
  for (const Slot slot : running) {
    for (const BlockId block : table_of(at(slot))) ++references[static_cast<std::size_t>(block.value)];
  }
}

void Scheduler::State::count_states(std::vector<std::int32_t>& owners, std::vector<std::int32_t>& pins) const {
  for (const Slot slot : running) {
    const Sequence& sequence = at(slot);
    if (sequence.state) ++owners[static_cast<std::size_t>(sequence.state->value)];
    if (sequence.start) ++pins[static_cast<std::size_t>(sequence.start->value)];
  }
  if (!open) return;
  for (const PlannedRow& row : plan.rows) {
    if (!row.state || !row.state->save) continue;
    const StateId save = row.state->save->to;
    CHECK(pool->states.is_being_written(save), "state ", save.value, " is saved to and no snapshot in the making");
    ++owners[static_cast<std::size_t>(save.value)];
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

void KvPool::check_integrity(const HeldElsewhere& others) const {
  check_blocks(others);
  check_states(others);
}

void KvPool::check_blocks(const HeldElsewhere& others) const {
  blocks.check_integrity();
  std::vector<std::int32_t> references(static_cast<std::size_t>(blocks.block_count()), 0);
  for (const Scheduler::State* lane : lanes) lane->count_blocks(references);
  for (const BlockId block : others.blocks) ++references[static_cast<std::size_t>(block.value)];
  for (std::int32_t block = 0; block < blocks.block_count(); ++block) {
    const std::int32_t held = references[static_cast<std::size_t>(block)];
    CHECK(held == blocks.references(BlockId{block}), "block ", block, " is held ", held, " times and has ",
          blocks.references(BlockId{block}), " references");
    CHECK(held <= 1 || blocks.is_cached(BlockId{block}), "block ", block, " is shared and may be written");
  }
}

void KvPool::check_states(const HeldElsewhere& others) const {
  states.check_integrity();
  std::vector<std::int32_t> owners(static_cast<std::size_t>(states.state_count()), 0);
  std::vector<std::int32_t> pins(owners.size(), 0);
  for (const Scheduler::State* lane : lanes) lane->count_states(owners, pins);
  for (const StateId state : others.states) ++owners[static_cast<std::size_t>(state.value)];
  for (const StateId state : others.pinned) ++pins[static_cast<std::size_t>(state.value)];
  for (std::int32_t slot = 0; slot < states.state_count(); ++slot) {
    const StateId state{slot};
    const std::int32_t expected = states.is_working(state) || states.is_being_written(state) ? 1 : 0;
    CHECK(owners[static_cast<std::size_t>(slot)] == expected, "state ", slot, " has ", owners[static_cast<std::size_t>(slot)],
          " owners");
    CHECK(pins[static_cast<std::size_t>(slot)] == states.pins(state), "state ", slot, " pins=", states.pins(state), " of ",
          pins[static_cast<std::size_t>(slot)]);
  }
}

}  // namespace rubato::policies
