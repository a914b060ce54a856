// SPDX-License-Identifier: Apache-2.0
// The tuner's finished trials as read-only objects of the control API, and their table as kubectl prints it. Pure: what is shown
// comes in.
#pragma once

#include <array>
#include <nlohmann/json.hpp>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "daemon/control/engine_resource.h"
#include "daemon/control/status_error.h"
#include "tuner/tuner.h"

namespace rubato::control {

inline constexpr std::string_view trial_plural = "trials";
inline constexpr std::string_view trial_kind = "Trial";
/// What a fieldSelector may ask for.
inline constexpr std::array<std::string_view, 4> trial_fields{"metadata.name", "spec.engine", "status.outcome", "status.source"};

/// The engine that the trials are of.
struct EngineIdentity {
  std::string name;
  std::string uid;
};

/// In the order given; named `ENGINE-NUMBER`.
[[nodiscard]] std::vector<Json> trial_objects(std::span<const tuner::Trial> trials, const EngineIdentity& engine);
[[nodiscard]] Json trial_list(std::vector<Json> trials);
[[nodiscard]] Json trial_table(std::span<const Json> trials, IncludeObject include, WallTime now);

[[nodiscard]] StatusError trial_not_found(const std::string& name);

/// Latencies and attainment as the API and `rubatod explain --json` write them; `attainment` in percent.
[[nodiscard]] Json expected_json(const tuner::ExpectedOutcome& expected);
[[nodiscard]] Json measured_json(const tuner::Window& window);

}  // namespace rubato::control
