// SPDX-License-Identifier: Apache-2.0
// What is kept of recent traffic, what is guessed of requests that have not ended, and the futures made of it.
#include "tuner/twin/traffic.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <set>
#include <string>
#include <vector>

#include "tuner/twin/counter_draw.h"

namespace rubato::tuner {
namespace {

using namespace std::chrono_literals;

TimePoint at(Duration since_start) {
  return TimePoint(since_start);
}

TrafficRequest arrival(Duration time, std::int32_t prompt = 100, std::int32_t max_new_tokens = 1000) {
  return {.arrival = at(time), .prompt_tokens = prompt, .max_new_tokens = max_new_tokens, .ttft_target = 1s, .itl_target = 50ms};
}

TEST(TrafficLog, tells_what_came_in_order_of_arrival) {
  TrafficLog log;
  log.arrived({1}, arrival(2s));
  log.arrived({2}, arrival(1s));
  log.arrived({3}, arrival(3s));
  log.arrived({4}, arrival(4s));
  for (std::uint64_t id = 1; id <= 4; ++id) log.ended({id}, static_cast<std::int32_t>(10 * id));
  const std::vector<TrafficRequest> found = log.between(at(1s), at(4s));
  ASSERT_EQ(found.size(), 3U) << "from 1 s, before 4 s";
  EXPECT_EQ(found[0].output_tokens, 20);
  EXPECT_EQ(found[1].output_tokens, 10);
  EXPECT_EQ(found[2].output_tokens, 30);
  EXPECT_TRUE(found[0].ended);
  EXPECT_EQ(found[0].ttft_target, 1s);
  EXPECT_EQ(found[0].itl_target, 50ms);
  EXPECT_EQ(found[0].max_new_tokens, 1000);
}

TEST(TrafficLog, prompts_count_without_what_the_prefix_cache_had) {
  TrafficLog log;
  log.arrived({1}, arrival(1s, 100));
  log.started({1}, 64);
  log.started({1}, 64);
  log.started({2}, 64);
  log.arrived({3}, arrival(1s, 100));
  log.started({3}, 100);
  const std::vector<TrafficRequest> found = log.between(at(0s), at(2s));
  ASSERT_EQ(found.size(), 2U);
  EXPECT_EQ(found[0].prompt_tokens, 36) << "once";
  EXPECT_EQ(found[1].prompt_tokens, 1) << "a token is left to sample from";
}

TEST(TrafficLog, forgets_the_oldest_and_is_told_of_their_end_in_vain) {
  TrafficLog log(10);
  for (std::uint64_t id = 1; id <= 1000; ++id) log.arrived({id}, arrival(static_cast<std::int64_t>(id) * 1ms));
  EXPECT_EQ(log.size(), 10U);
  log.ended({5}, 7);
  log.started({5}, 7);
  log.ended({991}, 7);
  log.ended({991}, 9);
  const std::vector<TrafficRequest> found = log.between(at(0s), at(10s));
  ASSERT_EQ(found.size(), 10U);
  EXPECT_EQ(found[0].arrival, at(991ms));
  EXPECT_EQ(found[0].output_tokens, 7);
  EXPECT_EQ(found[9].output_tokens, 7) << "the one that is known";
  EXPECT_FALSE(found[9].ended);
}

// Outputs of 10 to 400 tokens, a token every 10 ms: in the last seconds long ones still run. Whoever counted only what has ended
// would take outputs for shorter than they are.
TEST(TrafficLog, what_still_runs_is_not_taken_for_short) {
  TrafficLog log;
  double truth = 0;
  double ended = 0;
  std::int32_t ended_count = 0;
  constexpr int count = 400;
  const TimePoint now = at(4s);
  struct End {
    TimePoint time;
    std::uint64_t id;
    std::int32_t tokens;
  };
  std::vector<End> ends;
  for (int i = 0; i < count; ++i) {
    const auto id = static_cast<std::uint64_t>(i + 1);
    const std::int32_t tokens = 10 + static_cast<std::int32_t>(390 * counter_draw(1, 1, id));
    log.arrived({id}, arrival(i * 10ms));
    log.started({id}, 0);
    truth += tokens;
    ends.push_back({at(i * 10ms) + tokens * 10ms, id, tokens});
  }
  for (const End& end : ends) {
    if (end.time > now) continue;
    log.ended({end.id}, end.tokens);
    ended += end.tokens;
    ++ended_count;
  }
  double guessed = 0;
  const std::vector<TrafficRequest> found = log.between(at(0s), now);
  for (const TrafficRequest& request : found) guessed += request.output_tokens;
  truth /= count;
  EXPECT_LT(ended / ended_count, 0.75 * truth) << "the trap is there";
  EXPECT_NEAR(guessed / count, truth, 0.1 * truth);
  EXPECT_EQ(found, log.between(at(0s), now)) << "the same log, the same guesses";
}

TEST(TrafficLog, a_guess_is_longer_than_what_came_later_had_and_within_what_was_allowed) {
  TrafficLog log;
  for (std::uint64_t id = 1; id <= 50; ++id) {
    log.arrived({id}, arrival(static_cast<std::int64_t>(id) * 1ms));
    log.ended({id}, id % 2 == 0 ? 300 : 20);
  }
  log.arrived({60}, arrival(60ms));
  log.started({60}, 0);
  log.arrived({61}, arrival(61ms, 100, 120));
  log.started({61}, 0);
  log.arrived({62}, arrival(62ms));
  log.ended({62}, 100);
  log.arrived({63}, arrival(63ms));  // waits: may be of any length
  const std::vector<TrafficRequest> found = log.between(at(60ms), at(1s));
  ASSERT_EQ(found.size(), 4U);
  EXPECT_EQ(found[0].output_tokens, 300) << "it has got at least 100";
  EXPECT_EQ(found[1].output_tokens, 120);
  std::set<std::int32_t> waiting;
  for (std::uint64_t id = 100; id < 200; ++id) {
    TrafficLog copy = log;
    copy.arrived({id}, arrival(64ms));
    waiting.insert(copy.between(at(64ms), at(1s)).at(0).output_tokens);
  }
  EXPECT_TRUE(waiting.contains(20) && waiting.contains(300)) << "as those that ended";
}

TEST(TrafficLog, without_any_that_ended_a_guess_is_what_routing_foresees) {
  TrafficLog log;
  log.arrived({1}, arrival(1s));
  log.arrived({2}, arrival(2s, 100, 30));
  const std::vector<TrafficRequest> found = log.between(at(0s), at(3s));
  EXPECT_EQ(found.at(0).output_tokens, 128);
  EXPECT_EQ(found.at(1).output_tokens, 30);
}

/// A request every gap; each one's prompt is its number, so that a future tells where it comes from.
TrafficPhase steady(std::int32_t first, Duration begin, Duration end, Duration gap, double weight) {
  TrafficPhase phase{.requests = {}, .begin = at(begin), .end = at(end), .weight = weight};
  for (Duration time = begin; time < end; time += gap) phase.requests.push_back(arrival(time, first++));
  return phase;
}

TEST(Futures, the_same_arguments_give_the_same_futures_and_another_seed_others) {
  const std::vector<TrafficPhase> phases = {steady(1, 100s, 160s, 70ms, 1), steady(10'000, 200s, 230s, 110ms, 2)};
  FutureOptions options;
  const auto futures = bootstrap_futures(phases, options);
  ASSERT_EQ(futures.size(), 3U);
  EXPECT_EQ(futures, bootstrap_futures(phases, options));
  EXPECT_NE(futures[0], futures[1]);
  options.seed = 2;
  EXPECT_NE(futures, bootstrap_futures(phases, options));
}

TEST(Futures, arrivals_are_in_order_within_the_length_and_as_dense_as_they_were) {
  for (std::uint64_t seed = 1; seed <= 20; ++seed) {
    const std::vector<TrafficPhase> phases = {steady(1, 100s, 160s, 50ms, 1)};
    for (const auto& future : bootstrap_futures(phases, {.length = 61s, .block = 2s, .count = 2, .seed = seed})) {
      EXPECT_NEAR(static_cast<double>(future.size()), 61 * 20.0, 31.0) << "seed " << seed << ": at most one off per block";
      EXPECT_TRUE(
          std::is_sorted(future.begin(), future.end(),
                         [](const TrafficRequest& left, const TrafficRequest& right) { return left.arrival < right.arrival; }))
          << "seed " << seed;
      EXPECT_GE(future.front().arrival, TimePoint{}) << "seed " << seed;
      EXPECT_LT(future.back().arrival, at(61s)) << "seed " << seed;
    }
  }
}

TEST(Futures, a_block_keeps_what_came_together) {
  // Bursts of 20 in 100 ms, every 10 s; blocks of 5 s.
  TrafficPhase phase{.requests = {}, .begin = at(0s), .end = at(100s), .weight = 1};
  for (int burst = 0; burst < 10; ++burst) {
    for (int i = 0; i < 20; ++i) phase.requests.push_back(arrival(burst * 10s + 3s + i * 5ms, 1 + 20 * burst + i));
  }
  const std::vector<TrafficPhase> phases = {phase};
  std::int32_t together = 0;
  std::int32_t pairs = 0;
  for (const auto& future : bootstrap_futures(phases, {.length = 200s, .block = 5s, .count = 3, .seed = 5})) {
    for (std::size_t i = 1; i < future.size(); ++i) {
      if (future[i].prompt_tokens != future[i - 1].prompt_tokens + 1 || future[i].prompt_tokens % 20 == 1) continue;
      ++pairs;
      together += future[i].arrival - future[i - 1].arrival == 5ms ? 1 : 0;
    }
  }
  EXPECT_GT(pairs, 500);
  EXPECT_EQ(together, pairs);
}

TEST(Futures, every_part_of_a_phase_is_drawn_equally_often) {
  // Its last and its first second hold as many as any other.
  const std::vector<TrafficPhase> phases = {steady(0, 0s, 20s, 10ms, 1)};
  std::vector<std::int32_t> seconds(20);
  for (std::uint64_t seed = 1; seed <= 40; ++seed) {
    for (const auto& future : bootstrap_futures(phases, {.length = 60s, .block = 4s, .count = 3, .seed = seed})) {
      for (const TrafficRequest& one : future) ++seconds[static_cast<std::size_t>(one.prompt_tokens / 100)];
    }
  }
  const double expected = 40 * 3 * 60 * 100 / 20.0;
  for (std::size_t i = 0; i < seconds.size(); ++i) EXPECT_NEAR(seconds[i], expected, 0.15 * expected) << "second " << i;
}

TEST(Futures, phases_follow_one_another_in_runs_as_long_as_their_weights) {
  const std::vector<TrafficPhase> phases = {steady(0, 0s, 30s, 100ms, 3), steady(10'000, 50s, 60s, 100ms, 1)};
  double second = 0;
  double all = 0;
  for (std::uint64_t seed = 1; seed <= 10; ++seed) {
    for (const auto& future : bootstrap_futures(phases, {.length = 60s, .block = 2s, .count = 4, .seed = seed})) {
      std::int32_t changes = 0;
      for (std::size_t i = 0; i < future.size(); ++i) {
        const bool is_second = future[i].prompt_tokens >= 10'000;
        second += is_second ? 1 : 0;
        if (i > 0) changes += is_second != (future[i - 1].prompt_tokens >= 10'000) ? 1 : 0;
      }
      EXPECT_GE(changes, 1) << "seed " << seed;
      EXPECT_LE(changes, 2) << "seed " << seed;
      all += static_cast<double>(future.size());
    }
  }
  EXPECT_NEAR(second / all, 0.25, 0.02);
}

TEST(Futures, where_the_phases_begin_is_spread_over_the_futures) {
  const std::vector<TrafficPhase> phases = {steady(0, 0s, 30s, 100ms, 1), steady(10'000, 50s, 60s, 100ms, 1)};
  for (std::uint64_t seed = 1; seed <= 10; ++seed) {
    const auto futures = bootstrap_futures(phases, {.length = 60s, .block = 2s, .count = 4, .seed = seed});
    const auto second =
        std::count_if(futures.begin(), futures.end(), [](const auto& future) { return future.at(0).prompt_tokens >= 10'000; });
    EXPECT_EQ(second, 2) << "seed " << seed;
  }
}

TEST(Futures, silence_is_a_phase_and_nothing_at_all_is_no_future) {
  const TrafficPhase silence{.requests = {}, .begin = at(0s), .end = at(10s), .weight = 1};
  EXPECT_TRUE(bootstrap_futures(std::vector<TrafficPhase>{silence}, {}).empty());
  EXPECT_TRUE(bootstrap_futures({}, {}).empty());
  const std::vector<TrafficPhase> phases = {silence, steady(1, 20s, 30s, 100ms, 1)};
  const auto futures = bootstrap_futures(phases, {.length = 60s, .block = 2s, .count = 2, .seed = 1});
  for (const auto& future : futures) EXPECT_NEAR(static_cast<double>(future.size()), 300.0, 25.0);
}

TEST(Futures, a_phase_shorter_than_a_block_is_repeated) {
  const std::vector<TrafficPhase> phases = {steady(1, 5s, 6s, 100ms, 1)};
  const auto futures = bootstrap_futures(phases, {.length = 30s, .block = 2s, .count = 1, .seed = 1});
  EXPECT_EQ(futures.at(0).size(), 300U);
}

}  // namespace
}  // namespace rubato::tuner
