// SPDX-License-Identifier: Apache-2.0
// The twin against what was measured: each window that ran under known settings is simulated too; the difference corrects the
// next answers and decides whether they are believed.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <memory>

#include "tuner/describe.h"
#include "tuner/evidence.h"
#include "tuner/twin/twin_state.h"

namespace rubato::tuner {

namespace {

constexpr std::uint64_t steps_min = StepLaws::law_observations_min;
constexpr std::int32_t judged_min = 10;
constexpr Duration warm_up_shortest = std::chrono::seconds(20);
constexpr Duration warm_up_longest = std::chrono::seconds(60);

constexpr double bias_reach = 1.5;      // log: nothing is corrected by more than a factor of 4.5
constexpr double news_reach_p50 = 0.7;  // log, of one window
constexpr double news_reach_p99 = 0.4;
constexpr double chance_p99 = 0.15;  // log: the third largest of some hundred requests differs by as much for no reason
constexpr double error_rate = 0.25;  // of the errors' recent mean
constexpr double rate_first = 0.8;   // of the first window; the second gives half of it, and so on to rate_last
constexpr double rate_last_p50 = 0.2;
constexpr double rate_last_p99 = 0.15;  // of a few requests: noisy

constexpr double off_p50 = 0.223;      // log(1.25)
constexpr double off_noise_p50 = 0.6;  // over the root of the number of requests
constexpr double off_attainment = 0.15;
constexpr double attainment_deviations =
    3.5;                                // two of them, of the difference of two counts that scatter more than binomial ones
constexpr double cliff = 0.05;          // log: where latencies this much off flip the verdicts, attainment says little
constexpr double hopeless_targets = 3;  // where both are this many targets late, by how much hardly matters
constexpr std::size_t checks_kept = 4;
constexpr std::ptrdiff_t checks_off_max = 2;  // of those
constexpr std::size_t checks_good_min = 2;    // in a row, to trust again

double log_ratio(Duration measured, Duration predicted) {
  if (measured <= Duration::zero() || predicted <= Duration::zero()) return 0.0;
  return std::log(to_seconds(measured) / to_seconds(predicted));
}

TwinCorrection shifted(TwinCorrection correction, double by) {
  for (double& bias : correction.log_bias) bias += by;
  return correction;
}

std::string percent(double share) {
  char text[32];
  std::snprintf(text, sizeof text, "%.0f %%", 100 * share);
  return text;
}

std::string against(const char* name, Duration predicted, Duration measured) {
  return std::string(name) + " " + milliseconds(predicted) + " against " + milliseconds(measured);
}

}  // namespace

bool Twin::check(const Window& window, const KnobValues& knobs) {
  State& state = *state_;
  if (!state.enabled || window.judged < judged_min || laws_.observation_count() < steps_min || window.end <= window.begin) {
    return false;
  }
  // Windows that follow one another under the same settings judge requests that came since the first of them.
  const bool follows = window.settings_number == state.judged_settings && window.begin == state.judged_end;
  const TimePoint since = follows ? state.judged_since : window.begin;
  state.judged_settings = window.settings_number;
  state.judged_since = since;
  state.judged_end = window.end;

  const Duration warm_up = std::clamp(2 * (window.end - window.begin), warm_up_shortest, warm_up_longest);
  const TimePoint from = std::max(TimePoint{}, window.begin - warm_up);
  std::vector<TrafficRequest> traffic = traffic_.between(from, window.end);
  for (TrafficRequest& request : traffic) request.arrival = TimePoint{} + (request.arrival - from);
  const LawCost cost(std::make_shared<const StepLaws>(laws_),
                     state.options.limits.devices * state.options.limits.lanes_per_device);
  const ReplayPlan plan{.traffic = traffic,
                        .begin = TimePoint{} + (window.begin - from),
                        .since = TimePoint{} + (std::max(since, from) - from),
                        .end = TimePoint{} + (window.end - from),
                        .misses_max = 0};
  const auto result = replay(state.simulation(knobs), cost, plan, state.go_on, *state.counts);
  if (!result) {
    ++state.counts->aborted;
    return false;
  }
  const Judged corrected = judged(*result, state.correction, plan.since);
  if (corrected.window.judged < judged_min) return false;
  const TwinCheck check{.predicted = quantiles_of(corrected.window),
                        .measured = quantiles_of(window),
                        .attainment_predicted = evidence_of(corrected.window, state.options.objectives).attainment(),
                        .attainment_measured = evidence_of(window, state.options.objectives).attainment()};
  const auto attained = [&](double shift) {
    return evidence_of(judged(*result, shifted(state.correction, shift), plan.since).window, state.options.objectives)
        .attainment();
  };
  const bool was_off = state.is_off(check, {.low = attained(cliff), .high = attained(-cliff)}, window.judged);
  state.learn(check, judged(*result, TwinCorrection{}, plan.since).window, window.judged);
  state.note_check(check, was_off, window.judged);
  return true;
}

bool Twin::State::is_off(const TwinCheck& check, const Attainments& predicted, std::int32_t judged) const {
  const double noise = 1.0 / std::sqrt(std::max(1, judged));
  const auto late = [&](TwinQuantile at, Duration target) {
    const auto i = static_cast<std::size_t>(at);
    const bool hopeless = std::min(check.predicted[i], check.measured[i]) > hopeless_targets * target;
    return !hopeless && std::abs(log_ratio(check.measured[i], check.predicted[i])) > off_p50 + off_noise_p50 * noise;
  };
  const double p = std::clamp(check.attainment_measured, 0.1, 0.9);
  const double attainment_noise = attainment_deviations * std::sqrt(p * (1 - p)) * noise;
  return late(TwinQuantile::TtftP50, options.objectives.ttft) || late(TwinQuantile::ItlP50, options.objectives.itl) ||
         check.attainment_measured < predicted.low - off_attainment - attainment_noise ||
         check.attainment_measured > predicted.high + off_attainment + attainment_noise;
}

void Twin::State::learn(const TwinCheck& check, const Window& raw, std::int32_t judged) {
  const auto uncorrected = quantiles_of(raw);
  const double early = rate_first / (1 + correction.windows);
  const double weight = std::min(1.0, std::sqrt(judged / 50.0));
  for (std::size_t i = 0; i < twin_quantile_count; ++i) {
    if (check.measured[i] <= Duration::zero() || uncorrected[i] <= Duration::zero()) continue;
    const bool p50 = i == static_cast<std::size_t>(TwinQuantile::TtftP50) || i == static_cast<std::size_t>(TwinQuantile::ItlP50);
    const double rate = weight * std::max(early, p50 ? rate_last_p50 : rate_last_p99);
    const double difference = log_ratio(check.measured[i], uncorrected[i]) - correction.log_bias[i];
    const double chance = p50 ? 0.0 : chance_p99;
    const double reach = p50 ? news_reach_p50 : news_reach_p99;
    const double news = std::copysign(std::clamp(std::abs(difference) - chance, 0.0, reach), difference);
    const double bias = correction.log_bias[i] + rate * news;
    correction.log_bias[i] = std::clamp(bias, -bias_reach, bias_reach);
    const double error = std::abs(log_ratio(check.measured[i], check.predicted[i]));
    correction.error[i] += std::max(early, error_rate) * (error - correction.error[i]);
  }
  const double error = check.attainment_predicted - check.attainment_measured;
  const double square = attainment_error * attainment_error;
  attainment_error = std::sqrt(square + std::max(early, error_rate) * (error * error - square));
  ++correction.windows;
}

void Twin::State::note_check(const TwinCheck& check, bool was_off, std::int32_t judged) {
  off.push_back(was_off);
  if (off.size() > checks_kept) off.pop_front();
  const std::size_t checked = off.size();
  const auto count_off = std::count(off.begin(), off.end(), true);
  if (count_off > checks_off_max) distrusted = true;
  const bool good =
      off.size() >= checks_good_min && std::none_of(off.end() - checks_good_min, off.end(), [](bool one) { return one; });
  if (distrusted && good) {
    distrusted = false;
    off.clear();  // what was off before is forgiven
  }
  status.last_check = check;
  const auto at = [](const auto& all, TwinQuantile which) { return all[static_cast<std::size_t>(which)]; };
  check_message = "off in " + std::to_string(count_off) + " of the last " + std::to_string(checked) +
                  " checks; in the last, over " + std::to_string(judged) + " requests, predicted attainment " +
                  percent(check.attainment_predicted) + " against " + percent(check.attainment_measured) + " measured, " +
                  against("TTFT p50", at(check.predicted, TwinQuantile::TtftP50), at(check.measured, TwinQuantile::TtftP50)) +
                  ", " + against("ITL p50", at(check.predicted, TwinQuantile::ItlP50), at(check.measured, TwinQuantile::ItlP50));
}

}  // namespace rubato::tuner
