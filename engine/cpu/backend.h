// SPDX-License-Identifier: Apache-2.0
// The CPU backend's only public door. Everything else in engine/cpu/ is private to it.
#pragma once

#include <memory>

#include "engine/backend.h"

namespace rubato::engine {

/// Takes all memory and repacks the weights; the source may be closed afterwards. Errors: a missing or misshapen tensor (named),
/// memory that cannot be had (with the bytes asked for), an option out of range.
[[nodiscard]] Result<std::unique_ptr<Backend>> make_cpu_backend(const ModelConfig& config, WeightSource& weights,
                                                                const BackendOptions& options);

/// Compute threads to use when none are configured: min(affinity, floor(cgroup quota)), at least 1.
[[nodiscard]] std::int32_t default_cpu_threads();

}  // namespace rubato::engine
