// SPDX-License-Identifier: Apache-2.0
// The questions that a plan asks the twin. What it looks like is plan_report.cpp's.
#include "daemon/plan.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <utility>

#include "daemon/lane_threads.h"
#include "tuner/search_space.h"

namespace rubato {
namespace {

constexpr double scales[] = {0.5, 0.7, 0.85, 1, 1.15, 1.3, 1.5};
constexpr int bisections = 4;
constexpr double widening = 2;  // from one load to the next, where the objectives hold at all of scales or at none

Duration scaled(Duration time, double scale) {
  return Duration(static_cast<std::int64_t>(static_cast<double>(time.count()) / scale));
}

tuner::TrafficRequest request_of(const replay::Arrival& arrival, const PlanQuestion& question, double scale) {
  const std::int32_t shared = question.limits.each.prefix_caching.enabled ? arrival.shared_tokens : 0;
  return {.arrival = TimePoint(scaled(arrival.at, scale)),
          .prompt_tokens = std::max(1, arrival.prompt_tokens - shared),
          .output_tokens = arrival.output_tokens,
          .max_new_tokens = arrival.output_tokens,
          .ttft_target = question.objectives.ttft,
          .itl_target = question.objectives.itl,
          .ended = true};
}

/// Asks for one load after the other; the answers for the chosen settings are kept.
class Planner {
 public:
  Planner(const PlanQuestion& question, const std::function<void(const std::string&)>& progress)
      : question_(question),
        progress_(progress),
        legal_(question.space),
        twin_({.limits = serving_limits(question.limits),
               .shapes = question.shapes,
               .objectives = question.objectives,
               .future_length = question.future_length,
               .futures = question.futures,
               .outstanding_max = outstanding_max(question.limits)}) {
    twin_.set_enabled(true);
    twin_.adopt(question.laws);
  }

  Result<LoadPlan> make() {
    LoadPlan plan;
    plan.initial = legal_.clamp(question_.space.base);
    plan.requests = std::ssize(question_.workload.arrivals);
    for (const replay::Arrival& arrival : question_.workload.arrivals) {
      plan.prompt_tokens += arrival.prompt_tokens;
      if (question_.limits.each.prefix_caching.enabled) plan.shared_tokens += arrival.shared_tokens;
    }
    plan.steps = question_.laws.observation_count();
    plan.step_error = question_.laws.relative_error();
    if (auto chosen = choose(plan); !chosen) return Unexpected(std::move(chosen).error());
    for (const double scale : scales) {
      auto planned = look_at(plan, scale);
      if (!planned) return Unexpected(std::move(planned).error());
      plan.loads.push_back(*planned);
    }
    if (auto found = find_limit(plan); !found) return Unexpected(std::move(found).error());
    return plan;
  }

 private:
  Result<std::unique_ptr<tuner::TwinStudy>> study(double scale) const {
    auto asked = twin_.study(traffic_of(question_, scale));
    if (asked) return asked;
    return unexpected(ErrorCode::InvalidArgument,
                      fmt::format("the twin needs at least {} requests and {} steps of known length; there are {} and {}",
                                  tuner::Twin::requests_min, tuner::StepLaws::law_observations_min,
                                  question_.workload.arrivals.size(), question_.laws.observation_count()));
  }

  Result<void> choose(LoadPlan& plan) {
    progress_("looking for the best settings at the trace's own rate");
    auto asked = study(1);
    if (!asked) return Unexpected(std::move(asked).error());
    const auto best = (*asked)->best(legal_, plan.initial);
    CHECK(best.has_value() && best->complete, "nothing cuts a plan short");
    plan.chosen = best->knobs;
    plan.candidates = best->candidates;
    return {};
  }

