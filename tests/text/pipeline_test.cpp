// SPDX-License-Identifier: Apache-2.0
// The stages before the model: split behaviours, blanks, added tokens with their options, begin and end tokens.
#include "engine/text/added_tokens.h"
#include "engine/text/pre_tokenizer.h"
#include "tests/text/tokenizers.h"

namespace rubato::text {
namespace {

std::vector<std::string> strings_of(const Pieces& pieces) {
  std::vector<std::string> strings;
  for (const Span span : pieces.spans) strings.push_back(pieces.text.substr(span.begin, span.end - span.begin));
  return strings;
}

std::vector<std::string> split(const std::string& text, SplitBehavior behavior, SplitSense sense = SplitSense::Matches) {
  Result<SplitPattern> pattern = SplitPattern::compile("-", PatternKind::Literal);
  const PreTokenizer pre_tokenizer({SplitStep{.pattern = *std::move(pattern), .behavior = behavior, .sense = sense}});
  return strings_of(*pre_tokenizer.apply(text, TextPosition::Start));
}

using Strings = std::vector<std::string>;

TEST(PreTokenizer, separators_go_where_the_behavior_says) {
  const std::string text = "the-final--countdown";
  EXPECT_EQ(split(text, SplitBehavior::Removed), (Strings{"the", "final", "countdown"}));
  EXPECT_EQ(split(text, SplitBehavior::Isolated), (Strings{"the", "-", "final", "-", "-", "countdown"}));
  EXPECT_EQ(split(text, SplitBehavior::MergedWithPrevious), (Strings{"the-", "final-", "-", "countdown"}));
  EXPECT_EQ(split(text, SplitBehavior::MergedWithNext), (Strings{"the", "-final", "-", "-countdown"}));
  EXPECT_EQ(split(text, SplitBehavior::Contiguous), (Strings{"the", "-", "final", "--", "countdown"}));
  EXPECT_EQ(split("-a-", SplitBehavior::MergedWithNext), (Strings{"-a", "-"}));
  EXPECT_EQ(split("-a-", SplitBehavior::MergedWithPrevious), (Strings{"-", "a-"}));
  EXPECT_EQ(split(text, SplitBehavior::Removed, SplitSense::Gaps), (Strings{"-", "-", "-"}));
}

TEST(PreTokenizer, metaspace_prepends_at_the_start_of_an_input_only_when_first) {
  const auto run = [](MetaspaceStep::Prepend prepend, TextPosition position) {
    return strings_of(*PreTokenizer({MetaspaceStep{.replacement = "_", .prepend = prepend}}).apply("a b", position));
  };
  EXPECT_EQ(run(MetaspaceStep::Prepend::Always, TextPosition::Later), Strings{"_a_b"});
  EXPECT_EQ(run(MetaspaceStep::Prepend::First, TextPosition::Start), Strings{"_a_b"});
  EXPECT_EQ(run(MetaspaceStep::Prepend::First, TextPosition::Later), Strings{"a_b"});
  EXPECT_EQ(run(MetaspaceStep::Prepend::Never, TextPosition::Start), Strings{"a_b"});
}

TEST(PreTokenizer, byte_level_prefix_space_is_added_once) {
  nlohmann::json json = byte_level_json();
  json["pre_tokenizer"]["add_prefix_space"] = true;
  const auto tokenizer = parse_or_fail(json);
  EXPECT_EQ(encode(*tokenizer, "wor"), std::vector<TokenId>{262});
  EXPECT_EQ(encode(*tokenizer, " wor"), std::vector<TokenId>{262});
}

TEST(PreTokenizer, digits_split_alone_or_as_runs) {
  nlohmann::json json = byte_level_json();
  for (const bool each : {true, false}) {
    json["pre_tokenizer"] = {{"type", "Sequence"},
                             {"pretokenizers",
                              {{{"type", "Digits"}, {"individual_digits", each}},
                               {{"type", "ByteLevel"}, {"add_prefix_space", false}, {"use_regex", false}}}}};
    json["model"]["vocab"]["12"] = 264;
    json["model"]["merges"] = {"1 2"};
    EXPECT_EQ(encode(*parse_or_fail(json), "a12"),
              each ? (std::vector<TokenId>{'a', '1', '2'}) : (std::vector<TokenId>{'a', 264}));
  }
}

TEST(SplitPattern, a_pattern_that_explodes_is_stopped_with_an_error) {
  Result<SplitPattern> pattern = SplitPattern::compile("(a|aa|aaa)*[bc]", PatternKind::Regex);
  ASSERT_TRUE(pattern);
  SplitMatcher matcher(*pattern);
  std::vector<Span> matches;
  const std::string text(60, 'a');
  const Result<void> refused = matcher.find_all(text, {0, 60}, matches);
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code, ErrorCode::InvalidArgument);
}

Strings cut(const std::vector<AddedToken>& tokens, const std::string& text) {
  AddedTokenMatcher matcher;
  for (const AddedToken& token : tokens) matcher.insert(token, token.content);
  Strings parts;
  for (const AddedPart& part : matcher.cut(text)) {
    const std::string piece = text.substr(part.span.begin, part.span.end - part.span.begin);
    parts.push_back(part.token ? std::to_string(*part.token) + ":" + piece : piece);
  }
  return parts;
}

TEST(AddedTokens, leftmost_wins_and_of_those_the_longest) {
  EXPECT_EQ(cut({{.id = 1, .content = "<a>"}, {.id = 2, .content = "<a><b>"}}, "x<a><b><a>y"),
            (Strings{"x", "2:<a><b>", "1:<a>", "y"}));
  EXPECT_EQ(cut({{.id = 1, .content = "abc"}, {.id = 2, .content = "bcd"}}, "abcd"), (Strings{"1:abc", "d"}));
}

TEST(AddedTokens, strip_options_take_the_blanks_beside_the_token) {
  EXPECT_EQ(cut({{.id = 1, .content = "<m>", .lstrip = true}}, "a \t<m> b"), (Strings{"a", "1: \t<m>", " b"}));
  EXPECT_EQ(cut({{.id = 1, .content = "<m>", .rstrip = true}}, "a <m> \xC2\xA0 b"), (Strings{"a ", "1:<m> \xC2\xA0 ", "b"}));
  EXPECT_EQ(cut({{.id = 1, .content = "<m>", .lstrip = true, .rstrip = true}}, "<m>  <m>"), (Strings{"1:<m>  ", "1:<m>"}))
      << "blanks already taken are not taken again";
}

TEST(AddedTokens, single_word_is_not_found_inside_a_word) {
  const AddedToken token{.id = 1, .content = "my", .single_word = true};
  EXPECT_EQ(cut({token}, "my army, my-self émy my"), (Strings{"1:my", " army, ", "1:my", "-self émy ", "1:my"}));
}

TEST(AddedTokens, control_tokens_come_from_text_only_when_asked) {
  nlohmann::json json = byte_level_json();
  json["added_tokens"] = {added(300, "<|im_end|>", false), added(301, "<|stop|>", true), added(302, "<word>", false)};
  const auto tokenizer = parse_or_fail(json);
  EXPECT_EQ(encode(*tokenizer, "<|im_end|><|stop|><word>", SpecialTokens::Parse), (std::vector<TokenId>{300, 301, 302}));
  const std::vector<TokenId> as_text = encode(*tokenizer, "<|im_end|><|stop|><word>", SpecialTokens::AsText);
  EXPECT_EQ(std::count(as_text.begin(), as_text.end(), 300), 0) << "a turn marker is one whatever its flag says";
  EXPECT_EQ(std::count(as_text.begin(), as_text.end(), 301), 0);
  EXPECT_EQ(as_text.back(), 302) << "a word that finetuning added is text";
  EXPECT_EQ(tokenizer->decode(as_text), "<|im_end|><|stop|><word>");
  EXPECT_TRUE(tokenizer->is_special(300));
  EXPECT_FALSE(tokenizer->is_special(302));
}

TEST(AddedTokens, normalized_tokens_are_searched_in_normalized_text) {
  nlohmann::json json = byte_fallback_json();
  nlohmann::json token = added(300, "<x y>", false);
  token["normalized"] = true;
  json["added_tokens"].push_back(token);
  const auto tokenizer = parse_or_fail(json);
  const std::vector<TokenId> ids = encode(*tokenizer, "<x y>");  // the normalizer makes ▁<x▁y> of both
  EXPECT_EQ(ids, std::vector<TokenId>{300});
}

TEST(BeginToken, is_added_exactly_once) {
  nlohmann::json json = byte_fallback_json();
  json["post_processor"] = {
      {"type", "TemplateProcessing"},
      {"single", {{{"SpecialToken", {{"id", "<s>"}, {"type_id", 0}}}}, {{"Sequence", {{"id", "A"}, {"type_id", 0}}}}}},
      {"special_tokens", {{"<s>", {{"id", "<s>"}, {"ids", {1}}, {"tokens", {"<s>"}}}}}}};
  const nlohmann::json config = {{"bos_token", "<s>"}, {"eos_token", {{"content", "</s>"}}}, {"add_bos_token", true}};
  const auto tokenizer = parse_or_fail(json, config);
  EXPECT_EQ(tokenizer->begin_token(), 1);
  EXPECT_EQ(tokenizer->end_token(), 2);
  const TokenId ab = tokenizer->id_of("▁ab").value();
  EXPECT_EQ(encode(*tokenizer, "ab", SpecialTokens::Parse, BeginToken::AsConfigured), (std::vector<TokenId>{1, ab}));
  EXPECT_EQ(encode(*tokenizer, "<s>ab", SpecialTokens::Parse, BeginToken::AsConfigured), (std::vector<TokenId>{1, ab}));
  EXPECT_EQ(encode(*tokenizer, "ab", SpecialTokens::Parse, BeginToken::None), std::vector<TokenId>{ab});
  EXPECT_EQ(encode(*tokenizer, "", SpecialTokens::Parse, BeginToken::AsConfigured), std::vector<TokenId>{1});
  EXPECT_EQ(encode(*tokenizer, "", SpecialTokens::Parse, BeginToken::None), std::vector<TokenId>{});
}

TEST(BeginToken, flags_of_the_config_win_over_the_post_processor) {
  nlohmann::json json = byte_fallback_json();
  const nlohmann::json config = {{"bos_token", "<s>"}, {"eos_token", "</s>"}, {"add_bos_token", true}, {"add_eos_token", true}};
  const TokenId ab = 3 + 256 + 5;
  EXPECT_EQ(encode(*parse_or_fail(json, config), "ab", SpecialTokens::Parse, BeginToken::AsConfigured),
            (std::vector<TokenId>{1, ab, 2}));
  json["post_processor"] = {{"type", "TemplateProcessing"},
                            {"single", {{{"SpecialToken", {{"id", "<s>"}}}}, {{"Sequence", {{"id", "A"}}}}}},
                            {"special_tokens", {{"<s>", {{"ids", {1}}}}}}};
  EXPECT_EQ(encode(*parse_or_fail(json, {{"bos_token", "<s>"}, {"add_bos_token", false}}), "ab", SpecialTokens::Parse,
                   BeginToken::AsConfigured),
            std::vector<TokenId>{ab});
  EXPECT_EQ(encode(*parse_or_fail(json), "ab", SpecialTokens::Parse, BeginToken::AsConfigured), (std::vector<TokenId>{1, ab}));
}

}  // namespace
}  // namespace rubato::text
