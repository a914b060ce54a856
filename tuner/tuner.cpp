// SPDX-License-Identifier: Apache-2.0
#include "tuner/tuner.h"

#include <algorithm>
#include <exception>

#include "tuner/describe.h"
#include "tuner/guard.h"
#include "tuner/journal.h"
#include "tuner/tuner_state.h"

namespace rubato::tuner {

namespace {

constexpr std::int64_t journal_rows_read_max = 400;

/// Whether the same settings may be tried; the base only says where to start.
bool same_space(const SearchSpace& a, const SearchSpace& b) {
  return a.knobs == b.knobs && a.max_num_batched_tokens_free == b.max_num_batched_tokens_free &&
         a.max_num_seqs_free == b.max_num_seqs_free && a.priority_policy_free == b.priority_policy_free &&
         a.deadline_margin_free == b.deadline_margin_free && a.mode_free == b.mode_free &&
         a.prefill_share_free == b.prefill_share_free && a.prefill_devices_free == b.prefill_devices_free;
}

/// A knob that is pinned now, was until now, or whose start a person has moved is what the layers say it is, not what the tuner
/// last held it to be: a removed pin falls back, it does not linger as the tuner's own wish.
void adopt_from_layers(const SearchSpace& before, const SearchSpace& now, KnobValues& values) {
  const auto adopt = [&](auto value, auto free, auto bounds) {
    const bool moved = (before.knobs.*bounds).initial != (now.knobs.*bounds).initial;
    if (!(before.*free) || !(now.*free) || moved) values.*value = now.base.*value;
  };
  adopt(&KnobValues::max_num_batched_tokens, &SearchSpace::max_num_batched_tokens_free, &KnobsSpec::max_num_batched_tokens);
  adopt(&KnobValues::max_num_seqs, &SearchSpace::max_num_seqs_free, &KnobsSpec::max_num_seqs);
  adopt(&KnobValues::priority_policy, &SearchSpace::priority_policy_free, &KnobsSpec::priority_policy);
  adopt(&KnobValues::deadline_margin, &SearchSpace::deadline_margin_free, &KnobsSpec::deadline_margin);
  adopt(&KnobValues::mode, &SearchSpace::mode_free, &KnobsSpec::mode);
  adopt(&KnobValues::prefill_share, &SearchSpace::prefill_share_free, &KnobsSpec::prefill_share);
  adopt(&KnobValues::prefill_devices, &SearchSpace::prefill_devices_free, &KnobsSpec::prefill_devices);
  values.reservation = now.base.reservation;
}

}  // namespace

Tuner::State::State(const TunerOptions& wanted, Journal* remembered, Twin* simulator, const LoadWatch* load_watch)
    : options(wanted), legal(wanted.space), journal(remembered), twin(simulator), watch_over_load(load_watch) {
  const bool enabled = options.tuning.enabled && legal.any_free();
  phase = enabled ? Phase::Holding : Phase::Disabled;
  incumbent = enabled ? legal.clamp(options.space.base) : options.space.base;
  current = incumbent;
  if (journal) trial_number = journal->last_trial_number();
  load_history();
  load_regimes();
}

void Tuner::State::load_regimes() {
  if (!journal) return;
  auto rows = journal->regimes(options.model_key);
  if (rows) {
    regime_memory.load(std::move(*rows));
  } else {
    ++counts.journal_errors_total;
  }
}

void Tuner::State::note_risk(const Window& window, const Evidence& evidence) {
  const bool trial = stage == Stage::Trying && search;
  risk.add(window.end, evidence.judged, trial ? evidence.judged * known_of_incumbent().attainment() : 0.0);
}

/// Earlier trials of this model under these objectives. Nothing of them is applied: they inform the search, and what met the
/// objectives under a similar load is tried first when these are missed.
void Tuner::State::load_history() {
  history.clear();
  if (!journal) return;
  const auto rows = journal->trials(options.model_key, options.objectives, journal_rows_read_max);
  if (!rows) {
    ++counts.journal_errors_total;
    return;
  }
  for (const JournalTrial& row : *rows) {
    const Evidence evidence = evidence_of(row.trial.window, options.objectives);
    if (evidence.judged < options.tuning.min_requests) continue;
    remember({.knobs = row.trial.knobs, .load = load_of(row.trial.window), .evidence = evidence});
  }
}

std::int64_t Tuner::State::wall_milliseconds(TimePoint now) const {
  return std::chrono::duration_cast<std::chrono::milliseconds>(now.time_since_epoch() + options.wall_at_zero).count();
}

void Tuner::State::remember(const PastTrial& one) {
  history.push_back(one);
  if (history.size() > history_max) history.erase(history.begin());
}

/// Every way out passes here: the status follows, and what is news goes into the journal.
Decision Tuner::State::conclude(Decision decision, TimePoint now) {
  phase = decision.phase;
  if (decision.apply) {
    // A new current setting begins a new measurement.
    if (*decision.apply != current || decision.trial) {
      thin.reset();
      thin_windows = 0;
    }
    current = *decision.apply;
  }
  const bool news = decision.apply || decision.reason != counts.reason;
  counts.reason = decision.reason;
  counts.message = decision.message;
  if (journal && news && !journal->record(JournalDecision{wall_milliseconds(now), decision})) ++counts.journal_errors_total;
  return decision;
}

Decision Tuner::State::on_window(const Window& window) {
  std::string wrong = contradiction(window);
  if (wrong.empty() && last_begin && window.begin < *last_begin) wrong = "it begins before the window that came before it";
  if (!wrong.empty()) {
    ++counts.windows_refused_total;
    return {.phase = phase,
            .apply = {},
            .trial = false,
            .reason = "WindowRefused",
            .message = "A window was refused because " + wrong + "."};
  }
  last_begin = window.begin;
  last_end = window.end;

  if (frozen) {
    return {.phase = phase,
            .apply = {},
            .trial = false,
            .reason = "Frozen",
            .message = "Nothing is tried or concluded: " + frozen_why + "."};
  }
  rate = window.arrival_rate();
  const Window whole = thin ? merged(*thin, window) : window;
  const Evidence evidence = evidence_of(whole, options.objectives);
  // Behind a backlog that other settings left the twin, which knows these alone, has nothing to be checked by.
  if (twin && !evidence.draining) twin->check(window, current);
  if (phase == Phase::Disabled) {
    return {.phase = Phase::Disabled,
            .apply = {},
            .trial = false,
            .reason = "TuningDisabled",
            .message = "Tuning is disabled or every knob is pinned."};
  }
  note_risk(window, evidence_of(window, options.objectives));
  if (evidence.judged < std::max(1, options.tuning.min_requests)) {
    thin = whole;
    ++thin_windows;
    return conclude(on_thin_window(window), window.end);
  }
  thin.reset();
  thin_windows = 0;
  no_data_since.reset();
  const std::optional<Shift> shift =
      detector.observe(whole, evidence, stage == Stage::Trying ? SameSettings::No : SameSettings::Yes);
  const std::int64_t trials_before = counts.trials_total;
  const std::int64_t number = trial_number;
  Decision decision;
  switch (stage) {
    case Stage::Watching:
      decision = watch(whole, evidence, shift);
      break;
    case Stage::Trying:
      decision = on_trial(whole, evidence, shift);
      break;
    case Stage::Confirming:
      decision = on_confirmation(whole, evidence, shift);
      break;
    case Stage::Recovering:
      decision = on_recovery(whole, evidence);
      break;
  }
  if (!decision.seen) decision.seen = whole;
  // The start of the next trial names that one; the record of this one has its own row.
  if (decision.trial_number == 0 && counts.trials_total > trials_before) decision.trial_number = number;
  return conclude(decision, window.end);
}

/// Idle, or nearly: nothing is concluded from it. A setting that was only on trial gives way to the proven one; the incumbent
/// stays, since it served the last real load.
Decision Tuner::State::on_thin_window(const Window& window) {
  if (!no_data_since) no_data_since = window.begin;
  const std::int32_t seen = evidence_of(*thin, options.objectives).judged;
  const std::string numbers = std::to_string(seen) + " of " + std::to_string(options.tuning.min_requests) + " requests";
  const bool gave_up = window.arrivals == 0 || thin_windows >= thin_windows_max;
  if (thin_windows >= thin_windows_max) {  // what is older says nothing about now
    thin.reset();
    thin_windows = 0;
  }
  if (stage == Stage::Watching) {
    return {.phase = Phase::NoData,
            .apply = {},
            .trial = false,
            .reason = "TooFewRequests",
            .message = "Too few requests to judge (" + numbers + "); holding " + describe(incumbent) + "."};
  }
  if (!gave_up) {
    return {.phase = Phase::Searching,
            .apply = {},
            .trial = false,
            .reason = "CollectingRequests",
            .message = "Collecting requests for " + describe(current) + " (" + numbers + ")."};
  }
  if (stage == Stage::Trying) {
    if (!trial_window) trial_window = window;
    record_trial("Inconclusive");
  }
  const bool restore = current != incumbent;
  end_search();
  Decision decision{
      .phase = Phase::NoData,
      .apply = {},
      .trial = false,
      .reason = "SearchAbandoned",
      .message = "Requests stopped (" + numbers + "); the search is abandoned, holding " + describe(incumbent) + "."};
  if (restore) decision.apply = incumbent;
  return decision;
}

Decision Tuner::State::freeze(const std::string& why, TimePoint now) {
  const bool restore = current != incumbent;
  if (search && stage == Stage::Trying && trial_window) record_trial("Inconclusive");
  end_search();
  pending_alarm.reset();
  frozen = true;
  frozen_why = why;
  Decision decision{.phase = phase == Phase::Disabled ? Phase::Disabled : Phase::Holding,
                    .apply = {},
                    .trial = false,
                    .reason = "Frozen",
                    .message = "Nothing is tried or concluded: " + why + "; holding " + describe(incumbent) + "."};
  if (restore) decision.apply = incumbent;
  return conclude(decision, now);
}

Decision Tuner::State::reconfigure(const TunerOptions& wanted, TimePoint now) {
  const bool objectives_changed = !(options.objectives == wanted.objectives);
  const bool model_changed = options.model_key != wanted.model_key;
  const bool was_disabled = phase == Phase::Disabled;
  const bool space_changed = !same_space(options.space, wanted.space);
  const KnobValues before = incumbent;
  adopt_from_layers(options.space, wanted.space, incumbent);
  current = wanted.space.base;
  options = wanted;
  legal = LegalSettings(options.space);
  thin.reset();
  thin_windows = 0;
  if (objectives_changed || model_changed || was_disabled) {
    end_search();
    watched.clear();
    detector.settings_changed();
    infeasible = false;
    searches_since_shift = 0;
    dwell_until = TimePoint::min();
    settled_evidence.reset();
    pending_alarm.reset();
    load_history();
    if (model_changed) load_regimes();
  }
  if (twin) twin->set_objectives(options.objectives);
  if (!options.tuning.enabled || !legal.any_free()) {
    end_search();
    incumbent = options.space.base;
    Decision decision{.phase = Phase::Disabled,
                      .apply = {},
                      .trial = false,
                      .reason = "TuningDisabled",
                      .message = "Tuning is disabled or every knob is pinned; using " + describe(incumbent) + "."};
    return conclude(decision, now);
  }

  incumbent = legal.clamp(incumbent);
  if (incumbent != before) {
    watched.clear();
    detector.settings_changed();
  }
  if (space_changed) {  // what was not there to find may be there now
    infeasible = false;
    settled_evidence.reset();
    mixture_until = TimePoint::min();
  }
  KnobValues next = incumbent;
  if (search) {
    search->restrict_to(legal);
    const bool trial_goes_on = stage == Stage::Trying && legal.contains(current) && incumbent == before;
    if (trial_goes_on) {
      next = current;
    } else if (stage != Stage::Confirming || incumbent != before) {
      stage = Stage::Recovering;  // the incumbent that the search compares with is another one, or the trial is no longer legal
      repeats = 0;
      trial_window.reset();
    }
  }
  Decision decision{.phase = search       ? Phase::Searching
                             : infeasible ? Phase::Infeasible
                                          : Phase::Holding,
                    .apply = {},
                    .trial = search && stage == Stage::Trying,
                    .reason = "Reconfigured",
                    .message = "The configuration changed; using " + describe(next) + "."};
  if (next != current) decision.apply = next;
  return conclude(decision, now);
}

/// Eigen, NLopt and the allocator may throw; a search that cannot be computed ends, serving goes on with the proven setting.
Decision Tuner::State::give_up(const std::exception& failure) {
  const bool restore = current != incumbent;
  end_search();
  pending_alarm.reset();
  phase = Phase::Holding;
  counts.reason = "SearchFailed";
  counts.message = std::string("The search could not be computed (") + failure.what() + "); holding the incumbent.";
  if (restore) current = incumbent;
  return {.phase = Phase::Holding,
          .apply = restore ? std::optional(incumbent) : std::nullopt,
          .trial = false,
          .reason = counts.reason,
          .message = counts.message};
}

Tuner::Tuner(const TunerOptions& options, Journal* journal, Twin* twin, const LoadWatch* watch)
    : state_(std::make_unique<State>(options, journal, twin, watch)) {}
Tuner::~Tuner() = default;

Decision Tuner::on_window(const Window& window) {
  try {
    return state_->on_window(window);
  } catch (const std::exception& failure) {
    return state_->give_up(failure);
  }
}

std::optional<Decision> Tuner::on_alarm(const LoadAlarm& alarm, const Window& so_far) {
  try {
    return state_->on_alarm(alarm, so_far);
  } catch (const std::exception& failure) {
    return state_->give_up(failure);
  }
}

std::optional<Decision> Tuner::on_progress(const Window& so_far) {
  try {
    return state_->on_progress(so_far);
  } catch (const std::exception& failure) {
    return state_->give_up(failure);
  }
}

Decision Tuner::freeze(const std::string& why, TimePoint now) {
  return state_->freeze(why, now);
}

void Tuner::thaw() {
  state_->frozen = false;
  state_->frozen_why.clear();
}

std::vector<Regime> Tuner::regimes() const {
  const auto all = state_->regime_memory.regimes();
  return {all.begin(), all.end()};
}

Decision Tuner::reconfigure(const TunerOptions& options, TimePoint now) {
  return state_->reconfigure(options, now);
}

TunerStatus Tuner::status() const {
  TunerStatus status = state_->counts;
  status.phase = state_->phase;
  status.incumbent = state_->incumbent;
  status.no_data_since = state_->no_data_since;
  status.risk_used = state_->last_end ? state_->risk.used(*state_->last_end, state_->rate) : 0.0;
  return status;
}

std::vector<Trial> Tuner::recent_trials() const {
  return {state_->recent.begin(), state_->recent.end()};
}

}  // namespace rubato::tuner
