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

TEST(Acquisition, a_candidate_that_is_likely_unsafe_is_not_picked) {
  const std::vector<Outcome> candidates{{.score = {0.2, 0.01}, .attainment = {2.0, 0.01}},
                                        {.score = {1.1, 0.01}, .attainment = {1.8, 0.01}},
                                        {.score = {2.7, 0.01}, .attainment = {0.3, 0.01}}};
  EXPECT_EQ(pick_best(candidates, {.best = 0})->index, 2u);
  EXPECT_EQ(pick_best(candidates, {.best = 0, .floor = 1.5})->index, 1u);
  EXPECT_FALSE(pick_best({}, {.best = 0}).has_value());
}

TEST(Acquisition, at_a_safe_probability_of_one_half_nothing_predicted_below_the_floor_is_worth_anything) {
  const auto value_of = [](double attainment, double variance) {
    const std::vector<Outcome> candidates{{.score = {3.0, 0.2}, .attainment = {attainment, variance}}};
    return pick_best(candidates, {.best = 0, .safe_probability_min = 0.5, .floor = 1.5})->value;
  };
  for (const double variance : {0.0, 1e-6, 0.1, 4.0}) {
    EXPECT_EQ(value_of(1.5 - 1e-6, variance), 0.0) << variance;
    EXPECT_GT(value_of(1.5 + 1e-6, variance), 1.0) << variance;
  }
}

}  // namespace
}  // namespace rubato::tuner
