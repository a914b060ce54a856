// SPDX-License-Identifier: Apache-2.0
// How two lanes divide cores, on virtual time: each gets its share to the percent whatever its tasks take, the two together never
// get more than there is, and no one waits for ever.
#include "engine/cpu/core_share.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <string>

namespace rubato::engine::cpu {
namespace {

using std::chrono::microseconds;
using std::chrono::milliseconds;

constexpr std::int32_t core_counts[] = {1, 2, 3, 4, 16};
constexpr std::int32_t percents[] = {1, 10, 20, 33, 50, 66, 80, 90, 99};

/// Two lanes that always have another task: each side's tasks take so long, and it looks between two of them.
class Lanes {
 public:
  Lanes(std::int32_t cores, std::int32_t percent, Duration first_task, Duration second_task)
      : share_(cores), cores_(cores), percent_(percent), tasks_{first_task, second_task} {
    share_.begin(Side::First, percent, now_);
    share_.begin(Side::Second, percent, now_);
    looks_ = {now_ + tasks_[0], now_ + tasks_[1]};
  }

  /// Until the next end of a task; core time is booked on the way.
  void advance() {
    const Side side = looks_[0] <= looks_[1] ? Side::First : Side::Second;
    const TimePoint then = looks_[index_of(side)];
    EXPECT_LE(share_.cores(Side::First) + share_.cores(Side::Second), cores_);
    for (const Side each : sides) {
      const Duration elapsed = then - now_;
      Duration& waited = waits_[index_of(each)];
      waited = share_.cores(each) == 0 ? waited + elapsed : Duration{};
      longest_wait = std::max(longest_wait, waited);
      used[index_of(each)] += elapsed * share_.cores(each);
    }
    now_ = then;
    looks_[index_of(side)] += tasks_[index_of(side)];
    if (share_.cores(side) > 0) share_.turn(side, percent_, now_);  // a side without a core is not between two tasks
  }
  void run(Duration time) {
    for (const TimePoint end = now_ + time; now_ < end;) advance();
  }
  void use_share(std::int32_t percent) { percent_ = percent; }
  CoreShare& share() { return share_; }
  [[nodiscard]] double first_percent() const { return 100 * to_seconds(used[0]) / to_seconds(used[0] + used[1]); }

  std::array<Duration, 2> used{};  // core time
  Duration longest_wait{};

