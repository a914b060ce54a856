// SPDX-License-Identifier: Apache-2.0
// Text to tokens and back, from a Hugging Face tokenizer.json: byte-level BPE with the GPT-2 and Llama-3 split patterns, and BPE with byte
// fallback. Immutable after loading, so that every HTTP thread may use it at once.
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
/// Whether the tokenizer's own post-processor adds its begin token.
enum class BeginToken : std::uint8_t { None, AsConfigured };

class Tokenizer {
 public:
  /// Reads tokenizer.json and, where present, tokenizer_config.json of folder. Errors name the file and the key; an unsupported model,
  /// normalizer, pre-tokenizer or decoder is refused here, never approximated.
  [[nodiscard]] static Result<std::unique_ptr<Tokenizer>> load(const std::filesystem::path& folder);

  /// A tokenizer for synthetic models, which have no text: id n is the byte n for n < 256; higher ids decode to ` n`. Encoding gives bytes.
  [[nodiscard]] static std::unique_ptr<Tokenizer> make_bytes(std::int32_t vocabulary);

  ~Tokenizer();
  Tokenizer(const Tokenizer&) = delete;
  Tokenizer& operator=(const Tokenizer&) = delete;

  /// text must be valid UTF-8 (InvalidArgument otherwise). Linear in the text's length but for pieces of one pre-token; bounded for any input.
  [[nodiscard]] Result<std::vector<TokenId>> encode(std::string_view text, SpecialTokens special, BeginToken begin) const;

  /// The whole text of ids at once, special tokens left out. Bytes that are no UTF-8 become U+FFFD. Unknown ids decode to nothing.
  [[nodiscard]] std::string decode(const std::vector<TokenId>& ids) const;

  [[nodiscard]] std::int32_t vocabulary() const;
  [[nodiscard]] std::optional<TokenId> id_of(std::string_view token) const;
  [[nodiscard]] bool is_special(TokenId id) const;
  /// The token as the `logprobs` fields show it: decoded bytes where they are UTF-8, else `bytes:\xNN`. Unknown ids: empty.
  [[nodiscard]] std::string token_text(TokenId id) const;
  /// The raw bytes a token stands for; empty for special and unknown ids.
  [[nodiscard]] std::string token_bytes(TokenId id) const;
  [[nodiscard]] std::optional<TokenId> begin_token() const;
  [[nodiscard]] std::optional<TokenId> end_token() const;          // tokenizer_config.json's eos_token
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
  explicit Detokenizer(const Tokenizer& tokenizer);  // tokenizer must outlive it

  /// Text that became certain with this token; often empty, never invalid UTF-8. Garbage is flushed as U+FFFD after at most 4 bytes.
  [[nodiscard]] std::string push(TokenId id);
  /// What is still held back at the end: an incomplete character becomes one U+FFFD.
  [[nodiscard]] std::string finish();

 private:
  const Tokenizer& tokenizer_;
  std::string pending_;
  bool started_ = false;
};

}  // namespace rubato::text
