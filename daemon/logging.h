// SPDX-License-Identifier: Apache-2.0
// Log lines on stderr, as text for people or one JSON object per line for collectors.
#pragma once

#include "daemon/options.h"

namespace rubato {

/// Sets the process's default spdlog logger. Call once, before any thread logs.
void start_logging(LogFormat format);

}  // namespace rubato
