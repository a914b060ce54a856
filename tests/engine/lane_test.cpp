// SPDX-License-Identifier: Apache-2.0
// The lane over a fake backend: admission, ends, cancels at every stage, preemption, device failure.
#include "engine/lane.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <numeric>

#include "tests/support/fake_backend.h"
#include "tests/support/lane_client.h"
#include "tests/support/lane_property.h"

namespace rubato::engine {
namespace {

using test::ClientStream;
using test::fake_answer;
using test::FakeAnswer;
using test::FakeBackend;
using test::LaneClient;
using testing::HasSubstr;

std::vector<TokenId> prompt_of(std::int32_t length, TokenId salt = 3) {
  std::vector<TokenId> prompt(static_cast<std::size_t>(length));
  for (std::size_t i = 0; i < prompt.size(); ++i)
    prompt[i] = static_cast<TokenId>((i * 7 + static_cast<std::size_t>(salt) * 13 + 3) % 90);
  return prompt;
}

/// A prompt whose greedy answer runs at least length tokens before an end token.
std::vector<TokenId> long_lived_prompt(std::int32_t prompt_length, std::size_t length) {
  for (TokenId salt = 0;; ++salt) {
    auto prompt = prompt_of(prompt_length, salt);
    if (fake_answer(prompt, {.temperature = 0, .max_new_tokens = static_cast<std::int32_t>(length) + 1}).tokens.size() > length)
      return prompt;
  }
}

struct World {
  explicit World(std::int32_t block_count = 64, KnobValues knobs = {.max_num_batched_tokens = 64, .max_num_seqs = 8},
                 std::optional<std::uint64_t> fails_at_run = {})
      : backend({.block_count = block_count, .fails_at_run = fails_at_run}),
        lane(backend, {.limits = {.max_model_len = 512,
                                  .max_num_seqs = 32,
                                  .max_waiting = 16,
                                  .block_count = block_count,
                                  .token_tile = 1,
                                  .growth_reserve_tokens = 0},
                       .initial = {.number = 1, .knobs = knobs}}),
        client(lane) {}
  ~World() {
    lane.check_integrity();
    EXPECT_EQ(backend.poison_reads, 0);
  }

  void expect_at_rest() {
    EXPECT_FALSE(client.step());
    EXPECT_TRUE(lane.group().idle());
    EXPECT_EQ(lane.counts().free_blocks, lane.counts().block_count);
    EXPECT_TRUE(backend.all_dead());
  }

