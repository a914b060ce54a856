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
///
/// Two lanes on one device (make_sibling(), before shape_limits() is asked and before the first step): the multiprocessors are
/// split into groups of 8, or what the driver asks for, and a share is so many groups. A step that begins while the sibling is in
/// one, or has run one since this lane's last step began, keeps to its share; otherwise it has the whole device. Graphs belong to
/// the place that they were captured for: build_shapes() makes each bucket for the whole device and for the share in use; once
/// the share moves, steps on it run eagerly until the next set.
///
/// Where the driver has no green contexts, priorities alone tell the lanes apart: the sibling's kernels start when the first
/// backend's leave room, but what runs is not interrupted, so a chunk still delays the other lane's step by up to a whole kernel
/// each time. That does NOT protect inter-token latency; description() says so. The sibling is the less urgent of the two either
/// way: give it the prefill lane.
[[nodiscard]] Result<std::unique_ptr<Backend>> make_cuda_backend(const ModelConfig& config, WeightSource& weights,
                                                                 const BackendOptions& options, std::int32_t device);

}  // namespace rubato::engine
