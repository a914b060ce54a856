// SPDX-License-Identifier: Apache-2.0
// The engine's conditions as a pure function of snapshots: what serving, the manifest, the tuner and the override say now. Who
// takes the snapshots and when is the Reconciler's business.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "daemon/control/wall_time.h"
#include "manifests/engine_spec.h"
#include "manifests/result.h"
#include "tuner/tuner.h"
#include "tuner/twin/twin.h"

namespace rubato::control {

enum class ConditionStatus : std::uint8_t { True, False, Unknown };

/// metav1.Condition. last_transition moves only with status.
struct Condition {
  std::string type;
  ConditionStatus status = ConditionStatus::Unknown;
  std::string reason;  // never empty
  std::string message;
  std::int64_t observed_generation = 0;
  WallTime last_transition;

  friend bool operator==(const Condition&, const Condition&) = default;
};

[[nodiscard]] std::string_view to_string(ConditionStatus status);

/// Can it serve? Never: does it meet its objectives. Tied to load, readiness would take all nodes out at once.
struct ServingHealth {
  bool loaded = false;
  bool draining = false;
  bool stalled = false;     // a step of some lane does not end, or work waits and no step has ended for long
  bool step_stuck = false;  // of these the first: other lanes may go on meanwhile
  std::optional<Error> failure{};
};

struct ConditionInputs {
  std::int64_t generation = 0;
  ServingHealth serving{};
  std::optional<std::string> manifest_error{};  // why what is on disk now was refused
  std::vector<std::string> restart_required{};  // fields in which the manifest differs from what was started
  ObjectivesSpec objectives{};
  std::optional<tuner::Window> window{};  // the last closed one under these objectives
  bool tuning_enabled = false;
  std::optional<tuner::TunerStatus> tuner{};
  std::optional<tuner::TwinStatus> twin{};
  std::vector<std::string> pins{};  // `maxNumBatchedTokens=256`
  std::optional<WallTime> pins_expire{};
};

/// Ready, ManifestValid, ObjectivesMet, Tuning, TwinTrusted, Overridden: always all, in this order.
[[nodiscard]] std::vector<Condition> compute_conditions(const ConditionInputs& inputs, std::span<const Condition> previous,
                                                        WallTime now);

}  // namespace rubato::control
