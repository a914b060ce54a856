// SPDX-License-Identifier: Apache-2.0
// The scheduling core of one lane: which rows make up its next step, how many tokens each, and which KV blocks and states they
// use. Several lanes are put together in lane_group.h. Pure and deterministic: the same calls give the same plans. The engine's
// lane and the twin run this same code, one on real time, one on virtual time. It never sees a token's value, a clock, a thread
// or a lock.
//
// What holds whatever the policy, the settings and their changes (each is a test):
// - A step takes decodes, then prefills, each in its own pass, never a list in order: their tokens together stay within
//   max_num_batched_tokens. A prompt longer than that is cut into chunks; there is no setting under which it waits for a larger
//   step.
// - A sequence starts only when its whole input, a reserve for growth (its own and that of all running ones) and a watermark
//   fit the pool, or when it is alone; it holds the blocks of its whole input from then on. Blocks that it shares with others
//   count once. A decode that finds no block takes those of the youngest running sequence, at worst its own. So the oldest
//   always goes on, and every request ends.
// - Models with recurrent layers: a sequence also holds one state slot from its start to its end or preemption, and never
//   waits for another. Snapshots of the prefix cache only have slots that no sequence wants.
// - With prefix caching a sequence starts, each time it is admitted, from the longest prefix of which all blocks and, with
//   recurrent layers, the state at its end are there. Only the rest is computed, and counts for chunks, service and budgets.
//   Full blocks are found from when they are computed until their room is needed; nobody writes them meanwhile. Without prefix
//   caching plans are as if there were no such thing.
// - Steps cut short by the budget or by a policy end at a multiple of token_tile where that leaves prefills their quantum.
// - plan() is empty only when no sequence is there at all.
// - Neither decodes nor prefills starve: see GapBounds.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "manifests/engine_spec.h"
#include "manifests/result.h"
#include "manifests/settings.h"
#include "policies/accounting.h"
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
  std::span<const BlockHash> prefix{};  // of the prompt's full blocks, in order; read by add() alone. Empty: nothing is cached
};

/// Fixed at start.
struct SchedulerLimits {
  std::int32_t max_model_len = 0;  // tokens
  std::int32_t max_num_seqs = 0;   // capacity; the live knob stays at or below it
  std::int32_t max_waiting = 0;    // sequences that may wait
  std::int32_t block_count = 0;    // KV blocks of kv_block_tokens each
  std::int32_t state_count = 0;    // slots of recurrent state; 0: the model has no recurrent layer
  bool blocks_hold_keys = true;    // false: no attention layer either, so that blocks only count tokens and a prefix hit needs
                                   // nothing but a snapshot
  PrefixCachingSpec prefix_caching{.enabled = false};
  std::int32_t token_tile =
      16;  // tokens the backend computes at once; a step's sum is cut to a multiple where nothing is lost by it
  std::int32_t growth_reserve_tokens = default_growth_reserve_tokens;  // see accounting.h; 0 admits most and preempts most
};

/// One sequence's share of a step: tokens [begin, begin + count) of its known tokens go through the model.
struct PlannedRow {
  SequenceId id;
  SequenceIndex index;     // below max_num_seqs + max_waiting, stable from add() to the end of the sequence
  std::int32_t begin = 0;  // absolute position of the first token
  std::int32_t count = 0;  // >= 1
  bool samples = false;    // the row reaches the last known token: the step yields its next token
  bool decode = false;     // the next token of a running stream; recomputing after a preemption is a chunk like any other
  std::span<const BlockId> blocks;  // the sequence's block table, covering begin + count tokens
  std::optional<StateUse> state;    // models with recurrent layers
  std::int32_t cached_tokens = 0;   // of its first admission, the same in every row: tokens that came from the prefix cache
};

/// A step. Valid until the next call of plan() or complete(). An empty one is not a step: it is neither completed nor
/// abandoned.
struct StepPlan {
  std::uint64_t step_number = 0;      // 1-based; an empty plan has the number of the step before
  std::uint64_t settings_number = 0;  // the settings it was planned under
  std::vector<PlannedRow> rows;       // decode rows first
  std::vector<SequenceId> preempted;  // lost their blocks in this plan; recomputed later, no token is lost
  StepFeatures features;
  [[nodiscard]] bool empty() const { return rows.empty(); }
};

/// What became of a row that samples: did this token end the sequence? For one that was cancelled meanwhile it does not matter.
struct RowOutcome {
  SequenceId id;
  bool finished = false;
  std::optional<BlockHash> filled{};  // the sampled token is the last of a block: that block's. None: the block is not cached
};

