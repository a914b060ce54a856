// SPDX-License-Identifier: Apache-2.0
#include "daemon/explain.h"

#include <fmt/format.h>

#include <chrono>
#include <cstdio>
#include <ctime>
#include <filesystem>
#include <unordered_map>
#include <utility>

#include "daemon/control/trials.h"
#include "daemon/control/wall_time.h"
#include "manifests/json.h"
#include "tuner/describe.h"

namespace rubato {
namespace {

using Json = nlohmann::ordered_json;
using tuner::decimal;
using tuner::Decision;
using tuner::describe;
using tuner::milliseconds;

std::string_view name_of(tuner::Phase phase) {
  switch (phase) {
    case tuner::Phase::Disabled:
      return "Disabled";
    case tuner::Phase::Holding:
      return "Holding";
    case tuner::Phase::Searching:
      return "Searching";
    case tuner::Phase::Infeasible:
      return "Infeasible";
    case tuner::Phase::NoData:
      return "NoData";
  }
  return "Unknown";
}

/// Of either an expectation or a window.
template <class Outcome>
std::string latencies(const Outcome& outcome) {
  return fmt::format("TTFT p50 {} p99 {}, ITL p50 {} p99 {}", milliseconds(outcome.ttft_p50), milliseconds(outcome.ttft_p99),
                     milliseconds(outcome.itl_p50), milliseconds(outcome.itl_p99));
}

std::string load_text(const tuner::Window& window) {
  return fmt::format("{:.3g} requests/s of {:.0f} + {:.0f} tokens, {:.0f} s", window.arrival_rate(), window.prompt_tokens_mean,
                     window.output_tokens_mean, to_seconds(window.end - window.begin));
}

std::string measured_text(const tuner::Window& window) {
  if (window.judged == 0) return "no request was judged";
  return fmt::format("{} % of {} requests good; {}", decimal(100 * window.attainment()), window.judged, latencies(window));
}

std::string expected_text(const tuner::ExpectedOutcome& expected) {
  return fmt::format("{} % +-{}; {}", decimal(100 * expected.attainment), decimal(100 * expected.attainment_spread),
                     latencies(expected));
}

void add_line(std::string& text, std::string_view label, const std::string& value) {
  text += fmt::format("  {:<9} {}\n", label, value);
}

/// What the decision did to the settings.
std::string done_text(const Decision& decision) {
  if (decision.apply) return (decision.trial ? "tried " : "applied ") + describe(*decision.apply);
  return decision.trial ? "went on with the trial" : "changed nothing";
}

/// Whether this decision put the trial on: what came of it is still to be told. Else it tells of the end itself.
bool starts_trial(const ExplainedDecision& one) {
  return one.decision.trial && one.decision.apply.has_value();
}

std::string outcome_text(const tuner::Trial& trial) {
  std::string text = trial.outcome + ": " + measured_text(trial.window);
  if (trial.expected && trial.window.judged > 0) {
    text += fmt::format("; {} points from what was expected",
                        decimal(100 * (trial.window.attainment() - trial.expected->attainment)));
  }
  return text;
}

std::string block(const ExplainedDecision& one, const ShowTime& show_time) {
  const Decision& decision = one.decision;
  std::string text = fmt::format("{}  {}", one.time > 0 ? show_time(one.time) : "time not known", decision.reason);
  std::string remarks = std::string(name_of(decision.phase));
  if (decision.trial_number > 0) remarks += fmt::format(", trial {}", decision.trial_number);
  if (!decision.source.empty()) remarks += ", proposed by " + decision.source;
  text += fmt::format("  ({})\n", remarks);
  if (decision.seen) {
    add_line(text, "seen", load_text(*decision.seen));
    add_line(text, "", measured_text(*decision.seen));
  }
  if (decision.expected) add_line(text, "expected", expected_text(*decision.expected));
  if (decision.expected_incumbent)
    add_line(text, "instead", expected_text(*decision.expected_incumbent) + " of what was current");
  add_line(text, "done", done_text(decision));
  if (!decision.message.empty()) add_line(text, "because", decision.message);
  if (starts_trial(one)) {
    add_line(text, "outcome", one.trial ? outcome_text(*one.trial) : "not on record: it runs, or was given up");
  } else if (one.trial) {
    add_line(text, "ended", fmt::format("trial {}: {}", one.trial->number, outcome_text(*one.trial)));
  }
  return text;
}

std::string rfc3339(std::int64_t time) {
  return control::format_time(control::WallTime(std::chrono::milliseconds(time)));
}

Json trial_json(const tuner::Trial& trial) {
  Json json{{"number", trial.number}, {"outcome", trial.outcome}, {"settings", to_json(trial.knobs)}};
  if (trial.ended > 0) json["ended"] = rfc3339(trial.ended * 1000);
  if (trial.expected) json["expected"] = control::expected_json(*trial.expected);
  json["measured"] = control::measured_json(trial.window);
  return json;
}

Json decision_json(const ExplainedDecision& one) {
  const Decision& decision = one.decision;
  Json json = Json::object();
  if (one.time > 0) json["time"] = rfc3339(one.time);
  json.update({{"phase", name_of(decision.phase)},
               {"reason", decision.reason},
               {"message", decision.message},
               {"trial", decision.trial}});
  if (decision.trial_number > 0) json["trialNumber"] = decision.trial_number;
  if (!decision.source.empty()) json["source"] = decision.source;
  if (decision.apply) json["settings"] = to_json(*decision.apply);
  if (decision.seen) json["seen"] = control::measured_json(*decision.seen);
  if (decision.expected) json["expected"] = control::expected_json(*decision.expected);
  if (decision.expected_incumbent) json["expectedOfIncumbent"] = control::expected_json(*decision.expected_incumbent);
  if (one.trial) json["outcome"] = trial_json(*one.trial);
  return json;
}

std::int64_t wall_milliseconds() {
  using namespace std::chrono;
  return duration_cast<std::chrono::milliseconds>(system_clock::now().time_since_epoch()).count();
}

}  // namespace

std::vector<ExplainedDecision> join_trials(std::span<const tuner::JournalDecision> decisions,
                                           std::span<const tuner::Trial> trials) {
  std::unordered_map<std::int64_t, const tuner::Trial*> by_number;
  for (const tuner::Trial& one : trials) by_number[one.number] = &one;
  std::vector<ExplainedDecision> explained;
  for (const tuner::JournalDecision& one : decisions) {
    ExplainedDecision& added = explained.emplace_back(ExplainedDecision{.time = one.time, .decision = one.decision});
    const auto found = by_number.find(one.decision.trial_number);
    if (one.decision.trial_number > 0 && found != by_number.end()) added.trial = *found->second;
  }
  return explained;
}

std::string local_time(std::int64_t milliseconds) {
  const std::time_t seconds = static_cast<std::time_t>(milliseconds / 1000);
  std::tm parts{};
  char text[64];
  if (::localtime_r(&seconds, &parts) == nullptr || std::strftime(text, sizeof text, "%Y-%m-%d %H:%M:%S %z", &parts) == 0)
    return rfc3339(milliseconds);
  return text;
}

std::string explanation_text(std::span<const ExplainedDecision> decisions, const ShowTime& show_time) {
  std::string text;
  for (const ExplainedDecision& one : decisions) text += (text.empty() ? "" : "\n") + block(one, show_time);
  return text;
}

Json explanation_json(std::span<const ExplainedDecision> decisions) {
  Json items = Json::array();
  for (const ExplainedDecision& one : decisions) items.push_back(decision_json(one));
  return {{"apiVersion", api_version}, {"kind", "DecisionList"}, {"items", std::move(items)}};
}

Result<std::vector<ExplainedDecision>> read_decisions(const std::string& state_directory, std::int64_t since) {
  const std::string path = (std::filesystem::path(state_directory) / "journal.sqlite").string();
  const auto journal = tuner::Journal::open_existing(path);
  if (!journal) return Unexpected(Error(journal.error()));
  const auto decisions = (*journal)->decisions({.since = since, .count_max = explained_max});
  if (!decisions) return Unexpected(Error(decisions.error()));
  const auto trials = (*journal)->finished_trials(explained_max);
  if (!trials) return Unexpected(Error(trials.error()));
  return join_trials(*decisions, *trials);
}

int explain(const Options& options) {
  std::int64_t since = 0;
  if (options.since) since = wall_milliseconds() - std::chrono::duration_cast<std::chrono::milliseconds>(*options.since).count();
  const auto decisions = read_decisions(options.state, since);
  if (!decisions) {
    if (decisions.error().code == ErrorCode::NotFound) {
      fmt::print(stderr, "rubatod: no journal in {}: no daemon has tuned with this --state yet\n", options.state);
    } else {
      fmt::print(stderr, "rubatod: {}\n", decisions.error().message);
    }
    return 1;
  }
  if (decisions->empty()) {
    fmt::print(stderr, "rubatod: no decision on record{}\n",
               options.since ? " of the last " + format_duration(*options.since) : "");
  } else if (std::ssize(*decisions) == explained_max) {
    fmt::print(stderr, "rubatod: only the newest {} decisions are shown\n", explained_max);
  }
  if (options.output_format == OutputFormat::Json) {
    fmt::print("{}\n", explanation_json(*decisions).dump(2, ' ', false, Json::error_handler_t::replace));
  } else {
    fmt::print("{}", explanation_text(*decisions, local_time));
  }
  return 0;
}

}  // namespace rubato
