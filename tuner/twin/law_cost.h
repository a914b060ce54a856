// SPDX-License-Identifier: Apache-2.0
// The cost of simulated steps by learnt laws: the twin's view of the device.
#pragma once

#include <memory>
#include <vector>

#include "tuner/twin/simulation.h"
#include "tuner/twin/step_law.h"

namespace rubato::tuner {

/// Each step takes the quantile at its draw of its lane's law: the same draw under other settings is the same luck. Finds the law
/// in constant time.
class LawCost final : public StepCost {
 public:
  /// laws must know at least one step.
  LawCost(std::shared_ptr<const StepLaws> laws, std::int32_t lanes);

  [[nodiscard]] Duration duration(const SimulatedStep& step) const override;
  [[nodiscard]] const policies::StepTimeModel* step_time(LaneIndex lane) const override;

 private:
  [[nodiscard]] const StepLaws::Found& found(LaneIndex lane, std::int32_t share_percent) const;

  std::shared_ptr<const StepLaws> laws_;
  std::vector<StepLaws::Found> found_;  // by lane and share
};

}  // namespace rubato::tuner
