// SPDX-License-Identifier: Apache-2.0
// Figures as the API writes them. It has no floats, so fractions are text; and what is measured is rounded, so that a figure that
// was the same again reads the same again.
#pragma once

#include <string>

#include "policies/time.h"

namespace rubato::control {

/// Three significant digits as a duration: `12.3ms`.
[[nodiscard]] std::string rounded(Duration duration);
/// Three significant digits in seconds: `0.0123`.
[[nodiscard]] std::string seconds(Duration duration);
/// With one decimal, rounded down: `97.5`.
[[nodiscard]] std::string decimal(double value);

}  // namespace rubato::control
