// SPDX-License-Identifier: Apache-2.0
// What a Scheduler keeps between calls: the sequences, the queues they stand in, and their blocks. Private to policies/; the
// steps that change it are in scheduler.cpp (lifetimes) and step_planner.cpp (one plan).
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <unordered_map>
#include <vector>

#include "policies/block_pool.h"
#include "policies/policy.h"
#include "policies/ranked_queue.h"
#include "policies/scheduler.h"

namespace rubato::policies {

/// Position in State::sequences; what SequenceIndex shows to the outside.
using Slot = std::int32_t;

struct alignas(64) Sequence {
  enum class Place : std::uint8_t { Free, Waiting, Running };

  // What a plan reads of every candidate comes first: with thousands waiting, one cache line each is most of its cost.
  Place place = Place::Free;
  bool pending = false;        // tokens to compute before it samples: it is a prefill. Otherwise it is a running decode
  bool in_step = false;        // has a row in the open plan
  bool preempted_now = false;  // by the open plan
  std::int32_t known = 0;      // tokens: the prompt and what was sampled
  std::int32_t computed = 0;   // of known: in the KV blocks
  std::int32_t sampled = 0;
  TimePoint ttft_deadline;
  std::uint64_t ticket = 0;  // order of add(): the lower the older
  std::uint64_t added_step = 0;
  std::uint64_t last_decode_step = 0;
  std::uint64_t decode_step_before = 0;  // the one before the last: breaks ties between those that were last served together
  std::int32_t decode_gap = 0;           // executed steps in a row without it
  std::int32_t table = 0;                // block table, while Running
  TimePoint last_token;
  TimePoint waiting_since;
  SequenceRequest request;

  [[nodiscard]] std::int32_t remaining() const { return known - computed; }
  [[nodiscard]] SequenceLengths lengths() const {
    return {.known_tokens = known, .remaining_new_tokens = request.max_new_tokens - sampled};
  }
};

/// The prefill that the prefill gap is counted for.
struct OldestPrefill {
  std::optional<std::uint64_t> ticket;
  std::int32_t gap = 0;      // steps in a row with less than the quantum in which it could run
  std::int32_t wait = 0;     // the same, also those in which it could not
  std::int32_t quantum = 0;  // what counts as service in the open plan
  bool could_run = false;    // in the open plan
  bool served = false;       // in the open plan
};

struct Scheduler::State {
  State(const SchedulerLimits& limits_in, const Settings& initial);

  // Lifetimes (scheduler.cpp).
  Result<void> add(const SequenceRequest& request);
  bool cancel(SequenceId id);
  void apply(const Settings& settings_in);
  void complete(std::span<const RowOutcome> outcomes, TimePoint now, Duration duration);
  void close_plan();
  void end(Slot slot);
  void count_gaps();
  [[nodiscard]] SchedulerCounts counts() const;
  void check_integrity() const;
  void check_sequence(Slot slot) const;

  // Queues and blocks (sequence_queues.cpp).
  Sequence& at(Slot slot) { return sequences[static_cast<std::size_t>(slot)]; }
  [[nodiscard]] const Sequence& at(Slot slot) const { return sequences[static_cast<std::size_t>(slot)]; }
  std::vector<BlockId>& table_of(const Sequence& sequence) { return tables[static_cast<std::size_t>(sequence.table)]; }
  [[nodiscard]] const std::vector<BlockId>& table_of(const Sequence& sequence) const {
    return tables[static_cast<std::size_t>(sequence.table)];
  }
  void enter_pending(Slot slot);
  void leave_pending(Slot slot);
  void admit(Slot slot);
  void leave_running(Slot slot);
  void preempt(Slot slot);
  bool secure_block(Slot slot);
  [[nodiscard]] PoolLoad pool_load() const;
  [[nodiscard]] std::int32_t wanted(Slot slot) const { return blocks_wanted(at(slot).lengths(), limits.growth_reserve_tokens); }
  [[nodiscard]] std::int32_t running_count() const { return static_cast<std::int32_t>(running.size()); }

  SchedulerLimits limits;
  std::int32_t longest = 0;  // effective_max_len()
  Settings settings;
  StepTimeModel step_time;
  std::vector<std::unique_ptr<Policy>> policies;  // by value of PriorityPolicy
  BlockPool pool;

  std::vector<Sequence> sequences;
  std::vector<Slot> free_slots;
  std::unordered_map<SequenceId, Slot> slot_of;
  std::vector<Slot> pending_by_ticket;    // every prefill, waiting or running, oldest first
  std::vector<Slot> pending_by_deadline;  // the same, by TTFT deadline
  std::vector<Slot> running;              // oldest first
  std::vector<std::vector<BlockId>> tables;
  std::vector<std::int32_t> free_tables;

  std::uint64_t next_ticket = 1;
  std::uint64_t preemptions = 0;
  std::int32_t decode_gap_steps_max = 0;
  std::int32_t prefill_gap_steps_max = 0;
  OldestPrefill oldest;

  // The open plan and its scratch; reserved once.
  struct Pick {
    Slot slot = 0;
    std::int32_t count = 0;
  };
  StepPlan plan;
  bool open = false;
  TimePoint planned_at;
  std::vector<Slot> decodes;  // every running decode when the plan began
  std::vector<DecodeView> decode_views;
  std::vector<Slot> candidates;  // prefills that could run, as the policy was shown them
  std::vector<PrefillView> prefill_views;
  std::vector<double> ranks;
  RankedQueue running_prefills;
  RankedQueue waiting_prefills;
  std::vector<Slot> decode_order;  // scratch of one pass over decodes
  std::vector<Slot> decode_picks;
  std::vector<Pick> prefill_picks;
};

}  // namespace rubato::policies
