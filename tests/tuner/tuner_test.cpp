// SPDX-License-Identifier: Apache-2.0
// The state machine on windows written by hand.
#include "tuner/tuner.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <limits>

namespace rubato::tuner {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using ::testing::HasSubstr;

TunerOptions options() {
  TunerOptions wanted;
  wanted.objectives = {.ttft = milliseconds(500), .itl = milliseconds(50), .attainment = 95};
  wanted.space.base = {.max_num_batched_tokens = 1024, .max_num_seqs = 64, .priority_policy = PriorityPolicy::DecodeFirst};
  wanted.model_key = "m";
  return wanted;
}

/// Feeds one tuner with windows that follow on each other.
class Feed {
 public:
  explicit Feed(const TunerOptions& wanted = options()) : tuner(wanted, nullptr) {}

  Decision window(std::int32_t judged, double attainment, const std::function<void(Window&)>& change = {}) {
    Window w;
    w.begin = now;
    w.end = now + seconds(15);
    now = w.end;
    w.arrivals = w.judged = judged;
    w.good = static_cast<std::int32_t>(judged * attainment + 0.5);
    w.itl_misses = judged - w.good;
    w.ttft_p50 = milliseconds(100);
    w.ttft_p99 = milliseconds(300);
    w.itl_p50 = milliseconds(20);
    w.itl_p99 = milliseconds(attainment < 0.95 ? 80 : 40);
    w.prompt_tokens_mean = judged > 0 ? 500 : 0;
    w.output_tokens_mean = judged > 0 ? 50 : 0;
    w.arrival_interval_cv = judged > 0 ? 1 : 0;
    if (change) change(w);
    return tuner.on_window(w);
  }

