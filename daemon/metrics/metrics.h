// SPDX-License-Identifier: Apache-2.0
// Every number the daemon exposes to Prometheus: rubato's own family and the names of vLLM that existing dashboards and routers
// read. It counts what it is told and renders text; judging requests, windows for the tuner and serving the text over HTTP are
// others' work.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "daemon/observer.h"
#include "daemon/serving.h"
#include "manifests/engine_spec.h"
#include "tuner/tuner.h"
#include "tuner/twin/twin.h"

namespace rubato {

/// What is fixed while the process lives. The objectives become bucket edges of rubato's TTFT and ITL histograms: a reload
/// changes the objectives but never the edges of a series that exists, so those of the start stay. rubato_slo_requests_total is
/// exact at all times.
struct MetricsOptions {
  std::string model_name;
  std::string version;
  std::string backend;
  ObjectivesSpec objectives;
  std::int32_t max_model_len = 4096;
  std::int32_t kv_block_count = 0;
  bool blocks_hold_keys = true;  // false: a model without attention, whose memory is its states
  bool prefix_caching = false;
  std::vector<std::string> devices{"cpu"};  // spec.devices; their lanes get series of their own
  std::int32_t lanes_per_device = 1;
};

/// Asked at each rendering, so that a gauge shows what is and not what was last booked. Each may be empty.
struct MetricsSources {
  std::function<std::shared_ptr<const ServingStatus>()> serving;
  std::map<std::string, std::function<int()>> connections;  // by port name: data, control
};

/// The layer whose change made new settings current.
enum class SettingsSource : std::uint8_t { File, Api, Override, Expiry, Tuner };
[[nodiscard]] std::string_view to_string(SettingsSource source);

/// Thread-safe. The observer calls cost some 10 ns per series and wait for no rendering longer than one series' copy; series are
/// made at start, none per request. Counters only grow for as long as the process lives, whatever is reloaded.
class Metrics final : public Observer {
 public:
  explicit Metrics(const MetricsOptions& options);
  ~Metrics() override;

  /// Any thread; renderings from then on ask them.
  void set_sources(MetricsSources sources);

  void on_request(std::int32_t choices) override;
  void on_arrival(const Arrival& arrival) override;
  void on_rejected(TimePoint now, std::int32_t choices) override;
  void on_token_gap(SequenceId id, Duration gap) override;
  void on_first_token(const Arrival& arrival, Duration ttft) override;
  void on_request_end(const RequestRecord& record) override;
  void on_step(const engine::StepRecord& record, const policies::SchedulerCounts& counts) override;
  void on_settings(const Settings& settings, TimePoint now) override;
  void on_shapes_built(const engine::ShapeBuild& build) override;
  void on_shapes_taken(Duration swap) override;

  void on_settings_change(SettingsSource source);
  void on_trial(std::string_view outcome);
  /// The tuner's totals, which only grow; kept in step with its status.
  void on_tuner(const tuner::TunerStatus& status);
  /// The same of the twin; cpu: of the decisions in which it simulated. feed_dropped: what it never heard of.
  void on_twin(const tuner::TwinStatus& status, Duration cpu, std::uint64_t feed_dropped);
  void set_objectives(const ObjectivesSpec& objectives);
  void on_manifest_reload(const Result<void>& outcome);

  /// The text format 0.0.4. Rendered at most every 50 ms and after each change of settings, so that many scrapers cost one
  /// rendering.
  [[nodiscard]] std::shared_ptr<const std::string> render(TimePoint now);
  static constexpr std::string_view content_type = "text/plain; version=0.0.4; charset=utf-8";

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace rubato
