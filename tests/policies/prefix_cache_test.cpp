// SPDX-License-Identifier: Apache-2.0
// What a scheduler finds in its prefix cache, when it keeps what, and who holds which slot of recurrent state, rule by rule.
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <optional>
#include <vector>

#include "policies/lane_group.h"
#include "policies/scheduler.h"
#include "tests/policies/scheduler_harness.h"

namespace rubato::policies {
namespace {

constexpr std::int32_t block = kv_block_tokens;

struct Shape {
  std::int32_t block_count = 64;
  std::int32_t state_count = 0;
  bool attention = true;
  std::int32_t snapshot_tokens = 1024;
  std::int32_t max_num_seqs = 8;
  std::int32_t budget = 512;
};

WorldOptions options(const Shape& shape) {
  return {.limits = {.max_model_len = 1024,
                     .max_num_seqs = shape.max_num_seqs,
                     .max_waiting = 64,
                     .block_count = shape.block_count,
                     .state_count = shape.state_count,
                     .blocks_hold_keys = shape.attention,
                     .prefix_caching = {.enabled = true, .snapshot_tokens = shape.snapshot_tokens},
                     .token_tile = 1,
                     .growth_reserve_tokens = 0},
          .knobs = {.max_num_batched_tokens = shape.budget,
                    .max_num_seqs = shape.max_num_seqs,
                    .priority_policy = PriorityPolicy::DecodeFirst},
          .replay = ""};
}

struct PrefixCache : testing::Test {
  void start(const Shape& shape) {
    world.emplace(options(shape));
    world->on_plan = [this](const StepPlan& plan) { rows = plan.rows; };
  }
  /// A request of the first family whose whole prompt is the family's.
  SequenceId add(std::int32_t prompt, std::int32_t output = 1, std::int32_t shared = 1024, std::uint64_t family = 0) {
    return world->add(
        {.prompt_tokens = prompt, .max_new_tokens = output, .shared_tokens = std::min(shared, prompt), .family = family});
  }
  /// Runs one request alone to its end; the tokens that its first row found computed.
  std::int32_t hit_of(std::int32_t prompt, std::int32_t shared = 1024, std::uint64_t family = 0) {
    const SequenceId id = add(prompt, 1, shared, family);
    world->drain(1000);
    return world->stream(id).cached_tokens;
  }
  [[nodiscard]] SchedulerCounts counts() { return world->scheduler().counts(); }
  const PlannedRow& row_of(SequenceId id) {
    const auto found = std::find_if(rows.begin(), rows.end(), [id](const PlannedRow& row) { return row.id == id; });
    EXPECT_NE(found, rows.end()) << "sequence " << id.value << " has no row";
    return *found;
  }

