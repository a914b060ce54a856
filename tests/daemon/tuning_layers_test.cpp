// SPDX-License-Identifier: Apache-2.0
// The tuning loop, the tuner and the reconciler together, under virtual time: whatever the tuner does, an override wins, its
// removal falls back to the layer below, and a moved start stays moved.
#include <gtest/gtest.h>

#include "tests/daemon/control_fixture.h"
#include "tests/daemon/tuning_fixture.h"

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
      tuned.now = TimePoint(now);
      tuned.request(tuned.now, 200, 20, verdict);
      loop.tick(TimePoint(now));
    }
  }
  std::int32_t budget() { return side.reconciler.knobs().max_num_batched_tokens; }
  std::string layer(const char* knob) { return side.reconciler.engine().object["status"]["layers"][knob].get<std::string>(); }

  testing::ControlSide side{"", testing::control_manifest(tuned_spec)};
  testing::TuningSide tuned;
  Duration now = 1s;
  TuningLoop loop{side.reconciler, tuned.windows, tuned.feed, nullptr, tuned.options(), TimePoint(now)};
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
