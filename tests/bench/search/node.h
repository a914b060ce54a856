// SPDX-License-Identifier: Apache-2.0
// A node that serves made-up traffic under virtual time while somebody moves its knobs: the live loop of the daemon (settle,
// measure, decide) against a Simulation.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "tests/bench/search/truth.h"
#include "tests/bench/search/workload.h"
#include "tuner/search_space.h"
#include "tuner/twin/simulation.h"

namespace rubato::study {

/// One H200 with an 8B model: 110 GB of KV, up to 512 sequences in a step.
[[nodiscard]] policies::LaneGroupLimits node_limits();
inline constexpr std::int32_t outstanding_max = 2048;

/// vLLM's: 2048 tokens, 256 sequences, decodes first.
[[nodiscard]] KnobValues default_settings();

/// Which policies may be chosen: all, or those without triage.
enum class Space : std::uint8_t { Full, Static };
[[nodiscard]] tuner::SearchSpace search_space(Space space);
/// How live tuning is set in the study.
[[nodiscard]] TuningSpec tuning_spec();

/// What a controller wants to be made current, after having thought for so long.
struct Move {
  KnobValues knobs;
  Duration thinking{};
  std::string reason{};
};

/// Where a run stands, for controllers that look more often than once a window.
struct NodeView {
  TimePoint now;
  const tuner::Simulation& node;
  bool window_open = false;
};

/// Whoever moves the knobs. Asked at ticks and after windows; a move settles before the next window opens.
class Controller {
 public:
  virtual ~Controller() = default;
  [[nodiscard]] virtual Duration tick_period() const { return std::chrono::seconds(1); }
  virtual std::optional<Move> on_tick(const NodeView& /*view*/) { return std::nullopt; }
  virtual std::optional<Move> on_window(const tuner::Window& /*window*/) { return std::nullopt; }

  /// Whether it is to be told of steps, arrivals and ends.
  [[nodiscard]] virtual bool listens() const { return false; }
  virtual void on_step(const tuner::StepSample& /*sample*/) {}
  virtual void on_arrival(SequenceId /*id*/, const tuner::TrafficRequest& /*request*/) {}
  virtual void on_end(SequenceId /*id*/, TimePoint /*now*/, const tuner::SimulatedRequest& /*request*/) {}
};

/// Never moves.
class Still final : public Controller {};

struct Change {
  TimePoint at;
  KnobValues knobs;
  std::string reason;
};

struct NodeOptions {
  KnobValues initial;
  std::uint64_t seed = 1;
  Duration horizon{};                              // the controller works until then; what comes later is served all the same
  Duration slot = std::chrono::seconds(20);        // results are kept by these
  Duration drain_max = std::chrono::seconds(120);  // for requests of the horizon that still run at its end
};

/// Requests by the slot that they arrived in.
struct Slot {
  std::int32_t requests = 0;
  std::int32_t good = 0;
};

struct NodeRun {
  std::vector<Slot> slots;
  std::vector<Change> changes;  // the first is the initial settings at zero
  std::int64_t windows = 0;
  [[nodiscard]] std::int64_t requests() const;
  [[nodiscard]] std::int64_t good() const;
  [[nodiscard]] double attainment() const;
};

/// traffic starts at TimePoint{} and should go on for a while after the horizon, so that the end is like the rest.
[[nodiscard]] NodeRun run_node(std::span<const tuner::TrafficRequest> traffic, const tuner::StepCost& cost,
                               Controller& controller, const NodeOptions& options);

enum class Outcome : std::uint8_t { Good, Bad, Open };
/// Open: nothing is missed, and it has not ended.
[[nodiscard]] Outcome outcome_of(const tuner::SimulatedRequest& request, TimePoint now);

/// A run under settings that stay: the share of requests that arrived within [warm, warm + measured) and met their targets.
struct SteadyOptions {
  Duration warm = std::chrono::seconds(60);
  Duration measured = std::chrono::seconds(240);
  Duration after = std::chrono::seconds(60);  // traffic goes on for so long; who still runs then counts as good unless late
  std::uint64_t seed = 1;
  double floor = 0;  // a share below it need not be known
};
struct SteadyShare {
  double share = 0;
  bool exact = true;  // false: below the floor, and at most this
};
[[nodiscard]] SteadyShare steady_share(std::span<const tuner::TrafficRequest> traffic, const tuner::StepCost& cost,
                                       const KnobValues& knobs, const SteadyOptions& options);

}  // namespace rubato::study
