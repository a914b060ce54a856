// SPDX-License-Identifier: Apache-2.0
// The feed keeps order, is bounded, drops the oldest and says so, and loses nothing between writers and the one who drains.
#include "daemon/twin_feed.h"

#include <gtest/gtest.h>

#include <thread>

namespace rubato {
namespace {

using namespace std::chrono_literals;

Arrival arrival(std::uint64_t id) {
  return {.id = SequenceId{id}, .time = TimePoint(std::chrono::milliseconds(id)), .prompt_tokens = 100};
}

RequestRecord ended(std::uint64_t id, std::int32_t output_tokens) {
  RequestRecord record;
  record.id = SequenceId{id};
  record.end = TimePoint(std::chrono::milliseconds(1000 + id));
  record.output_tokens = output_tokens;
  return record;
}

engine::StepRecord step(std::int32_t tokens) {
  engine::StepRecord record;
  record.lane = LaneIndex{1};
  record.features = {.tokens = tokens, .decode_rows = 1};
  record.bucket = 64;
  record.share_percent = 40;
  record.begin = TimePoint(1s);
  record.end = TimePoint(1s + 20ms);
  record.predicted = 20ms;
  return record;
}

TEST(TwinFeed, what_happened_is_handed_over_once_in_order_with_all_that_the_twin_asks_for) {
  TwinFeed feed(8, 8);
  Arrival first = arrival(1);
  feed.on_arrival(first);
  feed.on_arrival(arrival(2));
  first.cached_tokens = 48;
  feed.on_first_token(first, 10ms);
  feed.on_step(step(3), {});
  feed.on_step(step(5), {});
  feed.on_request_end(ended(1, 7));
  FeedBatch batch;
  feed.drain(batch);
  ASSERT_EQ(batch.arrivals.size(), 2U);
  EXPECT_EQ(batch.arrivals[0].id, SequenceId{1});
  EXPECT_EQ(batch.arrivals[1].id, SequenceId{2});
  EXPECT_EQ(batch.starts, (std::vector<FeedStart>{{.id = SequenceId{1}, .cached_tokens = 48}}));
  EXPECT_EQ(batch.ends, (std::vector<FeedEnd>{{.id = SequenceId{1}, .time = TimePoint(1001ms), .output_tokens = 7}}));
  ASSERT_EQ(batch.steps.size(), 2U);
  EXPECT_EQ(batch.steps[0].features.tokens, 3);
  EXPECT_EQ(batch.steps[1].features.tokens, 5);
  EXPECT_EQ(batch.steps[1].lane, 1);
  EXPECT_EQ(batch.steps[1].bucket, 64);
  EXPECT_EQ(batch.steps[1].share_percent, 40);
  EXPECT_EQ(batch.steps[1].duration, 20ms);
  feed.drain(batch);
  EXPECT_TRUE(batch.arrivals.empty() && batch.starts.empty() && batch.ends.empty() && batch.steps.empty());
}

TEST(TwinFeed, nobody_draining_costs_the_oldest_and_is_counted) {
  TwinFeed feed(4, 3);
  for (std::uint64_t id = 1; id <= 9; ++id) feed.on_arrival(arrival(id));
  for (std::int32_t tokens = 1; tokens <= 5; ++tokens) feed.on_step(step(tokens), {});
  EXPECT_EQ(feed.dropped(), 5U + 2U);
  FeedBatch batch;
  feed.drain(batch);
  ASSERT_EQ(batch.arrivals.size(), 4U);
  for (std::size_t i = 0; i < 4; ++i) EXPECT_EQ(batch.arrivals[i].id.value, 6 + i);
  ASSERT_EQ(batch.steps.size(), 3U);
  for (std::int32_t i = 0; i < 3; ++i) EXPECT_EQ(batch.steps[static_cast<std::size_t>(i)].features.tokens, 3 + i);

  // A drained ring begins anew, wherever its oldest place was.
  feed.on_arrival(arrival(10));
  feed.on_arrival(arrival(11));
  feed.drain(batch);
  ASSERT_EQ(batch.arrivals.size(), 2U);
  EXPECT_EQ(batch.arrivals[0].id.value, 10U);
  EXPECT_EQ(feed.dropped(), 7U);
}

TEST(TwinFeed, draining_while_a_lane_writes_loses_and_repeats_nothing) {
  TwinFeed feed(1 << 16, 16);
  constexpr std::uint64_t count = 20000;
  std::jthread lane([&] {
    for (std::uint64_t id = 1; id <= count; ++id) feed.on_arrival(arrival(id));
  });
  FeedBatch batch;
  std::uint64_t seen = 0;
  while (seen < count) {
    feed.drain(batch);
    for (const Arrival& one : batch.arrivals) ASSERT_EQ(one.id.value, ++seen);
  }
  EXPECT_EQ(feed.dropped(), 0U);
}

}  // namespace
}  // namespace rubato
