// SPDX-License-Identifier: Apache-2.0
// The tuning loop, the tuner and the reconciler together, under virtual time: whatever the tuner does, an override wins, its
// removal falls back to the layer below, and a moved start stays moved.
#include <gtest/gtest.h>

#include "daemon/latency_windows.h"
#include "daemon/tuning_loop.h"
#include "tests/daemon/control_fixture.h"

namespace rubato {
namespace {

using namespace std::chrono_literals;
using control::Json;

const char* const tuned_spec =
    "  objectives: {ttft: 500ms, itl: 50ms, attainment: 95}\n"
    "  knobs:\n"
    "    maxNumBatchedTokens: {initial: 512, min: 128, max: 4096}\n"
    "    deadlineMargin: {initial: 20, min: 20, max: 20}\n"
    "  tuning: {enabled: true, window: 10s, minRequests: 20, settle: 2s, dwell: 30s}\n";

class TuningLayers : public ::testing::Test {
 protected:
  void patch(const char* body) {
    auto answer = side.reconciler.patch({.body = Json::parse(body)}, control::DryRun::None);
    ASSERT_TRUE(std::holds_alternative<control::PatchAnswer>(answer)) << std::get<control::StatusError>(answer).message;
  }
  void run(Duration length, Verdict verdict) {
    for (const Duration end = now + length; now < end; now += 100ms) {
      const SequenceId id{++last_id};
      windows.on_arrival(
          Arrival{.id = id, .time = TimePoint(now), .prompt_tokens = 200, .max_new_tokens = 20, .ttft_target = 500ms});
      RequestRecord record;
      record.id = id;
      record.arrival = TimePoint(now);
      record.first_token = TimePoint(now + (verdict == Verdict::Good ? 50ms : 900ms));
      record.end = *record.first_token + 200ms;
      record.output_tokens = 20;
      record.itl_p99 = 10ms;
      record.verdict = verdict;
      record.ttft_missed = verdict == Verdict::Bad;
      windows.on_request_end(record);
      loop.tick(TimePoint(now));
    }
  }
  std::int32_t budget() { return side.reconciler.knobs().max_num_batched_tokens; }
  std::string layer(const char* knob) { return side.reconciler.engine().object["status"]["layers"][knob].get<std::string>(); }

  testing::ControlSide side{"", testing::control_manifest(tuned_spec)};
  LatencyWindows windows;
  Duration now = 1s;
  std::uint64_t last_id = 0;
  TuningLoop loop{side.reconciler, windows, nullptr, "test", TimePoint(now)};
};

TEST_F(TuningLayers, a_removed_override_falls_back_though_tuning_is_on) {
  run(30s, Verdict::Good);
  patch(R"({"spec":{"override":{"maxNumBatchedTokens":128}}})");
  run(30s, Verdict::Good);
  EXPECT_EQ(budget(), 128);
  EXPECT_EQ(layer("maxNumBatchedTokens"), "Override");
  EXPECT_EQ(layer("priorityPolicy"), "File");
  patch(R"({"spec":{"override":null}})");
  EXPECT_EQ(budget(), 512);
  run(60s, Verdict::Good);
  EXPECT_EQ(budget(), 512);
  EXPECT_EQ(layer("maxNumBatchedTokens"), "File");
}

TEST_F(TuningLayers, a_moved_start_stays_moved_while_the_objectives_are_met) {
  run(30s, Verdict::Good);
  patch(R"({"spec":{"knobs":{"maxNumBatchedTokens":{"initial":256}}}})");
  EXPECT_EQ(budget(), 256);
  run(60s, Verdict::Good);
  EXPECT_EQ(budget(), 256);
  EXPECT_EQ(layer("maxNumBatchedTokens"), "Api");
}

TEST_F(TuningLayers, trials_move_free_knobs_and_never_a_pinned_one) {
  patch(R"({"spec":{"override":{"maxNumBatchedTokens":256}}})");
  bool tried = false;
  for (int i = 0; i < 300; ++i) {
    run(1s, Verdict::Bad);
    ASSERT_EQ(budget(), 256);
    tried = tried || layer("priorityPolicy") == "Tuner" || layer("maxNumSeqs") == "Tuner";
  }
  EXPECT_TRUE(tried);
  patch(R"({"spec":{"override":null}})");
  EXPECT_EQ(budget(), 512) << "the tuner only repeated the pin";
}

}  // namespace
}  // namespace rubato
