// SPDX-License-Identifier: Apache-2.0
// What the scheduler costs per step: plan() and complete() by policy, running decodes and waiting requests. A plan has 100 us at
// 256 running sequences, because the lane pays it before every step. served_step is what a simulation pays: a lane group under
// steady load, with requests that arrive, prefill, decode and end; 25 us a step keep the twin 1,000 times faster than its node.
#include <benchmark/benchmark.h>

#include <random>
#include <vector>

#include "policies/lane_group.h"
#include "policies/scheduler.h"

namespace rubato::policies {
namespace {

constexpr std::int32_t most_tokens = 4096;

struct Lane {
  Lane(PriorityPolicy policy, std::int32_t running, std::int32_t waiting, std::int32_t free_slots)
      : scheduler({.max_model_len = most_tokens,
                   .max_num_seqs = running + free_slots,
                   .max_waiting = waiting + running,
                   .block_count = (running + free_slots) * most_tokens / kv_block_tokens * 2},
                  {.number = 1,
                   .knobs = {.max_num_batched_tokens = running + free_slots + 512,
                             .max_num_seqs = running + free_slots,
                             .priority_policy = policy}}) {
    for (std::int32_t i = 0; i < running; ++i) add(1 + static_cast<std::int32_t>(random() % 512), 2048);
    while (scheduler.counts().prefilling > 0 || scheduler.counts().waiting > 0) step();
    for (std::int32_t i = 0; i < waiting; ++i) add(1 + static_cast<std::int32_t>(random() % 2048), 1024);
    for (std::int32_t i = 0; i < 8; ++i) step();
  }

  void add(std::int32_t prompt, std::int32_t output) {
    const Result<void> added = scheduler.add({.id = SequenceId{next_id++},
                                              .arrival = now,
                                              .prompt_tokens = prompt,
                                              .max_new_tokens = output,
                                              .ttft_target = std::chrono::milliseconds(500 + random() % 60000),
                                              .itl_target = std::chrono::milliseconds(50)});
    CHECK(added.has_value(), added ? "" : added.error().message);
    now += std::chrono::microseconds(100);
  }

  const StepPlan& plan() { return scheduler.plan(now); }

  void complete(const StepPlan& plan) {
    outcomes.clear();
    for (const PlannedRow& row : plan.rows) {
      if (row.samples) outcomes.push_back({.id = row.id, .finished = false});
    }
    const Duration duration = from_seconds(2e-3 + 10e-6 * plan.features.tokens + 1e-9 * plan.features.attention);
    now += duration;
    scheduler.complete(outcomes, now, duration);
  }

  void step() { complete(plan()); }

  std::mt19937 random{7};
  TimePoint now{std::chrono::seconds(1)};
  std::uint64_t next_id = 1;
  Scheduler scheduler;
  std::vector<RowOutcome> outcomes;
};

// A plan is abandoned, so that the load stays what it is called: nothing is computed, the next plan faces the same work.
void plan_step(benchmark::State& state) {
  Lane lane(static_cast<PriorityPolicy>(state.range(0)), static_cast<std::int32_t>(state.range(1)),
            static_cast<std::int32_t>(state.range(2)), 64);
  std::int64_t rows = 0;
  for (auto unused : state) {
    rows += static_cast<std::int64_t>(lane.plan().rows.size());
    lane.scheduler.abandon();
  }
  state.counters["rows"] = static_cast<double>(rows) / static_cast<double>(state.iterations());
}

// A whole step: plan and complete.
void whole_step(benchmark::State& state) {
  const auto make = [&] {
    return Lane(static_cast<PriorityPolicy>(state.range(0)), static_cast<std::int32_t>(state.range(1)),
                static_cast<std::int32_t>(state.range(2)), 64);
  };
  Lane lane = make();
  std::int32_t left = 512;
  for (auto unused : state) {
    if (--left == 0) {  // before the streams reach their ends
      state.PauseTiming();
      lane = make();
      left = 512;
      state.ResumeTiming();
    }
    lane.step();
  }
}

void cases(benchmark::internal::Benchmark* bench) {
  bench->ArgNames({"policy", "running", "waiting"})->Unit(benchmark::kMicrosecond);
  for (const PriorityPolicy policy :
       {PriorityPolicy::Deadline, PriorityPolicy::DecodeFirst, PriorityPolicy::PrefillFirst, PriorityPolicy::ShortestFirst}) {
    for (const std::int64_t waiting : {0, 256, 4096}) bench->Args({static_cast<std::int64_t>(policy), 256, waiting});
  }
}

BENCHMARK(plan_step)->Apply(cases);
BENCHMARK(whole_step)->Apply(cases);

// As many decodes as asked for, on average: each step brings their share of new prompts.
void served_step(benchmark::State& state) {
  const auto decodes = static_cast<std::int32_t>(state.range(1));
  constexpr std::int32_t outputs = 200;
  LaneGroup group(
      {.each = {.max_model_len = most_tokens, .max_num_seqs = 512, .max_waiting = 4096, .block_count = 65536}},
      {.number = 1,
       .knobs = {
           .max_num_batched_tokens = 8192, .max_num_seqs = 512, .priority_policy = static_cast<PriorityPolicy>(state.range(0))}});
  std::mt19937 random(7);
  TimePoint now{std::chrono::seconds(1)};
  std::uint64_t next_id = 0;
  std::vector<std::int32_t> left;
  std::vector<RowOutcome> outcomes;
  double due = 0;
  const auto step = [&] {
    for (due += static_cast<double>(decodes) / outputs; due >= 1; due -= 1) {
      left.push_back(1 + static_cast<std::int32_t>(random() % (2 * outputs)));
      const Result<void> added = group.add({.id = SequenceId{next_id++},
                                            .arrival = now,
                                            .prompt_tokens = 1 + static_cast<std::int32_t>(random() % 1000),
                                            .max_new_tokens = 1024,
                                            .ttft_target = std::chrono::milliseconds(400),
                                            .itl_target = std::chrono::milliseconds(50)});
      CHECK(added.has_value());
    }
    const StepPlan& plan = group.plan(LaneIndex{0}, now);
    if (plan.empty()) return;
    outcomes.clear();
    for (const PlannedRow& row : plan.rows) {
      if (row.samples) outcomes.push_back({.id = row.id, .finished = --left[row.id.value] == 0});
    }
    const Duration duration = from_seconds(5e-3 + 25e-6 * plan.features.tokens + 1e-8 * plan.features.context);
    now += duration;
    group.complete(LaneIndex{0}, outcomes, now, duration);
  };
  for (int i = 0; i < 4 * outputs; ++i) step();
  for (auto unused : state) step();
  state.counters["running"] = group.totals().running;
}
BENCHMARK(served_step)
    ->ArgNames({"policy", "decodes"})
    ->ArgsProduct({{static_cast<std::int64_t>(PriorityPolicy::Deadline), static_cast<std::int64_t>(PriorityPolicy::DecodeFirst)},
                   {128, 256}})
    ->Unit(benchmark::kMicrosecond);

void observe_step_time(benchmark::State& state) {
  StepTimeModel model;
  std::mt19937 random{7};
  for (auto unused : state) {
    StepFeatures features;
    features.add_chunk(static_cast<std::int32_t>(random() % 2048), 1 + static_cast<std::int32_t>(random() % 512));
    features.add_decode(static_cast<std::int32_t>(random() % 2048));
    model.observe(features, std::chrono::microseconds(1000 + random() % 10000));
    benchmark::DoNotOptimize(model);
  }
}
BENCHMARK(observe_step_time);

}  // namespace
}  // namespace rubato::policies

BENCHMARK_MAIN();
