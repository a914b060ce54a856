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

#include "manifests/check.h"

namespace rubato::tuner {

namespace {

constexpr double same_place = 1e-6;
constexpr double value_magnitude_max = 1e6;
constexpr double jitter_first = 1e-9;
constexpr double jitter_last = 1e-2;
constexpr double variance_min = 1e-9;
// Standard deviations of the Gaussian priors on log parameters: wide enough for the data to win after some ten observations,
// narrow enough that two observations do not make a length scale vanish.
constexpr double length_scale_prior_sd = 0.6;
constexpr double category_prior_mean = 0.0;  // correlation one half
constexpr double category_prior_sd = 1.0;
constexpr double signal_prior_sd = 0.6;
constexpr double noise_prior_sd = 0.5;
constexpr double parameter_reach = 4.0;  // the search box: this many prior standard deviations

struct Observation {
  GaussianProcessPoint point;
  double value = 0;
  double variance = 0;
};

bool all_finite(const std::vector<double>& values) {
  return std::all_of(values.begin(), values.end(), [](double value) { return std::isfinite(value); });
}

double squared_distance(const GaussianProcessPoint& a, const GaussianProcessPoint& b, const std::vector<double>& scales) {
  double sum = 0;
  for (std::size_t i = 0; i < a.numbers.size(); ++i) {
    const double delta = (a.numbers[i] - b.numbers[i]) / scales[i];
    sum += delta * delta;
  }
  for (std::size_t i = 0; i < a.categories.size(); ++i) sum += a.categories[i] == b.categories[i] ? 0.0 : 1.0;
  return sum;
}

bool at_same_place(const GaussianProcessPoint& a, const GaussianProcessPoint& b) {
  if (a.categories != b.categories) return false;
  for (std::size_t i = 0; i < a.numbers.size(); ++i) {
    if (std::abs(a.numbers[i] - b.numbers[i]) > same_place) return false;
  }
  return true;
}

/// Hyper-parameters in natural form.
struct Kernel {
  std::vector<double> length_scales;
  std::vector<double> correlations;  // between different values of one category
  double signal = 1;
  double noise = 1;

  /// Everything but the signal variance; decay is exp(-sqrt(5) r), which the gradient needs too.
  [[nodiscard]] double correlation(const GaussianProcessPoint& a, const GaussianProcessPoint& b) const {
    double sum = 0;
    for (std::size_t i = 0; i < length_scales.size(); ++i) {
      const double delta = (a.numbers[i] - b.numbers[i]) / length_scales[i];
      sum += delta * delta;
    }
    const double r = std::sqrt(5.0 * sum);
    double value = (1.0 + r + r * r / 3.0) * std::exp(-r);
    for (std::size_t i = 0; i < correlations.size(); ++i) {
      if (a.categories[i] != b.categories[i]) value *= correlations[i];
    }
    return value;
  }
};

}  // namespace

struct GaussianProcess::State {
  GaussianProcessOptions options;
  std::deque<Observation> kept;
  std::uint64_t refused = 0;

  // Of the last fit.
  std::vector<Observation> data;
  std::vector<double> parameters;
  Kernel kernel;
  Eigen::VectorXd targets;  // standardised residuals
  Eigen::VectorXd weights;  // K^-1 targets
  Eigen::LLT<Eigen::MatrixXd> factor;
  double center = 0;
  double scale = 1;
  double jitter = 0;
  bool fitted = false;

  [[nodiscard]] std::size_t numbers() const { return options.length_scales.size(); }
  [[nodiscard]] std::size_t parameter_count() const { return numbers() + options.category_count + 2; }
  [[nodiscard]] double prior_mean(std::size_t parameter) const {
    if (parameter < numbers()) return std::log(options.length_scales[parameter]);
    if (parameter < numbers() + options.category_count) return category_prior_mean;
    return 0.0;
  }
  [[nodiscard]] double prior_sd(std::size_t parameter) const {
    if (parameter < numbers()) return length_scale_prior_sd;
    if (parameter < numbers() + options.category_count) return category_prior_sd;
    return parameter + 1 == parameter_count() ? noise_prior_sd : signal_prior_sd;
  }
  [[nodiscard]] double base_mean(const GaussianProcessPoint& point) const {
    const double mean = options.prior_mean ? options.prior_mean(point) : 0.0;
    return std::isfinite(mean) ? mean : 0.0;
  }

