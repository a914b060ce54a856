// SPDX-License-Identifier: Apache-2.0
// What a simulation keeps between events. Private to tuner/twin/. Requests and their tokens are in simulation_requests.cpp, time
// and steps in simulation.cpp.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <optional>
#include <vector>

#include "policies/step_shapes.h"
#include "tuner/twin/simulation.h"
#include "tuner/window_cut.h"

namespace rubato::tuner {

/// The nearest-rank 99th percentile of a request's gaps, exact: of n gaps it is the (n / 100 + 1)th largest, so that only that
/// many of the largest have to be kept.
class LargestGaps {
 public:
  /// gaps_max: most that will come.
  void begin(std::int32_t gaps_max);
  void add(Duration gap) {
    ++count_;
    if (kept_max_ == 1) {
      largest_ = gap > largest_ ? gap : largest_;
    } else if (kept_.size() < kept_max_ || gap > kept_.front()) {
      keep(gap);
    }
  }
  /// Zero without any.
  [[nodiscard]] Duration percentile_99() const;

 private:
  void keep(Duration gap);

  std::int32_t count_ = 0;
  std::size_t kept_max_ = 1;
  Duration largest_{};
  std::vector<Duration> kept_;  // a heap, the smallest on top; unused where one is enough
};

struct Simulation::State {
  State(const SimulationOptions& options_in, const StepCost& cost_in);

  /// A request that the lane group has.
  struct Running {
    TrafficRequest request;
    WindowCut::Place place;
    std::optional<Duration> ttft{};
    TimePoint last_token{};
    std::int32_t sampled = 0;
    bool live = false;
    LargestGaps gaps;
  };
  /// A step that runs. Its share of the device changes when the device's other lane begins or ends one.
  struct OpenStep {
    const policies::StepPlan* plan = nullptr;  // null: none runs
    std::optional<std::int32_t> bucket{};
    double draw = 0.5;
    TimePoint begin{};
    TimePoint end{};
    TimePoint share_since{};
    std::int32_t share_percent = 100;
    std::int32_t contended_percent = 100;  // its share while the other lane is in a step, by the settings that it began under
    Duration whole{};                      // at this share, from its begin to its end
    double left = 1;                       // of its work, at share_since
    std::int32_t longest_share = 100;      // that it had for most of its time so far
    Duration longest{};
  };
  struct OpenCopy {
    std::uint64_t epoch = 0;
    TimePoint end{};
  };

  // Requests (simulation_requests.cpp).
  void add(const TrafficRequest& request);
  void arrive(const TrafficRequest& request);
  void reject(const TrafficRequest& request);
  /// True when the token was the request's last.
  [[nodiscard]] bool take_token(std::uint32_t slot);
  void end(std::uint32_t slot);
  [[nodiscard]] SimulatedRequest result_of(const Running& running) const;
  void keep_result(const SimulatedRequest& result);
  /// Ids hold the slot, so that a row's request is found without a search; what stands above it only grows.
  [[nodiscard]] static std::uint32_t slot_of(SequenceId id) { return static_cast<std::uint32_t>(id.value & slot_mask); }

  // Time and steps (simulation.cpp).
  bool run_until(TimePoint until, const std::function<bool()>& go_on);
  void apply(const KnobValues& knobs);
  void finish_due();
  void ask_lanes();
  void begin_copy();
  void begin_step(LaneIndex lane, const policies::StepPlan& plan);
  void end_step(LaneIndex lane);
  void note_share(OpenStep& step) const;
  void use_share(LaneIndex lane, std::int32_t percent);
  void use_shares();
  [[nodiscard]] Duration duration_of(LaneIndex lane, const OpenStep& step) const;
  [[nodiscard]] std::optional<TimePoint> next_event() const;
  void choose_buckets();
  [[nodiscard]] std::size_t lane_count() const { return open.size(); }
  [[nodiscard]] bool lanes_share_a_device() const { return options.limits.lanes_per_device == 2; }
  [[nodiscard]] bool any_open() const;

  static constexpr std::uint64_t slot_bits = 24;
  static constexpr std::uint64_t slot_mask = (1ULL << slot_bits) - 1;
  static constexpr std::size_t results_max = 1 << 20;

  const SimulationOptions options;
  const StepCost& cost;
  policies::LaneGroup group;
  WindowCut cut;
  TimePoint now{};
  KnobValues knobs;
  std::uint64_t settings_number = 1;
  policies::StepBuckets buckets;

  std::deque<TrafficRequest> coming;
  std::vector<Running> running;  // by slot
  std::vector<std::uint32_t> free_slots;
  std::uint64_t next_id = 1;
  std::int32_t outstanding = 0;
  std::deque<SimulatedRequest> results;

  std::vector<OpenStep> open;                      // by lane
  std::vector<std::optional<std::uint64_t>> seen;  // group.changes() when the lane was last asked in vain
  std::vector<policies::RowOutcome> outcomes;
  std::optional<OpenCopy> copy;
  std::optional<TimePoint> look_again;  // nothing is on its way, and yet the group has sequences
  const std::function<void(const StepSample&)>* on_step = nullptr;
  std::uint64_t steps = 0;
  std::int32_t steps_since_asked = 0;
};

}  // namespace rubato::tuner
