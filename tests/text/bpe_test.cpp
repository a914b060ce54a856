// SPDX-License-Identifier: Apache-2.0
// The model itself against a merger that does nothing clever, and the rules round it: unknown characters, ignore_merges.
#include "engine/text/bpe.h"

#include "tests/text/tokenizers.h"

namespace rubato::text {
namespace {

struct Rule {
  std::string left;
  std::string right;
};

/// Lowest rank first, leftmost of equals, until nothing merges.
std::vector<std::string> merge_naively(const std::vector<Rule>& rules, const std::string& text) {
  std::vector<std::string> symbols;
  for (const char c : text) symbols.emplace_back(1, c);
  while (true) {
    std::size_t best_rank = rules.size();
    std::size_t best_at = 0;
    for (std::size_t at = 0; at + 1 < symbols.size(); ++at) {
      for (std::size_t rank = 0; rank < best_rank; ++rank) {
        if (rules[rank].left == symbols[at] && rules[rank].right == symbols[at + 1]) {
          best_rank = rank;
          best_at = at;
        }
      }
    }
    if (best_rank == rules.size()) return symbols;
    symbols[best_at] += symbols[best_at + 1];
    symbols.erase(symbols.begin() + static_cast<std::ptrdiff_t>(best_at) + 1);
  }
}

TEST(Bpe, random_merges_give_what_a_naive_merger_gives_at_every_length) {
  constexpr std::uint64_t seed = 42;
  std::mt19937_64 random(seed);
  for (int round = 0; round < 150; ++round) {
    Bpe bpe;
    bpe.fallback_ids.fill(-1);
    std::map<std::string, TokenId> ids;
    std::vector<Rule> rules;
    bpe.merges.reserve(64);
    for (const char c : {'a', 'b', 'c'}) {
      const auto id = static_cast<TokenId>(ids.size());
      ids.emplace(std::string(1, c), id);
      bpe.character_ids.emplace(static_cast<char32_t>(c), id);
    }
    for (int rule = 0; rule < 30; ++rule) {
      const auto pick = [&] { return std::next(ids.begin(), static_cast<std::ptrdiff_t>(random() % ids.size())); };
      const auto left = pick();
      const auto right = pick();
      const bool known = std::any_of(rules.begin(), rules.end(),
                                     [&](const Rule& r) { return r.left == left->first && r.right == right->first; });
      if (known || left->first.size() + right->first.size() > 40) continue;
      const TokenId result = ids.emplace(left->first + right->first, static_cast<TokenId>(ids.size())).first->second;
      bpe.merges.insert(left->second, right->second, {static_cast<std::uint32_t>(rules.size()), result});
      rules.push_back({left->first, right->first});
    }
    for (const std::size_t length : {1u, 2u, 5u, 63u, 64u, 65u, 200u}) {  // either side of the switch from scanning to the heap
      std::string text;
      for (std::size_t index = 0; index < length; ++index) text += "abc"[random() % 3];
      std::vector<TokenId> expected;
      for (const std::string& piece : merge_naively(rules, text)) expected.push_back(ids.at(piece));
      std::vector<TokenId> found;
      ASSERT_TRUE(bpe.encode(text, found));
      ASSERT_EQ(found, expected) << "seed " << seed << " round " << round << " text " << text;
    }
  }
}

TEST(Bpe, unknown_characters_fuse_where_the_model_says_so) {
  nlohmann::json json = byte_fallback_json();
  json["model"]["byte_fallback"] = false;
  EXPECT_EQ(encode(*parse_or_fail(json), "aüüa").size(), 3u);  // ▁a <unk> a
  json["model"]["fuse_unk"] = false;
  EXPECT_EQ(encode(*parse_or_fail(json), "aüüa").size(), 4u);
}

TEST(Bpe, character_that_cannot_be_expressed_is_an_error_and_not_dropped) {
  nlohmann::json json = byte_fallback_json();
  json["model"]["byte_fallback"] = false;
  json["model"]["unk_token"] = nullptr;
  const auto refused = parse_or_fail(json)->encode("aü", SpecialTokens::AsText, BeginToken::None);
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code, ErrorCode::InvalidArgument);
}

TEST(Bpe, bytes_stand_in_for_characters_the_vocabulary_lacks) {
  const auto tokenizer = parse_or_fail(byte_fallback_json());
  EXPECT_EQ(encode(*tokenizer, "ab"), std::vector<TokenId>{tokenizer->id_of("▁ab").value()});
  EXPECT_EQ(encode(*tokenizer, "é"), (std::vector<TokenId>{tokenizer->id_of("▁").value(), tokenizer->id_of("<0xC3>").value(),
                                                           tokenizer->id_of("<0xA9>").value()}));
}

TEST(Bpe, ignore_merges_takes_a_whole_piece_that_is_a_token) {
  nlohmann::json json = byte_level_json();
  json["model"]["vocab"]["xyz"] = 264;  // no merge makes it
  EXPECT_EQ(encode(*parse_or_fail(json), "xyz").size(), 3u);
  json["model"]["ignore_merges"] = true;
  EXPECT_EQ(encode(*parse_or_fail(json), "xyz"), std::vector<TokenId>{264});
}

TEST(Bpe, control_tokens_of_the_vocabulary_are_out_of_reach_of_merges_and_whole_pieces) {
  nlohmann::json json = byte_level_json();
  json["model"]["vocab"]["zz"] = 264;
  json["model"]["vocab"]["qq"] = 265;
  json["model"]["merges"].push_back({"z", "z"});
  json["model"]["ignore_merges"] = true;
  json["added_tokens"] = {added(264, "zz", true), added(265, "qq", true)};
  const auto tokenizer = parse_or_fail(json);
  EXPECT_EQ(encode(*tokenizer, "zz", SpecialTokens::AsText), (std::vector<TokenId>{'z', 'z'}));
  EXPECT_EQ(encode(*tokenizer, "qq", SpecialTokens::AsText), (std::vector<TokenId>{'q', 'q'}));
  EXPECT_EQ(encode(*tokenizer, "zz", SpecialTokens::Parse), std::vector<TokenId>{264});
}

}  // namespace
}  // namespace rubato::text
