// SPDX-License-Identifier: Apache-2.0
// The loop's own duties under virtual time: settle after a change, close windows by time and by requests, follow changed targets
// and the state of serving, and report.
#include "daemon/tuning_loop.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <cmath>
#include <filesystem>
#include <span>
#include <string>
#include <vector>

#include "tests/daemon/tuning_fixture.h"
#include "tuner/journal.h"
#include "tuner/regimes.h"

namespace rubato {
namespace {

using namespace std::chrono_literals;

TimePoint at(Duration since_start) {
  return TimePoint(since_start);
}

// The control side reduced to a notebook; the real one needs a daemon around it.
class Notebook final : public control::TuningTarget {
 public:
  control::TuningInput input;
  std::vector<KnobValues> proposals;
  std::vector<control::TuningReport> reports;
  std::uint64_t number = 1;

  control::TuningInput tuning_input() override { return input; }
  Result<std::uint64_t> propose(const KnobValues& knobs, const std::string&, const std::string&) override {
    proposals.push_back(knobs);
    input.space.base = knobs;
    return ++number;
  }
  void report(const control::TuningReport& report) override { reports.push_back(report); }

  [[nodiscard]] std::size_t windows() const {
    std::size_t count = 0;
    for (const auto& report : reports) count += report.window.has_value() ? 1 : 0;
    return count;
  }
};

class TuningLoopTest : public ::testing::Test {
 protected:
  TuningLoopTest() {
    notebook.input.revision = 1;
    notebook.input.tuning =
        TuningSpec{.enabled = true, .window = 10s, .min_requests = 20, .settle = 2s, .dwell = 30s, .twin = {}};
    notebook.input.space.base = KnobValues{};
  }

  void run(TuningLoop& loop, Duration from, Duration to, double rate, Verdict verdict) {
    for (Duration time = from; time < to; time += 100ms) {
      side.now = at(time);
      credit_ += rate * 0.1;
      for (; credit_ >= 1; credit_ -= 1) side.request(at(time), prompt_tokens, output_tokens, verdict);
      loop.tick(at(time));
    }
  }

  Notebook notebook;
  testing::TuningSide side;
  std::int32_t prompt_tokens = 200;
  std::int32_t output_tokens = 20;

