// SPDX-License-Identifier: Apache-2.0
// The whole process, wired: ports first, then the model, then the lane and the tuner; and its end in the reverse order.
#pragma once

#include "daemon/options.h"

namespace rubato {

/// Serves until a signal or a device failure. Returns the exit status: 0 after a drain, 1 when it could not start, the device
/// broke, or requests were cut short. Blocks SIGTERM and SIGINT in the calling thread before any thread starts: call it first.
[[nodiscard]] int serve(const Options& options);

/// `--check`: reads the manifest and works out the model's limits without loading it. Prints to stderr; 0 or 1.
[[nodiscard]] int check(const Options& options);

/// `--check-exactness`: loads the model of the manifest or folder and runs the exactness checker on it. Prints the cases to
/// stderr and what came of them to stdout; 0 or 1.
[[nodiscard]] int check_exactness(const Options& options);

}  // namespace rubato
