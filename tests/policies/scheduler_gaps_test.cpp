// SPDX-License-Identifier: Apache-2.0
// Neither decodes nor prefills starve: the reports of starvation, replayed under virtual time for every policy.
#include <gtest/gtest.h>

#include "tests/policies/scheduler_harness.h"

namespace rubato::policies {
namespace {

using std::chrono::seconds;

class Gaps : public testing::TestWithParam<PriorityPolicy> {};
INSTANTIATE_TEST_SUITE_P(Policies, Gaps, testing::ValuesIn(all_policies),
                         [](const auto& parameter) { return name_of(parameter.param); });

WorldOptions options_of(PriorityPolicy policy, std::int32_t budget, std::int32_t max_num_seqs) {
  WorldOptions options;
  options.limits.max_num_seqs = max_num_seqs;
  options.knobs = {.max_num_batched_tokens = budget, .max_num_seqs = max_num_seqs, .priority_policy = policy};
  return options;
}

// Runs until every live stream decodes.
void run_to_decodes(World& world) {
  const auto decodes = [&](SequenceId id) { return world.stream(id).decoding(); };
  while (!std::all_of(world.live().begin(), world.live().end(), decodes)) {
    world.step();
    ASSERT_LT(world.steps(), 5000u);
  }
}

// B001: from its tenth token on, a stream shares the lane with three long prompts at all times.
void run_victim(PriorityPolicy first, bool flip) {
  WorldOptions options = options_of(first, 128, 8);
  World world(options);
  const SequenceId victim = world.add({.prompt_tokens = 16, .max_new_tokens = 300});
  while (world.stream(victim).sampled < 10) world.step();
  std::int32_t flips = 0;
  std::int32_t worst = gap_bounds(first).decode_steps;
  while (!world.stream(victim).ended) {
    while (world.live().size() < 4) world.add({.prompt_tokens = 2048, .max_new_tokens = 1});
    if (flip && world.steps() % 7 == 0) {
      options.knobs.priority_policy = all_policies[static_cast<std::size_t>(++flips) % 4];
      world.set(options.knobs);
      worst = std::max(worst, gap_bounds(options.knobs.priority_policy).decode_steps);
    }
    ASSERT_TRUE(world.step());
    ASSERT_LT(world.steps(), 2000u);
  }
  EXPECT_LT(world.stream(victim).largest_gap, 3 * world.slowest_step());
  EXPECT_LE(world.scheduler().counts().decode_gap_steps_max, worst);
}

TEST_P(Gaps, a_stream_goes_on_while_long_prompts_keep_arriving) {
  run_victim(GetParam(), false);
}
TEST_P(Gaps, a_stream_goes_on_while_the_policy_flips) {
  run_victim(GetParam(), true);
}

// The reverse of B001, at the smallest budget an edge allows, above it, and far below it.
TEST_P(Gaps, a_prompt_gets_its_turn_beside_endless_decodes) {
  for (const std::int32_t budget : {1, 4, 8, 9, 24, 25, 64}) {
    World world(options_of(GetParam(), budget, 9));
    for (int i = 0; i < 8; ++i)
      world.add({.prompt_tokens = 2, .max_new_tokens = 3000, .itl_target = std::chrono::microseconds(1)});
    run_to_decodes(world);
    const SequenceId prompt = world.add({.prompt_tokens = 160, .max_new_tokens = 1});
    const std::uint64_t before = world.steps();
    const auto quantum = static_cast<std::uint64_t>(std::min(min_prefill_quantum, std::max(1, budget / 2)));
    const std::uint64_t most = (160 / quantum + 1) * static_cast<std::uint64_t>(gap_bounds(GetParam()).prefill_steps + 1);
    while (!world.stream(prompt).ended) {
      ASSERT_LE(world.steps() - before, most) << "budget " << budget;
      world.step();
    }
    EXPECT_LE(world.scheduler().counts().prefill_gap_steps_max, gap_bounds(GetParam()).prefill_steps);
  }
}

TEST_P(Gaps, decodes_take_turns_where_the_budget_holds_too_few) {
  World world(options_of(GetParam(), 3, 8));
  for (int i = 0; i < 8; ++i) world.add({.prompt_tokens = 2, .max_new_tokens = 1000});
  run_to_decodes(world);
  std::map<SequenceId, std::int32_t> before;
  for (const auto& [id, stream] : world.streams()) before[id] = stream.sampled;
  for (int i = 0; i < 80; ++i) world.step();
  for (const auto& [id, stream] : world.streams()) EXPECT_NEAR(stream.sampled - before[id], 30, 4) << "sequence " << id.value;
}

TEST(GapsOfPrefillFirst, decodes_are_held_back_for_prefills_but_at_most_every_second_step) {
  World world(options_of(PriorityPolicy::PrefillFirst, 64, 8));
  const SequenceId stream = world.add({.prompt_tokens = 4, .max_new_tokens = 500});
  while (world.stream(stream).sampled < 2) world.step();
  world.add({.prompt_tokens = 2000, .max_new_tokens = 1});
  const std::int32_t before = world.stream(stream).sampled;
  for (int i = 0; i < 20; ++i) world.step();
  EXPECT_EQ(world.stream(stream).sampled - before, 10);
  EXPECT_EQ(world.scheduler().counts().decode_gap_steps_max, 1);
}

TEST(GapsOfPrefillFirst, decodes_fill_what_prefills_leave) {
  World world(options_of(PriorityPolicy::PrefillFirst, 64, 8));
  const SequenceId stream = world.add({.prompt_tokens = 4, .max_new_tokens = 500});
  while (world.stream(stream).sampled < 2) world.step();
  for (int i = 0; i < 10; ++i) {
    world.add({.prompt_tokens = 40, .max_new_tokens = 1});
    const std::int32_t before = world.stream(stream).sampled;
    world.step();
    EXPECT_EQ(world.stream(stream).sampled, before + 1);
  }
}

// If no prefill can run, the step is the decodes', whatever the policy prefers.
TEST(GapsOfPrefillFirst, a_prompt_that_finds_no_place_costs_the_decodes_nothing) {
  WorldOptions options = options_of(PriorityPolicy::PrefillFirst, 64, 2);
  World world(options);
  for (int i = 0; i < 2; ++i) world.add({.prompt_tokens = 4, .max_new_tokens = 100});
  for (int i = 0; i < 3; ++i) world.step();
  world.add({.prompt_tokens = 200, .max_new_tokens = 1});
  for (int i = 0; i < 20; ++i) world.step();
  EXPECT_EQ(world.scheduler().counts().decode_gap_steps_max, 0);
}

TEST(GapsOfShortestFirst, least_left_goes_first_and_age_counts) {
  World world(options_of(PriorityPolicy::ShortestFirst, 64, 8));
  const SequenceId longer = world.add({.prompt_tokens = 1000, .max_new_tokens = 1});
  const SequenceId shorter = world.add({.prompt_tokens = 100, .max_new_tokens = 1});
  world.step();
  EXPECT_EQ(world.stream(longer).computed, 0);
  EXPECT_EQ(world.stream(shorter).computed, 64);
  // Work left counts, not length: half-done, the old prompt beats a newcomer of the same length.
  World other(options_of(PriorityPolicy::ShortestFirst, 64, 8));
  const SequenceId half = other.add({.prompt_tokens = 300, .max_new_tokens = 1});
  other.step();
  const SequenceId newcomer = other.add({.prompt_tokens = 280, .max_new_tokens = 1});
  other.step();
  EXPECT_EQ(other.stream(half).computed, 128);
  EXPECT_EQ(other.stream(newcomer).computed, 0);
}

TEST(GapsOfShortestFirst, short_newcomers_hold_a_long_prompt_up_for_a_while_only) {
  World world(options_of(PriorityPolicy::ShortestFirst, 64, 8));
  const SequenceId longer = world.add({.prompt_tokens = 640, .max_new_tokens = 1, .ttft_target = seconds(1)});
  // Two short prompts per step would be twice what the lane can do.
  while (!world.stream(longer).ended && world.steps() < 1000) {
    while (world.live().size() < 6) world.add({.prompt_tokens = 64, .max_new_tokens = 1});
    world.step();
  }
  EXPECT_GT(world.stream(longer).ended_at_step, 60u);
  EXPECT_LT(world.stream(longer).ended_at_step, 450u) << "32 steps of waiting count as one step of work";
}

}  // namespace
}  // namespace rubato::policies
