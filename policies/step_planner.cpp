// SPDX-License-Identifier: Apache-2.0
// One plan: decodes, then prefills and admissions, then decodes that were held back. The policy chooses within it; every promise
// of scheduler.h is kept here.
#include "policies/step_planner.h"

#include <algorithm>

#include "manifests/check.h"

namespace rubato::policies {
namespace {

// How many waiting requests that do not fit the pool a step looks past. Bounds the cost of a plan.
constexpr std::int32_t bypass_limit = 8;

// While others compete, an overdue prefill gets this share of the budget, or of what the step still has time for: enough to end
// soon, little enough to leave the policy its say.
constexpr std::int32_t overdue_share_of_budget = 8;
constexpr std::int32_t overdue_share_of_time = 4;

// What counts as service of a prefill in a step. Below two quanta of budget decodes and prefills share it.
std::int32_t quantum_of(std::int32_t budget) {
  return std::min(min_prefill_quantum, std::max(budget / 2, 1));
}

}  // namespace

StepPlanner::StepPlanner(Scheduler::State& state, TimePoint now)
    : state_(state),
      now_(now),
      knobs_(state.settings.knobs),
      policy_(*state.policies[static_cast<std::size_t>(knobs_.priority_policy)]),
      bounds_(policy_.bounds()),
      budget_(knobs_.max_num_batched_tokens) {}

void StepPlanner::plan() {
  begin();
  collect_decodes();
  // It decides on nothing but admissions, and costs a walk over all that run.
  if (state_.slot_of.size() > state_.running.size()) load_ = state_.pool_load();
  collect_prefills();
  state_.ranks.clear();
  for (std::size_t i = 0; i < state_.candidates.size(); ++i) state_.ranks.push_back(static_cast<double>(i));
  choice_ = policy_.choose({.now = now_,
                            .knobs = knobs_,
                            .step_time = state_.step_time,
                            .decode_features = features_,
                            .decodes = state_.decode_views,
                            .prefills = state_.prefill_views},
                           state_.ranks);
  features_ = {};
  const bool due = oldest_overdue() && can_run(oldest_slot_);
  take_chosen_decodes(due ? oldest_quantum_ : 0);
  take_prefills();
  round_to_tile();
  take_remaining_decodes();
  if (state_.decode_picks.empty() && state_.prefill_picks.empty()) {
    // The decodes whose deadlines left prefills no time have lost their blocks.
    choice_.step_end.reset();
    take_prefills();
  }
  emit();
}

void StepPlanner::begin() {
  StepPlan& plan = state_.plan;
  plan.rows.clear();
  plan.preempted.clear();
  plan.features = {};
  plan.settings_number = state_.settings.number;
  state_.planned_at = now_;
  state_.decode_picks.clear();
  state_.prefill_picks.clear();

  OldestPrefill& oldest = state_.oldest;
  // One that waits for another lane is not this lane's to serve.
  const auto& pending = state_.pending_by_ticket;
  const auto waits_here = [this](Slot slot) {
    return !state_.at(slot).held && state_.prefills == Scheduler::State::Prefills::Run;
  };
  const auto place = std::find_if(pending.begin(), pending.end(), waits_here);
  if (place == pending.end()) {
    oldest = {};
    return;
  }
  oldest_slot_ = *place;
  const Sequence& first = state_.at(oldest_slot_);
  if (oldest.ticket != first.ticket) oldest = {.ticket = first.ticket};
  // Of one that waits it is not sure yet what the prefix cache has.
  oldest_quantum_ = std::min(quantum_of(budget_), first.known - first.computed);
}

void StepPlanner::collect_decodes() {
  state_.decodes.clear();
  state_.decode_views.clear();
  for (const Slot slot : state_.running) {
    Sequence& sequence = state_.at(slot);
    sequence.starved = false;
    if (sequence.pending) continue;
    ++running_decodes_;
    if (sequence.held) continue;
    state_.decodes.push_back(slot);
    state_.decode_views.push_back(
        {.context_tokens = sequence.known, .last_token = sequence.last_token, .itl_target = sequence.request.itl_target});
    features_.add_decode(sequence.known);
  }
}

// Waiting ones are shown only where one could start at all, so that a full batch with thousands behind it plans as fast as
// without.
void StepPlanner::collect_prefills() {
  state_.candidates.clear();
  state_.prefill_views.clear();
  if (state_.prefills == Scheduler::State::Prefills::Held) return;
  const bool open = may_start() && may_admit(load_, 1) && state_.may_take_state();
  const bool by_deadline = policy_.candidate_order() == CandidateOrder::ByTtftDeadline;
  std::size_t running_left = static_cast<std::size_t>(state_.running_count() - running_decodes_);
  for (const Slot slot : by_deadline ? state_.pending_by_deadline : state_.pending_by_ticket) {
    const Sequence& sequence = state_.at(slot);
    const bool running = sequence.place == Sequence::Place::Running;
    if (!open && running_left == 0) break;
    if (!open && !running) continue;
    if (running) --running_left;
    if (sequence.held) continue;
    state_.candidates.push_back(slot);
    state_.prefill_views.push_back({.begin = sequence.begin(),
                                    .remaining = sequence.remaining(),
                                    .ttft_deadline = sequence.ttft_deadline,
                                    .waited_steps = state_.plan.step_number - sequence.added_step,
                                    .has_sampled = sequence.sampled > 0});
  }
}

bool StepPlanner::oldest_overdue() const {
  return state_.oldest.ticket && state_.oldest.wait >= bounds_.prefill_steps;
}

bool StepPlanner::may_start() const {
  return state_.running_count() + state_.pool->arriving < knobs_.max_num_seqs;
}

bool StepPlanner::can_run(Slot slot) {
  const Sequence& sequence = state_.at(slot);
  if (sequence.preempted_now || sequence.held) return false;
  return sequence.place == Sequence::Place::Running || find_start(slot).has_value();
}

// Where one that waits could start now, as far as slots, states and blocks go; none: nowhere. What the prefix cache has of it is
// looked up only where that may decide.
std::optional<PrefixHit> StepPlanner::find_start(Slot slot) {
  Sequence& sequence = state_.at(slot);
  if (!may_start() || !state_.may_take_state()) return std::nullopt;
  const std::int32_t wanted = state_.wanted(slot);
  const auto hashes = static_cast<std::int32_t>(state_.prefix_of(slot).size());
  if (!may_admit(load_, std::max(wanted - hashes, 1))) return std::nullopt;
  const PrefixHit hit = state_.find_prefix(slot);
  sequence.expected = hit.tokens;
  if (state_.admission.left <= 0 && state_.admission.counts(sequence)) return std::nullopt;
  if (!may_admit(load_, wanted - hit.blocks_in_use)) return std::nullopt;
  return hit;
}

void StepPlanner::admit(Slot slot, const PrefixHit& hit) {
  Sequence& sequence = state_.at(slot);
  load_.committed_blocks += state_.wanted(slot) - hit.blocks_in_use;
  ++load_.running;
  state_.admit(slot, hit);
  if (state_.admission.counts(sequence)) {
    --state_.admission.left;
    sequence.reserved = state_.admission.kind == AdmissionTake::Kind::DecodeSlot;
  }
  if (sequence.ticket == state_.oldest.ticket) oldest_quantum_ = std::min(quantum_of(budget_), sequence.remaining());
}

// Least recently served first where not all fit; among equals the oldest. Then by age, because secure_block() takes from the
// young.
void StepPlanner::order_decodes(std::int32_t most) {
  std::vector<Slot>& order = state_.decode_order;
  if (static_cast<std::int32_t>(order.size()) <= most) return;
  std::nth_element(order.begin(), order.begin() + most, order.end(), [this](Slot left, Slot right) {
    const Sequence& a = state_.at(left);
    const Sequence& b = state_.at(right);
    if (a.last_decode_step != b.last_decode_step) return a.last_decode_step < b.last_decode_step;
    return a.decode_step_before != b.decode_step_before ? a.decode_step_before < b.decode_step_before : a.ticket < b.ticket;
  });
  order.resize(static_cast<std::size_t>(most));
  std::sort(order.begin(), order.end(),
            [this](Slot left, Slot right) { return state_.at(left).ticket < state_.at(right).ticket; });
}

void StepPlanner::take_decode(Slot slot) {
  Sequence& sequence = state_.at(slot);
  if (sequence.preempted_now || sequence.in_step || sequence.starved || !state_.secure_block(slot)) return;
  sequence.in_step = true;
  state_.decode_picks.push_back(slot);
  features_.add_decode(sequence.known);
}

void StepPlanner::take_chosen_decodes(std::int32_t kept_for_prefill) {
  std::vector<Slot>& order = state_.decode_order;
  order.clear();
  for (const Slot slot : state_.decodes) {
    if (choice_.decodes == DecodeChoice::All || state_.at(slot).decode_gap >= bounds_.decode_steps) order.push_back(slot);
  }
  order_decodes(budget_ - kept_for_prefill);
  for (const Slot slot : order) take_decode(slot);
}

// What prefills left over, and everything where no prefill could run. Nobody with a row in this step is preempted for it.
void StepPlanner::take_remaining_decodes() {
  std::vector<Slot>& order = state_.decode_order;
  while (features_.tokens < budget_) {
    order.clear();
    for (const Slot slot : state_.decodes) {
      const Sequence& sequence = state_.at(slot);
      if (!sequence.in_step && !sequence.preempted_now && !sequence.starved) order.push_back(slot);
    }
    const std::int32_t before = features_.tokens;
    order_decodes(budget_ - features_.tokens);
    for (const Slot slot : order) take_decode(slot);
    // A pass that took nothing may still have freed blocks by preempting; it ends after at most one pass per decode.
    if (features_.tokens == before && !(state_.decode_picks.empty() && state_.prefill_picks.empty() && !order.empty())) return;
  }
}

void StepPlanner::take_prefills() {
  // What sequences want is not less than what they hold, so that since the plan began only one that lost its blocks, or was
  // admitted, has changed the load; and of those admitted admit() keeps count.
  if (!state_.plan.preempted.empty()) load_ = state_.pool_load();
  waiting_closed_ = false;
  bypassed_ = 0;
  const std::int32_t long_tokens = choice_.long_prompt_tokens;
  contended_ = std::any_of(state_.prefill_views.begin(), state_.prefill_views.end(),
                           [&](const PrefillView& view) { return view.remaining <= long_tokens; });
  state_.oldest.could_run = state_.oldest.ticket && can_run(oldest_slot_);
  if (oldest_overdue()) {
    const Slot slot = oldest_slot_;
    const bool alone = state_.candidates.size() <= 1;
    const std::int32_t cap = alone ? budget_ : overdue_cap(slot);
    if (!take_prefill(slot, cap, oldest_quantum_)) waiting_closed_ = true;
  }
  rank_prefills();
  RankedQueue& running = state_.running_prefills;
  RankedQueue& waiting = state_.waiting_prefills;
  while (features_.tokens < budget_) {
    const bool any_waiting = !waiting_closed_ && !waiting.empty() && may_start();
    if (running.empty() && !any_waiting) break;
    const bool take_running = !any_waiting || (!running.empty() && RankedQueue::before(running.peek(), waiting.peek()));
    RankedQueue& queue = take_running ? running : waiting;
    const Slot slot = state_.candidates[static_cast<std::size_t>(queue.peek().candidate)];
    queue.pop();
    if (state_.at(slot).in_step || state_.at(slot).preempted_now) continue;
    if (!take_prefill(slot, budget_, 0) && time_is_up_) break;
  }
  extend_prefills();
}

void StepPlanner::rank_prefills() {
  state_.running_prefills.clear();
  state_.waiting_prefills.clear();
  for (std::size_t i = 0; i < state_.candidates.size(); ++i) {
    const bool running = state_.at(state_.candidates[i]).place == Sequence::Place::Running;
    (running ? state_.running_prefills : state_.waiting_prefills)
        .push({.rank = state_.ranks[i], .candidate = static_cast<std::int32_t>(i)});
  }
  state_.running_prefills.start();
  state_.waiting_prefills.start();
}

// Tokens from begin on that the step has time for.
std::int32_t StepPlanner::room_for(std::int32_t begin, std::int32_t most) const {
  if (!choice_.step_end) return most;
  return state_.step_time.largest_chunk(features_, begin, most, *choice_.step_end - now_);
}

std::int32_t StepPlanner::overdue_cap(Slot slot) const {
  std::int32_t share = budget_ / overdue_share_of_budget;
  if (choice_.step_end) {
    share = std::min(share, room_for(state_.at(slot).begin(), budget_ - features_.tokens) / overdue_share_of_time);
  }
  return std::max(oldest_quantum_, share);
}

// at_least: the step has time for so many whatever its end, and the cap on long prompts does not bind.
bool StepPlanner::take_prefill(Slot slot, std::int32_t cap, std::int32_t at_least) {
  const Sequence& sequence = state_.at(slot);
  const bool waiting = sequence.place == Sequence::Place::Waiting;
  const bool barred = sequence.preempted_now || sequence.held;
  const std::optional<PrefixHit> start = waiting && !barred ? find_start(slot) : std::nullopt;
  if (barred || (waiting && !start)) {
    const bool bypass = choice_.admission == AdmissionChoice::Bypass && ++bypassed_ < bypass_limit;
    if (waiting && !bypass) waiting_closed_ = true;
    return false;
  }
  const std::int32_t begin = sequence.begin();  // of one that waits, as just found
  const std::int32_t left = sequence.remaining();
  if (at_least == 0 && contended_ && left > choice_.long_prompt_tokens) cap = std::min(cap, choice_.long_prompt_cap);
  const std::int32_t budget_left = std::min(budget_ - features_.tokens, left);
  const std::int32_t count = std::max(room_for(begin, std::min(cap, budget_left)), std::min(at_least, budget_left));
  time_is_up_ = count == 0;
  if (time_is_up_) return false;
  if (start) admit(slot, *start);
  state_.at(slot).in_step = true;
  state_.prefill_picks.push_back({.slot = slot, .count = count});
  features_.add_chunk(begin, count);
  return true;
}

// A cap only shares the step out; what the others did not use goes back to those it bound, in their order.
void StepPlanner::extend_prefills() {
  for (auto& pick : state_.prefill_picks) {
    const std::int32_t left = budget_ - features_.tokens;
    const Sequence& sequence = state_.at(pick.slot);
    if (left == 0 || pick.count == sequence.remaining()) continue;
    features_.remove_chunk(sequence.computed, pick.count);
    pick.count = std::max(pick.count, room_for(sequence.computed, std::min(pick.count + left, sequence.remaining())));
    features_.add_chunk(sequence.computed, pick.count);
  }
}

// Takes what lies beyond the last full tile from the last chunk that was cut anyway, unless too little prefill would be left.
void StepPlanner::round_to_tile() {
  const std::int32_t excess = features_.tokens % state_.limits.token_tile;
  const std::int32_t prefill_tokens = features_.tokens - features_.decode_rows;
  if (excess == 0 || prefill_tokens - excess < quantum_of(budget_)) return;
  auto& picks = state_.prefill_picks;
  const auto cut =
      std::find_if(picks.rbegin(), picks.rend(), [&](const auto& pick) { return pick.count < state_.at(pick.slot).remaining(); });
  if (cut == picks.rend()) return;
  const Sequence& sequence = state_.at(cut->slot);
  const bool is_oldest = sequence.ticket == state_.oldest.ticket;
  if (cut->count - excess < (is_oldest ? oldest_quantum_ : 1)) return;
  features_.remove_chunk(sequence.computed, cut->count);
  cut->count -= excess;
  features_.add_chunk(sequence.computed, cut->count);
}

void StepPlanner::emit_row(Slot slot, std::int32_t count) {
  const Sequence& sequence = state_.at(slot);
  const std::vector<BlockId>& table = state_.table_of(sequence);
  const auto blocks = static_cast<std::size_t>(blocks_for_tokens(sequence.computed + count));
  CHECK(blocks <= table.size(), "sequence ", sequence.request.id.value, " needs ", blocks, " blocks and holds ", table.size());
  state_.plan.rows.push_back({.id = sequence.request.id,
                              .index = SequenceIndex{slot},
                              .begin = sequence.computed,
                              .count = count,
                              .samples = sequence.computed + count == sequence.known,
                              .decode = !sequence.pending,
                              .blocks = std::span<const BlockId>(table.data(), blocks),
                              .state = state_.use_state(slot, count),
                              .cached_tokens = sequence.cached.value_or(0)});
}

void StepPlanner::emit() {
  for (const Slot slot : state_.decode_picks) emit_row(slot, 1);
  state_.oldest.served = false;
  for (const auto& pick : state_.prefill_picks) {
    emit_row(pick.slot, pick.count);
    if (state_.at(pick.slot).ticket == state_.oldest.ticket) state_.oldest.served = pick.count >= oldest_quantum_;
  }
  StepPlan& plan = state_.plan;
  plan.features = features_;
  CHECK(features_.tokens <= budget_, "tokens=", features_.tokens, " budget=", budget_);
  // A lane that shares its pool may have to wait for the others.
  CHECK(!plan.rows.empty() || state_.slot_of.empty() || state_.waits_for_others(), "nothing to run with ", state_.slot_of.size(),
        " sequences");
  if (plan.rows.empty()) {
    state_.close_plan();
    return;
  }
  state_.open = true;
  ++plan.step_number;
}

const StepPlan& Scheduler::plan(TimePoint now) {
  CHECK(!state_->open, "plan() before the last step was completed or abandoned");
  StepPlanner(*state_, now).plan();
  return state_->plan;
}

}  // namespace rubato::policies
