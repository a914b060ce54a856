// SPDX-License-Identifier: Apache-2.0
// The tuner with its twin, on virtual time: the real scheduler on a made-up cost of steps is tuned while it serves.
#include <gtest/gtest.h>

#include "tests/tuner/simulated_loop.h"
#include "tuner/regimes.h"

namespace rubato::tuner {
namespace {

using std::chrono::minutes;
using std::chrono::seconds;
using testing::SimulatedLoad;
using testing::SimulatedLoop;
using testing::SimulatedLoopOptions;

constexpr SimulatedLoad short_prompts{.rate = 6, .prompt = 400, .output = 60};
constexpr SimulatedLoad long_prompts{.rate = 4, .prompt = 2200, .output = 30};

std::string told(const SimulatedLoop& loop) {
  std::string text;
  for (const Decision& one : loop.decisions) text += one.reason + ": " + one.message + "\n";
  return text;
}

TEST(TunerTwin, the_twins_best_is_tried_first_and_ends_the_search_within_a_few_windows) {
  SimulatedLoop loop({.seed = 3});
  loop.run(short_prompts, minutes(3));
  EXPECT_EQ(loop.twin().status().state, TwinState::Trusted) << loop.twin().status().message << "\n" << told(loop);
  ASSERT_FALSE(loop.changes.empty()) << told(loop);
  const auto first = std::find_if(loop.decisions.begin(), loop.decisions.end(), [](const Decision& one) { return one.trial; });
  ASSERT_NE(first, loop.decisions.end()) << told(loop);
  EXPECT_EQ(first->source, "Twin") << told(loop);
  EXPECT_TRUE(first->expected && first->expected_incumbent) << told(loop);
  EXPECT_LE(loop.changes.size(), 3U) << told(loop);
  EXPECT_GE(loop.attainment(4), 0.85) << told(loop);
}

TEST(TunerTwin, a_change_of_load_is_answered_before_a_window_of_it_has_passed) {
  SimulatedLoop loop({.seed = 4});
  loop.run(short_prompts, minutes(4));
  const std::size_t before = loop.decisions.size();
  const std::size_t windows_before = loop.windows.size();
  const TimePoint moved = loop.engine().now();
  loop.run(long_prompts, seconds(30));
  bool answered = false;
  for (std::size_t i = before; i < loop.decisions.size(); ++i) {
    const Decision& one = loop.decisions[i];
    if (one.reason != "ShiftRetuned" && one.reason != "ShiftAnswered") continue;
    answered = true;
    ASSERT_TRUE(one.seen);
    EXPECT_LE(one.seen->end - moved, seconds(15)) << one.message;
    EXPECT_TRUE(one.expected_incumbent) << one.message;
    break;
  }
  EXPECT_TRUE(answered) << windows_before << " windows before\n" << told(loop);
}

TEST(TunerTwin, a_steady_load_is_left_alone_once_it_is_served) {
  SimulatedLoop loop({.seed = 5});
  loop.run(short_prompts, minutes(5));
  const std::size_t before = loop.changes.size();
  loop.run(short_prompts, minutes(25));
  EXPECT_LE(loop.changes.size() - before, 1U) << told(loop);
}

// Without the twin's word: what is remembered stands alone.
TEST(TunerTwin, a_load_met_before_gets_its_settings_back_at_once) {
  SimulatedLoop loop({.seed = 8});
  loop.twin().set_enabled(false);
  loop.run(short_prompts, minutes(8));
  loop.run(long_prompts, minutes(12));
  ASSERT_GE(loop.tuner().regimes().size(), 2U) << told(loop);
  const std::size_t before = loop.decisions.size();
  const TimePoint moved = loop.engine().now();
  loop.run(short_prompts, seconds(40));
  const auto back = std::find_if(loop.decisions.begin() + static_cast<std::ptrdiff_t>(before), loop.decisions.end(),
                                 [](const Decision& one) { return one.source == "Regime"; });
  ASSERT_NE(back, loop.decisions.end()) << told(loop);
  EXPECT_EQ(back->reason, "ShiftRetuned");
  EXPECT_LE(back->seen->end - moved, seconds(15)) << back->message;
}

TEST(TunerTwin, loads_that_alternate_fast_get_one_setting_and_no_trials) {
  SimulatedLoop loop({.seed = 7});
  for (int i = 0; i < 8; ++i) loop.run(i % 2 == 0 ? short_prompts : long_prompts, minutes(1));
  const std::size_t before = loop.decisions.size();
  const std::size_t changes = loop.changes.size();
  for (int i = 0; i < 12; ++i) loop.run(i % 2 == 0 ? short_prompts : long_prompts, minutes(1));
  for (std::size_t i = before; i < loop.decisions.size(); ++i) EXPECT_FALSE(loop.decisions[i].trial) << told(loop);
  EXPECT_LE(loop.changes.size() - changes, 1U) << told(loop);
  EXPECT_GE(loop.attainment(48), 0.9) << told(loop);
}

TEST(TunerTwin, without_a_twin_the_plain_search_does_the_work) {
  SimulatedLoop loop({.seed = 6, .twin = false});
  loop.run(short_prompts, minutes(4));
  const auto first = std::find_if(loop.decisions.begin(), loop.decisions.end(), [](const Decision& one) { return one.trial; });
  ASSERT_NE(first, loop.decisions.end()) << told(loop);
  EXPECT_NE(first->source, "Twin");
  EXPECT_FALSE(first->expected);
}

}  // namespace
}  // namespace rubato::tuner
