// SPDX-License-Identifier: Apache-2.0
// What a Scheduler keeps between calls: the sequences, the queues they stand in, and their blocks and states, which lanes of one
// device share (kv_pool.h). Private to policies/; the steps that change it are in scheduler.cpp (lifetimes), step_planner.cpp
// (one plan) and scheduler_prefix.cpp (what the prefix cache has and gets).
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <unordered_map>
#include <vector>

#include "policies/kv_pool.h"
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
  bool cancelled = false;      // within the open plan: ends when that is closed
  bool held = false;           // has no row until another lane lets it (lane_group.h)
  bool copying = false;        // its blocks are being copied: it keeps them
  bool frozen = false;         // stands still while the last of them are
  bool condemned = false;      // gives its blocks to an older sequence of another lane when the open plan is booked
  bool starved = false;        // waits for the blocks of a condemned one, so that being left out is no gap of this lane's making
  bool reserved = false;       // has a decode slot
  std::int32_t known = 0;      // tokens: the prompt and what was sampled
  std::int32_t computed = 0;   // of known: in the KV blocks and the state
  std::int32_t sampled = 0;
  std::int32_t expected = 0;  // waiting: tokens that the prefix cache is thought to have; looked up again on admission
  TimePoint ttft_deadline;
  std::uint64_t ticket = 0;  // order of add(): the lower the older
  std::uint64_t added_step = 0;
  std::uint64_t last_decode_step = 0;
  std::uint64_t decode_step_before = 0;  // the one before the last: breaks ties between those that were last served together
  std::int32_t decode_gap = 0;           // executed steps in a row without it
  std::int32_t table = 0;                // block table, while Running
  TimePoint last_token;
  TimePoint waiting_since;
  std::uint64_t ready = 0;               // order in which it came to need a decode slot; 0: it has not
  std::optional<TimePoint> ready_since;  // while it waits for one
  TimePoint copy_not_before;             // after a copy that failed
  std::optional<StateId> state;          // its own slot, while Running on a model with recurrent layers
  std::optional<StateId> start;          // a snapshot that its next row begins from instead; pinned
  std::int32_t registered = 0;           // its first blocks, offered to the prefix cache
  std::int32_t branch = 0;               // tokens it has in common with others but had to compute, for want of a snapshot there
  std::optional<std::int32_t> cached;    // tokens that its first admission found there
  SequenceRequest request;

  /// Tokens that a plan may read as computed.
  [[nodiscard]] std::int32_t begin() const { return computed + expected; }
  [[nodiscard]] std::int32_t remaining() const { return known - begin(); }
  /// Whether it will have a decode row after the token it is about to sample.
  [[nodiscard]] bool will_decode() const { return request.max_new_tokens - sampled > 1; }
  [[nodiscard]] SequenceLengths lengths() const {
    return {.known_tokens = known, .remaining_new_tokens = request.max_new_tokens - sampled};
  }
};

/// A sequence between two lanes. It keeps its entry in the table of ids, so that moving allocates nothing.
struct CarriedSequence {
  Sequence sequence;
  std::vector<BlockHash> prefix;
  std::unordered_map<SequenceId, Slot>::node_type entry;
};

