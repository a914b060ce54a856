// SPDX-License-Identifier: Apache-2.0
// Series of each lane, and of what lanes do together: handoffs, waits for decode slots, switches, lockstep rounds. Private to
// metrics/.
#pragma once

#include <array>
#include <string>
#include <vector>

#include "daemon/metrics/series.h"

namespace rubato::metrics {

/// One per lane, made at start.
struct LaneSeries {
  LaneSeries(Declare own, const std::string& lane, const std::string& device);

  void book(const ServingStatus& status, std::size_t lane);

  prometheus::Gauge& running;
  prometheus::Gauge& waiting;
  prometheus::Gauge& share;
  prometheus::Gauge& to_move;
  prometheus::Gauge& reserved_slots;
  prometheus::Counter& steps;
  prometheus::Counter& step_seconds;
  std::array<prometheus::Gauge*, 4> roles;  // in the order of LaneRole; one of them is 1
};

struct LaneGroupSeries {
  LaneGroupSeries(Declare own, const MetricsOptions& options);

  void on_step(const engine::StepRecord& record);
  void book(const ServingStatus& status);

  std::vector<LaneSeries> lanes;
  prometheus::Counter& moved;
  prometheus::Counter& copied;
  prometheus::Counter& failed;
  prometheus::Counter& expired;
  prometheus::Counter& bytes;
  prometheus::Counter& copy_seconds;
  prometheus::Counter& late_answers;
  prometheus::Counter& reservation_waits;
  prometheus::Counter& reservation_wait_seconds;
  prometheus::Counter& switches;
  prometheus::Gauge& switch_seconds;
  prometheus::Counter& lockstep_rounds;
  prometheus::Counter& lockstep_step_seconds;
  prometheus::Counter& lockstep_wait_seconds;
};

}  // namespace rubato::metrics
