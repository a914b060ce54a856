// SPDX-License-Identifier: Apache-2.0
// The four stages round the model in tokenizer.json: normalizer, pre_tokenizer, post_processor and decoder. What is not known by
// name is refused; nothing is approximated. All functions throw BadFile.
#pragma once

#include <optional>

#include "engine/text/json_field.h"
#include "engine/text/tokenizer_parts.h"

namespace rubato::text {

[[nodiscard]] Normalizer read_normalizer(const std::optional<JsonField>& field);

struct PreTokenizerRules {
  PreTokenizer steps;
  Alphabet alphabet = Alphabet::Characters;  // Bytes: a ByteLevel step stands at the end
};
[[nodiscard]] PreTokenizerRules read_pre_tokenizer(const std::optional<JsonField>& field);

/// What stands before and behind the text. vocabulary bounds the ids.
struct Surround {
  std::vector<TokenId> prefix;
  std::vector<TokenId> suffix;
};
[[nodiscard]] Surround read_post_processor(const std::optional<JsonField>& field, std::int32_t vocabulary);

/// A decoder is required: without one Hugging Face puts a blank between any two tokens, which no language model's files want.
[[nodiscard]] DecoderRules read_decoder(const JsonField& field);

}  // namespace rubato::text
