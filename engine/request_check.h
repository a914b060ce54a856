// SPDX-License-Identifier: Apache-2.0
// Whether a request can be run at all, by its own figures alone.
#pragma once

#include <cstdint>
#include <optional>

#include "engine/lanes.h"
#include "manifests/result.h"

namespace rubato::engine {

/// The first fault of a request, with its field, what was found and what is allowed; none: it can run. length_max: tokens that a
/// sequence may have.
[[nodiscard]] std::optional<Unexpected> find_fault(const Request& request, std::int32_t vocabulary, std::int32_t length_max);

}  // namespace rubato::engine
