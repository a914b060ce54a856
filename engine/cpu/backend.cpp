// SPDX-License-Identifier: Apache-2.0
// Makes the CPU backend: the shared host backend over CpuOps, on the best kernels that this machine runs.
#include "engine/cpu/backend.h"

#include <memory>
#include <new>
#include <stdexcept>
#include <system_error>
#include <utility>

#include "engine/cpu/ops.h"
#include "engine/models/host_backend.h"

namespace rubato::engine {

Result<std::unique_ptr<Backend>> make_cpu_backend(const ModelConfig& config, WeightSource& weights,
                                                  const BackendOptions& options) {
  return cpu::make_backend(config, weights, options, cpu::kernel_paths(options.dtype).front());
}

namespace cpu {

Result<std::unique_ptr<Backend>> make_backend(const ModelConfig& config, WeightSource& weights, const BackendOptions& options,
                                              KernelPath path) {
  if (Result<void> checked = check_backend_options(config, options); !checked) return Unexpected(std::move(checked).error());
  if (options.dtype == DataType::Float16) {
    return unexpected(ErrorCode::InvalidArgument, "dtype",
                      "cpu backend: dtype Float16 is not computed in; use Float32 (exact for Float16 checkpoints) or BFloat16");
  }
  try {
    auto ops = std::make_unique<CpuOps>(options.dtype, path, options.threads, options.now);
    std::string description = "cpu " + ops->description();
    return HostBackend::make(config, weights, options, std::move(ops), std::move(description));
  } catch (const std::bad_alloc&) {
    return unexpected(ErrorCode::ResourceExhausted, "cpu backend: not enough memory for weights, cache and scratch");
  } catch (const std::length_error&) {
    return unexpected(ErrorCode::ResourceExhausted, "cpu backend: weights, cache and scratch are larger than the address space");
  } catch (const std::system_error& error) {
    return unexpected(ErrorCode::ResourceExhausted, std::string("cpu backend: threads could not be started: ") + error.what());
  }
}

}  // namespace cpu
}  // namespace rubato::engine
