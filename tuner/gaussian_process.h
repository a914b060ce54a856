// SPDX-License-Identifier: Apache-2.0
// Gaussian process regression over mixed inputs: Matern 5/2 with one length scale per number, one correlation per category, noise
// known per observation up to a fitted factor. Pure and deterministic. What the inputs and outputs mean is the business of
// search.h.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <vector>

namespace rubato::tuner {

/// One input. All points of one process have the same number of numbers and categories.
struct GaussianProcessPoint {
  std::vector<double> numbers;
  std::vector<std::int32_t> categories;

  friend bool operator==(const GaussianProcessPoint&, const GaussianProcessPoint&) = default;
};

struct GaussianProcessOptions {
  std::vector<double> length_scales;                                // prior medians, one per number
  std::size_t category_count = 0;                                   // categories per point
  double output_scale = 1.0;                                        // prior standard deviation of the outputs
  std::size_t kept_max = 2048;                                      // observations remembered; the oldest go first
  std::size_t fitted_max = 128;                                     // of those, how many enter a fit: those nearest to its focus
  std::int32_t evaluations_max = 60;                                // of the marginal likelihood, per fit
  std::function<double(const GaussianProcessPoint&)> prior_mean{};  // empty: the mean of the observations
};

struct Prediction {
  double mean = 0;
  double variance = 0;  // of the function, without observation noise
};

/// Cost of fit(): evaluations_max * fitted_max^3 / 3 at most. Observations at the same place (within 1e-6 in every number) are
/// merged by their precision. When no jitter makes the matrix positive definite, predictions fall back to the prior and fitted()
/// is false.
class GaussianProcess {
 public:
  explicit GaussianProcess(const GaussianProcessOptions& options);
  ~GaussianProcess();
  GaussianProcess(GaussianProcess&&) noexcept;
  GaussianProcess& operator=(GaussianProcess&&) noexcept;

  /// False, and counted, when anything is not finite, |value| > 1e6, the variance is negative or the point has another shape.
  bool observe(const GaussianProcessPoint& point, double value, double variance);

  /// Chooses hyper-parameters by marginal likelihood (with weak priors), from the observations nearest to focus.
  void fit(const GaussianProcessPoint& focus);

  [[nodiscard]] Prediction predict(const GaussianProcessPoint& point) const;

  [[nodiscard]] bool fitted() const;
  [[nodiscard]] std::size_t observation_count() const;  // kept, after merging
  [[nodiscard]] std::size_t fitted_count() const;       // that entered the last fit
  [[nodiscard]] std::uint64_t refused_count() const;
  [[nodiscard]] double jitter() const;  // that the last fit needed, relative to the signal variance

  /// Hyper-parameters in log form: length scales, category logits, signal variance, noise factor.
  [[nodiscard]] std::vector<double> parameters() const;

  /// Log marginal likelihood plus log prior at these hyper-parameters, and its gradient (same size, or empty when not wanted),
  /// over the data of the last fit. -infinity where the matrix is not positive definite.
  [[nodiscard]] double log_posterior(std::span<const double> parameters, std::span<double> gradient) const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace rubato::tuner
