// SPDX-License-Identifier: Apache-2.0
#include "tuner/search.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>

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
constexpr double attainment_guard = 0.1;
// Improvement below this (of a score that spans 0 to pi) is not worth a window of live traffic.
constexpr double improvement_min = 0.03;
// While the objectives are missed there is more to gain; but not for ever.
constexpr double improvement_min_missed = 0.01;
constexpr std::int32_t patient_trials = 8;
// Old evidence was gathered under a load and a machine state that only resemble the present ones.
constexpr double history_variance = 0.05;

/// Whether more requests miss the ITL target than the objectives leave room for.
bool gaps_missed(const Evidence& evidence, const ObjectivesSpec& objectives) {
  return evidence.itl_misses > 1.5 * (1.0 - objectives.attainment / 100.0) * evidence.judged + 1.0;
}

struct Group {
  KnobValues knobs;
  Evidence evidence;
};

}  // namespace

GaussianProcessPoint encode(const KnobValues& knobs, const LoadFeatures& load) {
  constexpr double without_effect = 0.3;
  const double margin = knobs.priority_policy == PriorityPolicy::Deadline ? knobs.deadline_margin / 100.0 : without_effect;
  // One number for both ways to split: only a share moves on one device, only whole devices on several.
  constexpr double device_step = 0.25;
  const double share = knobs.mode == Mode::Disaggregated ? knobs.prefill_share / 100.0 + device_step * (knobs.prefill_devices - 1)
                                                         : without_effect;
  return {.numbers = {std::log2(std::max(1, knobs.max_num_batched_tokens)), std::log2(std::max(1, knobs.max_num_seqs)), margin,
                      share, load.rate, load.prompt, load.output},
          .categories = {static_cast<std::int32_t>(knobs.priority_policy), static_cast<std::int32_t>(knobs.mode)}};
}

GaussianProcessOptions process_options() {
  // Octaves for budget, sequences and load; fractions for margin and share, whose effect is known to be flat.
  return {.length_scales = {2.0, 4.0, 1.0, 0.5, 1.0, 1.5, 1.5}, .category_count = 2, .output_scale = 0.8};
}

Search::Search(const LegalSettings& legal, const SearchOptions& options, std::vector<PastTrial> history)
    : legal_(legal), options_(options), history_(std::move(history)) {
  std::erase_if(history_, [&](const PastTrial& one) { return load_distance(one.load, options_.load) > history_reach; });
  std::stable_sort(history_.begin(), history_.end(), [&](const PastTrial& a, const PastTrial& b) {
    return load_distance(a.load, options_.load) < load_distance(b.load, options_.load);
  });
  if (history_.size() > history_max) history_.resize(history_max);
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
}

void Search::tell(const KnobValues& knobs, const Evidence& evidence) {
  for (Told& one : told_) {
    if (one.knobs == knobs) {
      one.evidence = pooled(one.evidence, evidence);
      return;
    }
  }
  told_.push_back({knobs, evidence});
}

const Search::Told* Search::find(const KnobValues& knobs) const {
  const auto found = std::find_if(told_.begin(), told_.end(), [&](const Told& one) { return one.knobs == knobs; });
  return found == told_.end() ? nullptr : &*found;
}

Evidence Search::evidence(const KnobValues& knobs) const {
  const Told* found = find(knobs);
  return found ? found->evidence : Evidence{};
}

