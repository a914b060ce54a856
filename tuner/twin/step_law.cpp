// SPDX-License-Identifier: Apache-2.0
#include "tuner/twin/step_law.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdlib>
#include <tuple>

namespace rubato::tuner {

namespace {

constexpr std::uint64_t warm_up = 30;          // observations before errors say more about the steps than about the first guess
constexpr std::uint64_t settled_after = 1024;  // then the errors of the law while it learnt would only pass for stalls of steps
constexpr std::size_t first_errors = 170;
constexpr std::uint64_t refresh_every = 128;
constexpr double relative_error_rate = 0.01;
constexpr double factor_weight_max = 128;  // observations that a factor remembers
constexpr double factor_shrink = 6;        // observations of "no factor" that each one starts with
constexpr double factor_reach = 2.0;       // log
constexpr double clip_spreads = 3.0;
constexpr double smallest_clip = 0.06;
constexpr double clip_level = 2.0;  // a change of speed moves the level fast, single outliers hardly
constexpr double level_rate = 1.0 / 96;
constexpr double level_reach = 0.1;
constexpr double average_rate = 1.0 / 400;
constexpr double outermost_quantile = 3.0;  // in standard deviations of a normal distribution
constexpr double log_error_reach = 4.0;
constexpr int classes_per_octave = 4;
constexpr std::int32_t class_base = 8;  // smaller eager steps are one class

double clip_of(double spread) {
  return std::max(smallest_clip, clip_spreads * spread);
}

/// The quantiles that are kept: dense where the tails are, for a request's p99 gap is made of its worst steps.
const std::array<double, StepLaw::quantile_count>& levels() {
  static const auto all = [] {
    std::array<double, StepLaw::quantile_count> result{};
    for (std::size_t i = 0; i < result.size(); ++i) {
      const double z = outermost_quantile * (2.0 * static_cast<double>(i) / (StepLaw::quantile_count - 1) - 1.0);
      result[i] = 0.5 * std::erfc(-z / std::sqrt(2.0));
    }
    return result;
  }();
  return all;
}

double quantile_of(const std::array<double, StepLaw::quantile_count>& quantiles, double at) {
  const auto& level = levels();
  const auto above = std::upper_bound(level.begin(), level.end(), at);
  if (above == level.begin()) return quantiles.front();
  if (above == level.end()) return quantiles.back();
  const auto i = static_cast<std::size_t>(above - level.begin());
  return quantiles[i - 1] + (quantiles[i] - quantiles[i - 1]) * (at - level[i - 1]) / (level[i] - level[i - 1]);
}

/// Devices compute whole tiles, so eager steps of like size share what the tokens do not explain. Classes end at powers of two.
std::int32_t key_of(const policies::StepFeatures& features, std::optional<std::int32_t> bucket) {
  if (bucket) return *bucket;
  if (features.tokens <= class_base) return -1;
  const double octaves = std::log2(static_cast<double>(features.tokens) / class_base);
  return -1 - static_cast<std::int32_t>(std::ceil(octaves * classes_per_octave - 1e-9));
}

policies::StepFeatures computed(const policies::StepFeatures& features, std::optional<std::int32_t> bucket) {
  policies::StepFeatures result = features;
  if (bucket) result.tokens = *bucket;
  return result;
}

}  // namespace

double StepLaw::log_factor(std::int32_t key) const {
  const auto found = buckets_.find(key);
  if (found == buckets_.end()) return 0.0;
  const Bucket& bucket = found->second;
  return bucket.log_factor * bucket.weight / (bucket.weight + factor_shrink);
}

double StepLaw::seconds(const policies::StepFeatures& input) const {
  if (averaged_count_ == 0) return to_seconds(model_.predict(input));
  constexpr double longest = 1e6;  // keeps conversions in range
  const auto& [base, tokens, attention, rows, context] = averaged_;
  const double sum =
      base + tokens * input.tokens + attention * input.attention + rows * input.decode_rows + context * input.context;
  return std::clamp(sum * std::exp(log_level_), 1e-9, longest);
}

Duration StepLaw::mean(const policies::StepFeatures& features, std::optional<std::int32_t> bucket) const {
  const double scale = std::exp(log_factor(key_of(features, bucket)));
  return std::max(Duration(1), from_seconds(seconds(computed(features, bucket)) * scale));
}

Duration StepLaw::quantile(const policies::StepFeatures& features, std::optional<std::int32_t> bucket, double at) const {
  const double log_scale = log_factor(key_of(features, bucket)) + quantile_of(log_quantiles_, at);
  return std::max(Duration(1), from_seconds(seconds(computed(features, bucket)) * std::exp(log_scale)));
}

double StepLaw::spread() const {
  constexpr double one_deviation_up = 0.8413447460685429;
  return 0.5 * (quantile_of(log_quantiles_, one_deviation_up) - quantile_of(log_quantiles_, 1.0 - one_deviation_up));
}

void StepLaw::observe(const policies::StepFeatures& features, std::optional<std::int32_t> bucket, Duration duration) {
  if (duration <= Duration::zero() || features.tokens <= 0) return;
  const policies::StepFeatures input = computed(features, bucket);
  const std::int32_t key = key_of(features, bucket);
  const double measured = to_seconds(duration);
  const double base = std::max(1e-9, seconds(input));
  const double factor = std::exp(log_factor(key));
  const double predicted = base * factor;

  const double error = std::min(1.0, std::abs(measured - predicted) / measured);
  const double rate = std::max(1.0 / static_cast<double>(observation_count_ + 1), relative_error_rate);
  relative_error_ += rate * (error - relative_error_);
  // What the factor explains is no news to the model. Factors are shrunk, so what all buckets have in common ends up in it.
  model_.observe(input, from_seconds(measured / factor));
  if (observation_count_ >= warm_up) {
    const double log_error = std::clamp(std::log(measured / predicted), -log_error_reach, log_error_reach);
    keep_error(log_error);
    if (observation_count_ == settled_after) forget_first_errors(first_errors);
    learn_factor(key, std::log(measured / base));
    average(log_error);
  }
  ++observation_count_;
}

void StepLaw::average(double log_error) {
  const double clip = clip_level * clip_of(spread());
  log_level_ += level_rate * std::clamp(log_error, -clip, clip);
  if (averaged_count_ == 0 || std::abs(log_level_) > level_reach) {
    // The speed has changed: what the model has learnt since is nearer than any mean.
    averaged_ = model_.coefficients();
    averaged_count_ = 1;
    log_level_ = 0;
    return;
  }
  ++averaged_count_;
  const double rate = std::max(1.0 / (1.0 + static_cast<double>(averaged_count_) / 5.0), average_rate);
  const auto news = model_.coefficients();
  for (std::size_t i = 0; i < averaged_.size(); ++i) averaged_[i] += rate * (news[i] - averaged_[i]);
}

void StepLaw::learn_factor(std::int32_t key, double log_error) {
  auto found = buckets_.find(key);
  if (found == buckets_.end()) {
    if (buckets_.size() >= buckets_max) {
      const auto lighter = [](const auto& a, const auto& b) { return a.second.weight < b.second.weight; };
      buckets_.erase(std::min_element(buckets_.begin(), buckets_.end(), lighter));
    }
    found = buckets_.emplace(key, Bucket{}).first;
  }
  Bucket& bucket = found->second;
  bucket.weight = std::min(bucket.weight + 1, factor_weight_max);
  const double clip = clip_of(spread());
  // What all buckets have in common, as after a change of speed, is for the model to learn.
  const double news = std::clamp(log_error - bucket.log_factor, -clip, clip);
  bucket.log_factor = std::clamp(bucket.log_factor + news / bucket.weight, -factor_reach, factor_reach);
}

void StepLaw::keep_error(double log_error) {
  log_errors_[error_next_] = static_cast<float>(log_error);
  error_next_ = (error_next_ + 1) % errors_max;
  error_count_ = std::min(error_count_ + 1, errors_max);
  // Early ones change much: at each power of two.
  const bool early = error_count_ < refresh_every && error_count_ >= 8 && std::has_single_bit(error_count_);
  if (early || error_next_ % refresh_every == 0) refresh_quantiles();
}

void StepLaw::forget_first_errors(std::size_t count) {
  if (error_count_ != error_next_ || error_count_ <= count) return;  // the ring has gone round, or was restored
  std::copy(log_errors_.begin() + static_cast<std::ptrdiff_t>(count),
            log_errors_.begin() + static_cast<std::ptrdiff_t>(error_count_), log_errors_.begin());
  error_count_ -= count;
  error_next_ = error_count_;
  refresh_quantiles();
}

void StepLaw::refresh_quantiles() {
  std::array<float, errors_max> sorted = log_errors_;
  std::sort(sorted.begin(), sorted.begin() + static_cast<std::ptrdiff_t>(error_count_));
  for (std::size_t i = 0; i < quantile_count; ++i) {
    const double position = levels()[i] * static_cast<double>(error_count_ - 1);
    const auto low = static_cast<std::size_t>(position);
    const std::size_t high = std::min(low + 1, error_count_ - 1);
    const double share = position - static_cast<double>(low);
    log_quantiles_[i] = sorted[low] + share * (static_cast<double>(sorted[high]) - sorted[low]);
  }
}

void StepLaw::fill_errors() {
  constexpr std::size_t believed = errors_max / 4;
  for (std::size_t i = 0; i < believed; ++i) {
    const double at = (static_cast<double>(i) + 0.5) / static_cast<double>(believed);
    log_errors_[i] = static_cast<float>(quantile_of(log_quantiles_, at));
  }
  error_count_ = error_next_ = believed;
}

void StepLaws::observe(const StepSample& sample) {
  constexpr std::size_t laws_max = 64;
  const std::pair key{sample.lane, sample.share_percent};
  auto found = laws_.find(key);
  if (found == laws_.end()) {
    if (laws_.size() >= laws_max) {
      const auto fewer = [](const auto& a, const auto& b) { return a.second.observation_count() < b.second.observation_count(); };
      laws_.erase(std::min_element(laws_.begin(), laws_.end(), fewer));
    }
    found = laws_.try_emplace(key).first;
  }
  const std::uint64_t before = found->second.observation_count();
  found->second.observe(sample.features, sample.bucket, sample.duration);
  observation_count_ += found->second.observation_count() - before;
}

StepLaws::Found StepLaws::find(std::int32_t lane, std::int32_t share_percent) const {
  // In order of preference: enough seen, the very share, the nearest share, the very lane, the most seen.
  const std::pair<const std::pair<std::int32_t, std::int32_t>, StepLaw>* best = nullptr;
  const auto rank = [&](const auto& entry) {
    const auto [its_lane, its_share] = entry.first;
    const std::uint64_t seen = entry.second.observation_count();
    return std::tuple{seen < law_observations_min, std::abs(its_share - share_percent), its_lane != lane, ~seen};
  };
  for (const auto& entry : laws_) {
    if (entry.second.observation_count() == 0) continue;
    if (best == nullptr || rank(entry) < rank(*best)) best = &entry;
  }
  if (best == nullptr) return {};
  const auto [its_lane, its_share] = best->first;
  return {.law = &best->second,
          .scale = static_cast<double>(std::max(1, its_share)) / std::max(1, share_percent),
          .seen = its_lane == lane && its_share == share_percent};
}

double StepLaws::relative_error() const {
  double sum = 0;
  double weight = 0;
  for (const auto& [key, law] : laws_) {
    const auto count = static_cast<double>(law.observation_count());
    sum += count * law.relative_error();
    weight += count;
  }
  return weight > 0 ? sum / weight : 0.0;
}

}  // namespace rubato::tuner
