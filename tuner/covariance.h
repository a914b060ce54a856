// SPDX-License-Identifier: Apache-2.0
// How alike the outputs at two inputs are: Matern 5/2 over the numbers, one correlation per category, numbers that only act under
// some value of a category, and a part that is peculiar to one place. With the derivatives that fitting needs.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace rubato::tuner {

/// One input. All points of one process have the same number of numbers and categories.
struct GaussianProcessPoint {
  std::vector<double> numbers;
  std::vector<std::int32_t> categories;

  friend bool operator==(const GaussianProcessPoint&, const GaussianProcessPoint&) = default;
};

/// A number that has no effect unless a category has this value. At most one per number.
struct ActsUnder {
  std::size_t number = 0;
  std::size_t category = 0;
  std::int32_t value = 0;
};

/// The prior of a covariance: medians of its parameters, all of them fitted.
struct CovarianceShape {
  std::vector<double> length_scales;    // one per number
  std::size_t category_count = 0;       // per point
  std::vector<ActsUnder> conditions{};  // of numbers; those not named always act
  double category_correlation = 0.5;    // between two values of one category
  double peculiar_share = 0;            // variance of what is peculiar to one place, relative to all that is not; 0: none
};

/// A covariance at certain parameters, relative to the variance of what is shared between places. Parameters in log form: log
/// length scales, category logits, condition logits, log of the peculiar share if the shape has one.
///
/// A number that only acts under a condition enters as a factor: between two points where it acts, rho^2 + (1 - rho^2) matern;
/// one where it acts and one where it does not, rho; two where it does not, 1. With 0 < rho < 1 the first less rho^2 is a
/// covariance, so the whole is positive definite (Schur complement), and so are products with the rest.
class Covariance {
 public:
  Covariance(const CovarianceShape& shape, std::span<const double> parameters);

  [[nodiscard]] static std::size_t parameter_count(const CovarianceShape& shape);
  /// Mean and standard deviation of the Gaussian prior on one parameter.
  [[nodiscard]] static double prior_mean(const CovarianceShape& shape, std::size_t parameter);
  [[nodiscard]] static double prior_deviation(const CovarianceShape& shape, std::size_t parameter);

  /// Between two different places: what they share.
  [[nodiscard]] double shared(const GaussianProcessPoint& a, const GaussianProcessPoint& b) const;
  /// What is peculiar to one place, next to 1 for what is shared.
  [[nodiscard]] double peculiar() const { return peculiar_; }

  /// Adds weight * d shared(a, b) / d parameter to each gradient entry.
  void add_gradient(const GaussianProcessPoint& a, const GaussianProcessPoint& b, double weight,
                    std::span<double> gradient) const;
  /// The same for weight * peculiar().
  void add_peculiar_gradient(double weight, std::span<double> gradient) const;

 private:
  [[nodiscard]] double scaled(const GaussianProcessPoint& a, const GaussianProcessPoint& b, std::size_t number) const;
  [[nodiscard]] double factor(std::size_t condition, const GaussianProcessPoint& a, const GaussianProcessPoint& b) const;
  [[nodiscard]] double radius(const GaussianProcessPoint& a, const GaussianProcessPoint& b) const;

  const CovarianceShape* shape_;  // outlives this
  std::vector<double> length_scales_;
  std::vector<std::size_t> unconditional_;  // numbers
  std::vector<double> correlations_;        // per category
  std::vector<double> rhos_;                // per condition
  double peculiar_ = 0;
};

/// Whether the condition holds at this point.
[[nodiscard]] bool acts(const ActsUnder& condition, const GaussianProcessPoint& point);

/// Equal categories, and within `tolerance` in every number that acts.
[[nodiscard]] bool same_place(const CovarianceShape& shape, const GaussianProcessPoint& a, const GaussianProcessPoint& b,
                              double tolerance);

/// Squared distance in prior length scales; different categories, and a number that acts at one of the two only, count as one.
[[nodiscard]] double squared_distance(const CovarianceShape& shape, const GaussianProcessPoint& a, const GaussianProcessPoint& b);

}  // namespace rubato::tuner