std::vector<KnobValues> Search::untried(const KnobValues& incumbent) const {
  std::vector<KnobValues> result = legal_.grid(candidates_max, options_.seed);
  const KnobValues own = legal_.canonical(incumbent);
  std::erase_if(result, [&](const KnobValues& one) {
    return one == own || find(one) || std::find(proposed_.begin(), proposed_.end(), one) != proposed_.end();
  });
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
    const bool known = group.knobs == incumbent || find(group.knobs) ||
                       std::find(proposed_.begin(), proposed_.end(), group.knobs) != proposed_.end();
    if (known || judge(group.evidence, options_.objectives) == Verdict::Missed) continue;
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
    const bool is_new = knobs != legal_.canonical(incumbent) && !find(knobs) &&
                        std::find(proposed_.begin(), proposed_.end(), knobs) == proposed_.end();
    if (legal_.contains(knobs) && is_new) return knobs;
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

void Search::fit() {
  score_.emplace(process_options());
  attainment_.emplace(process_options());
  for (const PastTrial& one : history_) {
    const GaussianProcessPoint point = encode(one.knobs, one.load);
    const NoisyValue known_score = score(one.evidence);
    const NoisyValue known_attainment = transformed_attainment(one.evidence);
    score_->observe(point, known_score.value, known_score.variance + history_variance);
    attainment_->observe(point, known_attainment.value, known_attainment.variance + history_variance);
  }
  for (const Told& one : told_) {
    const GaussianProcessPoint point = encode(one.knobs, options_.load);
    const NoisyValue known_score = score(one.evidence);
    const NoisyValue known_attainment = transformed_attainment(one.evidence);
    score_->observe(point, known_score.value, known_score.variance);
    attainment_->observe(point, known_attainment.value, known_attainment.variance);
  }
}

std::optional<Proposal> Search::improvement(const KnobValues& incumbent, const std::vector<KnobValues>& choices) {
  fit();
  const GaussianProcessPoint focus = encode(incumbent, options_.load);
  score_->fit(focus);
  attainment_->fit(focus);
  if (!score_->fitted() || !attainment_->fitted()) {
    std::mt19937_64 random(options_.seed + ++draws_);
    return Proposal{.knobs = choices[random() % choices.size()], .source = Source::Random};
  }
  // The best fitted value, not the best measured one: a lucky window must not set the bar.
  double best = score_->predict(focus).mean;
  for (const Told& one : told_) best = std::max(best, score_->predict(encode(one.knobs, options_.load)).mean);
  const double own = evidence(incumbent).attainment();
  std::vector<GaussianProcessPoint> points;
  points.reserve(choices.size());
  for (const KnobValues& one : choices) points.push_back(encode(one, options_.load));
  AcquisitionOptions options{.best = best};
  if (own > attainment_guard) options.floor = 2.0 * std::asin(std::sqrt(own - attainment_guard));
  const std::optional<Pick> pick = pick_best(*score_, *attainment_, points, options);
  const bool patient = trials_ < patient_trials && judge(evidence(incumbent), options_.objectives) == Verdict::Missed;
  if (!pick || pick->value < (patient ? improvement_min_missed : improvement_min)) return std::nullopt;
  return Proposal{.knobs = choices[pick->index], .source = Source::Improvement, .improvement = pick->value};
}

Answer Search::ask(const KnobValues& incumbent) {
  if (trials_ >= options_.trials_max) return {.proposal = {}, .end = SearchEnd::TrialsSpent};
  const std::vector<KnobValues> choices = untried(incumbent);
  std::optional<Proposal> proposal;
  if (const auto known = remembered(incumbent)) {
    proposal = Proposal{.knobs = *known, .source = Source::Remembered};
  } else if (choices.empty()) {
    return {.proposal = {}, .end = SearchEnd::Exhausted};
  } else if (const auto first = opening(incumbent)) {
    proposal = Proposal{.knobs = *first, .source = Source::Opening};
  } else {
    proposal = improvement(incumbent, choices);
  }
  if (!proposal) return {.proposal = {}, .end = SearchEnd::NothingToGain};
  CHECK(legal_.contains(proposal->knobs), "budget=", proposal->knobs.max_num_batched_tokens);
  ++trials_;
  proposed_.push_back(proposal->knobs);
  return {.proposal = proposal, .end = SearchEnd::TrialsSpent};
}

KnobValues Search::best(const KnobValues& incumbent) {
  fit();
  const GaussianProcessPoint focus = encode(incumbent, options_.load);
  score_->fit(focus);
  const auto lower_bound = [&](const KnobValues& knobs) {
    const Prediction prediction = score_->predict(encode(knobs, options_.load));
    return prediction.mean - std::sqrt(prediction.variance);
  };
  KnobValues result = incumbent;
  if (!score_->fitted()) return result;
  const Prediction own = score_->predict(focus);
  double bar = find(incumbent) ? std::max(lower_bound(incumbent), own.mean - 0.5 * std::sqrt(own.variance)) : -1e9;
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
