// SPDX-License-Identifier: Apache-2.0
// Everything a loaded tokenizer consists of, as plain read-only data: what tokenizer_json.cpp fills and tokenizer.cpp runs.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "engine/text/added_tokens.h"
#include "engine/text/bpe.h"
#include "engine/text/normalizer.h"
#include "engine/text/pre_tokenizer.h"
#include "engine/text/tokenizer.h"

namespace rubato::text {

/// What an id is. Absent: a gap in the numbering, such as the padding of an output layer.
enum class TokenKind : std::uint8_t { Absent, Text, Special };

/// What the decoder drops where a decoded text begins.
enum class LeadingBlank : std::uint8_t { Keep, StripOne, DropOfFirstToken };

/// How a token turns into bytes, from tokenizer.json's `decoder`.
struct DecoderRules {
  bool byte_level = false;                                        // pieces are spelt in the byte alphabet
  std::vector<std::pair<std::string, std::string>> replacements;  // applied to every piece
  bool byte_fallback = false;                                     // `<0xNN>` is a byte
  LeadingBlank leading_blank = LeadingBlank::Keep;
  std::string blank;  // DropOfFirstToken: the piece's spelling of a blank
};

struct TokenizerParts {
  bool bytes_only = false;  // make_bytes: no vocabulary, no merges
  std::int32_t vocabulary = 0;
  std::vector<std::string> contents;  // by id, as tokenizer.json spells it
  std::vector<std::string> bytes;     // by id, decoded; empty for special ids
  std::vector<TokenKind> kinds;
  std::map<std::string, TokenId, std::less<>> ids;
  Bpe bpe;
  Normalizer normalizer;
  PreTokenizer pre_tokenizer;
  // Searched first in the raw text, then in what the normalizer made of the rest; with control tokens (SpecialTokens::Parse) or
  // without.
  AddedTokenMatcher raw_all;
  AddedTokenMatcher raw_text;
  AddedTokenMatcher normalized_all;
  AddedTokenMatcher normalized_text;
  DecoderRules decoder;
  std::vector<TokenId> prefix;  // what the post-processor puts in front, and behind
  std::vector<TokenId> suffix;
  std::optional<TokenId> begin;
  std::optional<TokenId> end;
  std::optional<std::string> chat_template;

  [[nodiscard]] bool known(TokenId id) const {
    return id >= 0 && id < vocabulary && (bytes_only || kinds[static_cast<std::size_t>(id)] != TokenKind::Absent);
  }
};

struct Tokenizer::State {
  TokenizerParts parts;
};

}  // namespace rubato::text
