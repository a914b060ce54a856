// SPDX-License-Identifier: Apache-2.0
// What /metrics says of each lane and of what lanes do together.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <sstream>
#include <string>

#include "daemon/metrics/lane_facts.h"
#include "daemon/metrics/metrics.h"

namespace rubato {
namespace {

using namespace std::chrono_literals;
using policies::LaneRole;
using ::testing::HasSubstr;

LaneStatus lane_of(LaneRole role, std::int32_t device, std::int32_t percent, std::int32_t running = 0) {
  LaneStatus lane;
  lane.counts.role = role;
  lane.counts.scheduler.running = running;
  lane.device = device;
  lane.share = {.asked_percent = percent, .given_percent = percent};
  return lane;
}

class MetricsLanesTest : public ::testing::Test {
 protected:
  MetricsLanesTest() {
    metrics_.set_sources({.serving = [this] { return std::make_shared<const ServingStatus>(status_); }, .connections = {}});
  }

  Metrics metrics_{{.model_name = "chat",
                    .version = "0.1.0",
                    .backend = "cpu test",
                    .objectives = {},
                    .devices = {"cpu"},
                    .lanes_per_device = 2}};
  ServingStatus status_;
  TimePoint now_{1000s};

  std::string value(const std::string& series) {
    now_ += 1s;  // past the lifetime of the rendering before
    std::istringstream lines(*metrics_.render(now_));
    for (std::string line; std::getline(lines, line);) {
      if (line.starts_with(series + " ")) return line.substr(series.size() + 1);
    }
    return "";
  }
  std::string of_lane(const char* name, int lane) {
    return value("rubato_lane_" + std::string(name) + "{lane=\"" + std::to_string(lane) + "\"}");
  }
  std::string role(int lane, const char* role) {
    return value("rubato_lane_role{lane=\"" + std::to_string(lane) + "\",role=\"" + role + "\"}");
  }
  std::string handoffs(const char* kind) { return value("rubato_handoffs_total{kind=\"" + std::string(kind) + "\"}"); }