 private:
  double credit_ = 0;
};

TEST_F(TuningLoopTest, the_first_window_opens_after_settling_and_closes_after_its_length) {
  TuningLoop loop(notebook, side.windows, side.feed, nullptr, side.options(), at(0s));
  run(loop, 0s, 11900ms, 10, Verdict::Good);
  EXPECT_EQ(notebook.windows(), 0U);
  run(loop, 11900ms, 12300ms, 10, Verdict::Good);
  ASSERT_EQ(notebook.windows(), 1U);
  EXPECT_NEAR(notebook.reports.back().window->judged, 100, 3);
}

TEST_F(TuningLoopTest, a_thin_window_waits_for_requests_but_not_for_ever) {
  TuningLoop loop(notebook, side.windows, side.feed, nullptr, side.options(), at(0s));
  run(loop, 0s, 35s, 0.2, Verdict::Good);
  EXPECT_EQ(notebook.windows(), 0U);
  run(loop, 35s, 45s, 0.2, Verdict::Good);
  EXPECT_EQ(notebook.windows(), 1U);
}

TEST_F(TuningLoopTest, met_objectives_are_left_alone) {
  TuningLoop loop(notebook, side.windows, side.feed, nullptr, side.options(), at(0s));
  run(loop, 0s, 300s, 10, Verdict::Good);
  EXPECT_TRUE(notebook.proposals.empty());
}

TEST_F(TuningLoopTest, missed_objectives_lead_to_trials_within_two_windows_where_there_is_no_twin_to_wait_for) {
  notebook.input.tuning.twin.enabled = false;
  TuningLoop loop(notebook, side.windows, side.feed, nullptr, side.options(), at(0s));
  run(loop, 0s, 40s, 10, Verdict::Bad);
  EXPECT_FALSE(notebook.proposals.empty());
}

TEST_F(TuningLoopTest, a_change_of_targets_restarts_settling_and_drops_the_window) {
  TuningLoop loop(notebook, side.windows, side.feed, nullptr, side.options(), at(0s));
  run(loop, 0s, 10s, 10, Verdict::Good);
  notebook.input.revision = 2;
  notebook.input.objectives.ttft = 900ms;
  run(loop, 10s, 21900ms, 10, Verdict::Good);
  EXPECT_EQ(notebook.windows(), 0U);
  run(loop, 21900ms, 22500ms, 10, Verdict::Good);
  EXPECT_EQ(notebook.windows(), 1U);
}

TEST_F(TuningLoopTest, settings_that_change_under_an_open_window_drop_it) {
  TuningLoop loop(notebook, side.windows, side.feed, nullptr, side.options(), at(0s));
  run(loop, 0s, 10s, 10, Verdict::Good);
  side.windows.on_settings(Settings{.number = 7, .knobs = {}}, at(10s));
  run(loop, 10s, 21900ms, 10, Verdict::Good);
  EXPECT_EQ(notebook.windows(), 0U);
  run(loop, 21900ms, 22500ms, 10, Verdict::Good);
  ASSERT_EQ(notebook.windows(), 1U);
  EXPECT_EQ(notebook.reports.back().window->settings_number, 7U);
}

TEST_F(TuningLoopTest, a_drain_freezes_it_and_what_clients_get_meanwhile_is_nobodys_fault) {
  TuningLoop loop(notebook, side.windows, side.feed, nullptr, side.options(), at(0s));
  run(loop, 0s, 13s, 10, Verdict::Good);
  ASSERT_EQ(notebook.windows(), 1U);
  side.unavailable = "serving drains";
  run(loop, 13s, 100s, 10, Verdict::Bad);
  EXPECT_EQ(notebook.windows(), 1U);
  EXPECT_TRUE(notebook.proposals.empty());
}

TEST_F(TuningLoopTest, a_trial_gives_way_to_the_incumbent_when_serving_drains) {
  TuningLoop loop(notebook, side.windows, side.feed, nullptr, side.options(), at(0s));
  const KnobValues incumbent = notebook.input.space.base;
  Duration time = 0s;
  for (; notebook.proposals.empty() && time < 100s; time += 100ms) run(loop, time, time + 100ms, 10, Verdict::Bad);
  ASSERT_FALSE(notebook.proposals.empty());
  ASSERT_NE(notebook.proposals.back(), incumbent);
  side.unavailable = "serving drains";
  run(loop, time, time + 100ms, 10, Verdict::Bad);
  EXPECT_EQ(notebook.proposals.back(), incumbent);
}

TEST_F(TuningLoopTest, after_the_freeze_it_settles_before_it_measures) {
  TuningLoop loop(notebook, side.windows, side.feed, nullptr, side.options(), at(0s));
  run(loop, 0s, 5s, 10, Verdict::Good);
  side.unavailable = "serving has failed";
  run(loop, 5s, 20s, 10, Verdict::Bad);
  side.unavailable.clear();
  run(loop, 20s, 31900ms, 10, Verdict::Good);
  EXPECT_EQ(notebook.windows(), 0U);
  run(loop, 31900ms, 32500ms, 10, Verdict::Good);
  ASSERT_EQ(notebook.windows(), 1U);
  EXPECT_EQ(notebook.reports.back().window->good, notebook.reports.back().window->judged);
}

TEST_F(TuningLoopTest, a_load_met_before_gets_its_settings_back_long_before_the_window_would_close) {
  notebook.input.tuning.window = 300s;
  KnobValues best;
  best.max_num_batched_tokens = 2048;
  best.priority_policy = PriorityPolicy::ShortestFirst;
  const std::filesystem::path file =
      std::filesystem::temp_directory_path() / ("rubato-loop-" + std::to_string(::getpid()) + ".sqlite");
  std::filesystem::remove(file);
  auto journal = tuner::Journal::open(file.string());
  ASSERT_TRUE(journal);
  const tuner::Regime met{.number = 1,
                          .load = {.features = {.rate = std::log2(40), .prompt = std::log2(1600), .output = std::log2(160)}},
                          .best = best,
                          .evidence = {.judged = 400, .good = 400},
                          .objectives = notebook.input.objectives,
                          .visits = 3,
                          .last_seen = 0,
                          .measured = 0};
  ASSERT_TRUE((*journal)->keep_regimes("test", std::span(&met, 1)));
  {
    TuningLoop loop(notebook, side.windows, side.feed, journal->get(), side.options(), at(0s));
    run(loop, 0s, 120s, 10, Verdict::Good);
    ASSERT_TRUE(notebook.proposals.empty());
    prompt_tokens = 1600;
    output_tokens = 160;
    run(loop, 120s, 135s, 40, Verdict::Bad);
    EXPECT_EQ(notebook.windows(), 0U);
    ASSERT_FALSE(notebook.proposals.empty());
    EXPECT_EQ(notebook.proposals.front(), best);
    EXPECT_GE(notebook.reports.back().status.alarms_total, 1);
  }
  std::filesystem::remove(file);
}

TEST_F(TuningLoopTest, reports_tell_of_the_twin_and_of_what_it_never_heard_of) {
  notebook.input.tuning.twin.core_percent = 30;
  TuningLoop loop(notebook, side.windows, side.feed, nullptr, side.options(), at(0s));
  side.steps(100'000);
  run(loop, 0s, 13s, 10, Verdict::Good);
  const control::TuningReport& report = notebook.reports.back();
  ASSERT_TRUE(report.twin);
  EXPECT_GT(report.twin->steps, 0U);
  EXPECT_EQ(report.twin_core_percent, 30);
  EXPECT_EQ(report.feed_dropped, 100'000U - 16384U);
}

TEST_F(TuningLoopTest, switched_off_it_proposes_nothing) {
  notebook.input.tuning.enabled = false;
  TuningLoop loop(notebook, side.windows, side.feed, nullptr, side.options(), at(0s));
  run(loop, 0s, 120s, 10, Verdict::Bad);
  EXPECT_TRUE(notebook.proposals.empty());
}

}  // namespace
}  // namespace rubato
