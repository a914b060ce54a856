// SPDX-License-Identifier: Apache-2.0
// Fuzz entry: arbitrary bytes as tokenizer.json, as text for small tokenizers of each kind, and as token ids to decode. What must
// hold beside not crashing: whole text and streamed text are equal and valid, and text survives a byte tokenizer.
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "engine/text/chat_template.h"
#include "engine/text/stop_matcher.h"
#include "engine/text/tokenizer.h"
#include "engine/text/utf8.h"
#include "manifests/check.h"

namespace rubato::text {
namespace {

// Byte fallback, an added token with every option, and a regex split.
constexpr std::string_view small_tokenizer = R"json({
  "added_tokens": [
    {"id": 0, "content": "<unk>", "special": true},
    {"id": 1, "content": "<s>", "special": true},
    {"id": 9, "content": "<w>", "special": false, "lstrip": true, "rstrip": true, "single_word": true, "normalized": true}],
  "normalizer": {"type": "Sequence", "normalizers": [
    {"type": "Prepend", "prepend": "_"}, {"type": "Replace", "pattern": {"String": " "}, "content": "_"}]},
  "pre_tokenizer": {"type": "Split", "pattern": {"Regex": "\\p{N}{1,3}|_?\\p{L}+|\\s+(?!\\S)"}, "behavior": "MergedWithNext"},
  "decoder": {"type": "Sequence", "decoders": [
    {"type": "Replace", "pattern": {"String": "_"}, "content": " "}, {"type": "ByteFallback"}, {"type": "Fuse"},
    {"type": "Strip", "content": " ", "start": 1, "stop": 0}]},
  "model": {"type": "BPE", "unk_token": "<unk>", "fuse_unk": true, "byte_fallback": true,
    "vocab": {"<unk>": 0, "<s>": 1, "_": 2, "a": 3, "b": 4, "_a": 5, "ab": 6, "_ab": 7, "<0x80>": 8},
    "merges": ["_ a", "a b", ["_a", "b"]]}})json";

void use(const Tokenizer& tokenizer, std::string_view text) {
  const bool valid = !find_invalid_utf8(text);
  for (const SpecialTokens special : {SpecialTokens::AsText, SpecialTokens::Parse}) {
    const Result<std::vector<TokenId>> ids = tokenizer.encode(text, special, BeginToken::AsConfigured);
    CHECK(valid || !ids);
    if (!ids) continue;
    for (const TokenId id : *ids) CHECK(id >= 0 && id < tokenizer.vocabulary(), "id ", id);
    CHECK(!find_invalid_utf8(tokenizer.decode(*ids)));
  }
  if (const Result<ChatForm> form = detect_chat_form(tokenizer)) {
    (void)render_chat(tokenizer, *form, {{"system", std::string(text)}, {"user", std::string(text)}});
  }
}

void stream(const Tokenizer& tokenizer, std::string_view bytes) {
  std::vector<TokenId> ids;
  for (const char raw : bytes) ids.push_back(static_cast<unsigned char>(raw));
  Detokenizer detokenizer(tokenizer, TextStart::Beginning);
  StopMatcher matcher({"ab", "\xC3\xA9", std::string(bytes.substr(0, 3)) + "x"});
  std::string streamed;
  std::string shown;
  for (const TokenId id : ids) {
    const std::string piece = detokenizer.push(id);
    CHECK(!find_invalid_utf8(piece));
    streamed += piece;
    shown += matcher.push(piece);
  }
  streamed += detokenizer.finish();
  CHECK(streamed == tokenizer.decode(ids));
  CHECK(streamed.starts_with(shown));
}

int run(const std::uint8_t* data, std::size_t size) {
  static const std::unique_ptr<Tokenizer> bytes_tokenizer = Tokenizer::make_bytes(256);
  static const std::unique_ptr<Tokenizer> fallback_tokenizer =
      *Tokenizer::parse({.tokenizer = small_tokenizer, .config = {}, .chat_template = {}});
  if (size == 0) return 0;
  const std::string_view input(reinterpret_cast<const char*>(data) + 1, size - 1);
  switch (data[0] % 3) {
    case 0: {
      const std::size_t cut = input.find('\0');  // what follows a NUL is tokenizer_config.json
      const bool both = cut != std::string_view::npos;
      const Result<std::unique_ptr<Tokenizer>> parsed =
          Tokenizer::parse({.tokenizer = input.substr(0, cut),
                            .config = both ? std::optional(input.substr(cut + 1)) : std::nullopt,
                            .chat_template = {}});
      if (parsed) use(**parsed, "hello <s> wor\xC3\xA9 12  \n");
      break;
    }
    case 1: {
      use(*fallback_tokenizer, input);
      const Result<std::vector<TokenId>> ids = bytes_tokenizer->encode(input, SpecialTokens::Parse, BeginToken::AsConfigured);
      if (ids) CHECK(bytes_tokenizer->decode(*ids) == input);
      break;
    }
    default:
      stream(*bytes_tokenizer, input);
      stream(*fallback_tokenizer, input);
  }
  return 0;
}

}  // namespace
}  // namespace rubato::text

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  return rubato::text::run(data, size);
}
