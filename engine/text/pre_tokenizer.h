// SPDX-License-Identifier: Apache-2.0
// What tokenizer.json's `pre_tokenizer` does: cuts normalised text into the pieces inside which byte pairs are merged.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "engine/text/split_pattern.h"
#include "manifests/result.h"

namespace rubato::text {

/// What becomes of a match of the pattern.
enum class SplitBehavior : std::uint8_t { Isolated, Removed, Contiguous, MergedWithPrevious, MergedWithNext };
/// Whether the pattern describes the separators or, inverted, the pieces.
enum class SplitSense : std::uint8_t { Matches, Gaps };

struct SplitStep {
  SplitPattern pattern;
  SplitBehavior behavior = SplitBehavior::Isolated;
  SplitSense sense = SplitSense::Matches;
};
/// A blank in front of every piece that does not begin with one (ByteLevel's add_prefix_space).
struct PrefixSpaceStep {};
/// SentencePiece's blanks: replaced by a visible character, and one put in front.
struct MetaspaceStep {
  enum class Prepend : std::uint8_t { Always, First, Never };
  std::string replacement;
  Prepend prepend = Prepend::Always;
};

/// Text and the pieces it is cut into, in order; bytes outside every span are dropped.
struct Pieces {
  std::string text;
  std::vector<Span> spans;
};
/// Where the text handed to the pre-tokenizer stands: Metaspace prepends to the first part of an input only.
enum class TextPosition : std::uint8_t { Start, Later };

class PreTokenizer {
 public:
  using Step = std::variant<SplitStep, PrefixSpaceStep, MetaspaceStep>;
  PreTokenizer() = default;
  explicit PreTokenizer(std::vector<Step> steps) : steps_(std::move(steps)) {}

  /// text is valid UTF-8. Fails only where a split pattern gives up (SplitMatcher) or the text grows beyond 4 GiB.
  [[nodiscard]] Result<Pieces> apply(std::string text, TextPosition position) const;

 private:
  std::vector<Step> steps_;
};

}  // namespace rubato::text
