// SPDX-License-Identifier: Apache-2.0
// The tuning loop's door to the control side: what may move, what is wanted, and how new values become current. Implemented by
// the Reconciler, which merges the loop's proposals with the manifest, the API and the override; the loop never calls
// Serving::apply itself.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "manifests/engine_spec.h"
#include "manifests/result.h"
#include "tuner/regimes.h"
#include "tuner/tuner.h"
#include "tuner/twin/twin.h"

namespace rubato::control {

/// Everything the tuning loop must know. revision grows whenever what may move or what is wanted has changed, but not for the
/// loop's own proposals: compare it before each window and call Tuner::reconfigure when it moved. tuning.enabled is false while
/// nothing may move.
struct TuningInput {
  std::uint64_t revision = 0;
  tuner::SearchSpace space;  // base holds the values that are effective now; bounds already respect what start-up allocated
  ObjectivesSpec objectives;
  TuningSpec tuning;
};

/// What the tuning loop tells status, metrics and events after each window.
struct TuningReport {
  tuner::TunerStatus status;
  std::vector<tuner::Trial> trials;      // newest first
  std::optional<tuner::Window> window;   // the last closed one
  std::vector<tuner::Regime> regimes{};  // Tuner::regimes()
  std::string model_key{};               // whose regimes they are
  std::optional<tuner::TwinStatus> twin{};
  Duration twin_cpu{};               // CPU time of the decisions in which the twin simulated, since the start
  std::int32_t twin_core_percent{};  // that it keeps to
  std::uint64_t feed_dropped = 0;    // arrivals, starts, ends and steps that it never heard of, since the start
};

/// Thread-safe. No call waits for a client or for the lane; a call may wait for a short critical section of another one.
class TuningTarget {
 public:
  virtual ~TuningTarget() = default;

  [[nodiscard]] virtual TuningInput tuning_input() = 0;

  /// Makes these values current: pinned knobs keep their pinned values, the rest must lie within tuning_input().space (else
  /// InvalidArgument and nothing changes). Unavailable: tuning is off. Returns the number of the settings that are current from
  /// the next step on; it is that of the running settings when nothing differs. reason (CamelCase, few kinds) and message become
  /// an event.
  [[nodiscard]] virtual Result<std::uint64_t> propose(const KnobValues& knobs, const std::string& reason,
                                                      const std::string& message) = 0;

  virtual void report(const TuningReport& report) = 0;
};

}  // namespace rubato::control
