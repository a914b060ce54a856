// SPDX-License-Identifier: Apache-2.0
#include "tuner/twin/twin_replay.h"

#include <algorithm>
#include <cmath>
#include <numeric>

namespace rubato::tuner {

namespace {

constexpr int parts = 8;  // of a run, after each of which it is asked whether there is hope

bool missed(const SimulatedRequest& one) {
  return one.rejected || one.ttft.value_or(Duration::max()) > one.request.ttft_target || one.itl_p99 > one.request.itl_target;
}

/// A latency of one judged request, on the way from as simulated to as corrected.
struct Sample {
  double seconds = 0;
  std::size_t request = 0;
};

/// Corrects in place and returns the corrected ones, sorted.
std::vector<double> correct(std::vector<Sample>& samples, double bias_p50, double bias_p99, std::vector<double>& by_request) {
  std::sort(samples.begin(), samples.end(), [](const Sample& a, const Sample& b) {
    return a.seconds != b.seconds ? a.seconds < b.seconds : a.request < b.request;
  });
  std::vector<double> result;
  result.reserve(samples.size());
  const auto count = static_cast<double>(samples.size());
  for (std::size_t i = 0; i < samples.size(); ++i) {
    const double rank = (static_cast<double>(i) + 0.5) / count;
    const double share = std::clamp((rank - 0.5) / 0.49, 0.0, 1.0);
    const double corrected = samples[i].seconds * std::exp(bias_p50 + share * (bias_p99 - bias_p50));
    by_request[samples[i].request] = corrected;
    result.push_back(corrected);
  }
  std::sort(result.begin(), result.end());
  return result;
}

double mean_prompt(const ReplayResult& result, TimePoint since) {
  double sum = 0;
  std::int32_t count = 0;
  for (const SimulatedRequest& one : result.requests) {
    if (one.request.arrival < since) continue;
    sum += one.request.prompt_tokens;
    ++count;
  }
  return count > 0 ? sum / count : 0.0;
}

}  // namespace

std::optional<ReplayResult> replay(const SimulationOptions& options, const StepCost& cost, const ReplayPlan& plan,
                                   const std::function<bool()>& go_on, TwinCounts& counts) {
  ++counts.simulations;
  Simulation simulation(options, cost);
  const TimePoint start = simulation.now();
  ReplayResult result;
  result.begin = plan.begin;
  for (const TrafficRequest& request : plan.traffic) {
    if (request.arrival >= plan.end) break;
    simulation.add(request);
  }
  const auto cut_short = [&] {
    counts.simulated += simulation.now() - start;
    return std::nullopt;
  };
  if (!simulation.run_until(plan.begin, go_on)) return cut_short();
  (void)simulation.take_requests(false);  // judged by nobody
  result.waiting_begin = simulation.waiting();
  std::int32_t misses = 0;
  for (int part = 1; part <= parts; ++part) {
    const TimePoint until = plan.begin + (plan.end - plan.begin) * part / parts;
    if (!simulation.run_until(until, go_on)) return cut_short();
    for (SimulatedRequest& one : simulation.take_requests(part == parts)) {
      misses += one.ended && one.request.arrival >= plan.since && missed(one) ? 1 : 0;
      result.requests.push_back(std::move(one));
    }
    result.end = until;
    if (plan.misses_max > 0 && part < parts &&
        misses + std::max(0, simulation.waiting() - result.waiting_begin) > plan.misses_max) {
      for (SimulatedRequest& one : simulation.take_requests(true)) result.requests.push_back(std::move(one));
      break;
    }
  }
  result.waiting_end = simulation.waiting();
  result.arrivals = static_cast<std::int32_t>(std::count_if(plan.traffic.begin(), plan.traffic.end(), [&](const auto& request) {
    return request.arrival >= result.begin && request.arrival < result.end;
  }));
  counts.simulated += simulation.now() - start;
  return result;
}

Judged judged(const ReplayResult& result, const TwinCorrection& correction, TimePoint since) {
  Judged judged;
  Window& window = judged.window;
  window.begin = result.begin;
  window.end = result.end;
  window.waiting_begin = result.waiting_begin;
  window.waiting_end = result.waiting_end;
  window.arrivals = result.arrivals;
  std::vector<Sample> ttft;
  std::vector<Sample> itl;
  std::vector<double> ttft_of(result.requests.size(), 0.0);
  std::vector<double> itl_of(result.requests.size(), 0.0);
  double output_tokens = 0;
  std::int32_t finished = 0;
  for (std::size_t i = 0; i < result.requests.size(); ++i) {
    const SimulatedRequest& one = result.requests[i];
    const Duration age = result.end - one.request.arrival;
    if (!one.ended && !one.rejected && !one.ttft && age > Duration::zero())
      window.oldest_wait = std::max(window.oldest_wait, age);
    if (one.request.arrival < since || one.rejected || age < Duration::zero()) continue;
    ttft.push_back({to_seconds(one.ttft.value_or(age)), i});
    if (one.itl_p99 > Duration::zero()) itl.push_back({to_seconds(one.itl_p99), i});
    if (one.ended) {
      output_tokens += one.request.output_tokens;
      ++finished;
    }
  }
  const auto bias = [&](TwinQuantile at) { return correction.log_bias[static_cast<std::size_t>(at)]; };
  (void)correct(ttft, bias(TwinQuantile::TtftP50), bias(TwinQuantile::TtftP99), ttft_of);
  (void)correct(itl, bias(TwinQuantile::ItlP50), bias(TwinQuantile::ItlP99), itl_of);
  for (std::size_t i = 0; i < result.requests.size(); ++i) {
    const SimulatedRequest& one = result.requests[i];
    if (one.request.arrival < since || one.request.arrival > result.end) continue;
    const bool late = one.rejected || ttft_of[i] > to_seconds(one.request.ttft_target);
    const bool wide = !one.rejected && itl_of[i] > to_seconds(one.request.itl_target);
    // Unfinished ones enter the percentiles only where they have waited beyond their target.
    const bool undecided = !one.ended && !one.rejected && !one.ttft && !late;
    if (undecided) continue;
    ++window.judged;
    window.rejected += one.rejected ? 1 : 0;
    window.ttft_misses += late ? 1 : 0;
    window.itl_misses += wide ? 1 : 0;
    window.good += late || wide ? 0 : 1;
    if (one.ended || !one.ttft) {
      if (!one.rejected) judged.ttft.push_back(ttft_of[i]);
    }
    if (one.ended && itl_of[i] > 0) judged.itl.push_back(itl_of[i]);
  }
  std::sort(judged.ttft.begin(), judged.ttft.end());
  std::sort(judged.itl.begin(), judged.itl.end());
  window.ttft_p50 = percentile_of(judged.ttft, 50);
  window.ttft_p99 = percentile_of(judged.ttft, 99);
  window.itl_p50 = percentile_of(judged.itl, 50);
  window.itl_p99 = percentile_of(judged.itl, 99);
  window.prompt_tokens_mean = mean_prompt(result, since);
  window.output_tokens_mean = finished > 0 ? output_tokens / finished : 0.0;
  return judged;
}

Duration percentile_of(std::span<const double> sorted, int percent) {
  if (sorted.empty()) return {};
  const std::size_t rank = (sorted.size() * static_cast<std::size_t>(percent) + 99) / 100;
  return from_seconds(sorted[std::max<std::size_t>(1, rank) - 1]);
}

std::array<Duration, twin_quantile_count> quantiles_of(const Window& window) {
  return {window.ttft_p50, window.ttft_p99, window.itl_p50, window.itl_p99};
}

}  // namespace rubato::tuner
