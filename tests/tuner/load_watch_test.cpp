// SPDX-License-Identifier: Apache-2.0
#include "tuner/load_watch.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

#include "tests/tuner/load_stream.h"

namespace rubato::tuner {
namespace {

struct Found {
  double median = 0;  // seconds from the change to the alarm
  int named = 0;      // with the right feature
  int dated = 0;      // within three seconds of the change
};

constexpr int seeds = 25;

Found found(const char* feature, Arrivals arrivals, void (*change)(LoadStream&)) {
  Found result;
  std::vector<double> delays;
  for (std::uint64_t seed = 1; seed <= seeds; ++seed) {
    LoadWatch watch({});
    LoadStream stream(seed, arrivals);
    while (stream.run(watch, 300)) {
    }
    change(stream);
    const auto alarm = stream.run(watch, 600);
    delays.push_back(alarm ? stream.seconds - 300 : 300);
    if (!alarm) continue;
    result.named += alarm->shift.feature == feature ? 1 : 0;
    result.dated += std::abs(to_seconds(alarm->since - LoadStream::at(300))) <= 3 ? 1 : 0;
    EXPECT_GE(alarm->probability, 0.5);
    EXPECT_EQ(watch.phase_begin(), alarm->since);
  }
  std::nth_element(delays.begin(), delays.begin() + seeds / 2, delays.end());
  result.median = delays[seeds / 2];
  return result;
}

TEST(LoadWatch, a_doubled_rate_is_found_named_and_dated) {
  const Found doubled = found("arrival rate", Arrivals::Poisson, [](LoadStream& stream) { stream.rate = 8; });
  EXPECT_LE(doubled.median, 12);
  EXPECT_GE(doubled.named, seeds - 2);
  EXPECT_GE(doubled.dated, seeds * 2 / 3);
}

TEST(LoadWatch, the_busier_the_engine_the_sooner) {
  const Found tenfold = found("arrival rate", Arrivals::Poisson, [](LoadStream& stream) { stream.rate = 40; });
  EXPECT_LE(tenfold.median, 4);
  EXPECT_GE(tenfold.named, seeds - 1);
}

TEST(LoadWatch, tripled_prompts_are_found_named_and_dated) {
  const Found tripled = found("prompt length", Arrivals::Poisson, [](LoadStream& stream) { stream.prompt *= 3; });
  EXPECT_LE(tripled.median, 6);
  EXPECT_GE(tripled.named, seeds - 2);
  EXPECT_GE(tripled.dated, seeds * 4 / 5);
}

TEST(LoadWatch, longer_answers_are_found_and_named) {
  const Found longer = found("output length", Arrivals::Poisson, [](LoadStream& stream) { stream.output *= 3; });
  EXPECT_LE(longer.median, 8);
  EXPECT_GE(longer.named, seeds - 2);
}

TEST(LoadWatch, silence_is_one_alarm_and_so_is_its_end) {
  for (std::uint64_t seed = 1; seed <= seeds; ++seed) {
    LoadWatch watch({});
    LoadStream stream(seed, Arrivals::Poisson);
    while (stream.run(watch, 600)) {
    }
    stream.rate = 0;
    const auto silent = stream.run(watch, 3600 * 8);
    ASSERT_TRUE(silent) << seed;
    EXPECT_EQ(silent->shift.feature, "arrival rate");
    EXPECT_LE(stream.seconds, 620);
    EXPECT_FALSE(stream.run(watch, 3600 * 8)) << seed;
    stream.rate = 4;
    const auto awake = stream.run(watch, 3600 * 8 + 60);
    ASSERT_TRUE(awake) << seed;
    EXPECT_LE(stream.seconds, 3600 * 8 + 15);
  }
}

TEST(LoadWatch, an_alarm_says_from_where_to_where_and_since_when) {
  LoadWatch watch({});
  LoadStream stream(3, Arrivals::Poisson);
  EXPECT_FALSE(stream.run(watch, 600));
  stream.rate = 16;
  const auto alarm = stream.run(watch, 660);
  ASSERT_TRUE(alarm);
  EXPECT_NEAR(alarm->shift.before, 4, 0.6);
  EXPECT_NEAR(alarm->shift.after, 16, 6);
  EXPECT_NEAR(to_seconds(alarm->since - TimePoint{}), 600, 3);
  EXPECT_NEAR(alarm->requests, alarm->shift.after * (stream.seconds - to_seconds(alarm->since - TimePoint{})), 20);
  EXPECT_EQ(alarm->shift.text().substr(0, 24), "arrival rate moved from ");
}

TEST(LoadWatch, phases_have_a_length_from_the_second_alarm_on) {
  LoadWatch watch({});
  LoadStream stream(5, Arrivals::Poisson);
  EXPECT_FALSE(stream.run(watch, 300));
  EXPECT_NEAR(to_seconds(watch.phase_begin() - TimePoint{}), 0, 2);
  for (int phase = 1; phase <= 4; ++phase) {
    EXPECT_EQ(watch.phase_length().has_value(), phase > 2);
    stream.rate = phase % 2 == 1 ? 30 : 4;
    EXPECT_TRUE(stream.run(watch, 300 + phase * 200)) << phase;
    EXPECT_FALSE(stream.run(watch, 300 + phase * 200)) << phase;
  }
  ASSERT_TRUE(watch.phase_length());
  EXPECT_NEAR(to_seconds(*watch.phase_length()), 200, 10);
}

TEST(LoadWatch, before_anything_arrives_there_is_nothing_to_say) {
  LoadWatch watch({});
  EXPECT_FALSE(watch.tick(LoadStream::at(1e6)));
  watch.ended(LoadStream::at(1e6), 5);
  EXPECT_FALSE(watch.phase_length());
}

TEST(LoadWatch, a_steady_load_raises_hardly_an_alarm) {
  int alarms = 0;
  for (std::uint64_t seed = 1; seed <= 2; ++seed) alarms += false_alarms(seed, Arrivals::Poisson, 4, 12 * 3600);
  EXPECT_LE(alarms, 3);
}

}  // namespace
}  // namespace rubato::tuner
