// SPDX-License-Identifier: Apache-2.0
// What a window measures, and that looking at it changes nothing.
#include "tuner/window_cut.h"

#include <gtest/gtest.h>

#include <vector>

namespace rubato::tuner {
namespace {

using namespace std::chrono_literals;

TimePoint at(Duration since_start) {
  return TimePoint(since_start);
}

RequestSoFar arrival(Duration time) {
  return {.arrival = at(time), .ttft_target = 500ms, .itl_target = 50ms};
}

EndedRequest good_end(Duration arrived, Duration ttft) {
  return {.arrival = at(arrived), .ttft = ttft, .itl_p99 = 10ms, .output_tokens = 20, .good = true};
}

void expect_same(const Window& left, const Window& right) {
  EXPECT_EQ(left.begin, right.begin);
  EXPECT_EQ(left.end, right.end);
  EXPECT_EQ(left.settings_number, right.settings_number);
  EXPECT_EQ(left.arrivals, right.arrivals);
  EXPECT_EQ(left.judged, right.judged);
  EXPECT_EQ(left.good, right.good);
  EXPECT_EQ(left.rejected, right.rejected);
  EXPECT_EQ(left.ttft_misses, right.ttft_misses);
  EXPECT_EQ(left.itl_misses, right.itl_misses);
  EXPECT_EQ(left.ttft_p50, right.ttft_p50);
  EXPECT_EQ(left.ttft_p99, right.ttft_p99);
  EXPECT_EQ(left.itl_p50, right.itl_p50);
  EXPECT_EQ(left.itl_p99, right.itl_p99);
  EXPECT_EQ(left.prompt_tokens_mean, right.prompt_tokens_mean);
  EXPECT_EQ(left.output_tokens_mean, right.output_tokens_mean);
  EXPECT_EQ(left.arrival_interval_cv, right.arrival_interval_cv);
  EXPECT_EQ(left.oldest_wait, right.oldest_wait);
  EXPECT_EQ(left.waiting_begin, right.waiting_begin);
  EXPECT_EQ(left.waiting_end, right.waiting_end);
}

TEST(WindowCut, looking_at_the_open_window_shows_what_closing_it_would_and_changes_nothing) {
  WindowCut cut;
  cut.settings(7);
  cut.waiting(3);
  cut.open(at(0s), at(0s));
  const WindowCut::Place late = cut.arrived(arrival(1s), 100);
  const WindowCut::Place wide = cut.arrived(arrival(2s), 200);
  const WindowCut::Place ended = cut.arrived(arrival(4s), 300);
  cut.at(wide).first_token(100ms);
  cut.at(wide).gap(80ms);
  cut.ended(ended, good_end(4s, 300ms));
  cut.rejected(2);
  cut.waiting(1);

  const Window first = measure(cut.so_far(at(5s)));
  EXPECT_EQ(first.arrivals, 5);
  EXPECT_EQ(first.judged, 5);
  EXPECT_EQ(first.good, 1);
  EXPECT_EQ(first.ttft_misses, 3) << "the late one and the rejected ones";
  EXPECT_EQ(first.itl_misses, 1);
  EXPECT_EQ(first.ttft_p99, 4s) << "its age";
  EXPECT_EQ(first.oldest_wait, 4s);
  EXPECT_EQ(first.settings_number, 7U);
  EXPECT_EQ(first.waiting_begin, 3);
  EXPECT_EQ(first.waiting_end, 1);
  EXPECT_EQ(cut.judged_so_far(), 3) << "of those, the unfinished are only looked at";

  expect_same(first, measure(cut.so_far(at(5s))));
  expect_same(first, measure(cut.close(at(5s))));
  cut.ended(late, {.arrival = at(1s), .ttft = 6s, .itl_p99 = 10ms, .output_tokens = 20, .ttft_missed = true});
  EXPECT_EQ(measure(cut.close(at(8s))).judged, 0) << "close() has counted both";
}

TEST(WindowCut, a_record_stays_where_it_is_while_others_come_and_go) {
  WindowCut cut;
  cut.open(at(0s), at(0s));
  std::vector<WindowCut::Place> places;
  for (int i = 0; i < 10; ++i) places.push_back(cut.arrived(arrival(i * 1ms), 100));
  for (int i = 0; i < 10; ++i) cut.at(places[static_cast<std::size_t>(i)]).first_token(i * 1ms);
  for (const std::size_t i : {0U, 9U, 4U, 5U}) {
    cut.at(places[i]).first_token(2s);  // a miss, were it still there
    cut.left(places[i]);
  }
  const WindowCut::Place reused = cut.arrived(arrival(10ms), 100);
  EXPECT_FALSE(cut.at(reused).ttft.has_value());
  EXPECT_EQ(cut.in_flight(), 7U);
  for (const int i : {1, 2, 3, 6, 7, 8}) {
    EXPECT_EQ(cut.at(places[static_cast<std::size_t>(i)]).arrival, at(i * 1ms));
    EXPECT_EQ(cut.at(places[static_cast<std::size_t>(i)]).ttft, i * 1ms);
  }
  const Window window = measure(cut.close(at(100ms)));
  EXPECT_EQ(window.judged, 6);
  EXPECT_EQ(window.good, 6);
}

TEST(WindowCut, a_miss_is_counted_in_one_window_and_a_good_request_at_its_end_again) {
  WindowCut cut;
  cut.open(at(0s), at(0s));
  const WindowCut::Place late = cut.arrived(arrival(1s), 100);
  const WindowCut::Place good = cut.arrived(arrival(1s), 100);
  cut.at(good).first_token(100ms);
  EXPECT_EQ(measure(cut.close(at(2s))).judged, 2);
  const Window second = measure(cut.close(at(3s)));
  EXPECT_EQ(second.judged, 1);
  EXPECT_EQ(second.good, 1);
  cut.ended(late, {.arrival = at(1s), .ttft = 3s, .itl_p99 = 10ms, .output_tokens = 20, .ttft_missed = true});
  cut.ended(good, {.arrival = at(1s), .ttft = 100ms, .itl_p99 = 70ms, .output_tokens = 20, .itl_missed = true});
  const Window third = measure(cut.close(at(5s)));
  EXPECT_EQ(third.judged, 1);
  EXPECT_EQ(third.itl_misses, 1);
  EXPECT_EQ(third.ttft_misses, 0);
}

TEST(WindowCut, only_requests_since_a_change_of_settings_are_judged) {
  WindowCut cut;
  const WindowCut::Place before = cut.arrived(arrival(1s), 100);
  const WindowCut::Place stuck = cut.arrived(arrival(1500ms), 100);
  cut.settings(2);
  EXPECT_TRUE(cut.settings_changed());
  cut.open(at(3s), at(2s));
  EXPECT_FALSE(cut.settings_changed());
  cut.ended(before, {.arrival = at(1s), .ttft = 3s, .output_tokens = 1, .ttft_missed = true});
  cut.ended(cut.arrived(arrival(4s), 100), good_end(4s, 10ms));
  const Window window = measure(cut.close(at(8s)));
  EXPECT_EQ(window.judged, 1);
  EXPECT_EQ(window.good, 1);
  EXPECT_EQ(window.oldest_wait, 6500ms) << "who waits, waits, whenever they came";
  EXPECT_EQ(window.ttft_p99, 10ms);
  cut.left(stuck);
}

TEST(WindowCut, one_wide_gap_in_a_hundred_is_no_miss_and_two_are) {
  RequestSoFar request = arrival(0s);
  for (int i = 0; i < 99; ++i) request.gap(10ms);
  request.gap(60ms);
  EXPECT_FALSE(request.itl_missed());
  request.gap(60ms);
  EXPECT_TRUE(request.itl_missed());
}

TEST(WindowCut, samples_are_bounded_and_a_look_draws_nothing_from_what_replaces_them) {
  WindowCut looked(16);
  WindowCut other(16);
  for (WindowCut* cut : {&looked, &other}) {
    cut->open(at(0s), at(0s));
    for (int i = 0; i < 1000; ++i) {
      static_cast<void>(cut->arrived(arrival(1s), 100));  // late when looked at, not when closed
      cut->ended(cut->arrived(arrival(1s), 100), good_end(1s, i * 1ms));
      if (cut == &looked && i % 100 == 99) static_cast<void>(cut->so_far(at(2s)));
    }
  }
  const WindowSamples samples = looked.close(at(1400ms));
  EXPECT_EQ(samples.ttft.size(), 16U);
  EXPECT_EQ(samples.itl.size(), 16U);
  EXPECT_EQ(samples.arrivals.size(), 16U);
  EXPECT_EQ(samples.window.judged, 1000);
  EXPECT_EQ(samples.ttft, other.close(at(1400ms)).ttft);
}

TEST(WindowCut, the_queue_never_holds_more_than_are_in_flight) {
  WindowCut cut;
  const WindowCut::Place first = cut.arrived(arrival(1s), 100);
  const WindowCut::Place second = cut.arrived(arrival(1s), 100);
  cut.waiting(2);
  cut.left(first);
  cut.left(second);
  cut.open(at(2s), at(2s));
  EXPECT_EQ(measure(cut.close(at(3s))).waiting_begin, 0);
}

TEST(WindowCut, an_end_without_an_arrival_is_judged_too) {
  WindowCut cut;
  cut.open(at(0s), at(0s));
  cut.ended(std::nullopt, {.arrival = at(1s), .ttft = 1s, .ttft_missed = true});
  EXPECT_EQ(measure(cut.close(at(3s))).ttft_misses, 1);
}

}  // namespace
}  // namespace rubato::tuner
