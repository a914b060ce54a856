// SPDX-License-Identifier: Apache-2.0
// The gate between two lanes' threads: workers beyond a lane's cores stop at their next task, a lane without a core waits until
// it has one, and nobody spins or hangs meanwhile.
#include "engine/cpu/core_gate.h"

#include <gtest/gtest.h>

#include <atomic>
#include <thread>
#include <vector>

#include "engine/cpu/workers.h"

namespace rubato::engine::cpu {
namespace {

/// Time that tests move.
struct HandClock {
  std::atomic<TimePoint::rep> now{1};
  [[nodiscard]] CoreGate::Clock read() {
    return [this] { return TimePoint(Duration(now.load())); };
  }
};

TEST(CoreGate, workers_beyond_a_lanes_cores_stop_at_their_next_task) {
  HandClock clock;
  CoreGate gate(4, clock.read());
  Workers workers(4, {.gate = &gate, .side = Side::First});
  gate.begin(Side::First);
  std::atomic<int> started{0};
  std::atomic<int> arrived{0};
  std::atomic<bool> sibling{false};
  std::array<std::atomic<int>, 4> begun{};
  std::array<std::atomic<int>, 4> begun_beside{};
  workers.run(4000, [&](std::int32_t, std::int32_t worker) {
    const auto index = static_cast<std::size_t>(worker);
    if (sibling.load()) ++begun_beside[index];
    if (begun[index]++ == 0) {
      ++arrived;
      while (arrived < 4) std::this_thread::yield();  // all four are at work before the sibling begins
    }
    if (++started == 400) {
      gate.begin(Side::Second);
      sibling = true;
    }
    std::this_thread::yield();  // on few processors, lets every worker claim
  });
  // Equal shares of four cores: workers 2 and 3 may each have claimed one task before the sibling began.
  EXPECT_LE(begun_beside[2], 1);
  EXPECT_LE(begun_beside[3], 1);
  EXPECT_GT(begun_beside[0] + begun_beside[1], 3000);
  EXPECT_EQ(started, 4000);
  gate.end(Side::Second);
  std::atomic<int> done{0};
  workers.run(500, [&](std::int32_t, std::int32_t) { ++done; });
  EXPECT_EQ(done, 500);
  gate.end(Side::First);
}

TEST(CoreGate, workers_come_back_within_an_operation_once_the_other_step_ends) {
  HandClock clock;
  CoreGate gate(2, clock.read());
  Workers workers(2, {.gate = &gate, .side = Side::First});
  gate.begin(Side::Second);
  gate.begin(Side::First);
  std::atomic<int> caller{0};
  std::atomic<int> helper{0};
  bool ended = false;
  workers.run(1 << 19, [&](std::int32_t, std::int32_t worker) {
    if (worker == 1) {
      ++helper;
    } else if (!ended && ++caller == 100) {
      EXPECT_EQ(helper, 0);
      gate.end(Side::Second);
      ended = true;
      while (helper == 0) std::this_thread::yield();  // ends because the helper is woken within this operation
    }
  });
  EXPECT_GT(helper, 0);
  gate.end(Side::First);
}

TEST(CoreGate, on_one_core_a_lane_waits_for_its_turn_and_for_the_end_of_the_others_step) {
  HandClock clock;
  CoreGate gate(1, clock.read());
  gate.begin(Side::First);
  std::atomic<int> stage{0};
  std::thread second([&] {
    gate.begin(Side::Second);
    stage = 1;
    gate.pass(Side::Second);
    stage = 2;
    while (stage != 3) std::this_thread::yield();
    clock.now += 2 * Duration(CoreShare::round).count();
    gate.pass(Side::Second);  // its turn is over: waits until the first has had one, or has ended
    stage = 4;
    gate.end(Side::Second);
  });
  while (stage < 1) std::this_thread::yield();
  gate.pass(Side::First);  // still its turn
  EXPECT_EQ(stage, 1);
  clock.now += Duration(CoreShare::round).count();
  EXPECT_FALSE(gate.admits(Side::First, 0));
  while (stage != 2) std::this_thread::yield();
  stage = 3;
  while (!gate.admits(Side::First, 0)) std::this_thread::yield();
  EXPECT_EQ(stage, 3);
  gate.end(Side::First);
  second.join();
  EXPECT_EQ(stage, 4);
}

TEST(CoreGate, a_waiting_lane_finds_a_new_share_by_itself) {
  HandClock clock;
  CoreGate gate(2, clock.read());
  gate.use_share(Side::Second, 10);
  gate.begin(Side::First);
  gate.begin(Side::Second);
  std::thread second([&] { gate.pass(Side::Second); });  // a fraction of a core, and not its turn
  gate.use_share(Side::Second, 50);                      // a core of its own; the first does not look
  second.join();
  EXPECT_TRUE(gate.admits(Side::Second, 0));
  EXPECT_FALSE(gate.admits(Side::First, 1));
}

TEST(CoreGate, shares_complement_each_other) {
  CoreGate gate(2, {});
  EXPECT_EQ(gate.share(Side::First), 50);
  gate.use_share(Side::Second, 80);
  EXPECT_EQ(gate.share(Side::First), 20);
  EXPECT_EQ(gate.share(Side::Second), 80);
}

TEST(CoreGate, workers_that_have_no_core_can_be_stopped) {
  for (int i = 0; i < 50; ++i) {
    CoreGate gate(3, {});
    gate.begin(Side::Second);
    Workers workers(3, {.gate = &gate, .side = Side::First});
    gate.end(Side::Second);
    gate.begin(Side::Second);
  }
}

TEST(CoreGate, two_lanes_that_hand_one_core_to_and_fro_both_finish_without_a_clock) {
  for (const std::int32_t threads : {1, 2, 3}) {
    CoreGate gate(threads, {});
    gate.use_share(Side::First, 30);
    std::array<std::int64_t, 2> sums{};
    const auto lane = [&](Side side) {
      Workers workers(threads, {.gate = &gate, .side = side});
      for (int step = 0; step < 40; ++step) {
        gate.begin(side);
        for (int operation = 0; operation < 10; ++operation) {
          std::vector<std::int64_t> cells(50);
          workers.run(50, [&](std::int32_t task, std::int32_t) { cells[static_cast<std::size_t>(task)] = task; });
          for (const std::int64_t cell : cells) sums[index_of(side)] += cell;
        }
        gate.end(side);
      }
    };
    std::thread first(lane, Side::First);
    std::thread second(lane, Side::Second);
    first.join();
    second.join();
    EXPECT_EQ(sums[0], 40 * 10 * 1225);
    EXPECT_EQ(sums[1], 40 * 10 * 1225);
  }
}

}  // namespace
}  // namespace rubato::engine::cpu
