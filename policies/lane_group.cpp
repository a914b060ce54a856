// SPDX-License-Identifier: Apache-2.0
// The life of sequences in a lane group, and its public door.
#include "policies/lane_group.h"

#include <algorithm>
#include <string>
#include <utility>

#include "manifests/check.h"
#include "policies/lane_group_state.h"
#include "policies/step_planner.h"

namespace rubato::policies {
namespace {

LaneGroupLimits checked(const LaneGroupLimits& limits) {
  CHECK(limits.devices >= 1 && (limits.lanes_per_device == 1 || (limits.lanes_per_device == 2 && limits.devices == 1)),
        "devices=", limits.devices, " lanes_per_device=", limits.lanes_per_device);
  CHECK(limits.max_handoffs >= 1 && limits.handoff_lease > Duration::zero());
  return limits;
}

}  // namespace

LaneRole lane_role(const LaneGroupLimits& limits, const KnobValues& knobs, LaneIndex lane) {
  const bool alone = limits.devices * limits.lanes_per_device == 1;
  if (limits.devices == 1) {
    if (knobs.mode == Mode::Chunked || alone) return lane.value == 0 ? LaneRole::Mixed : LaneRole::Spare;
    return lane.value == 0 ? LaneRole::Decode : LaneRole::Prefill;
  }
  if (knobs.mode == Mode::Chunked) return LaneRole::Mixed;
  const std::int32_t prefilling = std::clamp(knobs.prefill_devices, 1, limits.devices - 1);
  return lane.value < prefilling ? LaneRole::Prefill : LaneRole::Decode;
}

LaneGroup::State::State(const LaneGroupLimits& limits_in, const Settings& initial)
    : limits(checked(limits_in)), settings(initial) {
  const std::int32_t count = limits.devices * limits.lanes_per_device;
  for (std::int32_t device = 0; device < limits.devices; ++device) {
    pools.push_back(std::make_shared<KvPool>(limits.each));
  }
  // Any lane may come to hold all that wait and all that others had running.
  SchedulerLimits each = limits.each;
  each.max_waiting += (count - 1) * limits.each.max_num_seqs;
  for (std::int32_t lane = 0; lane < count; ++lane) {
    const auto device = static_cast<std::size_t>(device_of(LaneIndex{lane}));
    lanes.push_back(std::make_unique<Lane>(each, initial, pools[device]));
    roles.push_back(lane_role(limits, initial.knobs, LaneIndex{lane}));
  }
  const auto capacity = static_cast<std::size_t>(limits.each.max_waiting + count * limits.each.max_num_seqs);
  lane_of.reserve(capacity);
  strays.reserve(capacity);
  wanting.reserve(capacity);
  const auto blocks = static_cast<std::size_t>(blocks_for_tokens(lanes.front()->longest));
  moving_blocks.reserve(blocks);
  handoffs.resize(limits.devices > 1 ? static_cast<std::size_t>(limits.max_handoffs) : 0);
  for (Handoff& handoff : handoffs) {
    handoff.target_blocks.reserve(blocks);
    handoff.source_blocks.reserve(blocks);
    handoff.order.reserve(blocks);
  }
  for (Round& round : rounds) round.turns.resize(static_cast<std::size_t>(count));
}

Result<void> LaneGroup::State::add(const SequenceRequest& request) {
  if (Result<void> fits = lanes.front()->check(request); !fits) return fits;
  if (waiting() >= limits.each.max_waiting) {
    return unexpected(ErrorCode::ResourceExhausted,
                      "the waiting queue holds its " + std::to_string(limits.each.max_waiting) + " sequences");
  }
  CHECK(!lane_of.contains(request.id), "sequence ", request.id.value, " is already here");
  const LaneIndex lane = lane_for_new(request.prompt_tokens, request.prefix);
  lane_of.emplace(request.id, lane);
  at(lane).enter(request, next_ticket++);
  ++changes;
  return {};
}

bool LaneGroup::State::cancel(SequenceId id) {
  const auto found = lane_of.find(id);
  if (found == lane_of.end()) return false;
  Lane& lane = at(found->second);
  const Slot slot = lane.slot_of.at(id);
  if (!lane.at(slot).in_step) bury(found->second, slot);
  CHECK(lane.cancel(id), "id=", id.value);
  lane_of.erase(found);
  ++changes;
  return true;
}

void LaneGroup::State::apply(const Settings& settings_in, TimePoint now) {
  bool switched = settings.knobs.reservation != settings_in.knobs.reservation;
  settings = settings_in;
  ++changes;
  for (std::int32_t i = 0; i < lane_count(); ++i) {
    const LaneIndex lane{i};
    at(lane).apply(settings);
    const LaneRole wanted = lane_role(limits, settings.knobs, lane);
    switched = switched || wanted != role(lane);
    roles[static_cast<std::size_t>(i)] = wanted;
    if (wanted == LaneRole::Prefill) continue;
    for (const Slot slot : at(lane).running) at(lane).at(slot).reserved = false;
  }
  if (switched) {
    ++counts.switches;
    switching_since = now;
  }
  settle(now);
}

const StepPlan& LaneGroup::State::plan(LaneIndex lane, TimePoint now) {
  settle(now);
  if (!may_step(lane)) {
    nothing.settings_number = settings.number;
    nothing.step_number = at(lane).plan.step_number;
    return nothing;
  }
  open_gates(lane, now);
  take_waiting(lane);
  StepPlanner(at(lane), now).plan();
  const StepPlan& plan = at(lane).plan;
  for (const PlannedRow& row : plan.rows) {
    if (at(lane).at(row.index.value).reserved) count_wait(at(lane).at(row.index.value), now);
  }
  if (!plan.preempted.empty()) ++changes;
  if (plan.empty()) leave_round(lane, Round::Turn::InVain, Duration::zero());
  return plan;
}

void LaneGroup::State::complete(LaneIndex lane, std::span<const RowOutcome> outcomes, TimePoint now, Duration duration) {
  for (const RowOutcome& outcome : outcomes) {
    if (!outcome.finished) continue;
    const auto found = at(lane).slot_of.find(outcome.id);
    if (found != at(lane).slot_of.end()) bury(lane, found->second);
  }
  bury_cancelled(lane);
  at(lane).complete(outcomes, now, duration);
  ++changes;
  for (const RowOutcome& outcome : outcomes) {
    if (outcome.finished) lane_of.erase(outcome.id);
  }
  leave_round(lane, Round::Turn::Taken, duration);
  settle(now);
}

// Those cancelled within an open step have left lane_of but still run.
std::int32_t LaneGroup::State::waiting() const {
  std::int32_t waiting = 0;
  for (const auto& lane : lanes) waiting += static_cast<std::int32_t>(lane->slot_of.size()) - lane->running_count();
  return waiting;
}

void LaneGroup::State::abandon(LaneIndex lane) {
  bury_cancelled(lane);
  at(lane).abandon();
  ++changes;
  leave_round(lane, Round::Turn::Taken, Duration::zero());
}

void LaneGroup::State::bury_cancelled(LaneIndex lane) {
  for (const PlannedRow& row : at(lane).plan.rows) {
    if (at(lane).at(row.index.value).cancelled) bury(lane, row.index.value);
  }
}

LaneGroup::LaneGroup(const LaneGroupLimits& limits, const Settings& initial) : state_(std::make_unique<State>(limits, initial)) {}
LaneGroup::~LaneGroup() = default;
LaneGroup::LaneGroup(LaneGroup&&) noexcept = default;
LaneGroup& LaneGroup::operator=(LaneGroup&&) noexcept = default;

std::int32_t LaneGroup::lane_count() const {
  return state_->lane_count();
}
std::int32_t LaneGroup::device_of(LaneIndex lane) const {
  return state_->device_of(lane);
}
LaneRole LaneGroup::role(LaneIndex lane) const {
  return state_->role(lane);
}
std::int32_t LaneGroup::effective_max_len() const {
  return state_->lanes.front()->longest;
}
Result<void> LaneGroup::add(const SequenceRequest& request) {
  return state_->add(request);
}
bool LaneGroup::cancel(SequenceId id) {
  return state_->cancel(id);
}
void LaneGroup::apply(const Settings& settings, TimePoint now) {
  state_->apply(settings, now);
}
const Settings& LaneGroup::settings() const {
  return state_->lanes.front()->settings;
}
const StepPlan& LaneGroup::plan(LaneIndex lane, TimePoint now) {
  CHECK(!state_->at(lane).open, "plan() before the lane's last step was completed or abandoned");
  return state_->plan(lane, now);
}
void LaneGroup::complete(LaneIndex lane, std::span<const RowOutcome> outcomes, TimePoint now, Duration duration) {
  state_->complete(lane, outcomes, now, duration);
}
void LaneGroup::abandon(LaneIndex lane) {
  CHECK(state_->at(lane).open, "abandon() without a plan");
  state_->abandon(lane);
}
std::span<const SequenceId> LaneGroup::preempted_at_end(LaneIndex lane) const {
  return state_->at(lane).preempted_at_end;
}
const HandoffCounts& LaneGroup::handoffs() const {
  return state_->counts;
}
const LockstepCounts& LaneGroup::lockstep() const {
  return state_->lockstep;
}
std::int32_t LaneGroup::sequence_count() const {
  return state_->sequence_count();
}
std::int32_t LaneGroup::waiting() const {
  return state_->waiting();
}
const StepTimeModel& LaneGroup::step_time(LaneIndex lane) const {
  return state_->at(lane).step_time;
}
void LaneGroup::adopt_step_time(LaneIndex lane, const StepTimeModel& model) {
  state_->at(lane).step_time = model;
}
bool LaneGroup::idle() const {
  return state_->lane_of.empty();
}
void LaneGroup::check_integrity() const {
  state_->check_integrity();
}

void LaneGroup::watch_freed() {
  const auto blocks = static_cast<std::size_t>(state_->limits.each.block_count);
  const auto states = static_cast<std::size_t>(state_->limits.each.state_count);
  // One that was found dead may be taken and die once more before anybody looks.
  for (const auto& pool : state_->pools) {
    pool->freed.reserve(2 * blocks);
    pool->freed_states.reserve(2 * states);
  }
  state_->freed.reserve(2 * blocks);
  state_->freed_states.reserve(2 * states);
}

std::span<const BlockId> LaneGroup::take_freed(std::int32_t device) {
  std::swap(state_->freed, state_->pools[static_cast<std::size_t>(device)]->freed);
  state_->pools[static_cast<std::size_t>(device)]->freed.clear();
  return state_->freed;
}

std::span<const StateId> LaneGroup::take_freed_states(std::int32_t device) {
  std::swap(state_->freed_states, state_->pools[static_cast<std::size_t>(device)]->freed_states);
  state_->pools[static_cast<std::size_t>(device)]->freed_states.clear();
  return state_->freed_states;
}

LaneCounts LaneGroup::counts(LaneIndex lane) const {
  return {.role = state_->role(lane),
          .scheduler = state_->at(lane).counts(),
          .to_move = state_->to_move(lane),
          .reserved = state_->reserved_in(lane)};
}

SchedulerCounts LaneGroup::totals() const {
  SchedulerCounts totals;
  for (const auto& lane : state_->lanes) {
    const SchedulerCounts counts = lane->counts();
    totals.waiting += counts.waiting;
    totals.running += counts.running;
    totals.prefilling += counts.prefilling;
    totals.preemptions += counts.preemptions;
    totals.prefix_queries += counts.prefix_queries;
    totals.prefix_hits += counts.prefix_hits;
    totals.decode_gap_steps_max = std::max(totals.decode_gap_steps_max, counts.decode_gap_steps_max);
    totals.prefill_gap_steps_max = std::max(totals.prefill_gap_steps_max, counts.prefill_gap_steps_max);
  }
  for (const auto& pool : state_->pools) pool->add_counts(totals);
  return totals;
}

std::uint64_t LaneGroup::changes() const {
  return state_->changes;
}

bool LaneGroup::may_have_work(LaneIndex lane) const {
  if (!state_->at(lane).slot_of.empty()) return true;
  return state_->takes_new_work(lane) && waiting() > 0;
}

std::int32_t LaneGroup::copies_open() const {
  return static_cast<std::int32_t>(std::count_if(state_->handoffs.begin(), state_->handoffs.end(),
                                                 [](const Handoff& handoff) { return handoff.stage != Handoff::Stage::Free; }));
}

}  // namespace rubato::policies
