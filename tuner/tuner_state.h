// SPDX-License-Identifier: Apache-2.0
// The tuner's state and its transitions; private to tuner.cpp (edges: refusing, thin windows, reconfiguring, records) and
// tuner_watch.cpp (holding: when a search starts), tuner_search.cpp (the search: trials, rollback, convergence), tuner_twin.cpp
// (what the twin and regimes are asked).
#pragma once

#include <deque>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "tuner/evidence.h"
#include "tuner/load_watch.h"
#include "tuner/regimes.h"
#include "tuner/risk_ledger.h"
#include "tuner/search.h"
#include "tuner/search_space.h"
#include "tuner/shift_detector.h"
#include "tuner/tuner.h"
#include "tuner/twin/twin.h"

namespace rubato::tuner {

inline constexpr std::int32_t trials_per_search_max = 16;
inline constexpr std::int32_t trials_with_twin_max =
    4;                                               // what it expects most of comes first; what is left is seldom worth a window
inline constexpr std::int32_t thin_windows_max = 4;  // pooled before they count as no data
inline constexpr std::size_t watched_max = 4;        // windows of the incumbent that are judged together
inline constexpr std::size_t recent_trials_max = 64;
inline constexpr std::size_t history_max = 512;
inline constexpr std::int32_t repeats_max = 6;               // of one trial or recovery, while a backlog shrinks
inline constexpr std::int32_t rollbacks_per_search_max = 4;  // then the search does more harm than good
inline constexpr std::int32_t rollbacks_with_twin_max = 2;
inline constexpr std::int32_t load_moves_max = 2;  // followed within one search
inline constexpr double nothing_to_protect = 0.5;  // below this attainment a bad trial costs little more than the incumbent does
inline constexpr std::int32_t dwell_doublings_max = 4;  // searches under an unchanged load come ever less often

/// What the windows that come in are of.
enum class Stage : std::uint8_t {
  Watching,    // the incumbent, no search
  Trying,      // a trial
  Confirming,  // a trial that met the objectives and became the incumbent
  Recovering,  // the incumbent within a search: after a rollback or a shift
};

/// What the twin expects of settings, for the record.
struct KnownOutcome {
  KnobValues knobs;
  ExpectedOutcome outcome;
};

struct Tuner::State {
  State(const TunerOptions& wanted, Journal* remembered, Twin* simulator, const LoadWatch* load_watch);

  TunerOptions options;
  LegalSettings legal;
  Journal* journal = nullptr;
  Twin* twin = nullptr;
  const LoadWatch* watch_over_load = nullptr;

  Phase phase = Phase::Holding;
  Stage stage = Stage::Watching;
  KnobValues incumbent;
  KnobValues current;  // what the next window runs under

  std::deque<Evidence> watched;  // of the incumbent under the present load, newest last
  ShiftDetector detector;
  bool waited_for_shift = false;  // one window after a shift is spent on measuring the incumbent anew
  bool infeasible = false;        // the last search found nothing that meets the objectives under this load
  std::string infeasible_reason;
  std::string infeasible_message;
  TimePoint dwell_until = TimePoint::min();
  std::int32_t searches_since_shift = 0;
  std::int32_t met_windows = 0;  // in a row

  std::optional<Window> thin;  // too few requests so far to be judged
  std::int32_t thin_windows = 0;
  std::optional<TimePoint> no_data_since;
  std::optional<TimePoint> last_begin;
  std::optional<TimePoint> last_end;

  std::optional<Search> search;
  std::optional<Window> trial_window;  // all windows of the running trial
  std::int32_t repeats = 0;
  std::int32_t load_moves = 0;
  std::int32_t search_rollbacks = 0;
  bool load_may_have_moved = false;
  LoadFeatures search_load;

  std::optional<LoadAlarm> pending_alarm;           // not answered yet
  std::optional<Evidence> settled_evidence;         // of the incumbent when the last search under this load ended
  std::optional<Evidence> incumbent_forecast;       // what the twin expects of it, while it has not been measured under this load
  Duration studied_span{};                          // of traffic that the last study rested on
  TimePoint mixture_until = TimePoint::min();       // no other setting is chosen for alternating loads before
  std::optional<ExpectedOutcome> trial_expected{};  // of the running trial
  std::string trial_source;
  std::vector<KnownOutcome> outcomes;  // of all that the running search's study looked at
  RegimeMemory regime_memory;
  KnobValues saved_best;
  RiskLedger risk;
  double rate = 0;                    // arrivals per second of the last window
  std::int32_t learning_windows = 0;  // waited for the twin to learn
  bool frozen = false;
  std::string frozen_why;

