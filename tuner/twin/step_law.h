// SPDX-License-Identifier: Apache-2.0
// How long a step takes, learnt online from step records: recursive least squares (policies/step_time.h) over what the device
// really computes (the bucket's tokens, not the step's), averaged over time, a factor per bucket, and the scatter of what is
// left. One law per lane and share; a share that was never seen is derived from one that was.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <utility>

#include "manifests/result.h"
#include "policies/step_time.h"
#include "policies/time.h"

namespace rubato::tuner {

/// One executed step.
struct StepSample {
  std::int32_t lane = 0;
  std::int32_t share_percent = 100;      // of its device, while the other lane of the device runs a step too
  policies::StepFeatures features;       // tokens: without padding
  std::optional<std::int32_t> bucket{};  // tokens of the shape that it ran in; none: eagerly
  Duration duration{};
};

/// Mean and scatter of one lane's steps at one share.
class StepLaw {
 public:
  /// Constant time on average, no allocation but for a bucket seen first (at most buckets_max are kept). Durations that are not
  /// positive are ignored.
  void observe(const policies::StepFeatures& features, std::optional<std::int32_t> bucket, Duration duration);

  /// Expected duration.
  [[nodiscard]] Duration mean(const policies::StepFeatures& features, std::optional<std::int32_t> bucket) const;
  /// A duration at this quantile, 0..1, of the scatter that was seen: mean times exp of a quantile of recent log errors.
  /// Positive.
  [[nodiscard]] Duration quantile(const policies::StepFeatures& features, std::optional<std::int32_t> bucket, double at) const;

  /// Recent mean absolute error of mean(), relative to what was measured, predicted before it was learnt from.
  [[nodiscard]] double relative_error() const { return relative_error_; }
  /// Recent standard deviation of the log errors, without outliers: half the distance of the quantiles one deviation off the
  /// middle.
  [[nodiscard]] double spread() const;
  [[nodiscard]] std::uint64_t observation_count() const { return observation_count_; }
  [[nodiscard]] const policies::StepTimeModel& model() const { return model_; }

  static constexpr std::size_t quantile_count = 65;
  static constexpr std::size_t buckets_max = 64;

  /// As JSON text and back (calibration files): coefficients, bucket factors, quantiles, errors. InvalidArgument names the field.
  [[nodiscard]] std::string to_json() const;
  [[nodiscard]] static Result<StepLaw> from_json(const std::string& text);

 private:
  struct Bucket {
    double log_factor = 0;
    double weight = 0;
  };
  [[nodiscard]] double seconds(const policies::StepFeatures& input) const;
  void average(double log_error);
  void learn_factor(std::int32_t key, double log_error);
  void keep_error(double log_error);
  void forget_first_errors(std::size_t count);
  void refresh_quantiles();
  /// Errors as the quantiles tell of them, for a law that is read from a file: else the first few new ones would be all it knows.
  void fill_errors();
  [[nodiscard]] double log_factor(std::int32_t key) const;

  static constexpr std::size_t errors_max = 4096;

  policies::StepTimeModel model_;
  std::map<std::int32_t, Bucket> buckets_;  // by tokens; steps outside of shapes by minus the class of their size
  std::array<double, quantile_count> log_quantiles_{};
  std::array<float, errors_max> log_errors_{};  // the recent ones, a ring
  std::size_t error_count_ = 0;
  std::size_t error_next_ = 0;
  policies::StepTimeModel::Vector averaged_{};  // the model's recent coefficients: it forgets fast, and what it says is noisy
  std::uint64_t averaged_count_ = 0;
  double log_level_ = 0;  // what all buckets together are off by of late
  double relative_error_ = 0;
  std::uint64_t observation_count_ = 0;
};

/// All laws of a node.
class StepLaws {
 public:
  void observe(const StepSample& sample);

  /// The law of this lane at this share: its own once it has law_observations_min; else another lane's at the same share; else
  /// that of the nearest share seen, its time scaled by the ratio of the shares. Null before anything was learnt.
  struct Found {
    const StepLaw* law = nullptr;
    double scale = 1;   // on its durations
    bool seen = false;  // the lane itself at this very share
  };
  [[nodiscard]] Found find(std::int32_t lane, std::int32_t share_percent) const;

  [[nodiscard]] std::uint64_t observation_count() const { return observation_count_; }
  /// The observation-weighted mean of the laws' relative errors.
  [[nodiscard]] double relative_error() const;

  static constexpr std::uint64_t law_observations_min = 200;

  [[nodiscard]] std::string to_json() const;
  [[nodiscard]] static Result<StepLaws> from_json(const std::string& text);

 private:
  std::map<std::pair<std::int32_t, std::int32_t>, StepLaw> laws_;  // by lane and share
  std::uint64_t observation_count_ = 0;
};

}  // namespace rubato::tuner
