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
};

/// Not thread-safe. No call throws.
class Journal {
 public:
  /// Creates the file when there is none (its folder must exist). An unreadable, truncated, foreign or newer file is renamed to
  /// PATH.damaged (replacing an earlier one) and cold_start_reason() tells why; an error only when no file can be written at all.
  static Result<std::unique_ptr<Journal>> open(const std::string& path, const JournalOptions& options = {});
  ~Journal();

  /// Empty unless a damaged file was moved aside.
  [[nodiscard]] const std::string& cold_start_reason() const;

  Result<void> record(const JournalTrial& trial);
  Result<void> record(const JournalDecision& decision);

  /// The newest `count_max` trials of this model under these objectives, oldest first. Rows that cannot be read are skipped.
  [[nodiscard]] Result<std::vector<JournalTrial>> trials(const std::string& model_key, const ObjectivesSpec& objectives,
                                                         std::int64_t count_max) const;

  /// The newest `count_max` decisions, oldest first.
  [[nodiscard]] Result<std::vector<JournalDecision>> decisions(std::int64_t count_max) const;

  /// Replaces all regimes of this model.
  Result<void> keep_regimes(const std::string& model_key, std::span<const Regime> regimes);
  [[nodiscard]] Result<std::vector<Regime>> regimes(const std::string& model_key) const;
  /// Models that have regimes on file.
  [[nodiscard]] Result<std::vector<std::string>> regime_models() const;

  /// Largest trial number on file, 0 when empty: numbering goes on from there.
  [[nodiscard]] std::int64_t last_trial_number() const;

 private:
  struct State;
  explicit Journal(std::unique_ptr<State> state);
  std::unique_ptr<State> state_;
};

}  // namespace rubato::tuner
