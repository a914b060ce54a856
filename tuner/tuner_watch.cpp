// SPDX-License-Identifier: Apache-2.0
// What a window of the incumbent leads to while nothing is tried: hold, or search.
#include <algorithm>

#include "tuner/describe.h"
#include "tuner/guard.h"
#include "tuner/tuner_state.h"

namespace rubato::tuner {

namespace {

constexpr std::int32_t met_windows_forget = 8;
constexpr std::int32_t learning_windows_max = 3;

}  // namespace

Evidence Tuner::State::watched_evidence() const {
  Evidence all;
  for (const Evidence& one : watched) all = all.windows == 0 ? one : pooled(all, one);
  return all;
}

void Tuner::State::note_watched(const Evidence& evidence) {
  watched.push_back(evidence);
  if (watched.size() > watched_max) watched.pop_front();
}

/// No search is running: is one needed, and may one start? Objectives that are met are never explored beyond.
Decision Tuner::State::watch(const Window& window, const Evidence& evidence, const std::optional<Shift>& shift) {
  const bool first = watched.empty();
  if (shift) {
    watched.clear();
    infeasible = false;
    if (shift->of_load()) {
      searches_since_shift = 0;
      settled_evidence.reset();
    }
  }
  note_watched(evidence);
  const Verdict latest = judge(evidence, options.objectives);
  const bool missed = latest == Verdict::Missed || (latest == Verdict::Unclear && watched.size() > 1 &&
                                                    judge(watched_evidence(), options.objectives) == Verdict::Missed);
  if (!shift && !first) note_regime(window, evidence);
  if (latest == Verdict::Met) {
    infeasible = false;
    if (++met_windows >= met_windows_forget) searches_since_shift = 0;
  } else {
    met_windows = 0;
  }
  Decision hold{.phase = Phase::Holding, .apply = {}, .trial = false, .reason = {}, .message = {}};
  if (!missed) {
    waited_for_shift = false;
    hold.reason = shift ? "ShiftDetected" : latest == Verdict::Met ? "ObjectivesMet" : "ObjectivesUnclear";
    hold.message = (shift ? "The " + shift->text() + ", but the objectives hold: " : "Holding " + describe(incumbent) + ": ") +
                   describe(evidence) + " against a target of " + std::to_string(options.objectives.attainment) + " %.";
    if (infeasible) {
      hold.phase = Phase::Infeasible;
      hold.reason = infeasible_reason;
      hold.message = infeasible_message;
    }
    return hold;
  }
  const bool news = twin_knows_more(window.end);
  if (infeasible && !news) {
    return {.phase = Phase::Infeasible, .apply = {}, .trial = false, .reason = infeasible_reason, .message = infeasible_message};
  }
  if (window.end < dwell_until && !news) {
    hold.reason = "Dwelling";
    hold.message = "The objectives are missed (" + describe(evidence) +
                   "), but the last search ended too recently; the next may start in " +
                   decimal(to_seconds(dwell_until - window.end)) + " s.";
    return hold;
  }
  if (alternation()) {
    if (auto mixture = follow_mixture(window)) return *mixture;
    hold.reason = "LoadAlternates";
    hold.message = "The objectives are missed (" + describe(evidence) + "), but loads alternate too fast for trials; holding " +
                   describe(incumbent) + ".";
    return hold;
  }
  // Searched under this load already, and it is served as well as it was then: looking again would find the same.
  if (settled_evidence && !news && twin_answers() && compare(watched_evidence(), *settled_evidence) != Comparison::Worse) {
    hold.reason = "NothingBetterKnown";
    hold.message = "The objectives are missed (" + describe(evidence) + "), as well as " + describe(incumbent) +
                   " did when the last search ended (" + describe(*settled_evidence) + ").";
    return hold;
  }
  // A twin that will soon know better is worth a window or two, where there is something left to lose.
  if (twin && twin->status().state == TwinState::Learning && learning_windows < learning_windows_max &&
      evidence.attainment() >= nothing_to_protect) {
    ++learning_windows;
    hold.reason = "TwinLearning";
    hold.message = "The objectives are missed (" + describe(evidence) + "); the twin is still learning.";
    return hold;
  }
  if (shift && !first && !waited_for_shift && !twin_answers()) {
    waited_for_shift = true;  // this window is of two loads; the next one measures the incumbent under the new one
    hold.reason = "ShiftDetected";
    hold.message = "The " + shift->text() + " and the objectives are missed (" + describe(evidence) + "); measuring once more.";
    return hold;
  }
  waited_for_shift = false;
  return start_search(window, "The objectives are missed (" + describe(evidence) + ", mostly " +
                                  missed_target(evidence, options.objectives) + ")");
}

}  // namespace rubato::tuner
