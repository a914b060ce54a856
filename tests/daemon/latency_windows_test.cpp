// SPDX-License-Identifier: Apache-2.0
// What a window holds: exact samples, unfinished requests as soon as they are late, nothing from before a change of settings.
#include "daemon/latency_windows.h"

#include <gtest/gtest.h>

namespace rubato {
namespace {

using namespace std::chrono_literals;

TimePoint at(Duration since_start) {
  return TimePoint(since_start);
}

Arrival arrival(std::uint64_t id, Duration time) {
  return Arrival{
      .id = {id}, .time = at(time), .prompt_tokens = 100, .max_new_tokens = 10, .ttft_target = 500ms, .itl_target = 50ms};
}

RequestRecord finished(std::uint64_t id, Duration arrived, Duration ttft, Duration itl_p99, Verdict verdict) {
  RequestRecord record;
  record.id = {id};
  record.arrival = at(arrived);
  record.first_token = at(arrived + ttft);
  record.end = at(arrived + ttft + 100ms);
  record.output_tokens = 20;
  record.itl_p99 = itl_p99;
  record.ttft_missed = ttft > 500ms;
  record.itl_missed = itl_p99 > 50ms;
  record.verdict = verdict;
  return record;
}

TEST(LatencyWindows, a_window_counts_verdicts_and_takes_exact_percentiles) {
  LatencyWindows windows;
  windows.open(at(0s), at(0s));
  for (int i = 1; i <= 100; ++i) {
    const auto id = static_cast<std::uint64_t>(i);
    windows.on_arrival(arrival(id, i * 10ms));
    windows.on_request_end(finished(id, i * 10ms, i * 1ms, 10ms, i <= 90 ? Verdict::Good : Verdict::Bad));
  }
  const tuner::Window window = windows.close(at(10s));
  EXPECT_EQ(window.judged, 100);
  EXPECT_EQ(window.good, 90);
  EXPECT_EQ(window.ttft_p50, 50ms);
  EXPECT_EQ(window.ttft_p99, 99ms);
  EXPECT_EQ(window.itl_p99, 10ms);
  EXPECT_DOUBLE_EQ(window.arrival_rate(), 10.0);
  EXPECT_DOUBLE_EQ(window.prompt_tokens_mean, 100.0);
  EXPECT_DOUBLE_EQ(window.output_tokens_mean, 20.0);
  EXPECT_NEAR(window.arrival_interval_cv, 0.0, 1e-6);
}

TEST(LatencyWindows, a_request_past_its_target_counts_before_it_ends_and_only_once) {
  LatencyWindows windows;
  windows.open(at(0s), at(0s));
  windows.on_arrival(arrival(1, 1s));
  windows.on_arrival(arrival(2, 9800ms));
  const tuner::Window first = windows.close(at(10s));
  EXPECT_EQ(first.judged, 1);
  EXPECT_EQ(first.good, 0);
  EXPECT_EQ(first.ttft_misses, 1);
  EXPECT_EQ(first.ttft_p99, 9s);
  EXPECT_EQ(first.oldest_wait, 9s);
  windows.on_request_end(finished(1, 1s, 10s, 10ms, Verdict::Bad));
  windows.on_request_end(finished(2, 9800ms, 300ms, 10ms, Verdict::Good));
  const tuner::Window second = windows.close(at(20s));
  EXPECT_EQ(second.judged, 1);
  EXPECT_EQ(second.good, 1);
}

TEST(LatencyWindows, long_answers_are_judged_by_what_they_got_so_far) {
  LatencyWindows windows;
  windows.open(at(0s), at(0s));
  for (std::uint64_t id = 1; id <= 20; ++id) {
    windows.on_arrival(arrival(id, 1s));
    windows.on_first_token(arrival(id, 1s), id <= 2 ? 700ms : 100ms);
    windows.on_token_gap({id}, id == 3 ? 80ms : 10ms);
  }
  const tuner::Window first = windows.close(at(10s));
  EXPECT_EQ(first.judged, 20);
  EXPECT_EQ(first.good, 17);
  EXPECT_EQ(first.ttft_misses, 2);
  EXPECT_EQ(first.itl_misses, 1);

  for (std::uint64_t id = 1; id <= 20; ++id) {
    windows.on_request_end(
        finished(id, 1s, id <= 2 ? 700ms : 100ms, id == 4 ? 90ms : 10ms, id <= 4 ? Verdict::Bad : Verdict::Good));
  }
  const tuner::Window second = windows.close(at(20s));
  EXPECT_EQ(second.judged, 17) << "the three misses have been counted";
  EXPECT_EQ(second.good, 16);
}

TEST(LatencyWindows, one_wide_gap_in_two_hundred_is_no_miss) {
  LatencyWindows windows;
  windows.open(at(0s), at(0s));
  windows.on_arrival(arrival(1, 1s));
  windows.on_first_token(arrival(1, 1s), 100ms);
  for (int i = 0; i < 200; ++i) windows.on_token_gap({1}, i == 50 ? 900ms : 10ms);
  EXPECT_EQ(windows.close(at(10s)).good, 1);
}

TEST(LatencyWindows, requests_from_before_a_change_of_settings_are_not_judged) {
  LatencyWindows windows;
  windows.on_arrival(arrival(1, 1s));
  windows.on_arrival(arrival(2, 1500ms));
  windows.open(at(3s), at(2s));
  windows.on_request_end(finished(1, 1s, 4s, 10ms, Verdict::Bad));
  windows.on_arrival(arrival(3, 4s));
  windows.on_request_end(finished(3, 4s, 100ms, 10ms, Verdict::Good));
  const tuner::Window window = windows.close(at(8s));
  EXPECT_EQ(window.judged, 1);
  EXPECT_EQ(window.good, 1);
}

TEST(LatencyWindows, refusals_count_as_misses_and_unjudged_aborts_do_not_count) {
  LatencyWindows windows;
  windows.open(at(0s), at(0s));
  windows.on_rejected(at(1s), 1);
  windows.on_arrival(arrival(1, 1s));
  windows.on_request_end(finished(1, 1s, 10ms, 10ms, Verdict::Unjudged));
  const tuner::Window window = windows.close(at(2s));
  EXPECT_EQ(window.rejected, 1);
  EXPECT_EQ(window.judged, 1);
  EXPECT_EQ(window.good, 0);
  EXPECT_EQ(window.arrivals, 2);
}

TEST(LatencyWindows, a_queue_cancelled_between_steps_is_no_longer_waiting) {
  LatencyWindows windows;
  for (std::uint64_t id = 1; id <= 3; ++id) windows.on_arrival(arrival(id, 1s));
  windows.on_step({}, {.waiting = 3});
  for (std::uint64_t id = 1; id <= 3; ++id) windows.on_request_end(finished(id, 1s, 10ms, 10ms, Verdict::Unjudged));
  windows.open(at(2s), at(2s));
  const tuner::Window window = windows.close(at(3s));
  EXPECT_EQ(window.waiting_begin, 0);
  EXPECT_EQ(window.waiting_end, 0);
}

TEST(LatencyWindows, an_empty_window_is_zero_and_finite) {
  LatencyWindows windows;
  windows.open(at(0s), at(0s));
  const tuner::Window window = windows.close(at(5s));
  EXPECT_EQ(window.judged, 0);
  EXPECT_EQ(window.attainment(), 0.0);
  EXPECT_EQ(window.arrival_rate(), 0.0);
  EXPECT_EQ(window.ttft_p99, 0ms);
}

TEST(LatencyWindows, looking_at_the_open_window_closes_nothing) {
  LatencyWindows windows;
  windows.open(at(0s), at(0s));
  windows.on_arrival(arrival(1, 1s));
  windows.on_arrival(arrival(2, 2s));
  windows.on_first_token(arrival(2, 2s), 100ms);
  for (int i = 0; i < 2; ++i) {
    const tuner::Window window = windows.so_far(at(10s));
    EXPECT_EQ(window.arrivals, 2);
    EXPECT_EQ(window.judged, 2);
    EXPECT_EQ(window.good, 1);
    EXPECT_EQ(window.ttft_p99, 9s);
    EXPECT_EQ(window.end, at(10s));
  }
  EXPECT_EQ(windows.judged_so_far(), 0);
  EXPECT_EQ(windows.close(at(10s)).judged, 2);
}

TEST(LatencyWindows, samples_are_bounded) {
  LatencyWindows windows(16);
  windows.open(at(0s), at(0s));
  for (std::uint64_t i = 1; i <= 1000; ++i) {
    windows.on_arrival(arrival(i, 1s));
    windows.on_request_end(finished(i, 1s, 20ms, 10ms, Verdict::Good));
  }
  const tuner::Window window = windows.close(at(2s));
  EXPECT_EQ(window.judged, 1000);
  EXPECT_EQ(window.ttft_p50, 20ms);
}

}  // namespace
}  // namespace rubato
