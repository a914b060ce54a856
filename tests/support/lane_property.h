// SPDX-License-Identifier: Apache-2.0
// One seeded life of a lane over the fake backend: random requests, cancels and settings, a pool small enough to preempt, with a
// prefix cache or without, for models with attention, recurrent layers or both. Every stream must equal what the model says of
// its prompt alone. The same property runs shortly among the fast tests and for long among the slow.
#pragma once

#include <gtest/gtest.h>

#include <string>
#include <utility>
#include <vector>

#include "engine/lane.h"
#include "tests/support/fake_backend.h"
#include "tests/support/lane_client.h"
#include "tests/support/random_clients.h"

namespace rubato::test {

class LaneProperty : RandomClients {
 public:
  explicit LaneProperty(std::uint32_t seed)
      : RandomClients(seed),
        layers_(static_cast<FakeLayers>(seed % 5 % 3)),
        caching_(seed % 5 < 3),
        backend_({.block_count = block_count, .state_count = state_count(seed), .layers = layers_}),
        lane_(backend_, options(seed)),
        client_(lane_) {}

  void run(int step_count) {
    int steps = 0;
    for (int turn = 0; steps < step_count && turn < 4 * step_count; ++turn) {
      if (chance(20)) arrive();
      if (chance(3)) cancel_one(client_, 40);
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

  [[nodiscard]] std::int32_t state_count(std::uint32_t seed) const {
    return layers_ == FakeLayers::Attention ? 0 : seed % 2 == 0 ? 1 + static_cast<std::int32_t>(seed % 7) : 24;
  }

  [[nodiscard]] engine::LaneOptions options(std::uint32_t seed) const {
    return {
        .limits = {.max_model_len = length_max,
                   .max_num_seqs = 16,
                   .max_waiting = 32,
                   .block_count = block_count,
                   .state_count = state_count(seed),
                   .blocks_hold_keys = layers_ != FakeLayers::Recurrent,
                   .prefix_caching = {.enabled = caching_, .snapshot_tokens = 16 << seed % 3},
                   .token_tile = seed % 2 == 0 ? 1 : 16,
                   .growth_reserve_tokens = static_cast<std::int32_t>(seed % 3) * 8},
        .initial = {.number = 1,
                    .knobs = {.max_num_batched_tokens = 64, .max_num_seqs = 16, .priority_policy = PriorityPolicy::DecodeFirst}}};
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
    std::vector<TokenId> prompt = caching_ ? prompt_with_shared_start() : random_prompt();
    if (chance(5)) prompt[0] = fake_bad_token;
    const auto longest = length_max - static_cast<std::int32_t>(prompt.size());
    engine::SamplingParameters sampling = random_sampling(between(1, chance(10) ? longest : 60));
    add(client_, std::move(prompt), std::move(sampling));
  }

  void change_settings() {
    const std::int32_t seqs = between(1, 16);
    lane_.apply({.number = ++settings_number_,
                 .knobs = {.max_num_batched_tokens = seqs + min_prefill_quantum + between(0, 200),
                           .max_num_seqs = seqs,
                           .priority_policy = random_policy()}});
  }

  void finish() {
    lane_.check_integrity();
    EXPECT_EQ(backend_.poison_reads, 0);
    const std::int32_t kept = layers_ == FakeLayers::Recurrent ? 0 : lane_.counts().cached_blocks;
    EXPECT_EQ(backend_.live_blocks(), kept) << "what is cached lives, all else is dead";
    EXPECT_EQ(backend_.live_states(), lane_.counts().states_snapshot);
    EXPECT_EQ(lane_.counts().states_running, 0);
    if (!caching_) {
      EXPECT_EQ(lane_.counts().prefix_hits, 0U);
    }
    EXPECT_TRUE(lane_.group().idle());
    EXPECT_EQ(lane_.counts().free_blocks, block_count);
    if (layers_ == FakeLayers::Attention) {  // few states may keep the pool from ever being short
      EXPECT_GT(lane_.counts().preemptions, 0U) << "the pool was never short: the property tests less than it should";
    }
    check_streams(client_);
  }

  const FakeLayers layers_;
  const bool caching_;
  FakeBackend backend_;
  engine::Lane lane_;
  LaneClient client_;
  std::uint64_t settings_number_ = 1;
};

}  // namespace rubato::test
