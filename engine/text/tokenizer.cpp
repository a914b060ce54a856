// SPDX-License-Identifier: Apache-2.0
// Runs the loaded parts: added tokens, normalizer, pre-tokenizer, merges one way; bytes and whole characters the other way.
#include "engine/text/tokenizer.h"

#include <fstream>
#include <system_error>

#include "engine/text/tokenizer_json.h"
#include "engine/text/tokenizer_parts.h"
#include "engine/text/utf8.h"
#include "manifests/check.h"

namespace rubato::text {
namespace {

constexpr std::size_t encode_bytes_max = 64u << 20;
constexpr std::uintmax_t tokenizer_bytes_max = 64u << 20;
constexpr std::uintmax_t config_bytes_max = 16u << 20;
constexpr std::uintmax_t chat_template_bytes_max = 1u << 20;
constexpr std::int32_t byte_count = 256;

Result<std::string> read_file(const std::filesystem::path& path, std::uintmax_t bytes_max) {
  std::error_code error;
  const std::uintmax_t size = std::filesystem::file_size(path, error);
  if (error) return unexpected(ErrorCode::InvalidArgument, path.string() + ": " + error.message());
  if (size > bytes_max) {
    return unexpected(ErrorCode::InvalidArgument,
                      path.string() + ": " + std::to_string(size) + " bytes, more than " + std::to_string(bytes_max));
  }
  std::ifstream file(path, std::ios::binary);
  std::string bytes(size, '\0');
  if (!file || !file.read(bytes.data(), static_cast<std::streamsize>(size))) {
    return unexpected(ErrorCode::InvalidArgument, path.string() + ": cannot be read");
  }
  return bytes;
}

/// Empty when there is no such file.
Result<std::optional<std::string>> read_optional(const std::filesystem::path& path, std::uintmax_t bytes_max) {
  std::error_code error;
  if (!std::filesystem::exists(path, error)) return std::optional<std::string>();
  Result<std::string> bytes = read_file(path, bytes_max);
  if (!bytes) return Unexpected(std::move(bytes).error());
  return std::optional<std::string>(*std::move(bytes));
}

Result<std::vector<TokenId>> encode_bytes(std::string_view text, std::int32_t vocabulary) {
  std::vector<TokenId> ids;
  ids.reserve(text.size());
  for (const char raw : text) {
    const TokenId id = static_cast<unsigned char>(raw);
    if (id >= vocabulary) {
      return unexpected(ErrorCode::InvalidArgument, "byte " + std::to_string(id) +
                                                        " of the text has no token: the model's vocabulary has " +
                                                        std::to_string(vocabulary) + " ids; send token ids instead");
    }
    ids.push_back(id);
  }
  return ids;
}

/// Text between control tokens: what is left for the normalizer, the pre-tokenizer and the model.
Result<void> encode_plain(const TokenizerParts& parts, std::string text, TextPosition position, std::vector<TokenId>& ids) {
  Result<Pieces> pieces = parts.pre_tokenizer.apply(std::move(text), position);
  if (!pieces) return Unexpected(std::move(pieces).error());
  for (const Span span : pieces->spans) {
    if (span.begin == span.end) continue;
    const std::string_view piece = std::string_view(pieces->text).substr(span.begin, span.end - span.begin);
    if (auto encoded = parts.bpe.encode(piece, ids); !encoded) return encoded;
  }
  return {};
}

Result<void> encode_normalized(const TokenizerParts& parts, std::string_view raw, SpecialTokens special, TextPosition position,
                               std::vector<TokenId>& ids) {
  Result<std::string> normalized = parts.normalizer.apply(raw, encode_bytes_max * 4);
  if (!normalized) return Unexpected(std::move(normalized).error());
  const AddedTokenMatcher& matcher = special == SpecialTokens::Parse ? parts.normalized_all : parts.normalized_text;
  if (matcher.empty()) return encode_plain(parts, *std::move(normalized), position, ids);
  for (const AddedPart& part : matcher.cut(*normalized)) {
    if (part.token) {
      ids.push_back(*part.token);
    } else {
      const TextPosition here = part.span.begin == 0 ? position : TextPosition::Later;
      if (auto done = encode_plain(parts, normalized->substr(part.span.begin, part.span.end - part.span.begin), here, ids);
          !done) {
        return done;
      }
    }
  }
  return {};
}

}  // namespace

Tokenizer::Tokenizer(std::unique_ptr<const State> state) : state_(std::move(state)) {}
Tokenizer::~Tokenizer() = default;

Result<std::unique_ptr<Tokenizer>> Tokenizer::parse(const TokenizerFiles& files) {
  Result<TokenizerParts> parts = parse_tokenizer(files);
  if (!parts) return Unexpected(std::move(parts).error());
  return std::unique_ptr<Tokenizer>(new Tokenizer(std::make_unique<const State>(State{*std::move(parts)})));
}

Result<std::unique_ptr<Tokenizer>> Tokenizer::load(const std::filesystem::path& folder) {
  Result<std::string> json = read_file(folder / "tokenizer.json", tokenizer_bytes_max);
  if (!json) return Unexpected(std::move(json).error());
  Result<std::optional<std::string>> config = read_optional(folder / "tokenizer_config.json", config_bytes_max);
  if (!config) return Unexpected(std::move(config).error());
  Result<std::optional<std::string>> chat = read_optional(folder / "chat_template.jinja", chat_template_bytes_max);
  if (!chat) return Unexpected(std::move(chat).error());
  Result<std::unique_ptr<Tokenizer>> tokenizer = parse({.tokenizer = *json, .config = *config, .chat_template = *chat});
  if (!tokenizer) {
    Error error = std::move(tokenizer).error();
    error.message = folder.string() + "/" + error.message;
    return Unexpected(std::move(error));
  }
  return tokenizer;
}

std::unique_ptr<Tokenizer> Tokenizer::make_bytes(std::int32_t vocabulary) {
  CHECK(vocabulary >= 1, "vocabulary=", vocabulary);
  TokenizerParts parts;
  parts.bytes_only = true;
  parts.vocabulary = vocabulary;
  return std::unique_ptr<Tokenizer>(new Tokenizer(std::make_unique<const State>(State{std::move(parts)})));
}

Result<std::vector<TokenId>> Tokenizer::encode(std::string_view text, SpecialTokens special, BeginToken begin) const {
  const TokenizerParts& parts = state_->parts;
  if (text.size() > encode_bytes_max) {
    return unexpected(ErrorCode::InvalidArgument,
                      "text of " + std::to_string(text.size()) + " bytes, more than the 64 MiB that can be tokenised");
  }
  if (const auto invalid = find_invalid_utf8(text)) {
    return unexpected(ErrorCode::InvalidArgument, "text is not valid UTF-8 at byte " + std::to_string(*invalid));
  }
  if (parts.bytes_only) return encode_bytes(text, parts.vocabulary);

  std::vector<TokenId> ids;
  ids.reserve(text.size() / 3 + 8);
  const AddedTokenMatcher& matcher = special == SpecialTokens::Parse ? parts.raw_all : parts.raw_text;
  for (const AddedPart& part : matcher.cut(text)) {
    if (part.token) {
      ids.push_back(*part.token);
      continue;
    }
    const TextPosition position = part.span.begin == 0 ? TextPosition::Start : TextPosition::Later;
    const std::string_view between = text.substr(part.span.begin, part.span.end - part.span.begin);
    if (auto done = encode_normalized(parts, between, special, position, ids); !done) return Unexpected(std::move(done).error());
  }
  if (begin == BeginToken::AsConfigured) {
    const bool has_begin = parts.begin && !ids.empty() && ids.front() == *parts.begin;
    if (!has_begin || parts.prefix != std::vector<TokenId>{*parts.begin}) {
      ids.insert(ids.begin(), parts.prefix.begin(), parts.prefix.end());
    }
    ids.insert(ids.end(), parts.suffix.begin(), parts.suffix.end());
  }
  return ids;
}

std::string Tokenizer::decode(const std::vector<TokenId>& ids) const {
  Detokenizer detokenizer(*this, TextStart::Beginning);
  std::string text;
  for (const TokenId id : ids) text += detokenizer.push(id);
  text += detokenizer.finish();
  return text;
}

std::int32_t Tokenizer::vocabulary() const {
  return state_->parts.vocabulary;
}

std::optional<TokenId> Tokenizer::id_of(std::string_view token) const {
  const auto found = state_->parts.ids.find(token);
  return found == state_->parts.ids.end() ? std::nullopt : std::optional<TokenId>(found->second);
}

bool Tokenizer::is_special(TokenId id) const {
  const TokenizerParts& parts = state_->parts;
  return !parts.bytes_only && parts.known(id) && parts.kinds[id] == TokenKind::Special;
}

std::string Tokenizer::token_bytes(TokenId id) const {
  const TokenizerParts& parts = state_->parts;
  if (!parts.known(id)) return {};
  if (!parts.bytes_only) return parts.bytes[id];
  return id < byte_count ? std::string(1, static_cast<char>(id)) : " t" + std::to_string(id);
}

std::string Tokenizer::token_text(TokenId id) const {
  const TokenizerParts& parts = state_->parts;
  if (is_special(id)) return parts.contents[id];
  std::string bytes = token_bytes(id);
  if (!find_invalid_utf8(bytes)) return bytes;
  constexpr std::string_view digits = "0123456789abcdef";
  std::string text = "bytes:";
  for (const char raw : bytes) {
    const auto byte = static_cast<unsigned char>(raw);
    text += "\\x";
    text += digits[byte >> 4];
    text += digits[byte & 15];
  }
  return text;
}

std::optional<TokenId> Tokenizer::begin_token() const {
  return state_->parts.begin;
}
std::optional<TokenId> Tokenizer::end_token() const {
  return state_->parts.end;
}
const std::optional<std::string>& Tokenizer::chat_template() const {
  return state_->parts.chat_template;
}

Detokenizer::Detokenizer(const Tokenizer& tokenizer, TextStart start)
    : tokenizer_(tokenizer),
      at_beginning_(start == TextStart::Beginning && tokenizer.state_->parts.decoder.leading_blank != LeadingBlank::Keep) {}

std::string Detokenizer::push(TokenId id) {
  const TokenizerParts& parts = tokenizer_.state_->parts;
  if (!parts.known(id) || tokenizer_.is_special(id)) return {};
  std::string bytes = tokenizer_.token_bytes(id);
  if (at_beginning_ && parts.decoder.leading_blank == LeadingBlank::DropOfFirstToken) {
    bytes = replace_all(parts.contents[id], parts.decoder.blank, "");
    at_beginning_ = false;
  } else if (at_beginning_ && !bytes.empty()) {
    if (bytes.front() == ' ') bytes.erase(0, 1);
    at_beginning_ = false;
  }
  pending_ += bytes;
  std::string text;
  take_characters(pending_, text);
  return text;
}

std::string Detokenizer::finish() {
  if (pending_.empty()) return {};
  pending_.clear();
  return "\xEF\xBF\xBD";
}

}  // namespace rubato::text
