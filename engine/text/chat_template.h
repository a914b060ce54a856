// SPDX-License-Identifier: Apache-2.0
// Chat messages to prompt tokens, in the three forms in wide use: Llama-3, ChatML and Mistral. The form is chosen from the
// model's own chat_template; message text is always tokenised as text, so that a user cannot forge a turn.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "engine/text/tokenizer.h"
#include "engine/tokens.h"
#include "manifests/result.h"

namespace rubato::text {

enum class ChatForm : std::uint8_t { Llama3, ChatMl, Mistral, Plain };

struct ChatMessage {
  std::string role;  // system | user | assistant | developer (as system)
  std::string content;
};

/// Which form the tokenizer's chat_template has: told by the control tokens it contains. A template of another form:
/// InvalidArgument that says so. No template at all: Plain (`role: content` lines), which synthetic and base models get.
[[nodiscard]] Result<ChatForm> detect_chat_form(const Tokenizer& tokenizer);

/// Prompt tokens ending where the assistant's answer begins; exactly one begin token where the form has one. InvalidArgument
/// (field `messages[i].role` and so on): no messages, unknown role, an order the form cannot express (Mistral: user and assistant
/// alternate).
[[nodiscard]] Result<std::vector<TokenId>> render_chat(const Tokenizer& tokenizer, ChatForm form,
                                                       const std::vector<ChatMessage>& messages);

/// Control tokens that end an assistant turn in this form, beside the model's own end tokens.
[[nodiscard]] std::vector<TokenId> chat_end_tokens(const Tokenizer& tokenizer, ChatForm form);

}  // namespace rubato::text
