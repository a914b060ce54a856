// SPDX-License-Identifier: Apache-2.0
// Series of the twin, the watch over the load and what trials put at risk. Private to metrics/.
#pragma once

#include <array>
#include <cstdint>

#include "daemon/metrics/series.h"
#include "tuner/twin/twin.h"

namespace rubato::metrics {

struct TwinSeries {
  explicit TwinSeries(Declare own);

  void book(const tuner::TwinStatus& status, Duration cpu, std::uint64_t feed_dropped_total);

  prometheus::Gauge& step_error;
  std::array<prometheus::Gauge*, tuner::twin_quantile_count> prediction_error;  // in the order of TwinQuantile
  prometheus::Gauge& trusted;
  prometheus::Counter& simulations;
  prometheus::Counter& aborted;
  prometheus::Counter& simulated_seconds;
  prometheus::Counter& cpu_seconds;
  prometheus::Counter& feed_dropped;
  prometheus::Counter& load_alarms;
  prometheus::Counter& early_rollbacks;
  prometheus::Gauge& risk;
};

}  // namespace rubato::metrics
