// SPDX-License-Identifier: Apache-2.0
#include "policies/step_time.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "manifests/check.h"

namespace rubato::policies {
namespace {

constexpr int count_of = StepTimeModel::coefficient_count;
using Vector = StepTimeModel::Vector;
using Matrix = StepTimeModel::Matrix;

// Typical sizes of the features, so that the estimate's numbers are of one magnitude.
constexpr Vector scales{1.0, 256.0, 256.0 * 1024.0, 64.0, 65536.0};

constexpr double forgetting = 0.985;               // about 65 steps of memory in each direction that is being seen
constexpr double guess_seconds_per_token = 0.001;  // pessimistic for any machine worth serving on
constexpr double prior_information = 1e-3;         // against about 1 to 10^4 for one real step
constexpr double outlier_sigmas = 3.0;
constexpr std::int32_t surprises_for_change = 4;  // at 1 % of independent outliers: once in 10^8 steps
constexpr double fade_on_change = 0.7;
constexpr double smallest_sigma = 0.01;  // of the duration; timers and caches alone are not better
constexpr double largest_sigma = 1.0;
constexpr std::uint64_t steps_believed = 16;  // what coefficients from elsewhere count for

Vector inputs(const StepFeatures& features) {
  const Vector raw{features.tokens > 0 ? 1.0 : 0.0, static_cast<double>(features.tokens), features.attention,
                   static_cast<double>(features.decode_rows), features.context};
  Vector scaled{};
  for (std::size_t i = 0; i < count_of; ++i) scaled[i] = raw[i] / scales[i];
  return scaled;
}

double dot(const Vector& left, const Vector& right) {
  double sum = 0;
  for (std::size_t i = 0; i < count_of; ++i) sum += left[i] * right[i];
  return sum;
}

Vector multiply(const Matrix& matrix, const Vector& vector) {
  Vector result{};
  for (std::size_t row = 0; row < count_of; ++row) result[row] = dot(matrix[row], vector);
  return result;
}

// Solves matrix * x = right over the free variables (bits of mask), the others staying zero; by Cholesky. False where the matrix
// is not safely positive definite.
bool solve(const Matrix& matrix, const Vector& right, unsigned mask, Vector& solution) {
  std::array<std::size_t, count_of> free{};
  std::size_t n = 0;
  for (std::size_t i = 0; i < count_of; ++i) {
    if ((mask >> i) & 1u) free[n++] = i;
  }
  Matrix lower{};
  Vector half{};
  for (std::size_t row = 0; row < n; ++row) {
    for (std::size_t column = 0; column <= row; ++column) {
      double sum = matrix[free[row]][free[column]];
      for (std::size_t k = 0; k < column; ++k) sum -= lower[row][k] * lower[column][k];
      if (row == column) {
        if (!(sum > 1e-12 * matrix[free[row]][free[row]])) return false;
        lower[row][row] = std::sqrt(sum);
      } else {
        lower[row][column] = sum / lower[column][column];
      }
    }
    double sum = right[free[row]];
    for (std::size_t k = 0; k < row; ++k) sum -= lower[row][k] * half[k];
    half[row] = sum / lower[row][row];
  }
  solution.fill(0);
  for (std::size_t row = n; row-- > 0;) {
    double sum = half[row];
    for (std::size_t k = row + 1; k < n; ++k) sum -= lower[k][row] * solution[free[k]];
    solution[free[row]] = sum / lower[row][row];
  }
  return true;
}

// The non-negative vector closest to estimate in the metric of information. With five variables, trying each set of free ones is
// exact and takes constant time (the problem is convex: the best feasible candidate is the optimum).
Vector best_non_negative(const Matrix& information, const Vector& estimate) {
  if (*std::min_element(estimate.begin(), estimate.end()) >= 0) return estimate;
  const Vector target = multiply(information, estimate);
  Vector best{};
  double best_gain = 0;  // the all-zero vector's
  for (unsigned mask = 1; mask < (1u << count_of); ++mask) {
    Vector candidate{};
    if (!solve(information, target, mask, candidate)) continue;
    if (*std::min_element(candidate.begin(), candidate.end()) < 0) continue;
    const double gain = dot(target, candidate);  // at a solution the objective falls by half of this
    if (gain > best_gain) {
      best_gain = gain;
      best = candidate;
    }
  }
  return best;
}

}  // namespace

void StepFeatures::add_decode(std::int32_t context_tokens) {
  ++tokens;
  ++decode_rows;
  context += context_tokens;
}

void StepFeatures::add_chunk(std::int32_t begin, std::int32_t count) {
  tokens += count;
  ++prefill_rows;
  attention += static_cast<double>(count) * (static_cast<double>(begin) + static_cast<double>(count));
}

void StepFeatures::remove_chunk(std::int32_t begin, std::int32_t count) {
  tokens -= count;
  --prefill_rows;
  attention -= static_cast<double>(count) * (static_cast<double>(begin) + static_cast<double>(count));
}

StepTimeModel::StepTimeModel() : relative_variance_(0.25), overrun_variance_(0.25) {
  estimate_[1] = guess_seconds_per_token * scales[1];
  coefficients_[1] = guess_seconds_per_token;
  for (std::size_t i = 0; i < count_of; ++i) information_[i][i] = prior_information;
}

StepTimeModel StepTimeModel::from_coefficients(const Vector& coefficients, Duration spread) {
  CHECK(spread >= Duration::zero());
  StepTimeModel model;
  double typical_seconds = 0;  // of a step in which every feature has its typical size
  for (std::size_t i = 0; i < count_of; ++i) {
    CHECK(std::isfinite(coefficients[i]) && coefficients[i] >= 0, "coefficient ", i, " is ", coefficients[i]);
    model.estimate_[i] = coefficients[i] * scales[i];
    typical_seconds += model.estimate_[i];
  }
  if (typical_seconds <= 0) return StepTimeModel();
  model.coefficients_ = coefficients;
  for (std::size_t i = 0; i < count_of; ++i) {
    model.information_[i][i] =
        std::max(prior_information, static_cast<double>(steps_believed) / (typical_seconds * typical_seconds));
  }
  const double relative = std::clamp(to_seconds(spread) / typical_seconds, smallest_sigma, largest_sigma);
  model.relative_variance_ = model.overrun_variance_ = relative * relative;
  model.prefill_count_ = steps_believed;
  model.error_variance_ = to_seconds(spread) * to_seconds(spread);
  model.observation_count_ = steps_believed;
  return model;
}

void StepTimeModel::observe(const StepFeatures& features, Duration duration) {
  if (duration <= Duration::zero() || features.tokens <= 0) return;
  const double seconds = to_seconds(duration);
  const double predicted = to_seconds(predict(features));
  // Relative to the larger of both, so that neither a stalled nor an impossibly short step gains leverage.
  const double scale = std::max(seconds, predicted);
  Vector input = inputs(features);
  const double error = (seconds - dot(input, estimate_)) / scale;
  for (double& value : input) value /= scale;

  const double sigma = std::clamp(std::sqrt(relative_variance_), smallest_sigma, largest_sigma);
  const double bound = outlier_sigmas * sigma;
  const bool changed = speed_has_changed(error, bound);
  const double weight = changed || std::abs(error) <= bound ? 1.0 : bound / std::abs(error);
  if (changed) {
    for (Vector& row : information_) {
      for (double& value : row) value *= fade_on_change;
    }
  }
  learn(input, error, weight);

  // Clipped errors still widen the spread, so that a lasting change of speed stops being an outlier within some steps.
  const double clipped = std::min(std::abs(error), bound);
  const double rate = std::max(1.0 / static_cast<double>(observation_count_ + 2), 0.03);
  relative_variance_ += rate * (clipped * clipped - relative_variance_);
  const double weighted = (seconds - predicted) * weight;
  error_variance_ += rate * (weighted * weighted - error_variance_);
  ++observation_count_;

  if (features.prefill_rows == 0 || predicted <= 0) return;
  // Errors of one side stand for both; a single stall counts for no more than the clipped error.
  const double overrun = std::clamp(seconds / predicted - 1.0, 0.0, std::max(bound, 0.25));
  const double overrun_rate = std::max(1.0 / static_cast<double>(prefill_count_ + 2), 0.03);
  overrun_variance_ += overrun_rate * (2.0 * overrun * overrun - overrun_variance_);
  ++prefill_count_;
}

bool StepTimeModel::speed_has_changed(double relative_error, double bound) {
  if (std::abs(relative_error) <= bound) {
    surprises_ = 0;
  } else if (relative_error > 0) {
    surprises_ = std::min(std::max(surprises_, 0) + 1, surprises_for_change);
  } else {
    surprises_ = std::max(std::min(surprises_, 0) - 1, -surprises_for_change);
  }
  return std::abs(surprises_) == surprises_for_change;
}

void StepTimeModel::learn(const Vector& relative_input, double relative_error, double weight) {
  // Directional forgetting (Cao and Schwartz 2000): information fades along the present input alone.
  const Vector seen = multiply(information_, relative_input);
  const double known = dot(relative_input, seen);
  const double fade = known > 0 ? weight * (1.0 - forgetting) / known : 0.0;
  for (std::size_t row = 0; row < count_of; ++row) {
    for (std::size_t column = 0; column < count_of; ++column) {
      information_[row][column] += weight * relative_input[row] * relative_input[column] - fade * seen[row] * seen[column];
    }
  }
  for (std::size_t row = 0; row < count_of; ++row) {
    information_[row][row] = std::max(information_[row][row], prior_information);
    for (std::size_t column = 0; column < row; ++column) information_[row][column] = information_[column][row];
  }
  Vector step{};
  if (!solve(information_, relative_input, (1u << count_of) - 1u, step)) {
    // Rounding ate the weakest direction: give every direction the prior's width back and learn from the next step on.
    for (std::size_t i = 0; i < count_of; ++i) information_[i][i] *= 1.0 + 1e-9, information_[i][i] += prior_information;
    return;
  }
  for (std::size_t i = 0; i < count_of; ++i) estimate_[i] += weight * relative_error * step[i];
  const Vector usable = best_non_negative(information_, estimate_);
  for (std::size_t i = 0; i < count_of; ++i) coefficients_[i] = usable[i] / scales[i];
}

Duration StepTimeModel::predict(const StepFeatures& features) const {
  const Vector raw{features.tokens > 0 ? 1.0 : 0.0, static_cast<double>(features.tokens), features.attention,
                   static_cast<double>(features.decode_rows), features.context};
  constexpr double longest_seconds = 1e6;  // keeps the conversion in range
  return from_seconds(std::clamp(dot(raw, coefficients_), 0.0, longest_seconds));
}

std::int32_t StepTimeModel::largest_chunk(const StepFeatures& step, std::int32_t begin, std::int32_t max_count,
                                          Duration limit) const {
  const auto fits = [&](std::int32_t count) {
    StepFeatures with = step;
    with.add_chunk(begin, count);
    return predict(with) <= limit;
  };
  if (max_count <= 0 || !fits(1)) return 0;
  if (fits(max_count)) return max_count;
  std::int32_t low = 1;           // fits
  std::int32_t high = max_count;  // does not
  while (high - low > 1) {
    const std::int32_t middle = low + (high - low) / 2;
    (fits(middle) ? low : high) = middle;
  }
  return low;
}

double StepTimeModel::relative_overrun() const {
  return std::sqrt(overrun_variance_);
}

Duration StepTimeModel::spread() const {
  return from_seconds(std::sqrt(error_variance_));
}

}  // namespace rubato::policies
