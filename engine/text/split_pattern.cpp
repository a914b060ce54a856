// SPDX-License-Identifier: Apache-2.0
// PCRE2 with Unicode properties and its JIT compiler; match data lives on the caller's side of each call, so matching shares
// nothing.
#include "engine/text/split_pattern.h"

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

#include <array>

namespace rubato::text {
namespace {

// Far above what the patterns in use need for megabytes of blanks, and about a second of work for one that explodes.
constexpr std::uint32_t match_steps_max = 20'000'000;
constexpr std::uint32_t backtracking_memory_max_kib = 64 * 1024;

struct Memory {
  pcre2_match_data* match = pcre2_match_data_create(1, nullptr);
  pcre2_match_context* context = pcre2_match_context_create(nullptr);

  Memory() {
    if (context == nullptr) return;
    pcre2_set_match_limit(context, match_steps_max);
    pcre2_set_heap_limit(context, backtracking_memory_max_kib);
  }
  ~Memory() {
    pcre2_match_data_free(match);
    pcre2_match_context_free(context);
  }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;
};

std::string message_of(int code) {
  std::array<PCRE2_UCHAR, 256> buffer{};
  pcre2_get_error_message(code, buffer.data(), buffer.size());
  return reinterpret_cast<const char*>(buffer.data());
}

}  // namespace

Result<SplitPattern> SplitPattern::compile(std::string_view pattern, PatternKind kind) {
  // NO_UTF_CHECK is given per match instead: the pattern itself is checked here, the text once in Tokenizer::encode.
  const std::uint32_t options = PCRE2_UTF | (kind == PatternKind::Literal ? PCRE2_LITERAL : PCRE2_UCP | PCRE2_NEVER_BACKSLASH_C);
  int error = 0;
  PCRE2_SIZE offset = 0;
  pcre2_code* code =
      pcre2_compile(reinterpret_cast<PCRE2_SPTR>(pattern.data()), pattern.size(), options, &error, &offset, nullptr);
  if (code == nullptr) {
    return unexpected(ErrorCode::InvalidArgument, "regular expression does not compile at byte " + std::to_string(offset) + ": " +
                                                      message_of(error) + ": " + std::string(pattern));
  }
  pcre2_jit_compile(code,
                    PCRE2_JIT_COMPLETE);  // without the JIT (or memory for it) pcre2_match interprets, with the same results
  return SplitPattern(std::shared_ptr<void>(code, [](void* held) { pcre2_code_free(static_cast<pcre2_code*>(held)); }));
}

SplitMatcher::SplitMatcher(const SplitPattern& pattern) : pattern_(pattern), memory_(new Memory) {}

void SplitMatcher::Free::operator()(void* held) const {
  delete static_cast<Memory*>(held);
}

Result<void> SplitMatcher::find_all(std::string_view text, Span span, std::vector<Span>& matches) {
  const auto* code = static_cast<const pcre2_code*>(pattern_.code_.get());
  const auto& [match, context] = *static_cast<const Memory*>(memory_.get());
  if (match == nullptr || context == nullptr) return unexpected(ErrorCode::Internal, "no memory for matching a split pattern");
  const auto* subject = reinterpret_cast<PCRE2_SPTR>(text.data() + span.begin);
  const PCRE2_SIZE length = span.end - span.begin;
  const PCRE2_SIZE* ends = pcre2_get_ovector_pointer(match);
  PCRE2_SIZE from = 0;
  while (from < length) {
    int found = pcre2_match(code, subject, length, from, PCRE2_NO_UTF_CHECK | PCRE2_NOTEMPTY, match, context);
    if (found == PCRE2_ERROR_JIT_STACKLIMIT) {
      // The JIT's stack is fixed and small; the interpreter takes heap up to the limit above.
      found = pcre2_match(code, subject, length, from, PCRE2_NO_UTF_CHECK | PCRE2_NOTEMPTY | PCRE2_NO_JIT, match, context);
    }
    if (found == PCRE2_ERROR_NOMATCH) break;
    if (found < 0) {
      return unexpected(ErrorCode::InvalidArgument,
                        "the tokenizer's split pattern cannot be applied to this text: " + message_of(found));
    }
    if (ends[1] <= from) {  // \K or look-behind tricks: a match that does not move on
      return unexpected(ErrorCode::InvalidArgument, "the tokenizer's split pattern matches backwards in this text");
    }
    const PCRE2_SIZE begin = ends[0] < from ? from : ends[0];
    matches.push_back({span.begin + static_cast<std::uint32_t>(begin), span.begin + static_cast<std::uint32_t>(ends[1])});
    from = ends[1];
  }
  return {};
}

}  // namespace rubato::text
