// SPDX-License-Identifier: Apache-2.0
#include "tuner/gaussian_process.h"

#include <Eigen/Cholesky>
#include <Eigen/Core>
#include <algorithm>
#include <cmath>
#include <deque>
#include <exception>
#include <limits>
#include <nlopt.hpp>
#include <numeric>
#include <optional>

#include "manifests/check.h"

namespace rubato::tuner {

namespace {

constexpr double place_tolerance = 1e-6;
constexpr double magnitude_max = 1e6;
constexpr double jitter_first = 1e-9;
constexpr double jitter_last = 1e-2;
constexpr double variance_min = 1e-9;
constexpr double signal_prior_deviation = 0.6;
constexpr double noise_prior_deviation = 0.5;
constexpr double parameter_reach = 4.0;  // the search box: this many prior standard deviations

struct Observation {
  GaussianProcessPoint point;
  double value = 0;
  double variance = 0;
};

void merge(Observation& known, const Observation& added) {
  const double own = 1.0 / known.variance;
  const double other = 1.0 / added.variance;
  known.value = (own * known.value + other * added.value) / (own + other);
  known.variance = 1.0 / (own + other);
}

bool all_within_reach(const std::vector<double>& values) {
  return std::all_of(values.begin(), values.end(),
                     [](double value) { return std::isfinite(value) && std::abs(value) <= magnitude_max; });
}

}  // namespace

struct GaussianProcess::State {
  GaussianProcessOptions options;
  CovarianceShape shape;
  std::deque<Observation> kept;
  std::uint64_t refused = 0;

  // Of the last fit, and what was observed since.
  std::vector<Observation> data;
  std::vector<double> parameters;
  std::optional<Covariance> covariance;
  double signal = 1;
  double noise = 1;         // factor on the stated variances
  Eigen::VectorXd targets;  // standardised residuals
  Eigen::VectorXd weights;  // K^-1 targets
  Eigen::MatrixXd factor;   // Cholesky factor of K
  double center = 0;
  double scale = 1;
  double jitter = 0;
  std::int32_t evaluations = 0;
  bool fitted = false;

  [[nodiscard]] std::size_t parameter_count() const { return Covariance::parameter_count(shape) + 2; }
  [[nodiscard]] double prior_mean(std::size_t parameter) const {
    return parameter + 2 < parameter_count() ? Covariance::prior_mean(shape, parameter) : 0.0;
  }
  [[nodiscard]] double prior_deviation(std::size_t parameter) const {
    if (parameter + 2 < parameter_count()) return Covariance::prior_deviation(shape, parameter);
    return parameter + 1 == parameter_count() ? noise_prior_deviation : signal_prior_deviation;
  }
  [[nodiscard]] Covariance covariance_of(std::span<const double> theta) const {
    return {shape, theta.first(Covariance::parameter_count(shape))};
  }
  [[nodiscard]] double base_mean(const GaussianProcessPoint& point) const {
    const double mean = options.prior_mean ? options.prior_mean(point) : 0.0;
    return std::isfinite(mean) ? mean : 0.0;
  }
  [[nodiscard]] double standardised(const Observation& one) const { return (one.value - base_mean(one.point) - center) / scale; }
  /// What stands on the diagonal of K next to the signal.
  [[nodiscard]] double noise_of(const Observation& one, double times) const { return times * one.variance / (scale * scale); }

