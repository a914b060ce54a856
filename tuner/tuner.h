// SPDX-License-Identifier: Apache-2.0
// The tuner as a pure state machine: it is told what each window measured and answers which knob values to make current next. It
// knows no engine, clock or socket; the daemon's tuning loop calls it on real time, the simulation tests on virtual time. Same
// inputs and seed, same decisions.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "manifests/engine_spec.h"
#include "manifests/result.h"
#include "manifests/settings.h"
#include "policies/time.h"

namespace rubato::tuner {

class Journal;
class LoadWatch;
class Twin;
struct LoadAlarm;
struct Regime;

/// What one window of live traffic measured, over exact samples. All of it under one settings number.
struct Window {
  TimePoint begin;
  TimePoint end;
  std::uint64_t settings_number = 0;
  std::int32_t arrivals = 0;        // requests that arrived in the window
  std::int32_t judged = 0;          // requests with a verdict: finished, or unfinished but already past a target
  std::int32_t good = 0;            // of judged: met both targets
  std::int32_t rejected = 0;        // answered 429 or 503; they count as judged and not good
  std::int32_t ttft_misses = 0;     // of judged: missed the TTFT target
  std::int32_t itl_misses = 0;      // of judged: missed the ITL target
  Duration ttft_p50{}, ttft_p99{};  // unfinished ones enter with their age, a lower bound
  Duration itl_p50{}, itl_p99{};    // of the requests' own p99 gaps
  double prompt_tokens_mean = 0;    // of arrivals
  double output_tokens_mean = 0;    // of finished requests
  double arrival_interval_cv = 0;   // burstiness; 1 is Poisson
  Duration oldest_wait{};           // of the waiting queue, at the end
  std::int32_t waiting_begin = 0;   // queue length
  std::int32_t waiting_end = 0;

  [[nodiscard]] double arrival_rate() const { return end > begin ? arrivals / to_seconds(end - begin) : 0.0; }
  [[nodiscard]] double attainment() const { return judged > 0 ? static_cast<double>(good) / judged : 0.0; }
};

/// Which knobs may move, and where. Pinned knobs hold their value and are never searched over.
struct SearchSpace {
  KnobsSpec knobs;
  KnobValues base;  // values of pinned knobs, and where a search starts
  bool max_num_batched_tokens_free = true;
  bool max_num_seqs_free = true;
  bool priority_policy_free = true;
  bool deadline_margin_free = true;
  bool mode_free = false;             // where there is more than one choice
  bool prefill_share_free = false;    // where mode can be Disaggregated on one device
  bool prefill_devices_free = false;  // where mode can be Disaggregated on several devices
};

/// What is expected of settings before they are tried: by the twin, with its spread.
struct ExpectedOutcome {
  double attainment = 0;         // 0..1
  double attainment_spread = 0;  // standard deviation
  Duration ttft_p50{}, ttft_p99{};
  Duration itl_p50{}, itl_p99{};

