// SPDX-License-Identifier: Apache-2.0
// A lane without a device, for tests: it drives a Scheduler under virtual time, samples made-up outputs of given lengths, and
// checks from outside, by its own books, what scheduler.h promises after every step.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "policies/accounting.h"
#include "policies/scheduler.h"
#include "tests/policies/made_up_memory.h"

namespace rubato::policies {

inline constexpr PriorityPolicy all_policies[] = {PriorityPolicy::Deadline, PriorityPolicy::DecodeFirst,
                                                  PriorityPolicy::PrefillFirst, PriorityPolicy::ShortestFirst};

inline std::string name_of(PriorityPolicy policy) {
  switch (policy) {
    case PriorityPolicy::Deadline:
      return "Deadline";
    case PriorityPolicy::DecodeFirst:
      return "DecodeFirst";
    case PriorityPolicy::PrefillFirst:
      return "PrefillFirst";
    case PriorityPolicy::ShortestFirst:
      return "ShortestFirst";
  }
  return "unknown";
}

/// A machine: 1 ms per step, 20 us per token, 2 ns per query-key pair, 100 us per 1000 tokens of decode context.
inline Duration step_cost(const StepFeatures& features) {
  return from_seconds(1e-3 + 20e-6 * features.tokens + 2e-9 * features.attention + 1e-7 * features.context);
}

struct WorldOptions {
  SchedulerLimits limits{.max_model_len = 4096, .max_num_seqs = 8, .max_waiting = 64, .block_count = 1024};
  KnobValues knobs{};
  std::string replay;  // printed with every failure
};

struct RequestOptions {
  std::int32_t prompt_tokens = 1;
  std::int32_t max_new_tokens = 1;
  std::int32_t output_tokens = 0;  // 0: max_new_tokens
  Duration ttft_target = std::chrono::milliseconds(500);
  Duration itl_target = std::chrono::milliseconds(50);
  std::int32_t shared_tokens = 0;  // at the start of the prompt: those of its family
  std::uint64_t family = 0;
  std::optional<SequenceId> follows{};  // begins with that one's text instead, output included
};

/// What a client saw of one request.
struct Stream {
  RequestOptions options;
  TimePoint arrival;
  std::uint64_t number = 0;   // order of add()
  std::int32_t computed = 0;  // tokens with KV, by the rows seen
  std::int32_t sampled = 0;
  std::int32_t preemptions = 0;
  std::int32_t decode_gap = 0;       // steps in a row without a row, while it was a running decode
  std::int32_t tight_allowance = 0;  // further steps allowed by the budgets that were in force during the gap
  bool running = false;
  bool ended = false;
  bool cancelled = false;
  std::uint64_t added_at_step = 0;
  std::uint64_t ended_at_step = 0;
  std::optional<TimePoint> first_token;
  std::optional<TimePoint> last_token;
  Duration largest_gap{};
  std::int32_t steps_in_largest_gap = 0;
  std::uint64_t last_token_step = 0;
  Text text;  // what is known
  std::int32_t cached_tokens = 0;

  [[nodiscard]] bool decoding() const {
    return running && sampled > 0 && options.prompt_tokens + sampled - computed == 1 && !recomputing;
  }
  bool recomputing = false;  // after a preemption, until it samples again
  bool admitted = false;     // ever
};

class World {
 public:
  explicit World(const WorldOptions& options)
      : options_(options),
        scheduler_(options.limits, Settings{.number = 1, .knobs = options.knobs}),
        memory_(options.limits, options.replay) {
    settings_ = scheduler_.settings();
  }

  Scheduler& scheduler() { return scheduler_; }
  [[nodiscard]] TimePoint now() const { return now_; }
  void advance(Duration duration) { now_ += duration; }
  [[nodiscard]] std::uint64_t steps() const { return steps_; }
  [[nodiscard]] Duration slowest_step() const { return slowest_step_; }
  [[nodiscard]] const std::map<SequenceId, Stream>& streams() const { return streams_; }
  Stream& stream(SequenceId id) { return streams_.at(id); }
  std::function<Duration(const StepFeatures&)> cost = step_cost;

  Result<void> try_add(SequenceId id, const RequestOptions& request, std::span<const BlockHash> prefix = {}) {
    return scheduler_.add({.id = id,
                           .arrival = now_,
                           .prompt_tokens = request.prompt_tokens,
                           .max_new_tokens = request.max_new_tokens,
                           .ttft_target = request.ttft_target,
                           .itl_target = request.itl_target,
                           .prefix = prefix});
  }

