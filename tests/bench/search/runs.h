// SPDX-License-Identifier: Apache-2.0
// The runs of the study: who is compared with whom, under which load, and what is noted of it.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "tests/bench/search/oracle.h"
#include "tests/bench/search/tuned.h"

namespace rubato::study {

enum class Kind : std::uint8_t {
  Cell,       // one load that stays: how fast is the best found
  Day,        // eight phases of 300 s
  Alternate,  // chat and retrieval by turns
  Steady,     // one load for hours: how calm
};
[[nodiscard]] std::string name_of(Kind kind);
[[nodiscard]] std::optional<Kind> kind_named(const std::string& name);

/// One row's run under one seed.
struct Record {
  Kind kind = Kind::Cell;
  std::string workload;  // Day: `day`; Alternate: `120 s`
  double load = 0;       // of capacity
  std::string truth;
  std::string space;
  std::string row;
  std::uint64_t seed = 0;
  // Cell: until the settings are, for good, within 5 % of the oracle's share; empty: never.
  std::optional<double> windows{};
  double lost = 0;         // good requests that the oracle had and this run had not, in windows' worth of requests
  double final_share = 0;  // of the oracle's good requests, over the last quarter
  double attainment = 0;
  double static_attainment = 0;        // of the best single static setting without triage, on the same arrivals
  double changes_per_hour = 0;         // Steady: after the first half hour; else: of the whole run
  std::string settings{};              // in the end
  std::vector<std::string> changes{};  // the first few: when, to what, why
  Effort effort{};
};

struct RunRequest {
  Kind kind = Kind::Cell;
  const Workload* workload = nullptr;  // Cell and Steady
  double load = 0.95;
  TruthKind truth = TruthKind::Nominal;
  Space space = Space::Full;
  std::vector<std::string> rows{};
  std::optional<double> rate{};  // requests per second; empty: load times the capacity
  std::uint64_t seeds = 20;
  int windows = 40;                             // Cell: of 20 s
  Duration period = std::chrono::seconds(120);  // Alternate
  Duration length = std::chrono::hours(8);      // Steady
  Duration phase = std::chrono::seconds(300);   // Day
  int threads = 1;
};

/// default, static, oracle, deadline, random, hill, aimd, twovalue, plain, uncalibrated, ours.
[[nodiscard]] const std::vector<std::string>& all_rows();

/// In order of rows, then seeds.
[[nodiscard]] std::vector<Record> run(const RunRequest& request, const Traces& traces, Oracle& oracle);

}  // namespace rubato::study
