// SPDX-License-Identifier: Apache-2.0
// plan() and complete() allocate nothing once the scheduler stands, with thousands waiting and under preemption too; nor do lane
// groups while sequences move between lanes and are copied between pools. Counts every call of operator new in this executable.
#include <gtest/gtest.h>

#include "policies/lane_group.h"
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

// Of a prompt: the first half as those of the same family, the rest its own.
std::vector<BlockHash> prefix_of(std::uint64_t id, std::int32_t prompt_tokens) {
  Text text;
  fit(text, prompt_tokens / 2, 5000 + id % 7);
  fit(text, prompt_tokens, id);
  return hashes_of(text);
}

// One of a block that an output fills; no two are alike.
std::optional<BlockHash> filled_by(std::uint64_t id, std::int32_t known) {
  if (known % kv_block_tokens != 0) return std::nullopt;
  return BlockHash{.high = id + 1, .low = static_cast<std::uint64_t>(known) * 0x9E3779B97F4A7C15U};
}

void plan_and_complete(const ModelShape& model) {
  for (const PriorityPolicy policy : all_policies) {
    SchedulerLimits limits{
        .max_model_len = 2048, .max_num_seqs = 64, .max_waiting = 3000, .block_count = 1500, .growth_reserve_tokens = 0};
    shape_limits(model, limits, [](std::int32_t /*low*/, std::int32_t high) { return high; });
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
                                 .itl_target = std::chrono::milliseconds(50),
                                 .prefix = prefix_of(id, static_cast<std::int32_t>(1 + id * 101 % 900))}));
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
        if (!row.samples) continue;
        outcomes.push_back(
            {.id = row.id, .finished = --left[row.id.value] == 0, .filled = filled_by(row.id.value, row.begin + row.count + 1)});
      }
      now += std::chrono::milliseconds(3);
      scheduler.complete(outcomes, now, std::chrono::milliseconds(3));
    }
    EXPECT_EQ(test::allocations - before, 0u) << name_of(policy);
    EXPECT_TRUE(scheduler.counts().preemptions > 0u || model.few_states) << name_of(policy);
    EXPECT_GT(scheduler.counts().waiting, 1000) << name_of(policy);
    EXPECT_TRUE(scheduler.counts().prefix_hits > 0 || !model.caching || model.few_states) << name_of(policy);
  }
}

TEST(SchedulerAllocation, planning_and_completing_allocate_nothing) {
  for (const ModelShape& model : all_models) {
    SCOPED_TRACE(model.name);
    plan_and_complete(model);
  }
}

// Lanes side by side under load, with changes of mode, roles and reservation, copies that fail, and leases.
struct GroupLife {
  explicit GroupLife(const LaneGroupLimits& limits_in)
      : limits(limits_in), group(limits, {.number = 1, .knobs = knobs(0)}), plans(static_cast<std::size_t>(group.lane_count())) {
    outcomes.reserve(64);
    left.reserve(1000);
    for (std::uint64_t id = 0; id < 1000; ++id) {
      left.push_back(static_cast<std::int32_t>(1 + id * 37 % 300));
      EXPECT_TRUE(group.add({.id = SequenceId{id},
                             .arrival = now,
                             .prompt_tokens = static_cast<std::int32_t>(1 + id * 101 % 900),
                             .max_new_tokens = left.back(),
                             .prefix = prefix_of(id, static_cast<std::int32_t>(1 + id * 101 % 900))}));
    }
  }

  static KnobValues knobs(int change) {
    return {.max_num_batched_tokens = 256,
            .max_num_seqs = 32,
            .priority_policy = all_policies[change % 4],
            .mode = change % 3 == 2 ? Mode::Chunked : Mode::Disaggregated,
            .reservation = static_cast<Reservation>(change % 3),
            .prefill_devices = 1 + change % 2};
  }

  void step(int number) {
    if (number % 50 == 49) group.apply({.number = 2, .knobs = knobs(number / 50)}, now);
    for (std::int32_t lane = 0; lane < group.lane_count(); ++lane) {
      const StepPlan& plan = group.plan(LaneIndex{lane}, now);
      plans[static_cast<std::size_t>(lane)] = plan.empty() ? nullptr : &plan;
    }
    while (const std::optional<CopyOrder> order = group.next_copy(now)) {
      if (order->epoch % 50 == 0) continue;  // is lost
      group.copied(order->epoch, order->epoch % 9 == 0 ? failed : Result<void>{}, now);
    }
    now += std::chrono::milliseconds(30);
    for (std::int32_t lane = 0; lane < group.lane_count(); ++lane) {
      const StepPlan* plan = plans[static_cast<std::size_t>(lane)];
      if (plan == nullptr) continue;
      outcomes.clear();
      for (const PlannedRow& row : plan->rows) {
        if (!row.samples) continue;
        outcomes.push_back(
            {.id = row.id, .finished = --left[row.id.value] == 0, .filled = filled_by(row.id.value, row.begin + row.count + 1)});
      }
      group.complete(LaneIndex{lane}, outcomes, now, std::chrono::milliseconds(3));
    }
    group.expire(now);
  }

  LaneGroupLimits limits;
  LaneGroup group;
  std::vector<const StepPlan*> plans;
  std::vector<RowOutcome> outcomes;
  std::vector<std::int32_t> left;
  const Result<void> failed = unexpected(ErrorCode::Unavailable, "down");
  TimePoint now{std::chrono::seconds(1)};
};

void move_and_copy(const ModelShape& model) {
  for (const std::int32_t devices : {1, 3}) {
    LaneGroupLimits limits;
    limits.each = {
        .max_model_len = 2048, .max_num_seqs = 32, .max_waiting = 1000, .block_count = 700, .growth_reserve_tokens = 0};
    shape_limits(model, limits.each, [](std::int32_t /*low*/, std::int32_t high) { return high; });
    limits.devices = devices;
    limits.lanes_per_device = devices == 1 ? 2 : 1;
    limits.handoff_lease = std::chrono::milliseconds(100);
    limits.lockstep = Lockstep::Aligned;
    GroupLife life(limits);
    const std::uint64_t before = test::allocations;
    for (int number = 0; number < 1500; ++number) life.step(number);
    EXPECT_EQ(test::allocations - before, 0u) << devices << " devices";
    EXPECT_TRUE(devices == 1 || life.group.handoffs().failed > (model.few_states ? 1u : 10u));
    EXPECT_GT(devices == 1 ? life.group.handoffs().moved : life.group.handoffs().copied, model.few_states ? 20u : 100u);
    EXPECT_TRUE(life.group.totals().preemptions > 0u || model.few_states);
    EXPECT_TRUE(life.group.totals().prefix_hits > 0 || !model.caching || model.few_states);
    life.group.check_integrity();
  }
}

TEST(SchedulerAllocation, lanes_move_and_copy_sequences_without_allocating) {
  for (const ModelShape& model : all_models) {
    SCOPED_TRACE(model.name);
    move_and_copy(model);
  }
}

}  // namespace
}  // namespace rubato::policies