/// Numbers for metrics and status; all are current, none resets.
struct SchedulerCounts {
  std::int32_t waiting = 0;     // not yet admitted, preempted ones included
  std::int32_t running = 0;     // hold blocks: half-prefilled or decoding
  std::int32_t prefilling = 0;  // of running: still have prompt tokens to compute
  std::int32_t free_blocks = 0;
  std::int32_t block_count = 0;
  std::int32_t states_running = 0;   // slots of running sequences
  std::int32_t states_snapshot = 0;  // slots that hold snapshots
  std::int32_t state_count = 0;
  std::int32_t cached_blocks = 0;    // blocks that a prefix may hit, in use or not
  std::uint64_t prefix_queries = 0;  // tokens of admitted sequences that were looked up in the prefix cache
  std::uint64_t prefix_hits = 0;     // of those: found
  std::uint64_t evicted_blocks = 0;  // cached blocks whose room was needed
  std::uint64_t evicted_snapshots = 0;
  std::uint64_t preemptions = 0;
  std::int32_t decode_gap_steps_max = 0;   // largest number of consecutive steps a decoding sequence was left out, ever
  std::int32_t prefill_gap_steps_max = 0;  // the same for the oldest unfinished prefill, while it could run
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

  /// Queues a request. InvalidArgument: zero tokens, or it could never fit; ResourceExhausted: the waiting queue is full. An id
  /// in use is our bug. Allowed at any time.
  Result<void> add(const SequenceRequest& request);

  /// Ends a sequence wherever it is and frees its blocks at once; one with a row in the open plan, when that plan is closed.
  /// False when the id is unknown or already ended (no error: cancels race with completion).
  bool cancel(SequenceId id);

  /// Makes settings current from the next plan on. Values are clamped to the limits; settings() shows the clamped ones. A
  /// max_num_seqs below the running count drains: all running ones go on, none is admitted until there are fewer.
  void apply(const Settings& settings);
  [[nodiscard]] const Settings& settings() const;

  /// Decides the next step. Empty only when nothing can run.
  const StepPlan& plan(TimePoint now);

  /// Books the step that plan() returned: every row's tokens are computed, each sampling row grew by one token. outcomes holds
  /// one entry per sampling row, in row order; the last of max_new_tokens must end its sequence. duration feeds the step-time
  /// model; zero leaves the model as it is.
  void complete(std::span<const RowOutcome> outcomes, TimePoint now, Duration duration);

  /// Books a planned step that did not run (the device failed): nothing was computed; the sequences stay where they were.
  void abandon();

  [[nodiscard]] SchedulerCounts counts() const;
  [[nodiscard]] const StepTimeModel& step_time() const;
  /// From now on it plans by a copy of this model, and learns on from there. Allowed at any time; an open step is booked into it.
  void adopt_step_time(const StepTimeModel& model);
  [[nodiscard]] bool idle() const;

  /// Age of the oldest waiting request; zero when none waits.
  [[nodiscard]] Duration oldest_wait(TimePoint now) const;

  /// Recounts everything: each block owned once, tables cover what was computed, queues and states agree. CHECKs on any
  /// difference.
  void check_integrity() const;

 private:
  friend class StepPlanner;
  friend class LaneGroup;
  friend struct KvPool;
  struct State;
  std::unique_ptr<State> state_;
};

/// Promises of a policy, in consecutive executed steps.
/// - decode_steps: a running sequence with one token to compute is left out of at most so many steps in a row. (One that lost its
/// blocks
///   is named in StepPlan::preempted and is a prefill until it samples again.)
/// - prefill_steps: the oldest unfinished prefill (by add(); preempted ones included) gets less than min_prefill_quantum tokens,
/// or its
///   rest if that is less, in at most so many steps in a row in which it could run: it was admitted, or could have been. After as
///   many steps in which it could not, nobody is admitted before it, so a stream of small requests cannot hold a large one out.
/// A gap that grew under another policy beyond the bound of the present one does not grow further.
/// Both hold as they stand while max_num_batched_tokens >= running decodes + min_prefill_quantum, which every edge checks for
/// max_num_seqs. Below that (a core without such an edge, or while lowered settings drain) the quantum is
/// min(min_prefill_quantum, max(1, budget / 2)) and decodes take turns: decode_steps grows by 2 * ceil(decodes / budget).
/// How long a prefill waits under overload, at most: whoever a policy puts behind becomes the oldest in the end, and is then
/// served in every (prefill_steps + 1)th step. There it gets an eighth of max_num_batched_tokens, or a quarter of what the step
/// has time for where a policy bounds its end and that is less; never less than the quantum. So, with n older prefills unfinished
/// and W tokens left of them and its own, its first token comes before the lane has taken (prefill_steps + 1) * (n + 1 + W / that
/// share) steps in which it could run: under Deadline while the lane computes at most about 36 W tokens of prefill in all. At a
/// load above 1 the queue itself grows without end, and W with it; relative to W the wait does not.
struct GapBounds {
  std::int32_t decode_steps = 0;
  std::int32_t prefill_steps = 0;
};
[[nodiscard]] GapBounds gap_bounds(PriorityPolicy policy);

}  // namespace rubato::policies
