// SPDX-License-Identifier: Apache-2.0
// The rules of lane_group.h on several devices: where requests go, and what becomes of sequences whose blocks are copied.
#include <gtest/gtest.h>

#include "policies/lane_group.h"
#include "tests/policies/lane_group_harness.h"

namespace rubato::policies {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

KnobValues knobs_of(Mode mode, std::int32_t prefill_devices = 1, std::int32_t budget = 64) {
  return {.max_num_batched_tokens = budget,
          .max_num_seqs = 8,
          .priority_policy = PriorityPolicy::DecodeFirst,
          .mode = mode,
          .reservation = Reservation::LastChunk,
          .prefill_devices = prefill_devices};
}

NodeOptions devices(std::int32_t count, Mode mode, std::int32_t prefill_devices = 1) {
  NodeOptions options;
  options.limits.each.token_tile = 1;
  options.limits.devices = count;
  options.limits.handoff_lease = milliseconds(100);
  options.knobs = knobs_of(mode, prefill_devices);
  return options;
}

LaneCounts counts(Node& node, std::int32_t lane) {
  return node.group().counts(LaneIndex{lane});
}

// Steps and copies until nothing is left.
void finish(Node& node) {
  for (int i = 0; i < 5000 && !node.group().idle(); ++i) {
    node.run_all();
    node.copy_all();
    node.group().check_integrity();
  }
  node.check_empty();
}

// A prompt of 200 tokens on the prefill device whose last chunk runs while the first 12 blocks are being copied.
struct Overlap {
  SequenceId id;
  std::uint64_t epoch = 0;
};
Overlap start_overlap(Node& node) {
  Overlap overlap{.id = node.add({.prompt_tokens = 200, .max_new_tokens = 20})};
  for (int i = 0; i < 3; ++i) node.run(0);
  EXPECT_TRUE(node.plan(0));
  overlap.epoch = node.take_copy().value_or(0);
  EXPECT_NE(overlap.epoch, 0u);
  return overlap;
}

// --- Where requests go ---

TEST(LaneGroupRouting, a_request_goes_to_the_lane_with_the_least_left_to_do) {
  Node node(devices(3, Mode::Chunked));
  node.add({.prompt_tokens = 1000, .max_new_tokens = 2});
  node.add({.prompt_tokens = 300, .max_new_tokens = 2});
  node.add({.prompt_tokens = 500, .max_new_tokens = 2});
  node.add({.prompt_tokens = 100, .max_new_tokens = 2});  // 300 is least
  node.add({.prompt_tokens = 400, .max_new_tokens = 2});  // 400 is least
  EXPECT_EQ(counts(node, 0).scheduler.waiting, 1);
  EXPECT_EQ(counts(node, 1).scheduler.waiting, 3);
  EXPECT_EQ(counts(node, 2).scheduler.waiting, 1);
}

TEST(LaneGroupRouting, decodes_count_as_work_too) {
  Node node(devices(2, Mode::Chunked));
  for (int i = 0; i < 6; ++i) node.add({.prompt_tokens = 2, .max_new_tokens = 200});
  for (int i = 0; i < 3; ++i) node.run_all();
  const SequenceId long_one = node.add({.prompt_tokens = 3000, .max_new_tokens = 1});
  while (node.stream(long_one).computed == 0) node.run_all();
  const std::int32_t busy = node.stream(long_one).lane->value;
  const SequenceId next = node.add({.prompt_tokens = 10, .max_new_tokens = 1});
  node.run(1 - busy);
  EXPECT_EQ(node.stream(next).lane, LaneIndex{1 - busy});
  finish(node);
}

TEST(LaneGroupRouting, a_lane_with_nothing_to_prefill_takes_the_oldest_that_waits_elsewhere) {
  Node node(devices(2, Mode::Chunked));
  const SequenceId first = node.add({.prompt_tokens = 400, .max_new_tokens = 1});
  const SequenceId small = node.add({.prompt_tokens = 300, .max_new_tokens = 1});
  const SequenceId waits = node.add({.prompt_tokens = 390, .max_new_tokens = 1});
  ASSERT_TRUE(node.run(0));
  ASSERT_TRUE(node.run(1));
  ASSERT_EQ(node.stream(small).lane, LaneIndex{1});
  node.cancel(first);
  ASSERT_TRUE(node.run(0));
  EXPECT_EQ(node.stream(waits).lane, LaneIndex{0}) << "it stood behind the small one";
  finish(node);
}

TEST(LaneGroupRouting, new_work_goes_to_devices_that_prefill) {
  Node node(devices(4, Mode::Disaggregated, 2));
  for (int i = 0; i < 6; ++i) node.add({.prompt_tokens = 100, .max_new_tokens = 2});
  EXPECT_EQ(counts(node, 0).scheduler.waiting, 3);
  EXPECT_EQ(counts(node, 1).scheduler.waiting, 3);
  EXPECT_FALSE(node.run(2));
  EXPECT_FALSE(node.run(3));
  finish(node);
}

// --- Copies ---

TEST(LaneGroupCopies, full_blocks_travel_during_the_last_chunk_and_the_rest_afterwards) {
  Node node(devices(2, Mode::Disaggregated));
  const Overlap overlap = start_overlap(node);
  EXPECT_EQ(node.copies().at(0).blocks.size(), 12u) << "192 of 200 tokens are computed";
  EXPECT_FALSE(node.take_copy().has_value()) << "one order of a sequence after the other";
  node.answer(overlap.epoch, Node::Answer::Copied);
  EXPECT_FALSE(node.take_copy().has_value()) << "the step is writing the block that is left";
  node.complete(0);
  EXPECT_EQ(node.stream(overlap.id).sampled, 1) << "the first token does not wait for the copy";
  ASSERT_TRUE(node.take_copy().has_value());
  EXPECT_EQ(node.copies().at(0).blocks.size(), 1u) << "only what was not there yet";
  EXPECT_FALSE(node.run(0)) << "it stands still for the last of it";
  EXPECT_FALSE(node.run(1));
  node.advance(milliseconds(5));
  node.answer(node.copies().at(0).order.epoch, Node::Answer::Copied);
  EXPECT_TRUE(node.run(1));
  EXPECT_EQ(node.stream(overlap.id).sampled, 2);
  EXPECT_EQ(node.group().handoffs().copied, 1u);
  EXPECT_EQ(node.group().handoffs().moved, 0u);
  EXPECT_EQ(node.group().handoffs().blocks, 13u);
  EXPECT_EQ(node.group().handoffs().copying, milliseconds(5));
  EXPECT_EQ(counts(node, 0).scheduler.free_blocks, counts(node, 0).scheduler.block_count);
  EXPECT_EQ(node.preemptions(), 0u);
  finish(node);
}

TEST(LaneGroupCopies, a_long_copy_is_made_while_the_sequence_goes_on) {
  NodeOptions options = devices(2, Mode::Chunked);
  Node node(options);
  const SequenceId id = node.add({.prompt_tokens = 1000, .max_new_tokens = 100});
  while (node.stream(id).sampled == 0) node.run(0);
  node.set(knobs_of(Mode::Disaggregated));
  const std::optional<std::uint64_t> epoch = node.take_copy();
  ASSERT_TRUE(epoch.has_value());
  EXPECT_EQ(node.copies().at(0).blocks.size(), 62u);
  for (int i = 0; i < 20; ++i) EXPECT_TRUE(node.run(0));
  EXPECT_EQ(node.stream(id).sampled, 21);
  EXPECT_EQ(counts(node, 0).to_move, 1);
  node.answer(*epoch, Node::Answer::Copied);
  node.copy_all();
  EXPECT_EQ(counts(node, 0).to_move, 0);
  EXPECT_GT(node.group().handoffs().last_switch, Duration::zero());
  EXPECT_TRUE(node.run(1));
  EXPECT_EQ(node.preemptions(), 0u);
  finish(node);
}

TEST(LaneGroupCopies, a_cancel_frees_both_sides_once_the_order_is_answered) {
  for (const bool within_step : {false, true}) {
    Node node(devices(2, Mode::Disaggregated));
    const Overlap overlap = start_overlap(node);
    if (!within_step) node.complete(0);
    EXPECT_TRUE(node.group().wants(overlap.epoch));
    node.cancel(overlap.id);
    EXPECT_FALSE(node.group().wants(overlap.epoch));
    if (within_step) node.complete(0);
    for (const std::int32_t lane : {0, 1}) {
      EXPECT_LT(counts(node, lane).scheduler.free_blocks, counts(node, lane).scheduler.block_count) << "the copier may be at it";
    }
    node.group().check_integrity();
    node.answer(overlap.epoch, Node::Answer::Failed);
    node.check_empty();
    EXPECT_EQ(node.group().handoffs().failed, 0u);
  }
}

// Between the end of the prefill and the first order, nothing is on its way yet.
TEST(LaneGroupCopies, a_cancel_before_the_first_order_leaves_nothing_behind) {
  Node node(devices(2, Mode::Disaggregated));
  const SequenceId id = node.add({.prompt_tokens = 200, .max_new_tokens = 20});
  for (int i = 0; i < 4; ++i) node.run(0);
  EXPECT_EQ(node.stream(id).sampled, 1);
  EXPECT_EQ(node.group().copies_open(), 1);
  node.cancel(id);
  node.check_empty();
  EXPECT_FALSE(node.take_copy().has_value());
}

TEST(LaneGroupCopies, an_order_without_an_answer_is_given_up_after_a_lease_and_freed_after_another) {
  Node node(devices(2, Mode::Disaggregated));
  const Overlap overlap = start_overlap(node);
  node.complete(0);
  node.advance(milliseconds(101));
  node.expire();
  EXPECT_FALSE(node.group().wants(overlap.epoch));
  EXPECT_EQ(node.group().handoffs().expired, 1u);
  EXPECT_EQ(node.group().handoffs().failed, 1u);
  EXPECT_TRUE(node.run(0)) << "it goes on where it is";
  EXPECT_EQ(node.stream(overlap.id).sampled, 2);
  node.cancel(overlap.id);
  EXPECT_LT(counts(node, 1).scheduler.free_blocks, counts(node, 1).scheduler.block_count);
  node.advance(milliseconds(101));
  node.expire();
  node.check_empty();
  const std::uint64_t late = node.group().handoffs().late_answers;
  node.answer(overlap.epoch, Node::Answer::Copied);
  EXPECT_EQ(node.group().handoffs().late_answers, late + 1);
  EXPECT_EQ(node.group().handoffs().copied, 0u);
  node.check_empty();
}

TEST(LaneGroupCopies, an_answer_after_the_lease_counts_as_late_and_moves_nobody) {
  Node node(devices(2, Mode::Disaggregated));
  const Overlap overlap = start_overlap(node);
  node.complete(0);
  node.advance(milliseconds(101));
  node.expire();
  node.answer(overlap.epoch, Node::Answer::Copied);
  EXPECT_EQ(node.group().handoffs().late_answers, 1u);
  EXPECT_EQ(node.group().handoffs().copied, 0u);
  EXPECT_EQ(node.group().copies_open(), 0) << "nobody writes any more";
  EXPECT_TRUE(node.run(0));
  EXPECT_EQ(node.stream(overlap.id).lane, LaneIndex{0});
  node.answer(overlap.epoch, Node::Answer::Copied);
  EXPECT_EQ(node.group().handoffs().late_answers, 2u) << "and twice changes nothing either";
}

TEST(LaneGroupCopies, after_a_failure_the_sequence_goes_on_in_place_and_is_tried_again) {
  Node node(devices(2, Mode::Disaggregated));
  const Overlap overlap = start_overlap(node);
  node.complete(0);
  node.answer(overlap.epoch, Node::Answer::Failed);
  EXPECT_EQ(node.group().handoffs().failed, 1u);
  EXPECT_EQ(counts(node, 1).scheduler.free_blocks, counts(node, 1).scheduler.block_count);
  EXPECT_TRUE(node.run(0));
  EXPECT_EQ(node.stream(overlap.id).sampled, 2);
  EXPECT_FALSE(node.take_copy().has_value()) << "not at once";
  node.advance(seconds(1));
  EXPECT_TRUE(node.run(0));
  node.copy_all();
  EXPECT_TRUE(node.run(1));
  EXPECT_EQ(node.group().handoffs().copied, 1u);
  EXPECT_EQ(node.preemptions(), 0u) << "nothing is computed again";
  finish(node);
}

TEST(LaneGroupCopies, a_full_queue_makes_prefills_wait_and_they_go_on_later) {
  NodeOptions options = devices(2, Mode::Disaggregated);
  options.limits.max_handoffs = 1;
  Node node(options);
  const SequenceId first = node.add({.prompt_tokens = 100, .max_new_tokens = 20});
  const SequenceId second = node.add({.prompt_tokens = 100, .max_new_tokens = 20});
  const SequenceId third = node.add({.prompt_tokens = 100, .max_new_tokens = 20});
  for (int i = 0; i < 8; ++i) node.run(0);
  EXPECT_EQ(node.group().copies_open(), 1);
  EXPECT_EQ(node.stream(first).sampled, 1);
  EXPECT_EQ(node.stream(second).sampled, 0);
  EXPECT_EQ(node.stream(third).sampled, 0);
  finish(node);
  EXPECT_EQ(node.stream(third).sampled, 20);
  EXPECT_EQ(node.group().handoffs().copied, 3u);
}

// Waiting for a block there could be waiting for each other.
TEST(LaneGroupCopies, one_that_finds_no_block_for_its_growth_is_given_up) {
  NodeOptions options = devices(2, Mode::Chunked);
  options.limits.each.block_count = 12;
  options.limits.each.growth_reserve_tokens = 0;
  Node node(options);
  const SequenceId moving = node.add({.prompt_tokens = 60, .max_new_tokens = 100});
  const SequenceId there = node.add({.prompt_tokens = 90, .max_new_tokens = 80});
  for (int i = 0; i < 3; ++i) node.run_all();
  ASSERT_EQ(node.stream(moving).lane, LaneIndex{0});
  ASSERT_EQ(node.stream(there).lane, LaneIndex{1});
  node.set(knobs_of(Mode::Disaggregated));
  const std::optional<std::uint64_t> epoch = node.take_copy();
  ASSERT_TRUE(epoch.has_value());
  while (counts(node, 1).scheduler.free_blocks > 0) ASSERT_TRUE(node.run_all());
  while (node.stream(moving).known() <= 80) ASSERT_TRUE(node.run(0));
  node.answer(*epoch, Node::Answer::Copied);
  EXPECT_EQ(node.group().copies_open(), 0);
  EXPECT_TRUE(node.run(0)) << "it goes on where it is";
  for (int i = 0; i < 100 && !node.stream(there).ended; ++i) node.run(1);
  EXPECT_EQ(node.preemptions(), 0u);
  node.advance(seconds(1));
  finish(node);
  EXPECT_EQ(node.stream(moving).sampled, 100);
}

// --- Switches ---

TEST(LaneGroupCopies, a_sequence_that_belongs_here_again_stays_when_its_copy_is_answered) {
  Node node(devices(2, Mode::Disaggregated));
  const Overlap overlap = start_overlap(node);
  node.complete(0);
  node.set(knobs_of(Mode::Chunked));
  node.answer(overlap.epoch, Node::Answer::Copied);
  EXPECT_EQ(node.group().copies_open(), 0);
  EXPECT_TRUE(node.run(0));
  EXPECT_EQ(node.stream(overlap.id).sampled, 2);
  EXPECT_EQ(node.group().handoffs().copied, 0u);
  EXPECT_EQ(node.group().handoffs().failed, 0u);
  finish(node);
}

TEST(LaneGroupCopies, roles_change_under_way_and_every_sequence_arrives) {
  Node node(devices(4, Mode::Chunked));
  for (int i = 0; i < 8; ++i) node.add({.prompt_tokens = 20 + 40 * i, .max_new_tokens = 400});
  for (int i = 0; i < 16; ++i) node.run_all();
  std::uint64_t switches = 0;
  for (const std::int32_t prefilling : {1, 2, 3}) {
    node.set(knobs_of(Mode::Disaggregated, prefilling));
    EXPECT_EQ(node.group().handoffs().switches, ++switches);
    const std::uint64_t before = node.steps();
    const auto left = [&] {
      std::int32_t sum = 0;
      for (std::int32_t lane = 0; lane < 4; ++lane) sum += counts(node, lane).to_move;
      return sum;
    };
    EXPECT_GT(left(), 0);
    while (left() > 0) {
      ASSERT_LT(node.steps(), before + 80);
      node.run_all();
      node.copy_all();
    }
    EXPECT_GT(node.group().handoffs().last_switch, Duration::zero());
  }
  node.set(knobs_of(Mode::Chunked));
  finish(node);
  EXPECT_EQ(node.preemptions(), 0u);
  for (const auto& [id, stream] : node.streams()) EXPECT_EQ(stream.sampled, 400) << "sequence " << id.value;
}

}  // namespace
}  // namespace rubato::policies
