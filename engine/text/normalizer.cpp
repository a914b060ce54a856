// SPDX-License-Identifier: Apache-2.0
// utf8proc knows the characters: how each decomposes, which pairs compose. Text goes through in groups that no rule of Unicode
// joins, so that memory does not grow with it, and marks are put in order here: utf8proc takes quadratic time over a long pile of
// them.
#include "engine/text/normalizer.h"

#include <utf8proc.h>

#include <algorithm>
#include <array>
#include <span>
#include <utility>

#include "engine/text/utf8.h"

namespace rubato::text {
namespace {

using CodePoint = utf8proc_int32_t;

constexpr std::size_t group_max = 64 * 1024;   // code points; real scripts need a dozen
constexpr std::size_t decomposition_max = 32;  // code points of one character; Unicode's longest takes 18

Unexpected too_long(std::string_view text) {
  return unexpected(ErrorCode::InvalidArgument,
                    "text of " + std::to_string(text.size()) + " bytes is too long for the tokenizer's normalizer");
}

utf8proc_option_t options_of(UnicodeForm form) {
  const bool composes = form == UnicodeForm::Nfc || form == UnicodeForm::Nfkc;
  const bool compatibility = form == UnicodeForm::Nfkc || form == UnicodeForm::Nfkd;
  return static_cast<utf8proc_option_t>(UTF8PROC_STABLE | (composes ? UTF8PROC_COMPOSE : UTF8PROC_DECOMPOSE) |
                                        (compatibility ? UTF8PROC_COMPAT : 0));
}

utf8proc_propval_t combining_class(CodePoint code_point) {
  return utf8proc_get_property(code_point)->combining_class;
}

/// Whether a decomposed code point is neither reordered nor composed with what stands before it. Those that are: marks, and the
/// vowels and final consonants of Hangul.
bool begins_group(CodePoint code_point) {
  // An old vowel just below the final consonants. Nothing joins it, but utf8proc 2.8 takes it for the absent final and drops it.
  if (code_point == 0x11A7) return true;
  const utf8proc_property_t& property = *utf8proc_get_property(code_point);
  const bool mark = property.category == UTF8PROC_CATEGORY_MN || property.category == UTF8PROC_CATEGORY_MC ||
                    property.category == UTF8PROC_CATEGORY_ME;
  const bool joins_syllable = property.boundclass == UTF8PROC_BOUNDCLASS_V || property.boundclass == UTF8PROC_BOUNDCLASS_T;
  return property.combining_class == 0 && !mark && !joins_syllable;
}

/// Marks between two code points of class 0 in the order of their classes; equal ones stay as they are.
void put_marks_in_order(std::span<CodePoint> group) {
  const auto is_starter = [](CodePoint code_point) { return combining_class(code_point) == 0; };
  for (auto from = group.begin(); from != group.end();) {
    from = std::find_if_not(from, group.end(), is_starter);
    const auto to = std::find_if(from, group.end(), is_starter);
    std::stable_sort(from, to, [](CodePoint a, CodePoint b) { return combining_class(a) < combining_class(b); });
    from = to;
  }
}

/// Brings one text into a form.
class FormWriter {
 public:
  FormWriter(UnicodeForm form, std::string_view text, std::size_t bytes_max)
      : options_(options_of(form)), text_(text), bytes_max_(bytes_max) {}

  Result<std::string> write() && {
    out_.reserve(text_.size());
    for (std::size_t offset = 0; offset < text_.size();) {
      if (const std::size_t ascii = leading_ascii(text_.substr(offset)); ascii > 0) {
        // Each begins a group of its own, and marks can follow the last only.
        if (auto done = finish_group(); !done) return Unexpected(std::move(done).error());
        out_ += text_.substr(offset, ascii - 1);
        group_.push_back(text_[offset + ascii - 1]);
        offset += ascii;
        continue;
      }
      const Character character = character_at(text_, offset);
      if (auto done = push(character.code_point, offset); !done) return Unexpected(std::move(done).error());
      offset += character.size_bytes;
    }
    if (auto done = finish_group(); !done) return Unexpected(std::move(done).error());
    return std::move(out_);
  }

 private:
  Result<void> push(char32_t code_point, std::size_t offset) {
    std::array<CodePoint, decomposition_max> decomposed{};
    int last_bound_class = 0;
    const utf8proc_ssize_t size = utf8proc_decompose_char(static_cast<CodePoint>(code_point), decomposed.data(),
                                                          decomposed.size(), options_, &last_bound_class);
    if (size < 0 || std::cmp_greater(size, decomposed.size())) {
      return unexpected(ErrorCode::InvalidArgument, "text cannot be normalized at byte " + std::to_string(offset) + ": " +
                                                        utf8proc_errmsg(size < 0 ? size : UTF8PROC_ERROR_OVERFLOW));
    }
    for (const CodePoint part : std::span(decomposed).first(static_cast<std::size_t>(size))) {
      if (begins_group(part)) {
        if (auto done = finish_group(); !done) return done;
      } else if (group_.size() == group_max) {
        return unexpected(ErrorCode::InvalidArgument, "text has more than " + std::to_string(group_max) +
                                                          " combining marks in a row before byte " + std::to_string(offset));
      }
      group_.push_back(part);
    }
    return {};
  }

  /// Orders, composes and writes the group.
  Result<void> finish_group() {
    utf8proc_ssize_t size = std::ssize(group_);
    if (size > 1) {
      put_marks_in_order(group_);
      size = utf8proc_normalize_utf32(group_.data(), size, options_);
      if (size < 0) {
        return unexpected(ErrorCode::InvalidArgument, std::string("text cannot be normalized: ") + utf8proc_errmsg(size));
      }
    }
    for (const CodePoint code_point : std::span(group_).first(static_cast<std::size_t>(size))) {
      append_utf8(out_, static_cast<char32_t>(code_point));
    }
    group_.clear();
    if (out_.size() > bytes_max_) return too_long(text_);
    return {};
  }

  const utf8proc_option_t options_;
  const std::string_view text_;
  const std::size_t bytes_max_;
  std::vector<CodePoint> group_;  // decomposed, not yet in order
  std::string out_;
};

}  // namespace

std::string replace_all(std::string_view text, std::string_view pattern, std::string_view content) {
  std::string out;
  out.reserve(text.size());
  std::size_t from = 0;
  for (std::size_t at = text.find(pattern); at != std::string_view::npos; at = text.find(pattern, from)) {
    out += text.substr(from, at - from);
    out += content;
    from = at + pattern.size();
  }
  out += text.substr(from);
  return out;
}

Result<std::string> Normalizer::apply(std::string_view text, std::size_t bytes_max) const {
  std::string current(text);
  for (const Step& step : steps_) {
    if (const auto* prepend = std::get_if<PrependStep>(&step)) {
      if (!current.empty()) current.insert(0, prepend->prefix);
    } else if (const auto* replace = std::get_if<ReplaceStep>(&step)) {
      // The growth is known before any memory is taken: the content's size over the pattern's, at most.
      const std::size_t growth = replace->content.size() / replace->pattern.size() + 1;
      if (current.size() > bytes_max / growth) return too_long(text);
      current = replace_all(current, replace->pattern, replace->content);
    } else if (leading_ascii(current) != current.size()) {  // ASCII is in every form already
      Result<std::string> formed = FormWriter(std::get<UnicodeStep>(step).form, current, bytes_max).write();
      if (!formed) return formed;
      current = *std::move(formed);
    }
  }
  return current;
}

}  // namespace rubato::text
