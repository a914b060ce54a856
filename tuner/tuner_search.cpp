// SPDX-License-Identifier: Apache-2.0
// The tuner's way through a search: when one starts, what follows from a trial's window, and how it ends.
#include <algorithm>

#include "tuner/describe.h"
#include "tuner/guard.h"
#include "tuner/journal.h"
#include "tuner/tuner_state.h"

namespace rubato::tuner {

namespace {

constexpr double same_load = 0.5;           // octaves: nearer is the same load, whatever the detector said under a trial
constexpr double nothing_to_protect = 0.5;  // below this attainment a bad trial costs little more than the incumbent does
constexpr double backlog_share = 0.2;
constexpr std::int32_t met_windows_forget = 8;

const char* name_of(Source source) {
  switch (source) {
    case Source::Regime:
      return "it served this load best before";
    case Source::Twin:
      return "the twin expects most of it";
    case Source::Remembered:
      return "it met the objectives under a similar load";
    case Source::Opening:
      return "it relieves the target that is missed";
    case Source::Improvement:
      return "it promises the largest improvement";
    case Source::Random:
      return "nothing better is known";
  }
  return "";
}

bool leaves_backlog(const Window& window) {
  return window.waiting_end > backlog_share * std::max(1, window.arrivals);
}

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
    if (shift->of_load()) searches_since_shift = 0;
  }
  note_watched(evidence);
  const Verdict latest = judge(evidence, options.objectives);
  const bool missed = latest == Verdict::Missed || (latest == Verdict::Unclear && watched.size() > 1 &&
                                                    judge(watched_evidence(), options.objectives) == Verdict::Missed);
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
  if (infeasible) {
    return {.phase = Phase::Infeasible, .apply = {}, .trial = false, .reason = infeasible_reason, .message = infeasible_message};
  }
  if (window.end < dwell_until) {
    hold.reason = "Dwelling";
    hold.message = "The objectives are missed (" + describe(evidence) +
                   "), but the last search ended too recently; the next may start in " +
                   decimal(to_seconds(dwell_until - window.end)) + " s.";
    return hold;
  }
  if (shift && !first && !waited_for_shift) {
    waited_for_shift = true;  // this window is of two loads; the next one measures the incumbent under the new one
    hold.reason = "ShiftDetected";
    hold.message = "The " + shift->text() + " and the objectives are missed (" + describe(evidence) + "); measuring once more.";
    return hold;
  }
  waited_for_shift = false;
  return start_search(window, "The objectives are missed (" + describe(evidence) + ", mostly " +
                                  missed_target(evidence, options.objectives) + ")");
}

Decision Tuner::State::start_search(const Window& window, const std::string& why) {
  ++counts.searches_total;
  search_load = load_of(window);
  load_moves = 0;
  search_rollbacks = 0;
  load_may_have_moved = false;
  search.emplace(legal,
                 SearchOptions{.objectives = options.objectives,
                               .load = search_load,
                               .seed = options.seed + 0x9e3779b97f4a7c15ULL * static_cast<std::uint64_t>(counts.searches_total),
                               .trials_max = trials_per_search_max},
                 history);
  const Evidence known = watched_evidence();
  search->tell(incumbent, known);
  remember({.knobs = incumbent, .load = search_load, .evidence = known});
  return next_trial(window.end, why);
}

Decision Tuner::State::next_trial(TimePoint now, const std::string& lead) {
  const Answer answer = search->ask(incumbent);
  if (!answer.proposal) {
    const char* why = answer.end == SearchEnd::TrialsSpent ? "the trials are spent"
                      : answer.end == SearchEnd::Exhausted ? "every setting has been tried"
                                                           : "no setting promises more";
    return finish(now, lead + "; " + why);
  }
  stage = Stage::Trying;
  trial_window.reset();
  repeats = 0;
  return {.phase = Phase::Searching,
          .apply = answer.proposal->knobs,
          .trial = true,
          .reason = "TrialStarted",
          .message = lead + "; trying " + describe(answer.proposal->knobs) + " (trial " + std::to_string(search->trials()) +
                     " of at most " + std::to_string(trials_per_search_max) + "), because " + name_of(answer.proposal->source) +
                     "."};
}

