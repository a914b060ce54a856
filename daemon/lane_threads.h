// SPDX-License-Identifier: Apache-2.0
// The one implementation of Serving: a thread per lane that runs its steps, books every token's time and tells observers and
// sinks, and one that copies blocks between devices.
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "daemon/observer.h"
#include "daemon/serving.h"
#include "engine/backend.h"
#include "engine/prefix_hash.h"
#include "engine/shape_builder.h"

namespace rubato {

struct LaneThreadsOptions {
  policies::LaneGroupLimits limits;
  KnobValues initial;
  ObjectivesSpec objectives;
  std::vector<Observer*> observers;  // must outlive the threads
  std::string backend_description;
  std::int64_t kv_block_bytes = 0;
  std::int64_t state_bytes = 0;
  engine::PrefixKey prefix_key{};
  engine::ShapeBuilderOptions shapes{};
};

/// How many requests may be outstanding before the door refuses.
[[nodiscard]] std::int32_t outstanding_max(const policies::LaneGroupLimits& limits);
/// With a waiting queue that can never refuse what the door let in. The twin simulates under the same.
[[nodiscard]] policies::LaneGroupLimits serving_limits(const policies::LaneGroupLimits& limits);

/// The steady clock on the Timeline. The only place that reads it for serving.
[[nodiscard]] TimePoint steady_now();

/// Serving as its owner sees it.
class OwnedServing : public Serving {
 public:
  /// Refuses new work, ends every request that is left with a Failed event and joins the thread. Everything but submit() goes on
  /// answering. Idempotent; the destructor does it too.
  virtual void stop() = 0;
};

/// Takes the backends, one per lane, and starts the threads.
[[nodiscard]] std::unique_ptr<OwnedServing> start_lane_threads(std::vector<std::unique_ptr<engine::Backend>> backends,
                                                               const LaneThreadsOptions& options);

}  // namespace rubato
