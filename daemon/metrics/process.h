// SPDX-License-Identifier: Apache-2.0
// What the kernel says about this process, for the standard process_* metrics.
#pragma once

#include <cstdint>

namespace rubato {

/// Zero where the kernel did not say.
struct ProcessUsage {
  double cpu_seconds = 0;         // user and system
  double start_time_seconds = 0;  // since the epoch
  std::int64_t resident_bytes = 0;
  std::int64_t virtual_bytes = 0;
  std::int64_t threads = 0;
  std::int64_t open_descriptors = 0;
  std::int64_t descriptors_max = 0;
};

[[nodiscard]] ProcessUsage read_process_usage();

}  // namespace rubato
