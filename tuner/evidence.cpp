// SPDX-License-Identifier: Apache-2.0
#include "tuner/evidence.h"

#include <algorithm>
#include <cmath>

namespace rubato::tuner {

namespace {

// Requests of one window share bursts and long steps, so counts scatter more than independent ones would.
constexpr double dispersion = 1.5;
// A latency ten times over target costs as much score as falling from 0.5 to 0.3 attainment: enough of a slope on the plateau at
// zero, too little to buy attainment with.
constexpr double excess_weight = 0.2;
constexpr double excess_reach = 4.0;
constexpr double excess_noise = 0.4;  // standard deviation of the blended log excess at noise_requests requests
constexpr double noise_requests = 40;
// A window is saturated when more than this share of its requests was turned away or left behind.
constexpr double saturated_share = 0.1;
constexpr double backlog_share = 0.2;
// Log excess of a backlog that neither grows nor shrinks, and what a change by as many requests as arrive adds to it.
constexpr double backlog_excess = 1.5;
constexpr double backlog_slope = 1.5;

double log_ratio(Duration measured, Duration target) {
  const double ratio = to_seconds(measured) / std::max(1e-9, to_seconds(target));
  return std::clamp(std::log(std::max(ratio, 1e-9)), -excess_reach, excess_reach);
}

double log2_of(double value) {
  return std::log2(std::max(value, 1e-3));
}

double weighted(double a, double weight_a, double b, double weight_b) {
  const double total = weight_a + weight_b;
  return total > 0 ? (a * weight_a + b * weight_b) / total : 0.0;
}

Duration weighted(Duration a, double weight_a, Duration b, double weight_b) {
  return from_seconds(weighted(to_seconds(a), weight_a, to_seconds(b), weight_b));
}

}  // namespace

LoadFeatures load_of(const Window& window) {
  return {log2_of(window.arrival_rate()), log2_of(window.prompt_tokens_mean), log2_of(window.output_tokens_mean)};
}

double load_distance(const LoadFeatures& a, const LoadFeatures& b) {
  return std::hypot(a.rate - b.rate, a.prompt - b.prompt, a.output - b.output);
}

std::int32_t unserved(const Window& window) {
  const std::int32_t growth = std::max(0, window.waiting_end - window.waiting_begin);
  return std::min(growth, std::max(0, window.arrivals - window.judged));
}

Evidence evidence_of(const Window& window, const ObjectivesSpec& objectives) {
  Evidence result;
  const std::int32_t left = unserved(window);
  result.windows = 1;
  result.judged = window.judged + left;
  result.good = window.good;
  result.ttft_misses = window.ttft_misses + left;
  result.itl_misses = window.itl_misses;
  // The oldest waiting request is a TTFT that is not over yet: a lower bound of the worst one.
  const Duration ttft_worst = std::max(window.ttft_p99, window.oldest_wait);
  result.ttft_excess = 0.5 * (log_ratio(window.ttft_p50, objectives.ttft) + log_ratio(ttft_worst, objectives.ttft));
  result.itl_excess = 0.5 * (log_ratio(window.itl_p50, objectives.itl) + log_ratio(window.itl_p99, objectives.itl));
  const double taken_in = std::max(1, std::max(window.arrivals, result.judged));
  const double growth = window.waiting_end - window.waiting_begin;
  const bool backlogged = window.waiting_begin > backlog_share * taken_in;
  // Behind a backlog every first token is late whatever the settings; what they decide is how fast it shrinks.
  if (backlogged) result.ttft_excess = backlog_excess + backlog_slope * std::clamp(growth / taken_in, -1.0, 1.0);
  const bool growing = growth > saturated_share * taken_in && window.oldest_wait > objectives.ttft;
  const bool refusing = window.rejected > saturated_share * taken_in;
  result.saturated = growing || refusing;
  result.draining = backlogged && growth < 0;
  return result;
}

Evidence pooled(const Evidence& earlier, const Evidence& later) {
  Evidence result = later;
  result.windows += earlier.windows;
  result.judged += earlier.judged;
  result.good += earlier.good;
  result.ttft_misses += earlier.ttft_misses;
  result.itl_misses += earlier.itl_misses;
  result.ttft_excess = weighted(earlier.ttft_excess, earlier.windows, later.ttft_excess, later.windows);
  result.itl_excess = weighted(earlier.itl_excess, earlier.windows, later.itl_excess, later.windows);
  return result;
}

double transformed_share(double share, double count) {
  return transformed_share((share * count + 0.5) / (count + 1.0));
}

double transformed_share(double share) {
  return 2.0 * std::asin(std::sqrt(std::clamp(share, 0.0, 1.0)));
}

double share_of_transformed(double value) {
  const double root = std::sin(0.5 * std::clamp(value, 0.0, M_PI));
  return root * root;
}

NoisyValue transformed_attainment(const Evidence& evidence) {
  const double count = std::max(1, evidence.judged);
  // At the ends, where every request or none is good, counts hardly scatter.
  const double raw = evidence.attainment();
  const double spread = std::min(1.0, count * raw * (1.0 - raw) / 2.0);
  return {transformed_share(evidence.good / count, count), dispersion / count * (0.3 + 0.7 * spread)};
}

NoisyValue score(const Evidence& evidence) {
  NoisyValue result = transformed_attainment(evidence);
  // Softly: a latency far below its target gains nothing more, one far above it costs in proportion.
  const auto cost = [](double excess) { return 0.5 * std::log1p(std::exp(2.0 * excess)); };
  result.value -= excess_weight * (cost(evidence.ttft_excess) + cost(evidence.itl_excess));
  const double noise = excess_weight * excess_noise;
  result.variance += noise * noise * noise_requests / std::max(1, evidence.judged);
  return result;
}

Window merged(const Window& earlier, const Window& later) {
  Window result = later;
  result.begin = earlier.begin;
  result.arrivals += earlier.arrivals;
  result.judged += earlier.judged;
  result.good += earlier.good;
  result.rejected += earlier.rejected;
  result.ttft_misses += earlier.ttft_misses;
  result.itl_misses += earlier.itl_misses;
  result.ttft_p50 = weighted(earlier.ttft_p50, earlier.judged, later.ttft_p50, later.judged);
  result.itl_p50 = weighted(earlier.itl_p50, earlier.judged, later.itl_p50, later.judged);
  result.ttft_p99 = std::max(earlier.ttft_p99, later.ttft_p99);
  result.itl_p99 = std::max(earlier.itl_p99, later.itl_p99);
  result.prompt_tokens_mean = weighted(earlier.prompt_tokens_mean, earlier.arrivals, later.prompt_tokens_mean, later.arrivals);
  result.output_tokens_mean = weighted(earlier.output_tokens_mean, earlier.judged, later.output_tokens_mean, later.judged);
  result.arrival_interval_cv = weighted(earlier.arrival_interval_cv, earlier.arrivals, later.arrival_interval_cv, later.arrivals);
  result.waiting_begin = earlier.waiting_begin;
  return result;
}

std::string contradiction(const Window& window) {
  if (window.end <= window.begin) return "it ends before it begins";
  for (const double value : {window.prompt_tokens_mean, window.output_tokens_mean, window.arrival_interval_cv}) {
    if (!std::isfinite(value) || value < 0 || value > 1e9) return "a mean is not a finite number in 0..1e9";
  }
  for (const std::int32_t count : {window.arrivals, window.judged, window.good, window.rejected, window.ttft_misses,
                                   window.itl_misses, window.waiting_begin, window.waiting_end}) {
    if (count < 0 || count > 100'000'000) return "a count is outside 0..100000000";
  }
  if (window.good > window.judged) return "more requests were good than judged";
  if (window.ttft_misses > window.judged || window.itl_misses > window.judged) return "more misses than judged requests";
  if (window.rejected > window.judged - window.good) return "more requests were rejected than judged not good";
  for (const Duration value : {window.ttft_p50, window.ttft_p99, window.itl_p50, window.itl_p99, window.oldest_wait}) {
    if (value < Duration::zero()) return "a latency is negative";
  }
  return {};
}

}  // namespace rubato::tuner
