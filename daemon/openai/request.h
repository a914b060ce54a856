// SPDX-License-Identifier: Apache-2.0
// What a client asked for, read from the body of /v1/completions or /v1/chat/completions. Pure functions of the text: no
// tokenizer, clock or engine. Every parameter is read, documented as ignored, or refused by name.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "engine/sampling.h"
#include "engine/text/chat_template.h"
#include "engine/tokens.h"
#include "manifests/result.h"

namespace rubato::openai {

enum class Endpoint : std::uint8_t { Completions, Chat };

using Prompt = std::variant<std::string, std::vector<TokenId>>;

struct GenerationRequest {
  Endpoint endpoint = Endpoint::Completions;
  std::string model;                        // empty: not named
  std::vector<Prompt> prompts;              // Completions: at least one, none empty
  std::vector<text::ChatMessage> messages;  // Chat: at least one
  std::int32_t choices_per_prompt = 1;      // n
  std::optional<std::int32_t> max_tokens;   // none: the endpoint's default
  std::optional<std::uint64_t> seed;        // none: random
  engine::SamplingParameters sampling;      // all but seed and max_new_tokens
  std::vector<std::string> stops;           // none empty
  bool stream = false;
  bool include_usage = false;
  std::string cache_salt;          // requests with different ones share nothing of the prefix cache
  bool add_special_tokens = true;  // Completions: whether the tokenizer's begin token is added to text prompts
};

struct RequestLimits {
  std::int32_t vocabulary = 0;     // token ids in the request must be below
  std::int32_t choices_max = 128;  // prompts times n
};

inline constexpr std::size_t stops_max = 16;
inline constexpr std::size_t stop_bytes_max = 4096;
inline constexpr std::size_t cache_salt_bytes_max = 1024;  // each choice has one, hashed while no step can be planned
inline constexpr std::size_t logit_bias_max = engine::logit_biases_max;
inline constexpr std::size_t stop_token_ids_max = engine::stop_tokens_max;
inline constexpr std::int32_t top_logprobs_max = engine::top_logprobs_max;

/// InvalidArgument with the parameter as field.
[[nodiscard]] Result<GenerationRequest> parse_completion_request(std::string_view body, const RequestLimits& limits);
[[nodiscard]] Result<GenerationRequest> parse_chat_request(std::string_view body, const RequestLimits& limits);

}  // namespace rubato::openai
