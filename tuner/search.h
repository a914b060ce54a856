// SPDX-License-Identifier: Apache-2.0
// One search under one load, as ask and tell: it is told what settings showed and asked which to try next. It knows neither time
// nor what is current; when to ask, roll back or give up on a load is the business of tuner.cpp.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "manifests/engine_spec.h"
#include "tuner/evidence.h"
#include "tuner/outlook.h"
#include "tuner/search_space.h"

namespace rubato::tuner {

/// Where a proposal comes from.
enum class Source : std::uint8_t {
  Regime,       // served this load best when it was met before
  Twin,         // the twin's best
  Remembered,   // met the objectives under a similar load before
  Opening,      // a rule of thumb for the target that is missed, before the process knows anything
  Improvement,  // largest constrained expected improvement
  Random,       // the process could not be fitted
};

/// Why there is no proposal.
enum class SearchEnd : std::uint8_t { TrialsSpent, Exhausted, NothingToGain };

struct Proposal {
  KnobValues knobs;
  Source source = Source::Improvement;
  double improvement = 0;  // constrained expected improvement, in units of score; 0 when another source proposed
  // Predicted by all that is known so far, 0..1, and its standard deviation. Empty where nothing is.
  std::optional<double> attainment{};
  double attainment_spread = 0;
};

struct Answer {
  std::optional<Proposal> proposal;
  SearchEnd end = SearchEnd::TrialsSpent;  // when there is none
};

struct SearchOptions {
  ObjectivesSpec objectives;
  LoadFeatures load;
  std::uint64_t seed = 1;
  std::int32_t trials_max = 16;
  std::vector<Expected> expected{};  // see Search::expect()
  double guard = 0.1;                // no trial is proposed whose attainment is predicted below the incumbent's by more than this
  std::optional<KnobValues> hint{};  // served this load best when it was met before: tried before all else
};

class Search {
 public:
  /// history may hold anything of the same model and objectives; entries under another load only inform the process, entries
  /// outside the legal settings are never proposed.
  Search(const LegalSettings& legal, const SearchOptions& options, std::vector<PastTrial> history);

  /// Knobs were pinned or bounds moved. What was told stays.
  void restrict_to(const LegalSettings& legal);

  /// What is expected of settings under the present load, in place of what was; the incumbent should be among them. Empty: the
  /// plain search. Else the process models what live results differ from these by, history is left out, and only settings listed
  /// here are proposed: the best of them first, unless the incumbent is expected to do as well.
  void expect(std::vector<Expected> expected);

  /// The load moved: what was told so far counts as history, and the trials already made keep counting against the bound. What
  /// was expected and the hint were of the old load and are dropped.
  void load_moved(const LoadFeatures& load);

  /// One more window of evidence for these settings.
  void tell(const KnobValues& knobs, const Evidence& evidence);

  /// What to try next, given the incumbent (which must have been told). Counts as a trial.
  Answer ask(const KnobValues& incumbent);

  /// The settings of this search to stay with: the best lower bound of the fitted score among those told, the incumbent unless
  /// another is better by more than noise.
  [[nodiscard]] KnobValues best(const KnobValues& incumbent);

  /// All evidence told for these settings under the present load. Zero windows when none.
  [[nodiscard]] Evidence evidence(const KnobValues& knobs) const;

  [[nodiscard]] std::int32_t trials() const { return trials_; }
  [[nodiscard]] std::int32_t trials_max() const { return options_.trials_max; }

 private:
  struct Told {
    KnobValues knobs;
    Evidence evidence;
  };

  [[nodiscard]] const Told* find(const KnobValues& knobs) const;
  [[nodiscard]] std::optional<KnobValues> remembered(const KnobValues& incumbent) const;
  [[nodiscard]] std::optional<KnobValues> opening(const KnobValues& incumbent);
  [[nodiscard]] std::optional<double> stepped_budget(const KnobValues& incumbent) const;
  [[nodiscard]] std::optional<double> middle_budget(const KnobValues& like) const;
  [[nodiscard]] PriorityPolicy opening_policy(const KnobValues& incumbent) const;
  [[nodiscard]] std::optional<Proposal> expected_best(const KnobValues& incumbent, const std::vector<KnobValues>& choices);
  [[nodiscard]] std::optional<Proposal> improvement(const KnobValues& incumbent, const std::vector<KnobValues>& choices);
  [[nodiscard]] std::optional<double> attainment_floor(const KnobValues& incumbent) const;
  [[nodiscard]] std::size_t sturdiest(const std::vector<KnobValues>& choices, const std::vector<double>& values,
                                      double least) const;
  [[nodiscard]] bool takes_hint(const KnobValues& incumbent);
  [[nodiscard]] bool known(const KnobValues& knobs, const KnobValues& incumbent) const;
  void fit(const KnobValues& incumbent);
  void predict(Proposal& proposal) const;
  [[nodiscard]] std::vector<KnobValues> untried(const KnobValues& incumbent) const;

  LegalSettings legal_;
  SearchOptions options_;
  std::vector<PastTrial> history_;
  std::vector<Told> told_;
  std::vector<KnobValues> proposed_;  // including those no evidence came of
  std::int32_t trials_ = 0;
  std::int32_t openings_ = 0;
  std::uint64_t draws_ = 0;
  bool expected_best_asked_ = false;
  std::optional<Outlook> outlook_;
  bool outlook_complete_ = false;  // it was fitted and knows all that was told
};

}  // namespace rubato::tuner
