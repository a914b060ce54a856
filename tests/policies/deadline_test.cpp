// SPDX-License-Identifier: Apache-2.0
// Policy Deadline: chunks that just keep every ITL deadline, prefills by the largest set that makes its TTFT deadlines.
#include <gtest/gtest.h>

#include <random>

#include "tests/policies/scheduler_harness.h"

namespace rubato::policies {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

WorldOptions options_of(std::int32_t budget, std::int32_t margin) {
  WorldOptions options;
  options.limits.max_num_seqs = 16;
  options.limits.block_count = 4096;
  options.knobs = {.max_num_batched_tokens = budget,
                   .max_num_seqs = 16,
                   .priority_policy = PriorityPolicy::Deadline,
                   .deadline_margin = margin};
  return options;
}

// Lets the model see the machine: prompts and streams of many lengths.
void teach(World& world) {
  std::mt19937 random(3);
  for (int i = 0; i < 60; ++i) {
    world.add({.prompt_tokens = static_cast<std::int32_t>(1 + random() % 1500),
               .max_new_tokens = static_cast<std::int32_t>(1 + random() % 40),
               .ttft_target = seconds(100),
               .itl_target = milliseconds(5 + random() % 100)});
    for (int step = 0; step < 5; ++step) world.step();
  }
  world.drain(5000);
}

SequenceId add_decode(World& world, Duration itl_target, std::int32_t tokens = 1000) {
  const SequenceId id = world.add({.prompt_tokens = 20, .max_new_tokens = tokens, .itl_target = itl_target});
  while (world.stream(id).sampled < 2) world.step();
  world.stream(id).largest_gap = Duration::zero();
  return id;
}

TEST(Deadline, a_long_prompt_takes_all_the_time_that_the_itl_deadlines_leave_and_no_more) {
  for (const std::int32_t margin : {0, 20, 50}) {
    World world(options_of(4096, margin));
    teach(world);
    const SequenceId stream = add_decode(world, milliseconds(20));
    const SequenceId prompt = world.add({.prompt_tokens = 4000, .max_new_tokens = 1});
    while (world.stream(prompt).computed + 600 < 4000) {
      const Duration before = world.now().time_since_epoch();
      world.step();
      const double used = to_milliseconds(world.now().time_since_epoch() - before);
      const double allowed = 20.0 * (100 - margin) / 100;
      EXPECT_LE(used, allowed * 1.03) << "margin " << margin;
      EXPECT_GE(used, allowed * 0.90) << "margin " << margin;
    }
    EXPECT_LE(to_milliseconds(world.stream(stream).largest_gap), 20.0 * 1.03 * (100 - margin) / 100);
  }
}

TEST(Deadline, each_decode_has_its_own_deadline) {
  World world(options_of(4096, 0));
  teach(world);
  const SequenceId patient = add_decode(world, milliseconds(80));
  const SequenceId hasty = add_decode(world, milliseconds(12), 40);
  world.add({.prompt_tokens = 4000, .max_new_tokens = 1});
  while (!world.stream(hasty).ended) world.step();
  EXPECT_LE(to_milliseconds(world.stream(hasty).largest_gap), 12.4);
  world.add({.prompt_tokens = 4000, .max_new_tokens = 1});
  for (int i = 0; i < 5; ++i) world.step();
  EXPECT_GE(to_milliseconds(world.stream(patient).largest_gap), 60) << "the hasty one is gone, steps may be longer";
  EXPECT_LE(to_milliseconds(world.stream(patient).largest_gap), 82.4);
}

TEST(Deadline, time_lost_between_steps_counts) {
  World world(options_of(4096, 0));
  teach(world);
  const SequenceId stream = add_decode(world, milliseconds(20));
  world.add({.prompt_tokens = 4000, .max_new_tokens = 1});
  for (int i = 0; i < 6; ++i) {
    world.advance(milliseconds(8));  // the lane was busy elsewhere
    world.step();
  }
  EXPECT_LE(to_milliseconds(world.stream(stream).largest_gap), 20.6);
}

TEST(Deadline, the_budget_caps_a_step_that_has_time_for_more) {
  World world(options_of(128, 0));
  teach(world);
  add_decode(world, seconds(10));
  world.add({.prompt_tokens = 4000, .max_new_tokens = 1});
  std::int32_t most = 0;
  world.on_plan = [&](const StepPlan& plan) { most = std::max(most, plan.features.tokens); };
  for (int i = 0; i < 10; ++i) world.step();
  EXPECT_EQ(most, 128);
}

TEST(Deadline, serves_before_it_knows_the_machine) {
  World world(options_of(256, 20));
  world.add({.prompt_tokens = 1000, .max_new_tokens = 4});
  world.step();
  EXPECT_EQ(world.scheduler().step_time().observation_count(), 1u);
  EXPECT_EQ(world.stream(SequenceId{1}).computed, 256);
  world.add({.prompt_tokens = 500, .max_new_tokens = 50});
  world.drain(200);
}

TEST(Deadline, an_itl_target_out_of_reach_slows_prefills_but_does_not_stop_them) {
  World world(options_of(512, 20));
  teach(world);
  const SequenceId stream = add_decode(world, milliseconds(2));
  world.cost = [](const StepFeatures& features) { return 5 * step_cost(features); };  // decodes alone take 5 ms now
  for (int i = 0; i < 100; ++i) world.step();
  const SequenceId prompt = world.add({.prompt_tokens = 1024, .max_new_tokens = 1});
  const TimePoint before = world.now();
  while (!world.stream(prompt).ended) {
    world.step();
    ASSERT_LT(world.now() - before, seconds(5));
  }
  EXPECT_LT(to_milliseconds(world.stream(stream).largest_gap), 12) << "5 ms is what decodes take";
}

TEST(Deadline, the_earlier_ttft_deadline_goes_first_whoever_came_first) {
  World world(options_of(128, 20));
  teach(world);
  const SequenceId relaxed = world.add({.prompt_tokens = 1000, .max_new_tokens = 1, .ttft_target = seconds(5)});
  const SequenceId urgent = world.add({.prompt_tokens = 500, .max_new_tokens = 1, .ttft_target = milliseconds(300)});
  while (!world.stream(urgent).ended) world.step();
  EXPECT_LE(world.stream(relaxed).computed, 128);
}

TEST(Deadline, a_hopeless_prompt_yields_to_one_that_can_make_it) {
  World world(options_of(128, 20));
  teach(world);
  const SequenceId hopeless = world.add({.prompt_tokens = 3000, .max_new_tokens = 1, .ttft_target = milliseconds(10)});
  const SequenceId feasible = world.add({.prompt_tokens = 500, .max_new_tokens = 1, .ttft_target = milliseconds(60)});
  while (!world.stream(feasible).ended) world.step();
  EXPECT_LE(*world.stream(feasible).first_token - world.stream(feasible).arrival, milliseconds(60));
  EXPECT_LE(world.stream(hopeless).computed, 128);
  world.drain(100);
}

// Three prompts, in order of their deadlines large, small, small. All three are too much; without the large one both small ones
// make it.
TEST(Deadline, when_not_all_can_make_it_the_largest_is_put_behind) {
  World world(options_of(256, 20));
  teach(world);
  const SequenceId large = world.add({.prompt_tokens = 3000, .max_new_tokens = 1, .ttft_target = milliseconds(110)});
  const SequenceId first = world.add({.prompt_tokens = 1500, .max_new_tokens = 1, .ttft_target = milliseconds(120)});
  const SequenceId second = world.add({.prompt_tokens = 1500, .max_new_tokens = 1, .ttft_target = milliseconds(130)});
  world.drain(200);
  const auto on_time = [&](SequenceId id) {
    return *world.stream(id).first_token - world.stream(id).arrival <= world.stream(id).options.ttft_target;
  };
  EXPECT_TRUE(on_time(first));
  EXPECT_TRUE(on_time(second));
  EXPECT_FALSE(on_time(large));
}

TEST(Deadline, a_late_prompt_is_served_in_bounded_time_under_endless_overload) {
  World world(options_of(256, 20));
  teach(world);
  const SequenceId late = world.add({.prompt_tokens = 2000, .max_new_tokens = 1, .ttft_target = milliseconds(1)});
  const std::uint64_t before = world.steps();
  while (!world.stream(late).ended) {
    while (world.live().size() < 12) world.add({.prompt_tokens = 300, .max_new_tokens = 1, .ttft_target = milliseconds(200)});
    world.step();
    ASSERT_LE(world.steps() - before, 9u * 2000u / 32u + 20u);  // an eighth of the budget every ninth step
  }
}

}  // namespace
}  // namespace rubato::policies
