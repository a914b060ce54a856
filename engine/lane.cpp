// SPDX-License-Identifier: Apache-2.0
// The lane's bookkeeping: sequences by id, plans to backend rows, results to events.
#include "engine/lane.h"

#include <algorithm>
#include <unordered_map>
#include <utility>

#include "manifests/check.h"

namespace rubato::engine {
namespace {

/// Everything the lane keeps of one sequence. Tokens are never taken back: a preemption only makes them be computed again.
struct Sequence {
  Sequence(const Request& request, std::int32_t vocabulary)
      : tokens(request.prompt), sampling(request.sampling, request.prompt, vocabulary) {
    const std::size_t length_max = tokens.size() + static_cast<std::size_t>(request.sampling.max_new_tokens);
    tokens.reserve(length_max);
    blocks.reserve(length_max / kv_block_tokens + 1);
  }

  std::vector<TokenId> tokens;  // prompt, then output
  SamplingState sampling;
  std::vector<BlockId> blocks;         // the block table as last seen, to tell the backend when its contents die
  std::optional<TimePoint> scheduled;  // begin of the first step with a row of it
};

Unexpected refused(const char* field, std::string message) {
  return unexpected(ErrorCode::InvalidArgument, field, std::move(message));
}

std::optional<Unexpected> find_fault(const Request& request, std::int32_t vocabulary, std::int32_t length_max) {
  if (request.prompt.empty()) return refused("prompt", "the prompt holds no token; at least one is needed");
  const auto outside = [vocabulary](TokenId token) { return token < 0 || token >= vocabulary; };
  const std::string allowed = "allowed: 0.." + std::to_string(vocabulary - 1);
  for (const TokenId token : request.prompt) {
    if (outside(token)) return refused("prompt", "token id " + std::to_string(token) + " is outside the vocabulary; " + allowed);
  }
  for (const auto& [token, bias] : request.sampling.logit_bias) {
    if (outside(token))
      return refused("logit_bias", "token id " + std::to_string(token) + " is outside the vocabulary; " + allowed);
  }
  const auto prompt = static_cast<std::int64_t>(request.prompt.size());
  if (prompt >= length_max) {
    return refused("prompt", "the prompt has " + std::to_string(prompt) + " tokens; a sequence here may have " +
                                 std::to_string(length_max) + ", prompt and at least one new token together");
  }
  const std::int32_t wanted = request.sampling.max_new_tokens;
  if (wanted < 1) return refused("max_tokens", std::to_string(wanted) + " is below 1");
  if (prompt + wanted > length_max) {
    return refused("max_tokens", std::to_string(wanted) + " new tokens after a prompt of " + std::to_string(prompt) +
                                     " exceed the " + std::to_string(length_max) +
                                     " that a sequence here may have; allowed: up to " + std::to_string(length_max - prompt));
  }
  return std::nullopt;
}

}  // namespace

struct Lane::State {
  State(Backend& device, const LaneOptions& options) : backend(device), scheduler(options.limits, options.initial) {
    const auto rows = static_cast<std::size_t>(options.limits.max_num_seqs);
    step_rows.reserve(rows);
    outcomes.reserve(rows);
    events.reserve(rows);
  }

  [[nodiscard]] Sequence& sequence(SequenceId id) {
    const auto found = sequences.find(id);
    CHECK(found != sequences.end(), "id=", id.value);
    return found->second;
  }

  /// The next event, reused with its capacity.
  TokenEvent& next_event(SequenceId id, const Sequence& sequence_of_event, TimePoint now) {
    if (event_count == events.size()) events.emplace_back();
    TokenEvent& event = events[event_count++];
    event.id = id;
    event.index = sequence_of_event.sampling.generated_count();
    event.finish.reset();
    event.error = Error{};
    event.time = now;
    event.scheduled = sequence_of_event.scheduled.value_or(now);
    return event;
  }

  void forget_blocks(Sequence& of) {
    if (!of.blocks.empty()) backend.released(of.blocks);
    of.blocks.clear();
  }

  void erase(SequenceId id) {
    const auto found = sequences.find(id);
    CHECK(found != sequences.end(), "id=", id.value);
    forget_blocks(found->second);
    sequences.erase(found);
  }

  void add_row(const policies::PlannedRow& row, TimePoint now);
  [[nodiscard]] bool finish_token(const policies::PlannedRow& row, std::size_t sample, TimePoint now);
  void fail_all(const Error& error, TimePoint now);

