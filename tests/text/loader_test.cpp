// SPDX-License-Identifier: Apache-2.0
// Files that must be refused, each with a message that names the place; and the spellings that must be accepted.
#include <unistd.h>

#include "tests/text/tokenizers.h"

namespace rubato::text {
namespace {

using nlohmann::json;

/// JSON pointer, what to put there, and a part of the message that must come.
struct Damage {
  std::string where;
  json value;
  std::string message;
};

void expect_refused(const json& good, const std::vector<Damage>& damages) {
  ASSERT_EQ(parse_error(good), "");
  for (const auto& [where, value, message] : damages) {
    json bad = good;
    bad[json::json_pointer(where)] = value;
    const std::string error = parse_error(bad);
    EXPECT_NE(error.find(message), std::string::npos) << where << " = " << value << " gave: " << error;
    EXPECT_EQ(error.rfind("tokenizer.json ", 0), 0u) << error;
  }
}

TEST(Loader, wrong_types_and_ranges_are_named) {
  expect_refused(byte_level_json(), {
                                        {"/model", 7, "expected an object, found number"},
                                        {"/model", nullptr, "member `model` is missing"},
                                        {"/model/vocab", json::array(), "model.vocab: expected an object"},
                                        {"/model/vocab", json::object(), "is empty"},
                                        {"/model/vocab/a", "x", "expected an integer, found string"},
                                        {"/model/vocab/a", -1, "outside 0.."},
                                        {"/model/vocab/a", 1.5, "expected an integer"},
                                        {"/model/vocab/a", 18446744073709551615ULL, "outside"},
                                        {"/model/vocab/a", 10'000'000, "far beyond"},
                                        {"/model/vocab/a", 98, "id 98 is both"},
                                        {"/model/merges", "a b", "expected a list"},
                                        {"/model/merges/0", 3, "model.merges[0]: expected a list"},
                                        {"/model/merges/0", "ab", "one blank between"},
                                        {"/model/merges/0", "a b c", "one blank between"},
                                        {"/model/merges/0", " a", "empty"},
                                        {"/model/merges/0", {"a"}, "expected two tokens"},
                                        {"/model/merges/0", {"a", "b", "c"}, "more than 2"},
                                        {"/model/merges/0", {"a", "nope"}, "`anope` is not in the vocabulary"},
                                        {"/model/dropout", 0.1, "model.dropout"},
                                        {"/model/unk_token", "<unk>", "`<unk>` is not in the vocabulary"},
                                        {"/model/continuing_subword_prefix", "##", "not supported"},
                                        {"/added_tokens", json::object(), "added_tokens: expected a list"},
                                        {"/added_tokens/0", {{"id", -4}, {"content", "x"}}, "outside"},
                                        {"/added_tokens/0", {{"id", 'a'}, {"content", "x"}}, "is both"},
                                        {"/added_tokens/0", {{"id", 400}, {"content", "a"}}, "two ids"},
                                        {"/added_tokens/0", {{"id", 400}, {"content", ""}}, "content is empty"},
                                    });
}

TEST(Loader, stages_that_are_not_built_are_refused_by_name) {
  expect_refused(
      byte_level_json(),
      {
          {"/model/type", "Unigram", "`Unigram` is not supported; supported is BPE"},
          {"/normalizer", {{"type", "Lowercase"}}, "normalizer.type: `Lowercase` is not supported"},
          {"/normalizer", {{"type", "Replace"}, {"pattern", {{"Regex", "a+"}}}, {"content", ""}}, "only literal patterns"},
          {"/normalizer", {{"type", "Replace"}, {"pattern", {{"String", ""}}}, {"content", ""}}, "the pattern is empty"},
          {"/pre_tokenizer/type", "BertPreTokenizer", "`BertPreTokenizer` is not supported"},
          {"/pre_tokenizer", {{"type", "Split"}, {"pattern", {{"Regex", "("}}}, {"behavior", "Isolated"}}, "does not compile"},
          {"/pre_tokenizer", {{"type", "Split"}, {"pattern", {{"Regex", "a"}}}, {"behavior", "Cut"}}, "`Cut` is none of"},
          {"/pre_tokenizer",
           {{"type", "Sequence"}, {"pretokenizers", {{{"type", "ByteLevel"}}, {{"type", "Digits"}}}}},
           "stands after ByteLevel"},
          {"/decoder", nullptr, "member `decoder` is missing"},
          {"/decoder/type", "WordPiece", "`WordPiece` is not supported"},
          {"/decoder", {{"type", "Strip"}, {"content", " "}, {"start", 1}, {"stop", 0}}, "after Fuse only"},
          {"/post_processor", {{"type", "BertProcessing"}}, "`BertProcessing` is not supported"},
          {"/post_processor",
           {{"type", "TemplateProcessing"},
            {"single", {{{"SpecialToken", {{"id", "<s>"}}}}, {{"Sequence", {{"id", "A"}}}}}},
            {"special_tokens", {{"<s>", {{"ids", {99999}}}}}}},
           "outside 0.."},
          {"/post_processor",
           {{"type", "TemplateProcessing"}, {"single", json::array()}, {"special_tokens", json::object()}},
           "missing from the template"},
      });
}

TEST(Loader, sequences_in_sequences_end_somewhere) {
  json stage = {{"type", "Prepend"}, {"prepend", "x"}};
  for (int depth = 0; depth < 40; ++depth) stage = {{"type", "Sequence"}, {"normalizers", {stage}}};
  json bad = byte_level_json();
  bad["normalizer"] = stage;
  EXPECT_NE(parse_error(bad).find("4 deep"), std::string::npos);
}

TEST(Loader, replacements_cannot_blow_a_text_up) {
  json blowing = byte_level_json();
  const json grow = {{"type", "Replace"}, {"pattern", {{"String", "a"}}}, {"content", std::string(64, 'a')}};
  blowing["normalizer"] = {{"type", "Sequence"}, {"normalizers", {grow, grow, grow, grow, grow, grow, grow, grow}}};
  const auto refused = parse_or_fail(blowing)->encode("a", SpecialTokens::AsText, BeginToken::None);
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code, ErrorCode::InvalidArgument);
}

TEST(Loader, bytes_that_are_no_json_are_refused) {
  for (const std::string& bytes : {std::string(), std::string("{"), std::string("null"), std::string("[]"),
                                   std::string("{\"model\":\"\xFF\"}"), std::string(100'000, '['), std::string(1, '\0')}) {
    const auto parsed = Tokenizer::parse({.tokenizer = bytes, .config = {}, .chat_template = {}});
    ASSERT_FALSE(parsed);
    EXPECT_EQ(parsed.error().code, ErrorCode::InvalidArgument);
  }
}

TEST(Loader, damaged_bytes_never_crash_it) {
  std::mt19937_64 random(8);
  const std::string good = byte_level_json().dump();
  int accepted = 0;
  for (int round = 0; round < 1500; ++round) {
    std::string bytes = good;
    for (std::uint64_t changes = 1 + random() % 3; changes > 0; --changes)
      bytes[random() % bytes.size()] = static_cast<char>(random() % 128);
    const auto parsed = Tokenizer::parse({.tokenizer = bytes, .config = {}, .chat_template = {}});
    if (!parsed) continue;
    ++accepted;
    (void)(*parsed)->encode("hello wor <x>", SpecialTokens::Parse, BeginToken::AsConfigured);
  }
  EXPECT_GT(accepted, 0);
}

TEST(Loader, both_spellings_of_merges_mean_the_same) {
  json pairs = byte_level_json();
  json strings = pairs;
  for (auto& merge : strings["model"]["merges"])
    merge = merge[0].get<std::string>().append(" ").append(merge[1].get<std::string>());
  strings["model"]["merges"].insert(strings["model"]["merges"].begin(), "#version: 0.2");
  const std::vector<TokenId> expected = {259, 262, 'l', 'd', 263};
  EXPECT_EQ(encode(*parse_or_fail(pairs), "hello world\n\n"), expected);
  EXPECT_EQ(encode(*parse_or_fail(strings), "hello world\n\n"), expected);
}

TEST(Loader, config_faults_are_named) {
  const json good = byte_fallback_json();
  EXPECT_NE(
      parse_error(good, {{"bos_token", "<nope>"}}).find("tokenizer_config.json bos_token: `<nope>` is not in the vocabulary"),
      std::string::npos);
  EXPECT_NE(parse_error(good, {{"eos_token", 3}}).find("eos_token"), std::string::npos);
  EXPECT_NE(parse_error(good, {{"add_bos_token", "yes"}, {"bos_token", "<s>"}}).find("expected true or false"),
            std::string::npos);
  EXPECT_NE(parse_error(good, {{"add_bos_token", true}}).find("names no such token"), std::string::npos);
  EXPECT_NE(parse_error(good, {{"chat_template", 1}}).find("expected a string"), std::string::npos);
}

TEST(Loader, chat_template_comes_as_text_as_a_named_list_or_as_a_file) {
  const json good = byte_fallback_json();
  EXPECT_EQ(parse_or_fail(good, {{"chat_template", "T"}})->chat_template(), "T");
  EXPECT_EQ(parse_or_fail(
                good, {{"chat_template", {{{"name", "tool_use"}, {"template", "U"}}, {{"name", "default"}, {"template", "D"}}}}})
                ->chat_template(),
            "D");
  const std::string bytes = good.dump();
  EXPECT_EQ(
      (*Tokenizer::parse({.tokenizer = bytes, .config = R"({"chat_template": "T"})", .chat_template = "J"}))->chat_template(),
      "J");
  EXPECT_EQ(parse_or_fail(good)->chat_template(), std::nullopt);
}

TEST(Loader, missing_folder_is_an_error_with_its_path) {
  const auto missing = Tokenizer::load("/nonexistent/model");
  ASSERT_FALSE(missing);
  EXPECT_NE(missing.error().message.find("/nonexistent/model/tokenizer.json"), std::string::npos);
}

TEST(Loader, error_from_a_folder_names_the_file) {
  const std::filesystem::path folder =
      std::filesystem::temp_directory_path() / ("rubato-tokenizer-" + std::to_string(::getpid()));
  std::filesystem::create_directories(folder);
  std::ofstream(folder / "tokenizer.json") << "{}";
  const auto refused = Tokenizer::load(folder);
  std::filesystem::remove_all(folder);
  ASSERT_FALSE(refused);
  EXPECT_NE(refused.error().message.find((folder / "tokenizer.json").string()), std::string::npos) << refused.error().message;
}

}  // namespace
}  // namespace rubato::text