  [[nodiscard]] Kernel kernel_of(std::span<const double> theta) const {
    Kernel result;
    for (std::size_t i = 0; i < numbers(); ++i) result.length_scales.push_back(std::exp(theta[i]));
    for (std::size_t i = 0; i < options.category_count; ++i) {
      result.correlations.push_back(1.0 / (1.0 + std::exp(-theta[numbers() + i])));
    }
    result.signal = std::exp(theta[parameter_count() - 2]);
    result.noise = std::exp(theta[parameter_count() - 1]);
    return result;
  }

  /// Covariance of the data without noise; the noise stands on the diagonal of the second result.
  void covariance(const Kernel& with, Eigen::MatrixXd& signal, Eigen::VectorXd& noise) const {
    const auto count = static_cast<Eigen::Index>(data.size());
    signal.resize(count, count);
    noise.resize(count);
    for (Eigen::Index i = 0; i < count; ++i) {
      noise(i) = with.noise * data[static_cast<std::size_t>(i)].variance / (scale * scale);
      for (Eigen::Index j = 0; j <= i; ++j) {
        const double value =
            with.signal * with.correlation(data[static_cast<std::size_t>(i)].point, data[static_cast<std::size_t>(j)].point);
        signal(i, j) = value;
        signal(j, i) = value;
      }
    }
  }

