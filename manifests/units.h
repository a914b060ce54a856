// SPDX-License-Identifier: Apache-2.0
// Durations and quantities as people write them in manifests: `500ms`, `1.5s`, `12500us`, `10m`, `512Mi`, `2G`. A bare number is
// refused, because nobody can tell which unit was meant.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <string_view>

#include "manifests/result.h"

namespace rubato {

using Duration = std::chrono::nanoseconds;

/// Go's grammar without signs: one or more of <decimal><unit>, unit in ns us ms s m h. Refused: no unit, unknown unit, negative,
/// finer than 1 ns, above 10,000 hours. The error's message says what is allowed; its field is empty.
[[nodiscard]] Result<Duration> parse_duration(std::string_view text);

/// Canonical form: largest unit first and no zero parts (`1m30s`, `12.5ms`, `500ms`, `0s`); parse_duration reads it back exactly.
[[nodiscard]] std::string format_duration(Duration duration);

/// Kubernetes resource.Quantity without exponents or `m`: decimal number with none, K (or k) M G T, or Ki Mi Gi Ti. Whole bytes only.
[[nodiscard]] Result<std::int64_t> parse_quantity(std::string_view text);

/// The largest binary unit that divides exactly (`512Mi`, `2Gi`, `1000`).
[[nodiscard]] std::string format_quantity(std::int64_t bytes);

}  // namespace rubato
