// SPDX-License-Identifier: Apache-2.0
// Short pieces, which are nearly all, merge by scanning; long ones with a heap over a linked list. Both apply the lowest rank
// first and the leftmost of equals, so they give the same ids.
#include "engine/text/bpe.h"

#include <algorithm>
#include <bit>
#include <functional>
#include <queue>
#include <span>

#include "engine/text/utf8.h"

namespace rubato::text {
namespace {

// Scanning costs n * n / 2 comparisons of a few cycles; at about this length the heap's allocations are paid back.
constexpr std::size_t scan_symbols_max = 64;

constexpr std::uint64_t mix(std::uint64_t key) {
  key = (key ^ (key >> 30)) * 0xBF58476D1CE4E5B9ULL;  // splitmix64's finaliser
  key = (key ^ (key >> 27)) * 0x94D049BB133111EBULL;
  return key ^ (key >> 31);
}

constexpr std::uint64_t pair_key(TokenId left, TokenId right) {
  return (static_cast<std::uint64_t>(static_cast<std::uint32_t>(left)) << 32) | static_cast<std::uint32_t>(right);
}

std::uint64_t hash_of(std::string_view piece) {
  return mix(std::hash<std::string_view>{}(piece));
}

std::size_t slot_count_for(std::size_t count) {
  return std::bit_ceil(std::max<std::size_t>(16, count * 2));
}

/// Both functions merge in place and return how many symbols are left.
std::size_t merge_by_scanning(const MergeTable& merges, std::span<TokenId> symbols) {
  constexpr std::uint32_t none = ~0U;
  std::array<std::uint32_t, scan_symbols_max> ranks{};  // ranks[i]: of the pair (i, i + 1)
  std::array<TokenId, scan_symbols_max> results{};
  std::size_t count = symbols.size();
  const auto look_up = [&](std::size_t index) {
    const MergeTable::Merge* merge = merges.find(symbols[index], symbols[index + 1]);
    ranks[index] = merge == nullptr ? none : merge->rank;
    if (merge != nullptr) results[index] = merge->result;
  };
  for (std::size_t index = 0; index + 1 < count; ++index) look_up(index);
  while (count > 1) {
    const auto best = std::min_element(ranks.begin(), ranks.begin() + static_cast<std::ptrdiff_t>(count - 1));
    if (*best == none) break;
    const auto at = static_cast<std::size_t>(best - ranks.begin());
    symbols[at] = results[at];
    for (std::size_t index = at + 1; index + 1 < count; ++index) {
      symbols[index] = symbols[index + 1];
      ranks[index] = ranks[index + 1];
      results[index] = results[index + 1];
    }
    --count;
    if (at + 1 < count) look_up(at);
    if (at > 0) look_up(at - 1);
  }
  return count;
}

struct Candidate {
  std::uint32_t rank = 0;
  std::uint32_t position = 0;
  TokenId result = 0;
  friend bool operator>(const Candidate& a, const Candidate& b) {
    return a.rank != b.rank ? a.rank > b.rank : a.position > b.position;
  }
};

struct Symbol {
  TokenId id = 0;
  std::int32_t previous = -1;
  std::int32_t next = -1;
  bool alive = true;
};

std::size_t merge_by_heap(const MergeTable& merges, std::span<TokenId> ids) {
  std::vector<Symbol> symbols(ids.size());
  std::vector<Candidate> initial;
  initial.reserve(ids.size());
  for (std::size_t index = 0; index < ids.size(); ++index) {
    const auto position = static_cast<std::int32_t>(index);
    symbols[index] = {ids[index], position - 1, index + 1 < ids.size() ? position + 1 : -1, true};
    if (index + 1 == ids.size()) break;
    if (const auto* merge = merges.find(ids[index], ids[index + 1])) {
      initial.push_back({merge->rank, static_cast<std::uint32_t>(index), merge->result});
    }
  }
  std::priority_queue<Candidate, std::vector<Candidate>, std::greater<>> queue(std::greater<>{}, std::move(initial));
  const auto offer = [&](std::int32_t left) {
    if (left < 0 || symbols[left].next < 0) return;
    if (const auto* merge = merges.find(symbols[left].id, symbols[symbols[left].next].id)) {
      queue.push({merge->rank, static_cast<std::uint32_t>(left), merge->result});
    }
  };
  while (!queue.empty()) {
    const Candidate top = queue.top();
    queue.pop();
    Symbol& left = symbols[top.position];
    if (!left.alive || left.next < 0) continue;
    Symbol& right = symbols[left.next];
    const auto* merge = merges.find(left.id, right.id);
    if (merge == nullptr || merge->rank != top.rank) continue;  // one of the two has been merged since
    left.id = top.result;
    right.alive = false;
    left.next = right.next;
    if (left.next >= 0) symbols[left.next].previous = static_cast<std::int32_t>(top.position);
    offer(left.previous);
    offer(static_cast<std::int32_t>(top.position));
  }
  std::size_t count = 0;
  for (std::int32_t at = 0; at >= 0; at = symbols[at].next) ids[count++] = symbols[at].id;
  return count;
}

}  // namespace

void PieceTable::reserve(std::size_t count) {
  slots_.assign(slot_count_for(count), Slot{});
  mask_ = slots_.size() - 1;
}

void PieceTable::insert(const std::vector<std::string>& pieces, TokenId id) {
  const std::uint64_t hash = hash_of(pieces[id]);
  std::size_t slot = hash & mask_;
  while (slots_[slot].id >= 0) slot = (slot + 1) & mask_;
  slots_[slot] = {static_cast<std::uint32_t>(hash >> 32), id};
}

std::optional<TokenId> PieceTable::find(const std::vector<std::string>& pieces, std::string_view piece) const {
  if (slots_.empty()) return std::nullopt;
  const std::uint64_t hash = hash_of(piece);
  for (std::size_t slot = hash & mask_; slots_[slot].id >= 0; slot = (slot + 1) & mask_) {
    if (slots_[slot].hash == static_cast<std::uint32_t>(hash >> 32) && pieces[slots_[slot].id] == piece) return slots_[slot].id;
  }
  return std::nullopt;
}

void MergeTable::reserve(std::size_t count) {
  slots_.assign(slot_count_for(count), Slot{});
  mask_ = slots_.size() - 1;
}

std::size_t MergeTable::slot_of(std::uint64_t key) const {
  std::size_t slot = mix(key) & mask_;
  while (slots_[slot].key != key && slots_[slot].key != empty_key) slot = (slot + 1) & mask_;
  return slot;
}

void MergeTable::insert(TokenId left, TokenId right, Merge merge) {
  const std::uint64_t key = pair_key(left, right);
  slots_[slot_of(key)] = {key, merge};
}

const MergeTable::Merge* MergeTable::find(TokenId left, TokenId right) const {
  if (slots_.empty()) return nullptr;
  const Slot& slot = slots_[slot_of(pair_key(left, right))];
  return slot.key == empty_key ? nullptr : &slot.merge;
}

Result<void> Bpe::spell(std::string_view piece, std::vector<TokenId>& symbols) const {
  bool previous_is_unknown = false;
  for (std::size_t offset = 0; offset < piece.size();) {
    const Character character =
        alphabet == Alphabet::Bytes ? Character{static_cast<unsigned char>(piece[offset]), 1} : character_at(piece, offset);
    const std::string_view bytes = piece.substr(offset, character.size_bytes);
    const std::size_t at = offset;
    offset += character.size_bytes;
    TokenId id = -1;
    if (alphabet == Alphabet::Bytes) {
      id = byte_ids[character.code_point];
    } else if (const auto found = character_ids.find(character.code_point); found != character_ids.end()) {
      id = found->second;
    }
    if (id >= 0) {
      symbols.push_back(id);
      previous_is_unknown = false;
      continue;
    }
    const auto fallback = [&](char byte) { return fallback_ids[static_cast<unsigned char>(byte)]; };
    if (byte_fallback && std::ranges::all_of(bytes, [&](char byte) { return fallback(byte) >= 0; })) {
      for (const char byte : bytes) symbols.push_back(fallback(byte));
      previous_is_unknown = false;
    } else if (unknown) {
      if (!previous_is_unknown || !fuse_unknown) symbols.push_back(*unknown);
      previous_is_unknown = true;
    } else {
      return unexpected(ErrorCode::InvalidArgument, "the model's vocabulary has no token for the character at byte " +
                                                        std::to_string(at) + " of `" + std::string(piece.substr(0, 64)) + "`");
    }
  }
  return {};
}

Result<void> Bpe::encode(std::string_view piece, std::vector<TokenId>& ids) const {
  if (ignore_merges) {
    if (const auto id = table.find(pieces, piece)) {
      ids.push_back(*id);
      return {};
    }
  }
  const std::size_t start = ids.size();
  if (auto spelt = spell(piece, ids); !spelt) return spelt;
  const std::span<TokenId> symbols = std::span(ids).subspan(start);
  const std::size_t left =
      symbols.size() > scan_symbols_max ? merge_by_heap(merges, symbols) : merge_by_scanning(merges, symbols);
  ids.resize(start + left);
  return {};
}

}  // namespace rubato::text
