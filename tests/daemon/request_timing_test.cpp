// SPDX-License-Identifier: Apache-2.0
// When a request is good: both targets, its own p99 gap, and what an unfinished one tells.
#include "daemon/request_timing.h"

#include <gtest/gtest.h>

namespace rubato {
namespace {

using namespace std::chrono_literals;

TimePoint at(Duration since_start) {
  return TimePoint(since_start);
}

RequestTiming request() {
  return RequestTiming(Arrival{.id = {7}, .time = at(1s), .prompt_tokens = 10, .max_new_tokens = 400, .ttft_target = 500ms, .itl_target = 50ms});
}

TEST(RequestTiming, first_token_gives_no_gap_and_later_ones_give_one_each) {
  RequestTiming timing = request();
  EXPECT_FALSE(timing.on_token(at(1200ms)).has_value());
  EXPECT_EQ(timing.on_token(at(1210ms)), 10ms);
  EXPECT_EQ(timing.on_token(at(1260ms)), 50ms);
  const RequestRecord record = timing.finish(Outcome::Length, at(1260ms));
  EXPECT_EQ(record.output_tokens, 3);
  EXPECT_EQ(record.itl_mean, 30ms);
  EXPECT_EQ(record.itl_p99, 50ms);
  EXPECT_EQ(record.verdict, Verdict::Good);
}

TEST(RequestTiming, both_targets_count_and_their_edges_are_met) {
  RequestTiming on_the_edge = request();
  on_the_edge.on_token(at(1500ms));
  on_the_edge.on_token(at(1550ms));
  EXPECT_EQ(on_the_edge.finish(Outcome::Stop, at(1550ms)).verdict, Verdict::Good);

  RequestTiming late_first = request();
  late_first.on_token(at(1501ms));
  const RequestRecord late = late_first.finish(Outcome::Stop, at(1501ms));
  EXPECT_TRUE(late.ttft_missed);
  EXPECT_FALSE(late.itl_missed);
  EXPECT_EQ(late.verdict, Verdict::Bad);

  RequestTiming gap = request();
  gap.on_token(at(1100ms));
  gap.on_token(at(1151ms));
  const RequestRecord wide = gap.finish(Outcome::Stop, at(1151ms));
  EXPECT_TRUE(wide.itl_missed);
  EXPECT_EQ(wide.verdict, Verdict::Bad);
}

TEST(RequestTiming, one_gap_in_two_hundred_may_be_wide) {
  RequestTiming timing = request();
  TimePoint now = at(1100ms);
  timing.on_token(now);
  for (int i = 0; i < 200; ++i) timing.on_token(now += i == 77 ? Duration(900ms) : Duration(10ms));
  const RequestRecord record = timing.finish(Outcome::Length, now);
  EXPECT_EQ(record.itl_p99, 10ms);
  EXPECT_EQ(record.verdict, Verdict::Good);
}

TEST(RequestTiming, one_token_has_no_gap_to_judge) {
  RequestTiming timing = request();
  timing.on_token(at(1100ms));
  const RequestRecord record = timing.finish(Outcome::Length, at(1100ms));
  EXPECT_EQ(record.itl_p99, 0ms);
  EXPECT_EQ(record.verdict, Verdict::Good);
}

TEST(RequestTiming, an_abort_is_bad_only_if_a_target_was_already_missed) {
  EXPECT_EQ(request().finish(Outcome::Aborted, at(1400ms)).verdict, Verdict::Unjudged);
  EXPECT_EQ(request().finish(Outcome::Aborted, at(1600ms)).verdict, Verdict::Bad);

  RequestTiming stuck = request();
  stuck.on_token(at(1100ms));
  EXPECT_EQ(stuck.finish(Outcome::Aborted, at(2100ms)).verdict, Verdict::Bad);
}

TEST(RequestTiming, a_failure_is_bad_and_the_first_schedule_counts) {
  RequestTiming timing = request();
  timing.on_scheduled(at(1050ms), 7);
  timing.on_scheduled(at(1900ms), 0);
  EXPECT_EQ(timing.arrival().cached_tokens, 7);
  const RequestRecord record = timing.finish(Outcome::Failed, at(1060ms));
  EXPECT_EQ(record.verdict, Verdict::Bad);
  EXPECT_EQ(record.scheduled, at(1050ms));
}

}  // namespace
}  // namespace rubato
