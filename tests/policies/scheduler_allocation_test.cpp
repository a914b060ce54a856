// SPDX-License-Identifier: Apache-2.0
// plan() and complete() allocate nothing once the scheduler stands, with thousands waiting and under preemption too. Counts every
// call of operator new in this executable.
#include <gtest/gtest.h>

#include "tests/policies/scheduler_harness.h"
#include "tests/support/counted_allocations.h"

namespace rubato::policies {
namespace {

TEST(SchedulerAllocation, the_counter_counts) {
  const std::uint64_t before = test::allocations;
  std::vector<int> something(100, 1);
  EXPECT_GT(test::allocations, before);
  EXPECT_EQ(something.size(), 100u);
}

TEST(SchedulerAllocation, planning_and_completing_allocate_nothing) {
  for (const PriorityPolicy policy : all_policies) {
    const SchedulerLimits limits{
        .max_model_len = 2048, .max_num_seqs = 64, .max_waiting = 3000, .block_count = 1500, .growth_reserve_tokens = 0};
    Scheduler scheduler(limits,
                        {.number = 1, .knobs = {.max_num_batched_tokens = 256, .max_num_seqs = 64, .priority_policy = policy}});
    TimePoint now{std::chrono::seconds(1)};
    std::vector<RowOutcome> outcomes;
    outcomes.reserve(64);
    std::vector<std::int32_t> left(4000, 0);
    for (std::uint64_t id = 0; id < 3000; ++id) {
      const auto output = static_cast<std::int32_t>(1 + id * 37 % 700);
      left[id] = output;
      ASSERT_TRUE(scheduler.add({.id = SequenceId{id},
                                 .arrival = now,
                                 .prompt_tokens = static_cast<std::int32_t>(1 + id * 101 % 900),
                                 .max_new_tokens = output,
                                 .ttft_target = std::chrono::milliseconds(id * 7919 % 5000),
                                 .itl_target = std::chrono::milliseconds(50)}));
    }
    const std::uint64_t before = test::allocations;
    for (int step = 0; step < 3000; ++step) {
      if (step % 500 == 250) {
        scheduler.apply(
            {.number = 2, .knobs = {.max_num_batched_tokens = 100 + step % 400, .max_num_seqs = 64, .priority_policy = policy}});
      }
      const StepPlan& plan = scheduler.plan(now);
      outcomes.clear();
      for (const PlannedRow& row : plan.rows) {
        if (row.samples) outcomes.push_back({.id = row.id, .finished = --left[row.id.value] == 0});
      }
      now += std::chrono::milliseconds(3);
      scheduler.complete(outcomes, now, std::chrono::milliseconds(3));
    }
    EXPECT_EQ(test::allocations - before, 0u) << name_of(policy);
    EXPECT_GT(scheduler.counts().preemptions, 0u) << name_of(policy);
    EXPECT_GT(scheduler.counts().waiting, 1000) << name_of(policy);
  }
}

}  // namespace
}  // namespace rubato::policies
