// SPDX-License-Identifier: Apache-2.0
// The scheduling core: which rows make up the next step of one lane, how many tokens each, and which KV blocks they use. Pure and
// deterministic: the same calls give the same plans. The engine's lane and the twin run this same code, one on real time, one on
// virtual time. It never sees a token's value, a clock, a thread or a lock.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "manifests/result.h"
#include "manifests/settings.h"
#include "policies/ids.h"
#include "policies/step_time.h"
#include "policies/time.h"

namespace rubato::policies {

/// What the scheduler knows of a request: its lengths and its deadlines.
struct SequenceRequest {
  SequenceId id;
  TimePoint arrival;
  std::int32_t prompt_tokens = 0;   // >= 1
  std::int32_t max_new_tokens = 0;  // >= 1; prompt + new <= the effective limit of the pool
  Duration ttft_target{};
  Duration itl_target{};
};

/// Fixed at start.
struct SchedulerLimits {
  std::int32_t max_model_len = 0;  // tokens
  std::int32_t max_num_seqs = 0;   // capacity; the live knob stays at or below it
  std::int32_t max_waiting = 0;    // sequences that may wait
  std::int32_t block_count = 0;    // KV blocks of kv_block_tokens each
};

/// One sequence's share of a step: tokens [begin, begin + count) of its known tokens go through the model.
struct PlannedRow {
  SequenceId id;
  SequenceIndex index;              // dense, stable from admission to the end of the sequence
  std::int32_t begin = 0;           // absolute position of the first token
  std::int32_t count = 0;           // >= 1
  bool samples = false;             // the row reaches the last known token: the step yields its next token
  bool decode = false;              // one token, and the sequence has sampled before
  std::span<const BlockId> blocks;  // the sequence's block table, covering begin + count tokens
};

/// A step. Valid until the next call of plan(), cancel() or complete().
struct StepPlan {
  std::uint64_t step_number = 0;      // 1-based
  std::uint64_t settings_number = 0;  // the settings it was planned under
  std::vector<PlannedRow> rows;       // decode rows first
  std::vector<SequenceId> preempted;  // lost their blocks in this plan; recomputed later, no token is lost
  StepFeatures features;
  [[nodiscard]] bool empty() const { return rows.empty(); }
};

/// What became of a row that samples: did this token end the sequence?
struct RowOutcome {
  SequenceId id;
  bool finished = false;
};

/// Numbers for metrics and status; all are current, none resets.
struct SchedulerCounts {
  std::int32_t waiting = 0;    // not yet admitted, preempted ones included
  std::int32_t running = 0;    // hold blocks: half-prefilled or decoding
  std::int32_t prefilling = 0; // of running: still have prompt tokens to compute
  std::int32_t free_blocks = 0;
  std::int32_t block_count = 0;
  std::uint64_t preemptions = 0;
  std::int32_t decode_gap_steps_max = 0;   // largest number of consecutive steps a decoding sequence was left out, ever
  std::int32_t prefill_gap_steps_max = 0;  // the same for the oldest waiting prefill
};

/// One lane's scheduler. Not thread-safe; the lane's thread owns it. plan() allocates nothing once warm.
class Scheduler {
 public:
  Scheduler(const SchedulerLimits& limits, const Settings& initial);
  ~Scheduler();
  Scheduler(Scheduler&&) noexcept;
  Scheduler& operator=(Scheduler&&) noexcept;

  /// Most tokens one sequence may reach: max_model_len, or less where the whole pool holds less.
  [[nodiscard]] std::int32_t effective_max_len() const;

  /// Queues a request. InvalidArgument: zero tokens, or it could never fit; ResourceExhausted: the waiting queue is full.
  Result<void> add(const SequenceRequest& request);

  /// Ends a sequence wherever it is and frees its blocks at once. False when the id is unknown or already ended (no error: cancels race
  /// with completion). Never between plan() and complete().
  bool cancel(SequenceId id);

  /// Makes settings current from the next plan on. Values are clamped to the limits; a max_num_seqs below the running count drains, it
  /// never kills.
  void apply(const Settings& settings);
  [[nodiscard]] const Settings& settings() const;

  /// Decides the next step. Empty only when nothing can run.
  const StepPlan& plan(TimePoint now);

  /// Books the step that plan() returned: every row's tokens are computed, each sampling row grew by one token. outcomes holds one entry
  /// per sampling row, in row order. duration feeds the step-time model.
  void complete(std::span<const RowOutcome> outcomes, TimePoint now, Duration duration);

  /// Books a planned step that did not run (the device failed): nothing was computed; the sequences stay where they were.
  void abandon();

  [[nodiscard]] SchedulerCounts counts() const;
  [[nodiscard]] const StepTimeModel& step_time() const;
  [[nodiscard]] bool idle() const;

  /// Age of the oldest waiting request; zero when none waits.
  [[nodiscard]] Duration oldest_wait(TimePoint now) const;

  /// Recounts everything: each block owned once, tables cover what was computed, queues and states agree. CHECKs on any difference.
  void check_integrity() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

/// The largest number of consecutive steps a running decode may be left out, and the oldest unfinished prefill may go without at least
/// min_prefill_quantum tokens (or its rest), under each policy. Finite for every choice.
struct GapBounds {
  std::int32_t decode_steps = 0;
  std::int32_t prefill_steps = 0;
};
[[nodiscard]] GapBounds gap_bounds(PriorityPolicy policy);

}  // namespace rubato::policies
