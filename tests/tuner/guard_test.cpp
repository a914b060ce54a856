// SPDX-License-Identifier: Apache-2.0
#include "tuner/guard.h"

#include <gtest/gtest.h>

#include <limits>
#include <random>

namespace rubato::tuner {
namespace {

using std::chrono::milliseconds;

constexpr ObjectivesSpec objectives{.ttft = milliseconds(500), .itl = milliseconds(50), .attainment = 95};

Window window(std::int32_t judged, std::int32_t good) {
  Window w;
  w.begin = TimePoint(std::chrono::seconds(10));
  w.end = TimePoint(std::chrono::seconds(25));
  w.arrivals = judged;
  w.judged = judged;
  w.good = good;
  w.ttft_misses = judged - good;
  w.ttft_p50 = milliseconds(200);
  w.ttft_p99 = milliseconds(good == judged ? 450 : 900);
  w.itl_p50 = milliseconds(20);
  w.itl_p99 = milliseconds(40);
  w.prompt_tokens_mean = 500;
  w.output_tokens_mean = 50;
  w.arrival_interval_cv = 1;
  return w;
}

Evidence seen(std::int32_t judged, std::int32_t good) {
  return evidence_of(window(judged, good), objectives);
}

TEST(Guard, binomial_tail_equals_brute_force) {
  for (const double p : {0.05, 0.5, 0.93}) {
    double sum = 0;
    for (int k = 0; k <= 12; ++k) {
      double choose = 1;
      for (int i = 0; i < k; ++i) choose = choose * (12 - i) / (i + 1);
      sum += choose * std::pow(p, k) * std::pow(1 - p, 12 - k);
      EXPECT_NEAR(binomial_at_most(k, 12, p), sum, 1e-12);
    }
  }
  EXPECT_NEAR(binomial_at_most(9480, 10000, 0.95), 0.186, 0.01);
  EXPECT_EQ(binomial_at_most(-1, 5, 0.5), 0.0);
}

TEST(Guard, a_miss_within_chance_is_unclear_and_beyond_it_missed) {
  EXPECT_EQ(judge(seen(40, 38), objectives), Verdict::Met);
  EXPECT_EQ(judge(seen(40, 37), objectives), Verdict::Unclear);
  EXPECT_EQ(judge(seen(40, 34), objectives), Verdict::Missed);
}

TEST(Guard, true_attainment_at_the_target_is_rarely_called_missed) {
  std::mt19937_64 random(11);
  std::binomial_distribution<int> good(60, 0.95);
  int missed = 0;
  for (int i = 0; i < 4000; ++i) missed += judge(seen(60, good(random)), objectives) == Verdict::Missed ? 1 : 0;
  EXPECT_LT(missed, 4000 * 0.06);
}

TEST(Guard, comparison_needs_more_than_noise) {
  EXPECT_EQ(compare(seen(40, 36), seen(40, 38)), Comparison::Similar);
  EXPECT_EQ(compare(seen(40, 20), seen(40, 38)), Comparison::Worse);
  EXPECT_EQ(compare(seen(40, 39), seen(40, 20)), Comparison::Better);
}

TEST(Guard, equal_settings_are_rarely_told_apart) {
  std::mt19937_64 random(12);
  int worse = 0;
  for (int i = 0; i < 4000; ++i) {
    std::binomial_distribution<int> good(50, 0.85);
    worse += compare(seen(50, good(random)), seen(50, good(random))) == Comparison::Worse ? 1 : 0;
  }
  EXPECT_LT(worse, 4000 * 0.06);
}

TEST(Guard, on_the_plateau_at_zero_latency_still_tells_better_from_worse) {
  Window near = window(40, 0);
  near.ttft_p50 = milliseconds(700);
  near.ttft_p99 = milliseconds(1200);
  Window far = near;
  far.ttft_p50 = milliseconds(9000);
  far.ttft_p99 = milliseconds(20000);
  EXPECT_EQ(compare(evidence_of(near, objectives), evidence_of(far, objectives)), Comparison::Better);
  EXPECT_EQ(compare(evidence_of(far, objectives), evidence_of(near, objectives)), Comparison::Worse);
}

// B046
TEST(Guard, a_setting_under_which_only_easy_requests_finish_does_not_win) {
  Window easy_only = window(20, 20);
  easy_only.arrivals = 120;
  easy_only.waiting_begin = 0;
  easy_only.waiting_end = 90;
  easy_only.oldest_wait = milliseconds(9000);
  const Evidence hidden = evidence_of(easy_only, objectives);
  EXPECT_EQ(unserved(easy_only), 90);
  EXPECT_TRUE(hidden.saturated);
  EXPECT_NEAR(hidden.attainment(), 20.0 / 110, 1e-12);
  EXPECT_EQ(judge(hidden, objectives), Verdict::Missed);
  EXPECT_EQ(compare(hidden, seen(120, 60)), Comparison::Worse);
}

TEST(Guard, an_unfinished_wait_is_a_lower_bound_of_ttft) {
  Window w = window(40, 40);
  const double before = evidence_of(w, objectives).ttft_excess;
  w.oldest_wait = milliseconds(5000);
  EXPECT_GT(evidence_of(w, objectives).ttft_excess, before + 0.5);
}

TEST(Guard, rejected_requests_count_and_saturate) {
  Window w = window(60, 40);
  w.rejected = 20;
  EXPECT_TRUE(evidence_of(w, objectives).saturated);
  EXPECT_NEAR(evidence_of(w, objectives).attainment(), 2.0 / 3, 1e-12);
}

TEST(Guard, the_missed_target_is_named) {
  Window w = window(40, 10);
  EXPECT_EQ(missed_target(evidence_of(w, objectives), objectives), "the TTFT target of 500 ms");
  w.itl_misses = 25;
  EXPECT_EQ(missed_target(evidence_of(w, objectives), objectives), "the TTFT target of 500 ms and the ITL target of 50 ms");
  w.ttft_misses = 0;
  EXPECT_EQ(missed_target(evidence_of(w, objectives), objectives), "the ITL target of 50 ms");
}

TEST(Evidence, contradictions_are_found) {
  EXPECT_EQ(contradiction(window(40, 30)), "");
  const auto broken = [](auto change) {
    Window w = window(40, 30);
    change(w);
    return !contradiction(w).empty();
  };
  EXPECT_TRUE(broken([](Window& w) { w.end = w.begin; }));
  EXPECT_TRUE(broken([](Window& w) { w.good = 41; }));
  EXPECT_TRUE(broken([](Window& w) { w.arrivals = -1; }));
  EXPECT_TRUE(broken([](Window& w) { w.rejected = 11; }));
  EXPECT_TRUE(broken([](Window& w) { w.itl_misses = 41; }));
  EXPECT_TRUE(broken([](Window& w) { w.ttft_p99 = -milliseconds(1); }));
  EXPECT_TRUE(broken([](Window& w) { w.prompt_tokens_mean = std::numeric_limits<double>::quiet_NaN(); }));
  EXPECT_TRUE(broken([](Window& w) { w.output_tokens_mean = std::numeric_limits<double>::infinity(); }));
  EXPECT_TRUE(broken([](Window& w) { w.arrival_interval_cv = 1e12; }));
}

TEST(Evidence, merged_windows_add_counts_and_weigh_means) {
  Window a = window(40, 30);
  Window b = window(10, 10);
  b.begin = a.end;
  b.end = b.begin + std::chrono::seconds(5);
  b.prompt_tokens_mean = 1000;
  b.waiting_end = 3;
  const Window both = merged(a, b);
  EXPECT_EQ(both.judged, 50);
  EXPECT_EQ(both.good, 40);
  EXPECT_EQ(both.waiting_end, 3);
  EXPECT_EQ(both.begin, a.begin);
  EXPECT_EQ(both.end, b.end);
  EXPECT_NEAR(both.prompt_tokens_mean, 600, 1e-9);
  EXPECT_EQ(both.ttft_p99, a.ttft_p99);
  EXPECT_TRUE(contradiction(both).empty());
}

}  // namespace
}  // namespace rubato::tuner
