// SPDX-License-Identifier: Apache-2.0
// The twin keeps to its share of a core on clocks of the test's own, and ends when steps run late because of it, and only then.
#include "daemon/twin_pace.h"

#include <gtest/gtest.h>

#include <random>
#include <vector>

namespace rubato {
namespace {

using namespace std::chrono_literals;

/// A machine on which work takes the thread's time and the wall's, and sleep the wall's alone.
class PaceTest : public ::testing::Test {
 protected:
  TwinPaceHooks hooks() {
    return {.now = [this] { return wall; },
            .thread_time = [this] { return thread; },
            .sleep =
                [this](Duration duration) {
                  wall += duration;
                  longest_sleep = std::max(longest_sleep, duration);
                },
            .stopping = [this] { return stopping; },
            .superseded =
                [this] {
                  ++superseded_asked;
                  return superseded;
                }};
  }
  void work(Duration duration) {
    wall += duration;
    thread += duration;
  }
  /// Works in small pieces until told to end, or for so much of the wall clock.
  void work_for(Duration length) {
    for (const TimePoint end = wall + length; wall < end && pace.go_on();) work(100us);
  }
  void steps(int count, Duration predicted, Duration took) {
    for (int i = 0; i < count; ++i) late.on_step(4, predicted, took);
  }

