// SPDX-License-Identifier: Apache-2.0
// The JSON of successful answers: completions and chat completions, whole and as stream events. Pure; says nothing about when
// they are sent.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "daemon/openai/json_body.h"
#include "daemon/openai/request.h"
#include "engine/sampling.h"
#include "engine/text/tokenizer.h"

namespace rubato::openai {

/// What all objects of one answer share.
struct AnswerHead {
  Endpoint endpoint = Endpoint::Completions;
  std::string id;
  std::int64_t created = 0;  // seconds since 1970
  std::string model;
};

struct Usage {
  std::int64_t prompt_tokens = 0;
  std::int64_t cached_tokens = 0;  // of those: not computed again, see spec.prefixCaching
  std::int64_t completion_tokens = 0;
};

/// The `logprobs` of tokens. text_offset is where the first one begins in the choice's text, in characters, and is advanced past
/// the last.
[[nodiscard]] OrderedJson logprobs_json(Endpoint endpoint, const text::Tokenizer& tokenizer,
                                        std::span<const engine::Sample> tokens, std::int64_t& text_offset);

/// One choice of a whole answer. logprobs: null when not wanted.
[[nodiscard]] OrderedJson choice_json(Endpoint endpoint, std::int32_t index, const std::string& text,
                                      const std::string& finish_reason, OrderedJson logprobs);
[[nodiscard]] OrderedJson answer_json(const AnswerHead& head, std::vector<OrderedJson> choices, const Usage& usage);

/// Chat: the first event of a choice has the role and empty content.
enum class Role : std::uint8_t { None, Assistant };

/// One choice of a stream event.
struct Delta {
  std::int32_t index = 0;
  std::string_view text;
  Role role = Role::None;
  OrderedJson logprobs;                      // null when not wanted
  std::optional<std::string> finish_reason;  // on the choice's last
};
/// Null: the client asked for usage, so every other event says that it has none.
enum class UsageMember : std::uint8_t { None, Null };
[[nodiscard]] std::string delta_event(const AnswerHead& head, Delta delta, UsageMember usage);
/// The event right before [DONE].
[[nodiscard]] std::string usage_event(const AnswerHead& head, const Usage& usage);
[[nodiscard]] std::string event_of(const OrderedJson& json);
inline constexpr std::string_view done_event = "data: [DONE]\n\n";

}  // namespace rubato::openai