  /// Adds a request that must be accepted.
  SequenceId add(const RequestOptions& request) {
    const SequenceId id{next_id_++};
    Text text;
    if (request.follows) {
      text = streams_.at(*request.follows).text;
    } else {
      fit(text, request.shared_tokens, 1'000'000 + request.family);
    }
    fit(text, request.prompt_tokens, id.value);
    const Result<void> result = try_add(id, request, hashes_of(text));
    EXPECT_TRUE(result.has_value()) << (result ? "" : result.error().message) << options_.replay;
    Stream stream;
    stream.options = request;
    if (stream.options.output_tokens == 0) stream.options.output_tokens = request.max_new_tokens;
    stream.arrival = now_;
    stream.number = id.value;
    stream.added_at_step = steps_;
    stream.text = std::move(text);
    streams_.emplace(id, stream);
    live_.push_back(id);
    return id;
  }

  void cancel(SequenceId id) {
    EXPECT_TRUE(scheduler_.cancel(id)) << "sequence " << id.value << options_.replay;
    EXPECT_FALSE(scheduler_.cancel(id)) << "sequence " << id.value << options_.replay;
    finish(id);
    streams_.at(id).cancelled = true;
  }

  void set(const KnobValues& knobs) {
    scheduler_.apply({.number = settings_.number + 1, .knobs = knobs});
    settings_ = scheduler_.settings();
  }
  [[nodiscard]] const KnobValues& knobs() const { return settings_.knobs; }

  /// Plans and runs one step. False when nothing could run.
  bool step() {
    const std::int32_t running_before = scheduler_.counts().running;
    const StepPlan& plan = scheduler_.plan(now_);
    record(plan);
    if (plan.empty()) {
      EXPECT_TRUE(live_.empty()) << "an empty plan with " << live_.size() << " sequences" << options_.replay;
      return false;
    }
    check_plan(plan, running_before);
    const Duration duration = cost(plan.features);
    now_ += duration;
    ++steps_;
    slowest_step_ = std::max(slowest_step_, duration);
    book(plan);
    scheduler_.complete(outcomes_, now_, duration);
    outcomes_.clear();
    check_gaps();
    return true;
  }

  /// Runs until idle; fails after most_steps.
  void drain(std::uint64_t most_steps) {
    const std::uint64_t end = steps_ + most_steps;
    while (!scheduler_.idle()) {
      ASSERT_LT(steps_, end) << live_.size() << " sequences have not ended" << options_.replay;
      step();
      if (testing::Test::HasFailure()) return;
    }
    EXPECT_EQ(scheduler_.counts().free_blocks, options_.limits.block_count) << options_.replay;
    EXPECT_EQ(scheduler_.counts().running + scheduler_.counts().waiting, 0) << options_.replay;
    EXPECT_EQ(scheduler_.counts().states_running, 0) << options_.replay;
    if (options_.limits.prefix_caching.enabled) {
      EXPECT_EQ(scheduler_.counts().prefix_hits, hits_) << options_.replay;
      EXPECT_EQ(scheduler_.counts().prefix_queries, queries_) << options_.replay;
    }
    scheduler_.check_integrity();
  }

  /// Fingerprint of every plan so far.
  [[nodiscard]] std::uint64_t fingerprint() const { return fingerprint_; }
  [[nodiscard]] const std::vector<SequenceId>& live() const { return live_; }
  std::function<void(const StepPlan&)> on_plan = [](const StepPlan&) {};

 private:
  void record(const StepPlan& plan) {
    const auto mix = [this](std::uint64_t value) { fingerprint_ = (fingerprint_ ^ value) * 0x100000001b3ULL; };
    mix(plan.rows.size());
    for (const PlannedRow& row : plan.rows) {
      mix(row.id.value);
      mix(static_cast<std::uint64_t>(row.begin));
      mix(static_cast<std::uint64_t>(row.count));
      for (const BlockId block : row.blocks) mix(static_cast<std::uint64_t>(block.value));
      if (row.state) mix(static_cast<std::uint64_t>(row.state->to.value));
    }
    for (const SequenceId id : plan.preempted) mix(id.value);
    on_plan(plan);
  }