 private:
  CoreShare share_;
  const std::int32_t cores_;
  std::int32_t percent_;
  std::array<Duration, 2> tasks_;
  std::array<TimePoint, 2> looks_{};
  std::array<Duration, 2> waits_{};
  TimePoint now_{};
};

std::string where(std::int32_t cores, std::int32_t percent) {
  return std::to_string(cores) + " cores, " + std::to_string(percent) + " percent";
}

TEST(CoreShare, a_lane_alone_has_all_cores) {
  CoreShare share(4);
  share.begin(Side::Second, 90, TimePoint{});
  EXPECT_EQ(share.cores(Side::Second), 4);
  EXPECT_EQ(share.cores(Side::First), 0);
  EXPECT_EQ(share.next_turn(Side::Second), TimePoint::max());
  share.turn(Side::Second, 90, TimePoint(milliseconds(900)));
  EXPECT_EQ(share.cores(Side::Second), 4);
}

TEST(CoreShare, whole_cores_are_a_lanes_own_from_the_moment_it_begins) {
  CoreShare share(4);
  share.begin(Side::First, 75, TimePoint{});
  share.begin(Side::Second, 75, TimePoint{});
  EXPECT_EQ(share.cores(Side::First), 3);
  EXPECT_EQ(share.cores(Side::Second), 1);
  share.turn(Side::First, 75, TimePoint(milliseconds(50)));
  EXPECT_EQ(share.cores(Side::First), 3);
  EXPECT_EQ(share.next_turn(Side::First), TimePoint::max());
  share.end(Side::Second, TimePoint(milliseconds(50)));
  EXPECT_EQ(share.cores(Side::First), 4);
}

TEST(CoreShare, each_lane_gets_its_share_within_a_few_rounds) {
  for (const std::int32_t cores : core_counts) {
    for (const std::int32_t percent : percents) {
      SCOPED_TRACE(where(cores, percent));
      Lanes lanes(cores, percent, microseconds(20), microseconds(30));
      lanes.run(milliseconds(100));
      EXPECT_NEAR(lanes.first_percent(), percent, 3.0);
      lanes.run(milliseconds(1900));
      EXPECT_NEAR(lanes.first_percent(), percent, 0.3);
    }
  }
}

TEST(CoreShare, tasks_longer_than_a_turn_are_made_up_for) {
  for (const std::int32_t percent : {20, 50, 80}) {
    SCOPED_TRACE(where(1, percent));
    Lanes lanes(1, percent, microseconds(50), milliseconds(7));
    lanes.run(milliseconds(5000));
    EXPECT_NEAR(lanes.first_percent(), percent, 1.0);
  }
}

TEST(CoreShare, a_wait_for_the_shared_core_is_bounded) {
  for (const std::int32_t cores : core_counts) {
    for (const std::int32_t percent : percents) {
      SCOPED_TRACE(where(cores, percent));
      Lanes lanes(cores, percent, milliseconds(1), milliseconds(30));
      lanes.run(milliseconds(3000));
      EXPECT_LE(lanes.longest_wait, CoreShare::memory + CoreShare::round + milliseconds(30));
    }
  }
}

TEST(CoreShare, a_round_with_short_tasks_takes_no_longer_than_it_says) {
  for (const std::int32_t percent : {10, 50, 90}) {
    Lanes lanes(1, percent, microseconds(10), microseconds(10));
    lanes.run(milliseconds(400));
    EXPECT_LE(lanes.longest_wait, CoreShare::round) << where(1, percent);
  }
}

TEST(CoreShare, only_the_holder_gives_the_shared_core_away) {
  CoreShare share(1);
  share.begin(Side::First, 50, TimePoint{});
  share.begin(Side::Second, 50, TimePoint{});
  EXPECT_EQ(share.cores(Side::First), 1);  // it was there first and is within a task
  const TimePoint late(milliseconds(30));
  share.turn(Side::Second, 50, late);
  EXPECT_EQ(share.cores(Side::Second), 0);
  share.turn(Side::First, 50, late);
  EXPECT_EQ(share.cores(Side::First), 0);
  EXPECT_EQ(share.cores(Side::Second), 1);
}

TEST(CoreShare, the_next_turn_is_the_first_moment_at_which_a_turn_gives_away) {
  for (const std::int32_t percent : {10, 37, 50, 90}) {
    SCOPED_TRACE(where(1, percent));
    CoreShare share(1);
    share.begin(Side::First, percent, TimePoint{});
    share.begin(Side::Second, percent, TimePoint{});
    for (int i = 0; i < 6; ++i) {
      const Side holder = i % 2 == 0 ? Side::First : Side::Second;
      const TimePoint next = share.next_turn(holder);
      EXPECT_EQ(share.next_turn(other(holder)), TimePoint::max());
      share.turn(holder, percent, next - Duration(1));
      EXPECT_EQ(share.cores(holder), 1);
      share.turn(holder, percent, next);
      EXPECT_EQ(share.cores(holder), 0);
    }
  }
}

TEST(CoreShare, a_step_that_ends_leaves_everything_to_the_other) {
  CoreShare share(2);
  share.begin(Side::First, 20, TimePoint{});
  share.begin(Side::Second, 20, TimePoint{});
  EXPECT_EQ(share.cores(Side::Second), 1);
  share.end(Side::First, TimePoint(microseconds(100)));
  EXPECT_EQ(share.cores(Side::First), 0);
  EXPECT_EQ(share.cores(Side::Second), 2);
}

TEST(CoreShare, a_lane_of_many_short_steps_gets_its_share_of_the_time_that_both_want) {
  for (const std::int32_t percent : {20, 50, 80}) {
    SCOPED_TRACE(where(1, percent));
    CoreShare share(1);
    TimePoint now{};
    std::array<Duration, 2> used{};
    share.begin(Side::Second, percent, now);
    for (int step = 0; step < 2000; ++step) {  // each needs 300 us of the core; then 100 us pass without one
      share.begin(Side::First, percent, now);
      for (Duration left = microseconds(300); left > Duration{};) {
        const Side side = share.cores(Side::First) > 0 ? Side::First : Side::Second;
        now += microseconds(20);
        used[index_of(side)] += microseconds(20);
        if (side == Side::First) left -= microseconds(20);
        share.turn(side, percent, now);
      }
      share.end(Side::First, now);
      now += microseconds(100);
    }
    EXPECT_NEAR(100 * to_seconds(used[0]) / to_seconds(used[0] + used[1]), percent, 2.0);
  }
}

TEST(CoreShare, a_new_share_holds_from_the_next_turn_of_either) {
  CoreShare share(4);
  share.begin(Side::First, 25, TimePoint{});
  share.begin(Side::Second, 25, TimePoint{});
  EXPECT_EQ(share.cores(Side::First), 1);
  share.turn(Side::Second, 75, TimePoint(microseconds(1)));
  EXPECT_EQ(share.cores(Side::First), 3);
  EXPECT_EQ(share.cores(Side::Second), 1);
}

TEST(CoreShare, shares_hold_on_average_while_they_change_at_random) {
  const std::uint64_t seed = 5;
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937_64 generator(seed);
  for (const std::int32_t cores : core_counts) {
    Lanes lanes(cores, 50, microseconds(40), microseconds(90));
    double asked = 0;
    const int phases = 300;
    for (int phase = 0; phase < phases; ++phase) {
      const std::int32_t percent = percents[generator() % std::size(percents)];
      asked += percent;
      lanes.use_share(percent);
      lanes.run(milliseconds(20));
    }
    EXPECT_NEAR(lanes.first_percent(), asked / phases, 1.0) << cores << " cores";
  }
}

TEST(CoreShare, the_time_it_takes_to_wake_up_is_not_charged) {
  CoreShare share(1);
  share.begin(Side::First, 50, TimePoint{});
  share.begin(Side::Second, 50, TimePoint{});
  TimePoint now = share.next_turn(Side::First);
  share.turn(Side::First, 50, now);
  const Duration turn = share.next_turn(Side::Second) - now;
  now += milliseconds(1);
  share.resume(Side::First, now);  // not the holder's to say
  EXPECT_EQ(share.next_turn(Side::Second), now - milliseconds(1) + turn);
  share.resume(Side::Second, now);
  EXPECT_EQ(share.next_turn(Side::Second), now + turn);
}

TEST(CoreShare, time_that_goes_back_counts_as_standing_still) {
  CoreShare share(1);
  share.begin(Side::First, 50, TimePoint(milliseconds(10)));
  share.begin(Side::Second, 50, TimePoint(milliseconds(10)));
  share.turn(Side::First, 50, TimePoint{});
  EXPECT_EQ(share.cores(Side::First), 1);
  share.turn(Side::First, 50, TimePoint(milliseconds(13)));
  EXPECT_EQ(share.cores(Side::Second), 1);
}

}  // namespace
}  // namespace rubato::engine::cpu
