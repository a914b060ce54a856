// SPDX-License-Identifier: Apache-2.0
// Makes the CUDA backend: steps on one NVIDIA GPU, eagerly or as captured graphs, with the same bits. This header needs no CUDA,
// so that whoever makes backends builds without it.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "engine/backend.h"

namespace rubato::engine {

/// Index of a device written `cuda:N`, or `cuda` for 0. InvalidArgument (field spec.devices) otherwise.
[[nodiscard]] Result<std::int32_t> cuda_device_index(const std::string& device);

/// Takes all memory and loads all weights; seconds to minutes. Errors: no such device, memory that cannot be had (with the
/// bytes), a missing or misshapen tensor.
[[nodiscard]] Result<std::unique_ptr<Backend>> make_cuda_backend(const ModelConfig& config, WeightSource& weights,
                                                                 const BackendOptions& options, std::int32_t device);

}  // namespace rubato::engine