  [[nodiscard]] double log_posterior(std::span<const double> theta, std::span<double> gradient) const;
  void select(const GaussianProcessPoint& focus);
  void standardise();
  void optimise();
  void factorise();
};

/// The observations that enter the fit: all, or those nearest to the focus, the newer first among equals.
void GaussianProcess::State::select(const GaussianProcessPoint& focus) {
  std::vector<std::size_t> order(kept.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  if (order.size() > options.fitted_max) {
    std::vector<double> distance(kept.size());
    for (std::size_t i = 0; i < kept.size(); ++i) distance[i] = squared_distance(kept[i].point, focus, options.length_scales);
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
    targets(static_cast<Eigen::Index>(i)) = (data[i].value - base_mean(data[i].point) - center) / scale;
  }
}

void GaussianProcess::State::optimise() {
  parameters.resize(parameter_count());
  std::vector<double> lower(parameter_count());
  std::vector<double> upper(parameter_count());
  for (std::size_t i = 0; i < parameter_count(); ++i) {
    parameters[i] = prior_mean(i);
    lower[i] = prior_mean(i) - parameter_reach * prior_sd(i);
    upper[i] = prior_mean(i) + parameter_reach * prior_sd(i);
  }
  if (data.size() < 2) return;  // one observation moves nothing but the scale
  struct Best {
    const State* state;
    double value;
    std::vector<double> parameters;
  } best{this, -std::numeric_limits<double>::infinity(), parameters};
  const auto objective = [](const std::vector<double>& theta, std::vector<double>& gradient, void* context) {
    auto& found = *static_cast<Best*>(context);
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
}

/// Rasmussen and Williams 2006, equations 5.8 and 5.9, with the kernel's derivatives written out.
double GaussianProcess::State::log_posterior(std::span<const double> theta, std::span<double> gradient) const {
  CHECK(theta.size() == parameter_count() && (gradient.empty() || gradient.size() == theta.size()));
  const Kernel with = kernel_of(theta);
  Eigen::MatrixXd signal;
  Eigen::VectorXd noise;
  covariance(with, signal, noise);
  Eigen::MatrixXd full = signal;
  full.diagonal() += noise;
  full.diagonal().array() += jitter_first * with.signal;
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
    const double z = (theta[i] - prior_mean(i)) / prior_sd(i);
    value -= 0.5 * z * z;
  }
  if (!std::isfinite(value)) return -std::numeric_limits<double>::infinity();
  if (gradient.empty()) return value;

  const Eigen::MatrixXd outer = alpha * alpha.transpose() - decomposed.solve(Eigen::MatrixXd::Identity(count, count));
  std::fill(gradient.begin(), gradient.end(), 0.0);
  const std::size_t signal_index = parameter_count() - 2;
  for (Eigen::Index i = 0; i < count; ++i) {
    const GaussianProcessPoint& a = data[static_cast<std::size_t>(i)].point;
    gradient[signal_index] += 0.5 * outer(i, i) * with.signal * (1.0 + jitter_first);
    gradient[signal_index + 1] += 0.5 * outer(i, i) * noise(i);
    for (Eigen::Index j = 0; j < i; ++j) {  // symmetric: each pair counts twice, so the half goes
      const GaussianProcessPoint& b = data[static_cast<std::size_t>(j)].point;
      const double share = outer(i, j);
      gradient[signal_index] += share * signal(i, j);
      double squared = 0;
      double different = 1;
      for (std::size_t d = 0; d < numbers(); ++d) {
        const double delta = (a.numbers[d] - b.numbers[d]) / with.length_scales[d];
        squared += delta * delta;
      }
      for (std::size_t c = 0; c < options.category_count; ++c) {
        if (a.categories[c] == b.categories[c]) continue;
        different *= with.correlations[c];
        gradient[numbers() + c] += share * signal(i, j) * (1.0 - with.correlations[c]);
      }
      const double r = std::sqrt(5.0 * squared);
      const double slope = with.signal * different * (5.0 / 3.0) * (1.0 + r) * std::exp(-r);
      for (std::size_t d = 0; d < numbers(); ++d) {
        const double delta = (a.numbers[d] - b.numbers[d]) / with.length_scales[d];
        gradient[d] += share * slope * delta * delta;
      }
    }
  }
  for (std::size_t i = 0; i < theta.size(); ++i) gradient[i] -= (theta[i] - prior_mean(i)) / (prior_sd(i) * prior_sd(i));
  if (!std::all_of(gradient.begin(), gradient.end(), [](double one) { return std::isfinite(one); })) {
    std::fill(gradient.begin(), gradient.end(), 0.0);
  }
  return value;
}

void GaussianProcess::State::factorise() {
  kernel = kernel_of(parameters);
  Eigen::MatrixXd signal;
  Eigen::VectorXd noise;
  covariance(kernel, signal, noise);
  fitted = false;
  for (jitter = jitter_first; jitter <= jitter_last; jitter *= 10.0) {
    Eigen::MatrixXd full = signal;
    full.diagonal() += noise;
    full.diagonal().array() += jitter * kernel.signal;
    factor.compute(full);
    if (factor.info() != Eigen::Success) continue;
    weights = factor.solve(targets);
    if (!weights.allFinite()) continue;
    fitted = true;
    return;
  }
}

GaussianProcess::GaussianProcess(const GaussianProcessOptions& options) : state_(std::make_unique<State>()) {
  CHECK(options.fitted_max >= 1 && options.kept_max >= 1 && options.output_scale > 0);
  state_->options = options;
}
GaussianProcess::~GaussianProcess() = default;
GaussianProcess::GaussianProcess(GaussianProcess&&) noexcept = default;
GaussianProcess& GaussianProcess::operator=(GaussianProcess&&) noexcept = default;

bool GaussianProcess::observe(const GaussianProcessPoint& point, double value, double variance) {
  State& s = *state_;
  const bool shaped = point.numbers.size() == s.numbers() && point.categories.size() == s.options.category_count;
  if (!shaped || !all_finite(point.numbers) || !std::isfinite(value) || std::abs(value) > value_magnitude_max ||
      !std::isfinite(variance) || variance < 0) {
    ++s.refused;
    return false;
  }
  const double floored = std::max(variance, variance_min);
  for (Observation& one : s.kept) {
    if (!at_same_place(one.point, point)) continue;
    const double own = 1.0 / one.variance;
    const double other = 1.0 / floored;
    one.value = (own * one.value + other * value) / (own + other);
    one.variance = 1.0 / (own + other);
    return true;
  }
  s.kept.push_back({point, value, floored});
  if (s.kept.size() > s.options.kept_max) s.kept.pop_front();
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
  if (!s.fitted) return {base, s.options.output_scale * s.options.output_scale};
  Eigen::VectorXd cross(static_cast<Eigen::Index>(s.data.size()));
  for (std::size_t i = 0; i < s.data.size(); ++i) {
    cross(static_cast<Eigen::Index>(i)) = s.kernel.signal * s.kernel.correlation(point, s.data[i].point);
  }
  const double mean = base + s.scale * cross.dot(s.weights);
  s.factor.matrixL().solveInPlace(cross);
  const double variance = std::max(0.0, s.kernel.signal - cross.squaredNorm());
  return {mean, variance * s.scale * s.scale};
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
