// SPDX-License-Identifier: Apache-2.0
// From outcomes to figures: percentiles, attainment, goodput, per phase and over all. A request that failed met no target.
#pragma once

#include <cstdint>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "daemon/replay/client.h"
#include "daemon/replay/workload.h"

namespace rubato::replay {

/// A request is good when it is complete, its TTFT and its own p99 gap are both within target.
struct Targets {
  Duration ttft = std::chrono::milliseconds(500);
  Duration itl = std::chrono::milliseconds(50);
  double attainment = 99;  // percent
};

struct PhaseFigures {
  std::string name;
  Duration length{};
  std::int64_t requests = 0;
  std::int64_t good = 0;
  std::map<std::string, std::int64_t> failures;
  std::int64_t prompt_tokens = 0;  // of complete requests
  std::int64_t shared_tokens = 0;  // of those: what an unlimited prefix cache could spare
  std::int64_t cached_tokens = 0;  // of those: what the server's did
  std::int64_t output_tokens = 0;
  std::optional<Duration> ttft_p50, ttft_p90, ttft_p99;
  std::optional<Duration> gap_p50, gap_p99;           // over all gaps
  std::optional<Duration> itl_p50, itl_p90, itl_p99;  // over the requests' own p99 gaps
  std::optional<Duration> tpot_p50, tpot_p99;         // (last - first token) / (tokens - 1)
  std::optional<Duration> lag_p99;                    // the client's own delay
  std::string settings_at_start, settings_at_end;     // of the watched engine
  std::optional<Duration> recovered;                  // from so long after its begin on, its other requests met the target;
                                                      // none: not even its last ten did
  std::int64_t requests_before = 0, good_before = 0;  // arrived before the phase's first change of settings
  std::int64_t requests_after = 0, good_after = 0;    // arrived after its last one

  [[nodiscard]] double attainment() const { return percent(good, requests); }
  [[nodiscard]] double goodput() const { return per_second(good); }
  [[nodiscard]] double per_second(std::int64_t count) const;
  [[nodiscard]] static double percent(std::int64_t part, std::int64_t whole);
};

struct Report {
  std::vector<PhaseFigures> phases;
  PhaseFigures overall;
  Targets targets;
  std::vector<SettingsChange> settings;
};

/// The smallest value that at least percent of values do not exceed; empty for no values.
[[nodiscard]] std::optional<Duration> nearest_rank(std::vector<Duration> values, double percent);

[[nodiscard]] bool is_good(const Outcome& outcome, const Targets& targets);

[[nodiscard]] Report summarize(const Workload& workload, const LoadRun& run, const Targets& targets);

[[nodiscard]] std::string to_table(const Report& report);
[[nodiscard]] nlohmann::ordered_json to_json(const Report& report);

/// One line on the state of a run; latencies are those of the last ten seconds.
[[nodiscard]] std::string progress_line(const Workload& workload, const Progress& progress, const Targets& targets);

}  // namespace rubato::replay
