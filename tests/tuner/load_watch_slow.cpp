// SPDX-License-Identifier: Apache-2.0
// How calm the watch over the load is, over days of virtual time: 20 seeds of 12 hours may raise ten false alarms at the default
// of one a day; twice as many are let pass.
#include <gtest/gtest.h>

#include "tests/tuner/load_stream.h"

namespace rubato::tuner {
namespace {

constexpr int seeds = 20;
constexpr int alarms_max = 20;

int all_false_alarms(Arrivals arrivals, double rate) {
  int alarms = 0;
  for (std::uint64_t seed = 1; seed <= seeds; ++seed) alarms += false_alarms(seed, arrivals, rate, 12 * 3600);
  return alarms;
}

TEST(LoadWatchCalm, under_steady_traffic) {
  EXPECT_LE(all_false_alarms(Arrivals::Poisson, 4), alarms_max);
}
TEST(LoadWatchCalm, under_bursty_traffic) {
  EXPECT_LE(all_false_alarms(Arrivals::Bursty, 4), alarms_max);
}
// Spells of 20 seconds look like changes of load while they last: here the rate of false alarms given is not kept. One in two
// hours at most.
TEST(LoadWatchCalm, under_traffic_in_spells) {
  EXPECT_LE(all_false_alarms(Arrivals::Spells, 4), seeds * 12 / 2);
}
TEST(LoadWatchCalm, under_sparse_traffic) {
  EXPECT_LE(all_false_alarms(Arrivals::Poisson, 0.05), alarms_max);
}

TEST(LoadWatchCalm, a_slow_drift_is_no_row_of_alarms) {
  int alarms = 0;
  for (std::uint64_t seed = 1; seed <= seeds; ++seed) {
    LoadWatch watch({});
    LoadStream stream(seed, Arrivals::Poisson);
    for (int minute = 0; minute < 240; ++minute) {
      stream.rate = 4 * std::exp2(std::clamp((minute - 60) / 120.0, 0.0, 1.0));
      while (stream.run(watch, 60 * (minute + 1))) ++alarms;
    }
  }
  EXPECT_LE(alarms, 3 * seeds);
}

}  // namespace
}  // namespace rubato::tuner