  std::optional<World> world;
  std::vector<PlannedRow> rows;  // of the last plan
};

TEST_F(PrefixCache, the_longest_run_of_cached_blocks_is_found_and_the_last_token_is_always_computed) {
  start({});
  EXPECT_EQ(hit_of(4 * block), 0);
  EXPECT_EQ(hit_of(4 * block), 3 * block) << "a hit on all would leave nothing to sample from";
  EXPECT_EQ(hit_of(4 * block + 1), 4 * block);
  EXPECT_EQ(hit_of(6 * block, 2 * block + 5), 2 * block) << "the third block is its own";
  EXPECT_EQ(hit_of(block), 0);
  EXPECT_EQ(hit_of(6 * block, 6 * block, 1), 0) << "another family";
  EXPECT_EQ(counts().prefix_hits, static_cast<std::uint64_t>(9 * block));
  EXPECT_EQ(counts().prefix_queries, static_cast<std::uint64_t>(25 * block + 1));
}

TEST_F(PrefixCache, a_block_is_found_when_it_has_been_computed_and_not_before) {
  start({.budget = 3 * block});
  const SequenceId first = add(5 * block);
  ASSERT_TRUE(world->step());
  EXPECT_EQ(row_of(first).count, 3 * block);
  const SequenceId second = add(5 * block);  // three of the five have been computed
  world->cancel(first);
  world->drain(100);
  EXPECT_EQ(world->stream(second).cached_tokens, 3 * block);
}

TEST_F(PrefixCache, those_who_start_in_one_step_do_not_find_each_other) {
  start({});
  const SequenceId first = add(4 * block, 2);
  const SequenceId second = add(4 * block, 2);
  ASSERT_TRUE(world->step());
  EXPECT_EQ(row_of(first).begin + row_of(second).begin, 0);
  world->scheduler().check_integrity();
  EXPECT_EQ(counts().cached_blocks, 4) << "of two with the same tokens one is kept";
  world->drain(100);
}

TEST_F(PrefixCache, an_abandoned_step_makes_nothing_findable) {
  start({.state_count = 4});
  Scheduler& scheduler = world->scheduler();
  const SequenceId id = add(4 * block, 2);
  ASSERT_EQ(scheduler.plan(world->now()).rows.size(), 1u);
  scheduler.abandon();
  scheduler.check_integrity();
  EXPECT_EQ(counts().cached_blocks, 0);
  EXPECT_EQ(counts().states_snapshot, 0);
  EXPECT_EQ(counts().states_running, 1) << "it is still there";
  world->drain(100);
  EXPECT_EQ(world->stream(id).cached_tokens, 0);
}

TEST_F(PrefixCache, what_an_output_filled_is_found_by_who_follows) {
  start({});
  const SequenceId first = add(block + 3, 2 * block);
  world->drain(100);
  // 3 * block + 3 known, the last of them not computed.
  const SequenceId second = world->add({.prompt_tokens = 4 * block, .max_new_tokens = 1, .follows = first});
  world->drain(100);
  EXPECT_EQ(world->stream(second).cached_tokens, 3 * block);
}

TEST_F(PrefixCache, blocks_in_use_by_others_are_shared_and_count_once) {
  start({.block_count = 20, .budget = 256});
  const SequenceId first = add(12 * block, 20);
  ASSERT_TRUE(world->step());
  const SequenceId second = add(12 * block + 2, 20);
  ASSERT_TRUE(world->step());
  // Thirteen and thirteen, less the twelve that both have.
  EXPECT_EQ(row_of(second).begin, 12 * block);
  EXPECT_TRUE(std::equal(row_of(second).blocks.begin(), row_of(second).blocks.begin() + 12, row_of(first).blocks.begin()));
  EXPECT_EQ(counts().free_blocks, 20 - 14);
  world->scheduler().check_integrity();
  const SequenceId third = add(12 * block + 2, 20);
  ASSERT_TRUE(world->step());
  EXPECT_EQ(row_of(third).begin, 12 * block) << "fits because only one block is new";
  world->cancel(first);
  ASSERT_TRUE(world->step()) << "what it shared stays with the others";
  world->drain(100);
}

TEST_F(PrefixCache, cached_blocks_give_way_to_new_ones_tails_before_heads) {
  start({.block_count = 8, .max_num_seqs = 1});
  EXPECT_EQ(hit_of(6 * block), 0);
  EXPECT_EQ(hit_of(5 * block, 5 * block, 1), 0) << "takes the two that were never used and three of the others";
  EXPECT_EQ(counts().evicted_blocks, 3u);
  EXPECT_EQ(hit_of(4 * block), 3 * block) << "the first three of the first one";
}

TEST_F(PrefixCache, a_preempted_sequence_finds_what_it_had_and_its_output_too) {
  start({.block_count = 10, .max_num_seqs = 2});
  const SequenceId older = add(2 * block, 4 * block, 0);
  const SequenceId younger = add(2 * block, 4 * block, 0);
  bool found_output = false;
  world->on_plan = [&](const StepPlan& plan) {
    for (const PlannedRow& row : plan.rows) {
      found_output = found_output || (row.id == younger && !row.decode && row.begin >= 3 * block);
      EXPECT_EQ(row.cached_tokens, 0) << "of the first admission";
    }
  };
  world->drain(1000);
  EXPECT_GE(world->stream(younger).preemptions, 1);
  EXPECT_EQ(world->stream(older).preemptions, 0);
  EXPECT_TRUE(found_output);
}

TEST_F(PrefixCache, a_hit_counts_as_computed_for_the_oldest_prefills_service_and_for_the_budget) {
  start({.budget = 64});
  EXPECT_EQ(hit_of(20 * block), 0);
  const SequenceId hit = add(20 * block + 8, 4);
  const SequenceId other = add(40, 4, 0);
  ASSERT_TRUE(world->step());
  EXPECT_EQ(row_of(hit).begin, 20 * block);
  EXPECT_EQ(row_of(hit).count, 8);
  EXPECT_TRUE(row_of(hit).samples);
  EXPECT_EQ(row_of(other).count, 40) << "the rest of the budget";
  world->drain(100);
}

TEST_F(PrefixCache, every_running_sequence_has_a_slot_and_no_more_run_than_there_are) {
  start({.state_count = 2});
  for (int i = 0; i < 3; ++i) add(20, 4, 0);
  ASSERT_TRUE(world->step());
  EXPECT_EQ(rows.size(), 2u);
  EXPECT_EQ(counts().running, 2);
  EXPECT_EQ(counts().states_running, 2);
  for (const PlannedRow& row : rows) EXPECT_FALSE(row.state->from) << "from zeros";
  ASSERT_TRUE(world->step());
  for (const PlannedRow& row : rows) EXPECT_EQ(row.state->from, row.state->to) << "from its own";
  world->drain(100);
  EXPECT_EQ(counts().states_running, 0);
}

TEST_F(PrefixCache, a_snapshot_is_kept_at_the_last_full_block_of_a_prompt_and_a_hit_begins_from_it) {
  start({.state_count = 4});
  const SequenceId first = add(3 * block + 5, 2);
  ASSERT_TRUE(world->step());
  ASSERT_TRUE(row_of(first).state->save);
  EXPECT_EQ(row_of(first).state->save->tokens, 3 * block);
  const StateId snapshot = row_of(first).state->save->to;
  world->drain(100);
  EXPECT_EQ(counts().states_snapshot, 1);
  const SequenceId second = add(3 * block + 9, 2);
  ASSERT_TRUE(world->step());
  EXPECT_EQ(row_of(second).begin, 3 * block);
  EXPECT_EQ(row_of(second).state->from, snapshot);
  EXPECT_NE(row_of(second).state->to, snapshot);
  EXPECT_FALSE(row_of(second).state->save) << "there is one at that point already";
  ASSERT_TRUE(world->step());
  EXPECT_EQ(row_of(second).state->from, row_of(second).state->to);
  world->drain(100);
}

TEST_F(PrefixCache, a_prompt_of_whole_blocks_keeps_its_snapshot_one_block_before_its_end) {
  start({.state_count = 4});
  const SequenceId id = add(3 * block);
  ASSERT_TRUE(world->step());
  ASSERT_TRUE(row_of(id).state->save);
  EXPECT_EQ(row_of(id).state->save->tokens, 2 * block) << "at its end nobody could begin: the last token is always computed";
  world->drain(100);
}

TEST_F(PrefixCache, snapshots_are_kept_at_regular_distances_by_chunks_and_by_decodes) {
  start({.state_count = 6, .snapshot_tokens = 2 * block, .budget = 3 * block + 4});
  const SequenceId id = add(4 * block + 4, 2 * block);
  std::vector<std::int32_t> kept;
  world->on_plan = [&](const StepPlan& plan) {
    for (const PlannedRow& row : plan.rows) {
      if (row.state->save) kept.push_back(row.begin + row.state->save->tokens);
    }
  };
  world->drain(100);
  EXPECT_EQ(world->stream(id).sampled, 2 * block);
  EXPECT_EQ(kept, (std::vector<std::int32_t>{2 * block, 4 * block, 6 * block})) << "the last one by a decode row";
}

TEST_F(PrefixCache, without_a_snapshot_at_a_block_a_recurrent_model_cannot_begin_there) {
  start({.state_count = 4});
  EXPECT_EQ(hit_of(6 * block + 1), 0);
  EXPECT_EQ(hit_of(5 * block, 5 * block), 0) << "five blocks are cached, the only snapshot is at six";
  EXPECT_EQ(hit_of(9 * block, 7 * block), 6 * block);
}

TEST_F(PrefixCache, a_snapshot_is_kept_where_a_sequence_leaves_what_others_have_computed) {
  for (const bool attention : {true, false}) {
    start({.state_count = 6, .attention = attention});
    EXPECT_EQ(hit_of(9 * block, 5 * block + 3), 0);
    EXPECT_EQ(hit_of(9 * block, 5 * block + 3), 0) << "no snapshot where they part";
    EXPECT_EQ(hit_of(9 * block, 5 * block + 3), 5 * block) << "the second one kept it";
  }
}

TEST_F(PrefixCache, a_model_without_keys_needs_the_snapshot_alone) {
  start({.block_count = 8, .state_count = 4, .attention = false, .max_num_seqs = 2});
  EXPECT_EQ(hit_of(6 * block + 1), 0);
  EXPECT_EQ(hit_of(7 * block, 7 * block, 1), 0) << "all blocks have been taken since";
  EXPECT_EQ(hit_of(6 * block + 4), 6 * block);
  EXPECT_EQ(counts().free_blocks, 8);
}

TEST_F(PrefixCache, running_sequences_take_the_slots_of_snapshots_longest_unused_first) {
  start({.state_count = 3});
  EXPECT_EQ(hit_of(2 * block + 1, 1024, 1), 0);
  EXPECT_EQ(hit_of(2 * block + 1, 1024, 2), 0);
  EXPECT_EQ(counts().states_snapshot, 2);
  EXPECT_EQ(hit_of(2 * block + 1, 1024, 1), 2 * block) << "and is the latest now";
  add(5, 4, 0);
  add(5, 4, 0);
  ASSERT_TRUE(world->step());
  EXPECT_EQ(counts().states_running, 2);
  EXPECT_EQ(counts().states_snapshot, 1);
  world->drain(100);
  EXPECT_EQ(hit_of(2 * block + 1, 1024, 1), 2 * block);
  EXPECT_EQ(hit_of(2 * block + 1, 1024, 2), 0);
}

TEST_F(PrefixCache, where_the_only_slot_is_the_snapshots_own_the_hit_is_forgotten) {
  start({.state_count = 1, .max_num_seqs = 1});
  EXPECT_EQ(hit_of(2 * block + 1), 0);
  EXPECT_EQ(counts().states_snapshot, 0) << "the one slot works";
  start({.state_count = 2, .max_num_seqs = 2});
  EXPECT_EQ(hit_of(2 * block + 1), 0);
  EXPECT_EQ(counts().states_snapshot, 1);
  add(5, 8, 0);
  const SequenceId second = add(2 * block + 3, 2);
  ASSERT_TRUE(world->step());
  EXPECT_EQ(row_of(second).begin, 0);
  EXPECT_EQ(counts().states_snapshot, 0);
  world->drain(100);
}

TEST_F(PrefixCache, a_snapshot_that_a_planned_row_begins_from_is_not_given_away_by_that_plan) {
  start({.state_count = 3, .max_num_seqs = 3});
  EXPECT_EQ(hit_of(2 * block + 1), 0);
  const SequenceId hit = add(2 * block + 3, 3);
  const SequenceId other = add(2 * block + 3, 3, 0, 7);
  ASSERT_TRUE(world->step());  // one slot each, and the snapshot
  EXPECT_EQ(row_of(hit).begin, 2 * block);
  EXPECT_FALSE(row_of(other).state->save) << "no slot is left that nobody needs";
  EXPECT_EQ(counts().states_snapshot, 1);
  const SequenceId third = add(5, 2, 0);
  ASSERT_TRUE(world->step());
  EXPECT_EQ(row_of(third).count, 5) << "the hit has begun: the snapshot may go";
  EXPECT_EQ(counts().states_snapshot, 0);
  world->drain(100);
}

TEST_F(PrefixCache, of_a_request_without_hashes_nothing_is_cached) {
  start({.state_count = 4});
  Scheduler& scheduler = world->scheduler();
  ASSERT_TRUE(world->try_add(SequenceId{99}, {.prompt_tokens = 40, .max_new_tokens = 1}));
  const StepPlan& plan = scheduler.plan(world->now());
  ASSERT_EQ(plan.rows.size(), 1u);
  EXPECT_FALSE(plan.rows[0].state->save);
  const RowOutcome outcome{.id = SequenceId{99}, .finished = true};
  scheduler.complete({&outcome, 1}, world->now(), std::chrono::milliseconds(1));
  EXPECT_EQ(counts().cached_blocks + counts().states_snapshot, 0);
  scheduler.check_integrity();
}

/// Step by step, with hashes that the test chooses.
struct ByHand {
  /// One step under these knobs. filled: of a sequence whose token ends a block, that block's hash.
  StepPlan step(PriorityPolicy policy, std::int32_t budget,
                const std::function<std::optional<BlockHash>(const PlannedRow&)>& filled = {}) {
    scheduler.apply(
        {.number = ++settings_number, .knobs = {.max_num_batched_tokens = budget, .max_num_seqs = 8, .priority_policy = policy}});
    const StepPlan plan = scheduler.plan(now);
    std::vector<RowOutcome> outcomes;
    for (const PlannedRow& row : plan.rows) {
      if (row.samples) outcomes.push_back({.id = row.id, .filled = filled ? filled(row) : std::nullopt});
    }
    now += std::chrono::milliseconds(1);
    scheduler.complete(outcomes, now, std::chrono::milliseconds(1));
    scheduler.check_integrity();
    return plan;
  }
  void add(std::uint64_t id, std::int32_t prompt, std::span<const BlockHash> prefix = {}) {
    ASSERT_TRUE(scheduler.add({.id = SequenceId{id},
                               .arrival = now,
                               .prompt_tokens = prompt,
                               .max_new_tokens = 64,
                               .ttft_target = std::chrono::seconds(1),
                               .itl_target = std::chrono::seconds(1),
                               .prefix = prefix}));
  }

