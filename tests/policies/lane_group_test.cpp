// SPDX-License-Identifier: Apache-2.0
// The rules of lane_group.h on one device: roles, moves within a pool, decode slots, changes of mode, and blocks that two lanes
// share. Several devices are in lane_group_copies_test.cpp, rounds in lane_group_lockstep_test.cpp.
#include "policies/lane_group.h"

#include <gtest/gtest.h>

#include "manifests/names.h"
#include "tests/policies/lane_group_harness.h"

namespace rubato::policies {
namespace {

using std::chrono::milliseconds;

constexpr std::int32_t decode_lane = 0;
constexpr std::int32_t prefill_lane = 1;

KnobValues split(std::int32_t budget, std::int32_t max_num_seqs, Reservation reservation = Reservation::LastChunk) {
  return {.max_num_batched_tokens = budget,
          .max_num_seqs = max_num_seqs,
          .priority_policy = PriorityPolicy::DecodeFirst,
          .mode = Mode::Disaggregated,
          .reservation = reservation};
}

KnobValues chunked(KnobValues knobs) {
  knobs.mode = Mode::Chunked;
  return knobs;
}

// Two lanes on one device.
NodeOptions two_lanes(const KnobValues& knobs) {
  NodeOptions options;
  options.limits.each.token_tile = 1;
  options.limits.lanes_per_device = 2;
  options.knobs = knobs;
  return options;
}

LaneCounts counts(Node& node, std::int32_t lane) {
  return node.group().counts(LaneIndex{lane});
}

// Decodes that stay.
std::vector<SequenceId> fill_decode_lane(Node& node, std::int32_t count, std::int32_t new_tokens = 1000) {
  std::vector<SequenceId> ids;
  for (std::int32_t i = 0; i < count; ++i) ids.push_back(node.add({.prompt_tokens = 8, .max_new_tokens = new_tokens}));
  for (int i = 0; i < 100 && counts(node, decode_lane).scheduler.running < count; ++i) node.run(prefill_lane);
  EXPECT_EQ(counts(node, decode_lane).scheduler.running, count);
  return ids;
}

std::string name_of(Reservation reservation) {
  for (const auto& named : enum_names<Reservation>) {
    if (named.value == reservation) return std::string(named.name);
  }
  return "unknown";
}

class EveryReservation : public testing::TestWithParam<Reservation> {};
INSTANTIATE_TEST_SUITE_P(Reservations, EveryReservation,
                         testing::Values(Reservation::LastChunk, Reservation::PrefillComplete, Reservation::Early),
                         [](const auto& parameter) { return name_of(parameter.param); });

// --- Roles ---

TEST(LaneGroupRoles, one_device_splits_in_mode_disaggregated_only) {
  LaneGroupLimits limits;
  limits.lanes_per_device = 2;
  EXPECT_EQ(lane_role(limits, {.mode = Mode::Chunked}, LaneIndex{0}), LaneRole::Mixed);
  EXPECT_EQ(lane_role(limits, {.mode = Mode::Chunked}, LaneIndex{1}), LaneRole::Spare);
  EXPECT_EQ(lane_role(limits, {.mode = Mode::Disaggregated}, LaneIndex{0}), LaneRole::Decode);
  EXPECT_EQ(lane_role(limits, {.mode = Mode::Disaggregated}, LaneIndex{1}), LaneRole::Prefill);
  limits.lanes_per_device = 1;
  EXPECT_EQ(lane_role(limits, {.mode = Mode::Disaggregated}, LaneIndex{0}), LaneRole::Mixed) << "nothing to split";
}

TEST(LaneGroupRoles, the_first_devices_prefill_and_at_least_one_decodes) {
  LaneGroupLimits limits;
  limits.devices = 4;
  for (const std::int32_t asked : {1, 2, 3, 4, 9}) {
    const KnobValues knobs{.mode = Mode::Disaggregated, .prefill_devices = asked};
    for (std::int32_t lane = 0; lane < 4; ++lane) {
      EXPECT_EQ(lane_role(limits, knobs, LaneIndex{lane}), lane < std::min(asked, 3) ? LaneRole::Prefill : LaneRole::Decode);
      EXPECT_EQ(lane_role(limits, chunked(knobs), LaneIndex{lane}), LaneRole::Mixed);
    }
  }
}

// --- Handing over within a pool ---

TEST_P(EveryReservation, a_handoff_is_a_change_of_owner_with_the_same_blocks) {
  Node node(two_lanes(split(64, 4, GetParam())));
  const SequenceId id = node.add({.prompt_tokens = 100, .max_new_tokens = 5});
  EXPECT_FALSE(node.run(decode_lane)) << "nothing decodes yet";
  EXPECT_TRUE(node.run(prefill_lane));
  EXPECT_TRUE(node.run(prefill_lane));
  const NodeStream& stream = node.stream(id);
  EXPECT_EQ(stream.sampled, 1);
  EXPECT_EQ(stream.first_token_lane, LaneIndex{prefill_lane}) << "the first token does not wait for the other lane";
  const std::vector<BlockId> before = stream.blocks;
  EXPECT_FALSE(node.run(prefill_lane)) << "it has left";
  ASSERT_TRUE(node.plan(decode_lane));
  const PlannedRow& row = node.step(decode_lane).rows.at(0);
  EXPECT_TRUE(row.decode);
  EXPECT_EQ(row.begin, 100) << "the first token is sampled once and nothing is computed again";
  EXPECT_EQ(row.count, 1);
  EXPECT_EQ(node.step(decode_lane).blocks[0], before) << "the same blocks";
  EXPECT_FALSE(node.take_copy().has_value());
  node.complete(decode_lane);
  EXPECT_EQ(node.group().handoffs().moved, 1u);
  EXPECT_EQ(node.group().handoffs().copied + node.group().handoffs().blocks, 0u);
  while (node.run_all()) {
  }
  EXPECT_EQ(stream.sampled, 5);
  node.check_empty();
}

TEST_P(EveryReservation, one_token_ends_without_a_decode_slot) {
  Node node(two_lanes(split(64, 2, GetParam())));
  fill_decode_lane(node, 2);
  const SequenceId shorter = node.add({.prompt_tokens = 10, .max_new_tokens = 1});
  const SequenceId longer = node.add({.prompt_tokens = 150, .max_new_tokens = 1});
  for (int i = 0; i < 4; ++i) {
    node.run_all();
    EXPECT_EQ(counts(node, prefill_lane).reserved, 0);
  }
  EXPECT_TRUE(node.stream(shorter).ended && node.stream(longer).ended);
  EXPECT_EQ(counts(node, decode_lane).scheduler.running, 2);
}

// --- Decode slots ---

TEST(LaneGroupSlots, early_holds_one_from_admission) {
  Node node(two_lanes(split(64, 4, Reservation::Early)));
  node.add({.prompt_tokens = 300, .max_new_tokens = 5});
  node.run(prefill_lane);
  EXPECT_EQ(counts(node, prefill_lane).reserved, 1);
}

TEST(LaneGroupSlots, early_admits_no_more_than_there_are_slots) {
  Node node(two_lanes(split(64, 4, Reservation::Early)));
  fill_decode_lane(node, 3);
  node.add({.prompt_tokens = 300, .max_new_tokens = 5});
  node.add({.prompt_tokens = 300, .max_new_tokens = 5});
  node.run(prefill_lane);
  EXPECT_EQ(counts(node, prefill_lane).scheduler.running, 1);
  EXPECT_EQ(counts(node, prefill_lane).scheduler.waiting, 1);
}

TEST(LaneGroupSlots, last_chunk_holds_one_once_a_chunk_is_left) {
  Node node(two_lanes(split(64, 4)));
  const SequenceId id = node.add({.prompt_tokens = 65 + 64, .max_new_tokens = 5});
  ASSERT_TRUE(node.plan(prefill_lane));
  EXPECT_EQ(counts(node, prefill_lane).reserved, 0) << "129 tokens are left";
  node.complete(prefill_lane);
  ASSERT_TRUE(node.plan(prefill_lane));
  EXPECT_EQ(counts(node, prefill_lane).reserved, 0) << "65 tokens are left";
  node.complete(prefill_lane);
  ASSERT_TRUE(node.plan(prefill_lane));
  EXPECT_EQ(counts(node, prefill_lane).reserved, 1) << "1 token is left";
  node.complete(prefill_lane);
  EXPECT_EQ(node.stream(id).sampled, 1);
  EXPECT_EQ(counts(node, prefill_lane).reserved, 0) << "the slot is taken up";
  EXPECT_EQ(counts(node, decode_lane).scheduler.running, 1);
}

TEST(LaneGroupSlots, prefill_complete_holds_none_and_goes_on_where_it_is) {
  Node node(two_lanes(split(64, 2, Reservation::PrefillComplete)));
  fill_decode_lane(node, 2);
  const SequenceId id = node.add({.prompt_tokens = 100, .max_new_tokens = 500});
  for (int i = 0; i < 5; ++i) {
    node.run_all();
    EXPECT_EQ(counts(node, prefill_lane).reserved, 0);
  }
  EXPECT_EQ(node.stream(id).sampled, 4) << "without a slot it decodes in the lane it is in";
  EXPECT_EQ(node.stream(id).lane, LaneIndex{prefill_lane});
  EXPECT_EQ(counts(node, prefill_lane).to_move, 1);
}

TEST(LaneGroupSlots, a_long_prompt_holds_none_while_shorter_ones_pass) {
  Node node(two_lanes(split(64, 2)));
  const SequenceId longer = node.add({.prompt_tokens = 2000, .max_new_tokens = 5});
  node.run_all();
  const SequenceId first = node.add({.prompt_tokens = 20, .max_new_tokens = 100});
  while (node.stream(first).sampled == 0) node.run_all();
  const SequenceId second = node.add({.prompt_tokens = 20, .max_new_tokens = 100});
  while (node.stream(second).sampled == 0 && node.steps() < 100) node.run_all();
  EXPECT_EQ(counts(node, decode_lane).scheduler.running, 2) << "both slots serve decodes";
  EXPECT_EQ(node.stream(longer).sampled, 0);
}

// Whether it has been admitted or not.
TEST(LaneGroupSlots, the_last_chunk_waits_for_a_slot_and_the_wait_is_counted) {
  Node node(two_lanes(split(64, 2)));
  const std::vector<SequenceId> decodes = fill_decode_lane(node, 2);
  const SequenceId longer = node.add({.prompt_tokens = 100, .max_new_tokens = 5});
  EXPECT_TRUE(node.run(prefill_lane));
  EXPECT_FALSE(node.run(prefill_lane));
  EXPECT_EQ(node.stream(longer).computed, 64);
  const SequenceId shorter = node.add({.prompt_tokens = 20, .max_new_tokens = 5});
  EXPECT_FALSE(node.run(prefill_lane));
  EXPECT_EQ(node.stream(shorter).computed, 0);
  EXPECT_EQ(node.group().handoffs().reservation_waits, 0u) << "both still wait";
  node.advance(milliseconds(7));
  for (const SequenceId id : decodes) node.cancel(id);
  EXPECT_TRUE(node.run(prefill_lane));
  EXPECT_EQ(node.stream(longer).sampled, 1);
  EXPECT_EQ(node.stream(shorter).sampled, 1);
  EXPECT_EQ(node.group().handoffs().reservation_waits, 2u);
  EXPECT_EQ(node.group().handoffs().reservation_waiting, milliseconds(7 + 7));
}

TEST(LaneGroupSlots, go_to_who_became_ready_first) {
  KnobValues knobs = split(64, 2);
  knobs.priority_policy = PriorityPolicy::ShortestFirst;
  Node node(two_lanes(knobs));
  const std::vector<SequenceId> decodes = fill_decode_lane(node, 2);
  const SequenceId older = node.add({.prompt_tokens = 400, .max_new_tokens = 50});
  node.run(prefill_lane);
  const SequenceId ready_first = node.add({.prompt_tokens = 100, .max_new_tokens = 50});
  for (int i = 0; i < 20; ++i) node.run(prefill_lane);
  EXPECT_EQ(node.stream(older).computed, 384);
  EXPECT_EQ(node.stream(ready_first).computed, 64);
  node.cancel(decodes[0]);
  node.run(prefill_lane);
  EXPECT_EQ(node.stream(ready_first).sampled, 1);
  EXPECT_EQ(node.stream(older).sampled, 0);
  node.cancel(decodes[1]);
  node.run(prefill_lane);
  EXPECT_EQ(node.stream(older).sampled, 1);
}

TEST(LaneGroupSlots, a_full_queue_of_finished_prefills_makes_the_others_wait) {
  NodeOptions options = two_lanes(split(64, 4, Reservation::PrefillComplete));
  options.limits.max_handoffs = 1;
  Node node(options);
  const std::vector<SequenceId> decodes = fill_decode_lane(node, 4);
  const SequenceId first = node.add({.prompt_tokens = 20, .max_new_tokens = 50});
  const SequenceId second = node.add({.prompt_tokens = 20, .max_new_tokens = 50});
  const SequenceId third = node.add({.prompt_tokens = 100, .max_new_tokens = 50});
  for (int i = 0; i < 4; ++i) node.run(prefill_lane);
  EXPECT_GT(node.stream(first).sampled, 0);
  EXPECT_EQ(node.stream(second).sampled, 0);
  EXPECT_EQ(node.stream(third).sampled, 0);
  for (const SequenceId id : decodes) node.cancel(id);
  for (int i = 0; i < 6; ++i) node.run_all();
  EXPECT_GT(node.stream(second).sampled, 0);
  EXPECT_GT(node.stream(third).sampled, 0);
}

// --- The live switch ---

// With queued, half-prefilled and decoding sequences.
TEST(LaneGroupSwitch, both_ways_nothing_is_dropped_or_computed_again) {
  const KnobValues knobs = split(64, 16);
  NodeOptions options = two_lanes(chunked(knobs));
  options.limits.each.max_num_seqs = 16;
  Node node(options);
  for (int i = 0; i < 4; ++i) node.add({.prompt_tokens = 12, .max_new_tokens = 60});
  for (int i = 0; i < 3; ++i) node.run(0);
  const SequenceId half = node.add({.prompt_tokens = 500, .max_new_tokens = 60});
  node.run(0);
  node.run(0);
  for (int i = 0; i < 5; ++i) node.add({.prompt_tokens = 30, .max_new_tokens = 60});
  ASSERT_TRUE(node.plan(0)) << "a step is open while the mode changes";
  const std::int32_t computed = node.stream(half).computed;
  ASSERT_GT(computed, 0);

  node.set(knobs);
  EXPECT_EQ(node.group().role(LaneIndex{0}), LaneRole::Decode);
  EXPECT_EQ(counts(node, decode_lane).to_move, 2) << "the half-prefilled ones are in the open step";
  EXPECT_EQ(counts(node, prefill_lane).scheduler.waiting, 4);
  ASSERT_TRUE(node.plan(prefill_lane)) << "those that wait start at once";
  node.advance(milliseconds(3));
  node.complete(0);
  EXPECT_EQ(counts(node, decode_lane).to_move, 0);
  EXPECT_EQ(node.group().handoffs().switches, 1u);
  EXPECT_EQ(node.group().handoffs().last_switch, milliseconds(3)) << "within the step that was open";
  EXPECT_EQ(node.group().handoffs().switches_done, 1u);
  node.complete(prefill_lane);
  for (int i = 0; i < 4; ++i) node.run_all();
  EXPECT_GT(node.stream(half).computed, computed);
  EXPECT_EQ(node.stream(half).lane, LaneIndex{prefill_lane});

  ASSERT_TRUE(node.plan(prefill_lane));
  node.set(chunked(knobs));
  EXPECT_EQ(node.group().role(LaneIndex{prefill_lane}), LaneRole::Spare);
  node.advance(milliseconds(2));
  node.complete(prefill_lane);
  EXPECT_FALSE(node.run(prefill_lane)) << "everybody has left";
  EXPECT_EQ(node.group().handoffs().switches, 2u);
  EXPECT_EQ(node.group().handoffs().last_switch, milliseconds(2));
  while (node.run_all()) {
  }
  EXPECT_EQ(node.preemptions(), 0u);
  for (const auto& [id, stream] : node.streams()) EXPECT_EQ(stream.sampled, 60) << "sequence " << id.value;
  node.check_empty();
}

// A lane that is full takes nobody over; those who wait for it go on where they are.
TEST(LaneGroupSwitch, sequences_without_room_in_their_lane_go_on_and_move_as_others_end) {
  const KnobValues knobs = split(64, 2);
  Node node(two_lanes(knobs));
  fill_decode_lane(node, 2, 30);
  node.add({.prompt_tokens = 200, .max_new_tokens = 10});
  node.run_all();
  node.set(chunked(knobs));
  const auto computed = [&] {
    std::int32_t sum = 0;
    for (const auto& [id, stream] : node.streams()) sum += stream.computed;
    return sum;
  };
  EXPECT_EQ(counts(node, 1).to_move, 1);
  const std::int32_t before = computed();
  for (int i = 0; i < 3; ++i) EXPECT_TRUE(node.run(1)) << "the spare lane carries on";
  EXPECT_GT(computed(), before + 128);
  EXPECT_EQ(node.group().handoffs().switches, 1u);
  EXPECT_EQ(node.group().handoffs().last_switch, Duration::zero()) << "not settled yet";
  EXPECT_EQ(node.group().handoffs().switches_done, 0u);
  while (node.run_all()) {
  }
  EXPECT_GT(node.group().handoffs().last_switch, Duration::zero());
  EXPECT_EQ(node.preemptions(), 0u);
  node.check_empty();
}

TEST(LaneGroupSwitch, a_change_of_reservation_counts_and_takes_effect_at_the_next_plan) {
  Node node(two_lanes(split(64, 4)));
  node.add({.prompt_tokens = 300, .max_new_tokens = 5});
  node.run(prefill_lane);
  EXPECT_EQ(counts(node, prefill_lane).reserved, 0);
  node.set(split(400, 4, Reservation::Early));
  node.add({.prompt_tokens = 500, .max_new_tokens = 5});
  ASSERT_TRUE(node.plan(prefill_lane));
  EXPECT_EQ(counts(node, prefill_lane).reserved, 2) << "the first for its last chunk, the second on admission";
  node.complete(prefill_lane);
  EXPECT_EQ(node.group().handoffs().switches, 1u);
  while (node.run_all()) {
  }
  node.check_empty();
}

// --- Blocks that two lanes share ---

TEST(LaneGroupBlocks, an_older_decode_gets_those_of_a_younger_prefill_when_its_step_ends) {
  NodeOptions options = two_lanes(split(64, 4));
  options.limits.each.block_count = 16;
  options.limits.each.growth_reserve_tokens = 0;
  Node node(options);
  const SequenceId older = node.add({.prompt_tokens = 30, .max_new_tokens = 200});
  node.run(prefill_lane);
  const SequenceId younger = node.add({.prompt_tokens = 200, .max_new_tokens = 4});  // 13 of the other 14 blocks
  ASSERT_TRUE(node.plan(prefill_lane));
  for (int i = 0; i < 100 && node.run(decode_lane); ++i) {
  }
  EXPECT_EQ(node.stream(older).known() - 1, 48) << "its blocks are full, and no other is free";
  node.complete(prefill_lane);
  ASSERT_EQ(node.group().preempted_at_end(LaneIndex{prefill_lane}).size(), 1u);
  EXPECT_EQ(node.stream(younger).preemptions, 1);
  EXPECT_TRUE(node.run(decode_lane));
  EXPECT_EQ(node.stream(older).preemptions, 0);
  EXPECT_EQ(counts(node, decode_lane).scheduler.decode_gap_steps_max, 0);
  while (node.run_all()) {
  }
  EXPECT_EQ(node.stream(younger).sampled, 4);
  node.check_empty();
}

// Lane after lane takes its steps in between; the one that waits is not passed by.
TEST(LaneGroupBlocks, the_first_free_one_is_for_the_oldest_that_waits) {
  NodeOptions options = two_lanes(split(64, 8));
  options.limits.each.block_count = 9;
  options.limits.each.growth_reserve_tokens = 0;
  Node node(options);
  const SequenceId oldest = node.add({.prompt_tokens = 15, .max_new_tokens = 100});
  node.run(prefill_lane);
  for (int i = 0; i < 6; ++i) node.add({.prompt_tokens = 15, .max_new_tokens = 40});
  std::uint64_t most = 0;
  TimePoint last = node.now();
  while (!node.stream(oldest).ended && node.steps() < 2000) {
    node.run_all();
    if (node.stream(oldest).last_token != last) most = 0;
    last = node.stream(oldest).last_token;
    EXPECT_LE(++most, 3u) << "the oldest stands still at " << node.stream(oldest).sampled;
  }
  EXPECT_EQ(node.stream(oldest).preemptions, 0);
}

// It gives way in a plan that comes out empty, beside a lane that drains.
TEST(LaneGroupBlocks, one_that_gave_way_in_an_empty_plan_starts_again) {
  KnobValues knobs = split(64, 2);
  knobs.priority_policy = PriorityPolicy::ShortestFirst;
  NodeOptions options = two_lanes(knobs);
  options.limits.each.block_count = 30;
  options.limits.each.growth_reserve_tokens = 0;
  Node node(options);
  const SequenceId older = node.add({.prompt_tokens = 400, .max_new_tokens = 2});
  node.run(prefill_lane);
  const SequenceId younger = node.add({.prompt_tokens = 10, .max_new_tokens = 200});
  while (node.stream(younger).sampled == 0) node.run(prefill_lane);
  knobs.max_num_seqs = 1;
  node.set(chunked(knobs));
  ASSERT_TRUE(node.plan(1)) << "lane 0 is full, so the older one goes on here";
  for (int i = 0; i < 300 && node.run(0); ++i) {
  }
  EXPECT_EQ(node.stream(younger).preemptions, 1);
  node.complete(1);
  for (int i = 0; i < 1000 && node.run_all(); ++i) {
  }
  EXPECT_EQ(node.stream(older).preemptions, 0);
  EXPECT_EQ(node.stream(younger).sampled, 200);
  node.check_empty();
}

TEST(LaneGroupBlocks, one_cancelled_within_a_step_keeps_its_place_until_that_ends) {
  NodeOptions options = two_lanes(split(64, 1));
  options.limits.each.max_num_seqs = 1;
  options.limits.each.max_waiting = 1;
  options.limits.lanes_per_device = 1;
  Node node(options);
  const SequenceId running = node.add({.prompt_tokens = 100, .max_new_tokens = 5});
  ASSERT_TRUE(node.plan(0));
  node.add({.prompt_tokens = 10, .max_new_tokens = 5});
  node.cancel(running);
  EXPECT_EQ(node.group().waiting(), 1);
  const Result<void> refused =
      node.group().add({.id = SequenceId{99}, .arrival = node.now(), .prompt_tokens = 1, .max_new_tokens = 1});
  ASSERT_FALSE(refused.has_value());
  EXPECT_EQ(refused.error().code, ErrorCode::ResourceExhausted);
  node.complete(0);
  while (node.run_all()) {
  }
  node.check_empty();
}

}  // namespace
}  // namespace rubato::policies
