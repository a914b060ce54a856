// SPDX-License-Identifier: Apache-2.0
// See truth.h.
#include "tests/bench/search/truth.h"

#include <algorithm>
#include <cmath>

namespace rubato::study {

const std::vector<TruthKind>& all_truths() {
  static const std::vector<TruthKind> kinds{TruthKind::Nominal,  TruthKind::Faster, TruthKind::Slower, TruthKind::NoAttention,
                                            TruthKind::Overhead, TruthKind::Drift,  TruthKind::Quirk};
  return kinds;
}

std::string name_of(TruthKind kind) {
  switch (kind) {
    case TruthKind::Nominal:
      return "nominal";
    case TruthKind::Faster:
      return "faster";
    case TruthKind::Slower:
      return "slower";
    case TruthKind::NoAttention:
      return "noattention";
    case TruthKind::Overhead:
      return "overhead";
    case TruthKind::Drift:
      return "drift";
    case TruthKind::Quirk:
      return "quirk";
  }
  return {};
}

std::optional<TruthKind> truth_named(const std::string& name) {
  for (const TruthKind kind : all_truths()) {
    if (name_of(kind) == name) return kind;
  }
  return std::nullopt;
}

Roofline roofline(TruthKind kind) {
  Roofline truth;
  switch (kind) {
    case TruthKind::Nominal:
      break;
    case TruthKind::Faster:
      truth.factor = 0.7;
      break;
    case TruthKind::Slower:
      truth.factor = 1.3;
      break;
    case TruthKind::NoAttention:
      truth.pair = 0;
      truth.kv = 0;
      break;
    case TruthKind::Overhead:
      truth.launch += 2e-3;
      break;
    case TruthKind::Drift:
      truth.drift_per_hour = 0.2;
      break;
    case TruthKind::Quirk:
      truth.quirk_bucket = 1024;
      truth.quirk_factor = 1.6;
      break;
  }
  return truth;
}

double normal_quantile(double probability) {
  // Abramowitz and Stegun, Handbook of Mathematical Functions, 26.2.23.
  const double tail = std::clamp(std::min(probability, 1 - probability), 1e-12, 0.5);
  const double t = std::sqrt(-2 * std::log(tail));
  const double x = t - (2.515517 + t * (0.802853 + t * 0.010328)) / (1 + t * (1.432788 + t * (0.189269 + t * 0.001308)));
  return probability < 0.5 ? -x : x;
}

Duration Truth::duration(const tuner::SimulatedStep& step) const {
  const policies::StepFeatures& features = *step.features;
  const std::int32_t tokens = step.bucket.value_or(features.tokens);
  double seconds = roofline_.launch + std::max(roofline_.weights, roofline_.token * tokens) +
                   roofline_.pair * features.attention + roofline_.kv * features.context + roofline_.row * features.decode_rows;
  if (roofline_.quirk_bucket > 0 && tokens <= roofline_.quirk_bucket && tokens > roofline_.quirk_bucket * 7 / 8) {
    seconds *= roofline_.quirk_factor;
  }
  // Up for an hour, down for the next, so that a day stays comparable.
  const double hours = std::fmod(to_seconds(step.begin.time_since_epoch()) / 3600, 2.0);
  seconds *= 1 + roofline_.drift_per_hour * (hours < 1 ? hours : 2 - hours);
  seconds *= roofline_.factor * std::exp(roofline_.scatter * normal_quantile(step.draw));
  return from_seconds(seconds * 100 / step.share_percent);
}

}  // namespace rubato::study