  void check_plan(const StepPlan& plan, std::int32_t running_before) {
    const KnobValues& knobs = settings_.knobs;
    EXPECT_EQ(plan.settings_number, settings_.number) << options_.replay;
    for (const SequenceId id : plan.preempted) {
      Stream& stream = streams_.at(id);
      EXPECT_TRUE(stream.running && !stream.ended) << "sequence " << id.value << options_.replay;
      stream.running = false;
      stream.computed = 0;
      stream.recomputing = stream.sampled > 0;
      stream.decode_gap = 0;
      ++stream.preemptions;
    }
    std::int32_t tokens = 0;
    bool prefill_seen = false;
    std::vector<std::uint64_t> ids;
    StepFeatures features;
    for (const PlannedRow& row : plan.rows) {
      Stream& stream = streams_.at(row.id);
      const std::int32_t known = stream.options.prompt_tokens + stream.sampled;
      EXPECT_FALSE(stream.ended) << "sequence " << row.id.value << options_.replay;
      if (!stream.running) {
        note_start(row, stream, known);
      }
      EXPECT_EQ(row.begin, stream.computed) << "a hole or a repetition in sequence " << row.id.value << options_.replay;
      EXPECT_GE(row.count, 1) << options_.replay;
      EXPECT_LE(row.begin + row.count, known) << options_.replay;
      EXPECT_EQ(row.samples, row.begin + row.count == known) << options_.replay;
      EXPECT_EQ(row.decode, stream.decoding()) << "sequence " << row.id.value << options_.replay;
      EXPECT_FALSE(row.decode && prefill_seen) << "decode rows come first" << options_.replay;
      EXPECT_EQ(static_cast<std::int32_t>(row.blocks.size()), (row.begin + row.count + kv_block_tokens - 1) / kv_block_tokens)
          << options_.replay;
      prefill_seen = prefill_seen || !row.decode;
      row.decode ? features.add_decode(row.begin + 1) : features.add_chunk(row.begin, row.count);
      tokens += row.count;
      ids.push_back(row.id.value);
      memory_.begin(row, row.blocks, stream.text);
      EXPECT_EQ(std::count(plan.preempted.begin(), plan.preempted.end(), row.id), 0) << options_.replay;
    }
    EXPECT_LE(tokens, knobs.max_num_batched_tokens) << options_.replay;
    EXPECT_LE(static_cast<std::int32_t>(plan.rows.size()), std::max(knobs.max_num_seqs, running_before)) << options_.replay;
    EXPECT_LE(static_cast<std::int32_t>(plan.rows.size()), options_.limits.max_num_seqs) << options_.replay;
    const std::int32_t running = scheduler_.counts().running;
    EXPECT_LE(running, std::max(knobs.max_num_seqs, running_before)) << "admitted while draining" << options_.replay;
    std::sort(ids.begin(), ids.end());
    EXPECT_TRUE(std::adjacent_find(ids.begin(), ids.end()) == ids.end()) << "a sequence twice in a step" << options_.replay;
    check_writes(plan, options_.replay);
    EXPECT_EQ(plan.features.tokens, tokens) << options_.replay;
    EXPECT_EQ(plan.features.decode_rows, features.decode_rows) << options_.replay;
    EXPECT_EQ(plan.features.prefill_rows, features.prefill_rows) << options_.replay;
    EXPECT_DOUBLE_EQ(plan.features.attention, features.attention) << options_.replay;
    EXPECT_DOUBLE_EQ(plan.features.context, features.context) << options_.replay;
  }

  // It has just been admitted: what the prefix cache had of it is computed already.
  void note_start(const PlannedRow& row, Stream& stream, std::int32_t known) {
    stream.computed = row.begin;
    EXPECT_TRUE(row.begin % kv_block_tokens == 0 && row.begin < known) << row.begin << " of " << known << options_.replay;
    EXPECT_TRUE(row.begin == 0 || options_.limits.prefix_caching.enabled) << options_.replay;
    if (!stream.admitted) stream.cached_tokens = row.begin;
    stream.admitted = true;
    hits_ += static_cast<std::uint64_t>(row.begin);
    queries_ += static_cast<std::uint64_t>(known);
    EXPECT_EQ(row.cached_tokens, stream.cached_tokens) << options_.replay;
  }

  void book(const StepPlan& plan) {
    decodes_ = 0;
    for (const SequenceId id : live_) {
      Stream& stream = streams_.at(id);
      if (!stream.decoding()) continue;
      ++decodes_;
      ++stream.decode_gap;  // undone below for those with a row
    }
    count_prefill_gap(plan);
    for (const PlannedRow& row : plan.rows) {
      Stream& stream = streams_.at(row.id);
      memory_.end(row, row.blocks, stream.text);
      stream.running = true;
      stream.decode_gap = 0;
      stream.computed += row.count;
      if (!row.samples) continue;
      ++stream.sampled;
      stream.recomputing = false;
      if (stream.last_token) {
        stream.largest_gap = std::max(stream.largest_gap, now_ - *stream.last_token);
        stream.steps_in_largest_gap =
            std::max(stream.steps_in_largest_gap, static_cast<std::int32_t>(steps_ - stream.last_token_step));
      }
      if (!stream.first_token) stream.first_token = now_;
      stream.last_token = now_;
      stream.last_token_step = steps_;
      const bool finished = stream.sampled == stream.options.output_tokens;
      say(stream.text);
      const auto length = static_cast<std::int32_t>(stream.text.size());
      outcomes_.push_back({.id = row.id, .finished = finished});
      if (length % kv_block_tokens == 0) outcomes_.back().filled = hash_of_block(stream.text, length / kv_block_tokens - 1);
      if (finished) finish(row.id);
    }
  }

