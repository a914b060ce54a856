// SPDX-License-Identifier: Apache-2.0
// What this machine can do at most, measured now: multiply-adds that never leave registers, and bytes read in order from memory.
#pragma once

#include <cstdint>
#include <functional>

namespace rubato::bench {

struct MachinePeaks {
  double bfloat16_gflops = 0;  // 0 where the processor has no BF16 dot product
  double float32_gflops = 0;
  double read_gigabytes_per_second = 0;
};

/// Runs for about two seconds on `threads` threads. Wall time, best of several: other work on the machine lowers it.
[[nodiscard]] MachinePeaks measure_peaks(std::int32_t threads);

/// Runs body on each of `threads` threads at once and returns the wall time in seconds, least of `repeats`.
[[nodiscard]] double best_parallel_seconds(std::int32_t threads, int repeats,
                                           const std::function<void(std::int32_t thread)>& body);

}  // namespace rubato::bench
