// SPDX-License-Identifier: Apache-2.0
#include "tuner/twin/law_cost.h"

#include <algorithm>
#include <utility>

#include "manifests/check.h"

namespace rubato::tuner {

namespace {

constexpr std::int32_t share_max = 100;

}  // namespace

LawCost::LawCost(std::shared_ptr<const StepLaws> laws, std::int32_t lanes) : laws_(std::move(laws)) {
  CHECK(laws_->observation_count() > 0 && lanes >= 1, "lanes=", lanes);
  found_.reserve(static_cast<std::size_t>(lanes) * (share_max + 1));
  for (std::int32_t lane = 0; lane < lanes; ++lane) {
    for (std::int32_t share = 0; share <= share_max; ++share) found_.push_back(laws_->find(lane, std::max(1, share)));
  }
}

const StepLaws::Found& LawCost::found(LaneIndex lane, std::int32_t share_percent) const {
  const std::int32_t share = std::clamp(share_percent, 1, share_max);
  return found_.at(static_cast<std::size_t>(lane.value) * (share_max + 1) + static_cast<std::size_t>(share));
}

Duration LawCost::duration(const SimulatedStep& step) const {
  const StepLaws::Found& law = found(step.lane, step.share_percent);
  const Duration duration = law.law->quantile(*step.features, step.bucket, step.draw);
  return law.scale == 1.0 ? duration : std::max(Duration(1), from_seconds(to_seconds(duration) * law.scale));
}

const policies::StepTimeModel* LawCost::step_time(LaneIndex lane) const {
  return &found(lane, share_max).law->model();
}

}  // namespace rubato::tuner
