// SPDX-License-Identifier: Apache-2.0
#include "tuner/shift_detector.h"

#include <gtest/gtest.h>

#include <random>

namespace rubato::tuner {
namespace {

constexpr ObjectivesSpec objectives{
    .ttft = std::chrono::milliseconds(500), .itl = std::chrono::milliseconds(50), .attainment = 95};

/// Poisson arrivals, lognormal lengths, binomial attainment.
class Stream {
 public:
  explicit Stream(std::uint64_t seed) : random_(seed) {}
  double rate = 4;
  double prompt = 500;
  double output = 80;
  double good = 0.9;

  std::optional<Shift> feed(ShiftDetector& detector) {
    Window w;
    w.begin = now_;
    w.end = now_ + std::chrono::seconds(12);
    now_ = w.end;
    w.arrivals = std::max(1, std::poisson_distribution<int>(rate * 12)(random_));
    w.judged = w.arrivals;
    w.good = std::binomial_distribution<int>(w.judged, good)(random_);
    w.arrival_interval_cv = 1;
    w.prompt_tokens_mean = mean(prompt, w.arrivals);
    w.output_tokens_mean = mean(output, w.judged);
    return detector.observe(w, evidence_of(w, objectives), SameSettings::Yes);
  }

 private:
  double mean(double value, int count) {
    constexpr double sigma = 0.75;
    std::lognormal_distribution<double> length(std::log(value) - 0.5 * sigma * sigma, sigma);
    double sum = 0;
    for (int i = 0; i < count; ++i) sum += length(random_);
    return sum / count;
  }
  std::mt19937_64 random_;
  TimePoint now_{};
};

TEST(ShiftDetector, a_thousand_steady_windows_raise_about_one_alarm_at_most) {
  int alarms = 0;
  constexpr int seeds = 5;
  for (std::uint64_t seed = 1; seed <= seeds; ++seed) {
    ShiftDetector detector;
    Stream stream(seed);
    for (int i = 0; i < 1000; ++i) alarms += stream.feed(detector) ? 1 : 0;
  }
  EXPECT_LE(alarms, 2 * seeds);
}

/// Over many seeds: the share found within so many windows, and whether the right feature is named.
void expect_quick(const char* feature, int windows, void (*change)(Stream&)) {
  int found = 0;
  int named = 0;
  constexpr int seeds = 100;
  for (std::uint64_t seed = 1; seed <= seeds; ++seed) {
    ShiftDetector detector;
    Stream stream(seed);
    for (int i = 0; i < 10; ++i) stream.feed(detector);
    change(stream);
    for (int i = 0; i < windows; ++i) {
      const auto shift = stream.feed(detector);
      if (!shift) continue;
      ++found;
      named += shift->feature == feature ? 1 : 0;
      break;
    }
  }
  EXPECT_GE(found, 90) << feature;
  EXPECT_GE(named, found * 9 / 10) << feature;
}

TEST(ShiftDetector, a_doubled_rate_is_seen_within_two_windows) {
  expect_quick("arrival rate", 2, [](Stream& stream) { stream.rate *= 2; });
}
TEST(ShiftDetector, a_halved_rate_is_seen_within_three_windows) {
  expect_quick("arrival rate", 3, [](Stream& stream) { stream.rate /= 2; });
}
TEST(ShiftDetector, doubled_prompts_are_seen_within_two_windows) {
  expect_quick("prompt length", 2, [](Stream& stream) { stream.prompt *= 2; });
}
TEST(ShiftDetector, doubled_outputs_are_seen_within_two_windows) {
  expect_quick("output length", 2, [](Stream& stream) { stream.output *= 2; });
}
TEST(ShiftDetector, a_fall_of_attainment_is_seen_within_two_windows) {
  expect_quick("attainment", 2, [](Stream& stream) { stream.good = 0.4; });
}

TEST(ShiftDetector, after_an_alarm_the_new_load_is_the_normal_one) {
  int alarms = 0;
  for (std::uint64_t seed = 1; seed <= 20; ++seed) {
    ShiftDetector detector;
    Stream stream(seed);
    for (int i = 0; i < 10; ++i) stream.feed(detector);
    stream.rate *= 4;
    for (int i = 0; i < 2; ++i) stream.feed(detector);
    for (int i = 0; i < 30; ++i) alarms += stream.feed(detector) ? 1 : 0;
  }
  EXPECT_LE(alarms, 4);
}

TEST(ShiftDetector, attainment_under_a_trial_is_no_shift) {
  ShiftDetector detector;
  Window w;
  w.end = TimePoint(std::chrono::seconds(12));
  w.arrivals = w.judged = 48;
  w.arrival_interval_cv = 1;
  w.prompt_tokens_mean = 500;
  w.output_tokens_mean = 80;
  for (int i = 0; i < 8; ++i) {
    w.good = 46;
    EXPECT_FALSE(detector.observe(w, evidence_of(w, objectives), SameSettings::Yes));
  }
  w.good = 2;
  EXPECT_FALSE(detector.observe(w, evidence_of(w, objectives), SameSettings::No));
  EXPECT_FALSE(detector.observe(w, evidence_of(w, objectives), SameSettings::No));
}

TEST(ShiftDetector, an_alarm_says_what_moved_from_where_to_where) {
  ShiftDetector detector;
  Stream stream(3);
  for (int i = 0; i < 10; ++i) stream.feed(detector);
  stream.rate = 16;
  std::optional<Shift> shift = stream.feed(detector);
  if (!shift) shift = stream.feed(detector);
  ASSERT_TRUE(shift);
  EXPECT_NEAR(shift->before, 4, 1);
  EXPECT_NEAR(shift->after, 16, 4);
  EXPECT_EQ(shift->text().substr(0, 24), "arrival rate moved from ");
}

}  // namespace
}  // namespace rubato::tuner
