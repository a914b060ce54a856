// SPDX-License-Identifier: Apache-2.0
// Trials and regimes over the control API.
#include "daemon/control/trials.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/daemon/control_fixture.h"
#include "tests/daemon/control_golden.h"

namespace rubato::control {
namespace {

using namespace std::chrono_literals;
using rubato::testing::control_start;
using rubato::testing::ControlSide;
using rubato::testing::expect_golden;

const std::string trials = "/apis/rubato.dev/v1alpha1/trials";
const std::map<std::string, std::string, std::less<>> as_table{
    {"accept", "application/json;as=Table;v=v1;g=meta.k8s.io,application/json"}};

tuner::Trial trial_of(std::int64_t number, const char* outcome) {
  tuner::Trial trial{
      .number = number, .knobs = {.max_num_batched_tokens = 256, .max_num_seqs = 32}, .window = {}, .outcome = outcome};
  trial.window.begin = TimePoint(0s);
  trial.window.end = TimePoint(15s);
  trial.window.arrivals = 150;
  trial.window.judged = 160;
  trial.window.good = 156;
  trial.window.ttft_p99 = 456789012ns;
  trial.window.itl_p99 = 34567890ns;
  trial.ended = std::chrono::duration_cast<std::chrono::seconds>((control_start - 90s).time_since_epoch()).count();
  return trial;
}

class ControlTrialsTest : public ::testing::Test {
 protected:
  ControlTrialsTest() {
    side_.start_serving();
    tuner::Trial foretold = trial_of(17, "Incumbent");
    foretold.source = "Twin";
    foretold.expected = tuner::ExpectedOutcome{
        .attainment = 0.985, .attainment_spread = 0.012, .ttft_p50 = 100ms, .ttft_p99 = 400ms, .itl_p50 = 20ms, .itl_p99 = 30ms};
    tuner::Trial old = trial_of(16, "RolledBack");
    old.ended = 0;
    old.window = {};
    TuningReport report{.status = {}, .trials = {foretold, old}, .window = {}};
    tuner::Regime regime;
    regime.number = 3;
    regime.visits = 1;
    regime.last_seen = regime.measured = 1'764'500'000;
    regime.evidence.judged = 200;
    regime.evidence.good = 190;
    regime.evidence.windows = 2;
    report.regimes = {regime};
    report.model_key = "synthetic/x";
    side_.reconciler.report(report);
  }
  Json body(const std::string& target) { return Json::parse(side_.ask("GET", target).body); }
  static std::vector<std::string> names_of(const Json& list) {
    std::vector<std::string> names;
    for (const Json& item : list["items"]) names.push_back(item["metadata"]["name"]);
    return names;
  }

  ControlSide side_;
};

TEST_F(ControlTrialsTest, list_object_and_table_match_the_snapshot) {
  std::string all;
  const auto add = [&](const std::string& what, const http::Response& response) {
    all += what + "\n" + std::to_string(response.status) + "\n" + Json::parse(response.body).dump(2) + "\n";
  };
  add("GET list", side_.ask("GET", trials));
  add("GET trial", side_.ask("GET", trials + "/chat-17"));
  add("GET table", side_.ask("GET", trials, as_table));
  add("GET one as table", side_.ask("GET", trials + "/chat-17?includeObject=None", as_table));
  add("GET unknown", side_.ask("GET", trials + "/chat-18"));
  expect_golden("control_trials.txt", all);
}

TEST_F(ControlTrialsTest, selectors_filter_and_name_what_they_know) {
  EXPECT_EQ(names_of(body(trials)), (std::vector<std::string>{"chat-17", "chat-16"})) << "newest first";
  EXPECT_EQ(names_of(body(trials + "?fieldSelector=status.outcome=Incumbent")), std::vector<std::string>{"chat-17"});
  EXPECT_EQ(names_of(body(trials + "?fieldSelector=status.source=")), std::vector<std::string>{"chat-16"});
  EXPECT_EQ(names_of(body(trials + "?labelSelector=rubato.dev/engine=chat")).size(), 2U);
  EXPECT_EQ(names_of(body(trials + "?labelSelector=rubato.dev/engine=other")).size(), 0U);
  EXPECT_EQ(side_.ask("GET", trials + "?fieldSelector=spec.x=1").status, 400);
}

TEST_F(ControlTrialsTest, are_read_only) {
  for (const char* verb : {"POST", "PUT", "PATCH", "DELETE"}) {
    for (const std::string& path : {trials, trials + "/chat-17", std::string("/apis/rubato.dev/v1alpha1/engines/chat/regimes")}) {
      const http::Response refused = side_.ask(verb, path, {{"content-type", "application/merge-patch+json"}}, "{}");
      EXPECT_EQ(refused.status, 405) << verb << " " << path;
      EXPECT_EQ(Json::parse(refused.body)["kind"], "Status");
    }
  }
  EXPECT_EQ(side_.ask("GET", trials + "?watch=true").status, 405);
  EXPECT_EQ(side_.ask("GET", trials, {{"accept", "application/yaml"}}).status, 406);
}

TEST_F(ControlTrialsTest, regimes_are_those_of_the_export) {
  const std::string path = "/apis/rubato.dev/v1alpha1/engines/chat/regimes";
  const http::Response answer = side_.ask("GET", path);
  ASSERT_EQ(answer.status, 200) << answer.body;
  const auto read = tuner::regimes_from_json(answer.body);
  ASSERT_TRUE(read) << read.error().message;
  EXPECT_EQ(read->model_key, "synthetic/x");
  ASSERT_EQ(read->regimes.size(), 1U);
  EXPECT_EQ(read->regimes[0].evidence.judged, 200);
  EXPECT_EQ(side_.ask("GET", "/apis/rubato.dev/v1alpha1/engines/other/regimes").status, 404);
}

TEST(ControlTrials, before_anything_was_tried_the_list_is_empty) {
  ControlSide side;
  const Json list = Json::parse(side.ask("GET", trials).body);
  EXPECT_EQ(list["kind"], "TrialList");
  EXPECT_TRUE(list["items"].empty());
  EXPECT_EQ(side.ask("GET", trials + "/chat-1").status, 404);
}

}  // namespace
}  // namespace rubato::control