  static engine::StepRecord step(int lane, Duration duration) {
    engine::StepRecord record;
    record.lane = LaneIndex{lane};
    record.begin = TimePoint(1s);
    record.end = TimePoint(1s) + duration;
    return record;
  }
};

TEST_F(MetricsLanesTest, every_lane_has_its_series_from_the_start) {
  EXPECT_EQ(value("rubato_lane_info{device=\"cpu\",lane=\"0\"}"), "1");
  EXPECT_EQ(value("rubato_lane_info{device=\"cpu\",lane=\"1\"}"), "1");
  EXPECT_EQ(of_lane("steps_total", 1), "0");
  EXPECT_EQ(role(1, "Decode"), "0");
  Metrics several({.model_name = "chat", .version = "0", .backend = "cpu", .objectives = {}, .devices = {"cpu:0", "cpu:1"}});
  EXPECT_THAT(*several.render(now_), HasSubstr("rubato_lane_info{device=\"cpu:1\",lane=\"1\"} 1"));
}

TEST_F(MetricsLanesTest, steps_and_busy_time_are_counted_for_the_lane_that_ran_them) {
  metrics_.on_step(step(0, 20ms), {});
  metrics_.on_step(step(1, 250ms), {});
  metrics_.on_step(step(1, 250ms), {});
  EXPECT_EQ(of_lane("steps_total", 0), "1");
  EXPECT_EQ(of_lane("steps_total", 1), "2");
  EXPECT_EQ(of_lane("step_seconds_total", 0), "0.02");
  EXPECT_EQ(of_lane("step_seconds_total", 1), "0.5");
  EXPECT_EQ(value("rubato_step_duration_seconds_count"), "3") << "sums over lanes stay as they were";
}

TEST_F(MetricsLanesTest, gauges_show_each_lane_and_sums_keep_their_names) {
  status_.lanes = {lane_of(LaneRole::Decode, 0, 60, 5), lane_of(LaneRole::Prefill, 0, 40, 2)};
  status_.lanes[1].counts.scheduler.waiting = 3;
  status_.lanes[1].counts.to_move = 1;
  status_.lanes[1].counts.reserved = 2;
  status_.counts.running = 7;
  status_.counts.waiting = 3;
  EXPECT_EQ(of_lane("running", 0), "5");
  EXPECT_EQ(of_lane("running", 1), "2");
  EXPECT_EQ(of_lane("waiting", 1), "3");
  EXPECT_EQ(of_lane("to_move", 1), "1");
  EXPECT_EQ(of_lane("reserved_slots", 1), "2");
  EXPECT_EQ(of_lane("share_ratio", 0), "0.6");
  EXPECT_EQ(of_lane("share_ratio", 1), "0.4");
  EXPECT_EQ(value("vllm:num_requests_running{engine=\"0\",model_name=\"chat\"}"), "7");
  EXPECT_EQ(value("vllm:num_requests_waiting{engine=\"0\",model_name=\"chat\"}"), "3");
}

TEST_F(MetricsLanesTest, exactly_one_role_of_a_lane_is_set_and_the_one_before_is_not) {
  for (const LaneRole now : {LaneRole::Mixed, LaneRole::Prefill, LaneRole::Decode, LaneRole::Spare}) {
    status_.lanes = {lane_of(now, 0, 50)};
    for (const LaneRole any : {LaneRole::Mixed, LaneRole::Prefill, LaneRole::Decode, LaneRole::Spare}) {
      EXPECT_EQ(role(0, std::string(to_string(any)).c_str()), any == now ? "1" : "0") << to_string(now);
    }
  }
}

TEST_F(MetricsLanesTest, kinds_of_handoffs_do_not_overlap) {
  status_.handoffs.moved = 7;
  status_.handoffs.copied = 4;
  status_.handoffs.failed = 5;  // the expired ones among them
  status_.handoffs.expired = 2;
  EXPECT_EQ(handoffs("moved"), "7");
  EXPECT_EQ(handoffs("copied"), "4");
  EXPECT_EQ(handoffs("failed"), "3");
  EXPECT_EQ(handoffs("expired"), "2");
}

TEST_F(MetricsLanesTest, totals_of_the_lane_group_are_in_base_units) {
  status_.kv_block_bytes = 4096;
  status_.handoffs.blocks = 10;
  status_.handoffs.copying = 1500ms;
  status_.handoffs.late_answers = 1;
  status_.handoffs.reservation_waits = 6;
  status_.handoffs.reservation_waiting = 250ms;
  status_.handoffs.switches = 3;
  status_.handoffs.last_switch = 40ms;
  status_.lockstep = {.rounds = 12, .stepping = 3s, .waiting = 1s};
  EXPECT_EQ(value("rubato_handoff_bytes_total"), "40960");
  EXPECT_EQ(value("rubato_handoff_seconds_total"), "1.5");
  EXPECT_EQ(value("rubato_handoff_late_answers_total"), "1");
  EXPECT_EQ(value("rubato_reservation_waits_total"), "6");
  EXPECT_EQ(value("rubato_reservation_wait_seconds_total"), "0.25");
  EXPECT_EQ(value("rubato_mode_switches_total"), "3");
  EXPECT_EQ(value("rubato_mode_switch_seconds"), "0.04");
  EXPECT_EQ(value("rubato_lockstep_rounds_total"), "12");
  EXPECT_EQ(value("rubato_lockstep_step_seconds_total"), "3");
  EXPECT_EQ(value("rubato_lockstep_wait_seconds_total"), "1");
}

TEST_F(MetricsLanesTest, choices_of_disaggregated_mode_are_knobs_like_the_others) {
  metrics_.on_settings(
      {.number = 2, .knobs = {.mode = Mode::Disaggregated, .reservation = Reservation::Early, .prefill_devices = 3}}, now_);
  EXPECT_EQ(value("rubato_knob{knob=\"prefillDevices\"}"), "3");
  EXPECT_EQ(value("rubato_knob_info{mode=\"Disaggregated\",policy=\"Deadline\",reservation=\"Early\"}"), "1");
}

TEST(LaneFacts, a_lane_has_all_of_its_device_unless_another_one_there_has_something_to_do) {
  ServingStatus status;
  status.lanes = {lane_of(LaneRole::Mixed, 0, 50, 4), lane_of(LaneRole::Spare, 0, 50)};
  EXPECT_EQ(share_percent(status, 0), 100);
  EXPECT_EQ(share_percent(status, 1), 0);
  status.lanes[1].counts.scheduler.running = 1;  // left over from before a switch
  EXPECT_EQ(share_percent(status, 0), 50);
  EXPECT_EQ(share_percent(status, 1), 50);
  status.lanes = {lane_of(LaneRole::Decode, 0, 60), lane_of(LaneRole::Prefill, 0, 40)};
  EXPECT_EQ(share_percent(status, 0), 60);
  EXPECT_EQ(share_percent(status, 1), 40);
  status.lanes[1].device = 1;
  EXPECT_EQ(share_percent(status, 0), 100) << "another device";
}

}  // namespace
}  // namespace rubato
