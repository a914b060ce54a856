// SPDX-License-Identifier: Apache-2.0
#include "engine/request_check.h"

#include <string>
#include <utility>

namespace rubato::engine {
namespace {

Unexpected refused(const char* field, std::string message) {
  return unexpected(ErrorCode::InvalidArgument, field, std::move(message));
}

}  // namespace

std::optional<Unexpected> find_fault(const Request& request, std::int32_t vocabulary, std::int32_t length_max) {
  if (request.prompt.empty()) return refused("prompt", "the prompt holds no token; at least one is needed");
  const auto outside = [vocabulary](TokenId token) { return token < 0 || token >= vocabulary; };
  const std::string allowed = "allowed: 0.." + std::to_string(vocabulary - 1);
  for (const TokenId token : request.prompt) {
    if (outside(token)) return refused("prompt", "token id " + std::to_string(token) + " is outside the vocabulary; " + allowed);
  }
  for (const auto& [token, bias] : request.sampling.logit_bias) {
    if (outside(token))
      return refused("logit_bias", "token id " + std::to_string(token) + " is outside the vocabulary; " + allowed);
  }
  const SamplingParameters& sampling = request.sampling;
  const auto too_many = [](std::size_t found, std::int32_t most) {
    return std::to_string(found) + " are given; allowed: up to " + std::to_string(most);
  };
  if (sampling.logit_bias.size() > static_cast<std::size_t>(logit_biases_max))
    return refused("logit_bias", too_many(sampling.logit_bias.size(), logit_biases_max));
  if (sampling.stop_token_ids.size() > static_cast<std::size_t>(stop_tokens_max))
    return refused("stop_token_ids", too_many(sampling.stop_token_ids.size(), stop_tokens_max));
  if (sampling.top_logprobs > top_logprobs_max)
    return refused("top_logprobs", std::to_string(sampling.top_logprobs) + " is above " + std::to_string(top_logprobs_max));
  const auto prompt = static_cast<std::int64_t>(request.prompt.size());
  if (prompt >= length_max) {
    return refused("prompt", "the prompt has " + std::to_string(prompt) + " tokens; a sequence here may have " +
                                 std::to_string(length_max) + ", prompt and at least one new token together");
  }
  const std::int32_t wanted = request.sampling.max_new_tokens;
  if (wanted < 1) return refused("max_tokens", std::to_string(wanted) + " is below 1");
  if (prompt + wanted > length_max) {
    return refused("max_tokens", std::to_string(wanted) + " new tokens after a prompt of " + std::to_string(prompt) +
                                     " exceed the " + std::to_string(length_max) +
                                     " that a sequence here may have; allowed: up to " + std::to_string(length_max - prompt));
  }
  return std::nullopt;
}

}  // namespace rubato::engine
