// SPDX-License-Identifier: Apache-2.0
// How sequences move between waiting and running, and how blocks move with them.
#include <algorithm>
#include <utility>

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

bool Scheduler::State::waits_for_others() const {
  if (pool->lanes.size() > 1 || pool->arriving > 0 || pool->buried_blocks > 0) return true;
  if ((admission.most_tokens > 0 && admission.left <= 0) || prefills == Prefills::Held) return true;
  return std::any_of(running.begin(), running.end(), [this](Slot slot) { return at(slot).held || at(slot).copying; });
}

std::int32_t Scheduler::State::committed_blocks() const {
  std::int32_t committed = 0;
  for (const Slot slot : running) committed += std::max(wanted(slot), static_cast<std::int32_t>(table_of(at(slot)).size()));
  return committed;
}

void Scheduler::State::admit(Slot slot, const PrefixHit& hit) {
  Sequence& sequence = at(slot);
  CHECK(sequence.place == Sequence::Place::Waiting && !free_tables.empty());
  insert_running(slot);
  take_prefix(slot, hit);
  std::vector<BlockId>& table = table_of(sequence);
  const auto needed = static_cast<std::size_t>(blocks_for_tokens(sequence.known));
  while (table.size() < needed) table.push_back(pool->take());
}

void Scheduler::State::insert_running(Slot slot) {
  Sequence& sequence = at(slot);
  sequence.place = Sequence::Place::Running;
  sequence.table = free_tables.back();
  free_tables.pop_back();
  const auto older = [this](Slot left, Slot right) { return at(left).ticket < at(right).ticket; };
  running.insert(std::upper_bound(running.begin(), running.end(), slot, older), slot);
}

void Scheduler::State::leave_running(Slot slot) {
  Sequence& sequence = at(slot);
  CHECK(sequence.place == Sequence::Place::Running);
  std::vector<BlockId>& table = table_of(sequence);
  pool->give_table(table);
  table.clear();
  give_states(sequence);
  free_tables.push_back(sequence.table);
  const auto place = std::find(running.begin(), running.end(), slot);
  CHECK(place != running.end(), "slot ", slot);
  running.erase(place);
  // Of a plan that is open without it, it is no decode any more.
  if (open && !sequence.in_step && !sequence.pending) std::erase(decodes, slot);
}

void Scheduler::State::lose_blocks(Slot slot, TimePoint now) {
  Sequence& sequence = at(slot);
  leave_running(slot);
  sequence.place = Sequence::Place::Waiting;
  sequence.waiting_since = now;
  sequence.computed = sequence.registered = 0;
  sequence.decode_gap = 0;
  sequence.reserved = sequence.held = sequence.starved = false;
  sequence.ready = 0;
  sequence.ready_since.reset();
  if (!sequence.pending) enter_pending(slot);
  ++preemptions;
}

void Scheduler::State::preempt(Slot slot, State& by) {
  lose_blocks(slot, by.planned_at);
  at(slot).preempted_now = &by == this;
  by.plan.preempted.push_back(at(slot).request.id);
}

// Makes the blocks of a decode reach its next token. False: no row for it now.
bool Scheduler::State::secure_block(Slot slot) {
  std::vector<BlockId>& table = table_of(at(slot));
  if (static_cast<std::int32_t>(table.size()) >= blocks_for_tokens(at(slot).computed + 1)) return true;
  if (pool->free_for(at(slot).ticket) <= 0) {
    // One that gives way frees nothing where others share all that it has.
    do {
      if (!make_room_for(slot)) return false;
    } while (pool->blocks.free_count() == 0);
  }
  table.push_back(pool->take());
  return true;
}

// The youngest running sequence of the pool without a row in an open step gives up all of its blocks, provided it is younger
// than this one. Where such a younger one is in another lane's step, or is being copied, this one waits for the end of that.
// The youngest of all gives way itself.
bool Scheduler::State::make_room_for(Slot slot) {
  Sequence& sequence = at(slot);
  State* victim_lane = nullptr;
  Slot victim = 0;
  Sequence* busy = nullptr;  // the youngest that cannot give its blocks yet
  for (State* lane : pool->lanes) {
    for (auto place = lane->running.rbegin(); place != lane->running.rend(); ++place) {
      Sequence& other = lane->at(*place);
      if (other.ticket <= sequence.ticket) break;
      if (other.in_step || other.copying) {
        const bool in_this_step = lane == this && other.in_step;
        if (!in_this_step && (busy == nullptr || other.ticket > busy->ticket)) busy = &other;
        continue;
      }
      if (victim_lane == nullptr || other.ticket > victim_lane->at(victim).ticket) {
        victim_lane = lane;
        victim = *place;
      }
      break;
    }
  }
  if (victim_lane != nullptr) {
    victim_lane->preempt(victim, *this);
    return true;
  }
  if (busy != nullptr) busy->condemned = busy->in_step;
  if (busy != nullptr || sequence.copying || pool->blocks.free_count() > 0) {
    sequence.starved = true;
    return false;
  }
  // Otherwise younger ones of this lane have rows in this very step.
  if (running.back() == slot) preempt(slot, *this);
  return false;
}

Slot Scheduler::State::take_slot(const Sequence& sequence) {
  CHECK(!slot_of.contains(sequence.request.id), "sequence ", sequence.request.id.value, " is already here");
  CHECK(!free_slots.empty());
  const Slot slot = free_slots.back();
  free_slots.pop_back();
  at(slot) = sequence;
  return slot;
}

void Scheduler::State::release(Slot slot, CarriedSequence& carried, std::vector<BlockId>& blocks) {
  Sequence& here = at(slot);
  CHECK(!here.in_step && !here.cancelled && blocks.empty());
  carried.sequence = here;
  carried.entry = slot_of.extract(here.request.id);
  std::swap(carried.prefix, prefix_of(slot));
  if (here.place == Sequence::Place::Running) std::swap(table_of(here), blocks);
  here.state.reset();
  here.start.reset();
  end(slot);
}

void Scheduler::State::adopt(CarriedSequence& carried, std::vector<BlockId>& blocks) {
  const Slot slot = take_slot(carried.sequence);
  carried.entry.mapped() = slot;
  slot_of.insert(std::move(carried.entry));
  std::swap(prefix_of(slot), carried.prefix);
  Sequence& sequence = at(slot);
  // Steps are numbered lane by lane.
  sequence.added_step = plan.step_number;
  sequence.last_decode_step = sequence.decode_step_before = plan.step_number;
  sequence.decode_gap = 0;
  sequence.preempted_now = sequence.starved = sequence.condemned = false;
  if (sequence.place == Sequence::Place::Running) {
    CHECK(!free_tables.empty());
    insert_running(slot);
    std::swap(table_of(sequence), blocks);
  } else {
    sequence.expected = find_prefix(slot).tokens;  // in the pool of this lane
  }
  if (std::exchange(sequence.pending, false)) enter_pending(slot);
}

}  // namespace rubato::policies
