// SPDX-License-Identifier: Apache-2.0
// What a GET of objects asks for, whatever their kind: plain JSON or a table, what its rows carry, and which objects.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "daemon/control/engine_resource.h"
#include "daemon/control/status_error.h"
#include "daemon/http/message.h"

namespace rubato::control {

/// Of the query string; empty when it is not there.
[[nodiscard]] std::string query_of(const http::Request& request, std::string_view key);

enum class Wanted : std::uint8_t { Plain, Table, Nothing };

/// The first media type of the Accept header that can be served. kubectl lists tables first and falls back to plain JSON.
[[nodiscard]] Wanted wanted_form(const http::Request& request);

/// Empty: neither None, Metadata nor Object.
[[nodiscard]] std::optional<IncludeObject> include_object(const http::Request& request);

/// The answer to what no list serves: a watch, or a form that is not known. Empty: go on.
[[nodiscard]] std::optional<StatusError> unserved_list(const http::Request& request);

/// Keeps of items what fieldSelector asks for; fields are compared as texts and an absent one is the empty text.
[[nodiscard]] std::optional<StatusError> apply_field_selector(const http::Request& request,
                                                              std::span<const std::string_view> known, std::vector<Json>& items);
[[nodiscard]] std::optional<StatusError> apply_label_selector(const http::Request& request, std::vector<Json>& items);

}  // namespace rubato::control
