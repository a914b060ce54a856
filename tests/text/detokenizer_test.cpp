// SPDX-License-Identifier: Apache-2.0
// Streamed text: characters cut across tokens, garbage, byte pieces, ids without text, leading blanks.
#include "tests/text/tokenizers.h"

namespace rubato::text {
namespace {

const std::string replacement = "\xEF\xBF\xBD";

std::vector<std::string> pieces_of(Detokenizer& detokenizer, const std::vector<TokenId>& ids) {
  std::vector<std::string> pieces;
  for (const TokenId id : ids) pieces.push_back(detokenizer.push(id));
  pieces.push_back(detokenizer.finish());
  return pieces;
}

TEST(Detokenizer, syllable_in_three_tokens_appears_once_whole) {
  const auto tokenizer = Tokenizer::make_bytes(4096);
  Detokenizer detokenizer(*tokenizer);
  EXPECT_EQ(pieces_of(detokenizer, {0xED, 0x95, 0x9C, ' ', 300}), (std::vector<std::string>{"", "", "한", " ", " t300", ""}));
}

TEST(Detokenizer, emoji_in_two_tokens_is_followed_at_once_by_a_blank_prefixed_token) {
  nlohmann::json json = byte_level_json();
  json["model"]["vocab"]["ðŁ"] = 264;  // F0 9F
  json["model"]["vocab"]["ĺĢ"] = 265;  // 98 80
  const auto tokenizer = parse_or_fail(json);
  Detokenizer detokenizer(*tokenizer);
  EXPECT_EQ(pieces_of(detokenizer, {264, 265, 260, 262}), (std::vector<std::string>{"", "😀", " w", " wor", ""}));
}

TEST(Detokenizer, cut_tail_becomes_one_replacement_mark_streamed_and_not) {
  const auto tokenizer = Tokenizer::make_bytes(256);
  Detokenizer detokenizer(*tokenizer);
  EXPECT_EQ(pieces_of(detokenizer, {'a', 0xED, 0x95}), (std::vector<std::string>{"a", "", "", replacement}));
  EXPECT_EQ(tokenizer->decode({'a', 0xED, 0x95}), "a" + replacement);
}

TEST(Detokenizer, lone_continuation_bytes_are_flushed_one_by_one) {
  const auto tokenizer = Tokenizer::make_bytes(256);
  Detokenizer detokenizer(*tokenizer);
  for (int index = 0; index < 20; ++index) EXPECT_EQ(detokenizer.push(0x80), replacement) << index;
  EXPECT_EQ(detokenizer.finish(), "");
}

TEST(Detokenizer, no_garbage_is_held_for_more_than_three_bytes) {
  const auto tokenizer = Tokenizer::make_bytes(256);
  std::mt19937_64 random(5);
  for (int round = 0; round < 2000; ++round) {
    Detokenizer detokenizer(*tokenizer);
    std::size_t held = 0;
    for (int index = 0; index < 40; ++index) {
      const std::string piece = detokenizer.push(std::uniform_int_distribution<TokenId>(0x80, 0xFF)(random));
      held = piece.empty() ? held + 1 : 0;
      ASSERT_LE(held, 3u) << "round " << round;
    }
  }
}

TEST(Detokenizer, character_after_a_cut_one_is_not_swallowed) {
  const auto tokenizer = Tokenizer::make_bytes(256);
  EXPECT_EQ(tokenizer->decode({0xED, 0x95, 'x'}), replacement + "x");
  EXPECT_EQ(tokenizer->decode({0xF0, 0x9F, 0xC3, 0xA9}), replacement + "é");
}

TEST(Detokenizer, byte_pieces_join_to_the_character_and_never_show) {
  const auto tokenizer = parse_or_fail(byte_fallback_json());
  const TokenId e4 = tokenizer->id_of("<0xE4>").value();
  const TokenId bd = tokenizer->id_of("<0xBD>").value();
  const TokenId a0 = tokenizer->id_of("<0xA0>").value();
  EXPECT_EQ(tokenizer->decode({e4, bd, a0}), "你");
  EXPECT_EQ(tokenizer->decode({e4, bd}), replacement);
  EXPECT_EQ(tokenizer->decode({e4, 2, bd, a0}), "你") << "a special token in the middle has no text and does not cut";
  Detokenizer detokenizer(*tokenizer);
  EXPECT_EQ(pieces_of(detokenizer, {e4, bd, a0}), (std::vector<std::string>{"", "", "你", ""}));
}

TEST(Detokenizer, ids_without_text_decode_to_nothing) {
  nlohmann::json json = byte_level_json();
  json["added_tokens"].push_back(added(320, "<|end|>", true));  // ids 264..319 are padding
  const auto tokenizer = parse_or_fail(json);
  EXPECT_EQ(tokenizer->vocabulary(), 321);
  EXPECT_EQ(tokenizer->decode({'a', 310, -1, 321, 1'000'000, 320, 'b'}), "ab");
  EXPECT_EQ(tokenizer->token_text(310), "");
  EXPECT_EQ(tokenizer->token_bytes(1'000'000), "");
  EXPECT_FALSE(tokenizer->is_special(310));
}

TEST(Detokenizer, leading_blank_goes_at_the_beginning_of_a_text_only) {
  const auto tokenizer = parse_or_fail(byte_fallback_json());
  const TokenId a = tokenizer->id_of("▁a").value();
  EXPECT_EQ(tokenizer->decode({1, a, a}), "a a") << "the begin token in front does not count as text";
  Detokenizer answer(*tokenizer);
  EXPECT_EQ(pieces_of(answer, {a, a}), (std::vector<std::string>{" a", " a", ""}));
  Detokenizer text(*tokenizer, TextStart::Beginning);
  EXPECT_EQ(pieces_of(text, {a, a}), (std::vector<std::string>{"a", " a", ""}));
}

TEST(Detokenizer, metaspace_decoder_drops_the_blanks_of_the_first_token) {
  nlohmann::json json = byte_fallback_json();
  json["decoder"] = {{"type", "Metaspace"}, {"replacement", "▁"}, {"prepend_scheme", "first"}};
  const auto tokenizer = parse_or_fail(json);
  const TokenId a = tokenizer->id_of("▁a").value();
  EXPECT_EQ(tokenizer->decode({a, a}), "a a");
  json["decoder"]["prepend_scheme"] = "never";
  EXPECT_EQ(parse_or_fail(json)->decode({a, a}), " a a");
}

TEST(TokenText, is_bytes_where_utf8_and_escaped_otherwise) {
  nlohmann::json json = byte_level_json();
  json["added_tokens"].push_back(added(300, "<|end|>", true));
  const auto tokenizer = parse_or_fail(json);
  EXPECT_EQ(tokenizer->token_text(262), " wor");
  EXPECT_EQ(tokenizer->token_bytes(262), " wor");
  EXPECT_EQ(tokenizer->token_text(0xE4), "bytes:\\xe4");
  EXPECT_EQ(tokenizer->token_bytes(0xE4), "\xE4");
  EXPECT_EQ(tokenizer->token_text(300), "<|end|>");
  EXPECT_EQ(tokenizer->token_bytes(300), "");
}

TEST(ByteTokenizer, text_is_its_bytes_and_higher_ids_are_words) {
  const auto tokenizer = Tokenizer::make_bytes(4096);
  EXPECT_EQ(encode(*tokenizer, "aé"), (std::vector<TokenId>{'a', 0xC3, 0xA9}));
  EXPECT_EQ(encode(*tokenizer, ""), std::vector<TokenId>{});
  EXPECT_EQ(tokenizer->decode({'a', 0xC3, 0xA9, 256, 4095, 4096}), "aé t256 t4095");
  EXPECT_EQ(tokenizer->vocabulary(), 4096);
  EXPECT_EQ(tokenizer->begin_token(), std::nullopt);
  EXPECT_EQ(tokenizer->end_token(), std::nullopt);
  EXPECT_EQ(tokenizer->token_text(0xC3), "bytes:\\xc3");
}

TEST(ByteTokenizer, byte_outside_a_small_vocabulary_is_refused_and_not_folded) {
  const auto tokenizer = Tokenizer::make_bytes(100);
  EXPECT_EQ(encode(*tokenizer, "AB"), (std::vector<TokenId>{'A', 'B'}));
  const auto refused = tokenizer->encode("z", SpecialTokens::AsText, BeginToken::None);
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code, ErrorCode::InvalidArgument);
  EXPECT_NE(refused.error().message.find("100"), std::string::npos);
}

TEST(Utf8, every_malformed_form_is_found_where_it_stands) {
  for (const std::string bad : {"\x80", "\xC0\xAF", "\xC1\xBF", "\xE0\x9F\xBF", "\xED\xA0\xBD", "\xF0\x8F\xBF\xBF",
                                "\xF4\x90\x80\x80", "\xF5\x80\x80\x80", "\xFF", "\xE4\xBD", "\xF0\x9F\x98"}) {
    EXPECT_EQ(find_invalid_utf8("abcdefghij" + bad), 10u);
  }
  EXPECT_EQ(find_invalid_utf8("\xED\x9F\xBF\xEE\x80\x80\xF4\x8F\xBF\xBF"), std::nullopt);
}

TEST(Encode, invalid_utf8_is_refused) {
  const auto tokenizer = parse_or_fail(byte_level_json());
  for (const std::string_view bad : {std::string_view("a\xFF"), std::string_view("\xED\xA0\xBD")}) {
    const auto refused = tokenizer->encode(bad, SpecialTokens::Parse, BeginToken::None);
    ASSERT_FALSE(refused);
    EXPECT_EQ(refused.error().code, ErrorCode::InvalidArgument);
    EXPECT_FALSE(find_invalid_utf8(refused.error().message)) << "the message must not repeat the bad bytes";
  }
}

}  // namespace
}  // namespace rubato::text
