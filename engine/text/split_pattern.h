// SPDX-License-Identifier: Apache-2.0
// A compiled regular expression that cuts text into matches and the gaps between them. The only place that knows PCRE2.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "manifests/result.h"

namespace rubato::text {

/// Bytes [begin, end) of a text; texts stay below 4 GiB (checked by Tokenizer::encode).
struct Span {
  std::uint32_t begin = 0;
  std::uint32_t end = 0;

  friend bool operator==(const Span&, const Span&) = default;
};

enum class PatternKind : std::uint8_t { Regex, Literal };

/// Immutable after compile; any number of threads may match at once, each with a SplitMatcher of its own.
class SplitPattern {
 public:
  [[nodiscard]] static Result<SplitPattern> compile(std::string_view pattern, PatternKind kind);

 private:
  friend class SplitMatcher;
  explicit SplitPattern(std::shared_ptr<void> code) : code_(std::move(code)) {}
  std::shared_ptr<void> code_;  // pcre2_code, read only
};

/// The working memory of one thread that matches. pattern must outlive it.
class SplitMatcher {
 public:
  explicit SplitMatcher(const SplitPattern& pattern);

  /// Every non-empty match inside span of text, left to right, appended to matches. Look-around ends at the span's borders. text
  /// is valid UTF-8 and span's ends are at character borders. InvalidArgument when the pattern needs more steps than the fixed
  /// limit.
  [[nodiscard]] Result<void> find_all(std::string_view text, Span span, std::vector<Span>& matches);

 private:
  struct Free {
    void operator()(void* held) const;
  };
  const SplitPattern& pattern_;
  std::unique_ptr<void, Free> memory_;  // pcre2_match_data and pcre2_match_context
};

}  // namespace rubato::text
