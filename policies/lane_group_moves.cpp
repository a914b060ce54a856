// SPDX-License-Identifier: Apache-2.0
// Which lane a sequence belongs to, how it gets there within a pool, and who gets a decode slot.
#include <algorithm>
#include <limits>
#include <utility>

#include "manifests/check.h"
#include "policies/lane_group_state.h"

namespace rubato::policies {
namespace {

/// What a lane's step-time model says of tokens [begin, begin + count) of a prompt, in seconds.
double prefill_seconds(const StepTimeModel::Vector& coefficients, std::int32_t begin, std::int32_t tokens) {
  const double count = tokens;
  const double pairs = count * (begin + 0.5 * count);
  return count * coefficients[1] + pairs * coefficients[2];
}

// Output that routing counts a decode for: what it will really produce nobody knows, and the far future says little about now.
constexpr std::int32_t foreseen_new_tokens = 128;

}  // namespace

bool LaneGroup::State::belongs(LaneRole role, const Sequence& sequence) {
  switch (role) {
    case LaneRole::Mixed:
      return true;
    case LaneRole::Prefill:
      return sequence.pending;
    case LaneRole::Decode:
      return !sequence.pending;
    case LaneRole::Spare:
      return false;
  }
  return true;
}

// Work in seconds by the lane's own step-time model, so that a slower or busier device counts as such.
Duration LaneGroup::State::outstanding(LaneIndex index) const {
  const Lane& lane = at(index);
  const StepTimeModel::Vector coefficients = lane.step_time.coefficients();
  double seconds = 0;
  for (const Slot slot : lane.pending_by_ticket) {
    seconds += prefill_seconds(coefficients, lane.at(slot).begin(), lane.at(slot).remaining());
  }
  for (const Slot slot : lane.running) {
    const Sequence& sequence = lane.at(slot);
    if (sequence.pending) continue;
    const double steps = std::min(sequence.request.max_new_tokens - sequence.sampled, foreseen_new_tokens);
    seconds += steps * (coefficients[1] + coefficients[3] + sequence.known * coefficients[4]);
  }
  return from_seconds(seconds);
}

// With prefix caching a lane that has some of the prompt is preferred, unless it is busier by more than that saves.
LaneIndex LaneGroup::State::lane_for_new(std::int32_t known, std::span<const BlockHash> prefix) const {
  const auto work_with_it = [&](LaneIndex lane) {
    Duration work = outstanding(lane);
    if (pool_of(lane).caching) {
      const std::int32_t begin = at(lane).find_prefix(known, prefix).tokens;
      work += from_seconds(prefill_seconds(at(lane).step_time.coefficients(), begin, known - begin));
    }
    return work;
  };
  std::optional<LaneIndex> best;
  std::optional<Duration> least;
  for (std::int32_t i = 0; i < lane_count(); ++i) {
    const LaneIndex lane{i};
    if (!takes_new_work(lane)) continue;
    if (!best) {
      best = lane;
      continue;
    }
    if (!least) least = work_with_it(*best);
    if (const Duration work = work_with_it(lane); work < *least) {
      best = lane;
      least = work;
    }
  }
  CHECK(best, "no lane takes new work");
  return *best;
}

// Whether a sequence that waits in a lane is there for its prefix, and would still end later elsewhere.
bool LaneGroup::State::better_left(LaneIndex lane, Slot slot, LaneIndex to) const {
  const Sequence& sequence = at(lane).at(slot);
  if (sequence.expected == 0 || device_of(lane) == device_of(to)) return false;
  const std::int32_t begin = at(to).find_prefix(sequence.known, at(lane).prefix_of(slot)).tokens;
  if (begin >= sequence.expected) return false;
  const double there = prefill_seconds(at(to).step_time.coefficients(), begin, sequence.known - begin);
  return outstanding(lane) <= outstanding(to) + from_seconds(there);
}

/// Sequences that the lane may still take over.
std::int32_t LaneGroup::State::room(LaneIndex lane) const {
  return std::max(at(lane).settings.knobs.max_num_seqs - at(lane).running_count() - at(lane).pool->arriving, 0);
}

std::int32_t LaneGroup::State::reserved_in(LaneIndex index) const {
  const Lane& lane = at(index);
  return static_cast<std::int32_t>(
      std::count_if(lane.running.begin(), lane.running.end(), [&](Slot slot) { return lane.at(slot).reserved; }));
}

/// Slots that no decode has, no copy is on its way to, and no prefill holds.
std::int32_t LaneGroup::State::free_decode_slots() const {
  std::int32_t slots = 0;
  for (std::int32_t i = 0; i < lane_count(); ++i) {
    const LaneIndex lane{i};
    if (role(lane) == LaneRole::Decode) slots += room(lane);
    if (role(lane) == LaneRole::Prefill) slots -= reserved_in(lane);
  }
  return slots;
}

std::int32_t LaneGroup::State::to_move(LaneIndex index) const {
  if (role(index) == LaneRole::Mixed) return 0;
  const Lane& lane = at(index);
  std::int32_t count = 0;
  for (const Slot slot : lane.running) count += belongs(role(index), lane.at(slot)) ? 0 : 1;
  if (role(index) == LaneRole::Prefill) return count;
  for (const Slot slot : lane.pending_by_ticket) count += lane.at(slot).place == Sequence::Place::Waiting ? 1 : 0;
  return count;
}

std::optional<LaneIndex> LaneGroup::State::decode_lane_for(LaneIndex from) const {
  std::optional<LaneIndex> best;
  for (std::int32_t i = 0; i < lane_count(); ++i) {
    const LaneIndex lane{i};
    const bool decodes = role(lane) == LaneRole::Decode || role(lane) == LaneRole::Mixed;
    if (!decodes || lane == from || room(lane) == 0) continue;
    if (!best || room(lane) > room(*best)) best = lane;
  }
  return best;
}

std::optional<LaneIndex> LaneGroup::State::prefill_lane_for(LaneIndex from) const {
  std::optional<LaneIndex> best;
  for (std::int32_t i = 0; i < lane_count(); ++i) {
    const LaneIndex lane{i};
    if (!takes_new_work(lane) || lane == from || room(lane) == 0) continue;
    if (!best || outstanding(lane) < outstanding(*best)) best = lane;
  }
  return best;
}

// Brings every sequence that can move to where it belongs, those that wait for decode slots in the order in which they came to.
void LaneGroup::State::settle(TimePoint now) {
  for (Handoff& handoff : handoffs) {
    if (handoff.stage == Handoff::Stage::Open) advance(handoff, now);
  }
  strays.clear();
  for (std::int32_t i = 0; i < lane_count(); ++i) collect_strays(LaneIndex{i});
  sort_by_readiness(strays);
  for (const Claim& stray : strays) relocate(stray.lane, stray.slot, now);
  if (!switching_since) return;
  for (std::int32_t i = 0; i < lane_count(); ++i) {
    if (to_move(LaneIndex{i}) > 0) return;
  }
  counts.switches_done = counts.switches;
  counts.last_switch = now - *switching_since;
  switching_since.reset();
}

void LaneGroup::State::collect_strays(LaneIndex index) {
  if (role(index) == LaneRole::Mixed) return;
  Lane& lane = at(index);
  for (const Slot slot : lane.running) {
    Sequence& sequence = lane.at(slot);
    if (belongs(role(index), sequence) || sequence.in_step || sequence.copying) continue;
    if (sequence.ready == 0) sequence.ready = next_ready++;
    strays.push_back({.lane = index, .slot = slot, .ready = sequence.ready, .ticket = sequence.ticket});
  }
  if (role(index) == LaneRole::Prefill) return;
  for (const Slot slot : lane.pending_by_ticket) {
    if (lane.at(slot).place == Sequence::Place::Waiting)
      strays.push_back({.lane = index, .slot = slot, .ticket = lane.at(slot).ticket});
  }
}

void LaneGroup::State::sort_by_readiness(std::vector<Claim>& claims) {
  std::sort(claims.begin(), claims.end(), [](const Claim& left, const Claim& right) {
    return left.ready != right.ready ? left.ready < right.ready : left.ticket < right.ticket;
  });
}

void LaneGroup::State::relocate(LaneIndex from, Slot slot, TimePoint now) {
  Sequence& sequence = at(from).at(slot);
  if (sequence.place == Sequence::Place::Waiting) {
    move_sequence(from, slot, lane_for_new(sequence.known, at(from).prefix_of(slot)));
    return;
  }
  if (!sequence.pending && !sequence.reserved && free_decode_slots() <= 0 && role(from) == LaneRole::Prefill) return;
  const std::optional<LaneIndex> to = sequence.pending ? prefill_lane_for(from) : decode_lane_for(from);
  if (!to) return;
  if (device_of(*to) == device_of(from)) {
    move_sequence(from, slot, *to);
  } else if (now >= sequence.copy_not_before) {
    static_cast<void>(begin_copy(from, slot, *to, now));
  }
}

void LaneGroup::State::move_sequence(LaneIndex from, Slot slot, LaneIndex to) {
  CarriedSequence carrier;
  Sequence& carried = carrier.sequence;
  at(from).release(slot, carrier, moving_blocks);
  ++changes;
  if (carried.place == Sequence::Place::Running && !carried.pending) ++counts.moved;
  carried.held = carried.reserved = false;
  carried.ready = 0;
  carried.ready_since.reset();
  at(to).adopt(carrier, moving_blocks);
  lane_of[carried.request.id] = to;
}

// A lane that could start another one takes the oldest that waits anywhere, one at a time: so nobody who came later, to a lane
// with a shorter queue, is served long before those who wait in a longer one.
void LaneGroup::State::take_waiting(LaneIndex index) {
  if (!takes_new_work(index) || room(index) == 0) return;
  const auto oldest_waiting = [this](LaneIndex lane) -> std::optional<Slot> {
    const auto& pending = at(lane).pending_by_ticket;
    const auto place = std::find_if(pending.begin(), pending.end(),
                                    [&](Slot slot) { return at(lane).at(slot).place == Sequence::Place::Waiting; });
    return place == pending.end() ? std::nullopt : std::optional(*place);
  };
  LaneIndex from = index;
  std::optional<Slot> oldest = oldest_waiting(index);
  for (std::int32_t i = 0; i < lane_count(); ++i) {
    const LaneIndex lane{i};
    if (lane == index || !takes_new_work(lane)) continue;
    const std::optional<Slot> there = oldest_waiting(lane);
    if (there && at(index).admission.left <= 0 && at(index).admission.counts(at(lane).at(*there))) continue;
    if (!there || !may_admit(at(index).pool_load(), at(lane).wanted(*there)) || !at(index).may_take_state()) continue;
    if (better_left(lane, *there, index)) continue;
    if (oldest && at(from).at(*oldest).ticket < at(lane).at(*there).ticket) continue;
    from = lane;
    oldest = there;
  }
  if (from != index) move_sequence(from, *oldest, index);
}

// Says of each sequence of the lane whether it may have a row in the next step, and what admissions take.
void LaneGroup::State::open_gates(LaneIndex index, TimePoint now) {
  Lane& lane = at(index);
  lane.admission = {};
  std::int32_t places = limits.max_handoffs;  // left for finished prefills that have yet to go
  for (const Slot slot : lane.running) {
    Sequence& sequence = lane.at(slot);
    sequence.held = sequence.frozen;
    if (!sequence.pending) --places;
  }
  if (role(index) != LaneRole::Prefill) return;
  const KnobValues& knobs = lane.settings.knobs;
  const bool reserves = knobs.reservation != Reservation::PrefillComplete;
  if (reserves) {
    want_slots(index, now);
    grant_slots(now);
  }
  for (const Slot slot : lane.running) {
    Sequence& sequence = lane.at(slot);
    if (!ends_next(sequence, knobs) || sequence.copying) continue;
    sequence.held = (reserves && !sequence.reserved) || places-- <= 0;
  }
  const std::int32_t slots = std::max(free_decode_slots(), 0);
  if (knobs.reservation == Reservation::Early) {
    lane.admission = {.left = slots, .most_tokens = std::numeric_limits<std::int32_t>::max()};
  } else {
    lane.admission = {.left = reserves ? std::min(slots, places) : places,
                      .most_tokens = knobs.max_num_batched_tokens,
                      .kind = reserves ? AdmissionTake::Kind::DecodeSlot : AdmissionTake::Kind::QueuePlace};
  }
}

/// A prefill that could run its last chunk in the next step, and decodes after that.
bool LaneGroup::State::ends_next(const Sequence& sequence, const KnobValues& knobs) {
  return sequence.pending && !sequence.cancelled && sequence.will_decode() &&
         sequence.remaining() <= knobs.max_num_batched_tokens;
}

void LaneGroup::State::want_slots(LaneIndex index, TimePoint now) {
  Lane& lane = at(index);
  const KnobValues& knobs = lane.settings.knobs;
  const auto want = [&](Sequence& sequence) {
    if (sequence.ready > 0 || sequence.reserved || sequence.copying) return;
    sequence.ready = next_ready++;
    sequence.ready_since = now;
  };
  for (const Slot slot : lane.running) {
    if (ends_next(lane.at(slot), knobs)) want(lane.at(slot));
  }
  // Of those that take theirs on admission, the first in line.
  const auto& pending = lane.pending_by_ticket;
  const auto first =
      std::find_if(pending.begin(), pending.end(), [&](Slot slot) { return lane.at(slot).place == Sequence::Place::Waiting; });
  if (first == pending.end() || room(index) == 0) return;
  Sequence& sequence = lane.at(*first);
  if (sequence.will_decode() && (knobs.reservation == Reservation::Early || ends_next(sequence, knobs))) want(sequence);
}

// First come, first served over all prefill lanes.
void LaneGroup::State::grant_slots(TimePoint now) {
  std::int32_t free = free_decode_slots();
  if (free <= 0) return;
  wanting.clear();
  for (std::int32_t i = 0; i < lane_count(); ++i) {
    const LaneIndex lane{i};
    if (role(lane) != LaneRole::Prefill) continue;
    for (const Slot slot : at(lane).running) {
      const Sequence& sequence = at(lane).at(slot);
      if (sequence.ready == 0 || sequence.reserved || sequence.copying || !ends_next(sequence, at(lane).settings.knobs)) continue;
      wanting.push_back({.lane = lane, .slot = slot, .ready = sequence.ready, .ticket = sequence.ticket});
    }
  }
  sort_by_readiness(wanting);
  for (const Claim& next : wanting) {
    if (free-- <= 0) return;
    Sequence& sequence = at(next.lane).at(next.slot);
    sequence.reserved = true;
    count_wait(sequence, now);
    // The blocks that are full already travel while the last chunk runs.
    const std::optional<LaneIndex> to = decode_lane_for(next.lane);
    if (to && device_of(*to) != device_of(next.lane) && now >= sequence.copy_not_before)
      static_cast<void>(begin_copy(next.lane, next.slot, *to, now));
  }
}

void LaneGroup::State::count_wait(Sequence& sequence, TimePoint now) {
  if (sequence.ready_since && now > *sequence.ready_since) {
    ++counts.reservation_waits;
    counts.reservation_waiting += now - *sequence.ready_since;
  }
  sequence.ready_since.reset();
}

}  // namespace rubato::policies
