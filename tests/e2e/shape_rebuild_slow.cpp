// SPDX-License-Identifier: Apache-2.0
// Step shapes rebuilt under real clients: the budget goes 64 -> 2048 -> 256, again and again, while 32 streams run; every set is
// built and taken, and nobody's answer shows it. (That no step waits for a build: tests/daemon/shape_thread_test.cpp.)
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <nlohmann/json.hpp>
#include <thread>
#include <vector>

#include "tests/e2e/daemon_process.h"
#include "tests/e2e/stream_client.h"

namespace rubato::test {
namespace {

using nlohmann::json;

const char* const manifest = R"(apiVersion: rubato.dev/v1alpha1
kind: Engine
metadata: {name: shapes}
spec:
  model:
    synthetic: {architecture: Llama, hiddenSize: 128, layers: 4, heads: 4, kvHeads: 2, feedForward: 256, vocabulary: 512, seed: 3}
    dtype: BFloat16
  capacity: {maxModelLen: 2048, maxNumSeqs: 32, kvCacheMemory: 128Mi}
  objectives: {ttft: 5s, itl: 1s, attainment: 90}
  knobs:
    maxNumBatchedTokens: {initial: 512, min: 64, max: 2048}
    maxNumSeqs: {initial: 32, min: 8, max: 32}
  tuning: {enabled: false}
)";

constexpr int streams = 32;
constexpr int answer_tokens = 1200;

/// Long prompts first, so that chunks of every budget run beside decodes.
json request_of(int stream) {
  json prompt = json::array();
  for (int i = 0; i < 30 + 20 * stream; ++i) prompt.push_back((i * 31 + stream * 7) % 500 + 1);
  return json{{"model", "shapes"},
              {"prompt", prompt},
              {"max_tokens", answer_tokens},
              {"temperature", stream % 2 == 0 ? 0.0 : 0.9},
              {"seed", 1000 + stream},
              {"ignore_eos", true},
              {"stream", true},
              {"stream_options", {{"include_usage", true}}}};
}

std::vector<StreamedReply> run_streams(int port) {
  std::vector<StreamedReply> replies(streams);
  std::vector<std::jthread> clients;
  for (int i = 0; i < streams; ++i) {
    clients.emplace_back([&, i] { replies[static_cast<std::size_t>(i)] = stream_completion(port, request_of(i)); });
  }
  clients.clear();
  return replies;
}

json shapes_of(const DaemonProcess& daemon) {
  return daemon.engine("shapes")["status"]["shapes"];
}

TEST(ShapeRebuild, budgets_move_under_32_streams_and_every_rebuild_goes_unnoticed) {
  const TemporaryFolder folder;
  DaemonProcess daemon({"--manifest", folder.write("engine.yaml", manifest).string()});
  ASSERT_TRUE(daemon.wait_ready(std::chrono::seconds(60))) << daemon.log();
  ASSERT_TRUE(eventually([&] { return !shapes_of(daemon)["buckets"].empty(); }));
  EXPECT_EQ(shapes_of(daemon)["buckets"].back(), 512);
  const std::vector<StreamedReply> undisturbed = run_streams(daemon.data_port());
  const double rebuilds_before = daemon.metric("rubato_shape_rebuilds_total{result=\"ok\"}").value_or(-1);
  EXPECT_GE(rebuilds_before, 1);

  std::vector<StreamedReply> disturbed;
  std::atomic<bool> ended = false;
  std::jthread load([&] {
    disturbed = run_streams(daemon.data_port());
    ended = true;
  });
  int rebuilt_while_streaming = 0;
  for (int round = 0; round < 100 && !ended; ++round) {
    for (const int budget : {64, 2048, 256}) {
      const json patch{{"spec", {{"override", {{"maxNumBatchedTokens", budget}}}}}};
      ASSERT_EQ(daemon.control("PATCH", "/apis/rubato.dev/v1alpha1/engines/shapes", patch.dump()).status, 200);
      EXPECT_TRUE(eventually([&] { return shapes_of(daemon)["buckets"].back() == budget; })) << shapes_of(daemon);
      rebuilt_while_streaming += ended ? 0 : 1;
    }
  }
  load.join();
  EXPECT_GE(rebuilt_while_streaming, 6);

  EXPECT_GE(daemon.metric("rubato_shape_rebuilds_total{result=\"ok\"}").value_or(0), rebuilds_before + rebuilt_while_streaming);
  EXPECT_EQ(daemon.metric("rubato_shape_rebuilds_total{result=\"failed\"}"), 0.0);
  EXPECT_GE(daemon.metric("rubato_shape_swap_seconds_count").value_or(0), rebuilds_before + rebuilt_while_streaming);
  EXPECT_EQ(daemon.metric("rubato_shape_padding_tokens_total"), 0.0);  // the CPU computes no padding
  EXPECT_EQ(daemon.metric("rubato_shapes"), static_cast<double>(shapes_of(daemon)["buckets"].size()));
  const double in_shape = daemon.metric("rubato_shape_steps_total{kind=\"shape\"}").value_or(0);
  const double eager = daemon.metric("rubato_shape_steps_total{kind=\"eager\"}").value_or(0);
  EXPECT_EQ(in_shape + eager, daemon.metric("rubato_step_duration_seconds_count"));
  EXPECT_GT(in_shape, eager);  // decodes alone are most steps

  ASSERT_EQ(disturbed.size(), undisturbed.size());
  for (std::size_t i = 0; i < disturbed.size(); ++i) {
    EXPECT_EQ(disturbed[i].status, 200) << i;
    EXPECT_TRUE(disturbed[i].done) << i;
    EXPECT_EQ(disturbed[i].error, "") << i;
    EXPECT_EQ(disturbed[i].usage["completion_tokens"], answer_tokens) << i;
    EXPECT_EQ(disturbed[i].choices[0].text, undisturbed[i].choices.at(0).text) << i;
  }
}

}  // namespace
}  // namespace rubato::test
