// SPDX-License-Identifier: Apache-2.0
// The life of sequences in a scheduler: added, ended, booked. What a step is made of is decided in step_planner.cpp.
#include "policies/scheduler.h"

#include <algorithm>
#include <string>
#include <utility>

#include "manifests/check.h"
#include "manifests/names.h"
#include "policies/scheduler_state.h"

namespace rubato::policies {
namespace {

// Keeps sums of time points and targets in range.
constexpr Duration longest_target = std::chrono::hours(10000);

SchedulerLimits checked(const SchedulerLimits& limits) {
  CHECK(limits.max_model_len > 0 && limits.max_num_seqs > 0 && limits.max_waiting > 0 && limits.block_count > 0,
        "max_model_len=", limits.max_model_len, " max_num_seqs=", limits.max_num_seqs, " max_waiting=", limits.max_waiting,
        " block_count=", limits.block_count);
  CHECK(limits.state_count >= 0 && (limits.blocks_hold_keys || limits.state_count > 0), "state_count=", limits.state_count,
        " blocks_hold_keys=", limits.blocks_hold_keys);
  const PrefixCachingSpec& caching = limits.prefix_caching;
  CHECK(!caching.enabled || (caching.snapshot_tokens > 0 && caching.snapshot_tokens % kv_block_tokens == 0),
        "snapshot_tokens=", caching.snapshot_tokens);
  CHECK(limits.token_tile > 0 && limits.growth_reserve_tokens >= 0, "token_tile=", limits.token_tile,
        " growth_reserve_tokens=", limits.growth_reserve_tokens);
  return limits;
}

Unexpected refused(const char* field, const std::string& message) {
  return unexpected(ErrorCode::InvalidArgument, field, message);
}

}  // namespace

Scheduler::State::State(const SchedulerLimits& limits_in, const Settings& initial, std::shared_ptr<KvPool> pool_in)
    : limits(checked(limits_in)), longest(longest_sequence(limits.max_model_len, limits.block_count)), pool(std::move(pool_in)) {
  pool->lanes.push_back(this);
  const auto running_capacity = static_cast<std::size_t>(limits.max_num_seqs);
  const std::size_t capacity = running_capacity + static_cast<std::size_t>(limits.max_waiting);
  for (const auto& named : enum_names<PriorityPolicy>) {
    policies.push_back(make_policy(named.value, static_cast<std::int32_t>(capacity)));
  }
  sequences.resize(capacity);
  prefixes.resize(capacity);
  free_slots.reserve(capacity);
  for (std::size_t slot = capacity; slot-- > 0;) free_slots.push_back(static_cast<Slot>(slot));
  slot_of.reserve(capacity);
  pending_by_ticket.reserve(capacity);
  pending_by_deadline.reserve(capacity);
  candidates.reserve(capacity);
  prefill_views.reserve(capacity);
  ranks.reserve(capacity);
  running_prefills.reserve(running_capacity);
  waiting_prefills.reserve(capacity);
  running.reserve(running_capacity);
  tables.resize(running_capacity);
  free_tables.reserve(running_capacity);
  for (std::size_t table = running_capacity; table-- > 0;) {
    tables[table].reserve(static_cast<std::size_t>(blocks_for_tokens(longest)));
    free_tables.push_back(static_cast<std::int32_t>(table));
  }
  plan.rows.reserve(running_capacity);
  plan.preempted.reserve(2 * running_capacity);  // of this lane and of another on its pool
  preempted_at_end.reserve(running_capacity);
  decodes.reserve(running_capacity);
  decode_views.reserve(running_capacity);
  decode_order.reserve(running_capacity);
  decode_picks.reserve(running_capacity);
  prefill_picks.reserve(running_capacity);
  apply(initial);
}

Scheduler::State::~State() {
  std::erase(pool->lanes, this);
}

Result<void> Scheduler::State::check(const SequenceRequest& request) const {
  if (request.prompt_tokens < 1) return refused("prompt", "the prompt has no tokens; at least 1 is needed");
  if (request.max_new_tokens < 1) {
    return refused("max_tokens", std::to_string(request.max_new_tokens) + " is outside 1.." + std::to_string(longest));
  }
  const std::int64_t total = std::int64_t{request.prompt_tokens} + request.max_new_tokens;
  if (total > longest) {
    return refused("max_tokens", std::to_string(request.prompt_tokens) + " prompt tokens and " +
                                     std::to_string(request.max_new_tokens) + " new tokens exceed the limit of " +
                                     std::to_string(longest) + " tokens per sequence");
  }
  return {};
}

Result<void> Scheduler::State::add(const SequenceRequest& request) {
  if (Result<void> checked = check(request); !checked) return checked;
  const std::size_t waiting = slot_of.size() - running.size();
  if (waiting >= static_cast<std::size_t>(limits.max_waiting)) {
    return unexpected(ErrorCode::ResourceExhausted,
                      "the waiting queue holds its " + std::to_string(limits.max_waiting) + " sequences");
  }
  enter(request, next_ticket++);
  return {};
}

void Scheduler::State::enter(const SequenceRequest& request, std::uint64_t ticket) {
  Sequence sequence;
  sequence.request = request;
  sequence.request.prefix = {};
  sequence.request.ttft_target = std::clamp(request.ttft_target, Duration::zero(), longest_target);
  sequence.request.itl_target = std::clamp(request.itl_target, Duration::zero(), longest_target);
  sequence.place = Sequence::Place::Waiting;
  sequence.ticket = ticket;
  sequence.known = request.prompt_tokens;
  sequence.ttft_deadline = request.arrival + sequence.request.ttft_target;
  sequence.waiting_since = request.arrival;
  sequence.added_step = plan.step_number;
  const Slot slot = take_slot(sequence);
  slot_of.emplace(request.id, slot);
  keep_prefix(slot, request.prefix);
  enter_pending(slot);
}

void Scheduler::State::end(Slot slot) {
  Sequence& sequence = at(slot);
  if (open && !sequence.in_step) {
    // It leaves while a plan without it is open: whoever gets the slot next must not be counted as left out of that.
    std::erase(decodes, slot);
    if (oldest.ticket == sequence.ticket) oldest = {};
  }
  if (sequence.pending) leave_pending(slot);
  if (sequence.place == Sequence::Place::Running) leave_running(slot);
  sequence.place = Sequence::Place::Free;
  slot_of.erase(sequence.request.id);
  free_slots.push_back(slot);
}

bool Scheduler::State::cancel(SequenceId id) {
  const auto found = slot_of.find(id);
  if (found == slot_of.end() || at(found->second).cancelled) return false;
  if (at(found->second).in_step) {
    at(found->second).cancelled = true;
  } else {
    end(found->second);
  }
  return true;
}

void Scheduler::State::apply(const Settings& settings_in) {
  settings = settings_in;
  KnobValues& knobs = settings.knobs;
  knobs.max_num_batched_tokens = std::max(knobs.max_num_batched_tokens, 1);
  knobs.max_num_seqs = std::clamp(knobs.max_num_seqs, 1, limits.max_num_seqs);
  knobs.deadline_margin = std::clamp(knobs.deadline_margin, 0, 99);
}

void Scheduler::State::complete(std::span<const RowOutcome> outcomes, TimePoint now, Duration duration) {
  CHECK(open, "complete() without a plan");
  count_gaps();
  std::size_t next_outcome = 0;
  for (const PlannedRow& row : plan.rows) {
    const Slot slot = row.index.value;
    Sequence& sequence = at(slot);
    if (sequence.cancelled) {
      next_outcome += row.samples ? 1 : 0;
      drop_snapshot(row);
      end(slot);
      continue;
    }
    sequence.computed += row.count;
    book_prefix(row);
    if (!row.samples) continue;
    CHECK(next_outcome < outcomes.size() && outcomes[next_outcome].id == row.id, "outcome ", next_outcome, " of ",
          outcomes.size(), " is not for sequence ", row.id.value);
    const RowOutcome& outcome = outcomes[next_outcome++];
    const bool finished = outcome.finished;
    ++sequence.sampled;
    ++sequence.known;
    note_filled(slot, outcome);
    sequence.last_token = now;
    CHECK(finished || sequence.sampled < sequence.request.max_new_tokens, "sequence ", row.id.value,
          " goes on after its last token");
    if (finished) {
      end(slot);
    } else if (sequence.pending) {
      leave_pending(slot);
      sequence.decode_gap = 0;
      sequence.decode_step_before = std::exchange(sequence.last_decode_step, plan.step_number);
    }
  }
  CHECK(next_outcome == outcomes.size(), "outcomes=", outcomes.size(), " sampling rows=", next_outcome);
  step_time.observe(plan.features, duration);
  give_up_condemned(now);
  close_plan();
}

// Older sequences of other lanes on this pool found no block while these were in the step.
void Scheduler::State::give_up_condemned(TimePoint now) {
  preempted_at_end.clear();
  for (const PlannedRow& row : plan.rows) {
    Sequence& sequence = at(row.index.value);
    if (!sequence.condemned) continue;
    if (sequence.place != Sequence::Place::Running || sequence.copying || pool->blocks.free_count() > 0) continue;
    lose_blocks(row.index.value, now);
    preempted_at_end.push_back(row.id);
  }
}

// The steps a sequence goes without; before the rows are booked, while in_step and preempted_now still stand.
void Scheduler::State::count_gaps() {
  for (const Slot slot : decodes) {
    Sequence& sequence = at(slot);
    if (sequence.preempted_now || sequence.starved) continue;
    sequence.decode_gap = sequence.in_step ? 0 : sequence.decode_gap + 1;
    if (sequence.in_step) sequence.decode_step_before = std::exchange(sequence.last_decode_step, plan.step_number);
    decode_gap_steps_max = std::max(decode_gap_steps_max, sequence.decode_gap);
  }
  if (!oldest.ticket) return;
  if (oldest.served) {
    oldest.gap = oldest.wait = 0;
  } else {
    ++oldest.wait;
    if (oldest.could_run) ++oldest.gap;
  }
  prefill_gap_steps_max = std::max(prefill_gap_steps_max, oldest.gap);
}

void Scheduler::State::abandon() {
  for (const PlannedRow& row : plan.rows) drop_snapshot(row);
  close_plan();
}

void Scheduler::State::close_plan() {
  for (const PlannedRow& row : plan.rows) {
    Sequence& sequence = at(row.index.value);
    sequence.in_step = sequence.condemned = false;
    if (sequence.cancelled && sequence.place != Sequence::Place::Free) end(row.index.value);
  }
  for (const SequenceId id : plan.preempted) {
    const auto found = slot_of.find(id);
    if (found != slot_of.end()) at(found->second).preempted_now = false;
  }
  open = false;
}

Duration Scheduler::State::oldest_wait(TimePoint now) const {
  std::optional<TimePoint> since;
  for (const Slot slot : pending_by_ticket) {
    const Sequence& sequence = at(slot);
    if (sequence.place != Sequence::Place::Waiting) continue;
    since = since ? std::min(*since, sequence.waiting_since) : sequence.waiting_since;
  }
  return since ? std::max(now - *since, Duration::zero()) : Duration::zero();
}

SchedulerCounts Scheduler::State::counts() const {
  SchedulerCounts result;
  result.running = running_count();
  result.waiting = static_cast<std::int32_t>(slot_of.size()) - result.running;
  result.prefilling =
      static_cast<std::int32_t>(std::count_if(running.begin(), running.end(), [this](Slot s) { return at(s).pending; }));
  pool->add_counts(result);
  result.prefix_queries = prefix_queries;
  result.prefix_hits = prefix_hits;
  result.preemptions = preemptions;
  result.decode_gap_steps_max = decode_gap_steps_max;
  result.prefill_gap_steps_max = prefill_gap_steps_max;
  return result;
}

Scheduler::Scheduler(const SchedulerLimits& limits, const Settings& initial)
    : state_(std::make_unique<State>(limits, initial, std::make_shared<KvPool>(checked(limits)))) {}
Scheduler::~Scheduler() = default;
Scheduler::Scheduler(Scheduler&&) noexcept = default;
Scheduler& Scheduler::operator=(Scheduler&&) noexcept = default;

std::int32_t Scheduler::effective_max_len() const {
  return state_->longest;
}
Result<void> Scheduler::add(const SequenceRequest& request) {
  return state_->add(request);
}
bool Scheduler::cancel(SequenceId id) {
  return state_->cancel(id);
}
void Scheduler::apply(const Settings& settings) {
  state_->apply(settings);
}
const Settings& Scheduler::settings() const {
  return state_->settings;
}
void Scheduler::complete(std::span<const RowOutcome> outcomes, TimePoint now, Duration duration) {
  state_->complete(outcomes, now, duration);
}
void Scheduler::abandon() {
  CHECK(state_->open, "abandon() without a plan");
  state_->abandon();
}
SchedulerCounts Scheduler::counts() const {
  return state_->counts();
}
const StepTimeModel& Scheduler::step_time() const {
  return state_->step_time;
}
void Scheduler::adopt_step_time(const StepTimeModel& model) {
  state_->step_time = model;
}
bool Scheduler::idle() const {
  return state_->slot_of.empty();
}
void Scheduler::check_integrity() const {
  state_->check_integrity();
  state_->pool->check_integrity();
}

Duration Scheduler::oldest_wait(TimePoint now) const {
  return state_->oldest_wait(now);
}

}  // namespace rubato::policies
