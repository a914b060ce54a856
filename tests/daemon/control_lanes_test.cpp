// SPDX-License-Identifier: Apache-2.0
// What the Engine object, its events and the probes say of lanes, handoffs and switches, and how seldom they say it.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <set>
#include <string>
#include <vector>

#include "daemon/control/figures.h"
#include "tests/daemon/control_fixture.h"
#include "tests/daemon/control_golden.h"

namespace rubato::control {
namespace {

using namespace std::chrono_literals;
using policies::LaneRole;
using rubato::testing::control_manifest;
using rubato::testing::ControlSide;
using rubato::testing::expect_golden;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

const std::string engines = "/apis/rubato.dev/v1alpha1/engines";
const std::map<std::string, std::string, std::less<>> as_table{{"accept", "application/json;as=Table;v=v1;g=meta.k8s.io"}};

const char* const two_lanes = "  knobs: {mode: {initial: Disaggregated, choices: [Chunked, Disaggregated]}}\n";
const char* const four_devices =
    "  devices: [cpu:0, cpu:1, cpu:2, cpu:3]\n  lanes: {lockstep: Aligned}\n"
    "  knobs: {mode: {initial: Disaggregated, choices: [Chunked, Disaggregated]}}\n";

/// A device's two lanes under load, or several devices' lanes; time moves by hand.
class ControlLanesTest : public ::testing::Test {
 protected:
  void start(const char* spec_lines, const std::vector<LaneRole>& roles, std::int32_t lanes_per_device) {
    side_ = std::make_unique<ControlSide>("", control_manifest(spec_lines));
    side_->start_serving();
    status().lanes.resize(roles.size(), status().lanes.front());
    for (std::size_t i = 0; i < roles.size(); ++i) {
      LaneStatus& lane = status().lanes[i];
      lane.counts.role = roles[i];
      lane.device = static_cast<std::int32_t>(i) / lanes_per_device;
    }
    status().kv_block_bytes = 8192;
    pass(0s);
  }
  void start_two_lanes() {
    start(two_lanes, {LaneRole::Decode, LaneRole::Prefill}, 2);
    status().lanes[0].share = {.asked_percent = 60, .given_percent = 62};
    status().lanes[1].share = {.asked_percent = 40, .given_percent = 38};
    pass(0s);
  }

  ServingStatus& status() { return side_->serving.status_; }
  void pass(Duration time) {
    side_->now += std::chrono::duration_cast<std::chrono::milliseconds>(time);
    side_->serving.time += time;
    side_->reconciler.tick();
  }
  std::string version() { return side_->engine()["metadata"]["resourceVersion"]; }
  Json shown() { return side_->engine()["status"]; }
  Json lanes_cell() {
    const Json table = Json::parse(side_->ask("GET", engines, as_table).body);
    for (std::size_t i = 0; i < table["columnDefinitions"].size(); ++i) {
      if (table["columnDefinitions"][i]["name"] == "Lanes") return table["rows"][0]["cells"][i];
    }
    return nullptr;
  }
  std::vector<std::string> events(const std::string& reason) {
    std::vector<std::string> messages;
    for (const Json& event : side_->reconciler.events()) {
      if (event["reason"] == reason) messages.push_back(event["message"]);
    }
    return messages;
  }

  void switch_to(Mode mode, const std::vector<LaneRole>& roles) {
    ++status().handoffs.switches;
    status().settings.knobs.mode = mode;
    for (std::size_t i = 0; i < roles.size(); ++i) status().lanes[i].counts.role = roles[i];
  }

  void everything_is_in_place_after(Duration duration) {
    status().handoffs.switches_done = status().handoffs.switches;
    status().handoffs.last_switch = duration;
  }

