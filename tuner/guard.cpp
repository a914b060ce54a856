// SPDX-License-Identifier: Apache-2.0
#include "tuner/guard.h"

#include <algorithm>
#include <cmath>

#include "manifests/check.h"
#include "tuner/describe.h"

namespace rubato::tuner {

namespace {

constexpr double missed_significance = 0.05;
constexpr double worse_z = 1.645;     // one in twenty, one-sided
constexpr double better_z = 1.282;    // one in ten: adopting a setting that is merely as good does no harm
constexpr double plausible_z = 0.84;  // one in five
constexpr double plateau_attainment = 0.05;
constexpr std::int32_t exact_count_max = 2000;

double difference_z(const NoisyValue& a, const NoisyValue& b) {
  return (a.value - b.value) / std::sqrt(std::max(1e-12, a.variance + b.variance));
}

}  // namespace

double binomial_at_most(std::int32_t successes, std::int32_t count, double probability) {
  CHECK(count >= 0 && probability >= 0 && probability <= 1, "count=", count, " probability=", probability);
  if (successes < 0) return 0.0;
  if (successes >= count || probability <= 0) return 1.0;
  if (probability >= 1) return 0.0;
  if (count > exact_count_max) {
    const double mean = count * probability;
    const double deviation = std::sqrt(mean * (1.0 - probability));
    return 0.5 * std::erfc(-(successes + 0.5 - mean) / deviation / std::sqrt(2.0));
  }
  const double log_total = std::lgamma(count + 1.0);
  double sum = 0;
  for (std::int32_t i = 0; i <= successes; ++i) {
    sum += std::exp(log_total - std::lgamma(i + 1.0) - std::lgamma(count - i + 1.0) + i * std::log(probability) +
                    (count - i) * std::log1p(-probability));
  }
  return std::min(1.0, sum);
}

Verdict judge(const Evidence& evidence, const ObjectivesSpec& objectives) {
  const double wanted = std::clamp(objectives.attainment / 100.0, 0.0, 1.0);
  if (evidence.good >= wanted * evidence.judged - 1e-9) return Verdict::Met;
  return binomial_at_most(evidence.good, evidence.judged, wanted) < missed_significance ? Verdict::Missed : Verdict::Unclear;
}

Comparison compare(const Evidence& trial, const Evidence& incumbent) {
  const double attainment_z = difference_z(transformed_attainment(trial), transformed_attainment(incumbent));
  const double score_z = difference_z(score(trial), score(incumbent));
  const bool better = score_z > better_z && trial.attainment() >= incumbent.attainment();
  if (attainment_z < -worse_z) return Comparison::Worse;
  // The latency part decides only where no attainment is left to tell settings apart, or together with it.
  const bool plateau = std::max(trial.attainment(), incumbent.attainment()) < plateau_attainment;
  if (score_z < -worse_z && (plateau || attainment_z < -plausible_z)) return Comparison::Worse;
  if (trial.saturated && !incumbent.saturated && attainment_z < better_z) return Comparison::Worse;
  return better ? Comparison::Better : Comparison::Similar;
}

std::string missed_target(const Evidence& evidence, const ObjectivesSpec& objectives) {
  const std::string ttft = "the TTFT target of " + milliseconds(objectives.ttft);
  const std::string itl = "the ITL target of " + milliseconds(objectives.itl);
  const double misses = evidence.ttft_misses + evidence.itl_misses;
  if (evidence.ttft_misses > 0.2 * misses && evidence.itl_misses > 0.2 * misses) return ttft + " and " + itl;
  return evidence.ttft_misses >= evidence.itl_misses ? ttft : itl;
}

}  // namespace rubato::tuner