  TimePoint wall{1000s};
  Duration thread{5s};
  Duration longest_sleep{};
  bool stopping = false;
  bool superseded = false;
  int superseded_asked = 0;
  LateSteps late;
  TwinPace pace{hooks(), late};
};

TEST_F(PaceTest, it_keeps_to_its_share_of_the_core_over_any_half_second) {
  for (const std::int32_t percent : {1, 10, 50, 90, 100}) {
    pace.set_core_percent(percent);
    pace.begin();
    for (int i = 0; i < 6; ++i) {
      const Duration before = thread;
      work_for(500ms);
      EXPECT_NEAR(to_seconds(thread - before), 0.5 * percent / 100, 0.008) << percent << " percent, half second " << i;
    }
    EXPECT_FALSE(pace.stopped()) << percent;
    pace.end();
  }
  EXPECT_LE(longest_sleep, TwinPace::sleep_max);
}

TEST_F(PaceTest, time_that_others_took_is_not_made_up_for_in_a_burst) {
  pace.set_core_percent(50);
  pace.begin();
  work_for(100ms);
  wall += 1s;  // the core was somebody else's
  const Duration before = thread;
  work_for(200ms);
  EXPECT_LE(thread - before, 100ms + TwinPace::unused_max);
}

TEST_F(PaceTest, its_cpu_time_is_that_of_the_decisions_it_worked_in) {
  pace.begin();
  thread += 3s;  // a decision that asks nothing of the twin
  pace.end();
  EXPECT_EQ(pace.cpu_used(), 0s);
  pace.begin();
  const Duration before = thread;
  work_for(400ms);
  pace.end();
  EXPECT_EQ(pace.cpu_used(), thread - before);
  EXPECT_GT(pace.cpu_used(), 100ms);
}

TEST_F(PaceTest, a_stop_is_noticed_within_milliseconds_even_asleep) {
  pace.set_core_percent(1);
  pace.begin();
  EXPECT_TRUE(pace.go_on());
  work(500ms);  // due: 50 s of sleep
  const TimePoint asked = wall;
  stopping = true;
  EXPECT_FALSE(pace.go_on());
  EXPECT_LE(wall - asked, 100ms);
  EXPECT_EQ(pace.stopped(), TwinStop::Stopping);
  stopping = false;
  EXPECT_FALSE(pace.go_on()) << "what has been cut short is not taken up again";
  pace.begin();
  EXPECT_TRUE(pace.go_on());
}

TEST_F(PaceTest, a_stop_in_the_middle_of_a_long_sleep_ends_it) {
  const TimePoint stop_at = wall + 1s;
  TwinPaceHooks own = hooks();
  own.stopping = [&] { return wall >= stop_at; };
  TwinPace slow(own, late);
  slow.set_core_percent(1);
  slow.begin();
  EXPECT_TRUE(slow.go_on());
  work(500ms);
  EXPECT_FALSE(slow.go_on());
  EXPECT_LE(wall, stop_at + 2 * TwinPace::sleep_max);
}

TEST_F(PaceTest, a_changed_question_is_noticed_but_not_asked_about_all_the_time) {
  pace.set_core_percent(100);
  pace.begin();
  work_for(1s);
  EXPECT_LE(superseded_asked, 21);
  EXPECT_GE(superseded_asked, 15);
  superseded = true;
  const TimePoint changed = wall;
  work_for(1s);
  EXPECT_EQ(pace.stopped(), TwinStop::Superseded);
  EXPECT_LE(wall - changed, 60ms);
}

TEST_F(PaceTest, work_without_end_is_ended) {
  pace.set_core_percent(100);
  pace.begin();
  work_for(10 * TwinPace::work_max);
  EXPECT_EQ(pace.stopped(), TwinStop::TimeUp);
}

TEST_F(PaceTest, late_steps_end_the_work_and_hold_it_off_longer_each_time) {
  pace.begin();
  ASSERT_TRUE(pace.go_on());
  std::vector<Duration> held;
  for (int i = 0; i < 7; ++i) {
    steps(LateSteps::late_steps_min, 10ms, 30ms);
    work_for(10ms);
    ASSERT_EQ(pace.stopped(), TwinStop::ServingLate) << i;
    const TimePoint since = wall;
    for (pace.begin(); !pace.go_on(); pace.begin()) {
      ASSERT_EQ(pace.stopped(), TwinStop::HeldOff);
      wall += 100ms;
    }
    held.push_back(wall - since);
  }
  EXPECT_EQ(held, (std::vector<Duration>{2s, 4s, 8s, 16s, 32s, 60s, 60s}));

  pace.end();  // and shorter after work that could finish
  pace.begin();
  ASSERT_TRUE(pace.go_on());
  steps(LateSteps::late_steps_min, 10ms, 30ms);
  work_for(10ms);
  const TimePoint since = wall;
  for (pace.begin(); !pace.go_on(); pace.begin()) wall += 100ms;
  EXPECT_EQ(wall - since, 30s);
}

TEST_F(PaceTest, a_step_of_several_times_its_length_is_enough_by_itself) {
  pace.begin();
  ASSERT_TRUE(pace.go_on());
  steps(1, 20ms, 200ms);
  work_for(10ms);
  EXPECT_EQ(pace.stopped(), TwinStop::ServingLate);
}

TEST_F(PaceTest, steps_that_alone_break_the_itl_target_are_late_where_somebody_decodes) {
  late.set_itl_target(50ms);
  pace.begin();
  ASSERT_TRUE(pace.go_on());
  for (int i = 0; i < LateSteps::late_steps_min; ++i) late.on_step(0, 40ms, 55ms);
  work_for(10ms);
  EXPECT_FALSE(pace.stopped()) << "nobody decodes";
  steps(LateSteps::late_steps_min, 60ms, 70ms);
  work_for(10ms);
  EXPECT_FALSE(pace.stopped()) << "the settings ask for it";
  steps(LateSteps::late_steps_min, 40ms, 55ms);
  work_for(10ms);
  EXPECT_EQ(pace.stopped(), TwinStop::ServingLate);
}

TEST_F(PaceTest, steps_that_run_late_without_the_twin_too_are_not_laid_to_its_charge) {
  std::mt19937_64 draws(7);
  const auto noisy_step = [&] { steps(1, 10ms, draws() % 10 < 4 ? 30ms : 10ms); };
  for (int i = 0; i < 400; ++i) noisy_step();
  pace.begin();
  ASSERT_TRUE(pace.go_on());
  for (int i = 0; i < 200; ++i) {
    noisy_step();
    work_for(5ms);
    ASSERT_FALSE(pace.stopped()) << i;
  }
  steps(LateSteps::steps_looked_at, 10ms, 30ms);
  work_for(5ms);
  EXPECT_EQ(pace.stopped(), TwinStop::ServingLate) << "now it is worse than without";
}

TEST_F(PaceTest, single_late_steps_are_the_machines_own) {
  pace.begin();
  ASSERT_TRUE(pace.go_on());
  for (int i = 0; i < 20; ++i) {
    steps(3, 10ms, 30ms);
    steps(LateSteps::steps_looked_at, 10ms, 10ms);
    work_for(5ms);
  }
  EXPECT_FALSE(pace.stopped());
}

}  // namespace
}  // namespace rubato
