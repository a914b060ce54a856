// SPDX-License-Identifier: Apache-2.0
// What the tuner remembers over restarts: finished trials, decisions and regimes, in one SQLite file. A record is on file when
// its call returns and survives the process being killed; a damaged file is moved aside and the journal starts empty. The only
// place that knows SQLite.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "manifests/engine_spec.h"
#include "manifests/result.h"
#include "policies/time.h"
#include "tuner/regimes.h"
#include "tuner/tuner.h"

namespace rubato::tuner {

/// A finished trial with all that decides whether it may be reused.
struct JournalTrial {
  Trial trial;
  std::string model_key;
  ObjectivesSpec objectives;
  KnobsSpec bounds;  // that were in force
};

struct JournalDecision {
  std::int64_t time = 0;  // milliseconds since 1970
  Decision decision;
};

struct JournalOptions {
  std::int64_t trials_max = 4096;  // rows kept; the oldest go first
  std::int64_t decisions_max = 8192;
  std::int64_t regimes_max = 4096;  // of all models together; those of the models that were kept longest ago go first
};

/// Which decisions to read.
struct DecisionFilter {
  std::int64_t since = 0;         // milliseconds since 1970; those of unknown time (0) only when this is 0
  std::int64_t count_max = 1000;  // the newest
};

/// Not thread-safe. No call throws. One process writes; others may read beside it (open_existing).
class Journal {
 public:
  /// Creates the file when there is none (its folder must exist), and brings one of an earlier version up to date in place. An
  /// unreadable, truncated, foreign or newer file is renamed to PATH.damaged (replacing an earlier one) and cold_start_reason()
  /// tells why; an error only when no file can be written at all.
  static Result<std::unique_ptr<Journal>> open(const std::string& path, const JournalOptions& options = {});

  /// For reading alone, also while another process writes: never creates, moves aside or migrates; what record() and
  /// keep_regimes() would write is refused. NotFound where there is no file; other errors say what is wrong with it.
  static Result<std::unique_ptr<Journal>> open_existing(const std::string& path);
  ~Journal();

  /// Empty unless a damaged file was moved aside.
  [[nodiscard]] const std::string& cold_start_reason() const;

  Result<void> record(const JournalTrial& trial);
  Result<void> record(const JournalDecision& decision);

  /// The newest `count_max` trials of this model under these objectives, oldest first. Rows that cannot be read are skipped.
  [[nodiscard]] Result<std::vector<JournalTrial>> trials(const std::string& model_key, const ObjectivesSpec& objectives,
                                                         std::int64_t count_max) const;

  /// The newest `count_max` trials of all models and objectives, oldest first: for people to read.
  [[nodiscard]] Result<std::vector<Trial>> finished_trials(std::int64_t count_max) const;

  /// Oldest first. Rows that cannot be read are skipped; parts of a record that cannot be read are empty.
  [[nodiscard]] Result<std::vector<JournalDecision>> decisions(const DecisionFilter& filter) const;

  /// Replaces all regimes of this model, or changes nothing.
  Result<void> keep_regimes(const std::string& model_key, std::span<const Regime> regimes);
  /// In the order in which they were given. Rows that cannot be read are skipped.
  [[nodiscard]] Result<std::vector<Regime>> regimes(const std::string& model_key) const;
  /// Models that have regimes on file, the one kept last first.
  [[nodiscard]] Result<std::vector<std::string>> regime_models() const;

  /// Largest trial number on file, 0 when empty: numbering goes on from there.
  [[nodiscard]] std::int64_t last_trial_number() const;

 private:
  struct State;
  explicit Journal(std::unique_ptr<State> state);
  std::unique_ptr<State> state_;
};

}  // namespace rubato::tuner
