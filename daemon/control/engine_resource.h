// SPDX-License-Identifier: Apache-2.0
// The Engine object as clients see it: metadata, spec and status as JSON, and its row of the table that kubectl prints. Pure:
// everything shown comes in.
#pragma once

#include <cstdint>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "daemon/control/conditions.h"
#include "daemon/control/control_state.h"
#include "daemon/control/table.h"
#include "daemon/serving.h"
#include "tuner/tuner.h"
#include "tuner/twin/twin.h"

namespace rubato::control {

/// The twin and what it costs.
struct TwinUse {
  tuner::TwinStatus status;
  Duration cpu{};
  std::int32_t core_percent = 0;
};

struct StatusInputs {
  std::int64_t observed_generation = 0;
  std::uint64_t settings_number = 0;
  std::vector<Condition> conditions;
  std::shared_ptr<const ServingStatus> serving;  // a sample (lane_watch.h); null: the model is not loaded
  std::optional<tuner::TunerStatus> tuner;
  std::vector<tuner::Trial> trials;
  std::optional<tuner::Window> window;
  std::optional<TwinUse> twin{};
};

[[nodiscard]] Json engine_status(const ControlState& state, const StatusInputs& inputs);
[[nodiscard]] Json engine_object(const ControlState& state, const Json& status, const std::string& resource_version);
[[nodiscard]] Json engine_list(const std::vector<Json>& engines, const std::string& resource_version);

[[nodiscard]] Json engine_table(const std::vector<Json>& engines, const std::string& resource_version, IncludeObject include,
                                WallTime now);

}  // namespace rubato::control