  friend bool operator==(const ExpectedOutcome&, const ExpectedOutcome&) = default;
};

enum class Phase : std::uint8_t {
  Disabled,    // spec.tuning.enabled is false, or every knob is pinned
  Holding,     // watching; the objectives are met or the last search has ended
  Searching,   // a trial is or will be running
  Infeasible,  // searched, and no setting meets the objectives; holds the least violating one
  NoData,      // too few requests to judge anything
};

/// What to do after a window. `reason` is CamelCase and of few kinds (it becomes a condition reason and an event reason).
struct Decision {
  Phase phase = Phase::Holding;
  std::optional<KnobValues> apply;  // make current, then drop spec.tuning.settle before the next window opens
  bool trial = false;               // apply is a trial (else: an incumbent, a rollback or a warm start)
  std::string reason;   // ShiftDetected, TrialStarted, TrialWorse, RolledBack, SearchConverged, NoSettingFeasible, ...
  std::string message;  // one sentence with the numbers that led to it
  // For the record (`rubatod explain`): what was seen, what was expected, where the proposal came from.
  std::int64_t trial_number = 0;                        // of the trial that it starts or ends; 0: of none
  std::string source{};                                 // of apply: Twin, Regime, Process, Opening, Random; empty: no proposal
  std::optional<Window> seen{};                         // the window that led to it
  std::optional<ExpectedOutcome> expected{};            // of apply; empty: nothing was predicted
  std::optional<ExpectedOutcome> expected_incumbent{};  // under the same futures
};

/// One finished trial, as the journal keeps it and the API lists it.
struct Trial {
  std::int64_t number = 0;
  KnobValues knobs;
  Window window;
  std::string outcome;   // Incumbent: adopted. Worse, RolledBack: worse beyond noise (RolledBack: the incumbent was restored).
                         // Inconclusive.
  std::string source{};  // as Decision's
  std::optional<ExpectedOutcome> expected{};  // when it was proposed
  std::int64_t ended = 0;                     // seconds since 1970; 0: not known
};

struct TunerStatus {
  Phase phase = Phase::Holding;
  KnobValues incumbent;
  std::int64_t trials_total = 0;
  std::int64_t searches_total = 0;
  std::int64_t rollbacks_total = 0;
  std::int64_t windows_refused_total = 0;  // contradicting or not finite
  std::int64_t journal_errors_total = 0;   // records that could not be written; tuning goes on without them
  std::int64_t early_rollbacks_total = 0;  // of rollbacks_total: before the trial's window had closed
  std::int64_t alarms_total = 0;           // changes of load
  std::int64_t twin_retunes_total = 0;     // settings changed on the twin's word or a regime's, before a full window was measured
  double risk_used = 0;                    // share of the last hour's requests that trials put at risk; at most the risk budget
  std::optional<TimePoint> no_data_since;
  std::string reason;
  std::string message;
};

struct TunerOptions {
  SearchSpace space;
  ObjectivesSpec objectives;
  TuningSpec tuning;
  std::uint64_t seed = 1;
  std::string model_key;    // identifies model, backend and device: journal entries of another key are never reused
  Duration wall_at_zero{};  // time since 1970 at TimePoint{}, for records that outlive the process
};

/// Not thread-safe; the tuning thread owns it.
class Tuner {
 public:
  /// Each may be null: nothing is remembered, nothing is predicted (plain search on live windows), how long loads last is not
  /// known. What is given must outlive the tuner; it asks the twin and the watch, and has the twin check itself against windows,
  /// but whoever owns them feeds them.
  Tuner(const TunerOptions& options, Journal* journal, Twin* twin = nullptr, const LoadWatch* watch = nullptr);
  ~Tuner();

  /// Takes a closed window that ran wholly under the settings last asked for (or the initial ones) and says what comes next.
  /// Never throws; non-finite or contradicting windows are refused, counted and answered with Holding.
  Decision on_window(const Window& window);

  /// The load has changed: answers at once where the twin or a regime met before can, without waiting for a window. Empty: the
  /// next window decides. so_far: of the open window.
  std::optional<Decision> on_alarm(const LoadAlarm& alarm, const Window& so_far);

  /// The open window so far, about once a second: ends a trial whose requests already show that it is worse (a sequential test,
  /// so that looking often does not make it jumpy). Empty: go on.
  std::optional<Decision> on_progress(const Window& so_far);

  /// Serving drains, or its figures cannot be had: nothing is tried or concluded until thaw(). What was on trial gives way to the
  /// incumbent.
  Decision freeze(const std::string& why, TimePoint now);
  void thaw();

  /// Regimes met before, for export.
  [[nodiscard]] std::vector<Regime> regimes() const;

  /// The manifest, the API or an override changed what may move or what is wanted. A running search goes on with the knobs that
  /// are left; evidence under other objectives is dropped. options.space.base is what runs now, pins included;
  /// returns what to make current instead, if anything.
  Decision reconfigure(const TunerOptions& options, TimePoint now);

  [[nodiscard]] TunerStatus status() const;
  /// Newest first, bounded.
  [[nodiscard]] std::vector<Trial> recent_trials() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace rubato::tuner
