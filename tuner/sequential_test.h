// SPDX-License-Identifier: Apache-2.0
// Is a trial worse, asked while its window is still open? Wald's sequential probability ratio test on misses: looking after every
// request does not raise the chance of a false answer above what was asked for (Wald 1945).
#pragma once

#include <cstdint>

namespace rubato::tuner {

struct SequentialTestOptions {
  double harm = 0.15;         // misses above the incumbent's share that count as worse
  double false_alarm = 0.01;  // chance of stopping a trial that is as good as the incumbent
  double dispersion = 1.5;    // requests of one window share bursts and long steps
  std::int32_t judged_min = 12;
};

/// Whether `misses` of `judged` requests show that settings are worse than ones that miss `incumbent_miss_share` (0..1).
[[nodiscard]] bool already_worse(std::int32_t misses, std::int32_t judged, double incumbent_miss_share,
                                 const SequentialTestOptions& options = {});

}  // namespace rubato::tuner
