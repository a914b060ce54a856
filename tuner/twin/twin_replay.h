// SPDX-License-Identifier: Apache-2.0
// One run of the twin: traffic under settings, what each request got, and how that is judged once what the twin is known to be
// off by is taken out.
#pragma once

#include <functional>
#include <optional>
#include <span>
#include <vector>

#include "tuner/twin/simulation.h"
#include "tuner/twin/twin.h"

namespace rubato::tuner {

/// All times as the traffic's.
struct ReplayPlan {
  std::span<const TrafficRequest> traffic;
  TimePoint begin;  // of judging; what comes before is warm-up
  TimePoint since;  // requests that arrived earlier are not judged
  TimePoint end;
  std::int32_t misses_max = 0;  // more misses than this end the run early, for it is hopeless; 0: never
};

struct ReplayResult {
  std::vector<SimulatedRequest> requests;  // that ended after begin, or are under way
  TimePoint begin;
  TimePoint end;  // earlier than the plan's where the run was hopeless
  std::int32_t arrivals = 0;
  std::int32_t waiting_begin = 0;
  std::int32_t waiting_end = 0;
};

/// What the twin does beside answering, for its status.
struct TwinCounts {
  std::uint64_t simulations = 0;
  std::uint64_t aborted = 0;
  Duration simulated{};
};

/// Empty when go_on ended it.
[[nodiscard]] std::optional<ReplayResult> replay(const SimulationOptions& options, const StepCost& cost, const ReplayPlan& plan,
                                                 const std::function<bool()>& go_on, TwinCounts& counts);

/// As the daemon's windows judge, and the samples that its percentiles are made of, sorted.
struct Judged {
  Window window;
  std::vector<double> ttft;  // seconds
  std::vector<double> itl;
};

/// Each request's TTFT and p99 gap are first corrected by the bias at its rank: that of the p50 below it, that of the p99 at the
/// end, in between in proportion.
[[nodiscard]] Judged judged(const ReplayResult& result, const TwinCorrection& correction, TimePoint since);

/// Nearest rank, as the daemon's windows. Zero of nothing.
[[nodiscard]] Duration percentile_of(std::span<const double> sorted, int percent);

[[nodiscard]] std::array<Duration, twin_quantile_count> quantiles_of(const Window& window);

}  // namespace rubato::tuner
