// SPDX-License-Identifier: Apache-2.0
// `rubatod plan`: what the twin would do with a load before it comes. Which settings it would choose, how attainment falls as the
// load grows, and how much load the objectives bear.
#pragma once

#include <cstdint>
#include <functional>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "daemon/options.h"
#include "daemon/replay/workload.h"
#include "manifests/result.h"
#include "policies/lane_group.h"
#include "tuner/tuner.h"
#include "tuner/twin/twin.h"

namespace rubato {

struct PlanQuestion {
  policies::LaneGroupLimits limits;  // of the engine
  bool shapes = true;                // it runs steps in shapes
  tuner::SearchSpace space;          // base: the manifest's initial settings, with its pins
  ObjectivesSpec objectives;
  tuner::StepLaws laws;
  replay::Workload workload;
  Duration future_length = std::chrono::seconds(180);  // of each future that a load is simulated over, at most
  std::int32_t futures = 4;
};

/// Both settings under the same futures.
struct PlannedLoad {
  double scale = 1;  // of the trace's rate
  double rate = 0;   // requests per second
  tuner::Forecast chosen;
  tuner::Forecast initial;
};

struct LoadPlan {
  KnobValues chosen;                 // at the trace's own rate
  KnobValues initial;                // the manifest's
  std::int32_t candidates = 0;       // looked at for it
  std::vector<PlannedLoad> loads{};  // rising; plan_scales()
  std::optional<double> holds_to{};  // largest scale at which the chosen settings meet the objectives, with all below it that
                                     // were looked at; empty: none was found down to scale_min
  bool holds_further = false;        // even at scale_max
  std::int64_t requests = 0;         // of the trace
  std::int64_t prompt_tokens = 0;
  std::int64_t shared_tokens = 0;  // of them: taken to be found in the prefix cache
  std::uint64_t steps = 0;         // that the step times were learnt from
  double step_error = 0;           // relative
};

[[nodiscard]] std::vector<double> plan_scales();
inline constexpr double plan_scale_min = 1.0 / 16;
inline constexpr double plan_scale_max = 16;

/// The trace's requests as the twin takes them: phase by phase, arrivals closer together by scale, less what the prefix cache of
/// such an engine would have. Phases without requests are kept: silence is a load too.
[[nodiscard]] std::vector<tuner::TrafficPhase> traffic_of(const PlanQuestion& question, double scale);

/// progress hears of each step in a few words. InvalidArgument: fewer requests in the trace, or steps in the laws, than the twin
/// needs.
[[nodiscard]] Result<LoadPlan> make_plan(const PlanQuestion& question, const std::function<void(const std::string&)>& progress);

/// How step times were come by, for people: `measured on this machine over 1234 steps`.
[[nodiscard]] std::string plan_text(const LoadPlan& plan, const ObjectivesSpec& objectives, const std::string& step_source);
/// Figures as in the control API.
[[nodiscard]] nlohmann::ordered_json plan_json(const LoadPlan& plan, const ObjectivesSpec& objectives,
                                               const std::string& step_source);

/// Prints the plan to stdout, progress and what is wrong to stderr. 0 or 1.
[[nodiscard]] int plan(const Options& options);

}  // namespace rubato
