// SPDX-License-Identifier: Apache-2.0
#include "daemon/control/control_api.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <thread>

#include "tests/daemon/control_fixture.h"
#include "tests/daemon/control_golden.h"

namespace rubato::control {
namespace {

using namespace std::chrono_literals;
using rubato::testing::control_manifest;
using rubato::testing::control_start;
using rubato::testing::ControlSide;
using rubato::testing::expect_golden;
using ::testing::AllOf;
using ::testing::HasSubstr;

const std::string engines = "/apis/rubato.dev/v1alpha1/engines";
const std::map<std::string, std::string, std::less<>> as_table{
    {"accept",
     "application/json;as=Table;v=v1;g=meta.k8s.io,application/json;as=Table;v=v1beta1;g=meta.k8s.io,application/json"}};

class ControlApiTest : public ::testing::Test {
 protected:
  ControlApiTest() { side_.start_serving(); }
  ControlSide side_;

  static std::string pretty(const http::Response& response) {
    return std::to_string(response.status) + " " + response.content_type + "\n" + Json::parse(response.body).dump(2) + "\n";
  }
  std::string condition(const std::string& type, const char* key = "status") {
    const Json engine = side_.engine();
    for (const auto& one : engine["status"]["conditions"]) {
      if (one["type"] == type) return one[key];
    }
    return "";
  }
  static tuner::TwinStatus twin_that_agrees() {
    tuner::TwinStatus twin;
    twin.state = tuner::TwinState::Trusted;
    twin.message = "the last window came out as predicted";
    twin.steps = 4321;
    twin.step_error = 0.0512;
    twin.correction = {.log_bias = {}, .error = {0.04, 0.11, 0.025, 0.08}, .windows = 9};
    twin.last_check = tuner::TwinCheck{.predicted = {120ms, 430ms, 12ms, 33ms},
                                       .measured = {123456789ns, 456789012ns, 12345678ns, 34567890ns},
                                       .attainment_predicted = 0.981,
                                       .attainment_measured = 0.975};
    twin.simulations_total = 96;
    twin.aborted_total = 1;
    twin.simulated_total = 5760s;
    return twin;
  }
  static tuner::Window window_of(std::int32_t judged, std::int32_t good) {
    tuner::Window window;
    window.begin = TimePoint(0s);
    window.end = TimePoint(15s);
    window.arrivals = judged;
    window.judged = judged;
    window.good = good;
    window.ttft_p50 = 123456789ns;
    window.ttft_p99 = 456789012ns;
    window.itl_p50 = 12345678ns;
    window.itl_p99 = 34567890ns;
    return window;
  }
};

TEST_F(ControlApiTest, discovery_answers_match_the_snapshots) {
  std::string all;
  for (const char* path : {"/apis", "/apis/rubato.dev", "/apis/rubato.dev/v1alpha1", "/api", "/api/v1", "/version"}) {
    all += std::string("GET ") + path + "\n" + pretty(side_.ask("GET", path));
  }
  expect_golden("control_discovery.txt", all);
}

TEST_F(ControlApiTest, object_list_and_table_match_the_snapshots) {
  tuner::Trial trial;
  trial.number = 3;
  trial.window = window_of(40, 39);
  trial.outcome = "Incumbent";
  tuner::TunerStatus status;
  status.phase = tuner::Phase::Searching;
  status.reason = "TrialStarted";
  status.message = "trying a smaller budget";
  status.trials_total = 3;
  status.searches_total = 1;
  status.alarms_total = 2;
  status.risk_used = 0.031;
  side_.reconciler.report({.status = status,
                           .trials = {trial},
                           .window = window_of(120, 117),
                           .twin = twin_that_agrees(),
                           .twin_cpu = 2345ms,
                           .twin_core_percent = 50});
  side_.patch(
      R"({"spec":{"override":{"maxNumBatchedTokens":256,"expiresAfter":"10m"}},"metadata":{"annotations":{"note":"x"}}})");
  side_.now += 200s;
  std::string all = "GET engine\n" + pretty(side_.ask("GET", engines + "/chat"));
  all += "GET list\n" + pretty(side_.ask("GET", engines));
  all += "GET table\n" + pretty(side_.ask("GET", engines, as_table));
  all += "GET events\n" + pretty(side_.ask("GET", "/api/v1/events"));
  all += "GET events table\n" + pretty(side_.ask("GET", "/api/v1/namespaces/default/events", as_table));
  expect_golden("control_engine.txt", all);
}

TEST_F(ControlApiTest, each_kind_of_error_matches_the_snapshot) {
  std::string all;
  const auto add = [&](const std::string& what, const http::Response& response) { all += what + "\n" + pretty(response); };
  const std::string chat = engines + "/chat";
  const std::map<std::string, std::string, std::less<>> merge{{"content-type", "application/merge-patch+json"}};
  add("unknown name", side_.ask("GET", engines + "/nosuch"));
  add("patch of an unknown name", side_.ask("PATCH", engines + "/nosuch", merge, "{}"));
  add("unknown resource", side_.ask("GET", "/apis/rubato.dev/v1alpha1/motors"));
  add("verb not allowed", side_.ask("DELETE", chat));
  add("watch", side_.ask("GET", engines + "?watch=true"));
  add("not acceptable", side_.ask("GET", chat, {{"accept", "application/yaml"}}));
  add("strategic patch", side_.ask("PATCH", chat, {{"content-type", "application/strategic-merge-patch+json"}}, "{}"));
  add("apply patch", side_.ask("PATCH", chat, {{"content-type", "application/apply-patch+yaml"}}, "{}"));
  add("stale version", side_.patch(R"({"metadata":{"resourceVersion":"1"}})"));
  add("one invalid field", side_.patch(R"({"spec":{"objectives":{"itl":"fast"}}})"));
  add("two invalid fields", side_.patch(R"({"spec":{"objectives":{"itl":5},"knobs":{"priorityPolicy":{"initial":"Fifo"}}}})"));
  add("restart field", side_.patch(R"({"spec":{"model":{"path":"/other"}}})"));
  add("unknown field, strict", side_.patch(R"({"spec":{"objectives":{"tttft":"1s"}}})", "?fieldValidation=Strict"));
  add("other name", side_.patch(R"({"metadata":{"name":"other"}})"));
  add("other version", side_.patch(R"({"apiVersion":"v1"})"));
  add("unknown field selector", side_.ask("GET", engines + "?fieldSelector=spec.x=1"));
  add("bad dryRun", side_.patch("{}", "?dryRun=Some"));
  add("too many requests", ControlApi::error_response(429, "too many connections"));
  expect_golden("control_errors.txt", all);
}

TEST_F(ControlApiTest, a_body_that_is_not_json_or_is_nested_too_deep_is_refused) {
  EXPECT_EQ(side_.patch("{").status, 400);
  EXPECT_EQ(side_.patch("").status, 400);
  EXPECT_EQ(side_.patch("{\"metadata\":{\"labels\":{\"a\":" + std::string(1'000'000, '[')).status, 400);
  EXPECT_EQ(side_.patch("{\"metadata\":{\"labels\":" + std::string(100, '[') + std::string(100, ']') + "}}").status, 400);
  EXPECT_EQ(side_.patch(std::string((3 << 20) + 1, ' ')).status, 413);
  EXPECT_EQ(side_.patch("{\"metadata\":{\"labels\":{\"a\":\"\xff\"}}}").status, 400) << "not UTF-8";
}

TEST_F(ControlApiTest, an_override_is_applied_once_shown_and_taken_back) {
  EXPECT_EQ(side_.serving.applied.size(), 0U) << "started with what is wanted";
  const auto answer = side_.patch(R"({"spec":{"override":{"maxNumBatchedTokens":256,"expiresAfter":"10m"}}})");
  ASSERT_EQ(answer.status, 200) << answer.body;
  ASSERT_EQ(side_.serving.applied.size(), 1U);
  EXPECT_EQ(side_.serving.applied[0].max_num_batched_tokens, 256);
  Json engine = side_.engine();
  EXPECT_EQ(Json::parse(answer.body), engine) << "the answer is what a get shows";
  EXPECT_EQ(engine["status"]["settings"]["number"], 2);
  EXPECT_EQ(engine["status"]["layers"]["maxNumBatchedTokens"], "Override");
  EXPECT_EQ(engine["status"]["observedGeneration"], engine["metadata"]["generation"]);
  EXPECT_EQ(condition("Overridden"), "True");
  side_.reconciler.tick();
  side_.patch(R"({"spec":{"override":{"maxNumBatchedTokens":256}}})");
  EXPECT_EQ(side_.serving.applied.size(), 1U) << "the same again applies nothing";
  side_.patch(R"({"spec":{"override":null}})");
  ASSERT_EQ(side_.serving.applied.size(), 2U);
  EXPECT_EQ(side_.serving.applied[1].max_num_batched_tokens, 512);
  EXPECT_EQ(condition("Overridden"), "False");
}

TEST_F(ControlApiTest, an_override_expires_by_the_tick_and_by_any_look) {
  side_.patch(R"({"spec":{"override":{"maxNumBatchedTokens":256,"expiresAfter":"10m"}}})");
  side_.now += 10min - 1ms;
  side_.reconciler.tick();
  EXPECT_EQ(side_.serving.applied.size(), 1U);
  side_.now += 1ms;
  side_.reconciler.tick();
  ASSERT_EQ(side_.serving.applied.size(), 2U);
  EXPECT_EQ(side_.serving.applied[1].max_num_batched_tokens, 512);
  EXPECT_THAT(*side_.metrics.render({}), HasSubstr("rubato_settings_changes_total{source=\"expiry\"} 1"));
}

TEST_F(ControlApiTest, a_dry_run_answers_as_if_done_and_does_nothing) {
  const Json before = side_.engine();
  const auto answer = side_.patch(R"({"spec":{"override":{"maxNumBatchedTokens":256}}})", "?dryRun=All");
  ASSERT_EQ(answer.status, 200);
  const Json shown = Json::parse(answer.body);
  EXPECT_EQ(shown["spec"]["override"]["maxNumBatchedTokens"], 256);
  EXPECT_EQ(shown["status"]["settings"]["maxNumBatchedTokens"], 256);
  EXPECT_EQ(side_.engine(), before);
  EXPECT_TRUE(side_.serving.applied.empty());
}

TEST_F(ControlApiTest, the_version_changes_with_every_difference_and_only_then) {
  const auto version = [&] { return side_.engine()["metadata"]["resourceVersion"].get<std::string>(); };
  const std::string first = version();
  side_.reconciler.tick();
  side_.now += 1h;
  EXPECT_EQ(version(), first) << "time alone changes nothing";
  side_.patch("{}");
  EXPECT_EQ(version(), first) << "an empty patch changes nothing";
  side_.patch(R"({"metadata":{"labels":{"x":"y"}}})");
  const std::string second = version();
  EXPECT_NE(second, first);
  side_.serving.begin_drain();
  EXPECT_NE(version(), second);
  EXPECT_EQ(side_.patch(R"({"metadata":{"resourceVersion":")" + second + R"("},"spec":{}})").status, 409);
  EXPECT_EQ(side_.patch(R"({"metadata":{"resourceVersion":")" + version() + R"("},"spec":{}})").status, 200);
}

TEST_F(ControlApiTest, unknown_fields_warn_by_default_and_are_silent_on_ignore) {
  const auto warned = side_.patch(R"({"spec":{"objectives":{"tttft":"1s"}}})");
  EXPECT_EQ(warned.status, 200);
  EXPECT_THAT(warned.headers, ::testing::Contains(std::pair<std::string, std::string>(
                                  "Warning", "299 - \"unknown field \\\"spec.objectives.tttft\\\"\"")));
  for (const auto& [name, value] : side_.patch(R"({"spec":{"objectives":{"tttft":"1s"}}})", "?fieldValidation=Ignore").headers) {
    EXPECT_NE(name, "Warning") << value;
  }
}

TEST_F(ControlApiTest, a_bad_manifest_changes_a_condition_a_metric_and_an_event_alone) {
  const Json before = side_.engine();
  side_.reconciler.on_manifest(parse_manifest("kind: [", "chat.yaml"));
  Json after = side_.engine();
  EXPECT_EQ(after["spec"], before["spec"]);
  EXPECT_EQ(after["status"]["manifest"], before["status"]["manifest"]);
  EXPECT_EQ(condition("ManifestValid"), "False");
  EXPECT_THAT(condition("ManifestValid", "message"), HasSubstr("chat.yaml:1:"));
  EXPECT_TRUE(side_.serving.applied.empty());
  EXPECT_THAT(*side_.metrics.render({}), HasSubstr("rubato_manifest_reload_failed 1"));
  EXPECT_THAT(side_.ask("GET", "/api/v1/events?fieldSelector=reason=ManifestRefused").body, HasSubstr("\"type\":\"Warning\""));
  EXPECT_EQ(side_.ask("GET", "/readyz").status, 200) << "the last good manifest serves on";
  side_.reconciler.on_manifest(
      control_manifest("  knobs: {maxNumBatchedTokens: {initial: 300, min: 64, max: 4096}}\n  objectives: {ttft: 250ms}\n"));
  EXPECT_EQ(condition("ManifestValid"), "True");
  ASSERT_EQ(side_.serving.applied.size(), 1U);
  EXPECT_EQ(side_.serving.applied[0].max_num_batched_tokens, 300);
  EXPECT_EQ(side_.serving.objectives_.ttft, 250ms);
  EXPECT_THAT(*side_.metrics.render(TimePoint(1s)), AllOf(HasSubstr("rubato_manifest_reload_failed 0"),
                                                          HasSubstr("rubato_objective_seconds{objective=\"ttft\"} 0.25")));
}

TEST_F(ControlApiTest, fields_that_need_a_restart_are_named) {
  side_.reconciler.on_manifest(control_manifest("  capacity: {maxModelLen: 2048}\n"));
  EXPECT_EQ(side_.engine()["status"]["restartRequired"], Json::parse(R"(["spec.capacity.maxModelLen"])"));
  EXPECT_EQ(condition("ManifestValid", "reason"), "RestartRequired");
}

TEST_F(ControlApiTest, the_tuner_proposes_through_the_same_door) {
  KnobValues wanted = side_.reconciler.tuning_input().space.base;
  wanted.max_num_batched_tokens = 1024;
  const auto number = side_.reconciler.propose(wanted, "TrialStarted", "trying 1024");
  ASSERT_TRUE(number);
  EXPECT_EQ(*number, 2U);
  EXPECT_EQ(side_.reconciler.propose(wanted, "TrialStarted", "again").value(), 2U) << "nothing differs";
  EXPECT_EQ(side_.serving.applied.size(), 1U);
  EXPECT_EQ(side_.engine()["status"]["layers"]["maxNumBatchedTokens"], "Tuner");
  wanted.max_num_batched_tokens = 1;
  EXPECT_FALSE(side_.reconciler.propose(wanted, "TrialStarted", "too small"));
  EXPECT_THAT(side_.ask("GET", "/api/v1/events").body, HasSubstr("trying 1024"));
}

TEST_F(ControlApiTest, a_window_judged_by_other_objectives_is_not_shown) {
  side_.reconciler.report({.status = {}, .trials = {}, .window = window_of(100, 10)});
  EXPECT_EQ(condition("ObjectivesMet"), "False");
  side_.patch(R"({"spec":{"objectives":{"ttft":"10s"}}})");
  EXPECT_EQ(condition("ObjectivesMet"), "Unknown");
}

TEST_F(ControlApiTest, probes_answer_for_the_right_reasons) {
  EXPECT_EQ(side_.ask("GET", "/livez").body, "ok");
  EXPECT_THAT(side_.ask("GET", "/readyz?verbose").body, AllOf(HasSubstr("[+]ping ok\n"), HasSubstr("readyz check passed")));
  EXPECT_EQ(side_.ask("GET", "/readyz/accepting").body, "ok");
  EXPECT_EQ(side_.ask("GET", "/readyz/nosuch").status, 404);
  side_.serving.begin_drain();
  EXPECT_EQ(side_.ask("GET", "/readyz").status, 503);
  EXPECT_THAT(side_.ask("GET", "/readyz").body, AllOf(HasSubstr("[-]accepting failed"), HasSubstr("readyz check failed")));
  EXPECT_EQ(side_.ask("GET", "/readyz?exclude=accepting").status, 200);
  EXPECT_EQ(side_.ask("GET", "/livez").status, 200) << "draining is no reason to be killed";
  side_.serving.is_idle = false;
  EXPECT_EQ(side_.ask("GET", "/livez").status, 200);
  side_.serving.time += StallDetector::stalled_after + 1s;
  EXPECT_EQ(side_.ask("GET", "/livez").status, 503) << "work waits and no step ends";
  side_.serving.status_.steps = 1;
  EXPECT_EQ(side_.ask("GET", "/healthz").status, 200);
}

TEST(ControlStart, until_a_model_is_loaded_it_lives_but_is_not_ready) {
  ControlSide side;
  EXPECT_EQ(side.ask("GET", "/livez").status, 200);
  EXPECT_EQ(side.ask("GET", "/readyz").status, 503);
  EXPECT_EQ(data_health_response(side.reconciler.health()).status, 503);
  EXPECT_EQ(side.engine()["status"]["conditions"][0]["reason"], "Loading");
  EXPECT_EQ(side.patch(R"({"spec":{"override":{"maxNumBatchedTokens":256}}})").status, 200);
  EXPECT_EQ(side.reconciler.knobs().max_num_batched_tokens, 256);
  side.start_serving();
  EXPECT_EQ(side.ask("GET", "/readyz").status, 200);
  EXPECT_TRUE(side.serving.applied.empty());
}

TEST_F(ControlApiTest, metrics_and_dashboard_are_served) {
  const auto metrics = side_.ask("GET", "/metrics");
  EXPECT_EQ(metrics.content_type, "text/plain; version=0.0.4; charset=utf-8");
  EXPECT_THAT(metrics.body, HasSubstr("# TYPE rubato_settings_number gauge"));
  const auto page = side_.ask("GET", "/");
  EXPECT_EQ(page.content_type, "text/html; charset=utf-8");
  EXPECT_EQ(page.body.find("<!doctype html>"), 0U);
  for (const char* outside : {"src=", "href=", "https:", "@import", "url("}) {
    EXPECT_EQ(page.body.find(outside), std::string::npos) << outside << " would load something from elsewhere";
  }
}

TEST_F(ControlApiTest, selectors_filter_engines_and_events) {
  const auto count = [&](const std::string& path) { return Json::parse(side_.ask("GET", path).body)["items"].size(); };
  EXPECT_EQ(count(engines + "?fieldSelector=metadata.name=chat"), 1U);
  EXPECT_EQ(count(engines + "?fieldSelector=metadata.name=other"), 0U);
  EXPECT_EQ(count(engines + "?labelSelector=team=a"), 1U);
  EXPECT_EQ(count(engines + "?labelSelector=team=b"), 0U);
  side_.patch(R"({"spec":{"objectives":{"itl":"45ms"}}})");
  const std::string uid = side_.engine()["metadata"]["uid"];
  EXPECT_EQ(count("/api/v1/"
                  "events?fieldSelector=involvedObject.name=chat,involvedObject.namespace=,involvedObject.kind=Engine,"
                  "involvedObject.uid=" +
                  uid),
            1U)
      << "as kubectl describe asks";
  EXPECT_EQ(count("/api/v1/events?fieldSelector=involvedObject.name=other"), 0U);
  EXPECT_EQ(count("/api/v1/namespaces/other/events"), 0U);
}

TEST(ControlRestart, changes_made_over_the_api_survive_a_restart_and_their_time_goes_on) {
  std::string pattern = (std::filesystem::temp_directory_path() / "rubato-control-XXXXXX").string();
  ASSERT_NE(mkdtemp(pattern.data()), nullptr);
  Json before;
  {
    ControlSide side(pattern);
    side.start_serving();
    side.patch(
        R"({"metadata":{"labels":{"tier":"gold"}},"spec":{"objectives":{"ttft":"300ms"},"override":{"maxNumBatchedTokens":256,"expiresAfter":"10m"}}})");
    before = side.engine();
  }
  {
    ControlSide side(pattern);
    side.now += 5min;
    side.start_serving();
    Json after = side.engine();
    EXPECT_EQ(after["spec"], before["spec"]);
    EXPECT_EQ(after["metadata"]["labels"], before["metadata"]["labels"]);
    EXPECT_EQ(after["metadata"]["uid"], before["metadata"]["uid"]);
    EXPECT_EQ(after["metadata"]["generation"], before["metadata"]["generation"]);
    EXPECT_EQ(after["metadata"]["creationTimestamp"], before["metadata"]["creationTimestamp"]);
    EXPECT_EQ(side.reconciler.knobs().max_num_batched_tokens, 256);
    EXPECT_EQ(side.serving.objectives_.ttft, 300ms);
    side.now = control_start + 10min;
    side.reconciler.tick();
    EXPECT_EQ(side.reconciler.knobs().max_num_batched_tokens, 512);
  }
  std::ofstream(pattern + "/chat.state.json") << "{";
  ControlSide side(pattern);
  EXPECT_THAT(side.ask("GET", "/api/v1/events").body, HasSubstr("StateLost"));
  EXPECT_EQ(side.engine()["spec"]["objectives"]["ttft"], "500ms");
  std::filesystem::remove_all(pattern);
}

TEST(ControlRestart, a_change_that_cannot_be_saved_is_in_force_with_a_warning_and_saved_later) {
  std::string pattern = (std::filesystem::temp_directory_path() / "rubato-control-XXXXXX").string();
  ASSERT_NE(mkdtemp(pattern.data()), nullptr);
  const std::string directory = pattern + "/state";
  std::ofstream(directory) << "in the way";
  ControlSide side(directory);
  side.start_serving();
  const auto answer = side.patch(R"({"spec":{"override":{"maxNumBatchedTokens":256}}})");
  EXPECT_EQ(answer.status, 200);
  EXPECT_EQ(side.serving.applied.size(), 1U);
  EXPECT_THAT(answer.headers, ::testing::Contains(::testing::Pair("Warning", HasSubstr("could not be saved"))));
  std::filesystem::remove(directory);
  std::filesystem::create_directory(directory);
  side.reconciler.tick();
  EXPECT_FALSE(std::filesystem::exists(directory + "/chat.state.json")) << "the next try waits";
  side.now += 2min;
  side.reconciler.tick();
  EXPECT_TRUE(std::filesystem::exists(directory + "/chat.state.json"));
  std::filesystem::remove_all(pattern);
}

TEST_F(ControlApiTest, many_threads_may_ask_and_patch_at_once) {
  std::vector<std::jthread> threads;
  for (int thread = 0; thread < 4; ++thread) {
    threads.emplace_back([this, thread] {
      for (int round = 0; round < 25; ++round) {
        const std::string budget = std::to_string(100 + 10 * thread + round);
        EXPECT_EQ(side_.patch(R"({"spec":{"override":{"maxNumBatchedTokens":)" + budget + "}}}").status, 200);
        EXPECT_EQ(side_.ask("GET", engines + "/chat").status, 200);
        EXPECT_EQ(side_.ask("GET", "/livez").status, 200);
      }
    });
  }
  threads.clear();
  const Json engine = side_.engine();
  EXPECT_EQ(engine["spec"]["override"]["maxNumBatchedTokens"], engine["status"]["settings"]["maxNumBatchedTokens"]);
  EXPECT_EQ(side_.serving.applied.back().max_num_batched_tokens, engine["spec"]["override"]["maxNumBatchedTokens"].get<int>());
}

}  // namespace
}  // namespace rubato::control
