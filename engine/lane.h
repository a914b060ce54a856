// SPDX-License-Identifier: Apache-2.0
// A lane: one scheduler driving one backend. It turns requests into steps and steps into token events. It has no thread and no
// clock of its own: the daemon's lane thread calls it with the time, a test calls it with virtual time.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "engine/backend.h"
#include "engine/sampling.h"
#include "manifests/result.h"
#include "manifests/settings.h"
#include "policies/scheduler.h"

namespace rubato::engine {

/// One generation. A request for n choices is n of these with seeds of their own.
struct Request {
  SequenceId id;
  std::vector<TokenId> prompt;  // >= 1 token, each below the vocabulary
  SamplingParameters sampling;
  TimePoint arrival;
  Duration ttft_target{};
  Duration itl_target{};
};

enum class FinishReason : std::uint8_t {
  Stop,    // an end token or a stop token id; that token is not part of the text
  Length,  // max_new_tokens or the effective limit reached
  Failed,  // its logits were not finite, or the device broke: error says which
};

/// What a step did for one sequence. Every admitted request ends with exactly one event that has a finish, unless it was
/// cancelled.
struct TokenEvent {
  SequenceId id;
  std::int32_t index = 0;        // 0-based number of the token within the output
  std::optional<Sample> sample;  // none only on Failed
  std::optional<FinishReason> finish;
  Error error;          // on Failed
  TimePoint time;       // when the step ended
  TimePoint scheduled;  // when the first step with a row of this sequence began (queue time ends there)
};

/// One executed step, for metrics, the step log and the tuner.
struct StepRecord {
  std::uint64_t step_number = 0;
  std::uint64_t settings_number = 0;
  policies::StepFeatures features;
  std::int32_t sampled = 0;
  std::int32_t preempted = 0;
  std::optional<std::int32_t> bucket;  // tokens of the shape that it ran in; none: eagerly
  std::int32_t padding_tokens = 0;
  TimePoint begin;
  TimePoint end;
  Duration planning{};  // scheduler and bookkeeping alone
  Duration predicted{};
};

struct LaneOptions {
  policies::SchedulerLimits limits;
  Settings initial;
};

/// Not thread-safe; one thread calls everything.
class Lane {
 public:
  /// backend must outlive the lane.
  Lane(Backend& backend, const LaneOptions& options);
  ~Lane();
  Lane(const Lane&) = delete;
  Lane& operator=(const Lane&) = delete;

  /// InvalidArgument: a token outside the vocabulary, an empty prompt, prompt + max_new_tokens above effective_max_len() (the
  /// message names the limit and the field is `max_tokens` or `prompt`). ResourceExhausted: the waiting queue is full.
  Result<void> add(Request request);
  /// Frees everything at once; no event follows. False when unknown or already ended.
  bool cancel(SequenceId id);
  void apply(const Settings& settings);

  /// Plans, runs and books one step. False when there was nothing to do. now() is called three times. Once the device has failed
  /// every remaining sequence gets a Failed event, and failure() is set.
  template <class Clock>
  bool step(Clock&& now) {
    if (!begin_step(now())) return false;
    run_step(now());
    end_step(now());
    return true;
  }

  /// Of the last step; overwritten by the next.
  [[nodiscard]] std::span<const TokenEvent> events() const;
  [[nodiscard]] const StepRecord& record() const;

  [[nodiscard]] const std::optional<Error>& failure() const;
  [[nodiscard]] const policies::Scheduler& scheduler() const;
  [[nodiscard]] Backend& backend();
  void check_integrity() const;

 private:
  bool begin_step(TimePoint now);
  void run_step(TimePoint now);
  void end_step(TimePoint now);

  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace rubato::engine