Decision Tuner::State::repeat_trial(const std::string& why) {
  ++repeats;
  return {.phase = Phase::Searching,
          .apply = {},
          .trial = true,
          .reason = "TrialRepeated",
          .message = "One more window for " + describe(current) + ": " + why + "."};
}

Decision Tuner::State::on_trial(const Window& window, const Evidence& evidence, const std::optional<Shift>& shift) {
  trial_window = trial_window ? merged(*trial_window, window) : window;
  const Verdict alone = judge(evidence, options.objectives);
  if (shift && load_moves < load_moves_max && alone != Verdict::Met) return leave_for_shift(*shift);
  if (evidence.draining && alone != Verdict::Met && repeats < repeats_max) {
    trial_window.reset();  // it paid for a backlog that another setting left
    return repeat_trial("it began with " + std::to_string(window.waiting_begin) + " requests waiting from before");
  }
  search->tell(current, evidence);
  const Evidence total = search->evidence(current);
  const Evidence known = search->evidence(incumbent);
  const Verdict verdict = judge(total, options.objectives);
  const Comparison comparison = compare(total, known);
  if (verdict == Verdict::Met) {
    record_trial("Incumbent");
    adopt(current, total);
    if (total.windows > 1) return finish(window.end, describe(incumbent) + " met the objectives twice (" + describe(total) + ")");
    stage = Stage::Confirming;
    return {.phase = Phase::Searching,
            .apply = {},
            .trial = false,
            .reason = "TrialAdopted",
            .message = describe(incumbent) + " met the objectives (" + describe(total) + "); confirming with one more window."};
  }
  if (comparison == Comparison::Worse) return roll_back(total, known);
  if (verdict == Verdict::Unclear) {
    if (repeats < 1) return repeat_trial(describe(total) + " is too close to the target to tell");
    if (comparison == Comparison::Better || total.attainment() > known.attainment()) {
      record_trial("Incumbent");
      adopt(current, total);
      return finish(window.end, describe(incumbent) + " is at the target within noise (" + describe(total) + ")");
    }
  }
  std::string lead = describe(current) + " showed " + describe(total) + " against " + describe(known);
  if (comparison == Comparison::Better) {
    record_trial("Incumbent");
    adopt(current, total);
    lead += " and was adopted";
  } else {
    record_trial("Inconclusive");
  }
  return next_trial(window.end, lead);
}

Decision Tuner::State::roll_back(const Evidence& trial, const Evidence& known) {
  const std::string lead = describe(current) + " is worse beyond noise (" + describe(trial) + " against " + describe(known) + ")";
  const bool protect = judge(known, options.objectives) != Verdict::Missed || known.attainment() >= nothing_to_protect;
  if (!protect && !leaves_backlog(*trial_window)) {
    record_trial("Worse");
    return next_trial(trial_window->end, lead);
  }
  record_trial("RolledBack");
  ++counts.rollbacks_total;
  ++search_rollbacks;
  stage = Stage::Recovering;
  repeats = 0;
  return {.phase = Phase::Searching,
          .apply = incumbent,
          .trial = false,
          .reason = "RolledBack",
          .message = lead + "; back to " + describe(incumbent) + "."};
}

/// The load moved under a trial: nothing can be compared. The incumbent is measured anew, and the search goes on from there.
Decision Tuner::State::leave_for_shift(const Shift& shift) {
  record_trial("Inconclusive");
  stage = Stage::Recovering;
  repeats = 0;
  load_may_have_moved = true;
  ++load_moves;
  return {.phase = Phase::Searching,
          .apply = incumbent,
          .trial = false,
          .reason = "ShiftDetected",
          .message = "The " + shift.text() + " during a trial; measuring " + describe(incumbent) + " anew."};
}

