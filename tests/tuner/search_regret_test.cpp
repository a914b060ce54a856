// SPDX-License-Identifier: Apache-2.0
// The search against random search on the fake engine's landscape, and long runs under loads that keep moving. Prints its
// figures.
#include "tuner/search.h"

#include <gtest/gtest.h>

#include <cstdio>

#include "tests/tuner/fake_engine.h"
#include "tuner/guard.h"

namespace rubato::tuner {
namespace {

using testing::FakeEngine;
using testing::FakeEngineOptions;
using testing::FakeLoad;
using testing::Loop;

constexpr int seeds = 20;
constexpr int trials = 10;

struct Regret {
  double lost = 0;   // attainment below the best, summed over the trial windows: what searching costs
  double final = 0;  // attainment of the setting chosen, below the best
};

struct Start {
  FakeLoad load;
  KnobValues base;
  double step_per_token;
};

Evidence measure(FakeEngine& engine, const KnobValues& knobs, const FakeLoad& load, const ObjectivesSpec& objectives) {
  engine.change(knobs);
  engine.run(load, std::chrono::seconds(2));
  return evidence_of(engine.run(load, std::chrono::seconds(15)), objectives);
}

Regret run(const Start& start, std::uint64_t seed, bool by_process) {
  FakeEngineOptions engine_options;
  engine_options.step_per_token = start.step_per_token;
  FakeEngine engine(seed, engine_options);
  TunerOptions options = testing::tuner_options(engine_options.objectives, seed);
  options.space.base = start.base;
  const LegalSettings legal(options.space);
  const double best = testing::best_attainment(engine, start.load, options.space);
  const LoadFeatures load{std::log2(start.load.rate), std::log2(start.load.prompt), std::log2(start.load.output)};
  Search search(legal, {.objectives = options.objectives, .load = load, .seed = seed}, {});
  std::mt19937_64 random(seed);
  const auto grid = legal.grid(4096, seed);
  KnobValues incumbent = legal.clamp(start.base);
  search.tell(incumbent, measure(engine, incumbent, start.load, options.objectives));
  Regret regret;
  for (int i = 0; i < trials; ++i) {
    KnobValues next = grid[random() % grid.size()];
    if (by_process) {
      const Answer answer = search.ask(incumbent);
      next = answer.proposal ? answer.proposal->knobs : incumbent;
    }
    regret.lost += best - engine.attainment(next, start.load);
    search.tell(next, measure(engine, next, start.load, options.objectives));
    if (compare(search.evidence(next), search.evidence(incumbent)) == Comparison::Better) incumbent = next;
  }
  incumbent = by_process ? search.best(incumbent) : incumbent;
  regret.final = best - engine.attainment(incumbent, start.load);
  return regret;
}

TEST(SearchRegret, process_search_beats_random_search_in_regret) {
  const std::vector<Start> starts{
      {{.rate = 8, .prompt = 1200, .output = 60},
       {.max_num_batched_tokens = 4096, .max_num_seqs = 64, .priority_policy = PriorityPolicy::DecodeFirst},
       60e-6},
      {{.rate = 3, .prompt = 1000, .output = 60},
       {.max_num_batched_tokens = 8192, .max_num_seqs = 64, .priority_policy = PriorityPolicy::PrefillFirst},
       130e-6},
      {{.rate = 10, .prompt = 1200, .output = 40},
       {.max_num_batched_tokens = 96, .max_num_seqs = 32, .priority_policy = PriorityPolicy::PrefillFirst},
       60e-6}};
  for (const Start& start : starts) {
    Regret process;
    Regret random;
    int better = 0;
    for (std::uint64_t seed = 1; seed <= seeds; ++seed) {
      const Regret a = run(start, seed, true);
      const Regret b = run(start, seed, false);
      process.lost += a.lost / seeds;
      process.final += a.final / seeds;
      random.lost += b.lost / seeds;
      random.final += b.final / seeds;
      better += a.lost < b.lost ? 1 : 0;
    }
    std::printf(
        "rate %.0f prompt %.0f: lost windows %.2f (random %.2f), final regret %.3f (random %.3f), better in %d of %d seeds\n",
        start.load.rate, start.load.prompt, process.lost, random.lost, process.final, random.final, better, seeds);
    EXPECT_LT(process.lost, 0.8 * random.lost);
    EXPECT_LE(process.final, random.final + 0.01);
    EXPECT_GE(better, seeds * 3 / 4);
  }
}

TEST(SearchRegret, a_day_of_moving_load_beats_the_initial_setting_and_stays_bounded) {
  double tuned = 0;
  double fixed = 0;
  for (std::uint64_t seed = 1; seed <= 5; ++seed) {
    const FakeEngineOptions engine;
    TunerOptions options = testing::tuner_options(engine.objectives, seed);
    options.space.base.max_num_batched_tokens = 1024;
    Loop loop(seed, engine, options);
    std::mt19937_64 random(seed);
    FakeLoad load;
    int good = 0;
    int judged = 0;
    double untuned = 0;
    constexpr int windows = 960;  // four hours
    for (int i = 0; i < windows; ++i) {
      if (i % 60 == 0) {
        // Long prompts want large chunks, many decodes small ones; the load stays just servable.
        load.prompt = 300.0 + static_cast<double>(random() % 2700);
        load.rate = (3500.0 + static_cast<double>(random() % 7000)) / load.prompt;
        load.output = 30.0 + static_cast<double>(random() % 60);
      }
      loop.step(load);
      good += loop.windows.back().good;
      judged += loop.windows.back().judged;
      untuned += loop.engine.attainment(options.space.base, load) / windows;
    }
    tuned += static_cast<double>(good) / judged / 5;
    fixed += untuned / 5;
    std::printf("seed %d: attainment %.3f, untuned %.3f, trials %d, searches %d\n", static_cast<int>(seed),
                static_cast<double>(good) / judged, untuned, static_cast<int>(loop.tuner->status().trials_total),
                static_cast<int>(loop.tuner->status().searches_total));
    EXPECT_LE(loop.tuner->status().trials_total, 16 * 16);
  }
  EXPECT_GT(tuned, 0.85);
  EXPECT_GT(tuned, fixed + 0.2);
}

}  // namespace
}  // namespace rubato::tuner
