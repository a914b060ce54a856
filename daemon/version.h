// SPDX-License-Identifier: Apache-2.0
// The version that logs, metrics and /version show.
#pragma once

namespace rubato {

inline constexpr const char* version = "0.1.0";

}  // namespace rubato