  [[nodiscard]] bool seen(const GaussianProcessPoint& point) const {
    return std::any_of(data.begin(), data.end(),
                       [&](const Observation& one) { return same_place(shape, one.point, point, place_tolerance); });
  }
  [[nodiscard]] Eigen::MatrixXd matrix(const Covariance& with, double signal_variance) const;
  [[nodiscard]] Eigen::VectorXd cross(const GaussianProcessPoint& point) const;
  [[nodiscard]] double log_posterior(std::span<const double> theta, std::span<double> gradient) const;
  void select(const GaussianProcessPoint& focus);
  void standardise();
  void optimise();
  void factorise();
  void solve_weights();
  void extend(const Observation& one);
};

/// Covariance of the data without noise.
Eigen::MatrixXd GaussianProcess::State::matrix(const Covariance& with, double signal_variance) const {
  const auto count = static_cast<Eigen::Index>(data.size());
  Eigen::MatrixXd result(count, count);
  for (Eigen::Index i = 0; i < count; ++i) {
    result(i, i) = signal_variance * (1.0 + with.peculiar());
    for (Eigen::Index j = 0; j < i; ++j) {
      const double value =
          signal_variance * with.shared(data[static_cast<std::size_t>(i)].point, data[static_cast<std::size_t>(j)].point);
      result(i, j) = value;
      result(j, i) = value;
    }
  }
  return result;
}

/// Covariance of one point with the data. What is peculiar to a place is known only where it was observed.
Eigen::VectorXd GaussianProcess::State::cross(const GaussianProcessPoint& point) const {
  Eigen::VectorXd result(static_cast<Eigen::Index>(data.size()));
  for (std::size_t i = 0; i < data.size(); ++i) {
    double value = covariance->shared(point, data[i].point);
    if (covariance->peculiar() > 0 && same_place(shape, point, data[i].point, place_tolerance)) value += covariance->peculiar();
    result(static_cast<Eigen::Index>(i)) = signal * value;
  }
  return result;
}

/// The observations that enter the fit: all, or those nearest to the focus, the newer first among equals.
void GaussianProcess::State::select(const GaussianProcessPoint& focus) {
  std::vector<std::size_t> order(kept.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  if (order.size() > options.fitted_max) {
    std::vector<double> distance(kept.size());
    for (std::size_t i = 0; i < kept.size(); ++i) distance[i] = squared_distance(shape, kept[i].point, focus);
    std::sort(order.begin(), order.end(),
              [&](std::size_t a, std::size_t b) { return distance[a] != distance[b] ? distance[a] < distance[b] : a > b; });
    order.resize(options.fitted_max);
    std::sort(order.begin(), order.end());
  }
  data.clear();
  for (const std::size_t index : order) data.push_back(kept[index]);
}

void GaussianProcess::State::standardise() {
  const auto count = static_cast<double>(data.size());
  center = 0;
  if (!options.prior_mean) {
    double weight = 0;
    for (const Observation& one : data) {
      const double precision = 1.0 / (one.variance + options.output_scale * options.output_scale);
      center += precision * one.value;
      weight += precision;
    }
    center = weight > 0 ? center / weight : 0.0;
  }
  // The prior scale counts as three observations: one or two points say nothing about the spread, and equal values must not make
  // it zero.
  constexpr double prior_count = 3.0;
  double sum = prior_count * options.output_scale * options.output_scale;
  for (const Observation& one : data) {
    const double residual = one.value - base_mean(one.point) - center;
    sum += residual * residual;
  }
  scale = std::sqrt(sum / (prior_count + count));
  targets.resize(static_cast<Eigen::Index>(data.size()));
  for (std::size_t i = 0; i < data.size(); ++i) {
    targets(static_cast<Eigen::Index>(i)) = standardised(data[i]);
  }
}

void GaussianProcess::State::optimise() {
  parameters.resize(parameter_count());
  std::vector<double> lower(parameter_count());
  std::vector<double> upper(parameter_count());
  for (std::size_t i = 0; i < parameter_count(); ++i) {
    parameters[i] = prior_mean(i);
    lower[i] = prior_mean(i) - parameter_reach * prior_deviation(i);
    upper[i] = prior_mean(i) + parameter_reach * prior_deviation(i);
  }
  evaluations = 0;
  if (data.size() < 2) return;  // one observation moves nothing but the scale
  struct Best {
    const State* state;
    double value;
    std::vector<double> parameters;
    std::int32_t evaluations;
  } best{this, -std::numeric_limits<double>::infinity(), parameters, 0};
  const auto objective = [](const std::vector<double>& theta, std::vector<double>& gradient, void* context) {
    auto& found = *static_cast<Best*>(context);
    ++found.evaluations;
    const double value = found.state->log_posterior(theta, gradient);
    if (value > found.value) {
      found.value = value;
      found.parameters = theta;
    }
    return std::isfinite(value) ? value : -1e10;
  };
  try {
    nlopt::opt optimiser(nlopt::LD_LBFGS, static_cast<unsigned>(parameter_count()));
    optimiser.set_max_objective(objective, &best);
    optimiser.set_lower_bounds(lower);
    optimiser.set_upper_bounds(upper);
    optimiser.set_maxeval(options.evaluations_max);
    optimiser.set_ftol_abs(1e-4);
    std::vector<double> theta = parameters;
    double value = 0;
    optimiser.optimize(theta, value);
  } catch (const std::exception&) {
    // The line search gives up on rounding near the optimum; what it had found so far stands in `best`.
  }
  parameters = best.parameters;
  evaluations = best.evaluations;
}

/// Rasmussen and Williams 2006, equations 5.8 and 5.9, with the kernel's derivatives written out.
double GaussianProcess::State::log_posterior(std::span<const double> theta, std::span<double> gradient) const {
  CHECK(theta.size() == parameter_count() && (gradient.empty() || gradient.size() == theta.size()));
  const Covariance with = covariance_of(theta);
  const double signal_variance = std::exp(theta[theta.size() - 2]);
  const double noise_factor = std::exp(theta.back());
  const Eigen::MatrixXd clean = matrix(with, signal_variance);
  Eigen::MatrixXd full = clean;
  for (std::size_t i = 0; i < data.size(); ++i) {
    const auto row = static_cast<Eigen::Index>(i);
    full(row, row) += noise_of(data[i], noise_factor) + jitter_first * signal_variance;
  }
  const Eigen::LLT<Eigen::MatrixXd> decomposed(full);
  if (decomposed.info() != Eigen::Success) {
    std::fill(gradient.begin(), gradient.end(), 0.0);
    return -std::numeric_limits<double>::infinity();
  }
  const auto count = static_cast<Eigen::Index>(data.size());
  const Eigen::VectorXd alpha = decomposed.solve(targets);
  double value = -0.5 * targets.dot(alpha) - 0.5 * static_cast<double>(count) * std::log(2.0 * M_PI);
  for (Eigen::Index i = 0; i < count; ++i) value -= std::log(decomposed.matrixLLT()(i, i));
  for (std::size_t i = 0; i < theta.size(); ++i) {
    const double z = (theta[i] - prior_mean(i)) / prior_deviation(i);
    value -= 0.5 * z * z;
  }
  if (!std::isfinite(value)) return -std::numeric_limits<double>::infinity();
  if (gradient.empty()) return value;

  const Eigen::MatrixXd outer = alpha * alpha.transpose() - decomposed.solve(Eigen::MatrixXd::Identity(count, count));
  std::fill(gradient.begin(), gradient.end(), 0.0);
  const std::size_t signal_index = parameter_count() - 2;
  for (Eigen::Index i = 0; i < count; ++i) {
    const Observation& a = data[static_cast<std::size_t>(i)];
    const double own = 0.5 * outer(i, i);
    gradient[signal_index] += own * (clean(i, i) + jitter_first * signal_variance);
    gradient[signal_index + 1] += own * noise_of(a, noise_factor);
    with.add_peculiar_gradient(own * signal_variance, gradient);
    for (Eigen::Index j = 0; j < i; ++j) {  // symmetric: each pair counts twice, so the half goes
      gradient[signal_index] += outer(i, j) * clean(i, j);
      with.add_gradient(a.point, data[static_cast<std::size_t>(j)].point, outer(i, j) * signal_variance, gradient);
    }
  }
  for (std::size_t i = 0; i < theta.size(); ++i)
    gradient[i] -= (theta[i] - prior_mean(i)) / (prior_deviation(i) * prior_deviation(i));
  if (!std::all_of(gradient.begin(), gradient.end(), [](double one) { return std::isfinite(one); })) {
    std::fill(gradient.begin(), gradient.end(), 0.0);
  }
  return value;
}

void GaussianProcess::State::factorise() {
  covariance.emplace(covariance_of(parameters));
  signal = std::exp(parameters[parameters.size() - 2]);
  noise = std::exp(parameters.back());
  Eigen::MatrixXd full = matrix(*covariance, signal);
  for (std::size_t i = 0; i < data.size(); ++i) {
    const auto row = static_cast<Eigen::Index>(i);
    full(row, row) += noise_of(data[i], noise);
  }
  fitted = false;
  for (jitter = jitter_first; jitter <= jitter_last; jitter *= 10.0) {
    Eigen::MatrixXd stable = full;
    stable.diagonal().array() += jitter * signal;
    const Eigen::LLT<Eigen::MatrixXd> decomposed(stable);
    if (decomposed.info() != Eigen::Success) continue;
    factor = decomposed.matrixL();
    solve_weights();
    if (!weights.allFinite()) continue;
    fitted = true;
    return;
  }
}

void GaussianProcess::State::solve_weights() {
  weights = targets;
  factor.triangularView<Eigen::Lower>().solveInPlace(weights);
  factor.triangularView<Eigen::Lower>().transpose().solveInPlace(weights);
}

/// One more row of the factor, O(n^2): L l = k, and what is left of the new diagonal entry.
void GaussianProcess::State::extend(const Observation& one) {
  Eigen::VectorXd row = cross(one.point);
  factor.triangularView<Eigen::Lower>().solveInPlace(row);
  const double diagonal = signal * (1.0 + covariance->peculiar() + jitter) + noise_of(one, noise);
  const double rest = diagonal - row.squaredNorm();
  const Eigen::Index count = factor.rows();
  data.push_back(one);
  targets.conservativeResize(count + 1);
  targets(count) = standardised(one);
  if (!(rest > jitter_first * diagonal)) return factorise();  // lost to rounding: needs more jitter
  factor.conservativeResize(count + 1, count + 1);
  factor.col(count).setZero();
  factor.row(count).head(count) = row.transpose();
  factor(count, count) = std::sqrt(rest);
  solve_weights();
}

GaussianProcess::GaussianProcess(const GaussianProcessOptions& options) : state_(std::make_unique<State>()) {
  CHECK(options.fitted_max >= 1 && options.kept_max >= 1 && options.output_scale > 0);
  state_->options = options;
  state_->shape = {.length_scales = options.length_scales,
                   .category_count = options.category_count,
                   .conditions = options.conditions,
                   .category_correlation = options.category_correlation,
                   .peculiar_share = options.peculiar_share};
  for (const ActsUnder& one : options.conditions) {
    CHECK(one.number < options.length_scales.size() && one.category < options.category_count, "number=", one.number);
  }
}
GaussianProcess::~GaussianProcess() = default;
GaussianProcess::GaussianProcess(GaussianProcess&&) noexcept = default;
GaussianProcess& GaussianProcess::operator=(GaussianProcess&&) noexcept = default;

bool GaussianProcess::observe(const GaussianProcessPoint& point, double value, double variance) {
  State& s = *state_;
  const bool shaped =
      point.numbers.size() == s.options.length_scales.size() && point.categories.size() == s.options.category_count;
  if (!shaped || !all_within_reach(point.numbers) || !std::isfinite(value) || std::abs(value) > magnitude_max ||
      !std::isfinite(variance) || variance < 0) {
    ++s.refused;
    return false;
  }
  const Observation added{point, value, std::max(variance, variance_min)};
  const auto here = [&](const Observation& one) { return same_place(s.shape, one.point, point, place_tolerance); };
  const auto known = std::find_if(s.kept.begin(), s.kept.end(), here);
  if (known != s.kept.end()) {
    merge(*known, added);
  } else {
    s.kept.push_back(added);
    if (s.kept.size() > s.options.kept_max) s.kept.pop_front();
  }
  if (!s.fitted) return true;
  const auto in_fit = std::find_if(s.data.begin(), s.data.end(), here);
  if (in_fit != s.data.end()) {
    merge(*in_fit, added);
    s.targets(in_fit - s.data.begin()) = s.standardised(*in_fit);
    s.factorise();
  } else if (s.data.size() < s.options.fitted_max) {
    s.extend(added);
  }
  return true;
}

void GaussianProcess::fit(const GaussianProcessPoint& focus) {
  State& s = *state_;
  s.fitted = false;
  s.data.clear();
  if (s.kept.empty()) return;
  s.select(focus);
  s.standardise();
  s.optimise();
  s.factorise();
}

Prediction GaussianProcess::predict(const GaussianProcessPoint& point) const {
  const State& s = *state_;
  const double base = s.base_mean(point) + s.center;
  if (!s.fitted) return {.mean = base, .variance = s.options.output_scale * s.options.output_scale};
  Eigen::VectorXd cross = s.cross(point);
  const double mean = base + s.scale * cross.dot(s.weights);
  s.factor.triangularView<Eigen::Lower>().solveInPlace(cross);
  const double variance = std::max(0.0, s.signal * (1.0 + s.covariance->peculiar()) - cross.squaredNorm());
  const double peculiar = s.seen(point) ? 0.0 : s.signal * s.covariance->peculiar();
  return {mean, variance * s.scale * s.scale, std::min(peculiar, variance) * s.scale * s.scale};
}

void GaussianProcess::refactor() {
  if (!state_->data.empty()) state_->factorise();
}

std::int32_t GaussianProcess::evaluation_count() const {
  return state_->evaluations;
}
bool GaussianProcess::fitted() const {
  return state_->fitted;
}
std::size_t GaussianProcess::observation_count() const {
  return state_->kept.size();
}
std::size_t GaussianProcess::fitted_count() const {
  return state_->data.size();
}
std::uint64_t GaussianProcess::refused_count() const {
  return state_->refused;
}
double GaussianProcess::jitter() const {
  return state_->jitter;
}
std::vector<double> GaussianProcess::parameters() const {
  return state_->parameters;
}

double GaussianProcess::log_posterior(std::span<const double> parameters, std::span<double> gradient) const {
  return state_->log_posterior(parameters, gradient);
}

}  // namespace rubato::tuner