  Scheduler scheduler;
  TimePoint now{};
  std::uint64_t settings_number = 1;
};

// The youngest shares all of its blocks with one that is older but began later, in a step without decodes.
TEST(PrefixCachePreemption, goes_on_to_the_next_youngest_where_the_first_frees_no_block) {
  SchedulerLimits limits = options({.block_count = 8}).limits;
  ByHand lane{.scheduler = Scheduler(limits, {.number = 1, .knobs = {.max_num_batched_tokens = 64, .max_num_seqs = 8}})};
  const std::vector<BlockHash> text{{.high = 1, .low = 1}, {.high = 2, .low = 2}, {.high = 3, .low = 3}};
  constexpr SequenceId sharer{4};
  constexpr SequenceId youngest{5};
  for (const std::uint64_t old : {1, 2, 3}) lane.add(old, block - 3);
  lane.step(PriorityPolicy::DecodeFirst, 64);
  lane.add(sharer.value, 3 * block, text);
  lane.add(youngest.value, 2 * block - 1, std::span(text).first(1));
  const auto ends_second_block = [&](const PlannedRow& row) {
    return row.id == youngest ? std::optional(text[1]) : std::nullopt;
  };
  ASSERT_EQ(lane.step(PriorityPolicy::ShortestFirst, 3 + 2 * block - 1, ends_second_block).rows.size(), 4u);
  ASSERT_EQ(lane.step(PriorityPolicy::DecodeFirst, 4).rows.size(), 4u) << "the youngest's second block is full now";
  const StepPlan prefill = lane.step(PriorityPolicy::PrefillFirst, block);
  ASSERT_EQ(prefill.rows.size(), 1u);
  ASSERT_EQ(prefill.rows[0].id, sharer);
  ASSERT_EQ(prefill.rows[0].begin, 2 * block) << "has both blocks of the youngest";
  ASSERT_EQ(lane.step(PriorityPolicy::DecodeFirst, 3).rows.size(), 3u) << "the three that were served longest ago";
  ASSERT_EQ(lane.scheduler.counts().free_blocks, 2);
  // All of the oldest need a block; there are two.
  const StepPlan plan = lane.step(PriorityPolicy::DecodeFirst, 8);
  EXPECT_EQ(plan.preempted, (std::vector<SequenceId>{youngest, sharer}));
  for (std::size_t i = 0; i < 3; ++i) EXPECT_EQ(plan.rows.at(i).id, SequenceId{i + 1});
}

TEST(PrefixCacheFreed, cached_blocks_and_snapshots_are_dead_when_they_are_taken_and_not_before) {
  LaneGroup group({.each = options({.block_count = 4, .state_count = 2}).limits},
                  {.number = 1, .knobs = {.max_num_batched_tokens = 64, .max_num_seqs = 1}});
  group.watch_freed();
  const LaneIndex lane{0};
  const auto run = [&](std::uint64_t id, std::int32_t prompt, std::span<const BlockHash> prefix) {
    ASSERT_TRUE(group.add({.id = SequenceId{id}, .arrival = {}, .prompt_tokens = prompt, .max_new_tokens = 1, .prefix = prefix}));
    ASSERT_EQ(group.plan(lane, {}).rows.size(), 1u);
    const RowOutcome outcome{.id = SequenceId{id}, .finished = true};
    group.complete(lane, {&outcome, 1}, {}, std::chrono::milliseconds(1));
  };
  const std::vector<BlockHash> text{{.high = 1, .low = 1}, {.high = 2, .low = 2}};
  run(1, 2 * block + 1, text);
  EXPECT_EQ(group.totals().cached_blocks, 2);
  EXPECT_EQ(group.totals().states_snapshot, 1);
  EXPECT_EQ(group.take_freed(0).size(), 1u) << "the block that is not full";
  EXPECT_EQ(group.take_freed_states(0).size(), 1u) << "the sequence's own";
  // Takes all four blocks: the two that are cached die once on the way, and all four, uncached, at the end.
  run(2, 4 * block - 1, {});
  EXPECT_EQ(group.totals().evicted_blocks, 2u);
  EXPECT_EQ(group.take_freed(0).size(), 2u + 4u);
}

}  // namespace
}  // namespace rubato::policies
