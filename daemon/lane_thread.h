// SPDX-License-Identifier: Apache-2.0
// The one implementation of Serving: a thread that drives a lane, books every token's time and tells observers and sinks.
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "daemon/observer.h"
#include "daemon/serving.h"
#include "engine/backend.h"
#include "engine/shape_builder.h"

namespace rubato {

struct LaneThreadOptions {
  policies::SchedulerLimits limits;
  KnobValues initial;
  ObjectivesSpec objectives;
  std::vector<Observer*> observers;  // must outlive the lane thread
  std::string backend_description;
  engine::ShapeBuilderOptions shapes{};
};

/// The steady clock on the Timeline. The only place that reads it for serving.
[[nodiscard]] TimePoint steady_now();

/// Serving as its owner sees it.
class OwnedServing : public Serving {
 public:
  /// Refuses new work, ends every request that is left with a Failed event and joins the thread. Everything but submit() goes on
  /// answering. Idempotent; the destructor does it too.
  virtual void stop() = 0;
};

/// Takes the backend and starts the thread.
[[nodiscard]] std::unique_ptr<OwnedServing> start_lane_thread(std::unique_ptr<engine::Backend> backend,
                                                              const LaneThreadOptions& options);

}  // namespace rubato