  std::unique_ptr<ControlSide> side_;
};

TEST_F(ControlLanesTest, lanes_handoffs_switches_and_lockstep_match_the_snapshot) {
  start_two_lanes();
  status().lanes[0].counts = {.role = LaneRole::Decode,
                              .scheduler = {.waiting = 0, .running = 9, .free_blocks = 100, .block_count = 256},
                              .to_move = 0,
                              .reserved = 0};
  status().lanes[1].counts = {.role = LaneRole::Prefill,
                              .scheduler = {.waiting = 4, .running = 3, .prefilling = 2, .free_blocks = 100, .block_count = 256},
                              .to_move = 1,
                              .reserved = 2};
  status().lanes[0].steps = 1000;
  status().lanes[1].steps = 90;
  status().handoffs = {.moved = 120,
                       .copied = 7,
                       .blocks = 70,
                       .failed = 3,
                       .expired = 1,
                       .late_answers = 1,
                       .copying = 1234567us,
                       .reservation_waits = 11,
                       .reservation_waiting = 12345us,
                       .switches = 2,
                       .switches_done = 2,
                       .last_switch = 35123us};
  pass(20s);
  const auto part = [this] {
    const Json all = shown();
    Json json;
    for (const char* name : {"lanes", "handoffs", "modeSwitches", "lockstep"}) {
      if (all.contains(name)) json[name] = all[name];
    }
    return json.dump(2) + "\nLanes: " + lanes_cell().get<std::string>() + "\n";
  };
  std::string text = "one device, two lanes\n" + part();
  start(four_devices, {LaneRole::Prefill, LaneRole::Prefill, LaneRole::Decode, LaneRole::Decode}, 1);
  status().lockstep = {.rounds = 500, .stepping = 7s, .waiting = 1s};
  pass(20s);
  text += "four devices, lockstep\n" + part();
  expect_golden("control_lanes.txt", text);
}

TEST_F(ControlLanesTest, the_first_lanes_shapes_stay_where_they_were) {
  start_two_lanes();
  status().lanes[1].shapes = std::make_shared<const engine::ShapeStatus>(
      engine::ShapeStatus{.buckets = {.tokens = {512}, .decode_max = 0}, .bytes = 9, .built = 2, .failed = 0, .last_error = ""});
  pass(250ms);
  EXPECT_EQ(shown()["shapes"], shown()["lanes"][0]["shapes"]);
  EXPECT_EQ(shown()["lanes"][1]["shapes"]["buckets"], Json::parse("[512]")) << "at once";
}

TEST_F(ControlLanesTest, the_lanes_column_names_roles_and_the_shares_of_a_shared_device) {
  start_two_lanes();
  EXPECT_EQ(lanes_cell(), "decode 62% + prefill 38%");
  switch_to(Mode::Chunked, {LaneRole::Mixed, LaneRole::Spare});
  EXPECT_EQ(lanes_cell(), "mixed");
  start(four_devices, {LaneRole::Prefill, LaneRole::Decode, LaneRole::Decode, LaneRole::Decode}, 1);
  EXPECT_EQ(lanes_cell(), "prefill + 3 decode");
}

// 250 ms a tick: an hour of traffic whose numbers differ at every look.
TEST_F(ControlLanesTest, numbers_that_move_with_every_step_give_a_new_version_seldom) {
  start_two_lanes();
  std::set<std::string> versions{version()};
  for (int tick = 0; tick < 4 * 3600; ++tick) {
    ++status().lanes[0].steps;
    ++status().handoffs.moved;
    status().lanes[0].counts.scheduler.running = tick % 60;
    status().lanes[1].counts.to_move = 1;  // there always is one on its way
    pass(250ms);
    versions.insert(version());
  }
  EXPECT_EQ(versions.size(), 1U + 3600 / 20);
  EXPECT_GE(shown()["lanes"][0]["steps"].get<int>(), 4 * 3600 - 4 * 20);
}

TEST_F(ControlLanesTest, with_windows_there_is_one_version_per_window) {
  start_two_lanes();
  tuner::Window window;
  std::set<std::string> versions{version()};
  for (int tick = 0; tick < 4 * 600; ++tick) {
    ++status().lanes[0].steps;
    pass(250ms);
    if (tick % 60 == 59) {
      window.arrivals = tick;
      side_->reconciler.report({.status = {}, .trials = {}, .window = window});
      EXPECT_EQ(side_->engine()["status"]["lanes"][0]["steps"], tick + 1) << "the window brings a new sample along";
    }
    versions.insert(version());
  }
  EXPECT_EQ(versions.size(), 1U + 600 / 15);
}

TEST_F(ControlLanesTest, roles_and_shares_show_at_once) {
  start_two_lanes();
  const std::string before = version();
  status().lanes[0].share = {.asked_percent = 80, .given_percent = 80};
  EXPECT_EQ(shown()["lanes"][0]["sharePercent"], 80);
  EXPECT_FALSE(shown()["lanes"][0].contains("askedSharePercent"));
  const std::string second = version();
  EXPECT_NE(second, before);
  switch_to(Mode::Chunked, {LaneRole::Mixed, LaneRole::Spare});
  EXPECT_EQ(shown()["lanes"][0]["role"], "Mixed");
  EXPECT_EQ(shown()["lanes"][0]["sharePercent"], 100);
  EXPECT_EQ(shown()["lanes"][1]["sharePercent"], 0);
  EXPECT_EQ(shown()["modeSwitches"]["count"], 1);
  EXPECT_NE(version(), second);
}

TEST_F(ControlLanesTest, what_is_left_to_move_is_shown_every_second_while_a_switch_goes_on) {
  start_two_lanes();
  switch_to(Mode::Chunked, {LaneRole::Mixed, LaneRole::Spare});
  status().lanes[1].counts.to_move = 8;
  pass(0s);
  EXPECT_EQ(shown()["handoffs"]["toMove"], 8);
  for (int left = 7; left >= 1; --left) {
    status().lanes[1].counts.to_move = left;
    pass(999ms);
    EXPECT_EQ(shown()["handoffs"]["toMove"], left + 1) << "not more often";
    pass(1ms);
    EXPECT_EQ(shown()["handoffs"]["toMove"], left);
  }
}

TEST_F(ControlLanesTest, a_switch_is_told_of_once_when_everything_is_in_place) {
  start_two_lanes();
  switch_to(Mode::Chunked, {LaneRole::Mixed, LaneRole::Spare});
  status().lanes[1].counts.to_move = 12;
  pass(250ms);
  EXPECT_THAT(events("ModeSwitched"), ElementsAre()) << "12 are still to move";
  status().lanes[1].counts.to_move = 0;
  status().handoffs.moved += 12;
  everything_is_in_place_after(35123us);
  pass(250ms);
  pass(250ms);
  EXPECT_THAT(events("ModeSwitched"),
              ElementsAre("mode Disaggregated -> Chunked: all in place after 35.1ms, 12 sequences handed over meanwhile"));
  EXPECT_EQ(shown()["modeSwitches"]["lastSeconds"], "0.0351");
}

TEST_F(ControlLanesTest, a_switch_ends_although_handoffs_go_on_at_every_look) {
  start_two_lanes();
  switch_to(Mode::Chunked, {LaneRole::Mixed, LaneRole::Spare});
  everything_is_in_place_after(Duration::zero());
  pass(250ms);
  switch_to(Mode::Disaggregated, {LaneRole::Decode, LaneRole::Prefill});
  status().lanes[1].counts.to_move = 2;
  everything_is_in_place_after(20ms);
  pass(250ms);
  EXPECT_THAT(events("ModeSwitched"), ElementsAre("mode Disaggregated -> Chunked: all in place at once",
                                                  "mode Chunked -> Disaggregated: all in place after 20ms"));
}

TEST_F(ControlLanesTest, switches_between_two_looks_are_one_event_that_says_how_many) {
  start_two_lanes();
  switch_to(Mode::Chunked, {LaneRole::Mixed, LaneRole::Spare});
  switch_to(Mode::Disaggregated, {LaneRole::Decode, LaneRole::Prefill});
  everything_is_in_place_after(5ms);
  pass(250ms);
  ++status().handoffs.switches;
  everything_is_in_place_after(5ms);
  status().settings.knobs.reservation = Reservation::Early;
  pass(250ms);
  EXPECT_THAT(events("ModeSwitched"), ElementsAre("there and back again in 2 changes: all in place after 5ms",
                                                  "reservation LastChunk -> Early: all in place after 5ms"));
}

TEST_F(ControlLanesTest, switches_from_before_the_first_look_are_not_told_of) {
  side_ = std::make_unique<ControlSide>("", control_manifest(two_lanes));
  status().handoffs.switches = status().handoffs.switches_done = 4;
  status().handoffs.failed = 4;
  side_->start_serving();
  pass(250ms);
  EXPECT_THAT(events("ModeSwitched"), ElementsAre());
  EXPECT_THAT(events("HandoffFailed"), ElementsAre());
}

TEST_F(ControlLanesTest, failing_copies_are_one_warning_a_minute_and_one_place_in_the_log) {
  start_two_lanes();
  for (int tick = 0; tick < 4 * 150; ++tick) {
    ++status().handoffs.failed;
    pass(250ms);
  }
  int warnings = 0;
  for (const Json& event : side_->reconciler.events()) {
    if (event["reason"] != "HandoffFailed") continue;
    ++warnings;
    EXPECT_EQ(event["type"], "Warning");
    EXPECT_EQ(event["count"], 3) << "at 0, 60 and 120 s";
  }
  EXPECT_EQ(warnings, 1);
}

TEST_F(ControlLanesTest, one_lanes_step_that_does_not_end_is_a_stall_whatever_the_others_do) {
  start_two_lanes();
  side_->serving.is_idle = false;
  status().step_open_since = side_->serving.time;
  const auto pass_with_steps = [this](Duration time) {
    ++status().steps;  // the other lane goes on
    pass(time);
  };
  pass_with_steps(StallDetector::stalled_after);
  EXPECT_EQ(side_->ask("GET", "/readyz").status, 200) << "a long step is not yet a stuck one";
  pass_with_steps(1ms);
  EXPECT_THAT(side_->ask("GET", "/readyz").body, AllOf(HasSubstr("[-]lane failed"), HasSubstr("[+]device ok")));
  EXPECT_EQ(side_->ask("GET", "/livez").status, 503) << "a restart is the cure";
  const Json ready = shown()["conditions"][0];
  EXPECT_EQ(ready["status"], "False");
  EXPECT_EQ(ready["reason"], "Stalled");
  EXPECT_EQ(ready["message"], "a lane's step does not end");
  status().step_open_since.reset();
  pass_with_steps(250ms);
  EXPECT_EQ(side_->ask("GET", "/readyz").status, 200);
  EXPECT_EQ(shown()["conditions"][0]["status"], "True");
}

TEST_F(ControlLanesTest, the_dashboard_reads_series_that_exist) {
  start_two_lanes();
  const std::string page = side_->ask("GET", "/").body;
  const std::string metrics = side_->ask("GET", "/metrics").body;
  for (const char* name : {"rubato_lane_info", "rubato_lane_role", "rubato_lane_step_seconds_total", "rubato_handoffs_total",
                           "rubato_mode_switches_total", "rubato_mode_switch_seconds", "rubato_lockstep_wait_seconds_total",
                           "rubato_lockstep_step_seconds_total"}) {
    EXPECT_THAT(page, HasSubstr('"' + std::string(name) + '"'));
    EXPECT_THAT(metrics, HasSubstr("# TYPE " + std::string(name) + " "));
  }
  for (const char* name : {"share_ratio", "running", "waiting", "reserved_slots", "to_move"}) {
    EXPECT_THAT(page, HasSubstr("of(\"" + std::string(name) + "\")"));
    EXPECT_THAT(metrics, HasSubstr("# TYPE rubato_lane_" + std::string(name) + " gauge"));
  }
}

TEST(Figures, have_three_digits_and_no_zeros_at_their_end) {
  EXPECT_EQ(rounded(12345678ns), "12.3ms");
  EXPECT_EQ(seconds(12345678ns), "0.0123");
  EXPECT_EQ(seconds(1500ms), "1.5");
  EXPECT_EQ(seconds(999999us), "1");
  EXPECT_EQ(seconds(1h), "3600");
  EXPECT_EQ(seconds(0s), "0");
  EXPECT_EQ(seconds(1ns), "0.000000001");
  EXPECT_EQ(decimal(97.99), "97.9");
}

}  // namespace
}  // namespace rubato::control
