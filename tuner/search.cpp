// SPDX-License-Identifier: Apache-2.0
#include "tuner/search.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <utility>

#include "manifests/check.h"
#include "tuner/acquisition.h"
#include "tuner/guard.h"

namespace rubato::tuner {

namespace {

constexpr std::size_t candidates_max = 4096;
constexpr std::size_t history_max = 96;
constexpr double history_reach = 2.0;  // octaves of load within which old evidence informs the process
constexpr double similar_load = 0.75;  // octaves within which an old answer is worth a trial as it is
constexpr std::int32_t openings_max = 4;
constexpr double opening_step = 4.0;  // factor on the budget
// Improvement below this (of a score that spans 0 to pi) is not worth a window of live traffic.
constexpr double improvement_min = 0.03;
// While the objectives are missed there is more to gain; but not for ever.
constexpr double improvement_min_missed = 0.01;
constexpr std::int32_t patient_trials = 8;
// Candidates less likely to keep to the guard are left out. With expectations: those whose prediction is below it.
constexpr double safe_probability_plain = 0.2;
constexpr double safe_probability_expected = 0.5;

// Scores expected within this of the best, and improvements of this share of the largest, are as good: what is about them
// decides.
constexpr double expected_alike = 0.1;
constexpr double improvement_alike = 0.7;
constexpr std::size_t contenders_max = 64;

/// Whether more requests miss the ITL target than the objectives leave room for.
bool gaps_missed(const Evidence& evidence, const ObjectivesSpec& objectives) {
  return evidence.itl_misses > 1.5 * (1.0 - objectives.attainment / 100.0) * evidence.judged + 1.0;
}

struct Group {
  KnobValues knobs;
  Evidence evidence;
};

}  // namespace

Search::Search(const LegalSettings& legal, const SearchOptions& options, std::vector<PastTrial> history)
    : legal_(legal), options_(options), history_(std::move(history)) {
  std::erase_if(history_, [&](const PastTrial& one) { return load_distance(one.load, options_.load) > history_reach; });
  std::stable_sort(history_.begin(), history_.end(), [&](const PastTrial& a, const PastTrial& b) {
    return load_distance(a.load, options_.load) < load_distance(b.load, options_.load);
  });
  if (history_.size() > history_max) history_.resize(history_max);
  expect(std::move(options_.expected));
}

void Search::expect(std::vector<Expected> expected) {
  std::erase_if(expected, [](const Expected& one) {
    return !std::isfinite(one.attainment) || !std::isfinite(one.score) || !std::isfinite(one.variance) || one.variance < 0;
  });
  if (expected.size() > candidates_max) {
    std::stable_sort(expected.begin(), expected.end(), [](const Expected& a, const Expected& b) { return a.score > b.score; });
    expected.resize(candidates_max);
  }
  options_.expected = std::move(expected);
  outlook_complete_ = false;
}

void Search::restrict_to(const LegalSettings& legal) {
  legal_ = legal;
}

void Search::load_moved(const LoadFeatures& load) {
  for (const Told& one : told_) {
    history_.push_back({.knobs = one.knobs, .load = options_.load, .evidence = one.evidence});
  }
  if (history_.size() > history_max) history_.erase(history_.begin(), history_.end() - static_cast<std::ptrdiff_t>(history_max));
  told_.clear();
  proposed_.clear();
  openings_ = 0;
  options_.load = load;
  options_.hint.reset();
  expected_best_asked_ = false;
  expect({});
}

void Search::tell(const KnobValues& knobs, const Evidence& evidence) {
  for (Told& one : told_) {
    if (act_alike(one.knobs, knobs)) {
      one.evidence = pooled(one.evidence, evidence);
      outlook_complete_ = false;
      return;
    }
  }
  told_.push_back({knobs, evidence});
  if (outlook_complete_) outlook_->learn(knobs, evidence);
}

const Search::Told* Search::find(const KnobValues& knobs) const {
  const auto found = std::find_if(told_.begin(), told_.end(), [&](const Told& one) { return act_alike(one.knobs, knobs); });
  return found == told_.end() ? nullptr : &*found;
}

Evidence Search::evidence(const KnobValues& knobs) const {
  const Told* found = find(knobs);
  return found ? found->evidence : Evidence{};
}

/// Told, proposed or the incumbent itself: nothing to try.
bool Search::known(const KnobValues& knobs, const KnobValues& incumbent) const {
  return act_alike(knobs, incumbent) || find(knobs) ||
         std::any_of(proposed_.begin(), proposed_.end(), [&](const KnobValues& one) { return act_alike(one, knobs); });
}

std::vector<KnobValues> Search::untried(const KnobValues& incumbent) const {
  std::vector<KnobValues> result;
  if (options_.expected.empty()) {
    result = legal_.grid(candidates_max, options_.seed);
  } else {
    for (const Expected& one : options_.expected) {
      if (legal_.contains(one.knobs)) result.push_back(one.knobs);
    }
  }
  const KnobValues own = legal_.canonical(incumbent);
  std::erase_if(result, [&](const KnobValues& one) { return one == own || known(one, incumbent); });
  return result;
}

/// The setting that met the objectives under the most similar load, by all that is known of it there.
std::optional<KnobValues> Search::remembered(const KnobValues& incumbent) const {
  std::vector<Group> groups;
  for (const PastTrial& one : history_) {
    if (load_distance(one.load, options_.load) > similar_load || !legal_.contains(one.knobs)) continue;
    const auto same = std::find_if(groups.begin(), groups.end(), [&](const Group& group) { return group.knobs == one.knobs; });
    if (same == groups.end()) {
      groups.push_back({one.knobs, one.evidence});
    } else {
      same->evidence = pooled(same->evidence, one.evidence);
    }
  }
  const Group* best = nullptr;
  const auto lower_bound = [](const Evidence& evidence) {
    const NoisyValue value = score(evidence);
    return value.value - std::sqrt(value.variance);
  };
  for (const Group& group : groups) {
    if (known(group.knobs, incumbent) || judge(group.evidence, options_.objectives) == Verdict::Missed) continue;
    if (!best || lower_bound(group.evidence) > lower_bound(best->evidence)) best = &group;
  }
  return best ? std::optional(best->knobs) : std::nullopt;
}

/// Policy Deadline first, because a policy is worth more than a chunk size; then the budget, down when gaps are missed, up when
/// first tokens alone are; then twice the middle between a budget that misses gaps and one that does not.
std::optional<KnobValues> Search::opening(const KnobValues& incumbent) {
  while (openings_ < openings_max) {
    KnobValues knobs = incumbent;
    const std::int32_t number = openings_++;
    if (number == 0) {
      knobs.priority_policy = PriorityPolicy::Deadline;
    } else {
      knobs.priority_policy = opening_policy(incumbent);
      const std::optional<double> budget = number == 1 ? stepped_budget(incumbent) : middle_budget(knobs);
      if (!budget) continue;
      knobs.max_num_batched_tokens = static_cast<std::int32_t>(std::clamp(*budget, 1.0, 1e6));
      // A small budget must not be pushed up again by the sequences it would have to hold.
      knobs.max_num_seqs = std::min(knobs.max_num_seqs, std::max(1, knobs.max_num_batched_tokens - min_prefill_quantum));
    }
    knobs = legal_.canonical(knobs);
    if (legal_.contains(knobs) && !known(knobs, legal_.canonical(incumbent))) return knobs;
  }
  return std::nullopt;
}

/// The incumbent's, but no budget is looked for under PrefillFirst where another may be had: it is the worst nearly everywhere.
PriorityPolicy Search::opening_policy(const KnobValues& incumbent) const {
  if (incumbent.priority_policy != PriorityPolicy::PrefillFirst || !legal_.space().priority_policy_free) {
    return incumbent.priority_policy;
  }
  const auto& choices = legal_.space().knobs.priority_policy.choices;
  for (const PriorityPolicy policy : {PriorityPolicy::ShortestFirst, PriorityPolicy::DecodeFirst}) {
    if (std::find(choices.begin(), choices.end(), policy) != choices.end()) return policy;
  }
  return incumbent.priority_policy;
}

std::optional<double> Search::stepped_budget(const KnobValues& incumbent) const {
  const Evidence known = evidence(incumbent);
  return incumbent.max_num_batched_tokens * (gaps_missed(known, options_.objectives) ? 1.0 / opening_step : opening_step);
}

/// Between the largest budget under which gaps are kept but first tokens missed and the smallest one under which gaps are missed.
std::optional<double> Search::middle_budget(const KnobValues& like) const {
  constexpr double none = std::numeric_limits<double>::infinity();
  double low = 0;
  double high = none;
  const auto alike = [&](const Told& one) {
    return one.knobs.priority_policy == like.priority_policy && one.knobs.mode == like.mode;
  };
  for (const Told& one : told_) {
    if (alike(one) && gaps_missed(one.evidence, options_.objectives)) {
      high = std::min<double>(high, one.knobs.max_num_batched_tokens);
    }
  }
  for (const Told& one : told_) {
    const double budget = one.knobs.max_num_batched_tokens;
    if (alike(one) && !gaps_missed(one.evidence, options_.objectives) && budget < high) low = std::max(low, budget);
  }
  if (high == none) return std::nullopt;  // gaps are no trouble: nothing to find the middle of
  return low > 0 ? std::sqrt(low * high) : high / opening_step;
}

void Search::fit(const KnobValues& incumbent) {
  outlook_.emplace(options_.load, options_.expected);
  if (options_.expected.empty()) {
    for (const PastTrial& one : history_) outlook_->learn_past(one);
  }
  for (const Told& one : told_) outlook_->learn(one.knobs, one.evidence);
  outlook_->fit(incumbent);
  outlook_complete_ = true;
}

/// The lowest attainment, transformed, that a trial may be predicted to have. Empty: anything goes.
std::optional<double> Search::attainment_floor(const KnobValues& incumbent) const {
  double own = evidence(incumbent).attainment();
  if (!options_.expected.empty()) {
    if (const auto outcome = outlook_->of(incumbent)) own = share_of_transformed(outcome->attainment.mean);
  }
  return own > options_.guard ? std::optional(transformed_share(own - options_.guard)) : std::nullopt;
}

void Search::predict(Proposal& proposal) const {
  if (!outlook_ || !outlook_complete_ || !outlook_->fitted()) return;
  const std::optional<Outcome> outcome = outlook_->of(proposal.knobs);
  if (!outcome) return;
  const Prediction& attainment = outcome->attainment;
  const double deviation = std::sqrt(attainment.variance);
  proposal.attainment = share_of_transformed(attainment.mean);
  proposal.attainment_spread =
      0.5 * (share_of_transformed(attainment.mean + deviation) - share_of_transformed(attainment.mean - deviation));
}

/// Whether the hint, which is then used up, may be tried.
bool Search::takes_hint(const KnobValues& incumbent) {
  if (!options_.hint) return false;
  const KnobValues hint = *std::exchange(options_.hint, std::nullopt);
  if (!legal_.contains(hint) || known(hint, incumbent)) return false;
  if (options_.expected.empty() || !outlook_->expected(hint)) return true;
  const std::optional<double> floor = attainment_floor(incumbent);
  return !floor || outlook_->of(hint)->attainment.mean >= *floor;
}

/// Of the choices worth at least so much, the one amid the best expectations; the most valuable ones only, where they are many.
std::size_t Search::sturdiest(const std::vector<KnobValues>& choices, const std::vector<double>& values, double least) const {
  std::vector<std::size_t> contenders;
  for (std::size_t i = 0; i < values.size(); ++i) {
    if (values[i] >= least) contenders.push_back(i);
  }
  CHECK(!contenders.empty(), "least=", least);
  std::stable_sort(contenders.begin(), contenders.end(), [&](std::size_t a, std::size_t b) { return values[a] > values[b]; });
  if (contenders.size() > contenders_max) contenders.resize(contenders_max);
  std::size_t result = contenders.front();
  double best = -std::numeric_limits<double>::infinity();
  for (const std::size_t index : contenders) {
    const double about = outlook_->expected_about(choices[index]);
    if (about <= best) continue;
    best = about;
    result = index;
  }
  return result;
}

/// What the twin would choose, before anything but the incumbent and a hint was tried.
std::optional<Proposal> Search::expected_best(const KnobValues& incumbent, const std::vector<KnobValues>& choices) {
  if (std::exchange(expected_best_asked_, true)) return std::nullopt;
  const std::optional<double> floor = attainment_floor(incumbent);
  std::vector<KnobValues> safe;
  std::vector<double> scores;
  const Expected* best = nullptr;
  for (const KnobValues& one : choices) {
    if (floor && outlook_->of(one)->attainment.mean < *floor) continue;
    const Expected* candidate = outlook_->expected(one);
    safe.push_back(one);
    scores.push_back(candidate->score);
    if (!best || candidate->score > best->score) best = candidate;
  }
  if (!best) return std::nullopt;
  const Expected* own = outlook_->expected(incumbent);
  if (own && best->score < own->score + improvement_min_missed) return std::nullopt;
  double least = best->score - std::max(expected_alike, std::sqrt(best->variance));
  if (own) least = std::max(least, std::min(best->score, own->score + improvement_min_missed));
  return Proposal{.knobs = safe[sturdiest(safe, scores, least)], .source = Source::Twin};
}

std::optional<Proposal> Search::improvement(const KnobValues& incumbent, const std::vector<KnobValues>& choices) {
  const bool plain = options_.expected.empty();
  if (plain && !outlook_->fitted()) {
    std::mt19937_64 random(options_.seed + ++draws_);
    return Proposal{.knobs = choices[random() % choices.size()], .source = Source::Random};
  }
  // The best fitted value, not the best measured one: a lucky window must not set the bar.
  double best = -std::numeric_limits<double>::infinity();
  if (const auto own = outlook_->of(incumbent)) best = own->score.mean;
  for (const Told& one : told_) best = std::max(best, outlook_->of(one.knobs)->score.mean);
  std::vector<Outcome> outcomes;
  outcomes.reserve(choices.size());
  for (const KnobValues& one : choices) {
    outcomes.push_back(*outlook_->of(one));
    // No window is spent in the hope that a setting is better than all about it say.
    Prediction& hoped = outcomes.back().score;
    hoped.variance -= std::exchange(hoped.peculiar, 0.0);
  }
  const AcquisitionOptions options{.best = best,
                                   .safe_probability_min = plain ? safe_probability_plain : safe_probability_expected,
                                   .floor = attainment_floor(incumbent)};
  std::vector<double> values;
  values.reserve(choices.size());
  for (const Outcome& one : outcomes) values.push_back(constrained_improvement(one, options));
  std::size_t index = static_cast<std::size_t>(std::max_element(values.begin(), values.end()) - values.begin());
  const bool patient = trials_ < patient_trials && judge(evidence(incumbent), options_.objectives) == Verdict::Missed;
  const double least = patient ? improvement_min_missed : improvement_min;
  if (values[index] < least) return std::nullopt;
  if (!plain) index = sturdiest(choices, values, std::max(least, improvement_alike * values[index]));
  return Proposal{.knobs = choices[index], .source = Source::Improvement, .improvement = values[index]};
}

Answer Search::ask(const KnobValues& incumbent) {
  if (trials_ >= options_.trials_max) return {.proposal = {}, .end = SearchEnd::TrialsSpent};
  const bool plain = options_.expected.empty();
  const std::vector<KnobValues> choices = untried(incumbent);
  std::optional<Proposal> proposal;
  if (!plain) fit(incumbent);
  const std::optional<KnobValues> hint = options_.hint;
  if (takes_hint(incumbent)) {
    proposal = Proposal{.knobs = *hint, .source = Source::Regime};
  } else if (const auto recalled = plain ? remembered(incumbent) : std::nullopt) {
    proposal = Proposal{.knobs = *recalled, .source = Source::Remembered};
  } else if (choices.empty()) {
    return {.proposal = {}, .end = SearchEnd::Exhausted};
  } else if (const auto first = plain ? opening(incumbent) : std::nullopt) {
    proposal = Proposal{.knobs = *first, .source = Source::Opening};
  } else if (plain) {
    fit(incumbent);
    proposal = improvement(incumbent, choices);
  } else if (proposal = expected_best(incumbent, choices); !proposal) {
    proposal = improvement(incumbent, choices);
  }
  if (!proposal) return {.proposal = {}, .end = SearchEnd::NothingToGain};
  CHECK(legal_.contains(proposal->knobs), "budget=", proposal->knobs.max_num_batched_tokens);
  predict(*proposal);
  ++trials_;
  proposed_.push_back(proposal->knobs);
  return {.proposal = proposal, .end = SearchEnd::TrialsSpent};
}

KnobValues Search::best(const KnobValues& incumbent) {
  if (!outlook_complete_) fit(incumbent);
  KnobValues result = incumbent;
  if (options_.expected.empty() && !outlook_->fitted()) return result;
  const auto lower_bound = [&](const KnobValues& knobs) {
    const Prediction prediction = outlook_->of(knobs)->score;
    return prediction.mean - std::sqrt(prediction.variance);
  };
  double bar = -1e9;
  if (find(incumbent)) {
    const Prediction own = outlook_->of(incumbent)->score;
    bar = own.mean - 0.5 * std::sqrt(own.variance);
  }
  for (const Told& one : told_) {
    if (!legal_.contains(one.knobs) || one.evidence.windows == 0) continue;
    const double bound = lower_bound(one.knobs);
    if (bound > bar) {
      bar = bound;
      result = one.knobs;
    }
  }
  return result;
}

}  // namespace rubato::tuner
