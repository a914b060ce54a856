// SPDX-License-Identifier: Apache-2.0
// The page at `/` of the control port: one file without any outside part, so that it works through port-forwards and in closed
// networks. It polls the same JSON and metrics that everyone else reads and keeps no state of its own here.
#pragma once

#include "daemon/http/server.h"

namespace rubato::control {

[[nodiscard]] http::Response dashboard_response();

}  // namespace rubato::control
