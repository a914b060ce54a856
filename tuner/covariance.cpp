// SPDX-License-Identifier: Apache-2.0
#include "tuner/covariance.h"

#include <algorithm>
#include <cmath>

#include "manifests/check.h"

namespace rubato::tuner {

namespace {

// Standard deviations of the Gaussian priors on log parameters: wide enough for the data to win after some ten observations,
// narrow enough that two observations do not make a length scale vanish.
constexpr double length_scale_deviation = 0.6;
constexpr double category_deviation = 1.0;
constexpr double condition_mean = 1.4;  // rho 0.8: where the number acts, a third of the variance hangs on it
constexpr double condition_deviation = 1.0;
constexpr double peculiar_deviation = 1.0;
constexpr double radius_max = 600;  // beyond it exp(-radius) is nothing, and the polynomial before it may overflow

double logistic(double value) {
  return 1.0 / (1.0 + std::exp(-value));
}

double matern(double radius) {
  return radius > radius_max ? 0.0 : (1.0 + radius + radius * radius / 3.0) * std::exp(-radius);
}

/// d matern / d log length scale of one number, over the square of its scaled difference.
double matern_slope(double radius) {
  return radius > radius_max ? 0.0 : (5.0 / 3.0) * (1.0 + radius) * std::exp(-radius);
}

/// The condition of each number, by number; null where it always acts.
const ActsUnder* condition_of(const CovarianceShape& shape, std::size_t number) {
  for (const ActsUnder& one : shape.conditions) {
    if (one.number == number) return &one;
  }
  return nullptr;
}

}  // namespace

bool acts(const ActsUnder& condition, const GaussianProcessPoint& point) {
  return point.categories[condition.category] == condition.value;
}

bool same_place(const CovarianceShape& shape, const GaussianProcessPoint& a, const GaussianProcessPoint& b, double tolerance) {
  if (a.categories != b.categories) return false;
  for (std::size_t i = 0; i < a.numbers.size(); ++i) {
    if (std::abs(a.numbers[i] - b.numbers[i]) <= tolerance) continue;
    const ActsUnder* condition = condition_of(shape, i);
    if (!condition || acts(*condition, a)) return false;
  }
  return true;
}

double squared_distance(const CovarianceShape& shape, const GaussianProcessPoint& a, const GaussianProcessPoint& b) {
  double sum = 0;
  for (std::size_t i = 0; i < a.numbers.size(); ++i) {
    const ActsUnder* condition = condition_of(shape, i);
    if (condition && acts(*condition, a) != acts(*condition, b)) {
      sum += 1.0;
    } else if (!condition || acts(*condition, a)) {
      const double delta = (a.numbers[i] - b.numbers[i]) / shape.length_scales[i];
      sum += delta * delta;
    }
  }
  for (std::size_t i = 0; i < a.categories.size(); ++i) sum += a.categories[i] == b.categories[i] ? 0.0 : 1.0;
  return sum;
}

std::size_t Covariance::parameter_count(const CovarianceShape& shape) {
  return shape.length_scales.size() + shape.category_count + shape.conditions.size() + (shape.peculiar_share > 0 ? 1 : 0);
}

double Covariance::prior_mean(const CovarianceShape& shape, std::size_t parameter) {
  if (parameter < shape.length_scales.size()) return std::log(shape.length_scales[parameter]);
  parameter -= shape.length_scales.size();
  if (parameter < shape.category_count) return std::log(shape.category_correlation / (1.0 - shape.category_correlation));
  parameter -= shape.category_count;
  return parameter < shape.conditions.size() ? condition_mean : std::log(shape.peculiar_share);
}

double Covariance::prior_deviation(const CovarianceShape& shape, std::size_t parameter) {
  if (parameter < shape.length_scales.size()) return length_scale_deviation;
  parameter -= shape.length_scales.size();
  if (parameter < shape.category_count) return category_deviation;
  parameter -= shape.category_count;
  return parameter < shape.conditions.size() ? condition_deviation : peculiar_deviation;
}

Covariance::Covariance(const CovarianceShape& shape, std::span<const double> parameters) : shape_(&shape) {
  CHECK(parameters.size() == parameter_count(shape), "parameters=", parameters.size());
  const std::size_t numbers = shape.length_scales.size();
  for (std::size_t i = 0; i < numbers; ++i) {
    length_scales_.push_back(std::exp(parameters[i]));
    if (!condition_of(shape, i)) unconditional_.push_back(i);
  }
  for (std::size_t i = 0; i < shape.category_count; ++i) correlations_.push_back(logistic(parameters[numbers + i]));
  for (std::size_t i = 0; i < shape.conditions.size(); ++i) {
    rhos_.push_back(logistic(parameters[numbers + shape.category_count + i]));
  }
  if (shape.peculiar_share > 0) peculiar_ = std::exp(parameters.back());
}

double Covariance::scaled(const GaussianProcessPoint& a, const GaussianProcessPoint& b, std::size_t number) const {
  return (a.numbers[number] - b.numbers[number]) / length_scales_[number];
}

/// sqrt(5) times the distance over the numbers that always act.
double Covariance::radius(const GaussianProcessPoint& a, const GaussianProcessPoint& b) const {
  double sum = 0;
  for (const std::size_t number : unconditional_) {
    const double delta = scaled(a, b, number);
    sum += delta * delta;
  }
  return std::sqrt(5.0 * sum);
}

double Covariance::factor(std::size_t condition, const GaussianProcessPoint& a, const GaussianProcessPoint& b) const {
  const ActsUnder& one = shape_->conditions[condition];
  const bool in_a = acts(one, a);
  if (in_a != acts(one, b)) return rhos_[condition];
  if (!in_a) return 1.0;
  const double base = rhos_[condition] * rhos_[condition];
  return base + (1.0 - base) * matern(std::sqrt(5.0) * std::abs(scaled(a, b, one.number)));
}

double Covariance::shared(const GaussianProcessPoint& a, const GaussianProcessPoint& b) const {
  double value = matern(radius(a, b));
  for (std::size_t i = 0; i < correlations_.size(); ++i) {
    if (a.categories[i] != b.categories[i]) value *= correlations_[i];
  }
  for (std::size_t i = 0; i < rhos_.size(); ++i) value *= factor(i, a, b);
  return value;
}

void Covariance::add_gradient(const GaussianProcessPoint& a, const GaussianProcessPoint& b, double weight,
                              std::span<double> gradient) const {
  const double r = radius(a, b);
  double others = weight;  // everything but the Matern over the numbers that always act
  for (std::size_t i = 0; i < correlations_.size(); ++i) {
    if (a.categories[i] != b.categories[i]) others *= correlations_[i];
  }
  for (std::size_t i = 0; i < rhos_.size(); ++i) others *= factor(i, a, b);
  const double slope = others * matern_slope(r);
  if (slope != 0) {
    for (const std::size_t number : unconditional_) {
      const double delta = scaled(a, b, number);
      gradient[number] += slope * delta * delta;
    }
  }
  const double value = others * matern(r);
  const std::size_t categories = length_scales_.size();
  for (std::size_t i = 0; i < correlations_.size(); ++i) {
    if (a.categories[i] != b.categories[i]) gradient[categories + i] += value * (1.0 - correlations_[i]);
  }
  const std::size_t conditions = categories + correlations_.size();
  for (std::size_t i = 0; i < rhos_.size(); ++i) {
    const ActsUnder& one = shape_->conditions[i];
    const double rho = rhos_[i];
    if (acts(one, a) != acts(one, b)) {
      gradient[conditions + i] += value * (1.0 - rho);
    } else if (acts(one, a)) {
      const double delta = scaled(a, b, one.number);
      const double own = std::sqrt(5.0) * std::abs(delta);
      const double rest = value / factor(i, a, b);
      gradient[conditions + i] += rest * 2.0 * rho * rho * (1.0 - rho) * (1.0 - matern(own));
      const double own_slope = matern_slope(own);
      if (own_slope != 0) gradient[one.number] += rest * (1.0 - rho * rho) * own_slope * delta * delta;
    }
  }
}

void Covariance::add_peculiar_gradient(double weight, std::span<double> gradient) const {
  if (peculiar_ > 0) gradient[parameter_count(*shape_) - 1] += weight * peculiar_;
}

}  // namespace rubato::tuner
