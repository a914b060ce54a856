// SPDX-License-Identifier: Apache-2.0
// Several lanes over fake backends: what goes from prefill to decode is the same stream, whatever fails on the way.
#include "engine/lanes.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/support/fake_backend.h"
#include "tests/support/lane_client.h"
#include "tests/support/lanes_property.h"

namespace rubato::engine {
namespace {

using test::ClientStream;
using test::fake_answer;
using test::FakeBackend;
using test::LaneClient;
using testing::HasSubstr;

constexpr LaneIndex first{0};
constexpr LaneIndex second{1};

std::vector<TokenId> prompt_of(std::int32_t length, TokenId salt = 3) {
  std::vector<TokenId> prompt(static_cast<std::size_t>(length));
  for (std::size_t i = 0; i < prompt.size(); ++i)
    prompt[i] = static_cast<TokenId>((i * 7 + static_cast<std::size_t>(salt) * 13 + 3) % 90);
  return prompt;
}

SamplingParameters greedy(std::int32_t tokens) {
  return {.temperature = 0, .max_new_tokens = tokens, .ignore_eos = true};
}

/// devices 1: a decode lane and a prefill lane on it. 2: the first prefills, the second decodes.
struct World {
  explicit World(std::int32_t devices,
                 KnobValues knobs = {.max_num_batched_tokens = 32,
                                     .max_num_seqs = 4,
                                     .priority_policy = PriorityPolicy::DecodeFirst,
                                     .mode = Mode::Disaggregated},
                 std::optional<std::uint64_t> prefill_fails_at_run = {})
      : backend({.block_count = 32, .fails_at_run = devices == 2 ? prefill_fails_at_run : std::nullopt}),
        other({.block_count = 32, .fails_at_run = {}}),
        sibling(FakeBackend::Options{.block_count = 32, .fails_at_run = prefill_fails_at_run}, backend.cells()),
        lanes({&backend, devices == 2 ? &other : &sibling}, {.limits = {.each = {.max_model_len = 256,
                                                                                 .max_num_seqs = 4,
                                                                                 .max_waiting = 32,
                                                                                 .block_count = 32,
                                                                                 .token_tile = 1,
                                                                                 .growth_reserve_tokens = 0},
                                                                        .devices = devices,
                                                                        .lanes_per_device = devices == 1 ? 2 : 1},
                                                             .initial = {.number = 1, .knobs = knobs}}),
        client(lanes),
        prefill(devices == 1 ? second : first),
        decode(devices == 1 ? first : second) {}
  ~World() {
    lanes.check_integrity();
    EXPECT_EQ(backend.poison_reads + other.poison_reads + sibling.poison_reads, 0);
  }

  bool step(LaneIndex lane) {
    if (!client.begin(lane)) return false;
    lanes.run_step(lane, client.now());
    client.end(lane);
    return true;
  }
  bool copy() {
    const std::optional<CopyJob> job = lanes.next_copy(client.now());
    if (!job) return false;
    lanes.copied(*job, job->run(), client.now());
    return true;
  }
  void drain() {
    for (int i = 0; i < 10000 && !lanes.group().idle(); ++i) {
      step(prefill);
      copy();
      step(decode);
    }
    EXPECT_TRUE(lanes.group().idle());
    const policies::SchedulerCounts totals = lanes.group().totals();
    EXPECT_EQ(totals.free_blocks, totals.block_count);
    EXPECT_TRUE(backend.all_dead());
    EXPECT_TRUE(other.all_dead());
  }
  [[nodiscard]] std::int32_t running(LaneIndex lane) const { return lanes.group().counts(lane).scheduler.running; }

