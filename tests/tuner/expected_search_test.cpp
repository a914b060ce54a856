// SPDX-License-Identifier: Apache-2.0
// The search with expectations, against a truth that they miss by a scale, by another speed or at one setting, and against the
// plain search on the same landscape. Prints its figures.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>
#include <functional>
#include <string>

#include "tests/tuner/fake_engine.h"
#include "tuner/guard.h"
#include "tuner/search.h"

namespace rubato::tuner {
namespace {

using testing::FakeEngine;
using testing::FakeEngineOptions;
using testing::FakeLoad;

constexpr FakeLoad load{.rate = 8, .prompt = 1200, .output = 60};
constexpr int requests = 120;  // per live window
constexpr int windows_max = 12;
constexpr std::uint64_t seeds = 40;

ObjectivesSpec objectives() {
  return FakeEngineOptions{}.objectives;
}

SearchSpace space() {
  SearchSpace result = testing::tuner_options(objectives()).space;
  result.max_num_seqs_free = false;
  return result;
}

LoadFeatures features() {
  return {std::log2(load.rate), std::log2(load.prompt), std::log2(load.output)};
}

/// Evidence of so many requests of which this share was good, with latencies that go with it.
Evidence evidence_at(double attainment, std::int32_t count) {
  Evidence result;
  result.windows = 1;
  result.judged = count;
  result.good = static_cast<std::int32_t>(std::lround(attainment * count));
  result.ttft_misses = count - result.good;
  result.ttft_excess = 1.0 - 1.5 * attainment;
  result.itl_excess = -0.3;
  return result;
}

Evidence live(double attainment, std::mt19937_64& random) {
  return evidence_at(static_cast<double>(std::binomial_distribution<int>(requests, attainment)(random)) / requests, requests);
}

using Attainment = std::function<double(const KnobValues&)>;

std::vector<Expected> expectations(const Attainment& believed) {
  std::vector<Expected> result;
  for (const KnobValues& knobs : LegalSettings(space()).grid(4096, 1)) {
    const double attainment = believed(knobs);
    result.push_back(
        {.knobs = knobs, .attainment = attainment, .score = score(evidence_at(attainment, 6000)).value, .variance = 0.002});
  }
  return result;
}

KnobValues best_of(const Attainment& truth) {
  const auto grid = LegalSettings(space()).grid(4096, 1);
  return *std::max_element(grid.begin(), grid.end(),
                           [&](const KnobValues& a, const KnobValues& b) { return truth(a) < truth(b); });
}

struct Course {
  int windows = windows_max + 1;  // live trials until one was within 5 % of the best; beyond the last when none was
  int trials = 0;
  double lost = 0;   // attainment below the best, over the trials
  double final = 0;  // of the setting chosen, as a share of the best
};

Course follow(const Attainment& truth, const std::vector<Expected>& expected, std::uint64_t seed) {
  Search search(LegalSettings(space()), {.objectives = objectives(), .load = features(), .seed = seed, .expected = expected}, {});
  std::mt19937_64 random(seed);
  KnobValues incumbent = space().base;
  search.tell(incumbent, live(truth(incumbent), random));
  const double best = truth(best_of(truth));
  Course course;
  while (course.trials < windows_max) {
    const Answer answer = search.ask(incumbent);
    if (!answer.proposal) break;
    const KnobValues& knobs = answer.proposal->knobs;
    ++course.trials;
    if (truth(knobs) >= 0.95 * best) course.windows = std::min(course.windows, course.trials);
    course.lost += best - truth(knobs);
    search.tell(knobs, live(truth(knobs), random));
    if (compare(search.evidence(knobs), search.evidence(incumbent)) == Comparison::Better) incumbent = knobs;
  }
  course.final = truth(search.best(incumbent)) / best;
  return course;
}

struct Summary {
  int windows_median = 0;
  int windows_p90 = 0;
  double trials = 0;
  double lost = 0;
  double final = 0;
};

Summary study(const char* name, const Attainment& truth, const std::vector<Expected>& expected) {
  std::vector<int> windows;
  Summary result;
  for (std::uint64_t seed = 1; seed <= seeds; ++seed) {
    const Course course = follow(truth, expected, seed);
    windows.push_back(course.windows);
    result.trials += static_cast<double>(course.trials) / seeds;
    result.lost += course.lost / seeds;
    result.final += course.final / seeds;
  }
  std::sort(windows.begin(), windows.end());
  result.windows_median = windows[windows.size() / 2];
  result.windows_p90 = windows[windows.size() * 9 / 10];
  std::printf("%-32s windows %2d (p90 %2d), trials %.1f, lost %.2f, final share %.3f\n", name, result.windows_median,
              result.windows_p90, result.trials, result.lost, result.final);
  return result;
}

Attainment engine_of(double step_per_token, double rate = load.rate) {
  FakeEngineOptions options;
  options.step_per_token = step_per_token;
  return [engine = FakeEngine(1, options), rate](const KnobValues& knobs) {
    return engine.attainment(knobs, {.rate = rate, .prompt = load.prompt, .output = load.output});
  };
}

constexpr double true_step = 60e-6;

TEST(ExpectedSearch, expectations_off_by_a_scale_or_a_quirk_cost_two_windows_at_most) {
  const Attainment truth = engine_of(true_step);
  const Summary plain = study("plain", truth, {});
  const auto scaled = [&](double scale) {
    return expectations([&, scale](const KnobValues& knobs) { return std::min(1.0, scale * truth(knobs)); });
  };
  for (const double scale : {1.0, 0.7, 1.3}) {
    const Summary ours = study(("expectations times " + std::to_string(scale)).c_str(), truth, scaled(scale));
    EXPECT_LE(ours.windows_median, 2);
    EXPECT_LE(ours.lost, plain.lost);
    EXPECT_GE(ours.final, 0.95);
  }
  // The truth has a hole at the very setting that is tried first, and nothing next to it.
  Search first(LegalSettings(space()), {.objectives = objectives(), .load = features(), .expected = scaled(1.0)}, {});
  first.tell(space().base, evidence_at(truth(space().base), requests));
  const KnobValues hole = first.ask(space().base).proposal->knobs;
  const Attainment quirky = [&](const KnobValues& knobs) { return act_alike(knobs, hole) ? 0.1 : truth(knobs); };
  const Summary quirk = study("a hole at the expected best", quirky, scaled(1.0));
  const Summary plain_quirk = study("plain, with the hole", quirky, {});
  EXPECT_LE(quirk.windows_median, 2);
  EXPECT_LE(quirk.windows_median, plain_quirk.windows_median);
  EXPECT_GE(quirk.final, 0.95);
}

TEST(ExpectedSearch, an_engine_thirty_percent_slower_or_faster_than_expected_is_found_before_the_plain_search_would) {
  for (const double speed : {0.7, 1.3}) {
    constexpr double rate = 6;  // what the slower one can just serve
    const Attainment truth = engine_of(true_step * speed, rate);
    const Summary plain = study("plain", truth, {});
    const Summary ours =
        study(("true step time times " + std::to_string(speed)).c_str(), truth, expectations(engine_of(true_step, rate)));
    EXPECT_LE(ours.windows_median, std::min(2, plain.windows_median));
    EXPECT_LE(ours.lost, plain.lost);
    EXPECT_GE(ours.final, 0.95);
  }
}

/// A landscape of a few random hills, and what is believed of it: all over the place.
struct Hills {
  explicit Hills(std::uint64_t seed) {
    std::mt19937_64 random(seed);
    std::uniform_real_distribution<double> uniform(0, 1);
    for (int i = 0; i < 4; ++i) {
      centers.push_back({6 + 7 * uniform(random), uniform(random), static_cast<int>(random() % 3)});
    }
  }
  double operator()(const KnobValues& knobs) const {
    double best = 0.05;
    for (const auto& [budget, height, policy] : centers) {
      const double delta = std::log2(knobs.max_num_batched_tokens) - budget;
      const double same = static_cast<int>(knobs.priority_policy) == policy ? 1.0 : 0.5;
      best = std::max(best, height * same * std::exp(-0.5 * delta * delta));
    }
    return best;
  }
  struct Center {
    double budget, height;
    int policy;
  };
  std::vector<Center> centers;
};

TEST(ExpectedSearch, with_a_guard_of_nothing_no_trial_is_predicted_below_the_incumbent) {
  int proposals = 0;
  for (std::uint64_t seed = 1; seed <= 60; ++seed) {
    const Hills truth(seed);
    const std::vector<Expected> expected = expectations(Hills(seed + 1000));
    std::mt19937_64 random(seed);
    KnobValues incumbent = expected[random() % expected.size()].knobs;
    Search search(LegalSettings(space()),
                  {.objectives = objectives(), .load = features(), .seed = seed, .expected = expected, .guard = 0}, {});
    std::vector<std::pair<KnobValues, Evidence>> told;
    const auto measure = [&](const KnobValues& knobs) {
      told.emplace_back(knobs, live(truth(knobs), random));
      search.tell(knobs, told.back().second);
    };
    measure(incumbent);
    for (int trial = 0; trial < 6; ++trial) {
      const Answer answer = search.ask(incumbent);
      if (!answer.proposal) break;
      ++proposals;
      Outlook outlook(features(), expected);
      for (const auto& [knobs, evidence] : told) outlook.learn(knobs, evidence);
      outlook.fit(incumbent);
      const KnobValues& knobs = answer.proposal->knobs;
      EXPECT_GE(outlook.of(knobs)->attainment.mean, outlook.of(incumbent)->attainment.mean - 1e-9) << "seed " << seed;
      measure(knobs);
      if (random() % 2 == 0) incumbent = knobs;
    }
  }
  EXPECT_GT(proposals, 60);
}

Search with_expectations(const Attainment& believed, const KnobValues& hint) {
  return Search(LegalSettings(space()),
                {.objectives = objectives(), .load = features(), .expected = expectations(believed), .hint = hint}, {});
}

TEST(ExpectedSearch, the_hint_is_tried_first_then_what_is_expected_most_of_then_what_promises_more) {
  const Attainment truth = engine_of(true_step);
  const KnobValues base = space().base;
  KnobValues hint = best_of(truth);
  hint.max_num_batched_tokens += 3;  // not on the grid, so that nothing is expected of it
  Search search = with_expectations(truth, hint);
  search.tell(base, evidence_at(0.2, requests));
  const Answer first = search.ask(base);
  ASSERT_TRUE(first.proposal);
  EXPECT_EQ(first.proposal->source, Source::Regime);
  EXPECT_EQ(first.proposal->knobs, hint);
  search.tell(hint, evidence_at(0.5, requests));
  const Answer second = search.ask(base);
  ASSERT_TRUE(second.proposal);
  EXPECT_EQ(second.proposal->source, Source::Twin);
  EXPECT_GE(truth(second.proposal->knobs), 0.98 * truth(best_of(truth)));
  ASSERT_TRUE(second.proposal->attainment);
  EXPECT_GT(*second.proposal->attainment, 0.9);
  search.tell(second.proposal->knobs, evidence_at(0.5, requests));
  const Answer third = search.ask(base);
  ASSERT_TRUE(third.proposal);
  EXPECT_EQ(third.proposal->source, Source::Improvement);
}

TEST(ExpectedSearch, an_incumbent_that_does_as_expected_and_is_expected_best_costs_one_trial_at_most) {
  const Attainment truth = engine_of(true_step);
  const KnobValues best = best_of(truth);
  Search search(LegalSettings(space()), {.objectives = objectives(), .load = features(), .expected = expectations(truth)}, {});
  search.tell(best, evidence_at(truth(best), 500));
  Answer answer = search.ask(best);
  if (answer.proposal) {
    EXPECT_EQ(answer.proposal->source, Source::Improvement);
    EXPECT_GT(truth(answer.proposal->knobs), 0.95 * truth(best));
    search.tell(answer.proposal->knobs, evidence_at(truth(answer.proposal->knobs), 500));
    answer = search.ask(best);
  }
  EXPECT_FALSE(answer.proposal);
  EXPECT_EQ(answer.end, SearchEnd::NothingToGain);
  EXPECT_EQ(search.best(best), best);
}

TEST(ExpectedSearch, only_expected_settings_that_are_legal_are_proposed_and_none_twice) {
  const Hills truth(5);
  std::vector<Expected> expected = expectations(Hills(6));
  SearchSpace narrow = space();
  narrow.knobs.max_num_batched_tokens.max = 1024;
  Search search(LegalSettings(space()),
                {.objectives = objectives(), .load = features(), .trials_max = 100, .expected = expected, .guard = 1}, {});
  search.restrict_to(LegalSettings(narrow));
  std::mt19937_64 random(3);
  search.tell(space().base, live(0.05, random));
  std::vector<KnobValues> seen;
  while (const auto proposal = search.ask(space().base).proposal) {
    EXPECT_LE(proposal->knobs.max_num_batched_tokens, 1024);
    EXPECT_TRUE(std::any_of(expected.begin(), expected.end(), [&](const Expected& one) { return one.knobs == proposal->knobs; }));
    EXPECT_EQ(std::count(seen.begin(), seen.end(), proposal->knobs), 0);
    seen.push_back(proposal->knobs);
    search.tell(proposal->knobs, live(truth(proposal->knobs), random));
  }
  EXPECT_GE(seen.size(), 2u);
}

TEST(ExpectedSearch, a_moved_load_drops_what_was_expected_until_it_is_expected_anew) {
  const Attainment truth = engine_of(true_step);
  const KnobValues base = space().base;
  Search search = with_expectations(truth, best_of(truth));
  LoadFeatures moved = features();
  moved.rate += 0.5;
  search.load_moved(moved);
  search.tell(base, evidence_at(0.2, requests));
  const Answer plain = search.ask(base);
  ASSERT_TRUE(plain.proposal);
  EXPECT_EQ(plain.proposal->source, Source::Opening);
  search.expect(expectations(truth));
  const Answer answer = search.ask(base);
  ASSERT_TRUE(answer.proposal);
  EXPECT_EQ(answer.proposal->source, Source::Twin);
}

TEST(ExpectedSearch, one_live_result_corrects_what_is_about_it_and_a_quirk_leaves_the_rest_nearly_as_it_was) {
  const std::vector<Expected> expected = expectations([](const KnobValues&) { return 0.8; });
  const auto mean_of = [&](const Outlook& outlook, std::int32_t budget) {
    KnobValues knobs = space().base;
    knobs.max_num_batched_tokens = budget;
    return share_of_transformed(outlook.of(knobs)->attainment.mean);
  };
  const auto learn = [&](Outlook& outlook, std::int32_t budget, double attainment) {
    KnobValues knobs = space().base;
    knobs.max_num_batched_tokens = budget;
    outlook.learn(knobs, evidence_at(attainment, requests));
  };
  Outlook one(features(), expected);
  learn(one, 512, 0.5);
  one.fit(space().base);
  EXPECT_LT(mean_of(one, 512), 0.6);
  EXPECT_LT(mean_of(one, 720), 0.7);
  EXPECT_LT(mean_of(one, 368), 0.7);

  Outlook quirk(features(), expected);
  for (const std::int32_t budget : {152, 304, 1024, 2048}) learn(quirk, budget, 0.8);
  learn(quirk, 512, 0.1);
  quirk.fit(space().base);
  EXPECT_LT(mean_of(quirk, 512), 0.4);
  EXPECT_GT(mean_of(quirk, 432), 0.65);
  EXPECT_GT(mean_of(quirk, 608), 0.65);
}

TEST(ExpectedSearch, few_requests_all_good_are_no_sign_that_expectations_are_too_high) {
  const std::vector<Expected> expected = expectations([](const KnobValues&) { return 1.0; });
  Outlook outlook(features(), expected);
  outlook.learn(space().base, evidence_at(1.0, 30));
  outlook.fit(space().base);
  EXPECT_NEAR(outlook.of(expected[3].knobs)->attainment.mean, M_PI, 1e-6);
}

TEST(ExpectedSearch, a_result_of_five_hundred_requests_weighs_more_than_one_of_twenty) {
  const std::vector<Expected> expected = expectations([](const KnobValues&) { return 0.8; });
  const auto moved_by = [&](std::int32_t count) {
    Outlook outlook(features(), expected);
    outlook.learn(space().base, evidence_at(0.5, count));
    outlook.fit(space().base);
    return 2.0 * std::asin(std::sqrt(0.8)) - outlook.of(space().base)->attainment.mean;
  };
  EXPECT_GT(moved_by(500), moved_by(20) * 1.2);
  EXPECT_LT(score(evidence_at(0.5, 500)).variance, score(evidence_at(0.5, 20)).variance / 10);
}

TEST(ExpectedSearch, a_result_told_after_a_fit_is_known_to_best_without_another) {
  const Attainment truth = engine_of(true_step);
  const KnobValues base = space().base;
  Search search(LegalSettings(space()), {.objectives = objectives(), .load = features(), .expected = expectations(truth)}, {});
  search.tell(base, evidence_at(0.0, requests));
  const Answer answer = search.ask(base);
  ASSERT_TRUE(answer.proposal);
  EXPECT_EQ(search.best(base), base);
  search.tell(answer.proposal->knobs, evidence_at(0.95, requests));
  EXPECT_EQ(search.best(base), answer.proposal->knobs);
}

}  // namespace
}  // namespace rubato::tuner
