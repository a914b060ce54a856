// SPDX-License-Identifier: Apache-2.0
// What the twin and its studies keep. Private to tuner/twin/.
#pragma once

#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <tuple>
#include <vector>

#include "tuner/twin/law_cost.h"
#include "tuner/twin/twin.h"
#include "tuner/twin/twin_replay.h"

namespace rubato::tuner {

struct Twin::State {
  explicit State(const TwinOptions& options_in) : options(options_in), go_on([] { return true; }) {}

  TwinOptions options;
  bool enabled = true;
  std::function<bool()> go_on;
  std::deque<ObjectivesSpec> earlier;  // objectives that requests of the log may still carry
  TwinCorrection correction;
  double attainment_error = 0;  // recent root mean square
  std::deque<bool> off;         // of the last few checks: whether they were off
  bool distrusted = false;
  std::string check_message;
  std::uint64_t judged_settings = 0;  // of the last window that was checked
  TimePoint judged_since{};           // requests judged since
  TimePoint judged_end{};
  mutable TwinStatus status;
  std::shared_ptr<TwinCounts> counts = std::make_shared<TwinCounts>();

  [[nodiscard]] SimulationOptions simulation(const KnobValues& knobs) const;
  void learn(const TwinCheck& check, const Window& raw, std::int32_t judged);
  /// What would be attained with all latencies a little longer, and a little shorter.
  struct Attainments {
    double low = 0;
    double high = 0;
  };
  [[nodiscard]] bool is_off(const TwinCheck& check, const Attainments& predicted, std::int32_t judged) const;
  void note_check(const TwinCheck& check, bool was_off, std::int32_t judged);
};

/// Which settings act alike, as a key.
using KnobKey =
    std::tuple<PriorityPolicy, Mode, Reservation, std::int32_t, std::int32_t, std::int32_t, std::int32_t, std::int32_t>;
[[nodiscard]] KnobKey key_of(const KnobValues& knobs);

/// What has been simulated of one setting.
struct Looked {
  KnobValues knobs;
  Forecast forecast;
  std::vector<double> attainment;  // of each future
  std::vector<double> score;
  double depth = 1;  // of a glance: share of a future that it saw
};

struct TwinStudy::State {
  TwinOptions options;
  std::function<bool()> go_on;
  std::unique_ptr<LawCost> cost;
  TwinCorrection correction;
  double attainment_error = 0;
  std::vector<std::vector<TrafficRequest>> futures;
  Duration length{};
  Duration glance_length{};
  std::shared_ptr<TwinCounts> counts;
  std::map<KnobKey, Looked> forecasts;
  std::map<KnobKey, Looked> glances;
  bool cut_short = false;

  /// One future, or a part of it, under these settings. Empty when it was cut short.
  [[nodiscard]] std::optional<Judged> run(const KnobValues& knobs, std::size_t future, Duration until, std::int32_t misses_max);
  [[nodiscard]] const Looked* forecast(const KnobValues& knobs);
  /// hopeless_below: an attainment that a look may end early for when it can no longer be reached.
  [[nodiscard]] const Looked* glance(const KnobValues& knobs, double hopeless_below);
  [[nodiscard]] Looked summed(const KnobValues& knobs, const std::vector<Judged>& parts) const;
};

}  // namespace rubato::tuner
