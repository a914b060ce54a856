// SPDX-License-Identifier: Apache-2.0
#include "tuner/gaussian_process.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>

namespace rubato::tuner {
namespace {

GaussianProcessOptions one_number() {
  return {.length_scales = {0.5}, .category_count = 0, .output_scale = 1.0};
}

GaussianProcessPoint at(double x) {
  return {.numbers = {x}, .categories = {}};
}

double matern(double r) {
  return (1 + std::sqrt(5.0) * r + 5.0 / 3.0 * r * r) * std::exp(-std::sqrt(5.0) * r);
}

GaussianProcess mixed_process(int count, std::uint64_t seed) {
  GaussianProcess process({.length_scales = {0.5, 1.0, 2.0}, .category_count = 2, .output_scale = 1.0});
  std::mt19937_64 random(seed);
  std::normal_distribution<double> normal(0, 1);
  for (int i = 0; i < count; ++i) {
    const GaussianProcessPoint point{
        .numbers = {normal(random), normal(random), normal(random)},
        .categories = {static_cast<std::int32_t>(random() % 3), static_cast<std::int32_t>(random() % 2)}};
    process.observe(point, std::sin(point.numbers[0]) + 0.5 * point.categories[0] + 0.1 * normal(random), 0.01 + 0.02 * (i % 3));
  }
  process.fit({.numbers = {0, 0, 0}, .categories = {0, 0}});
  return process;
}

TEST(GaussianProcess, gradient_equals_finite_differences) {
  const GaussianProcess process = mixed_process(25, 3);
  std::mt19937_64 random(4);
  std::uniform_real_distribution<double> uniform(-0.8, 0.8);
  for (int round = 0; round < 10; ++round) {
    std::vector<double> theta = process.parameters();
    for (double& one : theta) one += uniform(random);
    std::vector<double> gradient(theta.size());
    EXPECT_TRUE(std::isfinite(process.log_posterior(theta, gradient)));
    for (std::size_t i = 0; i < theta.size(); ++i) {
      constexpr double step = 1e-5;
      std::vector<double> high = theta;
      std::vector<double> low = theta;
      high[i] += step;
      low[i] -= step;
      const double difference = (process.log_posterior(high, {}) - process.log_posterior(low, {})) / (2 * step);
      EXPECT_NEAR(gradient[i], difference, 1e-4 * std::max(1.0, std::abs(difference))) << "parameter " << i << " round " << round;
    }
  }
}

GaussianProcessOptions conditional_options() {
  return {.length_scales = {0.5, 1.0, 0.7, 0.4},
          .category_count = 2,
          .conditions = {{.number = 1, .category = 0, .value = 2}, {.number = 3, .category = 1, .value = 1}},
          .peculiar_share = 0.3,
          .output_scale = 1.0};
}

GaussianProcessPoint random_point(std::mt19937_64& random) {
  std::normal_distribution<double> normal(0, 1);
  return {.numbers = {normal(random), normal(random), normal(random), normal(random)},
          .categories = {static_cast<std::int32_t>(random() % 3), static_cast<std::int32_t>(random() % 2)}};
}

GaussianProcess conditional_process(int count, std::uint64_t seed) {
  GaussianProcess process(conditional_options());
  std::mt19937_64 random(seed);
  for (int i = 0; i < count; ++i) {
    const GaussianProcessPoint point = random_point(random);
    const double effect = point.categories[1] == 1 ? point.numbers[3] : 0.0;
    process.observe(point, std::sin(point.numbers[0]) + 0.4 * effect + 0.3 * point.categories[0], 0.01 + 0.02 * (i % 3));
  }
  process.fit({.numbers = {0, 0, 0, 0}, .categories = {0, 0}});
  return process;
}

TEST(GaussianProcess, gradient_with_conditions_and_peculiarities_equals_finite_differences_in_every_parameter) {
  const GaussianProcess process = conditional_process(30, 5);
  std::mt19937_64 random(6);
  std::uniform_real_distribution<double> uniform(-0.8, 0.8);
  for (int round = 0; round < 10; ++round) {
    std::vector<double> theta = process.parameters();
    ASSERT_EQ(theta.size(), 4u + 2u + 2u + 1u + 2u);
    for (double& one : theta) one += uniform(random);
    std::vector<double> gradient(theta.size());
    EXPECT_TRUE(std::isfinite(process.log_posterior(theta, gradient)));
    for (std::size_t i = 0; i < theta.size(); ++i) {
      constexpr double step = 1e-5;
      std::vector<double> high = theta;
      std::vector<double> low = theta;
      high[i] += step;
      low[i] -= step;
      const double difference = (process.log_posterior(high, {}) - process.log_posterior(low, {})) / (2 * step);
      EXPECT_NEAR(gradient[i], difference, 1e-4 * std::max(1.0, std::abs(difference))) << "parameter " << i << " round " << round;
    }
  }
}

TEST(GaussianProcess, what_is_observed_after_a_fit_is_predicted_as_if_solved_anew) {
  for (std::uint64_t seed = 1; seed <= 5; ++seed) {
    GaussianProcess process = conditional_process(20, seed);
    std::mt19937_64 random(seed + 100);
    std::vector<GaussianProcessPoint> observed;
    for (int i = 0; i < 40; ++i) {
      // Every fourth is a place seen before, every eighth is next to one.
      GaussianProcessPoint point = i % 4 == 3 ? observed[random() % observed.size()] : random_point(random);
      if (i % 8 == 7) point.numbers[0] += 1e-4;
      observed.push_back(point);
      const double before = process.predict(point).mean;
      ASSERT_TRUE(process.observe(point, before + 1.0, 0.02));
      EXPECT_GT(process.predict(point).mean, before + 0.1) << "seed " << seed << " step " << i;
    }
    std::vector<Prediction> step_by_step;
    std::vector<GaussianProcessPoint> places = observed;
    for (int i = 0; i < 20; ++i) places.push_back(random_point(random));
    for (const GaussianProcessPoint& one : places) step_by_step.push_back(process.predict(one));
    process.refactor();
    for (std::size_t i = 0; i < places.size(); ++i) {
      EXPECT_NEAR(step_by_step[i].mean, process.predict(places[i]).mean, 1e-8) << "seed " << seed;
      EXPECT_NEAR(step_by_step[i].variance, process.predict(places[i]).variance, 1e-8) << "seed " << seed;
    }
  }
}

TEST(GaussianProcess, observations_after_a_fit_that_is_full_wait_for_the_next) {
  GaussianProcessOptions options = one_number();
  options.fitted_max = 5;
  GaussianProcess process(options);
  for (int i = 0; i < 4; ++i) process.observe(at(i), 0.1 * i, 0.01);
  process.fit(at(0));
  process.observe(at(10), 3, 0.01);
  EXPECT_EQ(process.fitted_count(), 5u);
  process.observe(at(20), 3, 0.01);
  EXPECT_EQ(process.fitted_count(), 5u);
  EXPECT_EQ(process.observation_count(), 6u);
  EXPECT_LT(process.predict(at(20)).mean, 2.5);
  process.fit(at(20));
  EXPECT_GT(process.predict(at(20)).mean, 2.5);
}

TEST(GaussianProcess, a_peculiarity_is_known_at_its_place_and_nowhere_else) {
  GaussianProcessOptions options = one_number();
  options.peculiar_share = 0.5;
  options.prior_mean = [](const GaussianProcessPoint&) { return 0.0; };
  GaussianProcess process(options);
  for (int i = -5; i <= 5; ++i) process.observe(at(0.2 * i), i == 0 ? -1.5 : 0.0, 1e-4);
  process.fit(at(0));
  EXPECT_LT(process.predict(at(0)).mean, -1.2);
  EXPECT_GT(process.predict(at(0.05)).mean, -0.5);
  EXPECT_EQ(process.predict(at(0)).peculiar, 0.0);
  EXPECT_GT(process.predict(at(0.05)).peculiar, 0.0);
  EXPECT_LE(process.predict(at(0.05)).peculiar, process.predict(at(0.05)).variance);
}

TEST(GaussianProcess, an_observation_of_little_noise_moves_predictions_more_than_one_of_much) {
  const auto pull = [](double variance) {
    GaussianProcessOptions options = one_number();
    options.prior_mean = [](const GaussianProcessPoint&) { return 0.0; };
    GaussianProcess process(options);
    process.observe(at(0), 1.0, variance);
    process.fit(at(0));
    return process.predict(at(0)).mean;
  };
  EXPECT_GT(pull(1.5 / 500), 0.95);
  EXPECT_LT(pull(1.5 / 2), 0.7);
  EXPECT_GT(pull(1.5 / 500), pull(1.5 / 20));
}

TEST(GaussianProcess, two_point_posterior_equals_the_formula_written_out) {
  GaussianProcessOptions options = one_number();
  options.prior_mean = [](const GaussianProcessPoint&) { return 0.0; };
  options.evaluations_max = 1;
  GaussianProcess process(options);
  process.observe(at(0.0), 1.0, 0.1);
  process.observe(at(0.4), -0.5, 0.2);
  process.fit(at(0));
  const std::vector<double> theta = process.parameters();
  const double length = std::exp(theta[0]);
  const double scale2 = (3.0 + 1.0 + 0.25) / 5.0;  // the standardisation: prior scale counts three times
  const double signal = std::exp(theta[1]) * scale2;
  const double noise = std::exp(theta[2]);
  const double a = signal + noise * 0.1;
  const double d = signal + noise * 0.2;
  const double b = signal * matern(0.4 / length);
  const double k1 = signal * matern(0.1 / length);
  const double k2 = signal * matern(0.3 / length);
  const double det = a * d - b * b;
  const double mean = (k1 * (d * 1.0 - b * -0.5) + k2 * (-b * 1.0 + a * -0.5)) / det;
  const double variance = signal - (k1 * (d * k1 - b * k2) + k2 * (-b * k1 + a * k2)) / det;
  const Prediction prediction = process.predict(at(0.1));
  EXPECT_NEAR(prediction.mean, mean, 1e-6);
  EXPECT_NEAR(prediction.variance, variance, 1e-6);
}

TEST(GaussianProcess, learns_a_smooth_function_and_knows_what_it_does_not_know) {
  GaussianProcess process(one_number());
  for (int i = 0; i <= 20; ++i) process.observe(at(0.15 * i), std::sin(0.15 * i * 2), 1e-4);
  process.fit(at(1));
  ASSERT_TRUE(process.fitted());
  for (double x = 0.1; x < 3; x += 0.17) EXPECT_NEAR(process.predict(at(x)).mean, std::sin(2 * x), 0.03);
  EXPECT_GT(process.predict(at(10)).variance, 20 * process.predict(at(1.5)).variance);
}

TEST(GaussianProcess, categories_are_told_apart_when_they_differ_and_share_when_they_do_not) {
  for (const double offset : {0.0, 3.0}) {
    GaussianProcess process({.length_scales = {0.5}, .category_count = 1, .output_scale = 1.0});
    for (int i = 0; i < 24; ++i) {
      const std::int32_t category = i % 2;
      process.observe({{0.1 * i}, {category}}, std::sin(0.3 * i) + (category == 1 ? offset * std::cos(0.9 * i) : 0.0), 1e-3);
    }
    process.fit({{1.0}, {0}});
    const double correlation = 1 / (1 + std::exp(-process.parameters()[1]));
    if (offset == 0) {
      EXPECT_GT(correlation, 0.6);
    } else {
      EXPECT_LT(correlation, 0.5);
    }
  }
}

// B047
TEST(GaussianProcess, one_point_twenty_times_is_one_certain_observation) {
  GaussianProcess process(one_number());
  for (int i = 0; i < 20; ++i) EXPECT_TRUE(process.observe(at(0.5), 2.0, 0.2));
  EXPECT_EQ(process.observation_count(), 1u);
  process.fit(at(0));
  ASSERT_TRUE(process.fitted());
  EXPECT_NEAR(process.predict(at(0.5)).mean, 2.0, 0.05);
  EXPECT_LT(process.predict(at(0.5)).variance, 0.05);
}

TEST(GaussianProcess, one_point_with_different_values_is_their_weighted_mean) {
  GaussianProcess process(one_number());
  process.observe(at(0.5), 1.0, 0.1);
  process.observe(at(0.5), 3.0, 0.1);
  process.observe(at(0.5 + 1e-9), 2.0, 0.05);
  EXPECT_EQ(process.observation_count(), 1u);
  process.fit(at(0));
  EXPECT_NEAR(process.predict(at(0.5)).mean, 2.0, 0.05);
}

TEST(GaussianProcess, near_points_without_noise_do_not_break_it) {
  GaussianProcess process(one_number());
  for (int i = 0; i < 60; ++i) process.observe(at(0.5 + 2e-6 * i), 1.0 + 0.01 * (i % 2), 0.0);
  process.fit(at(0));
  const Prediction prediction = process.predict(at(0.5));
  EXPECT_TRUE(std::isfinite(prediction.mean));
  EXPECT_TRUE(std::isfinite(prediction.variance));
  EXPECT_NEAR(prediction.mean, 1.0, 0.1);
}

TEST(GaussianProcess, equal_values_everywhere_predict_that_value) {
  GaussianProcess process(one_number());
  for (int i = 0; i < 10; ++i) process.observe(at(i), 0.7, 0.01);
  process.fit(at(0));
  ASSERT_TRUE(process.fitted());
  EXPECT_NEAR(process.predict(at(4.5)).mean, 0.7, 1e-6);
  EXPECT_GT(process.predict(at(40)).variance, 0.01);
}

TEST(GaussianProcess, a_single_point_and_none_at_all_work) {
  GaussianProcess process(one_number());
  process.fit(at(0));
  EXPECT_FALSE(process.fitted());
  EXPECT_EQ(process.predict(at(0)).mean, 0.0);
  EXPECT_EQ(process.predict(at(0)).variance, 1.0);
  process.observe(at(1), 0.4, 0.01);
  process.fit(at(0));
  EXPECT_TRUE(process.fitted());
  EXPECT_NEAR(process.predict(at(1)).mean, 0.4, 1e-6);
}

TEST(GaussianProcess, values_that_are_no_measurements_are_refused_and_counted) {
  GaussianProcess process(one_number());
  const double nan = std::numeric_limits<double>::quiet_NaN();
  const double infinity = std::numeric_limits<double>::infinity();
  EXPECT_FALSE(process.observe(at(0), nan, 0.1));
  EXPECT_FALSE(process.observe(at(0), infinity, 0.1));
  EXPECT_FALSE(process.observe(at(0), 1e12, 0.1));
  EXPECT_FALSE(process.observe(at(0), 1, nan));
  EXPECT_FALSE(process.observe(at(0), 1, -1));
  EXPECT_FALSE(process.observe(at(nan), 1, 0.1));
  EXPECT_FALSE(process.observe({{1, 2}, {}}, 1, 0.1));
  EXPECT_EQ(process.refused_count(), 7u);
  EXPECT_EQ(process.observation_count(), 0u);
}

TEST(GaussianProcess, ten_thousand_observations_stay_bounded_before_and_after_a_fit) {
  GaussianProcess process({.length_scales = {0.5, 1, 1}, .category_count = 1, .output_scale = 1.0});
  std::mt19937_64 random(1);
  std::uniform_real_distribution<double> uniform(0, 10);
  const auto observe = [&] {
    const double x = uniform(random);
    process.observe({{x, uniform(random), uniform(random)}, {static_cast<std::int32_t>(random() % 4)}}, std::sin(x), 0.05);
  };
  for (int i = 0; i < 5000; ++i) observe();
  EXPECT_EQ(process.observation_count(), 2048u);
  process.fit({{5, 5, 5}, {0}});
  EXPECT_EQ(process.fitted_count(), 128u);
  EXPECT_TRUE(process.fitted());
  EXPECT_GT(process.evaluation_count(), 1);
  EXPECT_LE(process.evaluation_count(), GaussianProcessOptions{}.evaluations_max);
  for (int i = 0; i < 5000; ++i) observe();
  EXPECT_EQ(process.observation_count(), 2048u);
  EXPECT_EQ(process.fitted_count(), 128u);
}

TEST(GaussianProcess, extreme_values_places_and_scales_stay_finite) {
  GaussianProcess process({.length_scales = {1e-3, 1e3}, .category_count = 1, .output_scale = 1.0});
  const std::vector<double> values{1e6, -1e6, 1e-12, 0.0, 3.0};
  for (std::size_t i = 0; i < 20; ++i) {
    const double x = i % 2 == 0 ? 1e6 : -1e6 + static_cast<double>(i);
    EXPECT_TRUE(process.observe({{x, 1e-9 * static_cast<double>(i)}, {static_cast<std::int32_t>(i)}}, values[i % 5],
                                i % 3 == 0 ? 0 : 1e9));
  }
  EXPECT_FALSE(process.observe({{1e7, 0}, {0}}, 1, 0.1));
  process.fit({{0, 0}, {0}});
  const double huge = std::numeric_limits<double>::max();
  for (const double x : {0.0, 1e6, -1e6, 1e200, huge}) {
    const Prediction prediction = process.predict({{x, x}, {1}});
    EXPECT_TRUE(std::isfinite(prediction.mean)) << x;
    EXPECT_TRUE(std::isfinite(prediction.variance)) << x;
    EXPECT_GE(prediction.variance, 0) << x;
  }
}

TEST(GaussianProcess, one_outlier_of_stated_noise_does_not_ban_its_neighbourhood) {
  GaussianProcess process(one_number());
  for (int i = 0; i < 8; ++i) process.observe(at(0.2 * i), 1.0, 0.02);
  process.observe(at(0.7), -2.0, 0.5);
  process.fit(at(0));
  EXPECT_GT(process.predict(at(0.75)).mean, 0.6);
}

TEST(GaussianProcess, prior_mean_is_followed_where_there_is_no_data) {
  GaussianProcessOptions options = one_number();
  options.prior_mean = [](const GaussianProcessPoint& point) { return point.numbers[0]; };
  GaussianProcess process(options);
  process.observe(at(0), 0.3, 0.001);
  process.fit(at(0));
  EXPECT_NEAR(process.predict(at(50)).mean, 50, 1e-6);
  EXPECT_NEAR(process.predict(at(0)).mean, 0.3, 0.05);
}

TEST(GaussianProcess, same_data_same_bits) {
  const GaussianProcess a = mixed_process(40, 9);
  const GaussianProcess b = mixed_process(40, 9);
  const GaussianProcessPoint point{{0.1, 0.2, 0.3}, {1, 1}};
  EXPECT_EQ(a.predict(point).mean, b.predict(point).mean);
  EXPECT_EQ(a.predict(point).variance, b.predict(point).variance);
}

}  // namespace
}  // namespace rubato::tuner
