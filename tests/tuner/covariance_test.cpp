// SPDX-License-Identifier: Apache-2.0
#include "tuner/covariance.h"

#include <gtest/gtest.h>

#include <Eigen/Eigenvalues>
#include <cmath>
#include <random>

#include "tuner/outlook.h"

namespace rubato::tuner {
namespace {

CovarianceShape settings_shape() {
  const GaussianProcessOptions options = process_options();
  return {.length_scales = options.length_scales, .category_count = options.category_count, .conditions = options.conditions};
}

std::vector<double> prior_means(const CovarianceShape& shape) {
  std::vector<double> result;
  for (std::size_t i = 0; i < Covariance::parameter_count(shape); ++i) result.push_back(Covariance::prior_mean(shape, i));
  return result;
}

double covariance_of(const KnobValues& a, const KnobValues& b) {
  const CovarianceShape shape = settings_shape();
  return Covariance(shape, prior_means(shape)).shared(encode(a, {}), encode(b, {}));
}

constexpr KnobValues deadline{.priority_policy = PriorityPolicy::Deadline};
constexpr KnobValues decodes{.priority_policy = PriorityPolicy::DecodeFirst};

TEST(Covariance, a_margin_counts_between_two_settings_under_policy_deadline_only) {
  KnobValues wide = deadline;
  wide.deadline_margin = 50;
  EXPECT_LT(covariance_of(deadline, wide), covariance_of(deadline, deadline) - 0.01);
  EXPECT_EQ(covariance_of(deadline, decodes), covariance_of(wide, decodes));
  KnobValues other = decodes;
  other.deadline_margin = 50;
  EXPECT_EQ(covariance_of(decodes, other), covariance_of(decodes, decodes));
  EXPECT_EQ(covariance_of(deadline, other), covariance_of(deadline, decodes));
}

TEST(Covariance, share_and_devices_count_between_two_settings_in_mode_disaggregated_only) {
  KnobValues split = decodes;
  split.mode = Mode::Disaggregated;
  for (const bool devices : {false, true}) {
    KnobValues more = split;
    KnobValues chunked = decodes;
    (devices ? more.prefill_devices : more.prefill_share) += devices ? 3 : 30;
    (devices ? chunked.prefill_devices : chunked.prefill_share) += devices ? 3 : 30;
    EXPECT_LT(covariance_of(split, more), covariance_of(split, split) - 0.01);
    EXPECT_EQ(covariance_of(more, decodes), covariance_of(split, decodes));
    EXPECT_EQ(covariance_of(chunked, decodes), covariance_of(decodes, decodes));
    EXPECT_EQ(covariance_of(more, chunked), covariance_of(split, decodes));
  }
}

TEST(Covariance, is_positive_definite_on_random_mixed_sets_at_any_parameters) {
  const CovarianceShape shape = settings_shape();
  for (std::uint64_t seed = 1; seed <= 30; ++seed) {
    std::mt19937_64 random(seed);
    std::uniform_real_distribution<double> uniform(-4, 4);
    std::vector<double> parameters = prior_means(shape);
    for (std::size_t i = 0; i < parameters.size(); ++i) parameters[i] += uniform(random) * Covariance::prior_deviation(shape, i);
    const Covariance covariance(shape, parameters);
    std::vector<GaussianProcessPoint> points;
    for (int i = 0; i < 40; ++i) {
      points.push_back(encode({.max_num_batched_tokens = 64 << (random() % 8),
                               .max_num_seqs = 8 << (random() % 4),
                               .priority_policy = static_cast<PriorityPolicy>(random() % 4),
                               .deadline_margin = static_cast<std::int32_t>(random() % 6) * 10,
                               .mode = static_cast<Mode>(random() % 2),
                               .prefill_share = static_cast<std::int32_t>(random() % 9 + 1) * 10,
                               .prefill_devices = static_cast<std::int32_t>(random() % 7 + 1)},
                              {.rate = uniform(random), .prompt = 8, .output = 6}));
    }
    Eigen::MatrixXd matrix(40, 40);
    for (int i = 0; i < 40; ++i) {
      for (int j = 0; j < 40; ++j) {
        matrix(i, j) = covariance.shared(points[static_cast<std::size_t>(i)], points[static_cast<std::size_t>(j)]);
      }
      EXPECT_NEAR(matrix(i, i), 1.0, 1e-12) << "seed " << seed;
    }
    const double least = Eigen::SelfAdjointEigenSolver<Eigen::MatrixXd>(matrix).eigenvalues().minCoeff();
    EXPECT_GE(least, -1e-10) << "seed " << seed;
  }
}

TEST(Covariance, settings_that_act_alike_are_one_place) {
  const CovarianceShape shape = settings_shape();
  KnobValues other = decodes;
  other.deadline_margin = 50;
  other.prefill_share = 20;
  EXPECT_TRUE(act_alike(decodes, other));
  EXPECT_TRUE(same_place(shape, encode(decodes, {}), encode(other, {}), 1e-6));
  KnobValues wide = deadline;
  wide.deadline_margin = 50;
  EXPECT_FALSE(act_alike(deadline, wide));
  EXPECT_FALSE(same_place(shape, encode(deadline, {}), encode(wide, {}), 1e-6));
  EXPECT_FALSE(act_alike(deadline, decodes));
}

}  // namespace
}  // namespace rubato::tuner
