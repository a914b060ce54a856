// SPDX-License-Identifier: Apache-2.0
// Shapes rebuilt under load stall no step. Not shown by a clock, which an emulated device has none of, but by the order of what
// was queued and waited for: the lane's thread waits for its step streams alone, and nothing on these ever waits for a capture.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <set>
#include <thread>

#include "engine/cuda/backend.h"
#include "engine/lane.h"
#include "engine/shape_builder.h"
#include "tests/cuda/on_device.h"
#include "tests/support/golden_streams.h"
#include "tests/support/lane_client.h"

namespace rubato::engine {
namespace {

#if RUBATO_CUDA_EMULATED
using cuda_host::Action;
using cuda_host::LogEntry;

struct Streams {
  std::set<int> of_steps;
  std::set<int> of_captures;
};

Streams streams_of(const std::vector<LogEntry>& log, std::uint64_t lane_thread) {
  Streams streams;
  for (const LogEntry& entry : log) {
    if (entry.action == Action::CaptureBegan) streams.of_captures.insert(entry.stream);
    if (entry.thread == lane_thread && (entry.action == Action::Queued || entry.action == Action::GraphLaunched))
      streams.of_steps.insert(entry.stream);
  }
  return streams;
}

/// What a step could be stalled by, each a line; none is allowed.
std::vector<std::string> stalls(const std::vector<LogEntry>& log, std::uint64_t lane_thread) {
  const Streams streams = streams_of(log, lane_thread);
  std::vector<std::string> found;
  for (const LogEntry& entry : log) {
    const bool lane = entry.thread == lane_thread;
    const auto bad = [&](const std::string& what) { found.push_back(entry.name + ": " + what); };
    switch (entry.action) {
      case Action::HostWaits:
        if (entry.awaited == -1) bad("waits for the whole device");
        if (lane && !streams.of_steps.contains(entry.awaited)) bad("the lane waits for another stream than its own");
        if (lane && streams.of_captures.contains(entry.awaited)) bad("the lane waits for a stream of captures");
        if (!lane && streams.of_steps.contains(entry.awaited)) bad("the builder waits for steps");
        break;
      case Action::StreamWaits:
        bad("one stream waits for another");
        break;
      case Action::Queued:
        if (entry.stream == 0) bad("work on the stream that all others wait for");
        if (!lane && streams.of_steps.contains(entry.stream)) bad("the builder queues work among that of steps");
        break;
      case Action::Allocated:
      case Action::Freed:
      case Action::GraphInstantiated:
      case Action::GraphDestroyed:
      case Action::CaptureBegan:
        if (lane) bad("the lane itself takes or frees memory or captures");
        break;
      default:
        break;
    }
  }
  return found;
}

/// Captures that met a step: they began while the lane was waiting for one, or it did something before they ended.
int captures_beside_steps(const std::vector<LogEntry>& log, std::uint64_t lane_thread) {
  bool in_step = false;
  bool capturing = false;
  bool met = false;
  int captures = 0;
  for (const LogEntry& entry : log) {
    const bool lane = entry.thread == lane_thread;
    if (lane && entry.action == Action::WaitBegan) in_step = true;
    if (lane && entry.action == Action::WaitEnded) in_step = false;
    if (entry.action == Action::CaptureBegan) met = in_step;
    if (entry.action == Action::CaptureBegan || entry.action == Action::CaptureEnded)
      capturing = entry.action == Action::CaptureBegan;
    if (lane && capturing) met = true;
    if (entry.action == Action::CaptureEnded && met) ++captures;
  }
  return captures;
}
#endif

class CudaRebuild : public OnDevice, public testing::WithParamInterface<std::uint64_t> {
 protected:
#if RUBATO_CUDA_EMULATED
  [[nodiscard]] cuda_host::Options emulation() const override {
    return {.seed = GetParam(), .multiprocessors = 4, .major = 8, .matmul_candidates = cuda_host::MatmulCandidates::None};
  }
#endif
};

TEST_P(CudaRebuild, twenty_budget_changes_under_load_make_no_step_wait_for_a_capture) {
  const std::filesystem::path folder = RUBATO_SOURCE_DIR "/../shared/data/models/stories260k";
  if (!std::filesystem::exists(folder)) GTEST_SKIP() << "needs " << folder;
  const auto config = read_model_config(folder);
  ASSERT_TRUE(config) << config.error().message;
  auto weights = open_safetensors(folder);
  ASSERT_TRUE(weights) << weights.error().message;
  auto backend = make_cuda_backend(
      *config, **weights,
      {.dtype = DataType::Float32, .block_count = 64, .max_tokens_per_step = 64, .max_rows = 8, .max_model_len = 512}, 0);
  ASSERT_TRUE(backend) << backend.error().message;
  Settings settings{.number = 1, .knobs = {.max_num_batched_tokens = 48, .max_num_seqs = 8}};
  Lane lane(**backend,
            {.limits = {.max_model_len = 512, .max_num_seqs = 8, .max_waiting = 16, .block_count = 64}, .initial = settings});
  test::LaneClient client(lane);
  const auto streams = test::add_golden_prompts(client, folder);
#if RUBATO_CUDA_EMULATED
  cuda_host::clear_log();
#endif

  ShapeBuilder builder(**backend, {});
  TimePoint builder_time{};
  int changes = 0;
  int graph_steps = 0;
  bool more = true;
  const auto step = [&] {
    if (builder.offered()) {
      EXPECT_TRUE(builder.take());
    }
    more = client.step();
    EXPECT_FALSE(lane.failure());
    graph_steps += lane.record().bucket ? 1 : 0;
    builder.observe(lane.record().features.tokens);
  };
  while (more) {
    if (changes == 20) {
      step();
      continue;
    }
    settings.knobs.max_num_batched_tokens = 24 + 8 * (changes++ % 5);
    ++settings.number;
    lane.apply(settings);
    const ShapeTarget target{.budget = settings.knobs.max_num_batched_tokens, .max_num_seqs = settings.knobs.max_num_seqs};
    std::jthread building([&](const std::stop_token& stop) {
      // Not while the lane is just changing over; then at the next look.
      std::optional<ShapeBuild> built;
      for (int look = 0; look < 1000 && !built; ++look)
        built = builder.look(target, stop, [&] { return builder_time += std::chrono::seconds(1); });
      EXPECT_TRUE(built && built->outcome);
    });
    for (int i = 0; i < 3 && more; ++i) step();
  }
  EXPECT_EQ(changes, 20);
  EXPECT_EQ(builder.status().failed, 0U);
  EXPECT_GE(builder.status().built, 20U);
  EXPECT_GT(graph_steps, 30);
  test::expect_golden_tokens(client, streams);
  lane.check_integrity();
#if RUBATO_CUDA_EMULATED
  const std::vector<LogEntry> log = cuda_host::log();
  EXPECT_THAT(stalls(log, cuda_host::thread_number()), testing::IsEmpty());
  EXPECT_GT(captures_beside_steps(log, cuda_host::thread_number()), 4) << "or nothing was shown";
  EXPECT_FALSE(streams_of(log, cuda_host::thread_number()).of_captures.empty());
#endif
  static_cast<void>((*backend)->use_shapes(nullptr));
}

INSTANTIATE_TEST_SUITE_P(Seeds, CudaRebuild, testing::Values(1, 7), testing::PrintToStringParamName());

}  // namespace
}  // namespace rubato::engine
