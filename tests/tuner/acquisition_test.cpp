// SPDX-License-Identifier: Apache-2.0
#include "tuner/acquisition.h"

#include <gtest/gtest.h>

#include <cmath>
#include <random>

namespace rubato::tuner {
namespace {

TEST(Acquisition, expected_improvement_equals_a_brute_force_mean) {
  std::mt19937_64 random(5);
  std::normal_distribution<double> normal(0.3, 0.7);
  double sum = 0;
  constexpr int count = 400000;
  for (int i = 0; i < count; ++i) sum += std::max(0.0, normal(random) - 0.8);
  EXPECT_NEAR(expected_improvement({0.3, 0.49}, 0.8), sum / count, 0.002);
  EXPECT_EQ(expected_improvement({1.0, 0.0}, 0.4), 0.6);
  EXPECT_EQ(expected_improvement({0.2, 0.0}, 0.4), 0.0);
  EXPECT_NEAR(probability_at_least({1.0, 4.0}, 1.0), 0.5, 1e-12);
}

TEST(Acquisition, a_candidate_that_is_likely_unsafe_is_worth_nothing_and_a_safe_one_its_improvement) {
  const Outcome safe{.score = {1.1, 0.01}, .attainment = {1.8, 0.01}};
  const Outcome unsafe{.score = {2.7, 0.01}, .attainment = {0.3, 0.01}};
  EXPECT_GT(constrained_improvement(unsafe, {.best = 0}), constrained_improvement(safe, {.best = 0}));
  EXPECT_EQ(constrained_improvement(unsafe, {.best = 0, .floor = 1.5}), 0.0);
  EXPECT_NEAR(constrained_improvement(safe, {.best = 0, .floor = 1.5}), 1.1, 0.01);
}

TEST(Acquisition, at_a_safe_probability_of_one_half_nothing_predicted_below_the_floor_is_worth_anything) {
  for (const double variance : {0.0, 1e-6, 0.1, 4.0}) {
    const auto value_of = [&](double attainment) {
      return constrained_improvement({.score = {3.0, 0.2}, .attainment = {attainment, variance}},
                                     {.best = 0, .safe_probability_min = 0.5, .floor = 1.5});
    };
    EXPECT_EQ(value_of(1.5 - 1e-6), 0.0) << variance;
    EXPECT_GT(value_of(1.5 + 1e-6), 1.0) << variance;
  }
}

}  // namespace
}  // namespace rubato::tuner
