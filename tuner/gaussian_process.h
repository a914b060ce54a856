// SPDX-License-Identifier: Apache-2.0
// Gaussian process regression over mixed inputs (their covariance: covariance.h), with noise known per observation up to a fitted
// factor. Pure and deterministic. What the inputs and outputs mean is the business of outlook.h.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "tuner/covariance.h"

namespace rubato::tuner {

struct GaussianProcessOptions {
  std::vector<double> length_scales;                                // prior medians, one per number
  std::size_t category_count = 0;                                   // categories per point
  std::vector<ActsUnder> conditions{};                              // numbers that do not always act
  double category_correlation = 0.5;                                // prior median, between two values of a category
  double peculiar_share = 0;                                        // prior median, see CovarianceShape
  double output_scale = 1.0;                                        // prior standard deviation of the outputs
  std::size_t kept_max = 2048;                                      // observations remembered; the oldest go first
  std::size_t fitted_max = 128;                                     // of those, how many enter a fit: those nearest to its focus
  std::int32_t evaluations_max = 60;                                // of the marginal likelihood, per fit
  std::function<double(const GaussianProcessPoint&)> prior_mean{};  // empty: the mean of the observations
};

struct Prediction {
  double mean = 0;
  double variance = 0;  // of the function, without observation noise
  double peculiar = 0;  // of the variance: what only an observation at this very place can tell
};

/// Cost of fit(): evaluations_max * fitted_max^3 / 3 at most; of observe(): kept_max comparisons, and fitted_max^2 after a fit.
/// Observations at the same place (within 1e-6 in every number that acts) are merged by their precision. When no jitter makes the
/// matrix positive definite, predictions fall back to the prior and fitted() is false.
class GaussianProcess {
 public:
  explicit GaussianProcess(const GaussianProcessOptions& options);
  ~GaussianProcess();
  GaussianProcess(GaussianProcess&&) noexcept;
  GaussianProcess& operator=(GaussianProcess&&) noexcept;

  /// False, and counted, when anything is not finite, |value| or a number is beyond 1e6, the variance is negative or the point
  /// has another shape. After a fit that holds fewer than fitted_max observations, predictions know of this one at once, under
  /// the hyper-parameters, centre and scale of the fit; else only the next fit may.
  bool observe(const GaussianProcessPoint& point, double value, double variance);

  /// Chooses hyper-parameters by marginal likelihood (with weak priors), from the observations nearest to focus.
  void fit(const GaussianProcessPoint& focus);

  /// Solves anew with the hyper-parameters, centre and scale of the last fit: what observe() keeps up step by step.
  void refactor();

  [[nodiscard]] Prediction predict(const GaussianProcessPoint& point) const;

  [[nodiscard]] bool fitted() const;
  [[nodiscard]] std::size_t observation_count() const;  // kept, after merging
  [[nodiscard]] std::size_t fitted_count() const;       // that predictions rest on
  [[nodiscard]] std::int32_t evaluation_count() const;  // of the marginal likelihood, in the last fit
  [[nodiscard]] std::uint64_t refused_count() const;
  [[nodiscard]] double jitter() const;  // that the last fit needed, relative to the signal variance

  /// Hyper-parameters in log form: those of Covariance, signal variance, noise factor.
  [[nodiscard]] std::vector<double> parameters() const;

  /// Log marginal likelihood plus log prior at these hyper-parameters, and its gradient (same size, or empty when not wanted),
  /// over the data that predictions rest on. -infinity where the matrix is not positive definite.
  [[nodiscard]] double log_posterior(std::span<const double> parameters, std::span<double> gradient) const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace rubato::tuner
