// SPDX-License-Identifier: Apache-2.0
#include "tuner/regimes.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <set>

#include "manifests/check.h"
#include "tuner/guard.h"

namespace rubato::tuner {

namespace {

constexpr std::size_t none = static_cast<std::size_t>(-1);
// A load's mean follows a slow drift: no visit weighs less than one in this many.
constexpr std::int32_t visits_weight_max = 32;
// Means move; two that came this near, as a share of same_distance, have become one regime.
constexpr double joining_share = 0.5;

std::int32_t scaled(std::int32_t count, double share) {
  return static_cast<std::int32_t>(std::lround(count * share));
}

Evidence shrunk(const Evidence& evidence, double share) {
  Evidence result = evidence;
  result.windows = evidence.windows > 0 ? std::max(1, scaled(evidence.windows, share)) : 0;
  result.judged = scaled(evidence.judged, share);
  result.good = std::min(result.judged, scaled(evidence.good, share));
  result.ttft_misses = std::min(result.judged, scaled(evidence.ttft_misses, share));
  result.itl_misses = std::min(result.judged, scaled(evidence.itl_misses, share));
  return result;
}

Evidence bounded(const Evidence& evidence) {
  const double most = RegimeMemory::evidence_judged_max;
  return evidence.judged > most ? shrunk(evidence, most / evidence.judged) : evidence;
}

double mean(double a, double weight_a, double b, double weight_b) {
  return (a * weight_a + b * weight_b) / (weight_a + weight_b);
}

RegimeLoad mean(const RegimeLoad& a, double weight_a, const RegimeLoad& b, double weight_b) {
  return {
      {mean(a.features.rate, weight_a, b.features.rate, weight_b), mean(a.features.prompt, weight_a, b.features.prompt, weight_b),
       mean(a.features.output, weight_a, b.features.output, weight_b)},
      mean(a.burstiness, weight_a, b.burstiness, weight_b)};
}

double half_lives(std::int64_t age, std::int64_t half_life) {
  return static_cast<double>(std::max<std::int64_t>(0, age)) / static_cast<double>(half_life);
}

/// What would be lost with it. Requests count by their logarithm: a hundred tell nearly as much as a thousand.
double worth(const Regime& regime, std::int64_t now, std::int64_t half_life) {
  return std::log2(1.0 + regime.evidence.judged) * std::exp2(-half_lives(now - regime.last_seen, half_life));
}

}  // namespace

double regime_distance(const RegimeLoad& a, const RegimeLoad& b) {
  constexpr double burstiness_weight = 0.5;
  constexpr double burstiness_min = 0.1;
  const double burst = std::log2(std::max(a.burstiness, burstiness_min)) - std::log2(std::max(b.burstiness, burstiness_min));
  return std::hypot(load_distance(a.features, b.features), burstiness_weight * burst);
}

Evidence aged(const Evidence& evidence, std::int64_t age, std::int64_t half_life) {
  return age > 0 ? shrunk(evidence, std::exp2(-half_lives(age, half_life))) : evidence;
}

RegimeMemory::RegimeMemory(const RegimeOptions& options) : options_(options) {
  CHECK(options.count_max > 0 && options.same_distance > 0 && options.half_life > 0, "count_max=", options.count_max,
        " same_distance=", options.same_distance, " half_life=", options.half_life);
}

std::size_t RegimeMemory::nearest(const RegimeLoad& load, const ObjectivesSpec& objectives, double within) const {
  std::size_t best = none;
  for (std::size_t i = 0; i < regimes_.size(); ++i) {
    const double distance = regime_distance(regimes_[i].load, load);
    if (distance > within || regimes_[i].objectives != objectives) continue;
    best = i;
    within = distance;
  }
  return best;
}

const Regime* RegimeMemory::recognise(const RegimeLoad& load, const ObjectivesSpec& objectives, std::int64_t now) const {
  const Regime* best = nullptr;
  double within = options_.same_distance;
  for (const Regime& regime : regimes_) {
    const double distance = regime_distance(regime.load, load);
    if (distance > within || regime.objectives != objectives) continue;
    if (aged(regime.evidence, now - regime.measured, options_.half_life).judged < evidence_judged_min) continue;
    best = &regime;
    within = distance;
  }
  return best;
}

Regime& RegimeMemory::add(Regime regime, std::int64_t now) {
  if (regimes_.size() >= options_.count_max) {
    const auto least = std::min_element(regimes_.begin(), regimes_.end(), [&](const Regime& a, const Regime& b) {
      return worth(a, now, options_.half_life) < worth(b, now, options_.half_life);
    });
    regimes_.erase(least);
  }
  regime.number = ++last_number_;
  regime.evidence = bounded(regime.evidence);
  regimes_.push_back(std::move(regime));
  return regimes_.back();
}

void RegimeMemory::take_better(Regime& regime, const KnobValues& knobs, const Evidence& evidence, std::int64_t measured,
                               std::int64_t now) const {
  const Evidence held = aged(regime.evidence, now - regime.measured, options_.half_life);
  const Evidence news = aged(evidence, now - measured, options_.half_life);
  bool take = false;
  switch (compare(news, held)) {
    case Comparison::Better:
      take = news.judged >= evidence_judged_min || held.judged < evidence_judged_min;
      break;
    case Comparison::Similar:
      take = news.judged > held.judged;
      break;
    case Comparison::Worse:
      take = held.judged < evidence_judged_min && news.judged >= evidence_judged_min;  // what was known is too old to be known
      break;
  }
  if (!take) return;
  regime.best = knobs;
  regime.evidence = bounded(evidence);
  regime.measured = measured;
}

const Regime& RegimeMemory::learn(const RegimeLoad& load, const KnobValues& knobs, const Evidence& evidence,
                                  const ObjectivesSpec& objectives, std::int64_t now) {
  CHECK(
      std::isfinite(regime_distance(load, {})) && evidence.judged >= 0 && evidence.good >= 0 && evidence.good <= evidence.judged,
      "judged=", evidence.judged, " good=", evidence.good);
  std::size_t index = nearest(load, objectives, options_.same_distance);
  if (index == none) {
    return add({.load = load,
                .best = knobs,
                .evidence = evidence,
                .objectives = objectives,
                .visits = 1,
                .last_seen = now,
                .measured = now},
               now);
  }
  Regime& regime = regimes_[index];
  regime.load = mean(regime.load, std::min(regime.visits, visits_weight_max - 1), load, 1);
  regime.visits = std::min(regime.visits, std::numeric_limits<std::int32_t>::max() - 1) + 1;
  regime.last_seen = std::max(regime.last_seen, now);
  if (knobs == regime.best) {
    regime.evidence = bounded(pooled(aged(regime.evidence, now - regime.measured, options_.half_life), evidence));
    regime.measured = std::max(regime.measured, now);
  } else {
    take_better(regime, knobs, evidence, now, now);
  }
  index = join_neighbour(index, now);
  return regimes_[index];
}

/// The regime's load has moved: when that brought it to another one, both become one. Returns where it is then.
std::size_t RegimeMemory::join_neighbour(std::size_t index, std::int64_t now) {
  for (std::size_t i = 0; i < regimes_.size(); ++i) {
    if (i == index || regimes_[i].objectives != regimes_[index].objectives) continue;
    if (regime_distance(regimes_[i].load, regimes_[index].load) > joining_share * options_.same_distance) continue;
    Regime& stays = regimes_[std::min(i, index)];
    const Regime goes = regimes_[std::max(i, index)];
    const auto weight = [](const Regime& regime) { return std::clamp(regime.visits, 1, visits_weight_max); };
    stays.load = mean(stays.load, weight(stays), goes.load, weight(goes));
    stays.visits = static_cast<std::int32_t>(
        std::min<std::int64_t>(std::int64_t{stays.visits} + goes.visits, std::numeric_limits<std::int32_t>::max()));
    stays.last_seen = std::max(stays.last_seen, goes.last_seen);
    if (goes.best == stays.best) {
      const Evidence held = aged(stays.evidence, now - stays.measured, options_.half_life);
      stays.evidence = bounded(pooled(held, aged(goes.evidence, now - goes.measured, options_.half_life)));
      stays.measured = now;
    } else {
      take_better(stays, goes.best, goes.evidence, goes.measured, now);
    }
    regimes_.erase(regimes_.begin() + static_cast<std::ptrdiff_t>(std::max(i, index)));
    return std::min(i, index);
  }
  return index;
}

void RegimeMemory::load(std::vector<Regime> rows) {
  regimes_ = std::move(rows);
  std::int64_t latest = 0;
  for (const Regime& regime : regimes_) latest = std::max(latest, regime.last_seen);
  if (regimes_.size() > options_.count_max) {
    std::stable_sort(regimes_.begin(), regimes_.end(), [&](const Regime& a, const Regime& b) {
      return worth(a, latest, options_.half_life) > worth(b, latest, options_.half_life);
    });
    regimes_.erase(regimes_.begin() + static_cast<std::ptrdiff_t>(options_.count_max), regimes_.end());
  }
  last_number_ = 0;
  for (const Regime& regime : regimes_) last_number_ = std::max(last_number_, regime.number);
  std::set<std::int64_t> taken;
  for (Regime& regime : regimes_) {
    regime.evidence = bounded(regime.evidence);
    if (regime.number <= 0 || !taken.insert(regime.number).second) regime.number = ++last_number_;
  }
}

void RegimeMemory::merge(std::span<const Regime> others, std::int64_t now) {
  for (const Regime& other : others) {
    Regime news = other;
    // A node whose clock is ahead must not make its news last longer.
    news.last_seen = std::min(news.last_seen, now);
    news.measured = std::min(news.measured, now);
    const std::size_t index = nearest(news.load, news.objectives, options_.same_distance);
    if (index == none) {
      add(std::move(news), now);
      continue;
    }
    Regime& known = regimes_[index];
    known.visits = std::max(known.visits, news.visits);
    known.last_seen = std::max(known.last_seen, news.last_seen);
    if (news.best != known.best) {
      take_better(known, news.best, news.evidence, news.measured, now);
    } else if (aged(news.evidence, now - news.measured, options_.half_life).judged >
               aged(known.evidence, now - known.measured, options_.half_life).judged) {
      known.evidence = bounded(news.evidence);
      known.measured = news.measured;
    }
  }
}

}  // namespace rubato::tuner
