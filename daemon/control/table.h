// SPDX-License-Identifier: Apache-2.0
// Objects as kubectl shows them: meta.k8s.io/v1 Table, for every resource alike.
#pragma once

#include <cstdint>
#include <functional>
#include <nlohmann/json.hpp>
#include <span>

namespace rubato::control {

using Json = nlohmann::ordered_json;

/// Priority 0 is always shown, 1 with `-o wide`.
struct Column {
  const char* name;
  const char* type;  // string, integer or date
  const char* description;
  int priority;
};

/// Which form of the object the rows of a table carry.
enum class IncludeObject : std::uint8_t { None, Metadata, Object };

/// cells: of one object, as many as there are columns.
[[nodiscard]] Json make_table(std::span<const Column> columns, std::span<const Json> objects, const Json& resource_version,
                              IncludeObject include, const std::function<Json(const Json&)>& cells);

}  // namespace rubato::control
