// SPDX-License-Identifier: Apache-2.0
// The tuner's state and its transitions; private to tuner.cpp (edges: refusing, thin windows, reconfiguring, records) and
// tuner_search.cpp (the search: trials, rollback, convergence).
#pragma once

#include <deque>
#include <optional>
#include <string>
#include <vector>

#include "tuner/evidence.h"
#include "tuner/search.h"
#include "tuner/search_space.h"
#include "tuner/shift_detector.h"
#include "tuner/tuner.h"

namespace rubato::tuner {

inline constexpr std::int32_t trials_per_search_max = 16;
inline constexpr std::int32_t thin_windows_max = 4;  // pooled before they count as no data
inline constexpr std::size_t watched_max = 4;        // windows of the incumbent that are judged together
inline constexpr std::size_t recent_trials_max = 64;
inline constexpr std::size_t history_max = 512;
inline constexpr std::int32_t repeats_max = 6;               // of one trial or recovery, while a backlog shrinks
inline constexpr std::int32_t rollbacks_per_search_max = 4;  // then the search does more harm than good
inline constexpr std::int32_t load_moves_max = 2;            // followed within one search
inline constexpr std::int32_t dwell_doublings_max = 4;       // searches under an unchanged load come ever less often

/// What the windows that come in are of.
enum class Stage : std::uint8_t {
  Watching,    // the incumbent, no search
  Trying,      // a trial
  Confirming,  // a trial that met the objectives and became the incumbent
  Recovering,  // the incumbent within a search: after a rollback or a shift
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

  std::optional<Search> search;
  std::optional<Window> trial_window;  // all windows of the running trial
  std::int32_t repeats = 0;
  std::int32_t load_moves = 0;
  std::int32_t search_rollbacks = 0;
  bool load_may_have_moved = false;
  LoadFeatures search_load;

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
  Decision finish(TimePoint now, const std::string& lead);
  void adopt(const KnobValues& knobs, const Evidence& evidence);
  void record_trial(const char* outcome);
  void end_search();
  [[nodiscard]] Evidence watched_evidence() const;
  void note_watched(const Evidence& evidence);
};

}  // namespace rubato::tuner
