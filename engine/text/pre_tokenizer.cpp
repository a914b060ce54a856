// SPDX-License-Identifier: Apache-2.0
// Each step maps all pieces to new ones; a step that changes text writes the new text once.
#include "engine/text/pre_tokenizer.h"

#include <limits>
#include <optional>

#include "engine/text/normalizer.h"
#include "engine/text/utf8.h"

namespace rubato::text {
namespace {

struct Part {
  Span span;
  bool is_match = false;
};

/// Matches and the gaps between them, covering all of span.
void cover(Span span, const std::vector<Span>& matches, SplitSense sense, std::vector<Part>& parts) {
  parts.clear();
  const bool match_flag = sense == SplitSense::Matches;
  std::uint32_t from = span.begin;
  for (const Span match : matches) {
    if (match.begin > from) parts.push_back({{from, match.begin}, !match_flag});
    parts.push_back({match, match_flag});
    from = match.end;
  }
  if (from < span.end) parts.push_back({{from, span.end}, !match_flag});
}

void merge_with_next(const std::vector<Part>& parts, std::vector<Span>& out) {
  std::optional<Span> open;  // a match that waits for its gap
  for (const Part& part : parts) {
    if (part.is_match) {
      if (open) out.push_back(*open);
      open = part.span;
    } else {
      out.push_back(open ? Span{open->begin, part.span.end} : part.span);
      open.reset();
    }
  }
  if (open) out.push_back(*open);
}

void place(const std::vector<Part>& parts, SplitBehavior behavior, std::vector<Span>& out) {
  if (behavior == SplitBehavior::MergedWithNext) return merge_with_next(parts, out);
  std::optional<bool> previous_is_match;
  for (const Part& part : parts) {
    switch (behavior) {
      case SplitBehavior::Isolated:
      case SplitBehavior::MergedWithNext:
        out.push_back(part.span);
        break;
      case SplitBehavior::Removed:
        if (!part.is_match) out.push_back(part.span);
        break;
      case SplitBehavior::Contiguous:
        if (previous_is_match == part.is_match) {
          out.back().end = part.span.end;
        } else {
          out.push_back(part.span);
        }
        break;
      case SplitBehavior::MergedWithPrevious:
        if (part.is_match && previous_is_match == false) {
          out.back().end = part.span.end;
        } else {
          out.push_back(part.span);
        }
        break;
    }
    previous_is_match = part.is_match;
  }
}

Result<void> split(Pieces& pieces, const SplitStep& step) {
  SplitMatcher matcher(step.pattern);
  std::vector<Span> out;
  out.reserve(pieces.spans.size() + pieces.text.size() / 4);
  std::vector<Span> matches;
  std::vector<Part> parts;
  for (const Span span : pieces.spans) {
    matches.clear();
    if (auto found = matcher.find_all(pieces.text, span, matches); !found) return found;
    cover(span, matches, step.sense, parts);
    place(parts, step.behavior, out);
  }
  pieces.spans = std::move(out);
  return {};
}

/// Writes the text anew with `prefix` in front of the pieces for which wanted(piece) says so.
template <class Wanted>
void prefix_pieces(Pieces& pieces, std::string_view prefix, Wanted wanted) {
  Pieces out;
  out.text.reserve(pieces.text.size() + pieces.spans.size() * prefix.size());
  out.spans.reserve(pieces.spans.size());
  for (const Span span : pieces.spans) {
    const std::string_view piece = std::string_view(pieces.text).substr(span.begin, span.end - span.begin);
    const auto begin = static_cast<std::uint32_t>(out.text.size());
    if (wanted(piece)) out.text += prefix;
    out.text += piece;
    out.spans.push_back({begin, static_cast<std::uint32_t>(out.text.size())});
  }
  pieces = std::move(out);
}

void apply_metaspace(Pieces& pieces, const MetaspaceStep& step, TextPosition position) {
  Pieces replaced;
  for (const Span span : pieces.spans) {
    const auto begin = static_cast<std::uint32_t>(replaced.text.size());
    replaced.text += replace_all(std::string_view(pieces.text).substr(span.begin, span.end - span.begin), " ", step.replacement);
    replaced.spans.push_back({begin, static_cast<std::uint32_t>(replaced.text.size())});
  }
  pieces = std::move(replaced);
  if (step.prepend == MetaspaceStep::Prepend::Never) return;
  bool first = true;
  prefix_pieces(pieces, step.replacement, [&](std::string_view piece) {
    const bool here = step.prepend == MetaspaceStep::Prepend::Always || (first && position == TextPosition::Start);
    first = false;
    return here && !piece.starts_with(step.replacement);
  });
}

}  // namespace

Result<Pieces> PreTokenizer::apply(std::string text, TextPosition position) const {
  // A blank becomes a replacement character of up to 4 bytes, and every piece may gain two (tokenizer_json.cpp allows two such
  // steps).
  if (text.size() > std::numeric_limits<std::uint32_t>::max() / 16) {
    return unexpected(ErrorCode::InvalidArgument, "text of " + std::to_string(text.size()) + " bytes is too long to tokenise");
  }
  Pieces pieces{.text = std::move(text), .spans = {}};
  if (pieces.text.empty()) return pieces;
  pieces.spans.push_back({0, static_cast<std::uint32_t>(pieces.text.size())});
  for (const Step& step : steps_) {
    if (const auto* split_step = std::get_if<SplitStep>(&step)) {
      if (auto done = split(pieces, *split_step); !done) return Unexpected(std::move(done).error());
    } else if (const auto* metaspace = std::get_if<MetaspaceStep>(&step)) {
      apply_metaspace(pieces, *metaspace, position);
    } else {
      prefix_pieces(pieces, " ", [](std::string_view piece) { return !piece.starts_with(' '); });
    }
  }
  return pieces;
}

}  // namespace rubato::text
