// SPDX-License-Identifier: Apache-2.0
// `rubatod explain`: the tuner's decisions from the journal as people and programs read them: what was seen, what was expected,
// what was done and why, and what came of it.
#pragma once

#include <cstdint>
#include <functional>
#include <nlohmann/json.hpp>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "daemon/options.h"
#include "manifests/result.h"
#include "tuner/journal.h"

namespace rubato {

/// A decision, and the finished trial that it started or ended.
struct ExplainedDecision {
  std::int64_t time = 0;  // milliseconds since 1970; 0: not known
  tuner::Decision decision;
  std::optional<tuner::Trial> trial{};
};

/// In the order of the decisions, each with the trial of its number. One without a number has no trial; one whose trial still
/// runs, was given up or has left the journal has none either.
[[nodiscard]] std::vector<ExplainedDecision> join_trials(std::span<const tuner::JournalDecision> decisions,
                                                         std::span<const tuner::Trial> trials);

/// `2026-11-30 17:22:01 +0100` of milliseconds since 1970.
using ShowTime = std::function<std::string(std::int64_t)>;
[[nodiscard]] std::string local_time(std::int64_t milliseconds);

/// One block for each.
[[nodiscard]] std::string explanation_text(std::span<const ExplainedDecision> decisions, const ShowTime& show_time);

/// `{"apiVersion":...,"kind":"DecisionList","items":[...]}`. Figures as in the control API: durations and fractions are text.
[[nodiscard]] nlohmann::ordered_json explanation_json(std::span<const ExplainedDecision> decisions);

/// The newest decisions of a state folder, oldest first, also while a daemon writes them. since: milliseconds since 1970.
/// NotFound: there is no journal. Other errors say what is wrong with it.
[[nodiscard]] Result<std::vector<ExplainedDecision>> read_decisions(const std::string& state_directory, std::int64_t since);

/// Newest decisions that are shown.
inline constexpr std::int64_t explained_max = 1000;

/// Prints to stdout; what is wrong, or that there is nothing yet, to stderr. 0, or 1 without a journal that can be read.
[[nodiscard]] int explain(const Options& options);

}  // namespace rubato
