// SPDX-License-Identifier: Apache-2.0
// Byte-pair encoding of one piece: characters to ids, then merges by rank. Knows nothing of special tokens, regexes or JSON.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "engine/tokens.h"
#include "manifests/result.h"

namespace rubato::text {

/// Looks pieces up by their bytes. Open addressing over the caller's piece list, so that a piece is stored once.
class PieceTable {
 public:
  /// pieces must outlive the table and not move. Ids are indexes into it; insert each piece at most once.
  void reserve(std::size_t count);
  void insert(const std::vector<std::string>& pieces, TokenId id);
  [[nodiscard]] std::optional<TokenId> find(const std::vector<std::string>& pieces, std::string_view piece) const;

 private:
  struct Slot {
    std::uint32_t hash = 0;
    TokenId id = -1;  // free
  };
  std::vector<Slot> slots_;
  std::uint64_t mask_ = 0;
};

/// (left, right) -> rank and result.
class MergeTable {
 public:
  struct Merge {
    std::uint32_t rank = 0;
    TokenId result = 0;
  };
  void reserve(std::size_t count);
  /// A pair that is inserted again takes the later rank, as Hugging Face's loader has it.
  void insert(TokenId left, TokenId right, Merge merge);
  [[nodiscard]] const Merge* find(TokenId left, TokenId right) const;

 private:
  struct Slot {
    std::uint64_t key = empty_key;
    Merge merge;
  };
  static constexpr std::uint64_t empty_key = ~0ULL;  // no pair of ids >= 0 has it
  [[nodiscard]] std::size_t slot_of(std::uint64_t key) const;
  std::vector<Slot> slots_;
  std::uint64_t mask_ = 0;
};

/// What a character is made of before merging.
enum class Alphabet : std::uint8_t { Bytes, Characters };

/// Filled by tokenizer_json.cpp, read-only afterwards.
struct Bpe {
  Alphabet alphabet = Alphabet::Characters;
  std::vector<std::string> pieces;  // by id, in the alphabet's own bytes; empty: not reachable by encoding text
  PieceTable table;
  MergeTable merges;
  std::array<TokenId, 256> byte_ids{};                  // Alphabet::Bytes: id of each byte, -1 if it has none
  std::array<TokenId, 256> fallback_ids{};              // `<0xNN>`, -1 if absent
  std::unordered_map<char32_t, TokenId> character_ids;  // Alphabet::Characters
  std::optional<TokenId> unknown;
  bool fuse_unknown = false;
  bool byte_fallback = false;
  bool ignore_merges = false;  // a piece that is a token as it stands is not merged

  /// Appends the ids of piece (not empty, valid UTF-8). O(n log n). InvalidArgument: a character that has no id, where the model
  /// has neither byte fallback nor an unknown token.
  [[nodiscard]] Result<void> encode(std::string_view piece, std::vector<TokenId>& ids) const;

 private:
  [[nodiscard]] Result<void> spell(std::string_view piece, std::vector<TokenId>& symbols) const;
};

}  // namespace rubato::text
