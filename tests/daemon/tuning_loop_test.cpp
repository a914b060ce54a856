// SPDX-License-Identifier: Apache-2.0
// The loop's own duties under virtual time: settle after a change, close windows by time and by requests, follow changed targets,
// and report.
#include "daemon/tuning_loop.h"

#include <gtest/gtest.h>

#include <vector>

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
    notebook.input.tuning = TuningSpec{.enabled = true, .window = 10s, .min_requests = 20, .settle = 2s, .dwell = 30s};
    notebook.input.space.base = KnobValues{};
  }

  void run(TuningLoop& loop, Duration from, Duration to, double rate, Verdict verdict) {
    for (Duration time = from; time < to; time += 100ms) {
      credit_ += rate * 0.1;
      for (; credit_ >= 1; credit_ -= 1) {
        const SequenceId id{++last_id_};
        windows.on_arrival(Arrival{.id = id, .time = at(time), .prompt_tokens = 200, .max_new_tokens = 20, .ttft_target = 500ms});
        RequestRecord record;
        record.id = id;
        record.arrival = at(time);
        record.first_token = at(time + (verdict == Verdict::Good ? 50ms : 900ms));
        record.end = *record.first_token + 200ms;
        record.output_tokens = 20;
        record.itl_p99 = 10ms;
        record.verdict = verdict;
        record.ttft_missed = verdict == Verdict::Bad;
        windows.on_request_end(record);
      }
      loop.tick(at(time));
    }
  }

  Notebook notebook;
  LatencyWindows windows;

 private:
  double credit_ = 0;
  std::uint64_t last_id_ = 0;
};

TEST_F(TuningLoopTest, the_first_window_opens_after_settling_and_closes_after_its_length) {
  TuningLoop loop(notebook, windows, nullptr, "test", at(0s));
  run(loop, 0s, 11900ms, 10, Verdict::Good);
  EXPECT_EQ(notebook.windows(), 0U);
  run(loop, 11900ms, 12300ms, 10, Verdict::Good);
  ASSERT_EQ(notebook.windows(), 1U);
  EXPECT_NEAR(notebook.reports.back().window->judged, 100, 3);
}

TEST_F(TuningLoopTest, a_thin_window_waits_for_requests_but_not_for_ever) {
  TuningLoop loop(notebook, windows, nullptr, "test", at(0s));
  run(loop, 0s, 35s, 0.2, Verdict::Good);
  EXPECT_EQ(notebook.windows(), 0U);
  run(loop, 35s, 45s, 0.2, Verdict::Good);
  EXPECT_EQ(notebook.windows(), 1U);
}

TEST_F(TuningLoopTest, met_objectives_are_left_alone) {
  TuningLoop loop(notebook, windows, nullptr, "test", at(0s));
  run(loop, 0s, 300s, 10, Verdict::Good);
  EXPECT_TRUE(notebook.proposals.empty());
}

TEST_F(TuningLoopTest, missed_objectives_lead_to_trials_within_two_windows) {
  TuningLoop loop(notebook, windows, nullptr, "test", at(0s));
  run(loop, 0s, 40s, 10, Verdict::Bad);
  EXPECT_FALSE(notebook.proposals.empty());
}

TEST_F(TuningLoopTest, a_change_of_targets_restarts_settling_and_drops_the_window) {
  TuningLoop loop(notebook, windows, nullptr, "test", at(0s));
  run(loop, 0s, 10s, 10, Verdict::Good);
  notebook.input.revision = 2;
  notebook.input.objectives.ttft = 900ms;
  run(loop, 10s, 21900ms, 10, Verdict::Good);
  EXPECT_EQ(notebook.windows(), 0U);
  run(loop, 21900ms, 22500ms, 10, Verdict::Good);
  EXPECT_EQ(notebook.windows(), 1U);
}

TEST_F(TuningLoopTest, settings_that_change_under_an_open_window_drop_it) {
  TuningLoop loop(notebook, windows, nullptr, "test", at(0s));
  run(loop, 0s, 10s, 10, Verdict::Good);
  windows.on_settings(Settings{.number = 7, .knobs = {}}, at(10s));
  run(loop, 10s, 21900ms, 10, Verdict::Good);
  EXPECT_EQ(notebook.windows(), 0U);
  run(loop, 21900ms, 22500ms, 10, Verdict::Good);
  ASSERT_EQ(notebook.windows(), 1U);
  EXPECT_EQ(notebook.reports.back().window->settings_number, 7U);
}

TEST_F(TuningLoopTest, switched_off_it_proposes_nothing) {
  notebook.input.tuning.enabled = false;
  TuningLoop loop(notebook, windows, nullptr, "test", at(0s));
  run(loop, 0s, 120s, 10, Verdict::Bad);
  EXPECT_TRUE(notebook.proposals.empty());
}

}  // namespace
}  // namespace rubato
