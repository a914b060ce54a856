// SPDX-License-Identifier: Apache-2.0
// What random lives of lanes over fake backends have in common: prompts from a seed, clients that leave, and the check that every
// stream equals what the model says of its prompt alone.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <random>
#include <utility>
#include <vector>

#include "engine/sampling.h"
#include "tests/support/fake_backend.h"
#include "tests/support/lane_client.h"

namespace rubato::test {

class RandomClients {
 protected:
  explicit RandomClients(std::uint32_t seed) : random_(seed) {}

  bool chance(int percent) { return static_cast<int>(random_() % 100) < percent; }
  std::int32_t between(std::int32_t low, std::int32_t high) {
    return low + static_cast<std::int32_t>(random_() % static_cast<std::uint32_t>(high - low + 1));
  }

  /// Mostly short, some long.
  std::vector<TokenId> random_prompt() {
    std::vector<TokenId> prompt(static_cast<std::size_t>(chance(20) ? between(60, 160) : between(1, 40)));
    for (TokenId& token : prompt) token = between(0, 94);
    return prompt;
  }

  /// Mostly begins as others do, and goes on as some do; where the shared part ends is anywhere.
  std::vector<TokenId> prompt_with_shared_start() {
    std::vector<TokenId> prompt = random_prompt();
    if (chance(20)) return prompt;
    const TokenId family = between(0, 3);
    const std::size_t shared = chance(20) ? prompt.size() : static_cast<std::size_t>(between(0, 150));
    if (prompt.size() < shared && chance(70))
      prompt.resize(std::min<std::size_t>(shared + static_cast<std::size_t>(between(0, 20)), 170), 5);
    for (std::size_t i = 0; i < std::min(shared, prompt.size()); ++i)
      prompt[i] = static_cast<TokenId>((i * 7 + static_cast<std::size_t>(family) * (i / 40 + 1) * 13 + 3) % 90);
    return prompt;
  }

  /// A full queue is the only reason to refuse it.
  void add(LaneClient& client, std::vector<TokenId> prompt, engine::SamplingParameters sampling) {
    auto added = client.add(prompt, sampling);
    if (!added) {
      EXPECT_EQ(added.error().code, ErrorCode::ResourceExhausted) << added.error().message;
      return;
    }
    requests_.emplace(added.value(), std::pair(std::move(prompt), std::move(sampling)));
  }

  /// One of the newest so many, ended or not, or one that never was.
  void cancel_one(LaneClient& client, std::uint64_t newest_count) {
    if (requests_.empty()) return;
    const std::uint64_t newest = requests_.rbegin()->first.value;
    const std::uint64_t back = random_() % newest_count;
    client.cancel(SequenceId{back < newest ? newest - back : newest + 1000});
  }

  PriorityPolicy random_policy() {
    const PriorityPolicy policies[] = {PriorityPolicy::Deadline, PriorityPolicy::DecodeFirst, PriorityPolicy::PrefillFirst,
                                       PriorityPolicy::ShortestFirst};
    return policies[random_() % 4];
  }

  void check_streams(LaneClient& client) {
    for (const auto& [id, request] : requests_) check(id, client.stream(id), fake_answer(request.first, request.second));
  }

  std::mt19937 random_;

 private:
  static void check(SequenceId id, const ClientStream& stream, const FakeAnswer& answer) {
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

  std::map<SequenceId, std::pair<std::vector<TokenId>, engine::SamplingParameters>> requests_;
};

}  // namespace rubato::test
