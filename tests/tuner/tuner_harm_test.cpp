// SPDX-License-Identifier: Apache-2.0
// Doing no harm: the budget of risk, early rollback, freezing, and records that say what led to a decision. On made-up windows.
#include <gtest/gtest.h>

#include "tests/support/temporary_folder.h"
#include "tests/tuner/fake_engine.h"
#include "tuner/journal.h"
#include "tuner/load_watch.h"
#include "tuner/regimes.h"

namespace rubato::tuner {
namespace {

using std::chrono::seconds;

/// Windows of one load, one after another.
class Windows {
 public:
  Window next(std::int32_t judged, std::int32_t good) {
    Window window;
    window.begin = now_;
    window.end = now_ + seconds(15);
    now_ = window.end;
    fill(window, judged, good);
    return window;
  }
  [[nodiscard]] Window so_far(std::int32_t judged, std::int32_t good) const {
    Window window;
    window.begin = now_;
    window.end = now_ + seconds(5);
    fill(window, judged, good);
    return window;
  }

 private:
  static void fill(Window& window, std::int32_t judged, std::int32_t good) {
    window.arrivals = judged;
    window.judged = judged;
    window.good = good;
    window.itl_misses = judged - good;
    window.ttft_p50 = window.ttft_p99 = std::chrono::milliseconds(300);
    window.itl_p50 = std::chrono::milliseconds(30);
    window.itl_p99 = std::chrono::milliseconds(good < judged ? 80 : 35);
    window.prompt_tokens_mean = 500;
    window.output_tokens_mean = 50;
    window.arrival_interval_cv = 1;
  }
  TimePoint now_{std::chrono::hours(1)};
};

TunerOptions options() {
  return testing::tuner_options({.ttft = seconds(1), .itl = std::chrono::milliseconds(40), .attainment = 95});
}

TEST(NoHarm, a_trial_that_shows_to_be_worse_ends_before_its_window) {
  Windows windows;
  Tuner tuner(options(), nullptr);
  const Decision start = tuner.on_window(windows.next(60, 48));
  ASSERT_EQ(start.reason, "TrialStarted");
  EXPECT_EQ(tuner.on_progress(windows.so_far(20, 16)), std::nullopt) << "as good as the incumbent";
  const auto ended = tuner.on_progress(windows.so_far(30, 5));
  ASSERT_TRUE(ended);
  EXPECT_EQ(ended->reason, "RolledBack");
  ASSERT_TRUE(ended->apply);
  EXPECT_EQ(*ended->apply, options().space.base);
  EXPECT_EQ(tuner.status().early_rollbacks_total, 1);
  ASSERT_EQ(tuner.recent_trials().size(), 1U);
  EXPECT_EQ(tuner.recent_trials()[0].outcome, "RolledBack");
  EXPECT_EQ(tuner.recent_trials()[0].window.judged, 30);
}

TEST(NoHarm, nothing_is_tried_beyond_the_budget_of_risk) {
  TunerOptions frugal = options();
  frugal.tuning.risk_budget = 0;
  Windows windows;
  Tuner tuner(frugal, nullptr);
  const Decision decision = tuner.on_window(windows.next(60, 48));
  EXPECT_FALSE(decision.apply);
  EXPECT_NE(decision.message.find("riskBudget"), std::string::npos) << decision.message;
  EXPECT_EQ(tuner.status().trials_total, 0);
}

// Four requests a second are 14,400 an hour; one percent of them are two trials of 60 requests.
TEST(NoHarm, trials_stop_when_they_have_put_the_budgets_share_of_the_hour_at_risk) {
  TunerOptions frugal = options();
  frugal.tuning.risk_budget = 1;
  Windows windows;
  Tuner tuner(frugal, nullptr);
  int trials = 0;
  for (int i = 0; i < 40; ++i) trials += tuner.on_window(windows.next(60, 48)).reason == "TrialStarted" ? 1 : 0;
  EXPECT_GE(trials, 2);
  EXPECT_LE(trials, 4);
  EXPECT_GT(tuner.status().risk_used, 0.005);
  EXPECT_LE(tuner.status().risk_used, 0.0101);
}

TEST(NoHarm, a_freeze_ends_a_trial_and_nothing_is_concluded_until_the_thaw) {
  Windows windows;
  Tuner tuner(options(), nullptr);
  ASSERT_EQ(tuner.on_window(windows.next(60, 48)).reason, "TrialStarted");
  const Decision frozen = tuner.freeze("serving drains", TimePoint(std::chrono::hours(2)));
  ASSERT_TRUE(frozen.apply);
  EXPECT_EQ(*frozen.apply, options().space.base);
  EXPECT_EQ(frozen.reason, "Frozen");
  EXPECT_NE(frozen.message.find("serving drains"), std::string::npos);
  const Decision still = tuner.on_window(windows.next(60, 10));
  EXPECT_EQ(still.reason, "Frozen");
  EXPECT_FALSE(still.apply);
  EXPECT_EQ(tuner.on_progress(windows.so_far(30, 0)), std::nullopt);
  tuner.thaw();
  EXPECT_EQ(tuner.on_window(windows.next(60, 10)).reason, "TrialStarted");
}

TEST(Records, a_trial_keeps_its_number_its_source_and_the_window_that_led_to_it) {
  test::TemporaryFolder folder;
  const std::string path = (folder.path() / "journal.sqlite").string();
  auto journal = Journal::open(path);
  ASSERT_TRUE(journal) << journal.error().message;
  TunerOptions dated = options();
  dated.wall_at_zero = std::chrono::hours(24 * 365 * 50);
  Windows windows;
  Tuner tuner(dated, journal->get());
  const Decision start = tuner.on_window(windows.next(60, 48));
  ASSERT_EQ(start.reason, "TrialStarted");
  EXPECT_EQ(start.trial_number, 1);
  EXPECT_EQ(start.source, "Opening");
  ASSERT_TRUE(start.seen);
  EXPECT_EQ(start.seen->good, 48);
  const Decision end = tuner.on_window(windows.next(60, 60));
  EXPECT_EQ(end.trial_number, 1);
  ASSERT_EQ(tuner.recent_trials().size(), 1U);
  EXPECT_EQ(tuner.recent_trials()[0].number, 1);
  EXPECT_EQ(tuner.recent_trials()[0].source, "Opening");
  EXPECT_EQ(tuner.recent_trials()[0].ended, 50LL * 365 * 24 * 3600 + 3600 + 30);
}

TEST(Regimes, a_load_that_was_served_well_is_learnt_and_survives_a_restart) {
  test::TemporaryFolder folder;
  const std::string path = (folder.path() / "journal.sqlite").string();
  Windows windows;
  {
    auto journal = Journal::open(path);
    ASSERT_TRUE(journal) << journal.error().message;
    Tuner tuner(options(), journal->get());
    for (int i = 0; i < 4; ++i) tuner.on_window(windows.next(60, 60));
    ASSERT_EQ(tuner.regimes().size(), 1U);
    EXPECT_EQ(tuner.regimes()[0].best, options().space.base);
  }
  auto journal = Journal::open(path);
  ASSERT_TRUE(journal) << journal.error().message;
  const Tuner again(options(), journal->get());
  ASSERT_EQ(again.regimes().size(), 1U);
  EXPECT_EQ(again.regimes()[0].best, options().space.base);
  EXPECT_NEAR(std::exp2(again.regimes()[0].load.features.rate), 4.0, 0.1);
}

}  // namespace
}  // namespace rubato::tuner