Decision Tuner::State::on_recovery(const Window& window, const Evidence& evidence) {
  const Verdict verdict = judge(evidence, options.objectives);
  if (evidence.draining && verdict != Verdict::Met && repeats < repeats_max) {
    ++repeats;
    return {.phase = Phase::Searching,
            .apply = {},
            .trial = false,
            .reason = "Recovering",
            .message = "Waiting for " + std::to_string(window.waiting_end) + " requests that are left from a trial."};
  }
  if (load_may_have_moved && load_distance(load_of(window), search_load) > same_load) {
    search_load = load_of(window);
    search->load_moved(search_load);
    watched.clear();
    searches_since_shift = 0;
  }
  load_may_have_moved = false;
  search->tell(incumbent, evidence);
  note_watched(evidence);
  const std::string lead = describe(incumbent) + " showed " + describe(evidence);
  if (verdict == Verdict::Met && judge(search->evidence(incumbent), options.objectives) != Verdict::Missed) {
    return finish(window.end, lead);
  }
  if (search_rollbacks >= rollbacks_per_search_max) {
    return finish(window.end, lead + "; " + std::to_string(search_rollbacks) + " trials had to be rolled back");
  }
  return next_trial(window.end, lead);
}

Decision Tuner::State::on_confirmation(const Window& window, const Evidence& evidence, const std::optional<Shift>& shift) {
  if (shift && load_moves < load_moves_max) {
    ++load_moves;
    search_load = load_of(window);
    search->load_moved(search_load);
    watched.clear();
  }
  search->tell(incumbent, evidence);
  note_watched(evidence);
  const Evidence total = search->evidence(incumbent);
  const bool holds =
      judge(evidence, options.objectives) != Verdict::Missed && judge(total, options.objectives) != Verdict::Missed;
  if (holds) return finish(window.end, describe(incumbent) + " was confirmed (" + describe(total) + ")");
  return next_trial(window.end, describe(incumbent) + " was not confirmed (" + describe(evidence) + ")");
}

void Tuner::State::adopt(const KnobValues& knobs, const Evidence& evidence) {
  incumbent = knobs;
  watched.clear();
  note_watched(evidence);
  detector.settings_changed();
}

Decision Tuner::State::finish(TimePoint now, const std::string& lead) {
  const KnobValues best = stage == Stage::Confirming ? incumbent : search->best(incumbent);
  if (best != incumbent) adopt(best, search->evidence(best));
  const Evidence known = search->evidence(incumbent);
  const std::int32_t trials = search->trials();
  const bool restore = current != incumbent;
  end_search();
  const std::int32_t doublings = std::min(searches_since_shift, dwell_doublings_max);
  dwell_until = now + options.tuning.dwell * (1 << doublings);
  ++searches_since_shift;

  Decision decision{
      .phase = Phase::Holding,
      .apply = {},
      .trial = false,
      .reason = "SearchConverged",
      .message = lead + "; the search ends after " + std::to_string(trials) + " trials with " + describe(incumbent) + "."};
  if (restore) decision.apply = incumbent;
  if (judge(known, options.objectives) == Verdict::Missed) {
    infeasible = true;
    infeasible_reason = known.saturated ? "Overloaded" : "NoSettingFeasible";
    infeasible_message = (known.saturated ? "More arrives than any setting can serve: " : "No setting meets the objectives: ") +
                         missed_target(known, options.objectives) + " stands in the way after " + std::to_string(trials) +
                         " trials; the nearest is " + describe(incumbent) + " (" + describe(known) + ").";
    decision.phase = Phase::Infeasible;
    decision.reason = infeasible_reason;
    decision.message = infeasible_message;
  }
  return decision;
}

void Tuner::State::record_trial(const char* outcome) {
  Trial trial{.number = ++trial_number, .knobs = current, .window = *trial_window, .outcome = outcome};
  ++counts.trials_total;
  recent.push_front(trial);
  if (recent.size() > recent_trials_max) recent.pop_back();
  const Evidence evidence = evidence_of(trial.window, options.objectives);
  if (evidence.judged >= options.tuning.min_requests) {
    remember({.knobs = current, .load = load_of(trial.window), .evidence = evidence});
  }
  if (!journal) return;
  const JournalTrial row{
      .trial = trial, .model_key = options.model_key, .objectives = options.objectives, .bounds = options.space.knobs};
  if (!journal->record(row)) ++counts.journal_errors_total;
}

void Tuner::State::end_search() {
  search.reset();
  trial_window.reset();
  stage = Stage::Watching;
  repeats = 0;
  load_may_have_moved = false;
}

}  // namespace rubato::tuner
