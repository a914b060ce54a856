// SPDX-License-Identifier: Apache-2.0
#include "tuner/sequential_test.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <vector>

namespace rubato::tuner {
namespace {

/// After how many of `count` requests a trial is stopped that misses this share; 0: never.
int stopped_after(double share, double incumbent, int count, std::uint64_t seed) {
  std::mt19937_64 random(seed);
  std::bernoulli_distribution missed(share);
  int misses = 0;
  for (int judged = 1; judged <= count; ++judged) {
    misses += missed(random) ? 1 : 0;
    if (already_worse(misses, judged, incumbent)) return judged;
  }
  return 0;
}

TEST(SequentialTest, a_trial_as_good_as_the_incumbent_is_seldom_stopped_though_it_is_looked_at_after_every_request) {
  for (const double share : {0.0, 0.02, 0.05, 0.2, 0.5}) {
    int stopped = 0;
    for (std::uint64_t seed = 1; seed <= 1000; ++seed) stopped += stopped_after(share, share, 400, seed) > 0 ? 1 : 0;
    EXPECT_LE(stopped, 10) << share;
  }
}

TEST(SequentialTest, a_much_worse_trial_is_stopped_after_few_requests) {
  std::vector<int> after;
  for (std::uint64_t seed = 1; seed <= 201; ++seed) after.push_back(stopped_after(0.6, 0.05, 1000, seed));
  std::sort(after.begin(), after.end());
  EXPECT_GT(after.front(), 0) << "one was never stopped";
  EXPECT_LE(after[100], 14);
  EXPECT_LE(after[180], 30);
}

TEST(SequentialTest, nothing_is_said_of_too_few_requests_or_where_nothing_can_be_lost) {
  EXPECT_FALSE(already_worse(11, 11, 0.0));
  EXPECT_TRUE(already_worse(12, 12, 0.0));
  EXPECT_FALSE(already_worse(400, 400, 0.9));
}

}  // namespace
}  // namespace rubato::tuner
