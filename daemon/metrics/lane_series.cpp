// SPDX-License-Identifier: Apache-2.0
#include "daemon/metrics/lane_series.h"

#include <algorithm>

#include "daemon/metrics/lane_facts.h"
#include "manifests/check.h"
#include "policies/time.h"

namespace rubato::metrics {
namespace {

using policies::LaneRole;

constexpr std::array all_roles{LaneRole::Mixed, LaneRole::Prefill, LaneRole::Decode, LaneRole::Spare};

prometheus::Gauge* role_gauge(Declare& own, const std::string& lane, LaneRole role) {
  return &own.gauge("rubato_lane_role", "1 for the role that the lane has now, 0 for the others.",
                    {{"lane", lane}, {"role", std::string(to_string(role))}});
}

// Kinds do not overlap, so that they can be summed.
prometheus::Counter& handoffs(Declare& own, const char* kind) {
  return own.counter("rubato_handoffs_total",
                     "Decodes handed from lane to lane: moved within a pool, copied between pools; and copies that failed: with "
                     "an error (failed) or without an answer within the lease (expired).",
                     {{"kind", kind}});
}

}  // namespace

LaneSeries::LaneSeries(Declare own, const std::string& lane, const std::string& device)
    : running(own.gauge("rubato_lane_running", "Sequences of the lane that hold KV blocks.", {{"lane", lane}})),
      waiting(own.gauge("rubato_lane_waiting", "Sequences that wait in the lane to be scheduled.", {{"lane", lane}})),
      share(own.gauge("rubato_lane_share_ratio",
                      "Part of its device that the lane's steps get while the device's other lane is in a step too.",
                      {{"lane", lane}})),
      to_move(own.gauge("rubato_lane_to_move", "Sequences of the lane that belong to another one.", {{"lane", lane}})),
      reserved_slots(own.gauge("rubato_lane_reserved_slots", "Decode slots held by prefills of the lane.", {{"lane", lane}})),
      steps(own.counter("rubato_lane_steps_total", "Steps executed by the lane.", {{"lane", lane}})),
      step_seconds(own.counter("rubato_lane_step_seconds_total", "Time that the lane has been in a step.", {{"lane", lane}})),
      roles() {
  std::transform(all_roles.begin(), all_roles.end(), roles.begin(), [&](LaneRole role) { return role_gauge(own, lane, role); });
  own.gauge("rubato_lane_info", "Device of the lane, as a label.", {{"lane", lane}, {"device", device}}).Set(1);
}

void LaneSeries::book(const ServingStatus& status, std::size_t lane) {
  const policies::LaneCounts& counts = status.lanes[lane].counts;
  running.Set(counts.scheduler.running);
  waiting.Set(counts.scheduler.waiting);
  share.Set(share_percent(status, lane) / 100.0);
  to_move.Set(counts.to_move);
  reserved_slots.Set(counts.reserved);
  for (std::size_t i = 0; i < all_roles.size(); ++i) roles[i]->Set(counts.role == all_roles[i] ? 1 : 0);
}

LaneGroupSeries::LaneGroupSeries(Declare own, const MetricsOptions& options)
    : moved(handoffs(own, "moved")),
      copied(handoffs(own, "copied")),
      failed(handoffs(own, "failed")),
      expired(handoffs(own, "expired")),
      bytes(own.counter("rubato_handoff_bytes_total", "Bytes of KV blocks copied between pools.")),
      copy_seconds(own.counter("rubato_handoff_seconds_total",
                               "Time from the first order to copy a sequence's blocks until it was taken over, over sequences.")),
      late_answers(own.counter("rubato_handoff_late_answers_total", "Answers to copies that had been given up.")),
      reservation_waits(
          own.counter("rubato_reservation_waits_total", "Prefills that waited for a decode slot before their last chunk.")),
      reservation_wait_seconds(
          own.counter("rubato_reservation_wait_seconds_total", "Time that prefills waited for a decode slot.")),
      switches(own.counter("rubato_mode_switches_total", "Changes of mode, roles or reservation.")),
      switch_seconds(
          own.gauge("rubato_mode_switch_seconds", "Time from the last change until every sequence was where it belongs.")),
      lockstep_rounds(own.counter("rubato_lockstep_rounds_total", "Rounds of lanes that step together.")),
      lockstep_step_seconds(
          own.counter("rubato_lockstep_step_seconds_total", "Time in steps of lanes that step together, over lanes.")),
      lockstep_wait_seconds(own.counter("rubato_lockstep_wait_seconds_total",
                                        "Time that lanes waited for the slowest of their round, over lanes: rank imbalance.")) {
  const std::size_t count = options.devices.size() * static_cast<std::size_t>(options.lanes_per_device);
  lanes.reserve(count);
  for (const std::string& device : options.devices) {
    for (std::int32_t i = 0; i < options.lanes_per_device; ++i) lanes.emplace_back(own, std::to_string(lanes.size()), device);
  }
}

void LaneGroupSeries::on_step(const engine::StepRecord& record) {
  const auto lane = static_cast<std::size_t>(record.lane.value);
  CHECK(lane < lanes.size(), "a step of lane ", lane, " of ", lanes.size());
  lanes[lane].steps.Increment();
  lanes[lane].step_seconds.Increment(std::max(0.0, to_seconds(record.end - record.begin)));
}

void LaneGroupSeries::book(const ServingStatus& status) {
  CHECK(status.lanes.size() <= lanes.size(), "lanes: ", status.lanes.size(), " of ", lanes.size());
  for (std::size_t lane = 0; lane < status.lanes.size(); ++lane) lanes[lane].book(status, lane);
  const policies::HandoffCounts& counts = status.handoffs;
  raise_to(moved, static_cast<double>(counts.moved));
  raise_to(copied, static_cast<double>(counts.copied));
  raise_to(failed, static_cast<double>(counts.failed - counts.expired));
  raise_to(expired, static_cast<double>(counts.expired));
  raise_to(bytes, static_cast<double>(counts.blocks) * static_cast<double>(status.kv_block_bytes));
  raise_to(copy_seconds, to_seconds(counts.copying));
  raise_to(late_answers, static_cast<double>(counts.late_answers));
  raise_to(reservation_waits, static_cast<double>(counts.reservation_waits));
  raise_to(reservation_wait_seconds, to_seconds(counts.reservation_waiting));
  raise_to(switches, static_cast<double>(counts.switches));
  switch_seconds.Set(to_seconds(counts.last_switch));
  raise_to(lockstep_rounds, static_cast<double>(status.lockstep.rounds));
  raise_to(lockstep_step_seconds, to_seconds(status.lockstep.stepping));
  raise_to(lockstep_wait_seconds, to_seconds(status.lockstep.waiting));
}

}  // namespace rubato::metrics
