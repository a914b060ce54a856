// SPDX-License-Identifier: Apache-2.0
// The promise the product is named for: settings change a hundred times under running streams and nobody's answer changes.
#include <gtest/gtest.h>

#include <atomic>
#include <nlohmann/json.hpp>
#include <thread>
#include <vector>

#include "tests/e2e/daemon_process.h"
#include "tests/e2e/stream_load.h"

namespace rubato::test {
namespace {

using nlohmann::json;

const char* const engine_path = "/apis/rubato.dev/v1alpha1/engines/live";

const char* const manifest = R"(apiVersion: rubato.dev/v1alpha1
kind: Engine
metadata: {name: live}
spec:
  model:
    synthetic: {architecture: Llama, hiddenSize: 128, layers: 4, heads: 4, kvHeads: 2, feedForward: 256, vocabulary: 512, seed: 3}
    dtype: BFloat16
  capacity: {maxModelLen: 1024, maxNumSeqs: 32, kvCacheMemory: 64Mi}
  objectives: {ttft: 5s, itl: 1s, attainment: 90}
  knobs:
    maxNumBatchedTokens: {initial: 256, min: 48, max: 1024}
    maxNumSeqs: {initial: 32, min: 8, max: 32}
  tuning: {enabled: false}
)";

const StreamLoad load_of_streams{
    .model = "live", .streams = 32, .answer_tokens = 600, .prompt_tokens = 40, .prompt_tokens_growth = 12};

TEST(LiveChange, a_hundred_patches_under_32_streams_change_no_answer) {
  const TemporaryFolder folder;
  DaemonProcess daemon({"--manifest", folder.write("engine.yaml", manifest).string()});
  ASSERT_TRUE(daemon.wait_ready(std::chrono::seconds(60))) << daemon.log();
  const std::vector<StreamedReply> undisturbed = run_streams(daemon.data_port(), load_of_streams);

  std::vector<StreamedReply> disturbed;
  std::atomic<int> pieces = 0;
  std::atomic<bool> ended = false;
  std::jthread load([&] {
    disturbed = run_streams(daemon.data_port(), load_of_streams, &pieces);
    ended = true;
  });
  const std::vector<std::string> policies{"Deadline", "DecodeFirst", "PrefillFirst", "ShortestFirst"};
  const std::vector<int> budgets{48, 64, 100, 256, 512, 1024};
  const double number_before = daemon.metric("rubato_settings_number").value_or(-1);
  int patched_while_streaming = 0;
  for (int i = 0; i < 100; ++i) {
    const json patch{{"spec",
                      {{"override",
                        {{"maxNumBatchedTokens", budgets[static_cast<std::size_t>(i * 7 + i / 6) % budgets.size()]},
                         {"priorityPolicy", policies[static_cast<std::size_t>(i) % policies.size()]}}}}}};
    const int before = pieces.load();
    const RawReply reply = daemon.control("PATCH", engine_path, patch.dump());
    ASSERT_EQ(reply.status, 200) << reply.body;
    const json status = json::parse(reply.body)["status"];
    EXPECT_EQ(status["settings"]["maxNumBatchedTokens"], patch["spec"]["override"]["maxNumBatchedTokens"]);
    // The next token of any stream comes from a step under the new settings.
    EXPECT_TRUE(eventually([&] { return ended || pieces.load() > before; }));
    if (!ended) {
      ++patched_while_streaming;
      const double wanted = patch["spec"]["override"]["maxNumBatchedTokens"].get<double>();
      EXPECT_TRUE(eventually([&] { return daemon.metric("rubato_knob{knob=\"maxNumBatchedTokens\"}") == wanted; })) << wanted;
    }
  }
  load.join();
  EXPECT_GE(patched_while_streaming, 90);
  EXPECT_GE(daemon.metric("rubato_settings_number").value_or(0), number_before + 90);

  expect_same_answers(load_of_streams, disturbed, undisturbed);
  EXPECT_TRUE(eventually([&] {
    return daemon.metric("vllm:num_requests_running{engine=\"0\",model_name=\"live\"}") == 0.0 &&
           daemon.metric("vllm:kv_cache_usage_perc{engine=\"0\",model_name=\"live\"}") == 0.0;
  }));
}

TEST(LiveChange, a_removed_override_falls_back_and_a_bad_patch_changes_nothing) {
  const TemporaryFolder folder;
  DaemonProcess daemon({"--manifest", folder.write("engine.yaml", manifest).string()});
  ASSERT_TRUE(daemon.wait_ready(std::chrono::seconds(60))) << daemon.log();
  ASSERT_EQ(daemon.control("PATCH", engine_path, R"({"spec":{"override":{"maxNumBatchedTokens":64}}})").status, 200);
  EXPECT_EQ(daemon.engine("live")["status"]["settings"]["maxNumBatchedTokens"], 64);
  EXPECT_EQ(daemon.engine("live")["status"]["layers"]["maxNumBatchedTokens"], "Override");

  const RawReply bad = daemon.control("PATCH", engine_path, R"({"spec":{"override":{"maxNumBatchedTokens":0}}})");
  EXPECT_EQ(bad.status, 422) << bad.body;
  EXPECT_EQ(daemon.engine("live")["status"]["settings"]["maxNumBatchedTokens"], 64);

  ASSERT_EQ(daemon.control("PATCH", engine_path, R"({"spec":{"override":null}})").status, 200);
  EXPECT_EQ(daemon.engine("live")["status"]["settings"]["maxNumBatchedTokens"], 256);
  EXPECT_EQ(daemon.engine("live")["status"]["layers"]["maxNumBatchedTokens"], "File");
}

TEST(LiveChange, a_changed_manifest_is_applied_and_a_bad_one_is_not) {
  const TemporaryFolder folder;
  DaemonProcess daemon({"--manifest", folder.write("engine.yaml", manifest).string()});
  ASSERT_TRUE(daemon.wait_ready(std::chrono::seconds(60))) << daemon.log();
  const auto wait_for = [&](auto&& condition) {
    for (int i = 0; i < 300; ++i) {
      if (condition(daemon.engine("live"))) return true;
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
    }
    return false;
  };
  const auto valid = [](const json& engine) {
    for (const json& condition : engine["status"]["conditions"]) {
      if (condition["type"] == "ManifestValid") return condition["status"].get<std::string>();
    }
    return std::string("missing");
  };

  std::string changed = manifest;
  changed.replace(changed.find("initial: 256"), 12, "initial: 128");
  folder.write("engine.yaml", changed);
  EXPECT_TRUE(wait_for([](const json& engine) { return engine["status"]["settings"]["maxNumBatchedTokens"] == 128; }));

  folder.write("engine.yaml", changed + "  bogus: 1\n");
  EXPECT_TRUE(wait_for([&](const json& engine) { return valid(engine) == "False"; })) << daemon.engine("live").dump(1);
  EXPECT_EQ(daemon.engine("live")["status"]["settings"]["maxNumBatchedTokens"], 128);
  EXPECT_EQ(daemon.control("GET", "/readyz").status, 200);

  folder.write("engine.yaml", manifest);
  EXPECT_TRUE(wait_for(
      [&](const json& engine) { return valid(engine) == "True" && engine["status"]["settings"]["maxNumBatchedTokens"] == 256; }));
}

}  // namespace
}  // namespace rubato::test