  Backend& backend;
  policies::Scheduler scheduler;
  std::unordered_map<SequenceId, Sequence> sequences;
  const policies::StepPlan* plan = nullptr;  // between begin_step and end_step
  std::vector<StepRow> step_rows;
  StepResult result;
  Result<void> outcome;
  std::vector<policies::RowOutcome> outcomes;
  std::vector<TokenEvent> events;  // the first event_count are the last step's
  std::size_t event_count = 0;
  StepRecord record;
  std::optional<Error> failure;
};

Lane::Lane(Backend& backend, const LaneOptions& options) : state_(std::make_unique<State>(backend, options)) {}
Lane::~Lane() = default;

Result<void> Lane::add(Request request) {
  State& state = *state_;
  if (state.failure) return unexpected(ErrorCode::DeviceLost, "the device failed: " + state.failure->message);
  const std::int32_t vocabulary = state.backend.config().vocabulary;
  if (auto fault = find_fault(request, vocabulary, state.scheduler.effective_max_len())) return std::move(*fault);
  CHECK(!state.sequences.contains(request.id), "id=", request.id.value);
  const policies::SequenceRequest entry{.id = request.id,
                                        .arrival = request.arrival,
                                        .prompt_tokens = static_cast<std::int32_t>(request.prompt.size()),
                                        .max_new_tokens = request.sampling.max_new_tokens,
                                        .ttft_target = request.ttft_target,
                                        .itl_target = request.itl_target};
  if (auto added = state.scheduler.add(entry); !added) return added;
  state.sequences.emplace(std::piecewise_construct, std::forward_as_tuple(request.id),
                          std::forward_as_tuple(request, vocabulary));
  return {};
}

bool Lane::cancel(SequenceId id) {
  CHECK(state_->plan == nullptr, "cancel within a step");
  const bool was_there = state_->scheduler.cancel(id);
  CHECK(was_there == state_->sequences.contains(id), "id=", id.value);
  if (was_there) state_->erase(id);
  return was_there;
}

void Lane::apply(const Settings& settings) {
  state_->scheduler.apply(settings);
}

void Lane::State::add_row(const policies::PlannedRow& row, TimePoint now) {
  Sequence& of = sequence(row.id);
  const auto end = static_cast<std::size_t>(row.begin) + static_cast<std::size_t>(row.count);
  CHECK(row.begin >= 0 && row.count >= 1 && end <= of.tokens.size(), "id=", row.id.value, " begin=", row.begin,
        " count=", row.count);
  CHECK(row.samples == (end == of.tokens.size()), "id=", row.id.value, " end=", end, " tokens=", of.tokens.size());
  CHECK(row.blocks.size() * kv_block_tokens >= end, "id=", row.id.value, " blocks=", row.blocks.size(), " end=", end);
  if (!of.scheduled) of.scheduled = now;
  if (row.blocks.size() > of.blocks.size()) {  // a table only grows until its sequence is preempted
    of.blocks.insert(of.blocks.end(), row.blocks.begin() + static_cast<std::ptrdiff_t>(of.blocks.size()), row.blocks.end());
  }
  step_rows.push_back(
      {.position = row.begin,
       .tokens = std::span(of.tokens).subspan(static_cast<std::size_t>(row.begin), static_cast<std::size_t>(row.count)),
       .blocks = row.blocks,
       .sampling = row.samples ? &of.sampling : nullptr});
}

bool Lane::begin_step(TimePoint now) {
  State& state = *state_;
  state.event_count = 0;
  if (state.failure) return false;
  const policies::StepPlan& plan = state.scheduler.plan(now);
  for (const SequenceId id : plan.preempted) state.forget_blocks(state.sequence(id));
  if (plan.empty()) return false;
  state.plan = &plan;
  state.step_rows.clear();
  for (const policies::PlannedRow& row : plan.rows) state.add_row(row, now);
  state.record = StepRecord{.step_number = plan.step_number,
                            .settings_number = plan.settings_number,
                            .features = plan.features,
                            .sampled = 0,
                            .preempted = static_cast<std::int32_t>(plan.preempted.size()),
                            .bucket = {},
                            .padding_tokens = 0,
                            .begin = now,
                            .end = now,
                            .planning = {},
                            .predicted = state.scheduler.step_time().predict(plan.features)};
  return true;
}

void Lane::run_step(TimePoint now) {
  state_->record.planning = now - state_->record.begin;
  state_->outcome = state_->backend.run(state_->step_rows, state_->result);
}

/// Books the token of one sampling row and writes its event. True when the sequence ends with it.
bool Lane::State::finish_token(const policies::PlannedRow& row, std::size_t sample, TimePoint now) {
  Sequence& of = sequence(row.id);
  TokenEvent& event = next_event(row.id, of, now);
  if (!result.sample_valid[sample]) {
    event.sample.reset();
    event.finish = FinishReason::Failed;
    event.error =
        Error{.code = ErrorCode::Internal,
              .field = {},
              .message = "the model produced logits that are not finite at position " + std::to_string(of.tokens.size())};
    return true;
  }
  ++record.sampled;
  event.sample = result.samples[sample];
  const TokenId token = event.sample->token;
  of.tokens.push_back(token);
  of.sampling.append(token);
  const SamplingParameters& parameters = of.sampling.parameters();
  const std::vector<TokenId>& ends = backend.config().end_tokens;
  const bool ended = !parameters.ignore_eos && std::find(ends.begin(), ends.end(), token) != ends.end();
  const std::vector<TokenId>& stops = parameters.stop_token_ids;
  if (ended || std::find(stops.begin(), stops.end(), token) != stops.end()) {
    event.finish = FinishReason::Stop;
  } else if (of.sampling.generated_count() >= parameters.max_new_tokens) {
    event.finish = FinishReason::Length;
  }
  return event.finish.has_value();
}

void Lane::State::fail_all(const Error& error, TimePoint now) {
  std::vector<SequenceId> ids;
  for (const auto& [id, ignored] : sequences) ids.push_back(id);
  std::sort(ids.begin(), ids.end());
  for (const SequenceId id : ids) {
    TokenEvent& event = next_event(id, sequence(id), now);
    event.sample.reset();
    event.finish = FinishReason::Failed;
    event.error = error;
    CHECK(scheduler.cancel(id), "id=", id.value);
    erase(id);
  }
}

void Lane::end_step(TimePoint now) {
  State& state = *state_;
  state.record.end = now;
  const policies::StepPlan& plan = *std::exchange(state.plan, nullptr);
  if (!state.outcome) {
    Error error = state.outcome.error();
    error.code = ErrorCode::DeviceLost;
    state.failure = error;
    state.scheduler.abandon();
    state.fail_all(error, now);
    return;
  }
  state.record.bucket = state.result.bucket;
  state.record.padding_tokens = state.result.padding_tokens;
  std::size_t sample = 0;
  state.outcomes.clear();
  for (const policies::PlannedRow& row : plan.rows) {
    if (!row.samples) continue;
    state.outcomes.push_back({.id = row.id, .finished = state.finish_token(row, sample++, now)});
  }
  // samples may be longer: backends keep what an earlier, larger step allocated.
  CHECK(sample == state.result.sample_valid.size() && sample <= state.result.samples.size(), "sampling rows=", sample,
        " answered=", state.result.sample_valid.size());
  state.scheduler.complete(state.outcomes, now, now - state.record.begin);
  for (const policies::RowOutcome& row : state.outcomes) {
    if (row.finished) state.erase(row.id);
  }
}

std::span<const TokenEvent> Lane::events() const {
  return std::span(state_->events).first(state_->event_count);
}
const StepRecord& Lane::record() const {
  return state_->record;
}
const std::optional<Error>& Lane::failure() const {
  return state_->failure;
}
const policies::Scheduler& Lane::scheduler() const {
  return state_->scheduler;
}
Backend& Lane::backend() {
  return state_->backend;
}

void Lane::check_integrity() const {
  state_->scheduler.check_integrity();
  const policies::SchedulerCounts counts = state_->scheduler.counts();
  CHECK(state_->sequences.size() == static_cast<std::size_t>(counts.waiting + counts.running),
        "sequences=", state_->sequences.size(), " waiting=", counts.waiting, " running=", counts.running);
  for (const auto& [id, sequence] : state_->sequences) {
    const auto generated = static_cast<std::size_t>(sequence.sampling.generated_count());
    CHECK(generated < sequence.tokens.size(), "id=", id.value, " generated=", generated);
  }
}

}  // namespace rubato::engine