  Tuner tuner;
  TimePoint now{seconds(100)};
};

TEST(Tuner, holds_while_the_objectives_are_met) {
  Feed feed;
  for (int i = 0; i < 50; ++i) {
    const Decision decision = feed.window(50, 0.98);
    EXPECT_EQ(decision.phase, Phase::Holding);
    EXPECT_FALSE(decision.apply);
    EXPECT_EQ(decision.reason, "ObjectivesMet");
  }
  EXPECT_EQ(feed.tuner.status().trials_total, 0);
}

TEST(Tuner, a_shift_under_which_the_objectives_hold_starts_no_search) {
  Feed feed;
  for (int i = 0; i < 8; ++i) feed.window(50, 0.98);
  const Decision decision = feed.window(200, 0.98);
  EXPECT_EQ(decision.phase, Phase::Holding);
  EXPECT_EQ(decision.reason, "ShiftDetected");
  EXPECT_FALSE(decision.apply);
}

TEST(Tuner, missed_objectives_start_a_trial_of_policy_deadline) {
  Feed feed;
  const Decision decision = feed.window(50, 0.5);
  EXPECT_EQ(decision.phase, Phase::Searching);
  EXPECT_EQ(decision.reason, "TrialStarted");
  ASSERT_TRUE(decision.apply);
  EXPECT_TRUE(decision.trial);
  EXPECT_EQ(decision.apply->priority_policy, PriorityPolicy::Deadline);
  EXPECT_THAT(decision.message, HasSubstr("50 % of 50 requests good"));
  EXPECT_THAT(decision.message, HasSubstr("the ITL target of 50 ms"));
}

TEST(Tuner, a_trial_that_meets_the_objectives_is_confirmed_before_the_search_ends) {
  Feed feed;
  const KnobValues trial = *feed.window(50, 0.5).apply;
  const Decision adopted = feed.window(50, 1.0);
  EXPECT_EQ(adopted.reason, "TrialAdopted");
  EXPECT_FALSE(adopted.apply);
  EXPECT_EQ(feed.tuner.status().incumbent, trial);
  const Decision done = feed.window(50, 0.98);
  EXPECT_EQ(done.phase, Phase::Holding);
  EXPECT_EQ(done.reason, "SearchConverged");
  ASSERT_EQ(feed.tuner.recent_trials().size(), 1u);
  EXPECT_EQ(feed.tuner.recent_trials()[0].outcome, "Incumbent");
}

TEST(Tuner, a_lucky_trial_that_is_not_confirmed_does_not_end_the_search) {
  Feed feed;
  feed.window(50, 0.5);
  feed.window(50, 1.0);
  const Decision decision = feed.window(50, 0.6);
  EXPECT_EQ(decision.phase, Phase::Searching);
  EXPECT_EQ(decision.reason, "TrialStarted");
}

TEST(Tuner, a_trial_worse_beyond_noise_is_rolled_back_and_the_incumbent_measured_again) {
  Feed feed;
  feed.window(50, 0.7);
  const Decision back = feed.window(50, 0.2);
  EXPECT_EQ(back.reason, "RolledBack");
  EXPECT_FALSE(back.trial);
  ASSERT_TRUE(back.apply);
  EXPECT_EQ(*back.apply, options().space.base);
  EXPECT_EQ(feed.tuner.status().rollbacks_total, 1);
  EXPECT_EQ(feed.tuner.recent_trials()[0].outcome, "RolledBack");
  EXPECT_EQ(feed.window(50, 0.7).reason, "TrialStarted");
}

TEST(Tuner, a_search_ends_after_four_rollbacks) {
  Feed feed;
  feed.window(50, 0.7);
  int rollbacks = 0;
  for (int i = 0; i < 40; ++i) {
    const Decision decision = feed.window(50, i % 2 == 0 ? 0.1 : 0.7);
    rollbacks += decision.reason == "RolledBack" ? 1 : 0;
    if (decision.phase == Phase::Infeasible) break;
  }
  EXPECT_EQ(rollbacks, 4);
  EXPECT_EQ(feed.tuner.status().phase, Phase::Infeasible);
  EXPECT_EQ(feed.tuner.status().incumbent, options().space.base);
}

TEST(Tuner, a_trial_behind_a_backlog_gets_another_window) {
  Feed feed;
  feed.window(50, 0.3);
  const Decision decision = feed.window(50, 0.3, [](Window& w) {
    w.waiting_begin = 40;
    w.waiting_end = 5;
  });
  EXPECT_EQ(decision.reason, "TrialRepeated");
  EXPECT_THAT(decision.message, HasSubstr("40 requests waiting"));
  EXPECT_EQ(feed.window(50, 1.0).reason, "TrialAdopted");
}

TEST(Tuner, dwells_after_a_search_before_the_next_one) {
  Feed feed;
  feed.window(50, 0.5);
  feed.window(50, 1.0);
  feed.window(50, 1.0);
  for (int i = 0; i < 3; ++i) EXPECT_EQ(feed.window(50, 0.5).reason, "Dwelling") << i;
  EXPECT_EQ(feed.window(50, 0.5).reason, "TrialStarted");
  EXPECT_EQ(feed.tuner.status().searches_total, 2);
}

TEST(Tuner, searches_under_an_unchanged_load_come_ever_less_often) {
  Feed feed;
  std::vector<TimePoint> starts;
  std::int64_t searches = 0;
  for (int i = 0; i < 400; ++i) {
    const bool trying = feed.tuner.status().phase == Phase::Searching;
    feed.window(50, trying ? 1.0 : 0.7);
    if (feed.tuner.status().searches_total > searches) {
      searches = feed.tuner.status().searches_total;
      starts.push_back(feed.now);
    }
  }
  ASSERT_GE(starts.size(), 4u);
  EXPECT_GT(starts[3] - starts[2], starts[2] - starts[1]);
  EXPECT_LE(starts.size(), 10u);
}

TEST(Tuner, wrong_windows_are_refused_counted_and_change_nothing) {
  Feed feed;
  feed.window(50, 0.98);
  const double nan = std::numeric_limits<double>::quiet_NaN();
  EXPECT_EQ(feed.window(50, 0.1, [&](Window& w) { w.prompt_tokens_mean = nan; }).reason, "WindowRefused");
  EXPECT_EQ(feed.window(50, 0.1, [&](Window& w) { w.output_tokens_mean = std::numeric_limits<double>::infinity(); }).reason,
            "WindowRefused");
  EXPECT_EQ(feed.window(50, 0.1, [&](Window& w) { w.good = 51; }).reason, "WindowRefused");
  EXPECT_EQ(feed.window(50, 0.1,
                        [&](Window& w) {
                          w.begin = TimePoint(seconds(1));
                          w.end = TimePoint(seconds(2));
                        })
                .reason,
            "WindowRefused");
  EXPECT_EQ(feed.tuner.status().windows_refused_total, 4);
  EXPECT_EQ(feed.tuner.status().phase, Phase::Holding);
  EXPECT_EQ(feed.window(50, 0.98).reason, "ObjectivesMet");
}

TEST(Tuner, thin_windows_are_pooled_until_they_can_be_judged) {
  Feed feed;
  EXPECT_EQ(feed.window(8, 0.25).phase, Phase::NoData);
  EXPECT_EQ(feed.window(8, 0.25).phase, Phase::NoData);
  EXPECT_EQ(feed.window(8, 0.25).reason, "TrialStarted");
  EXPECT_FALSE(feed.tuner.status().no_data_since);
}

TEST(Tuner, a_trial_without_requests_gives_way_to_the_incumbent) {
  Feed feed;
  feed.window(50, 0.5);
  const Decision decision = feed.window(0, 0);
  EXPECT_EQ(decision.phase, Phase::NoData);
  EXPECT_EQ(decision.reason, "SearchAbandoned");
  EXPECT_EQ(decision.apply, options().space.base);
  EXPECT_EQ(feed.tuner.recent_trials()[0].outcome, "Inconclusive");
}

TEST(Tuner, disabled_or_fully_pinned_it_never_acts) {
  TunerOptions wanted = options();
  wanted.tuning.enabled = false;
  Feed feed(wanted);
  EXPECT_EQ(feed.window(50, 0.1).phase, Phase::Disabled);
  wanted = options();
  wanted.space.max_num_batched_tokens_free = wanted.space.max_num_seqs_free = false;
  wanted.space.priority_policy_free = wanted.space.deadline_margin_free = false;
  const Decision decision = feed.tuner.reconfigure(wanted, feed.now);
  EXPECT_EQ(decision.phase, Phase::Disabled);
  EXPECT_FALSE(decision.apply) << "what is pinned runs already";
  EXPECT_EQ(feed.tuner.status().incumbent, wanted.space.base);
  EXPECT_FALSE(feed.window(50, 0.1).apply);
}

TEST(Tuner, an_override_wins_at_once_and_the_search_goes_on_with_the_rest) {
  Feed feed;
  feed.window(50, 0.5);
  TunerOptions wanted = options();
  wanted.space.base.priority_policy = PriorityPolicy::PrefillFirst;
  wanted.space.priority_policy_free = false;
  const Decision decision = feed.tuner.reconfigure(wanted, feed.now);
  EXPECT_EQ(feed.tuner.status().incumbent.priority_policy, PriorityPolicy::PrefillFirst);
  EXPECT_EQ(decision.phase, Phase::Searching);
  for (int i = 0; i < 60; ++i) {
    const Decision next = feed.window(50, 0.5);
    if (!next.apply) continue;
    EXPECT_EQ(next.apply->priority_policy, PriorityPolicy::PrefillFirst);
  }
}

TEST(Tuner, a_change_of_reservation_is_taken_over_at_once_and_kept) {
  Feed feed;
  feed.window(50, 0.5);
  TunerOptions wanted = options();
  wanted.space.base.reservation = Reservation::Early;
  const Decision decision = feed.tuner.reconfigure(wanted, feed.now);
  EXPECT_EQ(feed.tuner.status().incumbent.reservation, Reservation::Early);
  if (decision.apply) {
    EXPECT_EQ(decision.apply->reservation, Reservation::Early);
  }
  for (int i = 0; i < 60; ++i) {
    const Decision next = feed.window(50, 0.5);
    if (!next.apply) continue;
    EXPECT_EQ(next.apply->reservation, Reservation::Early);
  }
}

TEST(Tuner, a_trial_that_stays_legal_goes_on_over_a_reconfiguration) {
  Feed feed;
  const KnobValues trial = *feed.window(50, 0.5).apply;
  TunerOptions wanted = options();
  wanted.space.knobs.max_num_batched_tokens.max = 2048;
  wanted.space.base = trial;
  const Decision decision = feed.tuner.reconfigure(wanted, feed.now);
  EXPECT_EQ(decision.phase, Phase::Searching);
  EXPECT_FALSE(decision.apply);
  feed.window(50, 1.0);
  EXPECT_EQ(feed.tuner.status().incumbent, trial);
}

TEST(Tuner, a_removed_pin_leaves_what_the_layers_say_and_a_moved_start_is_followed) {
  Feed feed;
  feed.window(50, 1.0);
  TunerOptions wanted = options();
  wanted.space.base.max_num_batched_tokens = 128;
  wanted.space.max_num_batched_tokens_free = false;
  EXPECT_FALSE(feed.tuner.reconfigure(wanted, feed.now).apply);
  EXPECT_EQ(feed.tuner.status().incumbent.max_num_batched_tokens, 128);

  EXPECT_FALSE(feed.tuner.reconfigure(options(), feed.now).apply);
  EXPECT_EQ(feed.tuner.status().incumbent, options().space.base);

  wanted = options();
  wanted.space.knobs.max_num_batched_tokens.initial = wanted.space.base.max_num_batched_tokens = 320;
  EXPECT_FALSE(feed.tuner.reconfigure(wanted, feed.now).apply);
  EXPECT_EQ(feed.tuner.status().incumbent.max_num_batched_tokens, 320);
}

TEST(Tuner, bounds_that_exclude_the_incumbent_move_it_inside_visibly) {
  Feed feed;
  feed.window(50, 0.98);
  TunerOptions wanted = options();
  wanted.space.knobs.max_num_batched_tokens.max = 300;
  const Decision decision = feed.tuner.reconfigure(wanted, feed.now);
  ASSERT_TRUE(decision.apply);
  EXPECT_EQ(decision.apply->max_num_batched_tokens, 300);
  EXPECT_EQ(decision.reason, "Reconfigured");
  EXPECT_EQ(feed.tuner.status().incumbent, *decision.apply);
}

TEST(Tuner, recent_trials_are_bounded_and_newest_first) {
  Feed feed;
  for (int i = 0; i < 6000 && feed.tuner.status().trials_total < 100; ++i) {
    const bool trying = feed.tuner.status().phase == Phase::Searching;
    feed.window(i % 40 < 20 ? 50 : 200, trying && i % 3 == 0 ? 1.0 : 0.6);
  }
  ASSERT_GE(feed.tuner.status().trials_total, 65);
  const auto trials = feed.tuner.recent_trials();
  EXPECT_EQ(trials.size(), 64u);
  EXPECT_GT(trials[0].number, trials[1].number);
}

}  // namespace
}  // namespace rubato::tuner
