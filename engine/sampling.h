// SPDX-License-Identifier: Apache-2.0
// From logits to a token: penalties, bias, temperature, top_k/top_p/min_p, and a draw keyed by (request seed, position), so that
// chunking, batching, preemption and retunes can never change an answer. One implementation for every host backend.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "engine/tokens.h"

namespace rubato::engine {

/// What a backend takes of one request; its memory for sampling is laid out for so much.
inline constexpr std::int32_t logit_biases_max = 1024;
inline constexpr std::int32_t stop_tokens_max = 1024;
inline constexpr std::int32_t top_logprobs_max = 20;

/// What the client asked for, already range-checked. temperature 0 is greedy: the largest logit, the lowest id among equals.
struct SamplingParameters {
  double temperature = 1.0;
  std::int32_t top_k = 0;  // 0: off
  double top_p = 1.0;      // (0, 1]
  double min_p = 0.0;      // [0, 1]
  double presence_penalty = 0.0;
  double frequency_penalty = 0.0;
  double repetition_penalty = 1.0;  // > 0; covers prompt and output, the other two output alone
  std::vector<std::pair<TokenId, float>> logit_bias{};
  std::uint64_t seed = 0;
  std::int32_t max_new_tokens = 16;  // >= 1
  std::int32_t min_new_tokens = 0;   // end tokens are masked until then
  bool ignore_eos = false;
  std::vector<TokenId> stop_token_ids{};  // beside the model's own end tokens
  std::int32_t top_logprobs = -1;         // -1: none wanted; 0: the chosen token's alone; n: the n best as well (at most top_logprobs_max)
};

struct TokenLogprob {
  TokenId token = 0;
  float logprob = 0;
};

/// A sampled token. logprob and top refer to the model's raw distribution (before penalties and temperature), as vLLM reports it.
struct Sample {
  TokenId token = 0;
  float logprob = 0;                // only when wanted
  std::vector<TokenLogprob> top{};  // best first; capacity reserved ahead
};

/// How often a token occurred in a sequence.
struct TokenCount {
  TokenId token = 0;
  std::int32_t prompt = 0;
  std::int32_t output = 0;
};

/// The per-sequence state that sampling needs: how often each token occurred. Owned by the lane, read by the backend within a
/// step.
class SamplingState {
 public:
  SamplingState(SamplingParameters parameters, std::span<const TokenId> prompt, std::int32_t vocabulary);

  /// As given, but for the bias: ascending by token, one entry per token of the vocabulary.
  [[nodiscard]] const SamplingParameters& parameters() const { return parameters_; }
  /// Books one generated token. Called once per generated token, never again after a preemption.
  void append(TokenId token);
  [[nodiscard]] std::int32_t generated_count() const { return generated_count_; }
  /// Ascending by token; empty when no penalty is on.
  [[nodiscard]] std::span<const TokenCount> counts() const { return counts_; }
  [[nodiscard]] bool is_greedy() const;
  /// Whether the next token may not be an end token.
  [[nodiscard]] bool masks_end_tokens() const { return generated_count_ < parameters_.min_new_tokens; }

  /// Draws the next token from logits (vocabulary), which it may overwrite. position is the absolute position of the token being
  /// drawn. end_tokens and the stop token ids are masked while below min_new_tokens. False when a logit is not finite: the
  /// request fails alone. Calls for one state never overlap; different states may sample at once. Allocates nothing once out.top
  /// has its capacity.
  [[nodiscard]] bool sample(std::span<float> logits, std::int64_t position, std::span<const TokenId> end_tokens,
                            Sample& out) const;

 private:
  [[nodiscard]] bool changes_logits() const;
  void change(std::span<float> logits, std::span<const TokenId> end_tokens) const;
  void penalise(std::span<float> logits) const;
  [[nodiscard]] std::optional<TokenId> random_choice(std::span<const float> logits, std::int64_t position) const;
  [[nodiscard]] float raw_logit(std::span<const float> logits, TokenId token) const;

  SamplingParameters parameters_;
  std::vector<TokenCount> counts_;
  // Scratch of one sample(): logits before they were changed, beside parameters_.logit_bias and counts_.
  mutable std::vector<float> raw_of_bias_;
  mutable std::vector<float> raw_of_counts_;
  std::int32_t generated_count_ = 0;
};

}  // namespace rubato::engine
