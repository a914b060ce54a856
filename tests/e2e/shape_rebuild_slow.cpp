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
#include "tests/e2e/stream_load.h"

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

/// Long prompts first, so that chunks of every budget run beside decodes.
const StreamLoad load_of_streams{
    .model = "shapes", .streams = 32, .answer_tokens = 1200, .prompt_tokens = 30, .prompt_tokens_growth = 20};

json shapes_of(const DaemonProcess& daemon) {
  return daemon.engine("shapes")["status"]["shapes"];
}

TEST(ShapeRebuild, budgets_move_under_32_streams_and_every_rebuild_goes_unnoticed) {
  const TemporaryFolder folder;
  DaemonProcess daemon({"--manifest", folder.write("engine.yaml", manifest).string()});
  ASSERT_TRUE(daemon.wait_ready(std::chrono::seconds(60))) << daemon.log();
  ASSERT_TRUE(eventually([&] { return !shapes_of(daemon)["buckets"].empty(); }));
  EXPECT_EQ(shapes_of(daemon)["buckets"].back(), 512);
  const std::vector<StreamedReply> undisturbed = run_streams(daemon.data_port(), load_of_streams);
  const double rebuilds_before = daemon.metric("rubato_shape_rebuilds_total{result=\"ok\"}").value_or(-1);
  EXPECT_GE(rebuilds_before, 1);

  std::vector<StreamedReply> disturbed;
  std::atomic<bool> ended = false;
  std::jthread load([&] {
    disturbed = run_streams(daemon.data_port(), load_of_streams);
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

  expect_same_answers(load_of_streams, disturbed, undisturbed);
}

}  // namespace
}  // namespace rubato::test
