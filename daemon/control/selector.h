// SPDX-License-Identifier: Apache-2.0
// Label and field selectors of list requests: `app=chat,tier!=test,canary,!old` and `metadata.name=chat`.
#pragma once

#include <functional>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "manifests/result.h"

namespace rubato::control {

struct Requirement {
  enum class Operator : std::uint8_t { Equals, NotEquals, Exists, Absent };
  std::string key;
  Operator op = Operator::Equals;
  std::string value;
};

/// Equality form only. InvalidArgument: anything else, with the text that was not understood.
[[nodiscard]] Result<std::vector<Requirement>> parse_selector(std::string_view text);

/// lookup gives the value of a key, or nothing when the object has none.
[[nodiscard]] bool matches(const std::vector<Requirement>& requirements,
                           const std::function<std::optional<std::string>(const std::string& key)>& lookup);

}  // namespace rubato::control
