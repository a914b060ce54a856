// SPDX-License-Identifier: Apache-2.0
#include "engine/text/normalizer.h"

namespace rubato::text {

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
    } else {
      const auto& replace = std::get<ReplaceStep>(step);
      // The growth is known before any memory is taken: the content's size over the pattern's, at most.
      const std::size_t growth = replace.content.size() / replace.pattern.size() + 1;
      if (current.size() > bytes_max / growth) {
        return unexpected(ErrorCode::InvalidArgument,
                          "text of " + std::to_string(text.size()) + " bytes is too long for the tokenizer's normalizer");
      }
      current = replace_all(current, replace.pattern, replace.content);
    }
  }
  return current;
}

}  // namespace rubato::text
