// SPDX-License-Identifier: Apache-2.0
// The tuner's way through a search: what follows from a trial's window, and how it ends.
#include <algorithm>

#include "tuner/describe.h"
#include "tuner/guard.h"
#include "tuner/journal.h"
#include "tuner/sequential_test.h"
#include "tuner/tuner_state.h"

namespace rubato::tuner {

namespace {

constexpr double same_load = 0.5;  // octaves: nearer is the same load, whatever the detector said under a trial
constexpr double backlog_share = 0.2;

const char* reason_for(Source source) {
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

const char* name_of(Source source) {
  switch (source) {
    case Source::Regime:
      return "Regime";
    case Source::Twin:
      return "Twin";
    case Source::Remembered:
      return "Remembered";
    case Source::Opening:
      return "Opening";
    case Source::Improvement:
      return "Process";
    case Source::Random:
      return "Random";
  }
  return "";
}

Evidence Tuner::State::known_of_incumbent() const {
  const Evidence measured = search->evidence(incumbent);
  return measured.windows == 0 && incumbent_forecast ? *incumbent_forecast : measured;
}

/// A trial's number stands from its start, so that every record of it can name it.
void Tuner::State::begin_trial() {
  ++trial_number;
  stage = Stage::Trying;
  trial_window.reset();
  repeats = 0;
}

Decision Tuner::State::start_search(const Window& window, const std::string& why) {
  const std::optional<TwinAnswer> answer = ask_twin(window.end, {});
  begin_search(load_of(window), answer);
  const Evidence known = watched_evidence();
  search->tell(incumbent, known);
  incumbent_forecast.reset();
  remember({.knobs = incumbent, .load = search_load, .evidence = known});
  Decision decision = next_trial(window.end, why);
  decision.seen = window;
  if (answer) decision.expected_incumbent = answer->incumbent;
  return decision;
}

Decision Tuner::State::next_trial(TimePoint now, const std::string& lead) {
  if (!risk_allows(now, rate, known_of_incumbent().attainment())) {
    Decision decision = finish(now, lead);
    infeasible = false;  // nobody knows that
    settled_evidence.reset();
    decision.phase = Phase::Holding;
    decision.reason = "RiskBudgetSpent";
    decision.message = lead + "; trials have put as many of the last hour's requests at risk as riskBudget allows (" +
                       decimal(100 * risk.used(now, rate)) + " of " + std::to_string(options.tuning.risk_budget) +
                       " %); holding " + describe(incumbent) + ".";
    return decision;
  }
  if (twin_knows_more(now)) expect_anew(now);
  const Answer answer = search->ask(incumbent);
  if (!answer.proposal) {
    const char* why = answer.end == SearchEnd::TrialsSpent ? "the trials are spent"
                      : answer.end == SearchEnd::Exhausted ? "every setting has been tried"
                                                           : "no setting promises more";
    return finish(now, lead + "; " + why);
  }
  begin_trial();
  const Proposal& proposal = *answer.proposal;
  trial_source = name_of(proposal.source);
  trial_expected = outcome_expected_of(proposal.knobs);
  return {.phase = Phase::Searching,
          .apply = proposal.knobs,
          .trial = true,
          .reason = "TrialStarted",
          .message = lead + "; trying " + describe(proposal.knobs) + " (trial " + std::to_string(search->trials()) +
                     " of at most " + std::to_string(trials_per_search_max) + "), because " + reason_for(proposal.source) + ".",
          .trial_number = trial_number,
          .source = trial_source,
          .expected = trial_expected};
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
  const Evidence known = known_of_incumbent();
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
          .message = lead + "; back to " + describe(incumbent) + ".",
          .trial_number = trial_number};
}

/// Between windows: an alarm that could not be answered before, and a trial that already shows to be worse.
std::optional<Decision> Tuner::State::on_progress(const Window& so_far) {
  if (phase == Phase::Disabled || frozen || !contradiction(so_far).empty()) return std::nullopt;
  if (auto answer = answer_alarm(so_far)) return answer;
  if (stage != Stage::Trying || !search) return std::nullopt;
  const Evidence evidence = evidence_of(so_far, options.objectives);
  const Evidence known = known_of_incumbent();
  if (evidence.draining || known.windows == 0) return std::nullopt;
  if (!already_worse(evidence.judged - evidence.good, evidence.judged, 1 - known.attainment())) return std::nullopt;
  trial_window = trial_window ? merged(*trial_window, so_far) : so_far;
  note_risk(so_far, evidence);
  search->tell(current, evidence);
  const std::int64_t before = counts.rollbacks_total;
  Decision decision = roll_back(search->evidence(current), known);
  counts.early_rollbacks_total += counts.rollbacks_total - before;
  return conclude(decision, so_far.end);
}

/// What was expected under the old load says nothing of the new one.
void Tuner::State::follow_load(const Window& window) {
  search_load = load_of(window);
  search->load_moved(search_load);
  expect_anew(window.end);
}

void Tuner::State::expect_anew(TimePoint now) {
  const std::optional<TwinAnswer> answer = ask_twin(now, {});
  outcomes = answer ? answer->outcomes : std::vector<KnownOutcome>{};
  if (answer) search->expect(answer->all);
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
    follow_load(window);
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
  if (search_rollbacks >= (outcomes.empty() ? rollbacks_per_search_max : rollbacks_with_twin_max)) {
    return finish(window.end, lead + "; " + std::to_string(search_rollbacks) + " trials had to be rolled back");
  }
  return next_trial(window.end, lead);
}

Decision Tuner::State::on_confirmation(const Window& window, const Evidence& evidence, const std::optional<Shift>& shift) {
  if (shift && load_moves < load_moves_max) {
    ++load_moves;
    follow_load(window);
    watched.clear();
  }
  search->tell(incumbent, evidence);
  note_watched(evidence);
  const Evidence total = search->evidence(incumbent);
  const bool holds =
      judge(evidence, options.objectives) != Verdict::Missed && judge(total, options.objectives) != Verdict::Missed;
  if (holds && !shift) note_regime(window, evidence);
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
  if (known.windows > 0) settled_evidence = known;
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
  const Trial trial{.number = trial_number,
                    .knobs = current,
                    .window = *trial_window,
                    .outcome = outcome,
                    .source = trial_source,
                    .expected = trial_expected,
                    .ended = wall_milliseconds(trial_window->end) / 1000};
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
  incumbent_forecast.reset();
  outcomes.clear();
  trial_expected.reset();
  trial_source.clear();
  incumbent_forecast.reset();
  trial_expected.reset();
  trial_source.clear();
}

}  // namespace rubato::tuner
