// SPDX-License-Identifier: Apache-2.0
// How long steps take here: drives a loaded model that serves nothing for some seconds, over a spread of budgets, prompt lengths
// and batch sizes, and learns from every step. For planning without a calibration file.
#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include "daemon/model_loading.h"
#include "manifests/engine_spec.h"
#include "manifests/result.h"
#include "policies/time.h"
#include "tuner/twin/step_law.h"

namespace rubato {

struct MeasurementOptions {
  Duration length = std::chrono::seconds(5);  // of running steps; setting up step shapes comes on top
  std::uint64_t seed = 1;
  std::function<TimePoint()> now;  // steady
};

/// Mode Chunked: every lane that mixes, one step after another. How two lanes of one device slow each other is not measured: the
/// laws derive it from the share. At least one step of each lane is run. Errors: the backend's (building shapes, a broken
/// device).
[[nodiscard]] Result<tuner::StepLaws> measure_steps(LoadedModel& model, const KnobsSpec& knobs,
                                                    const MeasurementOptions& options);

}  // namespace rubato
