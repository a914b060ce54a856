// SPDX-License-Identifier: Apache-2.0
// Text to tokens and back, from a Hugging Face tokenizer.json: byte-level BPE with the GPT-2 and Llama-3 split patterns, and BPE
// with byte fallback. Immutable after loading, so that every HTTP thread may use it at once.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "engine/tokens.h"
#include "manifests/result.h"

namespace rubato::text {

/// Whether text such as `<|eot_id|>` in the input becomes a control token. User content in a chat never does.
enum class SpecialTokens : std::uint8_t { AsText, Parse };
/// Whether what the tokenizer's own post-processor puts round a text is added: its begin token and, rarely, an end token. A text
/// that itself begins with the begin token does not get a second one.
enum class BeginToken : std::uint8_t { None, AsConfigured };

/// What a detokenizer's text follows. HF's decode drops a blank at the beginning of a text, which an answer to a prompt must
/// keep.
enum class TextStart : std::uint8_t { Beginning, Continuation };

/// The bytes of the files that describe a tokenizer.
struct TokenizerFiles {
  std::string_view tokenizer;                     // tokenizer.json
  std::optional<std::string_view> config;         // tokenizer_config.json
  std::optional<std::string_view> chat_template;  // chat_template.jinja, which wins over the config's
};

class Tokenizer {
 public:
  /// Reads tokenizer.json and, where present, tokenizer_config.json of folder. Errors name the file and the key; an unsupported
  /// model, normalizer, pre-tokenizer or decoder is refused here, never approximated.
  [[nodiscard]] static Result<std::unique_ptr<Tokenizer>> load(const std::filesystem::path& folder);
  /// The same from memory.
  [[nodiscard]] static Result<std::unique_ptr<Tokenizer>> parse(const TokenizerFiles& files);

  /// A tokenizer for synthetic models, which have no text: id n is the byte n for n < 256; higher ids decode to ` tn`. Encoding
  /// gives bytes; a byte that a vocabulary below 256 lacks is InvalidArgument. vocabulary >= 1.
  [[nodiscard]] static std::unique_ptr<Tokenizer> make_bytes(std::int32_t vocabulary);

  ~Tokenizer();
  Tokenizer(const Tokenizer&) = delete;
  Tokenizer& operator=(const Tokenizer&) = delete;

  /// text must be valid UTF-8 of at most 64 MiB (InvalidArgument otherwise). Linear in the text's length, and n log n within a
  /// piece that the pre-tokenizer does not cut.
  [[nodiscard]] Result<std::vector<TokenId>> encode(std::string_view text, SpecialTokens special, BeginToken begin) const;

  /// The whole text of ids at once, special tokens left out. Bytes that are no UTF-8 become U+FFFD. Unknown ids decode to
  /// nothing.
  [[nodiscard]] std::string decode(const std::vector<TokenId>& ids) const;

  [[nodiscard]] std::int32_t vocabulary() const;
  [[nodiscard]] std::optional<TokenId> id_of(std::string_view token) const;
  [[nodiscard]] bool is_special(TokenId id) const;
  /// The token as the `logprobs` fields show it: decoded bytes where they are UTF-8, else `bytes:\xNN`; special tokens as they
  /// are spelt. Unknown ids: empty.
  [[nodiscard]] std::string token_text(TokenId id) const;
  /// The raw bytes a token stands for; empty for special and unknown ids.
  [[nodiscard]] std::string token_bytes(TokenId id) const;
  [[nodiscard]] std::optional<TokenId> begin_token() const;
  [[nodiscard]] std::optional<TokenId> end_token() const;                 // tokenizer_config.json's eos_token
  [[nodiscard]] const std::optional<std::string>& chat_template() const;  // Jinja source, if the folder has one

 private:
  friend class Detokenizer;
  struct State;
  explicit Tokenizer(std::unique_ptr<const State> state);
  std::unique_ptr<const State> state_;
};

/// Decodes one output token by token and never emits half a UTF-8 character. One per choice; not thread-safe.
class Detokenizer {
 public:
  /// tokenizer must outlive it. By default the text is an answer that goes on from a prompt.
  explicit Detokenizer(const Tokenizer& tokenizer, TextStart start = TextStart::Continuation);

  /// Text that became certain with this token; often empty, never invalid UTF-8. Garbage is flushed as U+FFFD after at most 4
  /// bytes.
  [[nodiscard]] std::string push(TokenId id);
  /// What is still held back at the end: an incomplete character becomes one U+FFFD.
  [[nodiscard]] std::string finish();

 private:
  const Tokenizer& tokenizer_;
  std::string pending_;
  bool at_beginning_ = false;  // nothing that shows has come yet, and the tokenizer drops a leading blank
};

}  // namespace rubato::text
