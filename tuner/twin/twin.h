// SPDX-License-Identifier: Apache-2.0
// The twin: what the engine would do under other settings. It learns step times, keeps recent traffic, checks each of its
// predictions against what was measured under the current settings and corrects them, and says when it cannot be trusted. One
// question is one TwinStudy: candidates are compared under the same futures and the same noise.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "manifests/engine_spec.h"
#include "policies/lane_group.h"
#include "tuner/evidence.h"
#include "tuner/search_space.h"
#include "tuner/twin/simulation.h"
#include "tuner/twin/step_law.h"
#include "tuner/twin/traffic.h"

namespace rubato::tuner {

/// The latencies that predictions are checked by.
enum class TwinQuantile : std::uint8_t { TtftP50, TtftP99, ItlP50, ItlP99 };
inline constexpr std::size_t twin_quantile_count = 4;

/// What the twin expects of settings, over all futures of a study.
struct Forecast {
  Evidence evidence;                                    // summed over the futures, corrected
  double attainment = 0;                                // mean over the futures, 0..1
  double attainment_spread = 0;                         // standard deviation over them, with what past predictions were off by
  std::array<Duration, twin_quantile_count> latency{};  // corrected
  std::int32_t futures = 0;
};

/// log(measured / predicted) of each quantile, as learnt.
struct TwinCorrection {
  std::array<double, twin_quantile_count> log_bias{};
  std::array<double, twin_quantile_count> error{};  // recent mean of |log(measured / predicted)| after correction
  std::int32_t windows = 0;
};

/// A prediction and what came of it.
struct TwinCheck {
  std::array<Duration, twin_quantile_count> predicted{};  // corrected, before the window was learnt from
  std::array<Duration, twin_quantile_count> measured{};
  double attainment_predicted = 0;
  double attainment_measured = 0;
};

enum class TwinState : std::uint8_t {
  Off,       // spec.tuning.twin.enabled is false
  Learning,  // too few steps, requests or checks to answer
  Trusted,
  Distrusted,  // its predictions of the current settings are off; plain search takes over until they hold again
};

struct TwinStatus {
  TwinState state = TwinState::Learning;
  std::string message;      // one sentence with the numbers that led to it
  std::uint64_t steps = 0;  // learnt from
  double step_error = 0;    // relative, see StepLaws
  TwinCorrection correction;
  std::optional<TwinCheck> last_check{};
  std::uint64_t simulations_total = 0;
  std::uint64_t aborted_total = 0;  // studies cut short, because serving needed the machine or time was up
  Duration simulated_total{};       // virtual time
};

struct TwinOptions {
  policies::LaneGroupLimits limits;  // of the engine
  bool shapes = true;                // the engine runs steps in shapes
  ObjectivesSpec objectives;
  std::uint64_t seed = 1;
  Duration future_length = std::chrono::seconds(60);
  std::int32_t futures = 3;
  std::int32_t outstanding_max = 0;  // see SimulationOptions
};

class TwinStudy;

/// Not thread-safe; the tuning thread owns it. Knows no clock: how long it may go on is asked of go_on.
class Twin {
 public:
  explicit Twin(const TwinOptions& options);
  ~Twin();
  Twin(const Twin&) = delete;
  Twin& operator=(const Twin&) = delete;

  void set_enabled(bool enabled);
  void set_objectives(const ObjectivesSpec& objectives);
  /// Asked often while anything is simulated; false ends it. It may sleep, to keep to a share of a core.
  void set_go_on(std::function<bool()> go_on);

  void observe(const StepSample& sample);
  [[nodiscard]] TrafficLog& traffic() { return traffic_; }
  [[nodiscard]] const TrafficLog& traffic() const { return traffic_; }
  [[nodiscard]] const StepLaws& laws() const { return laws_; }
  /// Starts from what was learnt elsewhere.
  void adopt(StepLaws laws);

  /// A window that ran wholly under these settings: replays its own arrivals, compares, corrects, and decides on trust. False:
  /// not checked (too few requests or steps, or cut short).
  bool check(const Window& window, const KnobValues& knobs);

  /// Whether studies may be asked for and believed.
  [[nodiscard]] bool trusted() const;
  [[nodiscard]] const TwinStatus& status() const;

  /// One question under the loads to be expected. Empty where the phases hold fewer than requests_min requests or nothing is
  /// known of steps.
  [[nodiscard]] std::unique_ptr<TwinStudy> study(std::vector<TrafficPhase> phases) const;

  static constexpr std::size_t requests_min = 20;

 private:
  friend class TwinStudy;
  struct State;
  TrafficLog traffic_;
  StepLaws laws_;
  std::unique_ptr<State> state_;
};

/// Holds a copy of what the twin knew when it was made.
class TwinStudy {
 public:
  ~TwinStudy();

  /// Simulated once per settings and then remembered. Empty when it was cut short.
  [[nodiscard]] std::optional<Forecast> forecast(const KnobValues& knobs);
  /// On one future of a part of the length: to choose what deserves forecast().
  [[nodiscard]] std::optional<Forecast> glance(const KnobValues& knobs);

  struct Best {
    KnobValues knobs;
    Forecast forecast;
    Forecast incumbent;           // what the incumbent is expected to do, under the same futures
    std::int32_t candidates = 0;  // looked at
    bool complete = true;         // false: cut short; the best of what was looked at
  };
  /// The best legal settings: a coarse pass over all regions of the space by glances, refined round the best by successive
  /// halving, the last few by full forecasts. The incumbent wins unless another is better by more than the spread of the
  /// difference. Empty when not even the incumbent could be simulated.
  [[nodiscard]] std::optional<Best> best(const LegalSettings& legal, const KnobValues& incumbent,
                                         std::span<const KnobValues> hints = {});

  /// Everything that has been looked at so far, full forecasts first.
  struct Known {
    KnobValues knobs;
    Forecast forecast;
  };
  [[nodiscard]] std::vector<Known> known() const;

  /// Requests in the futures, per second of them.
  [[nodiscard]] double rate() const;

 private:
  friend class Twin;
  friend class BestSearch;
  struct State;
  explicit TwinStudy(std::unique_ptr<State> state);
  std::unique_ptr<State> state_;
};

}  // namespace rubato::tuner
