// SPDX-License-Identifier: Apache-2.0
// Sequences on their way from one pool to another: which blocks and when the state may be copied, who owns them meanwhile, and
// what becomes of both sides when something goes wrong.
#include <algorithm>
#include <utility>

#include "manifests/check.h"
#include "policies/lane_group_state.h"

namespace rubato::policies {
namespace {

// A sequence stands still once no more blocks than this are left to copy.
constexpr std::int32_t last_blocks = 8;

constexpr Duration retry_pause = std::chrono::seconds(1);

}  // namespace

Handoff* LaneGroup::State::handoff_of(LaneIndex lane, Slot slot) {
  if (!at(lane).at(slot).copying) return nullptr;
  const auto found = std::find_if(handoffs.begin(), handoffs.end(), [&](const Handoff& handoff) {
    return handoff.stage == Handoff::Stage::Open && handoff.from == lane && handoff.slot == slot;
  });
  CHECK(found != handoffs.end(), "lane ", lane.value, " slot ", slot);
  return &*found;
}

std::optional<std::size_t> LaneGroup::State::find_order(std::uint64_t epoch) const {
  for (std::size_t i = 0; i < handoffs.size(); ++i) {
    if (handoffs[i].stage != Handoff::Stage::Free && handoffs[i].order_open && handoffs[i].epoch == epoch) return i;
  }
  return std::nullopt;
}

// False: not now; there is no room on the way or where it leads.
bool LaneGroup::State::begin_copy(LaneIndex from, Slot slot, LaneIndex to, TimePoint now) {
  const auto place = std::find_if(handoffs.begin(), handoffs.end(),
                                  [](const Handoff& handoff) { return handoff.stage == Handoff::Stage::Free; });
  if (place == handoffs.end()) return false;
  Sequence& sequence = at(from).at(slot);
  KvPool& target = pool_of(to);
  const std::int32_t wanted = at(from).wanted(slot);
  const std::int32_t needed = blocks_for_tokens(sequence.known);
  if (!may_admit(target.load(), wanted) || target.blocks.free_count() < needed || !at(to).may_take_state()) return false;
  Handoff& handoff = *place;
  handoff.stage = Handoff::Stage::Open;
  handoff.from = from;
  handoff.to = to;
  handoff.slot = slot;
  handoff.copied = 0;
  handoff.state_copied = false;
  handoff.promised = std::max(wanted, needed);
  handoff.began = now;
  handoff.given_up.reset();
  for (std::int32_t i = 0; i < needed; ++i) handoff.target_blocks.push_back(target.take());
  if (limits.each.state_count > 0) handoff.target_state = target.take_state();
  ++target.arriving;
  target.arriving_blocks += handoff.promised;
  ++changes;
  sequence.copying = true;
  sequence.reserved = false;  // counted as arriving from here on
  return true;
}

// A decode goes where decodes are wanted, a prefill that still has chunks to run elsewhere where prefills are.
bool LaneGroup::State::still_wanted(const Handoff& handoff) const {
  const Sequence& sequence = at(handoff.from).at(handoff.slot);
  const LaneRole from = role(handoff.from);
  const LaneRole to = role(handoff.to);
  if (from == LaneRole::Mixed) return false;
  const bool will_be_decode = !sequence.pending || from == LaneRole::Prefill;
  return will_be_decode ? from != LaneRole::Decode && (to == LaneRole::Decode || to == LaneRole::Mixed)
                        : takes_new_work(handoff.to);
}

void LaneGroup::State::advance(Handoff& handoff, TimePoint now) {
  if (handoff.order_open) return;
  Sequence& sequence = at(handoff.from).at(handoff.slot);
  if (sequence.in_step || sequence.cancelled) return;
  if (!still_wanted(handoff)) {
    let_go(handoff, now);
    return;
  }
  if (!sequence.frozen && !belongs(role(handoff.from), sequence) && blocks_ready(handoff) - handoff.copied <= last_blocks &&
      !freeze(handoff)) {
    let_go(handoff, now + retry_pause);
    return;
  }
  if (sequence.frozen && handoff.copied == blocks_ready(handoff) && !lacks_state(handoff)) adopt(handoff, now);
}

// False: the target has no block for what the sequence has grown by meanwhile. Waiting for one could be waiting for each other,
// where both pools are full.
bool LaneGroup::State::freeze(Handoff& handoff) {
  Sequence& sequence = at(handoff.from).at(handoff.slot);
  KvPool& target = pool_of(handoff.to);
  while (static_cast<std::int32_t>(handoff.target_blocks.size()) < blocks_for_tokens(sequence.known)) {
    if (target.blocks.free_count() == 0) return false;
    handoff.target_blocks.push_back(target.take());
  }
  const auto held = static_cast<std::int32_t>(handoff.target_blocks.size());
  target.arriving_blocks += std::max(held - handoff.promised, 0);
  handoff.promised = std::max(held, handoff.promised);
  sequence.frozen = sequence.held = true;
  ++changes;
  return true;
}

/// Blocks from the first on that hold something and that no step will write again before the sequence has moved.
std::int32_t LaneGroup::State::blocks_ready(const Handoff& handoff) const {
  if (!limits.each.blocks_hold_keys) return 0;
  const Sequence& sequence = at(handoff.from).at(handoff.slot);
  return sequence.frozen ? blocks_for_tokens(sequence.computed) : sequence.computed / kv_block_tokens;
}

/// Whether a state has still to be copied. One that has computed nothing has none.
bool LaneGroup::State::lacks_state(const Handoff& handoff) const {
  return handoff.target_state && !handoff.state_copied && at(handoff.from).at(handoff.slot).computed > 0;
}

/// Whether there is something to copy now. The state changes with every step: it goes when the sequence stands still.
bool LaneGroup::State::has_order(const Handoff& handoff) const {
  const auto held = static_cast<std::int32_t>(handoff.target_blocks.size());
  if (std::min(blocks_ready(handoff), held) > handoff.copied) return true;
  return at(handoff.from).at(handoff.slot).frozen && lacks_state(handoff);
}

void LaneGroup::State::make_order(Handoff& handoff, TimePoint now) {
  const Sequence& sequence = at(handoff.from).at(handoff.slot);
  const std::int32_t end = std::min(blocks_ready(handoff), static_cast<std::int32_t>(handoff.target_blocks.size()));
  const std::vector<BlockId>& table = at(handoff.from).table_of(sequence);
  handoff.order.clear();
  for (std::int32_t i = handoff.copied; i < end; ++i) {
    handoff.order.push_back(
        {.from = table[static_cast<std::size_t>(i)], .to = handoff.target_blocks[static_cast<std::size_t>(i)]});
  }
  handoff.state_order.reset();
  if (sequence.frozen && lacks_state(handoff))
    handoff.state_order = StateCopy{.from = sequence.start ? *sequence.start : *sequence.state, .to = *handoff.target_state};
  handoff.epoch = next_epoch++;
  handoff.order_open = true;
  handoff.ordered = now;
}

std::optional<CopyOrder> LaneGroup::State::next_copy(TimePoint now) {
  Handoff* oldest = nullptr;
  for (Handoff& handoff : handoffs) {
    if (handoff.stage != Handoff::Stage::Open || handoff.order_open) continue;
    if (at(handoff.from).at(handoff.slot).cancelled) continue;
    if (has_order(handoff) && (oldest == nullptr || handoff.began < oldest->began)) oldest = &handoff;
  }
  if (oldest == nullptr) return std::nullopt;
  make_order(*oldest, now);
  return CopyOrder{
      .epoch = oldest->epoch, .from = oldest->from, .to = oldest->to, .blocks = oldest->order, .state = oldest->state_order};
}

void LaneGroup::State::copied(std::uint64_t epoch, const Result<void>& outcome, TimePoint now) {
  const std::optional<std::size_t> found = find_order(epoch);
  if (!found) {
    ++counts.late_answers;
    return;
  }
  Handoff& handoff = handoffs[*found];
  handoff.order_open = false;
  if (handoff.stage == Handoff::Stage::Dead) {
    counts.late_answers += handoff.given_up ? 1 : 0;
    free_handoff(handoff);
    return;
  }
  if (!outcome) {
    if (!at(handoff.from).at(handoff.slot).cancelled) ++counts.failed;
    let_go(handoff, now + retry_pause);
  } else {
    handoff.copied += static_cast<std::int32_t>(handoff.order.size());
    handoff.state_copied = handoff.state_copied || handoff.state_order;
    counts.blocks += handoff.order.size();
  }
  settle(now);
}

void LaneGroup::State::expire(TimePoint now) {
  for (Handoff& handoff : handoffs) {
    if (handoff.stage == Handoff::Stage::Free || !handoff.order_open) continue;
    if (handoff.given_up) {
      if (now - *handoff.given_up > limits.handoff_lease) free_handoff(handoff);
      continue;
    }
    if (now - handoff.ordered <= limits.handoff_lease) continue;
    ++changes;
    ++counts.expired;
    ++counts.failed;
    if (handoff.stage == Handoff::Stage::Open) {
      // It keeps its own blocks: what a copier that is stuck still reads of them does no harm.
      Sequence& sequence = at(handoff.from).at(handoff.slot);
      sequence.copying = sequence.frozen = sequence.held = false;
      sequence.copy_not_before = now + limits.handoff_lease;
      handoff.stage = Handoff::Stage::Dead;
    }
    handoff.given_up = now;
  }
}

// The sequence has arrived: its blocks here are its own, those it left are free.
void LaneGroup::State::adopt(Handoff& handoff, TimePoint now) {
  CarriedSequence carrier;
  Sequence& carried = carrier.sequence;
  at(handoff.from).release(handoff.slot, carrier, moving_blocks);
  pool_of(handoff.from).give_table(moving_blocks);
  at(handoff.from).give_states(carried);
  carried.state = std::exchange(handoff.target_state, std::nullopt);
  carried.registered = 0;
  moving_blocks.clear();
  std::swap(moving_blocks, handoff.target_blocks);
  carried.held = carried.frozen = carried.copying = carried.reserved = false;
  carried.ready = 0;
  carried.ready_since.reset();
  const LaneIndex to = handoff.to;
  ++counts.copied;
  counts.copying += now - handoff.began;
  free_handoff(handoff);
  at(to).adopt(carrier, moving_blocks);
  lane_of[carried.request.id] = to;
}

// The sequence stays and goes on; nothing is being written on its behalf.
void LaneGroup::State::let_go(Handoff& handoff, TimePoint retry) {
  Sequence& sequence = at(handoff.from).at(handoff.slot);
  sequence.copying = sequence.frozen = sequence.held = false;
  sequence.copy_not_before = retry;
  free_handoff(handoff);
}

void LaneGroup::State::free_handoff(Handoff& handoff) {
  ++changes;
  KvPool& target = pool_of(handoff.to);
  KvPool& source = pool_of(handoff.from);
  target.give_table(handoff.target_blocks);
  source.give_table(handoff.source_blocks);
  source.buried_blocks -= static_cast<std::int32_t>(handoff.source_blocks.size());
  if (handoff.target_state) target.give_state(*handoff.target_state);
  if (handoff.source_state) source.give_state(*handoff.source_state);
  if (handoff.source_start) source.states.unpin(*handoff.source_start);
  handoff.target_state.reset();
  handoff.source_state.reset();
  handoff.source_start.reset();
  handoff.target_blocks.clear();
  handoff.source_blocks.clear();
  --target.arriving;
  target.arriving_blocks -= handoff.promised;
  handoff.stage = Handoff::Stage::Free;
  handoff.order_open = false;
}

// Before a sequence ends: what an open order reads and writes stays taken until it is answered.
void LaneGroup::State::bury(LaneIndex lane, Slot slot) {
  Handoff* handoff = handoff_of(lane, slot);
  if (handoff == nullptr) return;
  Sequence& sequence = at(lane).at(slot);
  sequence.copying = false;
  handoff->stage = Handoff::Stage::Dead;
  if (handoff->order_open) {
    std::swap(at(lane).table_of(sequence), handoff->source_blocks);
    std::swap(sequence.state, handoff->source_state);
    std::swap(sequence.start, handoff->source_start);
    pool_of(lane).buried_blocks += static_cast<std::int32_t>(handoff->source_blocks.size());
  } else {
    free_handoff(*handoff);
  }
}

std::optional<CopyOrder> LaneGroup::next_copy(TimePoint now) {
  return state_->next_copy(now);
}
void LaneGroup::copied(std::uint64_t epoch, const Result<void>& outcome, TimePoint now) {
  state_->copied(epoch, outcome, now);
}
bool LaneGroup::wants(std::uint64_t epoch) const {
  const std::optional<std::size_t> found = state_->find_order(epoch);
  if (!found) return false;
  const Handoff& handoff = state_->handoffs[*found];
  return handoff.stage == Handoff::Stage::Open && !state_->at(handoff.from).at(handoff.slot).cancelled;
}
void LaneGroup::expire(TimePoint now) {
  state_->expire(now);
}

}  // namespace rubato::policies
