// SPDX-License-Identifier: Apache-2.0
// A scheduler that starts with a step-time model learnt elsewhere, and steps whose duration nobody knows.
#include <gtest/gtest.h>

#include "policies/lane_group.h"
#include "tests/policies/scheduler_harness.h"

namespace rubato::policies {
namespace {

using std::chrono::milliseconds;

constexpr StepTimeModel::Vector machine{2e-3, 40e-6, 3e-9, 20e-6, 2e-7};

StepTimeModel learnt() {
  return StepTimeModel::from_coefficients(machine, std::chrono::microseconds(100));
}

Settings deadline_settings() {
  return {.number = 1, .knobs = {.max_num_batched_tokens = 4096, .max_num_seqs = 8, .priority_policy = PriorityPolicy::Deadline}};
}

SequenceRequest request(std::uint64_t id, std::int32_t prompt_tokens) {
  return {.id = SequenceId{id},
          .arrival = TimePoint(std::chrono::seconds(1)),
          .prompt_tokens = prompt_tokens,
          .max_new_tokens = 100,
          .ttft_target = std::chrono::seconds(10),
          .itl_target = milliseconds(20)};
}

TEST(AdoptStepTime, the_first_plans_go_by_the_adopted_model) {
  const auto prefill_tokens = [](const StepTimeModel* model) {
    Scheduler scheduler({.max_model_len = 8192, .max_num_seqs = 8, .max_waiting = 8, .block_count = 2048}, deadline_settings());
    if (model != nullptr) scheduler.adopt_step_time(*model);
    TimePoint now(std::chrono::seconds(1));
    EXPECT_TRUE(scheduler.add(request(1, 16)));
    EXPECT_EQ(scheduler.plan(now).rows.size(), 1u);
    const std::vector<RowOutcome> outcome{{.id = SequenceId{1}}};
    scheduler.complete(outcome, now, Duration::zero());
    EXPECT_TRUE(scheduler.add(request(2, 4000)));
    const StepPlan& plan = scheduler.plan(now);
    EXPECT_EQ(plan.rows.size(), 2u);
    return plan.rows.back().count;
  };
  const StepTimeModel model = learnt();
  EXPECT_EQ(prefill_tokens(nullptr), 4000) << "one that knows nothing takes the prompt as it is";
  const std::int32_t fitting = prefill_tokens(&model);
  EXPECT_GT(fitting, 300);
  EXPECT_LT(fitting, 450) << "20 ms hold so many tokens";
}

TEST(AdoptStepTime, lanes_learn_on_from_the_adopted_model_each_by_itself) {
  LaneGroup group({.each = {.max_model_len = 4096, .max_num_seqs = 8, .max_waiting = 8, .block_count = 1024}, .devices = 2},
                  deadline_settings());
  group.adopt_step_time(LaneIndex{1}, learnt());
  EXPECT_EQ(group.step_time(LaneIndex{1}).coefficients(), machine);
  EXPECT_EQ(group.step_time(LaneIndex{0}).observation_count(), 0u);
  ASSERT_TRUE(group.add(request(1, 100)));
  const TimePoint now(std::chrono::seconds(1));
  for (const LaneIndex lane : {LaneIndex{0}, LaneIndex{1}}) {
    if (group.plan(lane, now).empty()) continue;
    group.adopt_step_time(lane, learnt());  // also while a step is open
    const std::vector<RowOutcome> outcome{{.id = SequenceId{1}}};
    group.complete(lane, outcome, now, milliseconds(9));
    EXPECT_EQ(group.step_time(lane).observation_count(), learnt().observation_count() + 1);
    EXPECT_NE(group.step_time(lane).coefficients(), machine);
    return;
  }
  FAIL() << "no lane ran the request";
}

TEST(AdoptStepTime, a_step_of_zero_duration_teaches_nothing) {
  Scheduler scheduler({.max_model_len = 4096, .max_num_seqs = 8, .max_waiting = 8, .block_count = 1024}, deadline_settings());
  scheduler.adopt_step_time(learnt());
  ASSERT_TRUE(scheduler.add(request(1, 100)));
  TimePoint now(std::chrono::seconds(1));
  for (int i = 0; i < 10; ++i) {
    ASSERT_FALSE(scheduler.plan(now).empty());
    const std::vector<RowOutcome> outcome{{.id = SequenceId{1}}};
    now += milliseconds(5);
    scheduler.complete(outcome, now, Duration::zero());
  }
  EXPECT_EQ(scheduler.step_time().coefficients(), machine);
  EXPECT_EQ(scheduler.step_time().spread(), learnt().spread());
  EXPECT_EQ(scheduler.step_time().observation_count(), learnt().observation_count());
}

}  // namespace
}  // namespace rubato::policies
