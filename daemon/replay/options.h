// SPDX-License-Identifier: Apache-2.0
// rubato-replay's command line.
#pragma once

#include <string>
#include <vector>

#include "daemon/replay/client.h"
#include "daemon/replay/report.h"
#include "daemon/replay/workload.h"

namespace rubato::replay {

struct Options {
  bool help = false;
  WorkloadOptions workload;
  ClientOptions client;
  Targets targets;
  std::string json;  // file for the report; `-` is standard output
};

/// InvalidArgument; field is the flag. Both `--flag value` and `--flag=value` are read.
[[nodiscard]] Result<Options> parse_options(const std::vector<std::string>& arguments);

[[nodiscard]] std::string usage_text();

}  // namespace rubato::replay