  std::vector<PastTrial> history;
  std::deque<Trial> recent;  // newest first
  std::int64_t trial_number = 0;
  TunerStatus counts;  // only its totals, reason and message are kept up here

  // tuner.cpp
  Decision on_window(const Window& window);
  Decision on_thin_window(const Window& window);
  Decision reconfigure(const TunerOptions& wanted, TimePoint now);
  void load_history();
  Decision conclude(Decision decision, TimePoint now);
  void remember(const PastTrial& one);
  [[nodiscard]] std::int64_t wall_milliseconds(TimePoint now) const;  // since 1970
  void load_regimes();
  void note_risk(const Window& window, const Evidence& evidence);
  Decision freeze(const std::string& why, TimePoint now);
  Decision give_up(const std::exception& failure);

  // tuner_search.cpp
  Decision watch(const Window& window, const Evidence& evidence, const std::optional<Shift>& shift);
  Decision on_trial(const Window& window, const Evidence& evidence, const std::optional<Shift>& shift);
  Decision on_confirmation(const Window& window, const Evidence& evidence, const std::optional<Shift>& shift);
  Decision on_recovery(const Window& window, const Evidence& evidence);
  Decision start_search(const Window& window, const std::string& why);
  Decision next_trial(TimePoint now, const std::string& lead);
  Decision repeat_trial(const std::string& why);
  Decision roll_back(const Evidence& trial, const Evidence& known);
  Decision leave_for_shift(const Shift& shift);
  void follow_load(const Window& window);
  void expect_anew(TimePoint now);
  Decision finish(TimePoint now, const std::string& lead);
  void adopt(const KnobValues& knobs, const Evidence& evidence);
  void record_trial(const char* outcome);
  void end_search();
  std::optional<Decision> on_progress(const Window& so_far);
  void begin_trial();
  /// What the running search knows of the incumbent: measured, else forecast.
  [[nodiscard]] Evidence known_of_incumbent() const;
  [[nodiscard]] Evidence watched_evidence() const;
  void note_watched(const Evidence& evidence);

  // tuner_twin.cpp
  struct TwinAnswer {
    KnobValues best;
    ExpectedOutcome expected;
    ExpectedOutcome incumbent;
    Evidence incumbent_evidence;
    std::int32_t candidates = 0;
    std::vector<Expected> all;
    std::vector<KnownOutcome> outcomes;     // of the same
    std::optional<ExpectedOutcome> hint{};  // of the first hint
  };
  [[nodiscard]] bool twin_answers() const;
  /// Mean length of phases that alternate too fast to be followed one by one; empty where loads last.
  [[nodiscard]] std::optional<Duration> alternation() const;
  [[nodiscard]] std::vector<TrafficPhase> expected_phases(TimePoint now) const;
  [[nodiscard]] bool twin_knows_more(TimePoint now) const;
  [[nodiscard]] std::optional<TwinAnswer> ask_twin(TimePoint now, std::span<const KnobValues> hints);
  void begin_search(const LoadFeatures& load, const std::optional<TwinAnswer>& answer);
  [[nodiscard]] std::optional<ExpectedOutcome> outcome_expected_of(const KnobValues& knobs) const;
  [[nodiscard]] std::optional<RegimeLoad> load_since(TimePoint since, TimePoint now) const;
  [[nodiscard]] std::optional<KnobValues> known_regime(TimePoint since, TimePoint now) const;
  void note_regime(const Window& window, const Evidence& evidence);
  void keep_regimes();
  [[nodiscard]] bool risk_allows(TimePoint now, double arrival_rate, double attainment) const;
  std::optional<Decision> on_alarm(const LoadAlarm& alarm, const Window& so_far);
  std::optional<Decision> answer_alarm(const Window& so_far);
  Decision retune(const Window& so_far, const KnobValues& knobs, Source source, const std::string& lead,
                  const std::optional<TwinAnswer>& answer);
  std::optional<Decision> follow_mixture(const Window& so_far);
};

/// As records have it: Twin, Regime, Remembered, Opening, Process, Random.
[[nodiscard]] const char* name_of(Source source);

}  // namespace rubato::tuner
