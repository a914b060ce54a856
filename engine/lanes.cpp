// SPDX-License-Identifier: Apache-2.0
// The lanes' bookkeeping: sequences by id, plans to backend rows, results to events.
#include "engine/lanes.h"

#include <algorithm>
#include <unordered_map>
#include <utility>

#include "engine/request_check.h"
#include "manifests/check.h"

namespace rubato::engine {
namespace {

constexpr std::size_t block_tokens = kv_block_tokens;

/// Everything the lane keeps of one sequence. Tokens are never taken back: a preemption only makes them be computed again.
struct Sequence {
  Sequence(const Request& request, const BlockHash& last_block_in, std::int32_t vocabulary)
      : tokens(request.prompt), sampling(request.sampling, request.prompt, vocabulary), last_block(last_block_in) {
    const std::size_t length_max = tokens.size() + static_cast<std::size_t>(request.sampling.max_new_tokens);
    tokens.reserve(length_max);
  }

  std::vector<TokenId> tokens;  // prompt, then output
  SamplingState sampling;
  BlockHash last_block;                // of the last full block of tokens, with prefix caching
  std::int32_t cached_tokens = 0;      // of the prompt
  std::optional<TimePoint> scheduled;  // begin of the first step with a row of it
  bool in_step = false;                // a step that reads it is open
  bool ended = false;                  // within that step: nothing is told of it any more
};

}  // namespace

Result<void> CopyJob::run() const {
  return to->copy_blocks(*from, {.blocks = blocks, .state = state}, [this] { return wanted->load(std::memory_order_acquire); });
}

struct Lanes::State {
  /// Of one lane, between begin_step() and end_step() the lane's thread's own.
  struct Lane {
    Backend* backend = nullptr;
    const policies::StepPlan* plan = nullptr;  // of the open step
    std::vector<StepRow> rows;
    StepResult result;
    Result<void> outcome;
    std::vector<policies::RowOutcome> outcomes;
    std::vector<TokenEvent> events;  // the first event_count are the last step's
    std::size_t event_count = 0;
    std::int32_t preempted = 0;  // since its last step
    Duration shared{};           // of the open step: while the device's other lane was in a step that has ended
    StepRecord record;
  };
  struct OpenCopy {
    std::uint64_t epoch = 0;
    std::shared_ptr<std::atomic<bool>> wanted;
  };

  State(std::vector<Backend*> backends, const LanesOptions& options)
      : limits(options.limits), hasher(options.prefix_key), group(options.limits, options.initial) {
    CHECK(static_cast<std::int32_t>(backends.size()) == group.lane_count(), "backends=", backends.size(),
          " lanes=", group.lane_count());
    const auto row_count = static_cast<std::size_t>(options.limits.each.max_num_seqs);
    for (Backend* backend : backends) {
      Lane& lane = lanes.emplace_back();
      lane.backend = backend;
      lane.rows.reserve(row_count);
      lane.outcomes.reserve(row_count);
      lane.events.reserve(row_count);
    }
    group.watch_freed();
    use_shares(options.initial.knobs);
  }

  Lane& at(LaneIndex lane) { return lanes[static_cast<std::size_t>(lane.value)]; }

  [[nodiscard]] Sequence& sequence(SequenceId id) {
    const auto found = sequences.find(id);
    CHECK(found != sequences.end(), "id=", id.value);
    return found->second;
  }

  /// The lane's next event, reused with its capacity.
  TokenEvent& next_event(Lane& lane, SequenceId id, const Sequence& of, TimePoint now) {
    if (lane.event_count == lane.events.size()) lane.events.emplace_back();
    TokenEvent& event = lane.events[lane.event_count++];
    event.id = id;
    event.index = of.sampling.generated_count();
    event.finish.reset();
    event.error = Error{};
    event.time = now;
    event.scheduled = of.scheduled.value_or(now);
    event.cached_tokens = of.cached_tokens;
    return event;
  }

  void use_shares(const KnobValues& knobs) {
    if (limits.lanes_per_device == 2) lanes[1].backend->use_share(knobs.prefill_share);
  }

  void share_device(LaneIndex index, TimePoint now);
  void add_row(Lane& lane, const policies::PlannedRow& row, TimePoint now);
  [[nodiscard]] bool finish_token(Lane& lane, const policies::PlannedRow& row, std::size_t sample, TimePoint now);
  void leave_step(const policies::StepPlan& plan);
  void fail_all(Lane& lane, const Error& error, TimePoint now);
  void follow_group();
  void tell_freed();
  void stop_unwanted_copies();

