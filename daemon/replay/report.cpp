// SPDX-License-Identifier: Apache-2.0
#include "daemon/replay/report.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>

namespace rubato::replay {
namespace {

/// The samples of one row of the table while it is collected.
struct Samples {
  std::vector<Duration> ttft, gaps, itl, tpot, lag;
};

void collect(const Outcome& outcome, const Targets& targets, PhaseFigures& figures, Samples& samples) {
  ++figures.requests;
  samples.lag.push_back(outcome.lag);
  if (!outcome.complete()) {
    ++figures.failures[outcome.failure];
    return;
  }
  if (is_good(outcome, targets)) ++figures.good;
  figures.prompt_tokens += outcome.prompt_tokens;
  figures.shared_tokens += outcome.shared_tokens;
  figures.cached_tokens += outcome.cached_tokens;
  figures.output_tokens += outcome.tokens;
  samples.ttft.push_back(outcome.ttft);
  if (outcome.gaps.empty()) return;
  samples.gaps.insert(samples.gaps.end(), outcome.gaps.begin(), outcome.gaps.end());
  samples.itl.push_back(*nearest_rank(outcome.gaps, 99));
  Duration all{};
  for (const Duration gap : outcome.gaps) all += gap;
  const std::int64_t intervals = std::max<std::int64_t>(outcome.tokens - 1, static_cast<std::int64_t>(outcome.gaps.size()));
  samples.tpot.push_back(all / intervals);
}

void fill(PhaseFigures& figures, const Samples& samples) {
  figures.ttft_p50 = nearest_rank(samples.ttft, 50);
  figures.ttft_p90 = nearest_rank(samples.ttft, 90);
  figures.ttft_p99 = nearest_rank(samples.ttft, 99);
  figures.gap_p50 = nearest_rank(samples.gaps, 50);
  figures.gap_p99 = nearest_rank(samples.gaps, 99);
  figures.itl_p50 = nearest_rank(samples.itl, 50);
  figures.itl_p90 = nearest_rank(samples.itl, 90);
  figures.itl_p99 = nearest_rank(samples.itl, 99);
  figures.tpot_p50 = nearest_rank(samples.tpot, 50);
  figures.tpot_p99 = nearest_rank(samples.tpot, 99);
  figures.lag_p99 = nearest_rank(samples.lag, 99);
}

std::string settings_at(const std::vector<SettingsChange>& changes, Duration at) {
  std::string settings;
  for (const SettingsChange& change : changes) {
    if (change.at > at && !settings.empty()) break;
    settings = change.settings;  // the first one known stands for the time before it
  }
  return settings;
}

/// Splits a phase at its changes of settings: how it was before the first and after the last.
void compare(const LoadRun& run, const Targets& targets, const Phase& phase, std::uint32_t index, PhaseFigures& figures) {
  figures.settings_at_start = settings_at(run.settings, phase.start);
  figures.settings_at_end = settings_at(run.settings, phase.start + phase.length);
  std::optional<Duration> first, last;
  for (std::size_t change = 1; change < run.settings.size(); ++change) {
    const Duration at = run.settings[change].at;
    if (at <= phase.start || at > phase.start + phase.length) continue;
    if (!first) first = at;
    last = at;
  }
  if (!first) return;
  for (const Outcome& outcome : run.outcomes) {
    if (outcome.phase != index) continue;
    const bool good = is_good(outcome, targets);
    if (outcome.arrived < *first) {
      ++figures.requests_before;
      figures.good_before += good ? 1 : 0;
    } else if (outcome.arrived >= *last) {
      ++figures.requests_after;
      figures.good_after += good ? 1 : 0;
    }
  }
}

/// The earliest arrival from which on the rest of the phase met the target.
std::optional<Duration> recovery(const LoadRun& run, const Targets& targets, const Phase& phase, std::uint32_t index) {
  constexpr std::int64_t requests_min = 10;
  std::vector<std::pair<Duration, bool>> requests;  // arrival, good
  for (const Outcome& outcome : run.outcomes) {
    if (outcome.phase == index) requests.emplace_back(outcome.arrived, is_good(outcome, targets));
  }
  std::ranges::sort(requests);
  std::optional<Duration> found;
  std::int64_t good = 0;
  for (std::size_t i = requests.size(); i-- > 0;) {
    good += requests[i].second ? 1 : 0;
    const auto count = static_cast<std::int64_t>(requests.size() - i);
    const bool met = count >= requests_min && PhaseFigures::percent(good, count) >= targets.attainment;
    if (met) found = i == 0 ? Duration(0) : requests[i].first - phase.start;
  }
  return found;
}

double milliseconds(Duration duration) {
  return std::chrono::duration<double, std::milli>(duration).count();
}

std::string in_milliseconds(const std::optional<Duration>& duration) {
  if (!duration) return "-";
  std::array<char, 32> text{};
  std::snprintf(text.data(), text.size(), milliseconds(*duration) < 100 ? "%.1f" : "%.0f", milliseconds(*duration));
  return text.data();
}

std::string fixed(double value, int digits) {
  std::array<char, 64> text{};
  std::snprintf(text.data(), text.size(), "%.*f", digits, value);
  return text.data();
}

using Row = std::vector<std::string>;

Row row_of(const PhaseFigures& figures) {
  std::int64_t failed = 0;
  for (const auto& [kind, count] : figures.failures) failed += count;
  return {figures.name,
          std::to_string(figures.requests),
          std::to_string(failed),
          in_milliseconds(figures.ttft_p50),
          in_milliseconds(figures.ttft_p90),
          in_milliseconds(figures.ttft_p99),
          in_milliseconds(figures.gap_p50),
          in_milliseconds(figures.gap_p99),
          in_milliseconds(figures.itl_p90),
          in_milliseconds(figures.tpot_p50),
          fixed(figures.attainment(), 1) + "%",
          fixed(figures.goodput(), 2),
          fixed(figures.per_second(figures.output_tokens), 0)};
}

std::string aligned(const std::vector<Row>& rows) {
  std::vector<std::size_t> widths(rows.front().size(), 0);
  for (const Row& row : rows) {
    for (std::size_t column = 0; column < row.size(); ++column) widths[column] = std::max(widths[column], row[column].size());
  }
  std::string text;
  for (const Row& row : rows) {
    for (std::size_t column = 0; column < row.size(); ++column) {
      const std::string padding(widths[column] - row[column].size(), ' ');
      if (column > 0) text += "  ";
      text += column == 0 ? row[column] + padding : padding + row[column];
    }
    text += '\n';
  }
  return text;
}

nlohmann::ordered_json milliseconds_json(const std::optional<Duration>& duration) {
  if (!duration) return nullptr;
  return std::round(milliseconds(*duration) * 1000) / 1000;
}

constexpr std::array settings_numbers{"number", "maxNumBatchedTokens", "maxNumSeqs", "deadlineMargin"};

/// `#3 Deadline, budget 512, 32 sequences, margin 20 %`; as it came where it has other fields.
std::string describe_settings(const std::string& settings) {
  const nlohmann::json json = nlohmann::json::parse(settings, nullptr, false);
  const auto number = [&](const char* name) { return std::to_string(json[name].get<std::int64_t>()); };
  const bool known = json.is_object() && json.contains("priorityPolicy") && json["priorityPolicy"].is_string() &&
                     std::all_of(settings_numbers.begin(), settings_numbers.end(),
                                 [&](const char* name) { return json.contains(name) && json[name].is_number_integer(); });
  if (!known) return settings;
  const auto policy = json["priorityPolicy"].get<std::string>();
  return "#" + number("number") + " " + policy + ", budget " + number("maxNumBatchedTokens") + ", " + number("maxNumSeqs") +
         " sequences" + (policy == "Deadline" ? ", margin " + number("deadlineMargin") + " %" : "");
}

nlohmann::ordered_json settings_json(const std::string& settings) {
  return settings.empty() ? nlohmann::ordered_json(nullptr) : nlohmann::ordered_json::parse(settings, nullptr, false);
}

nlohmann::ordered_json figures_json(const PhaseFigures& figures) {
  nlohmann::ordered_json json;
  json["name"] = figures.name;
  json["seconds"] = std::chrono::duration<double>(figures.length).count();
  json["requests"] = figures.requests;
  json["good"] = figures.good;
  json["failures"] = figures.failures;
  json["attainmentPercent"] = figures.attainment();
  json["goodputPerSecond"] = figures.goodput();
  json["recoveredAfterSeconds"] = figures.recovered
                                      ? nlohmann::ordered_json(std::chrono::duration<double>(*figures.recovered).count())
                                      : nlohmann::ordered_json(nullptr);
  json["promptTokens"] = figures.prompt_tokens;
  json["cachedTokens"] = figures.cached_tokens;
  json["sharedTokens"] = figures.shared_tokens;
  json["outputTokens"] = figures.output_tokens;
  json["outputTokensPerSecond"] = figures.per_second(figures.output_tokens);
  json["ttftMs"] = {{"p50", milliseconds_json(figures.ttft_p50)},
                    {"p90", milliseconds_json(figures.ttft_p90)},
                    {"p99", milliseconds_json(figures.ttft_p99)}};
  json["gapMs"] = {{"p50", milliseconds_json(figures.gap_p50)}, {"p99", milliseconds_json(figures.gap_p99)}};
  json["requestItlMs"] = {{"p50", milliseconds_json(figures.itl_p50)},
                          {"p90", milliseconds_json(figures.itl_p90)},
                          {"p99", milliseconds_json(figures.itl_p99)}};
  json["tpotMs"] = {{"p50", milliseconds_json(figures.tpot_p50)}, {"p99", milliseconds_json(figures.tpot_p99)}};
  json["clientLagMs"] = {{"p99", milliseconds_json(figures.lag_p99)}};
  if (!figures.settings_at_start.empty()) {
    json["settingsAtStart"] = settings_json(figures.settings_at_start);
    json["settingsAtEnd"] = settings_json(figures.settings_at_end);
    json["beforeFirstChange"] = {{"requests", figures.requests_before}, {"good", figures.good_before}};
    json["afterLastChange"] = {{"requests", figures.requests_after}, {"good", figures.good_after}};
  }
  return json;
}

}  // namespace

double PhaseFigures::per_second(std::int64_t count) const {
  const double seconds = std::chrono::duration<double>(length).count();
  return seconds > 0 ? static_cast<double>(count) / seconds : 0;
}

double PhaseFigures::percent(std::int64_t part, std::int64_t whole) {
  return whole > 0 ? 100.0 * static_cast<double>(part) / static_cast<double>(whole) : 0;
}

std::optional<Duration> nearest_rank(std::vector<Duration> values, double percent) {
  if (values.empty()) return std::nullopt;
  const double rank = std::ceil(percent / 100 * static_cast<double>(values.size()));
  const auto index = static_cast<std::size_t>(std::clamp(rank, 1.0, static_cast<double>(values.size()))) - 1;
  std::ranges::nth_element(values, values.begin() + static_cast<std::ptrdiff_t>(index));
  return values[index];
}

bool is_good(const Outcome& outcome, const Targets& targets) {
  if (!outcome.complete() || outcome.ttft > targets.ttft) return false;
  const std::optional<Duration> itl = nearest_rank(outcome.gaps, 99);
  return !itl || *itl <= targets.itl;
}

Report summarize(const Workload& workload, const LoadRun& run, const Targets& targets) {
  Report report;
  report.targets = targets;
  report.settings = run.settings;
  std::vector<Samples> samples(workload.phases.size());
  Samples all;
  for (const Phase& phase : workload.phases) {
    if (phase.start >= run.elapsed && !report.phases.empty()) break;  // a stop came before it began
    PhaseFigures figures;
    figures.name = phase.name;
    // A phase that a stop cut short lasted only until then.
    figures.length = std::clamp(run.elapsed - phase.start, Duration(0), phase.length);
    report.phases.push_back(std::move(figures));
  }
  report.overall.name = "overall";
  report.overall.length = run.elapsed;
  for (const Outcome& outcome : run.outcomes) {
    collect(outcome, targets, report.phases[outcome.phase], samples[outcome.phase]);
    collect(outcome, targets, report.overall, all);
  }
  for (std::uint32_t index = 0; index < report.phases.size(); ++index) {
    fill(report.phases[index], samples[index]);
    compare(run, targets, workload.phases[index], index, report.phases[index]);
    report.phases[index].recovered = recovery(run, targets, workload.phases[index], index);
  }
  fill(report.overall, all);
  if (!run.settings.empty()) {
    report.overall.settings_at_start = run.settings.front().settings;
    report.overall.settings_at_end = run.settings.back().settings;
  }
  return report;
}

std::string to_table(const Report& report) {
  std::vector<Row> rows = {{"phase", "requests", "failed", "ttft p50", "p90", "p99", "gap p50", "p99", "itl p90", "tpot p50",
                            "attained", "good/s", "tokens/s"}};
  for (const PhaseFigures& figures : report.phases) rows.push_back(row_of(figures));
  rows.push_back(row_of(report.overall));
  std::string text = aligned(rows);
  text += "times in ms; itl: p99 gap of a request; good: ttft <= " + in_milliseconds(report.targets.ttft) +
          " and itl <= " + in_milliseconds(report.targets.itl) + "; target " + fixed(report.targets.attainment, 1) + "% " +
          (report.overall.attainment() >= report.targets.attainment ? "met" : "missed") + "\n";
  const PhaseFigures& all = report.overall;
  if (all.shared_tokens > 0 || all.cached_tokens > 0) {
    text += "prompt tokens from the prefix cache: " + fixed(PhaseFigures::percent(all.cached_tokens, all.prompt_tokens), 1) +
            "%; the most that this trace allows: " + fixed(PhaseFigures::percent(all.shared_tokens, all.prompt_tokens), 1) +
            "%\n";
  }
  for (const auto& [kind, count] : report.overall.failures) text += "failed: " + kind + " " + std::to_string(count) + "\n";
  if (report.phases.size() > 1) {
    text += "met the target from so many seconds after a phase's begin on:";
    for (const PhaseFigures& figures : report.phases) {
      const std::string after =
          figures.recovered ? fixed(std::chrono::duration<double>(*figures.recovered).count(), 0) : std::string("never");
      text += "  " + figures.name + " " + after;
    }
    text += "\n";
  }
  for (const PhaseFigures& figures : report.phases) {
    if (figures.settings_at_start.empty()) continue;
    text += "settings in " + figures.name + ": ";
    if (figures.settings_at_start == figures.settings_at_end) {
      text += describe_settings(figures.settings_at_end) + "\n";
      continue;
    }
    text += describe_settings(figures.settings_at_start) + " -> " + describe_settings(figures.settings_at_end) + "\n";
    text += "  attained before the first change " +
            fixed(PhaseFigures::percent(figures.good_before, figures.requests_before), 1) + "% of " +
            std::to_string(figures.requests_before) + ", after the last " +
            fixed(PhaseFigures::percent(figures.good_after, figures.requests_after), 1) + "% of " +
            std::to_string(figures.requests_after) + "\n";
  }
  return text;
}

nlohmann::ordered_json to_json(const Report& report) {
  nlohmann::ordered_json json;
  json["targets"] = {{"ttftMs", milliseconds(report.targets.ttft)},
                     {"itlMs", milliseconds(report.targets.itl)},
                     {"attainmentPercent", report.targets.attainment}};
  json["overall"] = figures_json(report.overall);
  json["phases"] = nlohmann::ordered_json::array();
  for (const PhaseFigures& figures : report.phases) json["phases"].push_back(figures_json(figures));
  if (!report.settings.empty()) {
    json["settings"] = nlohmann::ordered_json::array();
    for (const SettingsChange& change : report.settings) {
      json["settings"].push_back(
          {{"second", std::chrono::duration<double>(change.at).count()}, {"settings", settings_json(change.settings)}});
    }
  }
  return json;
}

std::string progress_line(const Workload& workload, const Progress& progress, const Targets& targets) {
  std::vector<Duration> ttft, itl;
  std::int64_t recent = 0, good = 0;
  // Outcomes are in order of their end, so the recent ones are the last.
  for (auto outcome = progress.outcomes.rbegin(); outcome != progress.outcomes.rend(); ++outcome) {
    if (outcome->ended + std::chrono::seconds(10) < progress.elapsed) break;
    ++recent;
    if (!outcome->complete()) continue;
    ttft.push_back(outcome->ttft);
    if (const auto own = nearest_rank(outcome->gaps, 99)) itl.push_back(*own);
    if (is_good(*outcome, targets)) ++good;
  }
  std::string line = fixed(std::chrono::duration<double>(progress.elapsed).count(), 0) + "s " +
                     workload.phases[progress.phase].name + "  sent " + std::to_string(progress.sent) + "  running " +
                     std::to_string(progress.in_flight) + "  failed " + std::to_string(progress.failed) + "  ttft p90 " +
                     in_milliseconds(nearest_rank(ttft, 90)) + " ms  itl p90 " + in_milliseconds(nearest_rank(itl, 90)) +
                     " ms  attained " + (recent > 0 ? fixed(PhaseFigures::percent(good, recent), 0) + "%" : std::string("-"));
  if (!progress.settings.empty()) line += "  " + describe_settings(progress.settings.back().settings);
  return line;
}

}  // namespace rubato::replay
