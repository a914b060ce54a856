// SPDX-License-Identifier: Apache-2.0
#include "tuner/load_watch_track.h"

#include <algorithm>
#include <cmath>

namespace rubato::tuner {

namespace {

constexpr std::array<std::int32_t, 4> scale_slices{1, 4, 16, 64};
constexpr double blocks_remembered = 600;
constexpr double blocks_assumed = 12;  // weight of what a scale starts from, in blocks
constexpr double outlier = 25;         // a block counts as at most five standard deviations
constexpr double dispersion_min = 0.8;
constexpr double hazard = 1.0 / 1800;  // prior probability of a change, per slice
constexpr double caution = 1.0;        // standard errors by which a baseline may be off without raising suspicion
// Of the threshold: no single slice, however wild, is a change of load.
constexpr double step_share_of_rate = 0.34;
constexpr double step_share_of_mean = 0.51;
constexpr double prior_count = 0.5;
// Slices teach only after so many others: else a change would be learnt as normal, or as noise, while it is being found.
constexpr std::size_t teaching_lag = 64;
constexpr std::size_t slices_settling =
    5;  // after a restart: the few slices that raised an alarm say too little about what is normal now

}  // namespace

void Dispersion::observe(double residual, double variance) {
  for (std::size_t i = 0; i < scale_count; ++i) {
    Scale& scale = scales_[i];
    scale.residual += residual;
    scale.variance += variance;
    if (++scale.filled < scale_slices[i]) continue;
    const double keep = 1.0 - 1.0 / blocks_remembered;
    const double square = std::min(scale.residual * scale.residual, outlier * at(i) * scale.variance + 4.0);
    scale.squares = keep * scale.squares + square;
    scale.expected = keep * scale.expected + scale.variance;
    scale.blocks = keep * scale.blocks + 1;
    scale.residual = scale.variance = 0;
    scale.filled = 0;
  }
}

double Dispersion::at(std::size_t scale) const {
  double result = 1;
  for (std::size_t i = 0; i <= scale; ++i) {
    const Scale& one = scales_[i];
    if (one.blocks <= 0 || one.expected <= 0) break;
    const double assumed = blocks_assumed * one.expected / one.blocks;
    result = (one.squares + assumed * result) / (one.expected + assumed);
  }
  return result;
}

double Dispersion::largest() const {
  double result = dispersion_min;
  for (std::size_t i = 0; i < scale_count; ++i) result = std::max(result, at(i));
  return result;
}

void Dispersion::drop_open_blocks() {
  for (Scale& scale : scales_) {
    scale.residual = scale.variance = 0;
    scale.filled = 0;
  }
}

void FeatureTrack::learn(const SliceSum& slice) {
  const double per_slice = slices_ > 0 ? exposure_ / slices_ : 1;
  const double arrivals_per_slice = options_.kind == TrackKind::Rate ? mean_ * per_slice : per_slice;
  const double memory =
      std::clamp(options_.memory_exposures / std::max(1e-6, arrivals_per_slice), options_.memory, 8 * options_.memory);
  const double keep = 1.0 - 1.0 / memory;
  slices_ = keep * slices_ + 1;
  exposure_ = keep * exposure_ + slice.exposure;
  sum_ = keep * sum_ + slice.sum;
  squares_ = keep * squares_ + slice.squares;
  natural_ = keep * natural_ + slice.natural;
  if (exposure_ <= 0) return;
  if (options_.kind == TrackKind::Rate) {
    mean_ = (sum_ + prior_count) / exposure_;
    variance_ = mean_;
  } else {
    mean_ = sum_ / exposure_;
    constexpr double values_assumed = 10;  // of spread 1, until enough have been seen
    const double seen = std::max(0.0, squares_ - exposure_ * mean_ * mean_);
    variance_ = std::max(options_.spread_min * options_.spread_min, (seen + values_assumed) / (exposure_ + values_assumed));
  }
}

/// Divergence of "nothing has changed" from "changed by step", per slice of usual exposure.
double FeatureTrack::information(double step) const {
  const double exposure = slices_ > 0 ? exposure_ / slices_ : 0;
  const double per_exposure =
      options_.kind == TrackKind::Rate ? mean_ * (std::expm1(step) - step) : 0.5 * step * step / variance_;
  return exposure * per_exposure / dispersion_;
}

// A Page test on a likelihood ratio raises, while nothing changes, information * v^2 * exp(-threshold) alarms per slice, where v
// is the mean of exp(-overshoot), about exp(-0.583 sqrt(2 information)) (Siegmund 1985, Sequential Analysis, chapters II and X).
double FeatureTrack::threshold(double step, double false_alarms) const {
  const double lost = std::max(1e-9, information(step));
  return std::max(4.0, std::log(lost / false_alarms) - 1.166 * std::sqrt(2 * lost));
}

void FeatureTrack::page(const SliceSum& slice) {
  const double step = options_.change;
  const bool rate = options_.kind == TrackKind::Rate;
  // Of the scale that scatters most: spells of a minute, too, are how this traffic is.
  dispersion_ = scatter_.largest();
  threshold_up_ = threshold(step, options_.false_alarms_up);
  threshold_down_ = threshold(-step, options_.false_alarms_down);
  const double values = std::max(prior_count, rate ? sum_ : exposure_);
  double grow = 0;
  double fall = 0;
  if (rate) {
    const double error = caution * std::sqrt(dispersion_ / values);
    const double expected = mean_ * slice.exposure;
    grow = slice.sum * step - expected * std::exp(error) * std::expm1(step);
    fall = -slice.sum * step - expected * std::exp(-error) * std::expm1(-step);
  } else {
    const double error = caution * std::sqrt(variance_ * dispersion_ / values);
    const double residual = slice.sum - slice.exposure * mean_;
    const double margin = slice.exposure * (error + 0.5 * step);
    grow = step * (residual - margin) / variance_;
    fall = step * (-residual - margin) / variance_;
  }
  const auto add = [&](double total, double by, double limit) {
    const double most = (rate ? step_share_of_rate : step_share_of_mean) * limit;
    return std::clamp(total + std::clamp(by / dispersion_, -most, most), 0.0, 1.5 * limit);
  };
  up_ = add(up_, grow, threshold_up_);
  down_ = add(down_, fall, threshold_down_);
}

void FeatureTrack::observe(const SliceSum& slice) {
  recent_[seen_++ % slices_remembered] = slice;
  if (settling_ > 0) {
    --settling_;
    learn_until(seen_);
    return;
  }
  // The first values are the baseline; before there is one nothing can differ from it.
  if (exposure_ > 0) page(slice);
  learn_until(seen_ - std::min(teaching_lag, seen_ / 2));
}

void FeatureTrack::learn_until(std::size_t slice) {
  for (; learned_ < slice; ++learned_) {
    const SliceSum& old = recent_[learned_ % slices_remembered];
    if (exposure_ > 0 && old.exposure > 0) {
      scatter_.observe((old.sum - old.exposure * mean_) / std::sqrt(variance_), old.exposure);
    }
    learn(old);
  }
}

double FeatureTrack::suspicion() const {
  if (threshold_up_ <= 0 || threshold_down_ <= 0) return 0;
  return std::max(up_ / threshold_up_, down_ / threshold_down_);
}

/// Logarithm of how much better "another load" explains these than the baseline does: the other's level is unknown, so that its
/// likelihood is the predictive one of a conjugate prior around the baseline (negative binomial; normal).
double FeatureTrack::likelihood_ratio(double exposure, double sum) const {
  if (options_.kind == TrackKind::Rate) {
    const double shape = prior_count;
    const double scale = shape / mean_;
    const double count = sum / dispersion_;
    const double time = exposure / dispersion_;
    const double other =
        shape * std::log(scale) - std::lgamma(shape) + std::lgamma(shape + count) - (shape + count) * std::log(scale + time);
    return other - (count * std::log(mean_) - time * mean_);
  }
  const double noise = variance_ * dispersion_;
  const double residual = sum - exposure * mean_;
  const double wide = 1.0 + exposure / noise;  // prior spread of the level: a factor e
  return -0.5 * std::log(wide) + 0.5 * residual * residual / (noise * noise * wide);
}

SliceSum FeatureTrack::last(std::size_t slices) const {
  SliceSum total;
  for (std::size_t i = 1; i <= std::min({slices, seen_, slices_remembered}); ++i) {
    const SliceSum& slice = recent_[(seen_ - i) % slices_remembered];
    total.exposure += slice.exposure;
    total.sum += slice.sum;
    total.squares += slice.squares;
    total.natural += slice.natural;
  }
  return total;
}

// The run lengths of Adams and MacKay, for runs within what is remembered, against the run that has the baseline's length. All of
// it follows from the slices remembered, so it is computed when a Page test asks and not in every slice.
ChangePoint FeatureTrack::change_point() const {
  ChangePoint result;
  if (exposure_ <= 0) return result;
  double exposure = 0;
  double sum = 0;
  double best = -1e300;
  double odds = 0;
  for (std::size_t i = 1; i <= std::min(seen_, slices_remembered); ++i) {
    const SliceSum& slice = recent_[(seen_ - i) % slices_remembered];
    exposure += slice.exposure;
    sum += slice.sum;
    const double ratio = likelihood_ratio(exposure, sum);
    odds += hazard * std::exp(std::min(600.0, ratio));
    if (ratio <= best) continue;
    best = ratio;
    result.slices = i;
  }
  result.probability = odds / (1.0 + odds);
  result.since = last(result.slices);
  return result;
}

void FeatureTrack::restart(std::size_t slices) {
  exposure_ = sum_ = squares_ = natural_ = slices_ = 0;
  up_ = down_ = 0;
  scatter_.drop_open_blocks();
  // What is kept moves to the front, so that slices count from here.
  slices = std::min({slices, seen_, slices_remembered});
  std::array<SliceSum, slices_remembered> kept{};
  for (std::size_t i = 0; i < slices; ++i) kept[i] = recent_[(seen_ - slices + i) % slices_remembered];
  recent_ = kept;
  seen_ = learned_ = slices;
  settling_ = slices_settling;
  // The change came somewhere in the first slice.
  for (std::size_t i = slices > 1 ? 1 : 0; i < slices; ++i) learn(kept[i]);
}

}  // namespace rubato::tuner
