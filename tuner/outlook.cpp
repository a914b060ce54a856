// SPDX-License-Identifier: Apache-2.0
#include "tuner/outlook.h"

#include <algorithm>
#include <cmath>

#include "manifests/check.h"

namespace rubato::tuner {

namespace {

// Old evidence was gathered under a load and a machine state that only resemble the present ones.
constexpr double history_variance = 0.05;

// How far "about" reaches, as a part of the prior length scales: half an octave of budget.
constexpr double about_reach = 0.25;

}  // namespace

GaussianProcessPoint encode(const KnobValues& knobs, const LoadFeatures& load) {
  return {.numbers = {std::log2(std::max(1, knobs.max_num_batched_tokens)), std::log2(std::max(1, knobs.max_num_seqs)),
                      knobs.deadline_margin / 100.0, knobs.prefill_share / 100.0, std::log2(std::max(1, knobs.prefill_devices)),
                      load.rate, load.prompt, load.output},
          .categories = {static_cast<std::int32_t>(knobs.priority_policy), static_cast<std::int32_t>(knobs.mode)}};
}

GaussianProcessOptions process_options() {
  constexpr std::size_t policy = 0;
  constexpr std::size_t mode = 1;
  const auto disaggregated = static_cast<std::int32_t>(Mode::Disaggregated);
  // Octaves for budget, sequences, devices and load; fractions for margin and share, whose effect is known to be flat.
  return {.length_scales = {2.0, 4.0, 1.0, 0.5, 1.0, 1.0, 1.5, 1.5},
          .category_count = 2,
          .conditions = {{.number = 2, .category = policy, .value = static_cast<std::int32_t>(PriorityPolicy::Deadline)},
                         {.number = 3, .category = mode, .value = disaggregated},
                         {.number = 4, .category = mode, .value = disaggregated}},
          .output_scale = 0.8};
}

GaussianProcessOptions residual_process_options() {
  GaussianProcessOptions options = process_options();
  for (double& scale : options.length_scales) scale *= 2.0;
  options.category_correlation = 0.8;
  options.peculiar_share = 0.25;
  options.output_scale = 0.25;
  options.prior_mean = [](const GaussianProcessPoint&) { return 0.0; };
  return options;
}

Outlook::Outlook(const LoadFeatures& load, std::vector<Expected> expected)
    : load_(load),
      expected_(std::move(expected)),
      score_(expected_.empty() ? process_options() : residual_process_options()),
      attainment_(expected_.empty() ? process_options() : residual_process_options()) {}

const Expected* Outlook::expected(const KnobValues& knobs) const {
  const auto found =
      std::find_if(expected_.begin(), expected_.end(), [&](const Expected& one) { return act_alike(one.knobs, knobs); });
  return found == expected_.end() ? nullptr : &*found;
}

double Outlook::expected_about(const KnobValues& knobs) const {
  const GaussianProcessOptions options = process_options();
  const CovarianceShape shape{
      .length_scales = options.length_scales, .category_count = options.category_count, .conditions = options.conditions};
  const GaussianProcessPoint here = encode(knobs, load_);
  double sum = 0;
  double weights = 0;
  for (const Expected& one : expected_) {
    const double distance = squared_distance(shape, here, encode(one.knobs, load_)) / (about_reach * about_reach);
    const double weight = std::exp(-0.5 * distance);
    sum += weight * one.score;
    weights += weight;
  }
  return weights > 0 ? sum / weights : 0.0;
}

void Outlook::learn_past(const PastTrial& past) {
  CHECK(expected_.empty(), "expected=", expected_.size());
  const GaussianProcessPoint point = encode(past.knobs, past.load);
  const NoisyValue known_score = score(past.evidence);
  const NoisyValue known_attainment = transformed_attainment(past.evidence);
  score_.observe(point, known_score.value, known_score.variance + history_variance);
  attainment_.observe(point, known_attainment.value, known_attainment.variance + history_variance);
}

void Outlook::learn(const KnobValues& knobs, const Evidence& evidence) {
  const NoisyValue known_score = score(evidence);
  const NoisyValue known_attainment = transformed_attainment(evidence);
  const GaussianProcessPoint point = encode(knobs, load_);
  if (expected_.empty()) {
    score_.observe(point, known_score.value, known_score.variance);
    attainment_.observe(point, known_attainment.value, known_attainment.variance);
    return;
  }
  const Expected* one = expected(knobs);
  if (!one) {
    direct_.push_back({knobs,
                       {.score = {known_score.value, known_score.variance},
                        .attainment = {known_attainment.value, known_attainment.variance}}});
    return;
  }
  // Few requests, all good, do not reach the top of the scale, and that is no fault of the expectation: it is compared as if it
  // had been measured on as many.
  const double comparable = transformed_share(one->attainment, std::max(1, evidence.judged));
  const double smoothing = comparable - transformed_share(one->attainment);
  score_.observe(point, known_score.value - (one->score + smoothing), known_score.variance + one->variance);
  attainment_.observe(point, known_attainment.value - comparable, known_attainment.variance + one->variance);
}

void Outlook::fit(const KnobValues& focus) {
  const GaussianProcessPoint point = encode(focus, load_);
  score_.fit(point);
  attainment_.fit(point);
}

std::optional<Outcome> Outlook::of(const KnobValues& knobs) const {
  const GaussianProcessPoint point = encode(knobs, load_);
  Outcome result;
  if (expected_.empty()) {
    result = {.score = score_.predict(point), .attainment = attainment_.predict(point)};
    return result;
  }
  if (const Expected* one = expected(knobs)) {
    result = {.score = score_.predict(point), .attainment = attainment_.predict(point)};
    result.score.mean += one->score;
    result.attainment.mean += transformed_share(one->attainment);
    return result;
  }
  const auto known = std::find_if(direct_.begin(), direct_.end(), [&](const Direct& one) { return act_alike(one.knobs, knobs); });
  return known == direct_.end() ? std::nullopt : std::optional(known->outcome);
}

}  // namespace rubato::tuner
