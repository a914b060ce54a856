// SPDX-License-Identifier: Apache-2.0
// What tokenizer.json's `normalizer` does to text before it is cut into pieces: prepend and replace, as SentencePiece conversions
// need, and Unicode's normalization forms, as Qwen needs.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "manifests/result.h"

namespace rubato::text {

/// Put in front of every text that is not empty.
struct PrependStep {
  std::string prefix;
};
/// Every occurrence of a literal string, left to right without overlap. pattern is not empty.
struct ReplaceStep {
  std::string pattern;
  std::string content;
};

/// Unicode's normalization forms (UAX 15): canonical or compatibility, composed or decomposed.
enum class UnicodeForm : std::uint8_t { Nfc, Nfd, Nfkc, Nfkd };
struct UnicodeStep {
  UnicodeForm form = UnicodeForm::Nfc;
};

class Normalizer {
 public:
  using Step = std::variant<PrependStep, ReplaceStep, UnicodeStep>;
  Normalizer() = default;
  explicit Normalizer(std::vector<Step> steps) : steps_(std::move(steps)) {}

  [[nodiscard]] bool empty() const { return steps_.empty(); }
  /// InvalidArgument when the steps make the text larger than bytes_max, or when it piles up more combining marks than any script
  /// does. text is valid UTF-8.
  [[nodiscard]] Result<std::string> apply(std::string_view text, std::size_t bytes_max) const;

 private:
  std::vector<Step> steps_;
};

/// text with every pattern replaced; pattern is not empty.
[[nodiscard]] std::string replace_all(std::string_view text, std::string_view pattern, std::string_view content);

}  // namespace rubato::text
