// SPDX-License-Identifier: Apache-2.0
// A byte trie walked from every place where a token may begin: linear in the text times the longest token.
#include "engine/text/added_tokens.h"

#include <algorithm>

#include "engine/text/utf8.h"
#include "manifests/check.h"

namespace rubato::text {
void AddedTokenMatcher::insert(const AddedToken& token, std::string_view content) {
  std::uint32_t node = 0;
  for (const char raw : content) {
    const auto byte = static_cast<unsigned char>(raw);
    const auto& children = nodes_[node].children;
    const auto child = std::ranges::find(children, byte, &std::pair<unsigned char, std::uint32_t>::first);
    if (child != children.end()) {
      node = child->second;
    } else {
      const auto created = static_cast<std::uint32_t>(nodes_.size());
      nodes_[node].children.emplace_back(byte, created);
      nodes_.emplace_back();
      node = created;
    }
  }
  if (node == 0 || nodes_[node].token >= 0) return;  // empty, or the same text again: the first one stands
  nodes_[node].token = static_cast<std::int32_t>(tokens_.size());
  tokens_.push_back({token.id, token.single_word, token.lstrip, token.rstrip});
  first_bytes_[static_cast<unsigned char>(content.front())] = true;
  if (token.single_word && !word_) {
    auto compiled = SplitPattern::compile(R"([\p{L}\p{N}\p{M}\p{Pc}])", PatternKind::Regex);
    CHECK(compiled.has_value());
    word_ = *std::move(compiled);
  }
}

bool AddedTokenMatcher::touches_word(std::string_view text, std::size_t begin, std::size_t end) const {
  const auto is_word = [&](std::size_t from, std::size_t to) {
    std::vector<Span> found;
    return SplitMatcher(*word_).find_all(text, {static_cast<std::uint32_t>(from), static_cast<std::uint32_t>(to)}, found) &&
           !found.empty();
  };
  if (begin > 0) {
    std::size_t start = begin - 1;
    while (start > 0 && (static_cast<unsigned char>(text[start]) & 0xC0) == 0x80) --start;
    if (is_word(start, begin)) return true;
  }
  return end < text.size() && is_word(end, end + character_at(text, end).size_bytes);
}

AddedTokenMatcher::Match AddedTokenMatcher::longest_at(std::string_view text, std::size_t offset) const {
  Match best;
  std::uint32_t node = 0;
  for (std::size_t at = offset; at < text.size(); ++at) {
    const auto byte = static_cast<unsigned char>(text[at]);
    const auto& children = nodes_[node].children;
    const auto child = std::ranges::find(children, byte, &std::pair<unsigned char, std::uint32_t>::first);
    if (child == children.end()) break;
    node = child->second;
    if (nodes_[node].token >= 0) best = {&tokens_[nodes_[node].token], at + 1 - offset};
  }
  return best;
}

std::vector<AddedPart> AddedTokenMatcher::cut(std::string_view text) const {
  std::vector<AddedPart> parts;
  const auto add = [&](std::size_t begin, std::size_t end, std::optional<TokenId> token) {
    if (begin < end) parts.push_back({{static_cast<std::uint32_t>(begin), static_cast<std::uint32_t>(end)}, token});
  };
  std::size_t done = 0;  // everything before it is in parts
  for (std::size_t offset = 0; !tokens_.empty() && offset < text.size();) {
    if (!first_bytes_[static_cast<unsigned char>(text[offset])]) {
      ++offset;
      continue;
    }
    const Match match = longest_at(text, offset);
    if (match.entry == nullptr) {
      ++offset;
      continue;
    }
    std::size_t begin = offset;
    std::size_t end = offset + match.size_bytes;
    if (match.entry->single_word && touches_word(text, begin, end)) {
      offset = end;  // Hugging Face passes over the whole occurrence, too
      continue;
    }
    if (match.entry->lstrip) begin = std::max(done, begin - trailing_spaces(text.substr(0, begin)));
    if (match.entry->rstrip) end += leading_spaces(text.substr(end));
    add(done, begin, std::nullopt);
    add(begin, end, match.entry->id);
    offset = done = end;
  }
  add(done, text.size(), std::nullopt);
  return parts;
}

}  // namespace rubato::text
