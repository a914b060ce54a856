// SPDX-License-Identifier: Apache-2.0
// Time of day, for people, for expiry and for the state file. Serving's intervals use TimePoint instead, which no clock change
// can bend.
#pragma once

#include <chrono>
#include <optional>
#include <string>
#include <string_view>

namespace rubato::control {

using WallTime = std::chrono::sys_time<std::chrono::milliseconds>;

/// `2026-11-30T00:10:04Z`: RFC 3339 in UTC with whole seconds, as every metav1.Time.
[[nodiscard]] std::string format_time(WallTime time);
/// Reads format_time back; empty for anything else.
[[nodiscard]] std::optional<WallTime> parse_time(std::string_view text);

/// `39s`, `5m`, `3h20m`, `12d`: as kubectl shows ages. Never negative.
[[nodiscard]] std::string format_age(std::chrono::milliseconds age);

}  // namespace rubato::control
