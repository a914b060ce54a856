// SPDX-License-Identifier: Apache-2.0
// Workers run every task exactly once, also when operations follow one another faster than threads wake.
#include "engine/cpu/workers.h"

#include <gtest/gtest.h>

#include <atomic>
#include <ctime>
#include <vector>

namespace rubato::engine {
namespace {

TEST(Workers, every_task_runs_once_under_a_valid_worker) {
  for (const std::int32_t threads : {1, 2, 5}) {
    Workers workers(threads);
    EXPECT_EQ(workers.thread_count(), threads);
    std::vector<std::atomic<int>> runs(1000);
    std::atomic<bool> valid{true};
    workers.run(1000, [&](std::int32_t task, std::int32_t worker) {
      runs[static_cast<std::size_t>(task)].fetch_add(1);
      if (worker < 0 || worker >= threads) valid = false;
    });
    for (const std::atomic<int>& count : runs) EXPECT_EQ(count.load(), 1);
    EXPECT_TRUE(valid);
  }
}

TEST(Workers, writes_of_all_tasks_are_visible_after_run) {
  Workers workers(4);
  std::vector<std::int64_t> cells(64);
  for (std::int64_t round = 1; round <= 3000; ++round) {
    workers.run(static_cast<std::int32_t>(1 + round % 64),
                [&](std::int32_t task, std::int32_t) { cells[static_cast<std::size_t>(task)] = round; });
    for (std::size_t i = 0; i < static_cast<std::size_t>(1 + round % 64); ++i) ASSERT_EQ(cells[i], round);
  }
}

TEST(Workers, no_task_means_no_call) {
  Workers workers(2);
  bool called = false;
  workers.run(0, [&](std::int32_t, std::int32_t) { called = true; });
  EXPECT_FALSE(called);
}

TEST(Workers, an_idle_pool_uses_no_processor_time) {
  Workers workers(3);
  workers.run(8, [](std::int32_t, std::int32_t) {});
  const auto cpu_time = [] {
    timespec now{};
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
    return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
  };
  const double before = cpu_time();
  timespec wait{.tv_sec = 0, .tv_nsec = 200'000'000};
  nanosleep(&wait, nullptr);  // the subject is what happens while nothing does
  EXPECT_LT(cpu_time() - before, 0.02);
}

}  // namespace
}  // namespace rubato::engine
