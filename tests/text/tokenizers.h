// SPDX-License-Identifier: Apache-2.0
// Tokenizers for the text tests: the real ones from shared/data, and small ones written out where a rule needs a vocabulary of
// its own.
#pragma once

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <memory>
#include <nlohmann/json.hpp>
#include <random>
#include <sstream>
#include <string>
#include <vector>

#include "engine/text/byte_alphabet.h"
#include "engine/text/tokenizer.h"
#include "engine/text/utf8.h"

namespace rubato::text {

inline std::filesystem::path data_folder() {
  return std::filesystem::path(RUBATO_SOURCE_DIR) / "../shared/data/models";
}

inline std::string read_text(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  std::ostringstream bytes;
  bytes << file.rdbuf();
  return bytes.str();
}

/// Loads a folder of shared/data; the caller skips when it is absent.
inline std::unique_ptr<Tokenizer> load_data(const std::string& name) {
  Result<std::unique_ptr<Tokenizer>> tokenizer = Tokenizer::load(data_folder() / name);
  EXPECT_TRUE(tokenizer.has_value()) << (tokenizer ? "" : tokenizer.error().message);
  return tokenizer ? *std::move(tokenizer) : nullptr;
}

#define SKIP_WITHOUT(name) \
  if (!std::filesystem::exists(data_folder() / (name) / "tokenizer.json")) GTEST_SKIP() << "no " << data_folder() / (name)

inline std::unique_ptr<Tokenizer> parse_or_fail(const nlohmann::json& tokenizer, const nlohmann::json& config = nullptr) {
  const std::string json = tokenizer.dump();
  const std::string config_json = config.dump();
  Result<std::unique_ptr<Tokenizer>> parsed =
      Tokenizer::parse({.tokenizer = json,
                        .config = config.is_null() ? std::nullopt : std::optional<std::string_view>(config_json),
                        .chat_template = {}});
  EXPECT_TRUE(parsed.has_value()) << (parsed ? "" : parsed.error().message);
  return parsed ? *std::move(parsed) : nullptr;
}

inline std::string parse_error(const nlohmann::json& tokenizer, const nlohmann::json& config = nullptr) {
  const std::string json = tokenizer.dump();
  const std::string config_json = config.dump();
  Result<std::unique_ptr<Tokenizer>> parsed =
      Tokenizer::parse({.tokenizer = json,
                        .config = config.is_null() ? std::nullopt : std::optional<std::string_view>(config_json),
                        .chat_template = {}});
  return parsed ? "" : parsed.error().message;
}

inline nlohmann::json added(TokenId id, const std::string& content, bool special) {
  return {{"id", id},        {"content", content},  {"single_word", false}, {"lstrip", false},
          {"rstrip", false}, {"normalized", false}, {"special", special}};
}

/// Byte-level: the 256 bytes as ids 0..255 and a few merges above; add control tokens to its added_tokens from id 300 on.
inline nlohmann::json byte_level_json() {
  nlohmann::json vocabulary = nlohmann::json::object();
  for (int byte = 0; byte < 256; ++byte) vocabulary[piece_of_bytes(std::string(1, static_cast<char>(byte)))] = byte;
  nlohmann::json merges = nlohmann::json::array();
  int next = 256;
  for (const auto& [left, right] : std::vector<std::pair<std::string, std::string>>{
           {"h", "e"}, {"l", "l"}, {"he", "ll"}, {"hell", "o"}, {"Ġ", "w"}, {"o", "r"}, {"Ġw", "or"}, {"Ċ", "Ċ"}}) {
    vocabulary[left + right] = next++;
    merges.push_back({left, right});
  }
  return {{"version", "1.0"},
          {"added_tokens", nlohmann::json::array()},
          {"normalizer", nullptr},
          {"pre_tokenizer", {{"type", "ByteLevel"}, {"add_prefix_space", false}, {"use_regex", true}}},
          {"post_processor", nullptr},
          {"decoder", {{"type", "ByteLevel"}}},
          {"model", {{"type", "BPE"}, {"vocab", vocabulary}, {"merges", merges}}}};
}

/// SentencePiece style with byte fallback: <unk> <s> </s>, 256 byte pieces, then characters and merges.
inline nlohmann::json byte_fallback_json() {
  nlohmann::json vocabulary = {{"<unk>", 0}, {"<s>", 1}, {"</s>", 2}};
  int next = 3;
  const std::string digits = "0123456789ABCDEF";
  for (unsigned byte = 0; byte < 256; ++byte)
    vocabulary[std::string("<0x") + digits[byte >> 4] + digits[byte & 15] + ">"] = next++;
  for (const char* piece : {"▁", "a", "b", "c", "▁a", "▁ab"}) vocabulary[piece] = next++;
  const nlohmann::json blank = {{"String", "▁"}};
  return {
      {"added_tokens", {added(0, "<unk>", true), added(1, "<s>", true), added(2, "</s>", true)}},
      {"normalizer",
       {{"type", "Sequence"},
        {"normalizers",
         {{{"type", "Prepend"}, {"prepend", "▁"}}, {{"type", "Replace"}, {"pattern", {{"String", " "}}}, {"content", "▁"}}}}}},
      {"pre_tokenizer", nullptr},
      {"post_processor", nullptr},
      {"decoder",
       {{"type", "Sequence"},
        {"decoders",
         {{{"type", "Replace"}, {"pattern", blank}, {"content", " "}},
          {{"type", "ByteFallback"}},
          {{"type", "Fuse"}},
          {{"type", "Strip"}, {"content", " "}, {"start", 1}, {"stop", 0}}}}}},
      {"model",
       {{"type", "BPE"},
        {"unk_token", "<unk>"},
        {"fuse_unk", true},
        {"byte_fallback", true},
        {"vocab", vocabulary},
        {"merges", {"▁ a", "▁a b"}}}}};
}

inline std::vector<TokenId> encode(const Tokenizer& tokenizer, std::string_view text,
                                   SpecialTokens special = SpecialTokens::Parse, BeginToken begin = BeginToken::None) {
  Result<std::vector<TokenId>> ids = tokenizer.encode(text, special, begin);
  EXPECT_TRUE(ids.has_value()) << (ids ? "" : ids.error().message);
  return ids ? *std::move(ids) : std::vector<TokenId>{};
}

/// Valid UTF-8 of up to characters_max characters from all planes, with plenty of blanks and ASCII.
inline std::string random_text(std::mt19937_64& random, int characters_max) {
  std::string text;
  const int count = std::uniform_int_distribution<int>(0, characters_max)(random);
  for (int index = 0; index < count; ++index) {
    const auto below = [&](std::uint32_t limit) { return std::uniform_int_distribution<std::uint32_t>(0, limit - 1)(random); };
    char32_t c = 0;
    switch (below(7)) {
      case 0:
        c = " \t\n\r"[below(4)];
        break;
      case 1:
      case 2:
        c = 'a' + below(26);
        break;
      case 3:
        c = below(0x80);
        break;
      case 4:
        c = 0x80 + below(0x780);
        break;
      case 5:
        c = 0x800 + below(0xF800 - 0x800 + 0x800);
        break;
      default:
        c = 0x10000 + below(0x100000);
    }
    if (c >= 0xD800 && c <= 0xDFFF) c = 0x1F600;
    append_utf8(text, c);
  }
  return text;
}

}  // namespace rubato::text
