// SPDX-License-Identifier: Apache-2.0
// Stop strings over streamed text: text that might be the beginning of a stop string is held back until that is decided.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace rubato::text {

/// One per choice. The stop string that ends first wins, of those that end together the longest, so no part of it is ever shown.
/// Streamed pieces concatenate to exactly the text before it. Not thread-safe.
class StopMatcher {
 public:
  /// stops: none empty (checked at the edge).
  explicit StopMatcher(std::vector<std::string> stops);

  /// Text that may be shown now. After a match (matched() is true) nothing more is ever returned.
  [[nodiscard]] std::string push(std::string_view text);
  /// Generation ended without a match: what was held back.
  [[nodiscard]] std::string finish();
  [[nodiscard]] bool matched() const { return matched_; }

 private:
  struct Automaton {
    std::string stop;
    std::vector<std::size_t> failure;  // failure[i]: length of the longest proper border of the first i + 1 bytes
    std::size_t matched = 0;           // how much of stop the text ends with; below stop.size() between calls
    void feed(char byte);
  };
  std::vector<Automaton> automata_;
  std::string held_;
  bool matched_ = false;
};

}  // namespace rubato::text
