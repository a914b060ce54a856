// SPDX-License-Identifier: Apache-2.0
// Rounds: lanes of one role whose model synchronises all ranks take their steps together. A lane without sequences does not hold
// the others up.
#include <algorithm>
#include <utility>

#include "policies/lane_group_state.h"

namespace rubato::policies {
namespace {

// Rounds that prefills wait for those of other lanes, at most.
constexpr std::int32_t held_rounds_max = 4;

}  // namespace

bool LaneGroup::State::in_lockstep(LaneIndex lane) const {
  if (limits.lockstep == Lockstep::Off || role(lane) == LaneRole::Spare) return false;
  return std::count(roles.begin(), roles.end(), role(lane)) > 1;
}

// Whether the lane may plan a step now; begins the next round when all have had their turn and somebody took it. A round in which
// nobody has anything to run stays as it is, so that lanes that wait do not turn it over and over.
bool LaneGroup::State::may_step(LaneIndex lane) {
  at(lane).prefills = Lane::Prefills::Run;
  if (!in_lockstep(lane)) return true;
  Round& round = rounds[static_cast<std::size_t>(role(lane))];
  bool over = true;
  for (std::int32_t i = 0; i < lane_count(); ++i) {
    if (role(LaneIndex{i}) != role(lane)) continue;
    const Lane& other = at(LaneIndex{i});
    const bool done = round.turns[static_cast<std::size_t>(i)] != Round::Turn::Open || other.slot_of.empty();
    over = over && done && !other.open;
  }
  if (over && round.steps > 0) {
    begin_round(role(lane));
  } else if (over && round.held > 0) {  // only what was held had anything to run
    round.held = 0;
    ++changes;
  }
  if (round.turns[static_cast<std::size_t>(lane.value)] == Round::Turn::Taken) return false;
  if (round.held > 0) at(lane).prefills = Lane::Prefills::Held;
  return true;
}

void LaneGroup::State::begin_round(LaneRole of) {
  Round& round = rounds[static_cast<std::size_t>(of)];
  if (round.steps > 0) {
    ++lockstep.rounds;
    lockstep.stepping += round.sum;
    lockstep.waiting += round.longest * round.steps - round.sum;
  }
  round.longest = round.sum = Duration::zero();
  round.steps = 0;
  std::fill(round.turns.begin(), round.turns.end(), Round::Turn::Open);
  std::int32_t prefilling = 0;
  std::int32_t busy = 0;
  bool decoding = false;
  for (std::int32_t i = 0; i < lane_count(); ++i) {
    if (role(LaneIndex{i}) != of) continue;
    const Lane& lane = at(LaneIndex{i});
    busy += lane.slot_of.empty() ? 0 : 1;
    prefilling += lane.pending_by_ticket.empty() ? 0 : 1;
    decoding = decoding || lane.pending_by_ticket.size() < lane.slot_of.size();
  }
  // Chunks wait until every busy lane has some, so that none idles through another's.
  const bool waits = limits.lockstep == Lockstep::Aligned && prefilling > 0 && prefilling < busy && decoding;
  round.held = waits && round.held < held_rounds_max ? round.held + 1 : 0;
}

void LaneGroup::State::leave_round(LaneIndex lane, Round::Turn turn, Duration duration) {
  if (!in_lockstep(lane) || (turn == Round::Turn::InVain && at(lane).slot_of.empty())) return;
  Round& round = rounds[static_cast<std::size_t>(role(lane))];
  Round::Turn& before = round.turns[static_cast<std::size_t>(lane.value)];
  if (std::exchange(before, turn) == Round::Turn::Open) ++changes;
  if (turn == Round::Turn::InVain) return;
  round.longest = std::max(round.longest, duration);
  round.sum += duration;
  ++round.steps;
}

}  // namespace rubato::policies
