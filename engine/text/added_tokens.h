// SPDX-License-Identifier: Apache-2.0
// Tokens that are found in text before anything else happens to it: control tokens such as `<|eot_id|>`, and words added by
// finetuning.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "engine/text/split_pattern.h"
#include "engine/tokens.h"

namespace rubato::text {

/// One entry of tokenizer.json's `added_tokens`, under the names it has there.
struct AddedToken {
  TokenId id = 0;
  std::string content;
  bool single_word = false;  // only where no word character stands next to it
  bool lstrip = false;       // takes the blanks before it
  bool rstrip = false;       // takes the blanks after it
  bool normalized = false;   // searched in normalised text
  bool special = false;      // a control token: never made from text, never shown
};

/// A stretch of text, and the token it is, if it is one.
struct AddedPart {
  Span span;
  std::optional<TokenId> token;
};

/// Finds a fixed set of tokens; leftmost first, the longest of those. Immutable after the last insert.
class AddedTokenMatcher {
 public:
  void insert(const AddedToken& token, std::string_view content);
  [[nodiscard]] bool empty() const { return tokens_.empty(); }

  /// Cuts text into tokens and what is between them; blanks taken by lstrip and rstrip belong to the token. text is valid UTF-8.
  [[nodiscard]] std::vector<AddedPart> cut(std::string_view text) const;

 private:
  struct Node {
    std::vector<std::pair<unsigned char, std::uint32_t>> children;
    std::int32_t token = -1;  // index into tokens_
  };
  struct Entry {
    TokenId id = 0;
    bool single_word = false;
    bool lstrip = false;
    bool rstrip = false;
  };
  struct Match {
    const Entry* entry = nullptr;
    std::size_t size_bytes = 0;
  };
  [[nodiscard]] Match longest_at(std::string_view text, std::size_t offset) const;
  [[nodiscard]] bool touches_word(std::string_view text, std::size_t begin, std::size_t end) const;

  std::vector<Node> nodes_{1};
  std::vector<Entry> tokens_;
  std::array<bool, 256> first_bytes_{};
  std::optional<SplitPattern> word_;  // a word character; compiled when a token with single_word is inserted
};

}  // namespace rubato::text
