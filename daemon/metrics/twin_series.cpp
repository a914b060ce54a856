// SPDX-License-Identifier: Apache-2.0
#include "daemon/metrics/twin_series.h"

namespace rubato::metrics {
namespace {

prometheus::Gauge& prediction(Declare& own, const char* latency, const char* quantile) {
  return own.gauge("rubato_twin_prediction_error_ratio",
                   "Recent mean of how far the twin's predictions of the current settings were from what was measured.",
                   {{"latency", latency}, {"quantile", quantile}});
}

}  // namespace

TwinSeries::TwinSeries(Declare own)
    : step_error(own.gauge("rubato_twin_step_error_ratio",
                           "Recent mean error of the twin's step times, relative to the steps that it had not learnt from yet.")),
      prediction_error{&prediction(own, "ttft", "0.5"), &prediction(own, "ttft", "0.99"), &prediction(own, "itl", "0.5"),
                       &prediction(own, "itl", "0.99")},
      trusted(own.gauge("rubato_twin_trusted", "1 while the search goes by the twin; 0 while it is off, learns or disagrees.")),
      simulations(own.counter("rubato_twin_simulations_total", "Futures that the twin has simulated.")),
      aborted(
          own.counter("rubato_twin_aborted_total", "Questions to the twin cut short, because steps ran late or time was up.")),
      simulated_seconds(own.counter("rubato_twin_simulated_seconds_total", "Virtual time that the twin has simulated.")),
      cpu_seconds(own.counter("rubato_twin_cpu_seconds_total", "CPU time of the decisions in which the twin simulated.")),
      feed_dropped(own.counter("rubato_twin_feed_dropped_total",
                               "Arrivals, starts, ends and steps that the twin never heard of, because it was behind.")),
      load_alarms(own.counter("rubato_load_alarms_total", "Changes of load that were noticed between windows.")),
      early_rollbacks(own.counter("rubato_early_rollbacks_total", "Trials taken back before their window had closed.")),
      risk(own.gauge("rubato_tuning_risk_ratio", "Share of the last hour's requests that trials put at risk.")) {}

void TwinSeries::book(const tuner::TwinStatus& status, Duration cpu, std::uint64_t feed_dropped_total) {
  step_error.Set(status.step_error);
  for (std::size_t i = 0; i < prediction_error.size(); ++i) prediction_error[i]->Set(status.correction.error[i]);
  trusted.Set(status.state == tuner::TwinState::Trusted ? 1 : 0);
  raise_to(simulations, static_cast<double>(status.simulations_total));
  raise_to(aborted, static_cast<double>(status.aborted_total));
  raise_to(simulated_seconds, to_seconds(status.simulated_total));
  raise_to(cpu_seconds, to_seconds(cpu));
  raise_to(feed_dropped, static_cast<double>(feed_dropped_total));
}

}  // namespace rubato::metrics
