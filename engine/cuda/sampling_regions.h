// SPDX-License-Identifier: Apache-2.0
// The memory that one lane's sampling works in, on host and device.
#pragma once

#include <cstdint>

#include "engine/cuda/runtime.h"
#include "engine/cuda/sampling.h"

namespace rubato::engine::cuda {

struct SamplingRegions {
  SamplingShape shape;
  PinnedMemory staging_host{};
  DeviceMemory staging{};
  DeviceMemory scratch{};
  DeviceMemory results{};
  PinnedMemory results_host{};

  [[nodiscard]] static Result<SamplingRegions> make(const SamplingShape& shape);

  [[nodiscard]] SamplingMemory memory() const {
    return {.staging = staging.data(), .scratch = scratch.data(), .results = reinterpret_cast<SampledRow*>(results.data())};
  }
  [[nodiscard]] const SampledRow* arrived() const { return reinterpret_cast<const SampledRow*>(results_host.data()); }
};

}  // namespace rubato::engine::cuda
