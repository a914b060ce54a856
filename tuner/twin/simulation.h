// SPDX-License-Identifier: Apache-2.0
// A node under virtual time: policies::LaneGroup, the very code that the engine runs, step by step against a given cost of steps.
// The twin runs it on what it has learnt, the studies on a made-up truth. Deterministic; shares nothing, so that several may run
// at once.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "manifests/settings.h"
#include "policies/lane_group.h"
#include "policies/step_time.h"
#include "tuner/tuner.h"
#include "tuner/twin/step_law.h"
#include "tuner/twin/traffic.h"

namespace rubato::tuner {

/// A step whose duration is asked for.
struct SimulatedStep {
  LaneIndex lane;
  std::int32_t share_percent = 100;  // of its device; 100 where the device's other lane runs no step
  const policies::StepFeatures* features = nullptr;
  std::optional<std::int32_t> bucket{};  // tokens of the shape that it runs in
  TimePoint begin;
  double draw = 0.5;  // uniform in (0, 1): the same for the same lane, step number and seed, whatever the settings
};

class StepCost {
 public:
  virtual ~StepCost() = default;
  /// Positive.
  [[nodiscard]] virtual Duration duration(const SimulatedStep& step) const = 0;
  /// What the schedulers' own step-time models know from the start; they learn on from duration() where learns() is true.
  [[nodiscard]] virtual const policies::StepTimeModel* step_time(LaneIndex /*lane*/) const { return nullptr; }
};

struct SimulationOptions {
  policies::LaneGroupLimits limits;
  KnobValues initial;
  std::uint64_t seed = 1;
  bool shapes = false;           // steps run in default_buckets() of the budget of the moment; else eagerly
  bool learns = true;            // the schedulers' step-time models learn from steps, as in the engine; false: they stay as given
  Duration handoff_per_block{};  // between devices
  std::int32_t outstanding_max = 0;  // more requests than this are rejected, as the daemon's door does; 0: never
};

/// What one request got.
struct SimulatedRequest {
  TrafficRequest request;
  std::optional<Duration> ttft{};  // none: no first token yet
  Duration itl_p99{};              // nearest rank over its own gaps so far; zero with fewer than two tokens
  bool ended = false;
  bool rejected = false;  // for outstanding_max, or as the lane group could never hold it
};

class Simulation {
 public:
  /// cost must outlive it.
  Simulation(const SimulationOptions& options, const StepCost& cost);
  ~Simulation();
  Simulation(const Simulation&) = delete;
  Simulation& operator=(const Simulation&) = delete;

  /// A request to come, not before now() nor before the one added last.
  void add(const TrafficRequest& request);
  /// Current for each lane from its next step on.
  void apply(const KnobValues& knobs);
  /// Runs until this time, or until go_on() is false (asked about every 64 steps; then it returns false at once).
  bool run_until(TimePoint until, const std::function<bool()>& go_on = {});

  [[nodiscard]] TimePoint now() const;
  [[nodiscard]] const KnobValues& knobs() const;
  [[nodiscard]] std::uint64_t steps() const;
  [[nodiscard]] std::int32_t waiting() const;
  [[nodiscard]] const policies::LaneGroup& group() const;

  /// Every executed step, for those who learn from it.
  std::function<void(const StepSample&)> on_step;

  /// As the daemon's latency windows: from open() on, requests that arrived at or after `since` are sampled and judged.
  void open(TimePoint since);
  [[nodiscard]] Window close();
  /// The open window so far; nothing is closed.
  [[nodiscard]] Window so_far() const;

  /// Requests that ended or were rejected since the last call, in that order; with unfinished, those under way too, in order of
  /// arrival. The last 2^20 are kept.
  [[nodiscard]] std::vector<SimulatedRequest> take_requests(bool unfinished);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace rubato::tuner
