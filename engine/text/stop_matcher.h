// SPDX-License-Identifier: Apache-2.0
// Stop strings over streamed text: text that might be the beginning of a stop string is held back until that is decided.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace rubato::text {

/// One per choice. Streamed pieces concatenate to exactly the text before the first match. Not thread-safe.
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
  std::vector<std::string> stops_;
  std::string held_;
  bool matched_ = false;
};

}  // namespace rubato::text