/// What a prefill takes of the lanes that decode when it is admitted.
struct AdmissionTake {
  std::int32_t left = 0;         // of what is taken; one each
  std::int32_t most_tokens = 0;  // takes one: what will decode and has at most so many tokens to compute; 0: nothing does
  enum class Kind : std::uint8_t { DecodeSlot, QueuePlace };
  Kind kind = Kind::DecodeSlot;
  /// Whether this one, admitted, takes one.
  [[nodiscard]] bool counts(const Sequence& sequence) const {
    return sequence.will_decode() && sequence.remaining() <= most_tokens;
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

/// What the prefix cache has of a sequence.
struct PrefixHit {
  std::int32_t tokens = 0;          // a multiple of kv_block_tokens, below the known ones; 0: nothing
  std::int32_t blocks_in_use = 0;   // of the blocks that hold them: in use by others anyway
  std::optional<StateId> snapshot;  // at their end, for models with recurrent layers
  std::int32_t seen_tokens = 0;     // of its first tokens: some other sequence has computed the same; not below tokens
};

struct Scheduler::State {
  State(const SchedulerLimits& limits_in, const Settings& initial, std::shared_ptr<KvPool> pool_in);
  ~State();
  State(const State&) = delete;
  State& operator=(const State&) = delete;

  // Lifetimes (scheduler.cpp).
  [[nodiscard]] Result<void> check(const SequenceRequest& request) const;
  Result<void> add(const SequenceRequest& request);
  void enter(const SequenceRequest& request, std::uint64_t ticket);
  bool cancel(SequenceId id);
  void apply(const Settings& settings_in);
  void complete(std::span<const RowOutcome> outcomes, TimePoint now, Duration duration);
  void abandon();
  void close_plan();
  void end(Slot slot);
  void count_gaps();
  void give_up_condemned(TimePoint now);
  [[nodiscard]] SchedulerCounts counts() const;
  [[nodiscard]] Duration oldest_wait(TimePoint now) const;
  void check_integrity() const;
  void check_sequence(Slot slot) const;
  /// Adds to references (one entry per block of the pool) what its sequences hold.
  void count_blocks(std::vector<std::int32_t>& references) const;
  /// The same for states and for pins on snapshots (one entry per slot).
  void count_states(std::vector<std::int32_t>& owners, std::vector<std::int32_t>& pins) const;

  // From lane to lane (sequence_queues.cpp). Neither is in a step; blocks changes hands without being copied.
  void release(Slot slot, CarriedSequence& carried, std::vector<BlockId>& blocks);
  void adopt(CarriedSequence& carried, std::vector<BlockId>& blocks);
  [[nodiscard]] Slot take_slot(const Sequence& sequence);

  // Queues and blocks (sequence_queues.cpp).
  Sequence& at(Slot slot) { return sequences[static_cast<std::size_t>(slot)]; }
  [[nodiscard]] const Sequence& at(Slot slot) const { return sequences[static_cast<std::size_t>(slot)]; }
  std::vector<BlockId>& table_of(const Sequence& sequence) { return tables[static_cast<std::size_t>(sequence.table)]; }
  [[nodiscard]] const std::vector<BlockId>& table_of(const Sequence& sequence) const {
    return tables[static_cast<std::size_t>(sequence.table)];
  }
  void enter_pending(Slot slot);
  void leave_pending(Slot slot);
  void admit(Slot slot, const PrefixHit& hit);
  void leave_running(Slot slot);
  void insert_running(Slot slot);
  /// Back to waiting; all that was computed is computed again.
  void lose_blocks(Slot slot, TimePoint now);
  /// The same for an older sequence; by: the lane whose plan takes the blocks.
  void preempt(Slot slot, State& by);
  bool secure_block(Slot slot);
  bool make_room_for(Slot slot);
  /// Whether what it has may all be waiting for another lane's step, slot or blocks.
  [[nodiscard]] bool waits_for_others() const;
  /// Blocks of its running sequences: of each the larger of what it holds and what it wants.
  [[nodiscard]] std::int32_t committed_blocks() const;

  // The prefix cache and states (scheduler_prefix.cpp).
  std::vector<BlockHash>& prefix_of(Slot slot) { return prefixes[static_cast<std::size_t>(slot)]; }
  [[nodiscard]] const std::vector<BlockHash>& prefix_of(Slot slot) const { return prefixes[static_cast<std::size_t>(slot)]; }
  [[nodiscard]] PrefixHit find_prefix(std::int32_t known, std::span<const BlockHash> prefix) const;
  [[nodiscard]] PrefixHit find_prefix(Slot slot) const { return find_prefix(at(slot).known, prefix_of(slot)); }
  [[nodiscard]] std::optional<StateId> usable_snapshot(const BlockHash& hash) const;
  void keep_prefix(Slot slot, std::span<const BlockHash> prefix);
  void take_prefix(Slot slot, const PrefixHit& hit);
  void give_states(Sequence& sequence);
  [[nodiscard]] std::optional<StateUse> use_state(Slot slot, std::int32_t count);
  [[nodiscard]] std::optional<StateUse::Save> begin_snapshot(Slot slot, std::int32_t count);
  void book_prefix(const PlannedRow& row);
  void note_filled(Slot slot, const RowOutcome& outcome);
  void drop_snapshot(const PlannedRow& row);
  /// Whether a sequence could be given a slot of its own now.
  [[nodiscard]] bool may_take_state() const { return limits.state_count == 0 || pool->states.available() > 0; }

  [[nodiscard]] PoolLoad pool_load() const { return pool->load(); }
  [[nodiscard]] std::int32_t wanted(Slot slot) const { return blocks_wanted(at(slot).lengths(), limits.growth_reserve_tokens); }
  [[nodiscard]] std::int32_t running_count() const { return static_cast<std::int32_t>(running.size()); }

  SchedulerLimits limits;
  std::int32_t longest = 0;  // effective_max_len()
  Settings settings;
  StepTimeModel step_time;
  std::vector<std::unique_ptr<Policy>> policies;  // by value of PriorityPolicy
  std::shared_ptr<KvPool> pool;

  std::vector<Sequence> sequences;
  std::vector<std::vector<BlockHash>> prefixes;  // by slot: of the full blocks of what is known; with prefix caching
  std::vector<Slot> free_slots;
  std::unordered_map<SequenceId, Slot> slot_of;
  std::vector<Slot> pending_by_ticket;    // every prefill, waiting or running, oldest first
  std::vector<Slot> pending_by_deadline;  // the same, by TTFT deadline
  std::vector<Slot> running;              // oldest first
  std::vector<std::vector<BlockId>> tables;
  std::vector<std::int32_t> free_tables;

  std::uint64_t next_ticket = 1;
  std::uint64_t preemptions = 0;
  std::uint64_t prefix_queries = 0;
  std::uint64_t prefix_hits = 0;
  std::int32_t decode_gap_steps_max = 0;
  std::int32_t prefill_gap_steps_max = 0;
  OldestPrefill oldest;
  AdmissionTake admission;  // set by the lane group before each plan
  enum class Prefills : std::uint8_t { Run, Held };
  Prefills prefills = Prefills::Run;         // Held: this step takes none
  std::vector<SequenceId> preempted_at_end;  // when the last step was booked, for an older sequence of another lane

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
