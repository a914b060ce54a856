// SPDX-License-Identifier: Apache-2.0
// The replay client as a library: workload, run, report. rubato-replay is a thin main over it, tests call it directly.
#pragma once

#include <cstdio>
#include <functional>
#include <stop_token>

#include "daemon/replay/client.h"
#include "daemon/replay/options.h"
#include "daemon/replay/report.h"
#include "daemon/replay/workload.h"

namespace rubato::replay {

/// Reads the workload, sends it, sums it up. line is called once a second with a progress line.
[[nodiscard]] Result<Report> replay(const Options& options, const std::function<void(const std::string&)>& line,
                                    std::stop_token stop);

}  // namespace rubato::replay
