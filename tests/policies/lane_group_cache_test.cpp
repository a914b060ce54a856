// SPDX-License-Identifier: Apache-2.0
// States and the prefix cache over several lanes: what moves, what is copied and when, and which device a request goes to.
#include <gtest/gtest.h>

#include "policies/lane_group.h"
#include "tests/policies/lane_group_harness.h"

namespace rubato::policies {
namespace {

constexpr std::int32_t block = kv_block_tokens;

KnobValues knobs_of(Mode mode, std::int32_t budget = 512) {
  return {.max_num_batched_tokens = budget,
          .max_num_seqs = 8,
          .priority_policy = PriorityPolicy::DecodeFirst,
          .mode = mode,
          .reservation = Reservation::LastChunk,
          .prefill_devices = 1};
}

NodeOptions node_of(std::int32_t devices, Mode mode, std::int32_t state_count, bool attention = true) {
  NodeOptions options;
  options.limits.each.token_tile = 1;
  options.limits.each.block_count = 256;
  options.limits.each.state_count = state_count;
  options.limits.each.blocks_hold_keys = attention;
  options.limits.each.prefix_caching = {.enabled = true, .snapshot_tokens = 64 * block};
  options.limits.devices = devices;
  options.limits.lanes_per_device = devices == 1 ? 2 : 1;
  options.limits.handoff_lease = std::chrono::milliseconds(100);
  options.knobs = knobs_of(mode);
  return options;
}

SchedulerCounts counts(Node& node, std::int32_t lane) {
  return node.group().counts(LaneIndex{lane}).scheduler;
}

RequestOptions request(std::int32_t prompt, std::int32_t output, std::uint64_t family) {
  return {.prompt_tokens = prompt, .max_new_tokens = output, .shared_tokens = prompt, .family = family};
}

void finish(Node& node) {
  for (int i = 0; i < 5000 && !node.group().idle(); ++i) {
    node.run_all();
    node.copy_all();
    node.group().check_integrity();
  }
  node.check_empty();
}

TEST(LaneGroupCache, between_lanes_of_one_pool_the_slot_goes_along) {
  Node node(node_of(1, Mode::Disaggregated, 4));
  const SequenceId id = node.add(request(40, 4, 0));
  ASSERT_TRUE(node.plan(1));
  const StateId slot = node.step(1).rows[0].state->to;
  node.complete(1);
  ASSERT_TRUE(node.plan(0));
  ASSERT_EQ(node.step(0).rows[0].id, id);
  EXPECT_EQ(node.step(0).rows[0].state->from, slot);
  EXPECT_EQ(node.step(0).rows[0].state->to, slot);
  node.complete(0);
  EXPECT_EQ(node.group().totals().states_running, 1);
  EXPECT_FALSE(node.take_copy());
  finish(node);
}

TEST(LaneGroupCache, lanes_of_one_pool_find_what_the_other_computed) {
  Node node(node_of(1, Mode::Disaggregated, 0));
  node.add(request(3 * block, 2 * block, 0));
  finish(node);
  node.set(knobs_of(Mode::Chunked));
  const SequenceId id = node.add({.prompt_tokens = 5 * block, .max_new_tokens = 1, .follows = SequenceId{1}});
  ASSERT_TRUE(node.plan(0));
  EXPECT_EQ(node.step(0).rows[0].id, id);
  EXPECT_EQ(node.step(0).rows[0].begin, 4 * block) << "the prompt from one lane, the output from the other";
  node.complete(0);
  finish(node);
}

TEST(LaneGroupCache, the_state_is_copied_with_the_last_blocks_when_the_sequence_stands_still) {
  Node node(node_of(2, Mode::Disaggregated, 4));
  node.set(knobs_of(Mode::Disaggregated, 200));
  const SequenceId id = node.add(request(300, 6, 0));
  node.run(0);
  ASSERT_TRUE(node.plan(0));  // the last chunk
  const std::optional<std::uint64_t> early = node.take_copy();
  ASSERT_TRUE(early);
  EXPECT_FALSE(node.copies().back().order.state) << "the step is changing it";
  EXPECT_EQ(node.copies().back().blocks.size(), 12u);
  EXPECT_EQ(counts(node, 1).states_running, 1) << "a slot where it is going";
  node.answer(*early, Node::Answer::Copied);
  EXPECT_FALSE(node.take_copy());
  const StateId slot = node.step(0).rows[0].state->to;
  node.complete(0);
  const std::optional<std::uint64_t> last = node.take_copy();
  ASSERT_TRUE(last);
  const std::optional<StateCopy> state = node.copies().back().order.state;
  ASSERT_TRUE(state);
  EXPECT_EQ(state->from, slot);
  EXPECT_FALSE(node.plan(0)) << "it stands still";
  node.answer(*last, Node::Answer::Copied);
  EXPECT_EQ(counts(node, 0).states_running, 0);
  ASSERT_TRUE(node.plan(1));
  EXPECT_EQ(node.step(1).rows[0].id, id);
  EXPECT_EQ(node.step(1).rows[0].state->from, state->to);
  EXPECT_EQ(counts(node, 1).cached_blocks, 0);
  node.complete(1);
  EXPECT_EQ(counts(node, 1).cached_blocks, 300 / block) << "found here from its next step on";
  finish(node);
}

TEST(LaneGroupCache, a_model_without_keys_copies_its_state_alone) {
  Node node(node_of(2, Mode::Disaggregated, 4, false));
  node.add(request(300, 6, 0));
  node.run(0);
  EXPECT_FALSE(node.plan(0)) << "it stands still";
  const std::optional<std::uint64_t> order = node.take_copy();
  ASSERT_TRUE(order);
  EXPECT_TRUE(node.copies().back().blocks.empty());
  EXPECT_TRUE(node.copies().back().order.state);
  node.answer(*order, Node::Answer::Copied);
  EXPECT_EQ(node.group().handoffs().copied, 1u);
  EXPECT_EQ(node.group().handoffs().blocks, 0u);
  finish(node);
}

TEST(LaneGroupCache, a_copy_of_a_state_that_failed_is_made_again_later) {
  Node node(node_of(2, Mode::Disaggregated, 4, false));
  node.add(request(100, 60, 0));
  node.run(0);
  EXPECT_FALSE(node.plan(0));
  const std::optional<std::uint64_t> order = node.take_copy();
  ASSERT_TRUE(order);
  node.answer(*order, Node::Answer::Failed);
  EXPECT_EQ(counts(node, 1).states_running, 0);
  EXPECT_TRUE(node.run(0)) << "it goes on where it is";
  EXPECT_FALSE(node.take_copy());
  node.advance(std::chrono::seconds(2));
  EXPECT_TRUE(node.run(0));
  EXPECT_FALSE(node.plan(0));
  ASSERT_TRUE(node.take_copy());
  node.answer(node.copies().back().order.epoch, Node::Answer::Copied);
  EXPECT_EQ(node.group().handoffs().copied, 1u);
  finish(node);
}

TEST(LaneGroupCache, slots_that_a_copy_reads_and_writes_stay_taken_until_it_is_answered) {
  Node node(node_of(2, Mode::Disaggregated, 2));
  const SequenceId id = node.add(request(100, 60, 0));
  node.run(0);
  const std::optional<std::uint64_t> order = node.take_copy();
  ASSERT_TRUE(order);
  node.cancel(id);
  EXPECT_EQ(counts(node, 0).states_running, 1);
  EXPECT_EQ(counts(node, 1).states_running, 1);
  node.group().check_integrity();
  node.answer(*order, Node::Answer::Copied);
  EXPECT_EQ(node.group().totals().states_running, 0);
  node.check_empty();
}

TEST(LaneGroupCache, a_device_without_a_slot_takes_no_copy_and_the_sequence_goes_on) {
  NodeOptions options = node_of(2, Mode::Disaggregated, 1, false);
  Node node(options);
  const SequenceId first = node.add(request(40, 30, 0));
  node.run(0);
  EXPECT_FALSE(node.plan(0));
  node.copy_all();
  ASSERT_EQ(counts(node, 1).running, 1);
  const SequenceId second = node.add(request(40, 10, 1));
  node.run(0);
  EXPECT_FALSE(node.take_copy());
  EXPECT_TRUE(node.run(0)) << "decodes where it is";
  EXPECT_EQ(node.stream(second).sampled, 2);
  for (int i = 0; i < 40 && !node.stream(first).ended; ++i) node.run(1);
  finish(node);
}

// Its first row was planned and did not run: the device failed for a moment.
TEST(LaneGroupCache, a_sequence_that_has_not_begun_from_its_snapshot_yet_takes_that_along) {
  Node node(node_of(2, Mode::Chunked, 4, false));
  node.add(request(30 * block, 1, 7));
  node.add(request(4 * block + 1, 1, 0));
  finish(node);
  ASSERT_EQ(counts(node, 1).states_snapshot, 1);
  const SequenceId id = node.add(request(4 * block + 9, 4, 0));
  ASSERT_TRUE(node.plan(1));
  const StateUse use = *node.step(1).rows[0].state;
  ASSERT_EQ(node.step(1).rows[0].begin, 4 * block);
  ASSERT_NE(use.from, use.to);
  node.abandon(1);
  node.set(knobs_of(Mode::Disaggregated));  // the second device decodes from here on
  EXPECT_FALSE(node.plan(1));
  const std::optional<std::uint64_t> order = node.take_copy();
  ASSERT_TRUE(order);
  EXPECT_EQ(node.copies().back().order.state->from, use.from);
  node.answer(*order, Node::Answer::Copied);
  ASSERT_TRUE(node.plan(0));
  EXPECT_EQ(node.step(0).rows[0].id, id);
  EXPECT_EQ(node.step(0).rows[0].state->from, node.step(0).rows[0].state->to);
  node.complete(0);
  finish(node);
}

TEST(LaneGroupCache, a_request_goes_where_its_prefix_is_unless_that_device_is_busier_by_more) {
  Node node(node_of(2, Mode::Chunked, 0));
  // Enough steps of different lengths for the lanes to learn what work takes.
  for (std::uint64_t family = 7; family < 20; ++family) {
    node.add(request((60 + static_cast<std::int32_t>(family)) * block, 30, family));
    const SequenceId beside = node.add(request(20 * block, 30, family == 19 ? 0 : 100 + family));
    for (int i = 0; i < 80; ++i) {
      for (const std::int32_t lane : {0, 1}) {
        if (node.plan(lane)) {
          node.advance(step_cost(node.step(lane).features));
          node.complete(lane);
        }
      }
    }
    ASSERT_EQ(node.stream(beside).lane, LaneIndex{1});
  }
  finish(node);
  node.add(request(20 * block + 5, 1, 0));
  EXPECT_EQ(counts(node, 1).waiting, 1) << "the first device would come first otherwise";
  EXPECT_FALSE(node.plan(0)) << "and it does not take it from there";
  // Little work beside what a hit saves does not turn it away; a lot does.
  node.add(request(21 * block, 1, 0));
  EXPECT_EQ(counts(node, 1).waiting, 2);
  finish(node);
  std::int32_t turned_away = 0;
  for (int i = 0; i < 60 && turned_away == 0; ++i) {
    node.add(request(20 * block + 100, 600, 0));
    turned_away = counts(node, 0).waiting;
  }
  EXPECT_EQ(turned_away, 1);
  EXPECT_GT(counts(node, 1).waiting, 1);
  finish(node);
}

TEST(LaneGroupCache, counts_of_pools_are_summed_once_per_pool) {
  Node one(node_of(1, Mode::Disaggregated, 4));
  EXPECT_EQ(one.group().totals().state_count, 4);
  Node three(node_of(3, Mode::Chunked, 4));
  EXPECT_EQ(three.group().totals().state_count, 12);
  for (std::uint64_t family = 0; family < 3; ++family) three.add(request(2 * block + 1, 1, family));
  finish(three);
  EXPECT_EQ(three.group().totals().cached_blocks, 6);
  EXPECT_EQ(three.group().totals().states_snapshot, 3);
}

}  // namespace
}  // namespace rubato::policies