  // Whether a waiting request could be admitted by the strictest reading: a free place, and blocks for all that the running ones
  // and it may ever need.
  [[nodiscard]] bool surely_admissible(SequenceId candidate) const {
    std::int32_t running = 0;
    std::int64_t blocks = watermark_blocks(options_.limits.block_count);
    for (const SequenceId id : live_) {
      const Stream& stream = streams_.at(id);
      if (!stream.running && id != candidate) continue;
      if (stream.running) ++running;
      blocks += blocks_for_tokens(stream.options.prompt_tokens + stream.options.max_new_tokens);
    }
    const bool state = options_.limits.state_count == 0 || running < options_.limits.state_count;
    return state && running < settings_.knobs.max_num_seqs && blocks <= options_.limits.block_count;
  }

  // The oldest unfinished prefill, in steps in which nothing but the plan held it back: it was running, or could have been
  // admitted.
  void count_prefill_gap(const StepPlan& plan) {
    const auto oldest = std::find_if(live_.begin(), live_.end(), [this](SequenceId id) { return !streams_.at(id).decoding(); });
    if (oldest == live_.end()) {
      prefill_gap_of_ = {};
      prefill_gap_ = 0;
      return;
    }
    const Stream& stream = streams_.at(*oldest);
    if (prefill_gap_of_ != *oldest) prefill_gap_ = 0;
    prefill_gap_of_ = *oldest;
    std::int32_t got = 0;
    for (const PlannedRow& row : plan.rows) {
      if (row.id == *oldest) got = row.count;
    }
    const std::int32_t quantum = std::min(min_prefill_quantum, std::max(1, settings_.knobs.max_num_batched_tokens / 2));
    const std::int32_t rest = stream.options.prompt_tokens + stream.sampled - stream.computed;
    // What it had from the prefix cache when it was admitted counts as computed before this step, as the rows say.
    const bool preempted_now = std::count(plan.preempted.begin(), plan.preempted.end(), *oldest) > 0;
    if (got >= std::min(quantum, rest)) {
      prefill_gap_ = 0;
    } else if (!preempted_now && (stream.running || surely_admissible(*oldest))) {
      ++prefill_gap_;
      // A gap from under another policy may stand above the bound of this one, but it does not grow.
      EXPECT_LE(prefill_gap_, gap_bounds(settings_.knobs.priority_policy).prefill_steps)
          << "prefill gap of sequence " << oldest->value << options_.replay;
    }
  }

  void check_gaps() {
    const GapBounds bounds = gap_bounds(settings_.knobs.priority_policy);
    const std::int32_t budget = settings_.knobs.max_num_batched_tokens;
    const bool tight = budget < decodes_ + min_prefill_quantum;
    for (const SequenceId id : live_) {
      Stream& stream = streams_.at(id);
      if (stream.decode_gap == 0) stream.tight_allowance = 0;
      if (tight) stream.tight_allowance = std::max(stream.tight_allowance, 2 * ((decodes_ + budget - 1) / budget));
      const std::int32_t most = bounds.decode_steps + (tight ? stream.tight_allowance : 0);
      EXPECT_LE(stream.decode_gap, most) << "decode gap of sequence " << id.value << " with " << decodes_ << " decodes at budget "
                                         << budget << options_.replay;
    }
  }

  void finish(SequenceId id) {
    Stream& stream = streams_.at(id);
    stream.ended = true;
    stream.running = false;
    stream.ended_at_step = steps_;
    live_.erase(std::find(live_.begin(), live_.end(), id));
  }

  WorldOptions options_;
  Scheduler scheduler_;
  MadeUpMemory memory_;
  std::uint64_t hits_ = 0;
  std::uint64_t queries_ = 0;
  Settings settings_;
  TimePoint now_{std::chrono::seconds(1)};
  std::uint64_t next_id_ = 1;
  std::uint64_t steps_ = 0;
  std::uint64_t fingerprint_ = 0xcbf29ce484222325ULL;
  Duration slowest_step_{};
  std::map<SequenceId, Stream> streams_;
  std::vector<SequenceId> live_;  // oldest first
  std::vector<RowOutcome> outcomes_;
  std::int32_t decodes_ = 0;
  SequenceId prefill_gap_of_{};
  std::int32_t prefill_gap_ = 0;
};

}  // namespace rubato::policies
