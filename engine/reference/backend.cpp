// SPDX-License-Identifier: Apache-2.0
// The reference backend: the shared host backend over the scalar Ops.
#include "engine/reference/backend.h"

#include <memory>
#include <new>
#include <stdexcept>

#include "engine/models/host_backend.h"
#include "engine/reference/ops.h"

namespace rubato::engine {

Result<std::unique_ptr<Backend>> make_reference_backend(const ModelConfig& config, WeightSource& weights,
                                                        const BackendOptions& options) {
  if (Result<void> checked = check_backend_options(config, options); !checked) return Unexpected(std::move(checked).error());
  try {
    return HostBackend::make(config, weights, options, std::make_unique<ReferenceOps>(options.dtype), "reference f32, 1 thread");
  } catch (const std::bad_alloc&) {
    return unexpected(ErrorCode::ResourceExhausted, "backend: not enough memory for weights, cache and scratch");
  } catch (const std::length_error&) {
    return unexpected(ErrorCode::ResourceExhausted, "backend: weights, cache and scratch are larger than the address space");
  }
}

}  // namespace rubato::engine