  FakeBackend backend;
  Lane lane;
  LaneClient client;
};

std::string refusal(World& world, std::vector<TokenId> prompt, SamplingParameters sampling) {
  const auto added = world.client.add(std::move(prompt), std::move(sampling));
  if (added) return "accepted";
  EXPECT_EQ(added.error().code, ErrorCode::InvalidArgument);
  return added.error().field + ": " + added.error().message;
}

TEST(LaneAdmission, refuses_what_can_never_run_and_names_the_field) {
  World world;
  EXPECT_THAT(refusal(world, {}, {}), HasSubstr("prompt: the prompt holds no token"));
  EXPECT_THAT(refusal(world, {1, -1}, {}), HasSubstr("prompt: token id -1 is outside the vocabulary; allowed: 0..95"));
  EXPECT_THAT(refusal(world, {96}, {}), HasSubstr("prompt: token id 96"));
  EXPECT_THAT(refusal(world, {1}, {.logit_bias = {{96, 1.0F}}}), HasSubstr("logit_bias: token id 96"));
  EXPECT_THAT(refusal(world, {1}, {.max_new_tokens = 0}), HasSubstr("max_tokens: 0 is below 1"));
  SamplingParameters large;
  large.logit_bias.assign(logit_biases_max + 1, {1, 0.5F});
  EXPECT_THAT(refusal(world, {1}, large), HasSubstr("logit_bias: 1025 are given; allowed: up to 1024"));
  large.logit_bias.clear();
  large.stop_token_ids.assign(stop_tokens_max + 1, 5);
  EXPECT_THAT(refusal(world, {1}, large), HasSubstr("stop_token_ids: 1025 are given"));
  EXPECT_THAT(refusal(world, {1}, {.top_logprobs = 21}), HasSubstr("top_logprobs: 21 is above 20"));
  EXPECT_EQ(refusal(world, {1}, {}), "accepted");
  world.client.drain();
}

TEST(LaneAdmission, the_length_limit_is_exact) {
  for (const std::int32_t length : {509, 510, 511, 512, 513, 514}) {
    for (const std::int32_t wanted : {1, 2, 3, 512}) {
      World world;
      const auto added = world.client.add(prompt_of(length), {.temperature = 0, .max_new_tokens = wanted, .ignore_eos = true});
      EXPECT_EQ(added.has_value(), length + wanted <= 512) << length << " + " << wanted;
      if (!added) {
        EXPECT_EQ(added.error().field, length >= 512 ? "prompt" : "max_tokens");
        EXPECT_THAT(added.error().message, HasSubstr("512"));
        continue;
      }
      world.client.drain();
      EXPECT_EQ(world.client.stream(added.value()).tokens.size(), static_cast<std::size_t>(wanted));
      EXPECT_EQ(world.client.stream(added.value()).finish, FinishReason::Length);
    }
  }
}

TEST(LaneAdmission, a_prompt_larger_than_the_pool_is_refused_with_the_effective_limit_and_blocks_nobody) {
  World world(16);  // 256 tokens, although max_model_len says 512
  const std::int32_t limit = world.lane.group().effective_max_len();
  EXPECT_LE(limit, 256);
  EXPECT_THAT(refusal(world, prompt_of(300), {.max_new_tokens = 1}), HasSubstr(std::to_string(limit)));
  EXPECT_THAT(refusal(world, prompt_of(200), {.max_new_tokens = 150}), HasSubstr("max_tokens: 150 new tokens"));
  const SequenceId next = world.client.must_add(prompt_of(20), {.temperature = 0, .max_new_tokens = 4, .ignore_eos = true});
  const SequenceId longest =
      world.client.must_add(prompt_of(limit - 40), {.temperature = 0, .max_new_tokens = 40, .ignore_eos = true});
  world.client.drain();
  EXPECT_EQ(world.client.stream(next).tokens.size(), 4U);
  EXPECT_EQ(world.client.stream(longest).tokens.size(), 40U);
  world.expect_at_rest();
}

TEST(LaneAdmission, a_full_queue_is_resource_exhausted) {
  World world;
  std::optional<Error> error;
  for (int i = 0; i < 100 && !error; ++i) {
    const auto added = world.client.add(prompt_of(5), {.temperature = 0, .max_new_tokens = 2});
    if (!added) error = added.error();
  }
  ASSERT_TRUE(error.has_value());
  EXPECT_EQ(error->code, ErrorCode::ResourceExhausted);
  world.client.drain();
  world.expect_at_rest();
}

TEST(LaneEnds, end_tokens_stop_ids_length_and_ignore_eos) {
  const std::vector<TokenId> prompt = [] {  // its greedy answer ends by itself, not at once
    for (TokenId salt = 0;; ++salt) {
      auto candidate = prompt_of(9, salt);
      const FakeAnswer answer = fake_answer(candidate, {.temperature = 0, .max_new_tokens = 400});
      if (answer.stopped && answer.tokens.size() > 8) return candidate;
    }
  }();
  const FakeAnswer whole = fake_answer(prompt, {.temperature = 0, .max_new_tokens = 400});
  const auto length = static_cast<std::int32_t>(whole.tokens.size());
  World world;
  const SequenceId natural = world.client.must_add(prompt, {.temperature = 0, .max_new_tokens = 400});
  const SequenceId exact = world.client.must_add(prompt, {.temperature = 0, .max_new_tokens = length});
  const SequenceId cut = world.client.must_add(prompt, {.temperature = 0, .max_new_tokens = length - 1});
  const SequenceId ignoring = world.client.must_add(prompt, {.temperature = 0, .max_new_tokens = length + 5, .ignore_eos = true});
  const SequenceId stopped =
      world.client.must_add(prompt, {.temperature = 0, .max_new_tokens = 400, .stop_token_ids = {whole.tokens[4]}});
  world.client.drain();
  EXPECT_EQ(world.client.stream(natural).tokens, whole.tokens);
  EXPECT_EQ(world.client.stream(natural).tokens.back(), test::fake_end_token);
  EXPECT_EQ(world.client.stream(natural).finish, FinishReason::Stop);
  EXPECT_EQ(world.client.stream(exact).finish, FinishReason::Stop);  // an end token on the last allowed place still is a stop
  EXPECT_EQ(world.client.stream(cut).finish, FinishReason::Length);
  EXPECT_EQ(world.client.stream(ignoring).tokens.size(), static_cast<std::size_t>(length) + 5);
  EXPECT_EQ(world.client.stream(ignoring).finish, FinishReason::Length);
  const auto first = std::find(whole.tokens.begin(), whole.tokens.end(), whole.tokens[4]) - whole.tokens.begin();
  EXPECT_EQ(world.client.stream(stopped).tokens.size(), static_cast<std::size_t>(first) + 1);
  EXPECT_EQ(world.client.stream(stopped).finish, FinishReason::Stop);
  world.expect_at_rest();
}

TEST(LaneEnds, logits_that_are_not_finite_fail_that_request_alone) {
  World world;
  auto bad_prompt = prompt_of(10);
  bad_prompt[0] = test::fake_bad_token;
  const SamplingParameters sampling{.temperature = 0, .max_new_tokens = 30, .ignore_eos = true};
  const SequenceId before = world.client.must_add(prompt_of(11), sampling);
  const SequenceId bad = world.client.must_add(bad_prompt, sampling);
  const SequenceId after = world.client.must_add(prompt_of(12), sampling);
  world.client.drain();
  EXPECT_EQ(world.client.stream(bad).finish, FinishReason::Failed);
  EXPECT_EQ(world.client.stream(bad).tokens.size(), test::fake_bad_length - 10);
  EXPECT_EQ(world.client.stream(bad).error.code, ErrorCode::Internal);
  EXPECT_THAT(world.client.stream(bad).error.message, HasSubstr("not finite"));
  for (const auto& [id, length] : {std::pair(before, 11), std::pair(after, 12)}) {
    EXPECT_EQ(world.client.stream(id).tokens, fake_answer(prompt_of(length), sampling).tokens);
  }
  EXPECT_FALSE(world.lane.failure().has_value());
  world.expect_at_rest();
}

TEST(LaneCancel, frees_everything_at_every_stage_and_disturbs_nobody) {
  const SamplingParameters sampling{.temperature = 0, .max_new_tokens = 30, .ignore_eos = true};
  const std::vector<TokenId> witness_prompt = prompt_of(14);
  const FakeAnswer witness_answer = fake_answer(witness_prompt, sampling);
  // 100 prompt tokens at budget 24 beside a decode: steps 0 (queued), 1 (first chunk) .. 5 (between chunks), later (decoding),
  // last step.
  for (int steps_before = 0; steps_before <= 36; ++steps_before) {
    World world(64, {.max_num_batched_tokens = 24, .max_num_seqs = 8, .priority_policy = PriorityPolicy::DecodeFirst});
    const SequenceId witness = world.client.must_add(witness_prompt, sampling);
    const SequenceId victim = world.client.must_add(prompt_of(100), {.temperature = 0, .max_new_tokens = 25, .ignore_eos = true});
    for (int i = 0; i < steps_before; ++i) world.client.step();
    const bool was_live = !world.client.stream(victim).finish.has_value();
    EXPECT_EQ(world.client.cancel(victim), was_live) << steps_before;
    EXPECT_FALSE(world.client.cancel(victim));  // twice
    world.lane.check_integrity();
    world.client.drain();
    EXPECT_FALSE(world.client.cancel(victim));
    EXPECT_FALSE(world.client.cancel(witness));  // after the end
    EXPECT_EQ(world.client.stream(witness).tokens, witness_answer.tokens) << steps_before;
    world.expect_at_rest();
  }
  World world;
  EXPECT_FALSE(world.client.cancel(SequenceId{12345}));
}

TEST(LaneCancel, works_on_a_preempted_sequence) {
  World world(24, {.max_num_batched_tokens = 32, .max_num_seqs = 8});
  std::vector<SequenceId> ids;
  for (TokenId salt = 0; salt < 8; ++salt) {
    ids.push_back(world.client.must_add(prompt_of(40, salt), {.temperature = 0, .max_new_tokens = 100, .ignore_eos = true}));
  }
  int cancelled = 0;
  for (int i = 0; i < 100000 && world.client.step(); ++i) {
    if (world.lane.record().preempted == 0) continue;
    // Whoever lost its blocks waits now: cancel all that have begun and hold a turn less than the others.
    for (const SequenceId id : ids) {
      const ClientStream& stream = world.client.stream(id);
      if (!stream.finish && !stream.cancelled && !stream.tokens.empty() && cancelled < 3)
        cancelled += world.client.cancel(id) ? 1 : 0;
    }
    world.lane.check_integrity();
  }
  EXPECT_EQ(cancelled, 3);
  for (TokenId salt = 0; salt < 8; ++salt) {
    const ClientStream& stream = world.client.stream(ids[static_cast<std::size_t>(salt)]);
    const FakeAnswer answer = fake_answer(prompt_of(40, salt), {.temperature = 0, .max_new_tokens = 100, .ignore_eos = true});
    if (!stream.cancelled) {
      EXPECT_EQ(stream.tokens, answer.tokens) << salt;
    }
  }
  world.expect_at_rest();
}

TEST(LanePreemption, streams_continue_as_if_nothing_had_happened) {
  const auto sampling_of = [](TokenId salt) {
    SamplingParameters sampling{.temperature = salt % 2 == 0 ? 0.0 : 0.8, .max_new_tokens = 120, .ignore_eos = true};
    sampling.seed = 5;
    sampling.frequency_penalty = 0.3;
    sampling.repetition_penalty = 1.1;
    sampling.min_new_tokens = 100;
    sampling.top_logprobs = 2;
    return sampling;
  };
  World world(24, {.max_num_batched_tokens = 32, .max_num_seqs = 8});
  std::vector<SequenceId> ids;
  for (TokenId salt = 0; salt < 8; ++salt) ids.push_back(world.client.must_add(prompt_of(50, salt), sampling_of(salt)));
  world.client.drain();
  EXPECT_GT(world.lane.counts().preemptions, 4U);
  for (TokenId salt = 0; salt < 8; ++salt) {
    const ClientStream& stream = world.client.stream(ids[static_cast<std::size_t>(salt)]);
    const FakeAnswer answer = fake_answer(prompt_of(50, salt), sampling_of(salt));
    EXPECT_EQ(stream.tokens, answer.tokens) << salt;
    ASSERT_EQ(stream.samples.size(), answer.logprobs.size());
    for (std::size_t i = 0; i < answer.logprobs.size(); ++i) {
      EXPECT_EQ(stream.samples[i].logprob, answer.logprobs[i]);
      EXPECT_EQ(stream.samples[i].top.size(), 2U);
    }
  }
  world.expect_at_rest();
}

TEST(LaneSteps, record_says_what_ran_under_which_settings) {
  World world(64, {.max_num_batched_tokens = 40, .max_num_seqs = 8});
  world.client.must_add(long_lived_prompt(100, 10), {.temperature = 0, .max_new_tokens = 8});
  ASSERT_TRUE(world.client.step());
  EXPECT_EQ(world.lane.record().features.tokens, 40);
  EXPECT_EQ(world.lane.record().features.prefill_rows, 1);
  EXPECT_EQ(world.lane.record().sampled, 0);
  EXPECT_EQ(world.lane.record().settings_number, 1U);
  EXPECT_EQ(world.lane.record().planning, std::chrono::microseconds(500));
  EXPECT_EQ(world.lane.record().end - world.lane.record().begin, std::chrono::milliseconds(1));
  world.lane.apply({.number = 2, .knobs = {.max_num_batched_tokens = 60, .max_num_seqs = 8}});
  ASSERT_TRUE(world.client.step());  // a half-prefilled prompt feels the change on the next step
  EXPECT_EQ(world.lane.record().settings_number, 2U);
  EXPECT_EQ(world.lane.record().features.tokens, 60);
  EXPECT_EQ(world.lane.record().sampled, 1);
  ASSERT_TRUE(world.client.step());
  EXPECT_EQ(world.lane.record().features.decode_rows, 1);
  EXPECT_EQ(world.lane.record().step_number, 3U);
  world.client.drain();
}

TEST(LaneFailure, every_remaining_sequence_fails_once_and_nothing_is_admitted_afterwards) {
  for (const std::uint64_t failing_run : {1U, 2U, 5U, 9U}) {
    World world(24, {.max_num_batched_tokens = 32, .max_num_seqs = 4}, failing_run);
    std::vector<SequenceId> ids;
    for (TokenId salt = 0; salt < 10; ++salt) {
      ids.push_back(world.client.must_add(prompt_of(30, salt), {.temperature = 0, .max_new_tokens = 40, .ignore_eos = true}));
    }
    world.client.drain();
    ASSERT_TRUE(world.lane.failure().has_value());
    EXPECT_EQ(world.lane.failure()->code, ErrorCode::DeviceLost);
    for (const SequenceId id : ids) {
      EXPECT_EQ(world.client.stream(id).finish, FinishReason::Failed);
      EXPECT_THAT(world.client.stream(id).error.message, HasSubstr("the fake device broke"));
      EXPECT_FALSE(world.client.cancel(id));
    }
    const auto added = world.client.add(prompt_of(3), {});
    ASSERT_FALSE(added);
    EXPECT_EQ(added.error().code, ErrorCode::DeviceLost);
    EXPECT_EQ(world.backend.run_count, failing_run);
    world.expect_at_rest();
  }
}

class LaneProperty : public testing::TestWithParam<std::uint32_t> {};

TEST_P(LaneProperty, streams_equal_an_undisturbed_run_under_any_settings) {
  SCOPED_TRACE("seed " + std::to_string(GetParam()));
  test::LaneProperty(GetParam()).run(1500);
}

INSTANTIATE_TEST_SUITE_P(Seeds, LaneProperty, testing::Range(1U, 9U));

}  // namespace
}  // namespace rubato::engine
