// SPDX-License-Identifier: Apache-2.0
// One seeded life of a lane over the fake backend: random requests, cancels and settings, a pool small enough to preempt. Every
// stream must equal what the model says of its prompt alone. The same property runs shortly among the fast tests and for long
// among the slow.
#pragma once

#include <gtest/gtest.h>

#include <map>
#include <random>
#include <string>
#include <vector>

#include "engine/lane.h"
#include "tests/support/fake_backend.h"
#include "tests/support/lane_client.h"

namespace rubato::test {

class LaneProperty {
 public:
  explicit LaneProperty(std::uint32_t seed)
      : random_(seed),
        backend_({.block_count = block_count, .fails_at_run = {}}),
        lane_(backend_, options(seed)),
        client_(lane_) {}

  void run(int step_count) {
    int steps = 0;
    for (int turn = 0; steps < step_count && turn < 4 * step_count; ++turn) {
      if (chance(20)) arrive();
      if (chance(3)) cancel();
      if (chance(2)) change_settings();
      const std::int32_t budget = lane_.group().settings().knobs.max_num_batched_tokens;
      if (client_.step()) {
        ++steps;
        EXPECT_LE(backend_.tokens_in_run, budget);
        EXPECT_EQ(lane_.record().settings_number, lane_.group().settings().number);
        EXPECT_EQ(lane_.record().features.tokens, backend_.tokens_in_run);
      }
      if (steps % 64 == 0) lane_.check_integrity();
      if (testing::Test::HasFailure()) return;
    }
    client_.drain();
    finish();
  }

 private:
  static constexpr std::int32_t block_count = 30;
  static constexpr std::int32_t length_max = 256;

  static engine::LaneOptions options(std::uint32_t seed) {
    return {
        .limits = {.max_model_len = length_max,
                   .max_num_seqs = 16,
                   .max_waiting = 32,
                   .block_count = block_count,
                   .token_tile = seed % 2 == 0 ? 1 : 16,
                   .growth_reserve_tokens = static_cast<std::int32_t>(seed % 3) * 8},
        .initial = {.number = 1,
                    .knobs = {.max_num_batched_tokens = 64, .max_num_seqs = 16, .priority_policy = PriorityPolicy::DecodeFirst}}};
  }

  bool chance(int percent) { return static_cast<int>(random_() % 100) < percent; }
  std::int32_t between(std::int32_t low, std::int32_t high) {
    return low + static_cast<std::int32_t>(random_() % static_cast<std::uint32_t>(high - low + 1));
  }

  engine::SamplingParameters random_sampling(std::int32_t new_tokens) {
    engine::SamplingParameters sampling;
    sampling.temperature = chance(30) ? 0 : 0.5 + 0.01 * between(0, 100);
    sampling.seed = random_();
    sampling.max_new_tokens = new_tokens;
    if (chance(20)) sampling.top_p = 0.9;
    if (chance(20)) sampling.top_k = between(1, 50);
    if (chance(30)) sampling.frequency_penalty = 0.4;
    if (chance(20)) sampling.presence_penalty = 0.7;
    if (chance(20)) sampling.repetition_penalty = 1.2;
    if (chance(20)) sampling.min_new_tokens = between(1, new_tokens);
    if (chance(20)) sampling.ignore_eos = true;
    if (chance(20)) sampling.stop_token_ids = {between(0, 94)};
    if (chance(20)) sampling.top_logprobs = between(0, 5);
    return sampling;
  }

  void arrive() {
    const std::int32_t prompt_tokens = chance(20) ? between(60, 160) : between(1, 40);
    std::vector<TokenId> prompt(static_cast<std::size_t>(prompt_tokens));
    for (TokenId& token : prompt) token = between(0, 94);
    if (chance(5)) prompt[0] = fake_bad_token;
    engine::SamplingParameters sampling = random_sampling(between(1, chance(10) ? length_max - prompt_tokens : 60));
    auto added = client_.add(prompt, sampling);
    if (!added) {
      EXPECT_EQ(added.error().code, ErrorCode::ResourceExhausted) << added.error().message;
      return;
    }
    requests_.emplace(added.value(), std::pair(std::move(prompt), std::move(sampling)));
  }

  void cancel() {
    if (requests_.empty()) return;
    const std::uint64_t newest = requests_.rbegin()->first.value;
    const std::uint64_t back = random_() % 40;
    client_.cancel(SequenceId{back < newest ? newest - back : newest + 1000});
  }

  void change_settings() {
    const PriorityPolicy policies[] = {PriorityPolicy::Deadline, PriorityPolicy::DecodeFirst, PriorityPolicy::PrefillFirst,
                                       PriorityPolicy::ShortestFirst};
    const std::int32_t seqs = between(1, 16);
    lane_.apply({.number = ++settings_number_,
                 .knobs = {.max_num_batched_tokens = seqs + min_prefill_quantum + between(0, 200),
                           .max_num_seqs = seqs,
                           .priority_policy = policies[random_() % 4]}});
  }

  void finish() {
    lane_.check_integrity();
    EXPECT_EQ(backend_.poison_reads, 0);
    EXPECT_TRUE(backend_.all_dead());
    EXPECT_TRUE(lane_.group().idle());
    EXPECT_EQ(lane_.counts().free_blocks, block_count);
    EXPECT_GT(lane_.counts().preemptions, 0U) << "the pool was never short: the property tests less than it should";
    for (const auto& [id, request] : requests_) check(id, request.first, request.second);
  }

  void check(SequenceId id, const std::vector<TokenId>& prompt, const engine::SamplingParameters& sampling) {
    const ClientStream& stream = client_.stream(id);
    const FakeAnswer answer = fake_answer(prompt, sampling);
    if (stream.cancelled) {
      EXPECT_FALSE(stream.finish.has_value());
      ASSERT_LE(stream.tokens.size(), answer.tokens.size()) << "id " << id.value;
      EXPECT_TRUE(std::equal(stream.tokens.begin(), stream.tokens.end(), answer.tokens.begin())) << "id " << id.value;
      return;
    }
    EXPECT_EQ(stream.tokens, answer.tokens) << "id " << id.value;
    const auto finish = answer.failed    ? engine::FinishReason::Failed
                        : answer.stopped ? engine::FinishReason::Stop
                                         : engine::FinishReason::Length;
    EXPECT_EQ(stream.finish, finish) << "id " << id.value;
    for (std::size_t i = 0; i < std::min(answer.logprobs.size(), stream.samples.size()); ++i) {
      EXPECT_EQ(stream.samples[i].logprob, answer.logprobs[i]) << "id " << id.value << " token " << i;
    }
  }

  std::mt19937 random_;
  FakeBackend backend_;
  engine::Lane lane_;
  LaneClient client_;
  std::map<SequenceId, std::pair<std::vector<TokenId>, engine::SamplingParameters>> requests_;
  std::uint64_t settings_number_ = 1;
};

}  // namespace rubato::test
