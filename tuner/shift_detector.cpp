// SPDX-License-Identifier: Apache-2.0
#include "tuner/shift_detector.h"

#include <algorithm>
#include <cmath>

#include "tuner/describe.h"

namespace rubato::tuner {

namespace {

// Run length of a two-sided CUSUM with these on standard normal values: about 50,000 windows (Siegmund 1985, equation 2.53). A
// change by three and a half standard deviations is found in two windows, one by six at once.
constexpr double slack = 1.0;
constexpr double threshold = 5.0;
constexpr double z_limit = 6.5;
// Lengths of requests scatter about as much as they are long (conversation and code traces: coefficient of variation 0.8 to 1.6);
// what a stream really shows is learnt.
constexpr double length_variation = 1.0;
constexpr double relative_floor = 0.06;  // nobody retunes for a move of a few percent
constexpr std::int32_t memory_windows = 12;
constexpr double scatter_memory = 0.05;
constexpr double scatter_min = 0.4;
constexpr double scatter_max = 6.0;

constexpr std::size_t attainment_track = 3;
constexpr std::array<const char*, 5> feature_names{"arrival rate", "prompt length", "output length", "attainment", "burstiness"};
constexpr std::array<const char*, 5> feature_units{" per second", " tokens", " tokens", " %", ""};

double in_own_unit(std::size_t track, double value) {
  if (track != attainment_track) return std::exp(value);
  const double root = std::sin(0.5 * std::clamp(value, 0.0, M_PI));
  return 100.0 * root * root;
}

}  // namespace

std::string Shift::text() const {
  const auto index = std::find(feature_names.begin(), feature_names.end(), feature) - feature_names.begin();
  return feature + " moved from " + decimal(before) + " to " + decimal(after) +
         feature_units[std::min<std::size_t>(static_cast<std::size_t>(index), feature_units.size() - 1)];
}

void ShiftDetector::Track::start(double value, double variance) {
  const double learnt = scatter;
  *this = Track{};
  scatter = learnt;  // how noisy this feature is outlives a move of its level
  baseline = value;
  baseline_variance = variance * scatter;
  windows = 1;
}

bool ShiftDetector::Track::observe(double value, double variance) {
  if (windows == 0) {
    start(value, variance);
    return false;
  }
  const double expected = variance * scatter + baseline_variance + relative_floor * relative_floor;
  const double z = std::clamp((value - baseline) / std::sqrt(expected), -z_limit, z_limit);
  up = std::max(0.0, up + z - slack);
  down = std::max(0.0, down - z - slack);
  if (up >= threshold || down >= threshold) return true;
  // Only values that raise no suspicion teach: else a shift would first be learnt as noise.
  if (std::abs(z) < 2.5) {
    const double seen = (value - baseline) * (value - baseline) / std::max(1e-12, variance + baseline_variance);
    scatter = std::clamp(scatter + scatter_memory * (seen - scatter), scatter_min, scatter_max);
    windows = std::min(windows + 1, memory_windows);
    const double share = 1.0 / windows;
    baseline += share * (value - baseline);
    baseline_variance = (1 - share) * (1 - share) * baseline_variance + share * share * variance * scatter;
  }
  return false;
}

std::optional<Shift> ShiftDetector::observe(const Window& window, const Evidence& evidence, SameSettings same_settings) {
  const double arrivals = std::max(1, window.arrivals);
  // Noise is that of the count to be expected, else a fall of the rate would excuse itself.
  const double seconds = to_seconds(window.end - window.begin);
  const double expected_arrivals = tracks_[0].windows > 0 ? std::max(1.0, std::exp(tracks_[0].baseline) * seconds) : arrivals;
  // A renewal process of interval variation cv has count variance cv^2 per request.
  const double burst = std::max(1.0, window.arrival_interval_cv * window.arrival_interval_cv);
  const double length_variance = length_variation * length_variation;
  const NoisyValue attainment = transformed_attainment(evidence);
  const std::array<double, track_count> values{std::log(std::max(1e-3, window.arrival_rate())),
                                               std::log(std::max(1e-3, window.prompt_tokens_mean)),
                                               std::log(std::max(1e-3, window.output_tokens_mean)), attainment.value};
  const std::array<double, track_count> variances{burst / expected_arrivals, length_variance / arrivals,
                                                  length_variance / std::max(1, window.judged), attainment.variance};
  std::optional<Shift> found;
  for (std::size_t i = 0; i < track_count; ++i) {
    if (i == attainment_track && same_settings == SameSettings::No) continue;
    // No output length is known while nothing finishes; that is not a shift to length zero.
    if (i == attainment_track - 1 && window.output_tokens_mean <= 0) continue;
    const double before = tracks_[i].baseline;
    if (tracks_[i].observe(values[i], variances[i]) && !found) {
      found = Shift{feature_names[i], in_own_unit(i, before), in_own_unit(i, values[i])};
    }
  }
  if (found) {
    for (std::size_t i = 0; i < track_count; ++i) {
      if (i == attainment_track && same_settings == SameSettings::No) continue;
      tracks_[i].start(values[i], variances[i]);
    }
  }
  return found;
}

void ShiftDetector::settings_changed() {
  tracks_[attainment_track] = Track{};
}

void ShiftDetector::reset() {
  tracks_ = {};
}

}  // namespace rubato::tuner