  Result<PlannedLoad> look_at(const LoadPlan& plan, double scale) {
    progress_(fmt::format("simulating {:.3g} times the trace's rate", scale));
    auto asked = study(scale);
    if (!asked) return Unexpected(std::move(asked).error());
    const auto chosen = (*asked)->forecast(plan.chosen);
    const auto initial = (*asked)->forecast(plan.initial);
    CHECK(chosen && initial, "nothing cuts a plan short");
    attainment_[scale] = chosen->attainment;
    return PlannedLoad{.scale = scale, .rate = (*asked)->rate(), .chosen = *chosen, .initial = *initial};
  }

  Result<bool> holds(const LoadPlan& plan, double scale) {
    if (!attainment_.contains(scale)) {
      progress_(fmt::format("simulating {:.3g} times the trace's rate", scale));
      auto asked = study(scale);
      if (!asked) return Unexpected(std::move(asked).error());
      const auto forecast = (*asked)->forecast(plan.chosen);
      CHECK(forecast.has_value(), "nothing cuts a plan short");
      attainment_[scale] = forecast->attainment;
    }
    return 100 * attainment_[scale] >= question_.objectives.attainment;
  }

  /// Between the last load that holds and the first that does not; beyond the table where all of it holds or none.
  Result<void> find_limit(LoadPlan& plan) {
    double good = 0;
    double bad = 0;
    for (const PlannedLoad& load : plan.loads) {
      const Result<bool> good_here = holds(plan, load.scale);
      if (!good_here) return Unexpected(Error(good_here.error()));
      if (!*good_here) {
        bad = load.scale;
        break;
      }
      good = load.scale;
    }
    while (bad == 0 && good * widening <= plan_scale_max) {
      const Result<bool> good_here = holds(plan, good * widening);
      if (!good_here) return Unexpected(Error(good_here.error()));
      (*good_here ? good : bad) = good * widening;
    }
    while (good == 0 && bad / widening >= plan_scale_min) {
      const Result<bool> good_here = holds(plan, bad / widening);
      if (!good_here) return Unexpected(Error(good_here.error()));
      (*good_here ? good : bad) = bad / widening;
    }
    plan.holds_further = bad == 0;
    for (int i = 0; i < bisections && good > 0 && bad > 0; ++i) {
      const double middle = std::sqrt(good * bad);
      const Result<bool> good_here = holds(plan, middle);
      if (!good_here) return Unexpected(Error(good_here.error()));
      (*good_here ? good : bad) = middle;
    }
    if (good > 0) plan.holds_to = good;
    return {};
  }

  const PlanQuestion& question_;
  const std::function<void(const std::string&)>& progress_;
  const tuner::LegalSettings legal_;
  tuner::Twin twin_;
  std::map<double, double> attainment_;  // of the chosen settings, by scale
};

}  // namespace

std::vector<double> plan_scales() {
  return {std::begin(scales), std::end(scales)};
}

std::vector<tuner::TrafficPhase> traffic_of(const PlanQuestion& question, double scale) {
  const replay::Workload& workload = question.workload;
  std::vector<tuner::TrafficPhase> phases;
  for (const replay::Phase& phase : workload.phases) {
    const Duration length = std::max<Duration>(scaled(phase.length, scale), Duration(1));
    phases.push_back({.requests = {},
                      .begin = TimePoint(scaled(phase.start, scale)),
                      .end = TimePoint(scaled(phase.start, scale) + length),
                      .weight = to_seconds(length)});
  }
  for (const replay::Arrival& arrival : workload.arrivals) {
    tuner::TrafficPhase& phase = phases[std::min<std::size_t>(arrival.phase, phases.size() - 1)];
    phase.requests.push_back(request_of(arrival, question, scale));
    // The last arrival of a trace is at its very end.
    phase.end = std::max(phase.end, phase.requests.back().arrival + Duration(1));
  }
  return phases;
}

Result<LoadPlan> make_plan(const PlanQuestion& question, const std::function<void(const std::string&)>& progress) {
  return Planner(question, progress).make();
}

}  // namespace rubato