  [[nodiscard]] bool caching() const { return limits.each.prefix_caching.enabled; }
  [[nodiscard]] std::optional<BlockHash> filled_block(Sequence& of) const;

  const policies::LaneGroupLimits limits;
  const PrefixHasher hasher;
  policies::LaneGroup group;
  std::vector<Lane> lanes;
  std::unordered_map<SequenceId, Sequence> sequences;
  std::vector<OpenCopy> copies;
  std::optional<Error> failure;
};

Lanes::Lanes(std::vector<Backend*> backends, const LanesOptions& options)
    : state_(std::make_unique<State>(std::move(backends), options)) {}
Lanes::~Lanes() = default;

Result<void> Lanes::add(Request request) {
  State& state = *state_;
  if (state.failure) return unexpected(ErrorCode::DeviceLost, "the device failed: " + state.failure->message);
  const std::int32_t vocabulary = state.lanes.front().backend->config().vocabulary;
  if (auto fault = find_fault(request, vocabulary, state.group.effective_max_len())) return std::move(*fault);
  CHECK(!state.sequences.contains(request.id), "id=", request.id.value);
  BlockHash last_block;
  std::vector<BlockHash> prefix;
  if (state.caching()) {
    last_block = state.hasher.root(request.cache_salt);
    const std::span<const TokenId> prompt = request.prompt;
    for (std::size_t end = block_tokens; end <= prompt.size(); end += block_tokens)
      prefix.push_back(last_block = state.hasher.next(last_block, prompt.subspan(end - block_tokens, block_tokens)));
  }
  const policies::SequenceRequest entry{.id = request.id,
                                        .arrival = request.arrival,
                                        .prompt_tokens = static_cast<std::int32_t>(request.prompt.size()),
                                        .max_new_tokens = request.sampling.max_new_tokens,
                                        .ttft_target = request.ttft_target,
                                        .itl_target = request.itl_target,
                                        .prefix = prefix};
  if (auto added = state.group.add(entry); !added) return added;
  state.sequences.emplace(std::piecewise_construct, std::forward_as_tuple(request.id),
                          std::forward_as_tuple(request, last_block, vocabulary));
  return {};
}

bool Lanes::cancel(SequenceId id) {
  State& state = *state_;
  const auto found = state.sequences.find(id);
  const bool was_there = found != state.sequences.end() && !found->second.ended;
  CHECK(state.group.cancel(id) == was_there, "id=", id.value);
  if (!was_there) return false;
  if (found->second.in_step) {
    found->second.ended = true;
  } else {
    state.sequences.erase(found);
  }
  state.follow_group();
  return true;
}

void Lanes::apply(const Settings& settings, TimePoint now) {
  state_->group.apply(settings, now);
  state_->use_shares(settings.knobs);
  state_->follow_group();
}

void Lanes::State::add_row(Lane& lane, const policies::PlannedRow& row, TimePoint now) {
  Sequence& of = sequence(row.id);
  const auto end = static_cast<std::size_t>(row.begin) + static_cast<std::size_t>(row.count);
  CHECK(row.begin >= 0 && row.count >= 1 && end <= of.tokens.size(), "id=", row.id.value, " begin=", row.begin,
        " count=", row.count);
  CHECK(row.samples == (end == of.tokens.size()), "id=", row.id.value, " end=", end, " tokens=", of.tokens.size());
  CHECK(row.blocks.size() * kv_block_tokens >= end, "id=", row.id.value, " blocks=", row.blocks.size(), " end=", end);
  CHECK(!of.in_step, "id=", row.id.value, " is in two steps at once");
  of.in_step = true;
  if (!of.scheduled) {
    of.scheduled = now;
    of.cached_tokens = row.cached_tokens;
  }
  lane.rows.push_back(
      {.position = row.begin,
       .tokens = std::span(of.tokens).subspan(static_cast<std::size_t>(row.begin), static_cast<std::size_t>(row.count)),
       .blocks = row.blocks,
       .sampling = row.samples ? &of.sampling : nullptr,
       .state = row.state});
}

/// A step of the lane ends. What it had of its device for most of its time is what its duration tells of.
void Lanes::State::share_device(LaneIndex index, TimePoint now) {
  if (limits.lanes_per_device < 2) return;
  Lane& lane = at(index);
  Lane& other = lanes[index.value == 0 ? 1 : 0];
  if (other.plan != nullptr) {
    const Duration both = now - std::max(lane.record.begin, other.record.begin);
    lane.shared += both;
    other.shared += both;
  }
  if (2 * lane.shared > now - lane.record.begin) lane.record.share_percent = lane.backend->share().given_percent;
}

bool Lanes::begin_step(LaneIndex index, TimePoint now) {
  State& state = *state_;
  State::Lane& lane = state.at(index);
  lane.event_count = 0;
  if (state.failure) return false;
  const policies::StepPlan& plan = state.group.plan(index, now);
  state.follow_group();
  lane.preempted += static_cast<std::int32_t>(plan.preempted.size());  // an empty plan may name some, too
  if (plan.empty()) return false;
  lane.plan = &plan;
  lane.shared = Duration::zero();
  lane.rows.clear();
  for (const policies::PlannedRow& row : plan.rows) state.add_row(lane, row, now);
  lane.record = StepRecord{.lane = index,
                           .role = state.group.role(index),
                           .step_number = plan.step_number,
                           .settings_number = plan.settings_number,
                           .features = plan.features,
                           .sampled = 0,
                           .preempted = std::exchange(lane.preempted, 0),
                           .bucket = {},
                           .padding_tokens = 0,
                           .begin = now,
                           .end = now,
                           .planning = {},
                           .predicted = state.group.step_time(index).predict(plan.features)};
  return true;
}

void Lanes::run_step(LaneIndex index, TimePoint now) {
  State::Lane& lane = state_->at(index);
  lane.record.planning = now - lane.record.begin;
  lane.outcome = lane.backend->run(lane.rows, lane.result);
}

/// Books the token of one sampling row and writes its event. True when the sequence ends with it.
bool Lanes::State::finish_token(Lane& lane, const policies::PlannedRow& row, std::size_t sample, TimePoint now) {
  Sequence& of = sequence(row.id);
  if (of.ended) return true;
  TokenEvent& event = next_event(lane, row.id, of, now);
  if (!lane.result.sample_valid[sample]) {
    event.sample.reset();
    event.finish = FinishReason::Failed;
    event.error =
        Error{.code = ErrorCode::Internal,
              .field = {},
              .message = "the model produced logits that are not finite at position " + std::to_string(of.tokens.size())};
    return true;
  }
  ++lane.record.sampled;
  event.sample = lane.result.samples[sample];
  const TokenId token = event.sample->token;
  of.tokens.push_back(token);
  of.sampling.append(token);
  const SamplingParameters& parameters = of.sampling.parameters();
  const std::vector<TokenId>& ends = lane.backend->config().end_tokens;
  const bool ended = !parameters.ignore_eos && std::find(ends.begin(), ends.end(), token) != ends.end();
  const std::vector<TokenId>& stops = parameters.stop_token_ids;
  if (ended || std::find(stops.begin(), stops.end(), token) != stops.end()) {
    event.finish = FinishReason::Stop;
  } else if (of.sampling.generated_count() >= parameters.max_new_tokens) {
    event.finish = FinishReason::Length;
  }
  return event.finish.has_value();
}

/// The hash of the block that a sequence's last token has filled, if it has.
std::optional<BlockHash> Lanes::State::filled_block(Sequence& of) const {
  if (!caching() || of.tokens.size() % block_tokens != 0) return std::nullopt;
  of.last_block = hasher.next(of.last_block, std::span<const TokenId>(of.tokens).last(block_tokens));
  return of.last_block;
}

/// Nothing reads the step's sequences any more; those that ended meanwhile can go.
void Lanes::State::leave_step(const policies::StepPlan& plan) {
  for (const policies::PlannedRow& row : plan.rows) {
    const auto found = sequences.find(row.id);
    CHECK(found != sequences.end() && found->second.in_step, "id=", row.id.value);
    found->second.in_step = false;
    if (found->second.ended) sequences.erase(found);
  }
}

void Lanes::State::fail_all(Lane& lane, const Error& error, TimePoint now) {
  std::vector<SequenceId> ids;
  for (const auto& [id, of] : sequences) {
    if (!of.ended) ids.push_back(id);
  }
  std::sort(ids.begin(), ids.end());
  for (const SequenceId id : ids) {
    Sequence& of = sequence(id);
    TokenEvent& event = next_event(lane, id, of, now);
    event.sample.reset();
    event.finish = FinishReason::Failed;
    event.error = error;
    CHECK(group.cancel(id), "id=", id.value);
    of.ended = true;
    if (!of.in_step) sequences.erase(id);
  }
}

void Lanes::end_step(LaneIndex index, TimePoint now) {
  State& state = *state_;
  State::Lane& lane = state.at(index);
  lane.record.end = now;
  state.share_device(index, now);
  const policies::StepPlan& plan = *std::exchange(lane.plan, nullptr);
  if (!lane.outcome || state.failure) {
    state.leave_step(plan);
    state.group.abandon(index);
    if (!state.failure) {
      Error error = lane.outcome.error();
      error.code = ErrorCode::DeviceLost;
      state.failure = error;
      state.fail_all(lane, error, now);
    }
    state.follow_group();
    return;
  }
  lane.record.bucket = lane.result.bucket;
  lane.record.padding_tokens = lane.result.padding_tokens;
  std::size_t sample = 0;
  lane.outcomes.clear();
  for (const policies::PlannedRow& row : plan.rows) {
    if (!row.samples) continue;
    const bool finished = state.finish_token(lane, row, sample++, now);
    Sequence& of = state.sequence(row.id);
    lane.outcomes.push_back({.id = row.id, .finished = finished, .filled = finished ? std::nullopt : state.filled_block(of)});
    if (finished) of.ended = true;
  }
  // samples may be longer: backends keep what an earlier, larger step allocated.
  CHECK(sample == lane.result.sample_valid.size() && sample <= lane.result.samples.size(), "sampling rows=", sample,
        " answered=", lane.result.sample_valid.size());
  state.leave_step(plan);
  state.group.complete(index, lane.outcomes, now, now - lane.record.begin);
  lane.record.preempted += static_cast<std::int32_t>(state.group.preempted_at_end(index).size());
  state.follow_group();
}

/// After each call of the group, before anything that it planned runs.
void Lanes::State::follow_group() {
  stop_unwanted_copies();
  tell_freed();
}

/// Contents of freed blocks and states are dead; backends that poison want to know before the next step runs.
void Lanes::State::tell_freed() {
  for (std::int32_t i = 0; i < group.lane_count(); i += limits.lanes_per_device) {
    const std::span<const StateId> states = group.take_freed_states(group.device_of(LaneIndex{i}));
    if (!states.empty()) at(LaneIndex{i}).backend->released_states(states);
    const std::span<const BlockId> freed = group.take_freed(group.device_of(LaneIndex{i}));
    if (!freed.empty()) at(LaneIndex{i}).backend->released(freed);
  }
}

void Lanes::State::stop_unwanted_copies() {
  for (const OpenCopy& copy : copies) {
    if (!group.wants(copy.epoch)) copy.wanted->store(false, std::memory_order_release);
  }
}

std::optional<CopyJob> Lanes::next_copy(TimePoint now) {
  State& state = *state_;
  const std::optional<policies::CopyOrder> order = state.group.next_copy(now);
  if (!order) return std::nullopt;
  auto wanted = std::make_shared<std::atomic<bool>>(true);
  state.copies.push_back({.epoch = order->epoch, .wanted = wanted});
  return CopyJob{.epoch = order->epoch,
                 .from = state.at(order->from).backend,
                 .to = state.at(order->to).backend,
                 .blocks = std::vector<BlockCopy>(order->blocks.begin(), order->blocks.end()),
                 .state = order->state,
                 .wanted = std::move(wanted)};
}

void Lanes::copied(const CopyJob& job, const Result<void>& outcome, TimePoint now) {
  State& state = *state_;
  std::erase_if(state.copies, [&job](const State::OpenCopy& copy) { return copy.epoch == job.epoch; });
  state.group.copied(job.epoch, outcome, now);
  state.follow_group();
}

void Lanes::expire(TimePoint now) {
  state_->group.expire(now);
  state_->follow_group();
}

std::span<const TokenEvent> Lanes::events(LaneIndex lane) const {
  const State::Lane& of = state_->at(lane);
  return std::span(of.events).first(of.event_count);
}
const StepRecord& Lanes::record(LaneIndex lane) const {
  return state_->at(lane).record;
}
const std::optional<Error>& Lanes::failure() const {
  return state_->failure;
}
const policies::LaneGroup& Lanes::group() const {
  return state_->group;
}
std::int32_t Lanes::lane_count() const {
  return state_->group.lane_count();
}
Backend& Lanes::backend(LaneIndex lane) {
  return *state_->at(lane).backend;
}

void Lanes::check_integrity() const {
  state_->group.check_integrity();
  std::int32_t live = 0;
  for (const auto& [id, sequence] : state_->sequences) {
    CHECK(!sequence.ended || sequence.in_step, "id=", id.value, " has ended and is still here");
    live += sequence.ended ? 0 : 1;
    const auto generated = static_cast<std::size_t>(sequence.sampling.generated_count());
    CHECK(generated < sequence.tokens.size(), "id=", id.value, " generated=", generated);
  }
  CHECK(live == state_->group.sequence_count(), "sequences=", live, " in the group=", state_->group.sequence_count());
}

}  // namespace rubato::engine
