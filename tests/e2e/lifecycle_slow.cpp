// SPDX-License-Identifier: Apache-2.0
// Starting, draining, dying: what operators and Kubernetes see of the process.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <nlohmann/json.hpp>
#include <thread>

#include "tests/e2e/daemon_process.h"
#include "tests/e2e/stream_client.h"

namespace rubato::test {
namespace {

using nlohmann::json;
using ::testing::HasSubstr;

const char* const manifest = R"(apiVersion: rubato.dev/v1alpha1
kind: Engine
metadata: {name: life}
spec:
  model:
    synthetic: {architecture: Llama, hiddenSize: 128, layers: 4, heads: 4, kvHeads: 2, feedForward: 256, vocabulary: 512, seed: 3}
  capacity: {maxModelLen: 2048, maxNumSeqs: 16, maxWaiting: 16, kvCacheMemory: 64Mi}
  knobs:
    maxNumBatchedTokens: {initial: 128, min: 32, max: 512}
    maxNumSeqs: {initial: 16, min: 1, max: 16}
  tuning: {enabled: false}
)";

json request(int tokens) {
  return json{{"model", "life"},      {"prompt", json::array({1, 2, 3, 4})},
              {"max_tokens", tokens}, {"temperature", 0},
              {"ignore_eos", true},   {"stream", true}};
}

TEST(Lifecycle, sigterm_refuses_new_requests_and_finishes_running_ones) {
  const TemporaryFolder folder;
  DaemonProcess daemon({"--manifest", folder.write("engine.yaml", manifest).string()});
  ASSERT_TRUE(daemon.wait_ready(std::chrono::seconds(60))) << daemon.log();
  std::atomic<bool> streaming = false;
  StreamedReply reply;
  std::jthread client(
      [&] { reply = stream_completion(daemon.data_port(), request(2000), [&](const StreamedChoice&) { streaming = true; }); });
  for (int i = 0; i < 5000 && !streaming; ++i) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  ASSERT_TRUE(streaming);
  daemon.signal(SIGTERM);
  int refused_status = 0;
  std::string retry_after;
  for (int i = 0; i < 200; ++i) {
    const RawReply refused = daemon.data("POST", "/v1/completions", request(4).dump());
    refused_status = refused.status;
    if (refused.status == 503 && refused.headers.contains("retry-after")) {
      retry_after = refused.headers.at("retry-after");
      break;
    }
  }
  EXPECT_EQ(refused_status, 503);
  EXPECT_NE(retry_after, "");
  EXPECT_NE(daemon.control("GET", "/readyz").status, 200);
  EXPECT_EQ(daemon.control("GET", "/livez").status, 200);
  client.join();
  EXPECT_TRUE(reply.done);
  EXPECT_EQ(reply.choices[0].finish_reasons, std::vector<std::string>{"length"});
  EXPECT_EQ(daemon.wait_exit(std::chrono::seconds(30)), 0) << daemon.log();
}

TEST(Lifecycle, a_second_sigterm_ends_it_at_once) {
  const TemporaryFolder folder;
  DaemonProcess daemon({"--manifest", folder.write("engine.yaml", manifest).string()});
  ASSERT_TRUE(daemon.wait_ready(std::chrono::seconds(60))) << daemon.log();
  std::atomic<bool> streaming = false;
  StreamedReply reply;
  std::jthread client(
      [&] { reply = stream_completion(daemon.data_port(), request(2000), [&](const StreamedChoice&) { streaming = true; }); });
  for (int i = 0; i < 5000 && !streaming; ++i) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  daemon.signal(SIGTERM);
  EXPECT_TRUE(eventually([&] { return daemon.log().find("draining") != std::string::npos; }));
  daemon.signal(SIGTERM);
  EXPECT_TRUE(daemon.wait_exit(std::chrono::seconds(10)).has_value());
  client.join();
  EXPECT_FALSE(reply.done && reply.choices[0].finish_reasons.empty());
}

TEST(Lifecycle, a_full_queue_answers_429_with_retry_after) {
  const TemporaryFolder folder;
  DaemonProcess daemon({"--manifest", folder.write("engine.yaml", manifest).string()});
  ASSERT_TRUE(daemon.wait_ready(std::chrono::seconds(60))) << daemon.log();
  std::vector<RawClient> clients;
  for (int i = 0; i < 32; ++i) {
    clients.emplace_back(daemon.data_port());
    clients.back().send(post_text("/v1/completions", request(2000).dump()));
    ASSERT_EQ(clients.back().read_head().status, 200);
  }
  const RawReply refused = daemon.data("POST", "/v1/completions", request(4).dump());
  EXPECT_EQ(refused.status, 429) << refused.body;
  EXPECT_TRUE(refused.headers.contains("retry-after"));
  clients.clear();  // everybody leaves: there is room again, and all blocks come back
  EXPECT_TRUE(eventually([&] {
    const json body{{"model", "life"}, {"prompt", "hi"}, {"max_tokens", 2}};
    return daemon.data("POST", "/v1/completions", body.dump()).status == 200;
  }));
  EXPECT_TRUE(eventually([&] {
    return daemon.metric("vllm:num_requests_running{engine=\"0\",model_name=\"life\"}") == 0.0 &&
           daemon.metric("vllm:num_requests_waiting{engine=\"0\",model_name=\"life\"}") == 0.0 &&
           daemon.metric("vllm:kv_cache_usage_perc{engine=\"0\",model_name=\"life\"}") == 0.0;
  }));
}

TEST(Lifecycle, api_changes_survive_kill_9) {
  const TemporaryFolder folder;
  const std::string file = folder.write("engine.yaml", manifest).string();
  const std::string state = (folder.path() / "state").string();
  {
    DaemonProcess daemon({"--manifest", file, "--state", state});
    ASSERT_TRUE(daemon.wait_ready(std::chrono::seconds(60))) << daemon.log();
    ASSERT_EQ(
        daemon.control("PATCH", "/apis/rubato.dev/v1alpha1/engines/life", R"({"spec":{"override":{"maxNumBatchedTokens":64}}})")
            .status,
        200);
    daemon.signal(SIGKILL);
    daemon.wait_exit(std::chrono::seconds(10));
  }
  DaemonProcess daemon({"--manifest", file, "--state", state});
  ASSERT_TRUE(daemon.wait_ready(std::chrono::seconds(60))) << daemon.log();
  EXPECT_EQ(daemon.engine("life")["status"]["settings"]["maxNumBatchedTokens"], 64);
}

TEST(Lifecycle, bad_manifests_never_start) {
  const TemporaryFolder folder;
  const std::string missing_model =
      folder
          .write("a.yaml",
                 "apiVersion: rubato.dev/v1alpha1\nkind: Engine\nmetadata: {name: x}\nspec: {model: {path: /nonexistent}}\n")
          .string();
  DaemonProcess no_model({"--manifest", missing_model});
  EXPECT_NE(no_model.wait_exit(std::chrono::seconds(20)).value_or(0), 0);
  EXPECT_THAT(no_model.log(), HasSubstr("/nonexistent"));

  const std::string bad = folder.write("b.yaml", std::string(manifest) + "  bogus: 1\n").string();
  DaemonProcess misspelt({"--manifest", bad});
  EXPECT_NE(misspelt.wait_exit(std::chrono::seconds(20)).value_or(0), 0);
  EXPECT_THAT(misspelt.log(), HasSubstr("bogus"));

  DaemonProcess check({"--manifest", bad, "--check"});
  EXPECT_EQ(check.wait_exit(std::chrono::seconds(20)), 1);
  EXPECT_THAT(check.log(), HasSubstr("b.yaml:12:3 spec.bogus"));

  DaemonProcess good({"--manifest", folder.write("c.yaml", manifest).string(), "--check"});
  EXPECT_EQ(good.wait_exit(std::chrono::seconds(20)), 0) << good.log();
}

}  // namespace
}  // namespace rubato::test
