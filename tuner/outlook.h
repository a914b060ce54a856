// SPDX-License-Identifier: Apache-2.0
// What is to be expected of settings under one load, from live results and, where there is a twin, from its expectations: then
// a process models what live results differ from them by, so that few of them correct many.
#pragma once

#include <optional>
#include <vector>

#include "tuner/acquisition.h"
#include "tuner/evidence.h"
#include "tuner/gaussian_process.h"
#include "tuner/search_space.h"

namespace rubato::tuner {

/// What an earlier search or run showed: evidence under its own load.
struct PastTrial {
  KnobValues knobs;
  LoadFeatures load;
  Evidence evidence;
};

/// What is expected of settings before anything is measured, by the twin.
struct Expected {
  KnobValues knobs;
  double attainment = 0;  // 0..1
  double score = 0;       // as score() of what is expected
  double variance = 0;    // of score, over the twin's futures
};

/// Settings and load as an input of the process. Absolute scales, so that evidence outlives a change of bounds.
[[nodiscard]] GaussianProcessPoint encode(const KnobValues& knobs, const LoadFeatures& load);

/// Length scale priors, categories, conditions and output scale that fit encode() and score().
[[nodiscard]] GaussianProcessOptions process_options();

/// The same for what live results differ from expectations by: smooth over the settings, about zero, with quirks at single ones.
[[nodiscard]] GaussianProcessOptions residual_process_options();

/// With expectations, settings without one are known by their own evidence alone.
class Outlook {
 public:
  /// expected empty: from live results alone.
  Outlook(const LoadFeatures& load, std::vector<Expected> expected);

  /// Another load's result. Only without expectations: what was expected then is not known.
  void learn_past(const PastTrial& past);

  /// All evidence of these settings under this load; not told of before.
  void learn(const KnobValues& knobs, const Evidence& evidence);

  /// Chooses hyper-parameters. What is learnt afterwards enters under them.
  void fit(const KnobValues& focus);
  [[nodiscard]] bool fitted() const { return score_.fitted() && attainment_.fitted(); }

  /// Score and transformed attainment. Empty where there are expectations but these settings have neither one nor evidence.
  [[nodiscard]] std::optional<Outcome> of(const KnobValues& knobs) const;

  /// The score expected of settings about these. Where expectations are a little off, settings amid good ones stay good, those at
  /// the edge of a cliff do not.
  [[nodiscard]] double expected_about(const KnobValues& knobs) const;

  [[nodiscard]] const Expected* expected(const KnobValues& knobs) const;

 private:
  struct Direct {
    KnobValues knobs;
    Outcome outcome;
  };

  LoadFeatures load_;
  std::vector<Expected> expected_;
  std::vector<Direct> direct_;  // evidence of settings without expectation
  GaussianProcess score_;
  GaussianProcess attainment_;
};

}  // namespace rubato::tuner
