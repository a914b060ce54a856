// SPDX-License-Identifier: Apache-2.0
// Request bodies as JSON, from clients that may be hostile: everything is bounded and nothing throws.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

#include "manifests/result.h"

namespace rubato::openai {

using Json = nlohmann::json;                 // requests: objects with fast look-up
using OrderedJson = nlohmann::ordered_json;  // answers: members in the order written

inline constexpr int json_depth_max = 32;
inline constexpr std::size_t json_values_max = 4UL << 20;  // a prompt of a few million token ids

/// InvalidArgument: no JSON object, invalid UTF-8, lone surrogates, numbers beyond double, duplicate keys, too deep, too many
/// values. The field names a duplicate key, and is empty otherwise.
[[nodiscard]] Result<Json> parse_body(std::string_view body);

/// Never throws; bytes that are no UTF-8 become U+FFFD.
template <class AnyJson>
[[nodiscard]] std::string dump(const AnyJson& json) {
  return json.dump(-1, ' ', false, AnyJson::error_handler_t::replace);
}

}  // namespace rubato::openai
