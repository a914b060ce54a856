// SPDX-License-Identifier: Apache-2.0
// Lanes whose model synchronises all ranks: they step in rounds, and what they lose by that is counted.
#include <gtest/gtest.h>

#include "policies/lane_group.h"
#include "tests/policies/lane_group_harness.h"

namespace rubato::policies {
namespace {

using std::chrono::milliseconds;

NodeOptions ranks(std::int32_t count, Lockstep lockstep) {
  NodeOptions options;
  options.limits.each.token_tile = 1;
  options.limits.devices = count;
  options.limits.lockstep = lockstep;
  options.knobs = {.max_num_batched_tokens = 64, .max_num_seqs = 8, .priority_policy = PriorityPolicy::DecodeFirst};
  return options;
}

// A decode on every lane.
void fill(Node& node) {
  for (std::int32_t lane = 0; lane < node.group().lane_count(); ++lane) {
    node.add({.prompt_tokens = 10, .max_new_tokens = 1000});
  }
  node.run_all();
  for (std::int32_t lane = 0; lane < node.group().lane_count(); ++lane) {
    EXPECT_EQ(node.group().counts(LaneIndex{lane}).scheduler.running, 1);
  }
}

TEST(LaneGroupLockstep, no_lane_starts_a_round_before_the_slowest_has_ended) {
  Node node(ranks(2, Lockstep::On));
  fill(node);
  ASSERT_TRUE(node.plan(0));
  ASSERT_TRUE(node.plan(1));
  node.advance(milliseconds(2));
  node.complete(0);
  EXPECT_FALSE(node.plan(0)) << "lane 1 is still at it";
  node.advance(milliseconds(5));
  node.complete(1);
  EXPECT_TRUE(node.plan(0));
  node.advance(milliseconds(1));
  node.complete(0);
  EXPECT_FALSE(node.plan(0)) << "lane 1 has not begun";
  ASSERT_TRUE(node.plan(1));
  node.advance(milliseconds(1));
  node.complete(1);
}

TEST(LaneGroupLockstep, what_lanes_lose_by_waiting_for_the_slowest_is_counted) {
  Node node(ranks(3, Lockstep::On));
  fill(node);
  static_cast<void>(node.plan(0));  // closes the round that filled the lanes
  const LockstepCounts before = node.group().lockstep();
  for (const std::int32_t lane : {1, 2}) ASSERT_TRUE(node.plan(lane));
  for (const std::int32_t lane : {0, 1, 2}) {
    node.advance(milliseconds(2));
    node.complete(lane);
  }
  ASSERT_TRUE(node.plan(0)) << "the next round";
  const LockstepCounts& counts = node.group().lockstep();
  EXPECT_EQ(counts.rounds - before.rounds, 1u);
  EXPECT_EQ(counts.stepping - before.stepping, milliseconds(2 + 4 + 6));
  EXPECT_EQ(counts.waiting - before.waiting, milliseconds(4 + 2));
}

TEST(LaneGroupLockstep, an_idle_lane_holds_nobody_up) {
  Node node(ranks(3, Lockstep::On));
  node.add({.prompt_tokens = 10, .max_new_tokens = 50});
  for (int i = 0; i < 20; ++i) ASSERT_TRUE(node.run(0));
  const SequenceId other = node.add({.prompt_tokens = 10, .max_new_tokens = 50});
  ASSERT_TRUE(node.run(1));
  EXPECT_EQ(node.stream(other).lane, LaneIndex{1});
  node.cancel(other);
  for (int i = 0; i < 20; ++i) ASSERT_TRUE(node.run(0));
}

// Lanes are asked again when something has changed: lanes that wait must not be the change that the others wait for.
TEST(LaneGroupLockstep, lanes_that_have_nothing_to_run_leave_everything_as_it_is) {
  for (const Lockstep lockstep : {Lockstep::On, Lockstep::Aligned}) {
    NodeOptions options = ranks(4, lockstep);
    options.knobs.mode = Mode::Disaggregated;
    options.knobs.prefill_devices = 2;
    options.knobs.max_num_seqs = 1;
    Node node(options);
    const auto ask_all = [&] {
      for (std::int32_t lane = 0; lane < 4; ++lane) EXPECT_FALSE(node.plan(lane)) << lane;
      return node.group().changes();
    };
    const std::uint64_t idle = ask_all();
    for (int i = 0; i < 5; ++i) EXPECT_EQ(ask_all(), idle) << "without a sequence";

    // Both decode slots taken and in a step, two prefills waiting for them on either prefill lane.
    for (int i = 0; i < 4; ++i) node.add({.prompt_tokens = 10, .max_new_tokens = 1000});
    for (int i = 0; i < 6; ++i) {
      node.run_all();
      node.copy_all();
    }
    ASSERT_TRUE(node.plan(2));
    ASSERT_TRUE(node.plan(3));
    const auto ask_waiting = [&] {
      for (const std::int32_t lane : {0, 1}) EXPECT_FALSE(node.plan(lane)) << lane;
      return node.group().changes();
    };
    const std::uint64_t waiting = (ask_waiting(), ask_waiting());
    for (int i = 0; i < 5; ++i) EXPECT_EQ(ask_waiting(), waiting) << "with prefills that wait for slots";
    node.complete(2);
    node.complete(3);
  }
}

TEST(LaneGroupLockstep, off_lets_every_lane_go_its_own_pace) {
  Node node(ranks(2, Lockstep::Off));
  fill(node);
  ASSERT_TRUE(node.plan(1));
  for (int i = 0; i < 20; ++i) ASSERT_TRUE(node.run(0));
  EXPECT_EQ(node.group().lockstep().rounds, 0u);
}

// Decode lanes wait for each other, not for prefill lanes: the imbalance is gone by construction.
TEST(LaneGroupLockstep, rounds_are_of_one_role) {
  NodeOptions options = ranks(3, Lockstep::On);
  options.knobs.mode = Mode::Disaggregated;
  Node node(options);
  node.add({.prompt_tokens = 10, .max_new_tokens = 1000});
  node.add({.prompt_tokens = 10, .max_new_tokens = 1000});
  for (int i = 0; i < 4; ++i) {
    node.run_all();
    node.copy_all();
  }
  ASSERT_EQ(node.group().counts(LaneIndex{1}).scheduler.running, 1);
  ASSERT_EQ(node.group().counts(LaneIndex{2}).scheduler.running, 1);
  node.add({.prompt_tokens = 2000, .max_new_tokens = 2});
  ASSERT_TRUE(node.plan(0)) << "a long step of the prefill lane";
  for (int i = 0; i < 20; ++i) {
    ASSERT_TRUE(node.plan(1));
    ASSERT_TRUE(node.plan(2));
    node.advance(milliseconds(1));
    node.complete(1);
    EXPECT_FALSE(node.plan(1));
    node.complete(2);
  }
}

TEST(LaneGroupLockstep, aligned_holds_chunks_until_every_lane_has_some) {
  Node node(ranks(2, Lockstep::Aligned));
  fill(node);
  const SequenceId first = node.add({.prompt_tokens = 600, .max_new_tokens = 1});
  node.run_all();
  EXPECT_EQ(node.stream(first).computed, 0);
  const SequenceId second = node.add({.prompt_tokens = 600, .max_new_tokens = 1});
  node.run_all();
  EXPECT_GT(node.stream(first).computed, 0);
  EXPECT_GT(node.stream(second).computed, 0) << "in the same round";
}

TEST(LaneGroupLockstep, aligned_holds_them_four_rounds_at_most) {
  Node node(ranks(2, Lockstep::Aligned));
  fill(node);
  const SequenceId id = node.add({.prompt_tokens = 600, .max_new_tokens = 1});
  for (int i = 0; i < 4; ++i) node.run_all();
  EXPECT_EQ(node.stream(id).computed, 0);
  node.run_all();
  EXPECT_GT(node.stream(id).computed, 0);
}

TEST(LaneGroupLockstep, aligned_holds_nothing_while_nobody_decodes) {
  Node node(ranks(2, Lockstep::Aligned));
  const SequenceId id = node.add({.prompt_tokens = 600, .max_new_tokens = 1});
  EXPECT_TRUE(node.run_all());
  EXPECT_GT(node.stream(id).computed, 0);
}

}  // namespace
}  // namespace rubato::policies
