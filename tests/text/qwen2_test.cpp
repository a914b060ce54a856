// SPDX-License-Identifier: Apache-2.0
// A small tokenizer.json in the layout of Qwen2 and Qwen3: every member those files have, with a vocabulary that fits a test.
#include "engine/text/normalizer.h"
#include "engine/text/pre_tokenizer.h"
#include "tests/text/tokenizers.h"

namespace rubato::text {
namespace {

using nlohmann::json;

constexpr std::string_view qwen2_pattern =
    R"re((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)re";

constexpr TokenId end_of_text = 300;
constexpr TokenId turn_begin = 301;
constexpr TokenId turn_end = 302;
constexpr TokenId tool_call = 303;
constexpr TokenId think = 304;

json byte_level_stage() {
  return {{"type", "ByteLevel"}, {"add_prefix_space", false}, {"trim_offsets", false}, {"use_regex", false}};
}

json qwen2_json() {
  json tokenizer = byte_level_json();
  tokenizer["truncation"] = nullptr;
  tokenizer["padding"] = nullptr;
  tokenizer["added_tokens"] = {added(end_of_text, "<|endoftext|>", true), added(turn_begin, "<|im_start|>", true),
                               added(turn_end, "<|im_end|>", true), added(tool_call, "<tool_call>", false),
                               added(think, "<think>", false)};
  tokenizer["normalizer"] = {{"type", "NFC"}};
  tokenizer["pre_tokenizer"] = {
      {"type", "Sequence"},
      {"pretokenizers",
       {{{"type", "Split"}, {"pattern", {{"Regex", qwen2_pattern}}}, {"behavior", "Isolated"}, {"invert", false}},
        byte_level_stage()}}};
  tokenizer["post_processor"] = byte_level_stage();
  tokenizer["decoder"] = byte_level_stage();
  json& model = tokenizer["model"];
  model["dropout"] = nullptr;
  model["unk_token"] = nullptr;
  model["continuing_subword_prefix"] = "";
  model["end_of_word_suffix"] = "";
  model["fuse_unk"] = false;
  model["byte_fallback"] = false;
  model["ignore_merges"] = false;
  model["vocab"]["Ã©"] = 264;  // the two bytes of é
  model["merges"].push_back({"Ã", "©"});
  model["vocab"]["12"] = 265;  // which the split keeps from ever forming
  model["merges"].push_back({"1", "2"});
  return tokenizer;
}

json qwen2_config() {
  return {{"add_bos_token", false},
          {"add_prefix_space", false},
          {"added_tokens_decoder", {{"300", {{"content", "<|endoftext|>"}, {"special", true}}}}},
          {"additional_special_tokens", {"<|im_start|>", "<|im_end|>"}},
          {"bos_token", nullptr},
          {"clean_up_tokenization_spaces", false},
          {"eos_token", "<|im_end|>"},
          {"errors", "replace"},
          {"model_max_length", 131072},
          {"pad_token", "<|endoftext|>"},
          {"split_special_tokens", false},
          {"tokenizer_class", "Qwen2Tokenizer"},
          {"unk_token", nullptr}};
}

class Qwen2 : public testing::Test {
 protected:
  void SetUp() override { ASSERT_NE(tokenizer_, nullptr); }
  const std::unique_ptr<Tokenizer> tokenizer_ = parse_or_fail(qwen2_json(), qwen2_config());
};

TEST_F(Qwen2, composed_and_decomposed_letters_are_the_same_tokens) {
  const std::vector<TokenId> expected = {'c', 'a', 'f', 264};
  EXPECT_EQ(encode(*tokenizer_, "caf\u00E9"), expected);
  EXPECT_EQ(encode(*tokenizer_, "cafe\u0301"), expected);
  EXPECT_EQ(tokenizer_->decode(expected), "caf\u00E9");

  json without = qwen2_json();
  without["normalizer"] = nullptr;
  EXPECT_NE(encode(*parse_or_fail(without, qwen2_config()), "cafe\u0301"), expected);
}

TEST_F(Qwen2, every_form_and_a_sequence_of_them_load) {
  json tokenizer = qwen2_json();
  for (const char* form : {"NFC", "NFKC"}) {
    tokenizer["normalizer"] = {{"type", "Sequence"}, {"normalizers", {{{"type", form}}}}};
    EXPECT_EQ(encode(*parse_or_fail(tokenizer), "e\u0301"), std::vector<TokenId>{264}) << form;
  }
  for (const char* form : {"NFD", "NFKD"}) {
    tokenizer["normalizer"] = {{"type", form}};
    EXPECT_EQ(encode(*parse_or_fail(tokenizer), "\u00E9"), (std::vector<TokenId>{'e', 0xCC, 0x81})) << form;
  }
}

TEST_F(Qwen2, text_is_split_as_the_pattern_says) {
  Result<SplitPattern> pattern = SplitPattern::compile(qwen2_pattern, PatternKind::Regex);
  ASSERT_TRUE(pattern) << pattern.error().message;
  const PreTokenizer pre_tokenizer({SplitStep{.pattern = *std::move(pattern)}});
  const Pieces pieces = *pre_tokenizer.apply("I'M here, 204!\n\n  x  (y) \u4F60\u597D\t", TextPosition::Start);
  std::vector<std::string> strings;
  for (const Span span : pieces.spans) strings.push_back(pieces.text.substr(span.begin, span.end - span.begin));
  EXPECT_EQ(strings, (std::vector<std::string>{"I", "'M", " here", ",", " ", "2", "0", "4", "!\n\n", " ", " x", " ", " (", "y",
                                               ")", " \u4F60\u597D", "\t"}));
  EXPECT_EQ(encode(*tokenizer_, "12"), (std::vector<TokenId>{'1', '2'}));
}

TEST_F(Qwen2, a_chat_comes_back_from_its_tokens) {
  const std::string chat = "<|im_start|>user\nhello world\n\n<|im_end|>\n";
  EXPECT_EQ(encode(*tokenizer_, chat, SpecialTokens::Parse, BeginToken::AsConfigured),
            (std::vector<TokenId>{turn_begin, 'u', 's', 'e', 'r', '\n', 259, 262, 'l', 'd', 263, turn_end, '\n'}));
  EXPECT_EQ(encode(*tokenizer_, "<think>hello<tool_call>"), (std::vector<TokenId>{think, 259, tool_call}));
  EXPECT_EQ(tokenizer_->end_token(), turn_end);
  EXPECT_EQ(tokenizer_->begin_token(), std::nullopt);
  for (const TokenId id : encode(*tokenizer_, chat, SpecialTokens::AsText)) EXPECT_FALSE(tokenizer_->is_special(id));
}

TEST_F(Qwen2, a_mark_behind_a_control_token_does_not_hide_it) {
  EXPECT_EQ(encode(*tokenizer_, "<|im_end|>\u0301"), (std::vector<TokenId>{turn_end, 0xCC, 0x81}));
}

TEST_F(Qwen2, random_text_decodes_to_its_composed_form) {
  const Normalizer nfc({UnicodeStep{UnicodeForm::Nfc}});
  constexpr std::uint64_t seed = 4;
  std::mt19937_64 random(seed);
  for (int round = 0; round < 2000; ++round) {
    const std::string text = random_text(random, 60);
    ASSERT_EQ(tokenizer_->decode(encode(*tokenizer_, text, SpecialTokens::AsText)), *nfc.apply(text, 1 << 20))
        << "seed " << seed << " round " << round;
  }
}

TEST_F(Qwen2, ascii_is_what_it_is_without_a_normalizer) {
  json without = qwen2_json();
  without["normalizer"] = nullptr;
  const auto plain = parse_or_fail(without, qwen2_config());
  std::string text;
  for (char c = 0; c < 0x7F; ++c) text.push_back(c);
  EXPECT_EQ(encode(*tokenizer_, text), encode(*plain, text));
  EXPECT_EQ(tokenizer_->decode(encode(*tokenizer_, text)), text);
}

}  // namespace
}  // namespace rubato::text
