// SPDX-License-Identifier: Apache-2.0
// The scalar reference backend: the executable specification of the model. Slow, single-threaded, free of SIMD, and written to be
// read.
#pragma once

#include <memory>

#include "engine/backend.h"

namespace rubato::engine {

/// F32 arithmetic throughout; weights are widened on load, KV is F32. Same interface and errors as the CPU backend.
[[nodiscard]] Result<std::unique_ptr<Backend>> make_reference_backend(const ModelConfig& config, WeightSource& weights,
                                                                      const BackendOptions& options);

}  // namespace rubato::engine