  FakeBackend backend;
  FakeBackend other;
  FakeBackend sibling;
  Lanes lanes;
  LaneClient client;
  LaneIndex prefill;
  LaneIndex decode;
};

TEST(Lanes, the_prefill_lane_emits_the_first_token_and_the_decode_lane_all_others) {
  World world(1);
  const SequenceId id = world.client.must_add(prompt_of(50), greedy(5));
  EXPECT_FALSE(world.step(world.decode)) << "nothing to decode yet";
  EXPECT_TRUE(world.step(world.prefill));
  EXPECT_TRUE(world.client.stream(id).tokens.empty());
  EXPECT_TRUE(world.step(world.prefill));
  EXPECT_EQ(world.client.stream(id).tokens.size(), 1U);
  EXPECT_EQ(world.running(world.decode), 1);
  EXPECT_FALSE(world.step(world.prefill));
  for (std::size_t tokens = 2; tokens <= 5; ++tokens) {
    EXPECT_TRUE(world.step(world.decode));
    EXPECT_EQ(world.client.stream(id).tokens.size(), tokens);
  }
  EXPECT_EQ(world.client.stream(id).tokens, fake_answer(prompt_of(50), greedy(5)).tokens);
  EXPECT_EQ(world.lanes.group().handoffs().moved, 1U);
  EXPECT_EQ(world.lanes.group().handoffs().blocks, 0U) << "one pool: nothing is copied";
  world.drain();
}

TEST(Lanes, a_step_is_recorded_with_the_share_of_its_device_that_it_had_for_most_of_its_time) {
  World world(1, {.max_num_batched_tokens = 32, .max_num_seqs = 4, .mode = Mode::Disaggregated, .prefill_share = 30});
  const auto begin = [&](LaneIndex lane) { ASSERT_TRUE(world.client.begin(lane)); };
  const auto end = [&](LaneIndex lane) {
    world.lanes.run_step(lane, world.client.now());
    world.client.end(lane);
    return world.lanes.record(lane).share_percent;
  };
  const auto pass = [&](int milliseconds) { world.client.advance(std::chrono::milliseconds(milliseconds)); };
  world.client.must_add(prompt_of(20), greedy(20));
  begin(world.prefill);
  pass(10);
  EXPECT_EQ(end(world.prefill), 100) << "the other lane had nothing to do";

  world.client.must_add(prompt_of(20), greedy(20));
  begin(world.prefill);
  pass(10);
  begin(world.decode);
  pass(6);
  EXPECT_EQ(end(world.prefill), 100) << "for the smaller part of its time it had less";
  pass(3);
  EXPECT_EQ(end(world.decode), 70) << "for the larger part";

  world.client.must_add(prompt_of(20), greedy(20));
  begin(world.prefill);
  for (int i = 0; i < 3; ++i) {  // several of the other lane's, and the last goes on
    begin(world.decode);
    pass(4);
    if (i < 2) {
      EXPECT_EQ(end(world.decode), 70);
    }
    pass(1);
  }
  EXPECT_EQ(end(world.prefill), 30);
  pass(20);
  EXPECT_EQ(end(world.decode), 100);
  world.drain();
}

// Elsewhere the first token came twice, or its log-probabilities not at all, and one-token requests occupied a decode slot.
TEST(Lanes, answers_are_the_same_in_both_modes_down_to_log_probabilities) {
  SamplingParameters with_logprobs = greedy(6);
  with_logprobs.top_logprobs = 5;
  SamplingParameters stopping = greedy(6);
  stopping.stop_token_ids = {fake_answer(prompt_of(40), greedy(1)).tokens[0]};  // the very first token
  SamplingParameters sampled{.temperature = 0.9, .max_new_tokens = 6};
  sampled.seed = 7;
  const std::vector<SamplingParameters> all{greedy(1), greedy(2), with_logprobs, stopping, sampled};
  std::vector<std::vector<ClientStream>> by_mode;
  for (const auto& [devices, mode] :
       {std::pair(1, Mode::Chunked), std::pair(1, Mode::Disaggregated), std::pair(2, Mode::Disaggregated)}) {
    World world(devices, {.max_num_batched_tokens = 32, .max_num_seqs = 4, .mode = mode});
    std::vector<SequenceId> ids;
    for (const SamplingParameters& sampling : all) ids.push_back(world.client.must_add(prompt_of(40), sampling));
    world.drain();
    auto& streams = by_mode.emplace_back();
    for (const SequenceId id : ids) streams.push_back(world.client.stream(id));
  }
  for (std::size_t mode = 1; mode < by_mode.size(); ++mode) {
    for (std::size_t i = 0; i < all.size(); ++i) {
      EXPECT_EQ(by_mode[mode][i].tokens, by_mode[0][i].tokens) << mode << " " << i;
      EXPECT_EQ(by_mode[mode][i].finish, by_mode[0][i].finish) << mode << " " << i;
      for (std::size_t token = 0; token < by_mode[0][i].samples.size(); ++token) {
        EXPECT_EQ(by_mode[mode][i].samples[token].logprob, by_mode[0][i].samples[token].logprob);
        EXPECT_EQ(by_mode[mode][i].samples[token].top.size(), by_mode[0][i].samples[token].top.size());
      }
    }
  }
}

TEST(Lanes, a_request_for_one_token_never_sees_the_decode_lane) {
  for (const std::int32_t devices : {1, 2}) {
    World world(devices);
    const SequenceId id = world.client.must_add(prompt_of(50), greedy(1));
    while (world.step(world.prefill)) {
    }
    EXPECT_EQ(world.client.stream(id).finish, FinishReason::Length);
    EXPECT_EQ(world.lanes.group().handoffs().moved + world.lanes.group().handoffs().copied, 0U);
    EXPECT_FALSE(world.copy());
    world.drain();
  }
}

TEST(Lanes, blocks_travel_while_the_last_chunk_runs_and_the_first_token_does_not_wait_for_them) {
  World world(2);
  const SequenceId id = world.client.must_add(prompt_of(90), greedy(8));
  EXPECT_TRUE(world.step(world.prefill));  // 32
  EXPECT_TRUE(world.step(world.prefill));  // 64, then 26 are left: the slot is reserved
  ASSERT_TRUE(world.client.begin(world.prefill));
  const std::optional<CopyJob> early = world.lanes.next_copy(world.client.now());
  ASSERT_TRUE(early) << "while the last chunk runs";
  EXPECT_EQ(early->blocks.size(), 4U);
  world.lanes.run_step(world.prefill, world.client.now());
  world.client.end(world.prefill);
  EXPECT_EQ(world.client.stream(id).tokens.size(), 1U) << "before any copy was answered";
  world.lanes.copied(*early, early->run(), world.client.now());
  const std::optional<CopyJob> rest = world.lanes.next_copy(world.client.now());
  ASSERT_TRUE(rest);
  EXPECT_EQ(rest->blocks.size(), 2U) << "only what the last chunk wrote";
  world.lanes.copied(*rest, rest->run(), world.client.now());
  EXPECT_EQ(world.running(world.decode), 1);
  EXPECT_EQ(world.running(world.prefill), 0);
  world.drain();
  EXPECT_EQ(world.client.stream(id).tokens, fake_answer(prompt_of(90), greedy(8)).tokens);
  EXPECT_EQ(world.lanes.group().handoffs().copied, 1U);
  EXPECT_EQ(world.lanes.group().handoffs().blocks, 6U);
}

TEST(Lanes, after_a_copy_that_failed_the_stream_goes_on_and_is_tried_again) {
  World world(2);
  const SequenceId id = world.client.must_add(prompt_of(90), greedy(60));
  for (int i = 0; i < 3; ++i) EXPECT_TRUE(world.step(world.prefill));
  const std::optional<CopyJob> job = world.lanes.next_copy(world.client.now());
  ASSERT_TRUE(job);
  world.lanes.copied(*job, unexpected(ErrorCode::DeviceLost, "link down"), world.client.now());
  const std::size_t tokens = world.client.stream(id).tokens.size();
  EXPECT_TRUE(world.step(world.prefill)) << "it decodes where it is";
  EXPECT_EQ(world.client.stream(id).tokens.size(), tokens + 1);
  EXPECT_FALSE(world.copy()) << "not at once";
  world.client.advance(std::chrono::seconds(2));
  EXPECT_TRUE(world.step(world.prefill));
  EXPECT_TRUE(world.copy());
  world.drain();
  EXPECT_EQ(world.client.stream(id).tokens, fake_answer(prompt_of(90), greedy(60)).tokens);
  EXPECT_EQ(world.lanes.group().handoffs().failed, 1U);
  EXPECT_EQ(world.lanes.group().handoffs().copied, 1U);
}

// Elsewhere decode slots and destination blocks leaked when the client left, or the answer was lost, in the middle of a transfer.
TEST(Lanes, a_client_that_leaves_during_a_transfer_frees_both_sides_however_the_answer_comes) {
  enum class Answer { Comes, Fails, Late, Never };
  for (const Answer answer : {Answer::Comes, Answer::Fails, Answer::Late, Answer::Never}) {
    World world(2);
    for (int round = 0; round < 200; ++round) {
      const SequenceId id = world.client.must_add(prompt_of(60, round % 7), greedy(20));
      EXPECT_TRUE(world.step(world.prefill));
      // While the last chunk runs, or after it.
      const bool in_step = round % 2 == 0;
      ASSERT_TRUE(world.client.begin(world.prefill));
      if (!in_step) {
        world.lanes.run_step(world.prefill, world.client.now());
        world.client.end(world.prefill);
      }
      std::optional<CopyJob> job = world.lanes.next_copy(world.client.now());
      ASSERT_TRUE(job) << round;
      EXPECT_TRUE(world.client.cancel(id));
      EXPECT_FALSE(job->wanted->load()) << "the copier is told to stop";
      if (in_step) {
        world.lanes.run_step(world.prefill, world.client.now());
        world.client.end(world.prefill);
      }
      if (answer == Answer::Comes) world.lanes.copied(*job, job->run(), world.client.now());
      if (answer == Answer::Fails) world.lanes.copied(*job, unexpected(ErrorCode::DeviceLost, "gone"), world.client.now());
      for (int i = 0; i < 3; ++i) {
        world.client.advance(std::chrono::seconds(11));
        world.lanes.expire(world.client.now());
      }
      if (answer == Answer::Late) world.lanes.copied(*job, {}, world.client.now());
      const policies::SchedulerCounts totals = world.lanes.group().totals();
      ASSERT_EQ(totals.free_blocks, totals.block_count) << round;
      ASSERT_EQ(world.lanes.group().copies_open(), 0) << round;
      world.lanes.check_integrity();
    }
    const policies::HandoffCounts& counts = world.lanes.group().handoffs();
    EXPECT_EQ(counts.expired, answer == Answer::Late || answer == Answer::Never ? 200U : 0U);
    EXPECT_EQ(counts.late_answers, answer == Answer::Late ? 200U : 0U);
    EXPECT_EQ(counts.copied, 0U);
    // The pool is whole: as many run as ever.
    std::vector<SequenceId> ids;
    for (TokenId salt = 0; salt < 4; ++salt) ids.push_back(world.client.must_add(prompt_of(60, salt), greedy(20)));
    world.drain();
    for (const SequenceId id : ids) EXPECT_EQ(world.client.stream(id).finish, FinishReason::Length);
  }
}

// Elsewhere the timer of a transfer began at arrival, so that requests that merely queued were failed in waves.
TEST(Lanes, nobody_is_failed_for_being_queued) {
  World world(2, {.max_num_batched_tokens = 64, .max_num_seqs = 4, .mode = Mode::Disaggregated});
  std::vector<SequenceId> ids;
  for (TokenId salt = 0; salt < 32; ++salt) ids.push_back(world.client.must_add(prompt_of(30, salt), greedy(40)));
  for (int i = 0; i < 6000 && !world.lanes.group().idle(); ++i) {
    world.step(world.prefill);
    world.copy();
    world.step(world.decode);
    world.client.advance(std::chrono::seconds(1));  // forty tokens take far longer than a lease
    world.lanes.expire(world.client.now());
  }
  for (const SequenceId id : ids) EXPECT_EQ(world.client.stream(id).finish, FinishReason::Length);
  EXPECT_EQ(world.lanes.group().handoffs().expired, 0U);
  EXPECT_EQ(world.lanes.group().handoffs().failed, 0U);
}

TEST(Lanes, a_lane_that_breaks_ends_every_request_of_every_lane_with_an_error_once) {
  for (const std::int32_t devices : {1, 2}) {
    World world(devices, {.max_num_batched_tokens = 32, .max_num_seqs = 4, .mode = Mode::Disaggregated}, 4);
    std::vector<SequenceId> ids;
    ids.push_back(world.client.must_add(prompt_of(20), greedy(100)));
    EXPECT_TRUE(world.step(world.prefill));
    while (world.copy()) {
    }
    EXPECT_TRUE(world.step(world.decode));
    for (TokenId salt = 0; salt < 3; ++salt) ids.push_back(world.client.must_add(prompt_of(90, salt), greedy(10)));
    EXPECT_TRUE(world.step(world.prefill));
    EXPECT_TRUE(world.step(world.prefill));
    ASSERT_TRUE(world.client.begin(world.decode)) << "a step that is open when the other lane breaks";
    world.lanes.run_step(world.decode, world.client.now());
    EXPECT_TRUE(world.step(world.prefill)) << "the one that breaks";
    world.client.end(world.decode);
    for (const SequenceId id : ids) {
      EXPECT_EQ(world.client.stream(id).finish, FinishReason::Failed) << id.value;
      EXPECT_THAT(world.client.stream(id).error.message, HasSubstr("the fake device broke"));
    }
    ASSERT_TRUE(world.lanes.failure());
    EXPECT_FALSE(world.client.begin(world.decode));
    EXPECT_FALSE(world.client.begin(world.prefill));
    EXPECT_FALSE(world.client.add(prompt_of(3), greedy(1)));
  }
}

TEST(Lanes, a_decode_device_without_room_costs_time_and_nothing_else) {
  World world(2, {.max_num_batched_tokens = 64, .max_num_seqs = 4, .mode = Mode::Disaggregated});
  // Three that fill the decode device's pool, then one that fits nowhere there until they have ended.
  std::vector<SequenceId> ids;
  for (TokenId salt = 0; salt < 4; ++salt) ids.push_back(world.client.must_add(prompt_of(130, salt), greedy(100)));
  world.drain();
  for (std::size_t i = 0; i < ids.size(); ++i) {
    EXPECT_EQ(world.client.stream(ids[i]).tokens, fake_answer(prompt_of(130, static_cast<TokenId>(i)), greedy(100)).tokens);
  }
}

TEST(LanesProperty, streams_equal_the_model_whatever_happens_between_lanes) {
  std::uint64_t copied = 0;
  std::uint64_t moved = 0;
  std::int64_t copied_states = 0;
  std::uint64_t hits = 0;
  std::uint64_t evicted_blocks = 0;
  std::uint64_t evicted_snapshots = 0;
  for (std::uint32_t seed = 1; seed <= 60 && !testing::Test::HasFailure(); ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    test::LanesProperty property(seed);
    property.run(1500);
    copied += property.handoffs().copied;
    moved += property.handoffs().moved;
    copied_states += property.copied_states();
    hits += property.totals().prefix_hits;
    evicted_blocks += property.totals().evicted_blocks;
    evicted_snapshots += property.totals().evicted_snapshots;
  }
  EXPECT_GT(copied_states, 100);
  EXPECT_GT(hits, 1000U);
  EXPECT_GT(evicted_blocks, 1000U);
  EXPECT_GT(evicted_snapshots, 100U);
  EXPECT_GT(copied, 100U);
  EXPECT_GT(moved, 100U);
}

}  // namespace
}  // namespace rubato::engine
