// SPDX-License-Identifier: Apache-2.0
// What users of other tuners reported, replayed on ours under virtual time: idle phases, noise, saturation, infeasible
// objectives, stale history.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>

#include "tests/tuner/fake_engine.h"
#include "tuner/search_space.h"

namespace rubato::tuner {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using testing::FakeEngineOptions;
using testing::FakeLoad;
using ::testing::HasSubstr;
using testing::Loop;

constexpr FakeLoad steady{.rate = 8, .prompt = 1200, .output = 60};

// Traffic stops, then trickles, then bursts.
TEST(IdleTraffic, nothing_is_learnt_from_it_and_a_burst_finds_a_proven_setting) {
  const FakeEngineOptions engine;
  Loop loop(1, engine, testing::tuner_options(engine.objectives));
  loop.settle(steady, 40);
  const KnobValues tuned = loop.tuner->status().incumbent;
  ASSERT_GT(loop.engine.attainment(tuned, steady), 0.9);
  const TimePoint stopped = loop.engine.now();

  for (int i = 0; i < 40; ++i) {  // ten minutes of nothing
    const Decision decision = loop.step({.rate = 0});
    EXPECT_EQ(decision.phase, Phase::NoData);
    EXPECT_FALSE(decision.apply);
  }
  EXPECT_EQ(loop.tuner->status().no_data_since, stopped);
  for (int i = 0; i < 40; ++i) {  // one request a minute
    EXPECT_FALSE(loop.step({.rate = 1.0 / 60, .prompt = 1200}).apply);
  }
  EXPECT_EQ(loop.tuner->status().no_data_since, stopped);
  EXPECT_EQ(loop.tuner->status().windows_refused_total, 0);
  EXPECT_EQ(loop.engine.knobs(), tuned);

  const std::int64_t trials = loop.tuner->status().trials_total;
  for (int i = 0; i < 10; ++i) loop.step(steady);
  EXPECT_FALSE(loop.tuner->status().no_data_since);
  EXPECT_EQ(loop.tuner->status().trials_total, trials);
}

// Cold steps after every change, noise, outliers.
TEST(NoisySamples, the_choice_is_within_ten_percent_of_the_optimum_in_nine_of_ten_seeds) {
  FakeEngineOptions engine;
  engine.objectives.attainment = 93;
  int good = 0;
  std::int64_t trials = 0;
  for (std::uint64_t seed = 1; seed <= 10; ++seed) {
    const TunerOptions options = testing::tuner_options(engine.objectives, seed);
    Loop loop(seed, engine, options);
    for (int i = 0; i < 60; ++i) loop.step(steady);
    const double best = testing::best_attainment(loop.engine, steady, options.space);
    const double chosen = loop.engine.attainment(loop.tuner->status().incumbent, steady);
    if (chosen >= 0.9 * best) ++good;
    trials += loop.tuner->status().trials_total;
    RecordProperty("chosen_" + std::to_string(seed), std::to_string(chosen));
  }
  EXPECT_GE(good, 9);
  EXPECT_LE(trials, 10 * 16);
}

TEST(NoisySamples, one_freak_window_of_the_incumbent_does_not_lose_it) {
  FakeEngineOptions engine;
  Loop loop(2, engine, testing::tuner_options(engine.objectives));
  loop.settle(steady, 40);
  const double before = loop.engine.attainment(loop.tuner->status().incumbent, steady);
  for (int i = 0; i < 10; ++i) loop.step(steady);
  Window freak = loop.engine.run(steady, seconds(15));
  freak.ttft_misses = freak.judged;
  freak.good = 0;
  const Decision decision = loop.tuner->on_window(freak);
  if (decision.apply) loop.engine.change(*decision.apply);
  for (int i = 0; i < 40; ++i) loop.step(steady);
  EXPECT_GE(loop.engine.attainment(loop.tuner->status().incumbent, steady), before - 0.05);
}

// Open loop at about twice what can be served.
TEST(Saturation, overload_is_named_and_does_not_thrash) {
  FakeEngineOptions engine;
  TunerOptions options = testing::tuner_options(engine.objectives);
  options.space.knobs.priority_policy.choices.push_back(PriorityPolicy::Deadline);
  Loop loop(3, engine, options);
  const FakeLoad heavy{.rate = 18, .prompt = 1200, .output = 60};
  int changes = 0;
  for (int i = 0; i < 120; ++i) {
    const KnobValues before = loop.engine.knobs();
    loop.step(heavy);
    if (i >= 40) changes += loop.engine.knobs() == before ? 0 : 1;
  }
  const TunerStatus status = loop.tuner->status();
  EXPECT_EQ(status.phase, Phase::Infeasible);
  EXPECT_EQ(status.reason, "Overloaded");
  EXPECT_THAT(status.message, HasSubstr("More arrives than any setting can serve"));
  EXPECT_EQ(changes, 0) << "still searching after forty windows of an unchanged load";
  EXPECT_EQ(status.searches_total, 1);
  // Triage serves what can be served; every order of arrival serves nobody in time.
  EXPECT_EQ(status.incumbent.priority_policy, PriorityPolicy::Deadline);
}

TEST(Saturation, when_the_overload_ends_the_tuner_resumes) {
  FakeEngineOptions engine;
  TunerOptions options = testing::tuner_options(engine.objectives);
  Loop loop(4, engine, options);
  for (int i = 0; i < 60; ++i) loop.step({.rate = 18, .prompt = 1200, .output = 60});
  ASSERT_EQ(loop.tuner->status().phase, Phase::Infeasible);
  for (int i = 0; i < 150; ++i) loop.step({.rate = 5, .prompt = 1200, .output = 60});
  EXPECT_EQ(loop.tuner->status().phase, Phase::Holding);
  EXPECT_GT(loop.engine.attainment(loop.tuner->status().incumbent, {.rate = 5, .prompt = 1200, .output = 60}), 0.88);
}

// A closed loop: slower settings lower the arrival rate, which is no shift of the load.
TEST(Saturation, a_rate_that_follows_the_settings_does_not_restart_the_search_for_ever) {
  FakeEngineOptions engine;
  Loop loop(5, engine, testing::tuner_options(engine.objectives));
  for (int i = 0; i < 80; ++i) {
    const double quality = loop.engine.attainment(loop.engine.knobs(), steady);
    loop.step({.rate = 3 + 5 * quality, .prompt = 1200, .output = 60});
  }
  EXPECT_LE(loop.tuner->status().trials_total, 2 * 16);
  EXPECT_NE(loop.tuner->status().phase, Phase::Searching);
}

// No setting can meet it.
TEST(InfeasibleObjectives, the_target_is_named_the_least_violating_setting_held_and_a_relaxed_target_resumes) {
  FakeEngineOptions engine;
  engine.objectives.ttft = milliseconds(1);  // below the prefill of one prompt
  const TunerOptions options = testing::tuner_options(engine.objectives);
  Loop loop(6, engine, options);
  for (int i = 0; i < 150; ++i) loop.step(steady);
  TunerStatus status = loop.tuner->status();
  EXPECT_EQ(status.phase, Phase::Infeasible);
  EXPECT_THAT(status.message, HasSubstr("the TTFT target of 1 ms"));
  EXPECT_THAT(status.message, HasSubstr("the nearest is budget"));
  EXPECT_LE(status.trials_total, 16) << "it explores for ever";
  EXPECT_TRUE(LegalSettings(options.space).contains(status.incumbent));

  TunerOptions relaxed = options;
  relaxed.objectives.ttft = milliseconds(1000);
  FakeEngineOptions easier = engine;
  easier.objectives = relaxed.objectives;
  Loop after(6, easier, options);  // the same tuner would be told by the manifest; here the engine's targets move with it
  after.tuner = std::move(loop.tuner);
  const Decision decision = after.tuner->reconfigure(relaxed, TimePoint(seconds(10000)));
  EXPECT_EQ(decision.phase, Phase::Holding);
  after.engine.change(decision.apply.value_or(after.tuner->status().incumbent));
  after.engine.run({.rate = 0}, seconds(20000));  // windows go on after those of the first engine
  for (int i = 0; i < 60; ++i) after.step(steady);
  EXPECT_EQ(after.tuner->status().phase, Phase::Holding);
  EXPECT_GT(after.engine.attainment(after.tuner->status().incumbent, steady), 0.85);
}

TEST(InfeasibleObjectives, targets_that_exclude_each_other_end_in_a_compromise) {
  FakeEngineOptions engine;
  engine.objectives = {.ttft = milliseconds(120), .itl = milliseconds(12), .attainment = 95};
  Loop loop(7, engine, testing::tuner_options(engine.objectives));
  for (int i = 0; i < 60; ++i) loop.step({.rate = 4, .prompt = 1200, .output = 60});
  EXPECT_EQ(loop.tuner->status().phase, Phase::Infeasible);
  EXPECT_THAT(loop.tuner->status().message, HasSubstr("stands in the way"));
}

// A journal of other bounds, models and objectives, and a damaged one.
class StaleHistory : public ::testing::Test {
 protected:
  void SetUp() override {
    path_ = (std::filesystem::temp_directory_path() / ("rubato_history_" + std::to_string(getpid()))).string();
    TearDown();
  }
  void TearDown() override {
    for (const char* suffix : {"", "-wal", "-shm", ".damaged"}) std::filesystem::remove(path_ + suffix);
  }
  std::string path_;
  FakeEngineOptions engine_;
};

TEST_F(StaleHistory, a_restart_tries_first_what_worked_under_the_same_load) {
  KnobValues learnt;
  {
    auto journal = Journal::open(path_);
    Loop loop(1, engine_, testing::tuner_options(engine_.objectives), journal.value().get());
    loop.settle(steady, 40);
    learnt = loop.tuner->status().incumbent;
  }
  auto journal = Journal::open(path_);
  Loop loop(2, engine_, testing::tuner_options(engine_.objectives), journal.value().get());
  const Decision first = loop.step(steady);
  ASSERT_TRUE(first.apply) << first.message;
  EXPECT_EQ(*first.apply, learnt);
  EXPECT_THAT(first.message, HasSubstr("similar load"));
  EXPECT_GT(loop.tuner->recent_trials().size() + 1, 0u);
}

TEST_F(StaleHistory, entries_outside_changed_bounds_are_never_proposed) {
  {
    auto journal = Journal::open(path_);
    Loop loop(1, engine_, testing::tuner_options(engine_.objectives), journal.value().get());
    loop.settle(steady, 40);
  }
  auto journal = Journal::open(path_);
  TunerOptions options = testing::tuner_options(engine_.objectives);
  options.space.knobs.max_num_batched_tokens = {.initial = 700, .min = 600, .max = 2000};
  options.space.base.max_num_batched_tokens = 700;
  Loop loop(2, engine_, options, journal.value().get());
  const LegalSettings legal(options.space);
  int proposals = 0;
  for (int i = 0; i < 60; ++i) {
    const Decision decision = loop.step(steady);
    if (!decision.apply) continue;
    ++proposals;
    EXPECT_TRUE(legal.contains(*decision.apply)) << decision.message;
  }
  EXPECT_GT(proposals, 0);
}

TEST_F(StaleHistory, another_model_or_objective_starts_without_history) {
  {
    auto journal = Journal::open(path_);
    Loop loop(1, engine_, testing::tuner_options(engine_.objectives), journal.value().get());
    loop.settle(steady, 40);
  }
  for (const bool other_model : {true, false}) {
    auto journal = Journal::open(path_);
    TunerOptions options = testing::tuner_options(engine_.objectives);
    if (other_model) {
      options.model_key = "fake/cuda";
    } else {
      options.objectives.itl -= milliseconds(1);
    }
    Loop loop(2, engine_, options, journal.value().get());
    EXPECT_THAT(loop.step(steady).message, ::testing::Not(HasSubstr("similar load")));
  }
}

TEST_F(StaleHistory, a_damaged_journal_is_a_reported_cold_start) {
  std::ofstream(path_) << "not a journal at all, and long enough to be looked at as a header of one hundred bytes .............";
  auto journal = Journal::open(path_);
  ASSERT_TRUE(journal);
  EXPECT_FALSE(journal.value()->cold_start_reason().empty());
  Loop loop(1, engine_, testing::tuner_options(engine_.objectives), journal.value().get());
  loop.settle(steady, 40);
  EXPECT_EQ(loop.tuner->status().journal_errors_total, 0);
}

TEST(DegenerateSpaces, six_budgets_that_all_miss_end_the_search) {
  FakeEngineOptions engine;
  TunerOptions options = testing::tuner_options(engine.objectives);
  options.space.knobs.max_num_batched_tokens = {.initial = 4000, .min = 4000, .max = 4005};
  options.space.base.max_num_batched_tokens = 4000;
  options.space.max_num_seqs_free = options.space.priority_policy_free = options.space.deadline_margin_free = false;
  Loop loop(8, engine, options);
  for (int i = 0; i < 60; ++i) loop.step(steady);
  EXPECT_EQ(loop.tuner->status().phase, Phase::Infeasible);
  EXPECT_LE(loop.tuner->status().trials_total, 5);
}

TEST(Determinism, same_seed_same_decisions_and_another_seed_still_converges) {
  const FakeEngineOptions engine;
  const auto run = [&] {
    Loop loop(9, engine, testing::tuner_options(engine.objectives, 9));
    for (int i = 0; i < 60; ++i) loop.step({.rate = i < 30 ? 8.0 : 3.0, .prompt = i < 30 ? 1200.0 : 2800.0});
    std::string text;
    for (const Decision& one : loop.decisions) text += one.reason + ": " + one.message + "\n";
    return text;
  };
  EXPECT_EQ(run(), run());
}

TEST(DoNoHarm, a_load_that_alternates_costs_little_against_the_best_single_setting) {
  const FakeEngineOptions engine;
  TunerOptions options = testing::tuner_options(engine.objectives);
  options.space.base = {.max_num_batched_tokens = 288, .max_num_seqs = 64, .priority_policy = PriorityPolicy::ShortestFirst};
  Loop loop(10, engine, options);
  int good = 0;
  int judged = 0;
  for (int i = 0; i < 160; ++i) {
    loop.step(i / 8 % 2 == 0 ? steady : FakeLoad{.rate = 3, .prompt = 600, .output = 120});
    good += loop.windows.back().good;
    judged += loop.windows.back().judged;
  }
  EXPECT_GT(static_cast<double>(good) / judged, 0.93);
  EXPECT_EQ(loop.tuner->status().trials_total, 0);
}

}  // namespace
}  // namespace rubato::tuner
