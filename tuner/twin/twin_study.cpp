// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>
#include <utility>

#include "tuner/evidence.h"
#include "tuner/twin/twin_state.h"

namespace rubato::tuner {

namespace {

constexpr int warm_up_parts = 4;  // the first of so many parts of a run is not judged

/// Requests that a run will judge, as far as they get on.
std::int32_t arrivals_in(std::span<const TrafficRequest> traffic, TimePoint begin, TimePoint end) {
  return static_cast<std::int32_t>(std::count_if(traffic.begin(), traffic.end(), [&](const TrafficRequest& request) {
    return request.arrival >= begin && request.arrival < end;
  }));
}

double squared(double value) {
  return value * value;
}

double mean_of(const std::vector<double>& values) {
  double sum = 0;
  for (const double value : values) sum += value;
  return values.empty() ? 0.0 : sum / static_cast<double>(values.size());
}

}  // namespace

KnobKey key_of(const KnobValues& knobs) {
  const bool split = knobs.mode == Mode::Disaggregated;
  return {knobs.priority_policy,
          knobs.mode,
          knobs.reservation,
          knobs.max_num_batched_tokens,
          knobs.max_num_seqs,
          knobs.priority_policy == PriorityPolicy::Deadline ? knobs.deadline_margin : 0,
          split ? knobs.prefill_share : 0,
          split ? knobs.prefill_devices : 0};
}

std::optional<Judged> TwinStudy::State::run(const KnobValues& knobs, std::size_t future, Duration until,
                                            std::int32_t misses_max) {
  const TimePoint begin = TimePoint{} + until / warm_up_parts;
  const ReplayPlan plan{
      .traffic = futures[future], .begin = begin, .since = begin, .end = TimePoint{} + until, .misses_max = misses_max};
  const SimulationOptions simulation{.limits = options.limits,
                                     .initial = knobs,
                                     .seed = options.seed + future,
                                     .shapes = options.shapes,
                                     .learns = true,
                                     .handoff_per_block = {},
                                     .outstanding_max = options.outstanding_max};
  const auto result = replay(simulation, *cost, plan, go_on, *counts);
  if (!result) {
    if (!std::exchange(cut_short, true)) ++counts->aborted;
    return std::nullopt;
  }
  return judged(*result, correction, begin);
}

Looked TwinStudy::State::summed(const KnobValues& knobs, const std::vector<Judged>& parts) const {
  Looked looked{.knobs = knobs, .forecast = {}, .attainment = {}, .score = {}};
  Forecast& forecast = looked.forecast;
  std::vector<double> ttft;
  std::vector<double> itl;
  for (const Judged& part : parts) {
    const Evidence evidence = evidence_of(part.window, options.objectives);
    forecast.evidence = forecast.futures == 0 ? evidence : pooled(forecast.evidence, evidence);
    ++forecast.futures;
    looked.attainment.push_back(evidence.attainment());
    looked.score.push_back(score(evidence).value);
    ttft.insert(ttft.end(), part.ttft.begin(), part.ttft.end());
    itl.insert(itl.end(), part.itl.begin(), part.itl.end());
  }
  std::sort(ttft.begin(), ttft.end());
  std::sort(itl.begin(), itl.end());
  forecast.latency = {percentile_of(ttft, 50), percentile_of(ttft, 99), percentile_of(itl, 50), percentile_of(itl, 99)};
  forecast.attainment = mean_of(looked.attainment);
  double variance = 0;
  if (forecast.futures > 1) {
    for (const double one : looked.attainment) variance += squared(one - forecast.attainment) / (forecast.futures - 1);
  } else {
    const double count = std::max(1, forecast.evidence.judged);
    const double p = (forecast.attainment * count + 1) / (count + 2);
    variance = p * (1 - p) / count;
  }
  forecast.attainment_spread = std::sqrt(variance + squared(attainment_error));
  return looked;
}

const Looked* TwinStudy::State::forecast(const KnobValues& knobs) {
  const KnobKey key = key_of(knobs);
  if (const auto found = forecasts.find(key); found != forecasts.end()) return &found->second;
  std::vector<Judged> parts;
  for (std::size_t future = 0; future < futures.size(); ++future) {
    std::optional<Judged> part = run(knobs, future, length, 0);
    if (!part) return nullptr;
    parts.push_back(std::move(*part));
  }
  return &forecasts.emplace(key, summed(knobs, parts)).first->second;
}

const Looked* TwinStudy::State::glance(const KnobValues& knobs, double hopeless_below) {
  const KnobKey key = key_of(knobs);
  if (const auto found = glances.find(key); found != glances.end()) return &found->second;
  const std::int32_t expected =
      arrivals_in(futures.front(), TimePoint{} + glance_length / warm_up_parts, TimePoint{} + glance_length);
  const double misses = (1.0 - hopeless_below) * expected;
  const std::int32_t misses_max = hopeless_below > 0 ? std::max(1, static_cast<std::int32_t>(misses)) : 0;
  std::optional<Judged> part = run(knobs, 0, glance_length, misses_max);
  if (!part) return nullptr;
  std::vector<Judged> parts;
  parts.push_back(std::move(*part));
  return &glances.emplace(key, summed(knobs, parts)).first->second;
}

TwinStudy::TwinStudy(std::unique_ptr<State> state) : state_(std::move(state)) {}

TwinStudy::~TwinStudy() = default;

std::optional<Forecast> TwinStudy::forecast(const KnobValues& knobs) {
  const Looked* looked = state_->forecast(knobs);
  return looked != nullptr ? std::optional(looked->forecast) : std::nullopt;
}

std::optional<Forecast> TwinStudy::glance(const KnobValues& knobs) {
  const Looked* looked = state_->glance(knobs, 0.0);
  return looked != nullptr ? std::optional(looked->forecast) : std::nullopt;
}

std::vector<TwinStudy::Known> TwinStudy::known() const {
  std::vector<Known> all;
  all.reserve(state_->forecasts.size() + state_->glances.size());
  for (const auto& [key, looked] : state_->forecasts) all.push_back({looked.knobs, looked.forecast});
  for (const auto& [key, looked] : state_->glances) {
    if (!state_->forecasts.contains(key)) all.push_back({looked.knobs, looked.forecast});
  }
  return all;
}

double TwinStudy::rate() const {
  std::size_t requests = 0;
  for (const auto& future : state_->futures) requests += future.size();
  return static_cast<double>(requests) / (to_seconds(state_->length) * static_cast<double>(state_->futures.size()));
}

}  // namespace rubato::tuner
