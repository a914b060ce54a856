// SPDX-License-Identifier: Apache-2.0
// The rules of scheduler.h one by one, each with a case that fails without it.
#include "policies/scheduler.h"

#include <gtest/gtest.h>

#include <numeric>

#include "tests/policies/scheduler_harness.h"

namespace rubato::policies {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

KnobValues knobs_of(PriorityPolicy policy, std::int32_t budget, std::int32_t max_num_seqs = 8) {
  return {.max_num_batched_tokens = budget, .max_num_seqs = max_num_seqs, .priority_policy = policy};
}

WorldOptions world_of(PriorityPolicy policy, std::int32_t budget, std::int32_t max_num_seqs = 8) {
  WorldOptions options;
  options.limits.max_num_seqs = std::max(max_num_seqs, 8);
  options.knobs = knobs_of(policy, budget, max_num_seqs);
  return options;
}

// Runs until every live stream decodes.
void run_to_decodes(World& world) {
  const auto all_decode = [&] {
    return std::all_of(world.live().begin(), world.live().end(), [&](SequenceId id) { return world.stream(id).decoding(); });
  };
  for (int i = 0; i < 1000 && !all_decode(); ++i) world.step();
  ASSERT_TRUE(all_decode());
}

std::map<std::uint64_t, std::int32_t> tokens_by_id(const StepPlan& plan) {
  std::map<std::uint64_t, std::int32_t> result;
  for (const PlannedRow& row : plan.rows) result[row.id.value] = row.count;
  return result;
}

class EveryPolicy : public testing::TestWithParam<PriorityPolicy> {};
INSTANTIATE_TEST_SUITE_P(Policies, EveryPolicy, testing::ValuesIn(all_policies),
                         [](const auto& parameter) { return name_of(parameter.param); });

// --- What is admitted, and what is refused ---

TEST(SchedulerAdd, refuses_what_can_never_fit_and_names_the_limit_in_force) {
  WorldOptions options = world_of(PriorityPolicy::DecodeFirst, 256);
  options.limits.block_count = 32;  // 512 tokens under a model limit of 4096
  World world(options);
  EXPECT_EQ(world.scheduler().effective_max_len(), 512);
  const SequenceId refused{1000};
  const Result<void> result = world.try_add(refused, {.prompt_tokens = 600, .max_new_tokens = 1});
  ASSERT_FALSE(result.has_value());
  EXPECT_EQ(result.error().code, ErrorCode::InvalidArgument);
  EXPECT_NE(result.error().message.find("512"), std::string::npos) << result.error().message;
  EXPECT_FALSE(world.try_add(refused, {.prompt_tokens = 400, .max_new_tokens = 300}).has_value());
  const SequenceId behind = world.add({.prompt_tokens = 20, .max_new_tokens = 3});
  world.drain(10);
  EXPECT_EQ(world.stream(behind).sampled, 3);
}

TEST(SchedulerAdd, refuses_nothing_and_overflow) {
  World world(world_of(PriorityPolicy::DecodeFirst, 256));
  const std::int32_t most = std::numeric_limits<std::int32_t>::max();
  EXPECT_EQ(world.try_add(SequenceId{1}, {.prompt_tokens = 0, .max_new_tokens = 1}).error().field, "prompt");
  EXPECT_EQ(world.try_add(SequenceId{1}, {.prompt_tokens = 1, .max_new_tokens = 0}).error().field, "max_tokens");
  EXPECT_FALSE(world.try_add(SequenceId{1}, {.prompt_tokens = most, .max_new_tokens = most}).has_value());
  EXPECT_FALSE(world.try_add(SequenceId{1}, {.prompt_tokens = -1, .max_new_tokens = most}).has_value());
  EXPECT_TRUE(world.scheduler().idle());
}

TEST(SchedulerAdd, a_full_waiting_queue_is_exhausted_until_one_leaves) {
  WorldOptions options = world_of(PriorityPolicy::DecodeFirst, 256);
  options.limits.max_waiting = 2;
  World world(options);
  const SequenceId first = world.add({.prompt_tokens = 4, .max_new_tokens = 4});
  world.add({.prompt_tokens = 4, .max_new_tokens = 4});
  EXPECT_EQ(world.try_add(SequenceId{99}, {.prompt_tokens = 4, .max_new_tokens = 4}).error().code, ErrorCode::ResourceExhausted);
  world.cancel(first);
  world.add({.prompt_tokens = 4, .max_new_tokens = 4});
  world.drain(20);
}

TEST_P(EveryPolicy, lengths_at_the_limit_run_exactly) {
  for (const std::int32_t budget : {17, 24, 511, 512, 513}) {
    WorldOptions options = world_of(GetParam(), budget, 1);
    options.limits.max_model_len = 512;
    options.limits.block_count = 32;
    World world(options);
    for (std::int32_t prompt = 509; prompt <= 514; ++prompt) {
      for (const std::int32_t output : {1, 2, 3, 512}) {
        if (prompt + output > 512) {
          EXPECT_FALSE(world.try_add(SequenceId{9999}, {.prompt_tokens = prompt, .max_new_tokens = output}).has_value());
          continue;
        }
        const SequenceId id = world.add({.prompt_tokens = prompt, .max_new_tokens = output});
        world.drain(600);
        EXPECT_EQ(world.stream(id).sampled, output);
      }
    }
    for (std::int32_t blocks = 1; blocks <= 5; ++blocks) {
      for (std::int32_t off = -1; off <= 1; ++off) world.add({.prompt_tokens = 16 * blocks + off, .max_new_tokens = 2});
    }
    world.drain(1000);
  }
}

// --- Two passes within one budget ---

TEST_P(EveryPolicy, decodes_and_chunks_share_one_budget) {
  World world(world_of(GetParam(), 64));
  for (int i = 0; i < 4; ++i) world.add({.prompt_tokens = 10, .max_new_tokens = 400});
  run_to_decodes(world);
  world.add({.prompt_tokens = 1000, .max_new_tokens = 2});
  std::int32_t most = 0;
  world.on_plan = [&](const StepPlan& plan) { most = std::max(most, plan.features.tokens); };
  for (int i = 0; i < 10; ++i) world.step();
  EXPECT_LE(most, 64);
  EXPECT_TRUE(GetParam() == PriorityPolicy::Deadline || most == 64) << most;
}

// A walk over one list in order of arrival would give the old prompt the whole budget.
TEST_P(EveryPolicy, an_older_half_prefilled_prompt_does_not_displace_younger_decodes) {
  WorldOptions options = world_of(GetParam(), 128);
  World world(options);
  const SequenceId old = world.add({.prompt_tokens = 4000, .max_new_tokens = 2, .ttft_target = seconds(60)});
  world.step();
  std::vector<SequenceId> young;
  for (int i = 0; i < 7; ++i) young.push_back(world.add({.prompt_tokens = 16, .max_new_tokens = 200}));
  for (int i = 0; i < 12; ++i) world.step();
  ASSERT_FALSE(world.stream(old).first_token.has_value());
  for (const SequenceId id : young) EXPECT_GE(world.stream(id).sampled, 2) << "sequence " << id.value;
  for (int i = 0; i < 20; ++i) world.step();
  for (const SequenceId id : young) EXPECT_LE(world.stream(id).steps_in_largest_gap, gap_bounds(GetParam()).decode_steps + 1);
}

TEST_P(EveryPolicy, several_prompts_are_half_prefilled_at_once) {
  World world(world_of(GetParam(), 64));
  world.add({.prompt_tokens = 3000, .max_new_tokens = 2, .ttft_target = seconds(5)});
  world.step();
  world.add({.prompt_tokens = 200, .max_new_tokens = 2, .ttft_target = seconds(1)});
  std::int32_t most = 0;
  for (int i = 0; i < 8; ++i) {
    world.step();
    most = std::max(most, world.scheduler().counts().prefilling);
  }
  EXPECT_EQ(most, 2);
  world.drain(400);
}

// --- B004: there is no prompt that waits for a larger step ---

TEST_P(EveryPolicy, a_prompt_longer_than_the_budget_is_served_whatever_the_mode) {
  for (const Mode mode : {Mode::Chunked, Mode::Disaggregated}) {
    WorldOptions options = world_of(GetParam(), 256);
    options.knobs.mode = mode;
    World world(options);
    const SequenceId longer = world.add({.prompt_tokens = 257, .max_new_tokens = 2});
    const SequenceId shorter = world.add({.prompt_tokens = 10, .max_new_tokens = 2});
    world.step();
    options.knobs.mode = Mode::Disaggregated;  // flipped while half prefilled
    world.set(options.knobs);
    world.step();
    EXPECT_TRUE(world.stream(shorter).first_token.has_value());
    world.drain(10);
    EXPECT_EQ(world.stream(longer).sampled, 2);
  }
}

// --- Tiles ---

TEST(SchedulerTile, the_sum_not_the_chunk_is_cut_to_the_tile) {
  WorldOptions options = world_of(PriorityPolicy::DecodeFirst, 300);
  options.limits.token_tile = 128;
  World world(options);
  for (int i = 0; i < 3; ++i) world.add({.prompt_tokens = 10, .max_new_tokens = 100});
  run_to_decodes(world);
  const SequenceId prompt = world.add({.prompt_tokens = 2000, .max_new_tokens = 1});
  world.on_plan = [&](const StepPlan& plan) {
    EXPECT_EQ(plan.features.tokens, 256);
    EXPECT_EQ(tokens_by_id(plan)[prompt.value], 253);
  };
  world.step();
}

TEST(SchedulerTile, a_tile_above_the_budget_costs_no_progress) {
  for (const std::int32_t budget : {1, 2, 16, 31, 33, 256}) {
    WorldOptions options = world_of(PriorityPolicy::Deadline, budget);
    options.limits.token_tile = 4096;
    World world(options);
    world.add({.prompt_tokens = 700, .max_new_tokens = 5});
    world.add({.prompt_tokens = 3, .max_new_tokens = 5});
    world.drain(5000);
  }
}

TEST(SchedulerTile, a_step_that_holds_all_work_is_not_cut) {
  WorldOptions options = world_of(PriorityPolicy::DecodeFirst, 300);
  options.limits.token_tile = 128;
  World world(options);
  const SequenceId id = world.add({.prompt_tokens = 200, .max_new_tokens = 1});
  world.step();
  EXPECT_TRUE(world.stream(id).ended);
}

// --- The cap on long prompts ---

TEST(SchedulerLongPrompts, the_cap_binds_only_while_a_shorter_prompt_competes) {
  World world(world_of(PriorityPolicy::DecodeFirst, 256));
  const SequenceId longer = world.add({.prompt_tokens = 4000, .max_new_tokens = 2});
  std::map<std::uint64_t, std::int32_t> last;
  world.on_plan = [&](const StepPlan& plan) { last = tokens_by_id(plan); };
  world.step();
  EXPECT_EQ(last[longer.value], 256);
  const SequenceId shorter = world.add({.prompt_tokens = 500, .max_new_tokens = 2});
  world.step();
  EXPECT_EQ(last[longer.value], 128);
  EXPECT_EQ(last[shorter.value], 128);
  while (!world.stream(shorter).first_token) world.step();
  EXPECT_LE(world.steps(), 6u);
  const SequenceId tiny = world.add({.prompt_tokens = 8, .max_new_tokens = 1});
  world.step();
  EXPECT_EQ(last[tiny.value], 8);
  EXPECT_EQ(std::accumulate(last.begin(), last.end(), 0, [](int sum, const auto& row) { return sum + row.second; }), 256)
      << "what the short one leaves goes back to the long one";
}

TEST(SchedulerLongPrompts, two_long_prompts_go_in_order) {
  World world(world_of(PriorityPolicy::DecodeFirst, 256));
  const SequenceId first = world.add({.prompt_tokens = 4000, .max_new_tokens = 2});
  const SequenceId second = world.add({.prompt_tokens = 4000, .max_new_tokens = 2});
  world.step();
  EXPECT_EQ(world.stream(first).computed, 256);
  EXPECT_EQ(world.stream(second).computed, 0);
}

// --- The pool ---

TEST_P(EveryPolicy, the_largest_request_finishes_in_a_pool_it_fills_exactly) {
  WorldOptions options = world_of(GetParam(), 32);
  options.limits.block_count = 24;
  World world(options);
  const SequenceId whole = world.add({.prompt_tokens = 200, .max_new_tokens = 184});  // 384 = 24 x 16
  world.step();
  world.add({.prompt_tokens = 30, .max_new_tokens = 60});
  world.drain(1000);
  EXPECT_EQ(world.stream(whole).sampled, 184);
  EXPECT_EQ(world.stream(whole).preemptions, 0);
}

// B008. With no reserve, eight prompts of 6 blocks start in 24 blocks and then grow to 16 each.
TEST_P(EveryPolicy, preemption_always_leaves_somebody_going_on) {
  for (const std::int32_t reserve : {0, 16, default_growth_reserve_tokens}) {
    WorldOptions options = world_of(GetParam(), 32);
    options.limits.block_count = 24;
    options.limits.growth_reserve_tokens = reserve;
    World world(options);
    for (int i = 0; i < 8; ++i) world.add({.prompt_tokens = 96, .max_new_tokens = 160});
    std::int32_t sampled = 0;
    std::uint64_t last_progress = 0;
    while (!world.scheduler().idle()) {
      ASSERT_LT(world.steps(), 5000u);
      world.step();
      std::int32_t sum = 0;
      for (const auto& [id, stream] : world.streams()) sum += stream.sampled;
      if (sum > sampled) last_progress = world.steps();
      sampled = sum;
      ASSERT_LE(world.steps() - last_progress, 100u) << "no token in 100 steps";
    }
    EXPECT_EQ(sampled, 8 * 160);
    for (const auto& [id, stream] : world.streams()) EXPECT_LE(stream.preemptions, 4) << "sequence " << id.value;
    const std::uint64_t preemptions = world.scheduler().counts().preemptions;
    EXPECT_EQ(preemptions == 0, reserve == default_growth_reserve_tokens) << "reserve " << reserve;
  }
}

TEST(SchedulerPool, the_youngest_is_preempted_and_the_oldest_never) {
  WorldOptions options = world_of(PriorityPolicy::DecodeFirst, 128);
  options.limits.block_count = 8;
  options.limits.growth_reserve_tokens = 0;
  World world(options);
  const SequenceId oldest = world.add({.prompt_tokens = 30, .max_new_tokens = 90});
  const SequenceId middle = world.add({.prompt_tokens = 30, .max_new_tokens = 60});
  const SequenceId youngest = world.add({.prompt_tokens = 30, .max_new_tokens = 60});
  std::vector<SequenceId> preempted;
  world.on_plan = [&](const StepPlan& plan) { preempted.insert(preempted.end(), plan.preempted.begin(), plan.preempted.end()); };
  world.drain(1000);
  ASSERT_FALSE(preempted.empty());
  EXPECT_EQ(preempted.front(), youngest);
  EXPECT_EQ(world.stream(oldest).preemptions, 0);
  EXPECT_GE(world.stream(middle).ended_at_step, world.stream(oldest).added_at_step);
}

TEST(SchedulerPool, admission_waits_for_input_growth_of_all_and_watermark) {
  WorldOptions options = world_of(PriorityPolicy::DecodeFirst, 512);
  options.limits.block_count = 100;
  World world(options);
  // Wants 2 + 30 = 32 blocks each; three fit beside the watermark of one, four do not.
  for (int i = 0; i < 4; ++i) world.add({.prompt_tokens = 32, .max_new_tokens = 481});
  world.step();
  EXPECT_EQ(world.scheduler().counts().running, 3);
  EXPECT_EQ(world.scheduler().counts().waiting, 1);
  EXPECT_EQ(world.scheduler().counts().free_blocks, 100 - 3 * 2);
}

TEST(SchedulerPool, first_come_first_served_is_not_overtaken_at_the_pool) {
  WorldOptions options = world_of(PriorityPolicy::DecodeFirst, 512);
  options.limits.block_count = 64;
  World world(options);
  world.add({.prompt_tokens = 500, .max_new_tokens = 20});
  world.step();
  const SequenceId large = world.add({.prompt_tokens = 600, .max_new_tokens = 10});
  const SequenceId small = world.add({.prompt_tokens = 20, .max_new_tokens = 2});
  for (int i = 0; i < 5; ++i) world.step();
  EXPECT_FALSE(world.stream(small).running || world.stream(small).ended);
  world.drain(200);
  EXPECT_LE(*world.stream(large).first_token - world.stream(large).arrival,
            *world.stream(small).last_token - world.stream(small).arrival);
}

TEST(SchedulerPool, a_large_request_is_not_held_out_by_a_stream_of_small_ones) {
  for (const PriorityPolicy policy : {PriorityPolicy::ShortestFirst, PriorityPolicy::Deadline}) {
    WorldOptions options = world_of(policy, 128);
    options.limits.block_count = 40;
    World world(options);
    world.add({.prompt_tokens = 20, .max_new_tokens = 40});
    world.step();
    const SequenceId large = world.add({.prompt_tokens = 600, .max_new_tokens = 4});
    while (!world.stream(large).ended && world.steps() < 400) {
      if (world.live().size() < 6) world.add({.prompt_tokens = 20, .max_new_tokens = 40, .ttft_target = milliseconds(100)});
      world.step();
    }
    EXPECT_TRUE(world.stream(large).ended) << name_of(policy);
  }
}

TEST(SchedulerPool, small_requests_pass_a_large_one_that_does_not_fit_yet) {
  WorldOptions options = world_of(PriorityPolicy::ShortestFirst, 512);
  options.limits.block_count = 64;
  World world(options);
  world.add({.prompt_tokens = 500, .max_new_tokens = 100});
  world.step();
  world.add({.prompt_tokens = 500, .max_new_tokens = 100});
  const SequenceId small = world.add({.prompt_tokens = 20, .max_new_tokens = 2});
  world.step();
  EXPECT_TRUE(world.stream(small).first_token.has_value());
}

// --- Live settings ---

TEST_P(EveryPolicy, lowering_max_num_seqs_drains_and_kills_nobody) {
  World world(world_of(GetParam(), 64));
  for (int i = 0; i < 8; ++i) world.add({.prompt_tokens = 16, .max_new_tokens = 30 + 5 * i});
  run_to_decodes(world);
  world.set(knobs_of(GetParam(), 64, 2));
  const SequenceId late = world.add({.prompt_tokens = 16, .max_new_tokens = 3});
  while (world.scheduler().counts().running >= 2) {
    EXPECT_FALSE(world.stream(late).running);
    world.step();
    ASSERT_LT(world.steps(), 500u);
  }
  world.drain(500);
  for (const auto& [id, stream] : world.streams()) EXPECT_EQ(stream.sampled, stream.options.max_new_tokens);
}

TEST(SchedulerSettings, are_clamped_to_the_limits_and_read_back) {
  World world(world_of(PriorityPolicy::DecodeFirst, 64));
  world.set({.max_num_batched_tokens = -3, .max_num_seqs = 1000, .deadline_margin = 500});
  EXPECT_EQ(world.scheduler().settings().knobs.max_num_batched_tokens, 1);
  EXPECT_EQ(world.scheduler().settings().knobs.max_num_seqs, 8);
  EXPECT_LT(world.scheduler().settings().knobs.deadline_margin, 100);
}

// B002: the knob acts in the direction the tuner assumes, and at the next step.
TEST(SchedulerSettings, a_smaller_budget_means_smaller_gaps_and_a_later_first_token) {
  std::vector<Duration> gaps;
  std::vector<Duration> first_tokens;
  for (const std::int32_t budget : {64, 256, 1024, 4096}) {
    WorldOptions options = world_of(PriorityPolicy::DecodeFirst, budget);
    options.limits.max_model_len = 8192;
    World world(options);
    world.cost = [](const StepFeatures& features) { return from_seconds(1e-3 + 20e-6 * features.tokens); };
    const SequenceId stream = world.add({.prompt_tokens = 16, .max_new_tokens = 2000});
    run_to_decodes(world);
    const SequenceId prompt = world.add({.prompt_tokens = 4096, .max_new_tokens = 1});
    while (!world.stream(prompt).ended) world.step();
    gaps.push_back(world.stream(stream).largest_gap);
    first_tokens.push_back(*world.stream(prompt).first_token - world.stream(prompt).arrival);
  }
  EXPECT_TRUE(std::is_sorted(gaps.begin(), gaps.end()));
  EXPECT_GT(gaps.back(), 10 * gaps.front());
  EXPECT_GT(first_tokens.front(), first_tokens.back() * 3 / 2);
  EXPECT_TRUE(std::is_sorted(first_tokens.begin(), first_tokens.end(), std::greater<>()));
}

TEST_P(EveryPolicy, a_lower_budget_binds_a_half_prefilled_prompt_at_the_next_step) {
  World world(world_of(GetParam(), 2048));
  const SequenceId id = world.add({.prompt_tokens = 4000, .max_new_tokens = 1});
  world.step();
  ASSERT_GT(world.stream(id).computed, 1000);
  const std::int32_t before = world.stream(id).computed;
  world.set(knobs_of(GetParam(), 64));
  world.step();
  EXPECT_LE(world.stream(id).computed - before, 64);
  EXPECT_GT(world.stream(id).computed, before);
  world.drain(200);
}

// --- Cancels (B011) and abandoned steps ---

TEST_P(EveryPolicy, a_cancel_at_any_stage_frees_everything_once) {
  WorldOptions options = world_of(GetParam(), 32);
  options.limits.block_count = 16;
  options.limits.growth_reserve_tokens = 0;
  World world(options);
  const SequenceId queued = world.add({.prompt_tokens = 50, .max_new_tokens = 40});
  world.cancel(queued);
  EXPECT_TRUE(world.scheduler().idle());

  const SequenceId half = world.add({.prompt_tokens = 100, .max_new_tokens = 4});
  world.step();
  ASSERT_GT(world.stream(half).computed, 0);
  world.cancel(half);
  EXPECT_EQ(world.scheduler().counts().free_blocks, 16);

  const SequenceId decoding = world.add({.prompt_tokens = 16, .max_new_tokens = 50});
  run_to_decodes(world);
  world.cancel(decoding);
  EXPECT_EQ(world.scheduler().counts().free_blocks, 16);

  for (int i = 0; i < 4; ++i) world.add({.prompt_tokens = 40, .max_new_tokens = 100});
  std::optional<SequenceId> preempted;
  world.on_plan = [&](const StepPlan& plan) {
    if (!plan.preempted.empty()) preempted = plan.preempted.front();
  };
  while (!preempted) {
    world.step();
    ASSERT_LT(world.steps(), 500u);
  }
  world.cancel(*preempted);
  world.scheduler().check_integrity();
  EXPECT_FALSE(world.scheduler().cancel(SequenceId{123456}));
  world.drain(1000);
  EXPECT_FALSE(world.scheduler().cancel(half)) << "long after its end";
}

TEST_P(EveryPolicy, an_abandoned_step_computed_nothing_and_is_planned_again) {
  World world(world_of(GetParam(), 64));
  world.add({.prompt_tokens = 100, .max_new_tokens = 20});
  world.step();
  Scheduler& scheduler = world.scheduler();
  const StepPlan& plan = scheduler.plan(world.now());
  const std::vector<PlannedRow> rows = plan.rows;
  const std::uint64_t number = plan.step_number;
  scheduler.abandon();
  scheduler.check_integrity();
  const StepPlan& again = scheduler.plan(world.now());
  EXPECT_EQ(again.step_number, number + 1);
  ASSERT_EQ(again.rows.size(), rows.size());
  EXPECT_EQ(again.rows[0].begin, rows[0].begin);
  EXPECT_EQ(again.rows[0].count, rows[0].count);
  scheduler.abandon();
  EXPECT_EQ(scheduler.step_time().observation_count(), 1u);
  world.drain(100);
}

TEST(SchedulerDeathTest, plans_and_completions_alternate) {
  World world(world_of(PriorityPolicy::DecodeFirst, 64));
  const SequenceId id = world.add({.prompt_tokens = 10, .max_new_tokens = 20});
  Scheduler& scheduler = world.scheduler();
  EXPECT_DEATH(scheduler.complete({}, world.now(), milliseconds(1)), "without a plan");
  EXPECT_DEATH(scheduler.abandon(), "without a plan");
  scheduler.plan(world.now());
  EXPECT_DEATH(scheduler.plan(world.now()), "before the last step");
  EXPECT_DEATH(scheduler.complete({}, world.now(), milliseconds(1)), "is not for sequence");
  EXPECT_DEATH((void)world.try_add(id, {.prompt_tokens = 1, .max_new_tokens = 1}), "already here");
}

TEST(SchedulerTest, one_cancelled_within_a_step_ends_when_the_step_is_booked) {
  World world(world_of(PriorityPolicy::DecodeFirst, 64));
  const SequenceId chunk = world.add({.prompt_tokens = 100, .max_new_tokens = 20});
  Scheduler& scheduler = world.scheduler();
  const StepPlan& plan = scheduler.plan(world.now());
  ASSERT_EQ(plan.rows.size(), 1u);
  ASSERT_FALSE(plan.rows[0].samples);
  EXPECT_TRUE(scheduler.cancel(chunk));
  EXPECT_FALSE(scheduler.cancel(chunk)) << "a second cancel of the same";
  EXPECT_LT(scheduler.counts().free_blocks, scheduler.counts().block_count) << "the step still uses them";
  scheduler.complete({}, world.now(), milliseconds(1));
  EXPECT_EQ(scheduler.counts().free_blocks, scheduler.counts().block_count);
  EXPECT_TRUE(scheduler.idle());
  scheduler.check_integrity();
}

// --- Counts ---

TEST(SchedulerCountsTest, say_who_waits_and_who_runs_and_for_how_long) {
  World world(world_of(PriorityPolicy::DecodeFirst, 64, 1));
  EXPECT_EQ(world.scheduler().oldest_wait(world.now()), Duration::zero());
  world.add({.prompt_tokens = 100, .max_new_tokens = 20});
  world.step();
  EXPECT_EQ(world.scheduler().counts().prefilling, 1);
  EXPECT_EQ(world.scheduler().oldest_wait(world.now()), Duration::zero());
  world.add({.prompt_tokens = 100, .max_new_tokens = 20});
  world.advance(milliseconds(70));
  EXPECT_EQ(world.scheduler().oldest_wait(world.now()), milliseconds(70));
  world.step();
  EXPECT_EQ(world.scheduler().counts().running, 1);
  EXPECT_EQ(world.scheduler().counts().waiting, 1);
  EXPECT_EQ(world.scheduler().counts().prefilling, 0);
  EXPECT_EQ(world.scheduler().counts().free_blocks, 1024 - 7);
}

}  // namespace
}  // namespace rubato::policies
