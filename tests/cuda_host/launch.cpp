// SPDX-License-Identifier: Apache-2.0
// Launches: what the real runtime refuses is refused, arguments are searched for pointers, and the kernel is queued or captured
// with its arguments as they are now.
#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "tests/cuda_host/blocks.h"
#include "tests/cuda_host/state.h"

namespace cuda_host {

namespace {

constexpr std::size_t shared_without_asking = 48 * 1024;
constexpr unsigned int threads_max = 1024;

std::size_t shared_limit(const void* function, int device) {
  const auto found = state().shared_limits.find({function, device});
  return found == state().shared_limits.end() ? shared_without_asking : found->second;
}

cudaError_t check_shape(const cudaLaunchConfig_t& config, const void* function, int device) {
  const dim3& grid = config.gridDim;
  const dim3& block = config.blockDim;
  const bool grid_fits = grid.x >= 1 && grid.y >= 1 && grid.z >= 1 && grid.x <= 0x7fffffffU && grid.y <= 65535 && grid.z <= 65535;
  const bool block_fits = block.x >= 1 && block.y >= 1 && block.z >= 1 && block.x <= threads_max && block.y <= threads_max &&
                          block.z <= 64 && block.x * block.y * block.z <= threads_max;
  if (!grid_fits || !block_fits) return cudaErrorInvalidConfiguration;
  if (config.dynamicSmemBytes > shared_limit(function, device)) return cudaErrorInvalidValue;
  for (unsigned int i = 0; i < config.numAttrs; ++i) {
    switch (config.attrs[i].id) {
      case cudaLaunchAttributeIgnore:
      case cudaLaunchAttributeProgrammaticStreamSerialization:
      case cudaLaunchAttributePriority:
      case cudaLaunchAttributePreferredSharedMemoryCarveout:
        break;
      default:
        return cudaErrorNotSupported;
    }
  }
  return cudaSuccess;
}

bool is_mapped(std::uintptr_t address) {
  unsigned char resident = 0;
  return mincore(reinterpret_cast<void*>(address / 4096 * 4096), 1, &resident) == 0;
}

// Aligned words of the arguments that point somewhere.
std::vector<std::uintptr_t> find_uses(const BoundKernel& kernel, const std::string& name) {
  std::vector<std::uintptr_t> uses;
  for (std::size_t at = 0; at + sizeof(std::uintptr_t) <= kernel.argument_size; at += sizeof(std::uintptr_t)) {
    std::uintptr_t word = 0;
    std::memcpy(&word, kernel.argument_bytes + at, sizeof(word));
    if (word < 0x10000) continue;
    if (const Allocation* allocation = allocation_at(word); allocation != nullptr) {
      if (allocation->freed) add_fault(FaultKind::UseAfterFree, name, "is launched with " + describe_address(word));
      uses.push_back(allocation->base);
    } else if (const PinnedBlock* block = pinned_at(word); block != nullptr) {
      uses.push_back(block->base);
    } else if (word > 0x10000000000ULL && word < 0x800000000000ULL && is_mapped(word)) {
      add_fault(FaultKind::HostPointer, name, "is launched with a pointer to pageable host memory");
    }
  }
  std::sort(uses.begin(), uses.end());
  uses.erase(std::unique(uses.begin(), uses.end()), uses.end());
  return uses;
}

std::uint64_t duration(const cudaLaunchConfig_t& config) {
  const std::uint64_t blocks = std::uint64_t{config.gridDim.x} * config.gridDim.y * config.gridDim.z;
  return 2000 + blocks * 50;
}

}  // namespace

bool run_kernel(const KernelRun& run) {
  return Blocks::of_this_thread().run(run, state().random);
}

cudaError_t launch_kernel(const cudaLaunchConfig_t& config, BoundKernel kernel) {
  Call call("cudaLaunchKernelEx");
  CUstream_st* stream = find_stream(config.stream, call.name());
  if (stream == nullptr || stream->device != current_device()) return call.result(cudaErrorInvalidResourceHandle);
  if (const cudaError_t wrong = check_shape(config, kernel.function, stream->device); wrong != cudaSuccess) {
    if (stream->capture != nullptr) invalidate(*stream->capture);
    return call.result(wrong);
  }
  auto run = std::make_shared<KernelRun>(KernelRun{.grid = config.gridDim,
                                                   .block = config.blockDim,
                                                   .shared_bytes = config.dynamicSmemBytes,
                                                   .kernel = std::move(kernel),
                                                   .name = {},
                                                   .device = stream->device});
  run->name = kernel_name(run->kernel.function);
  Work work{.kind = WorkKind::Kernel,
            .name = run->name,
            .device = stream->device,
            .action =
                [run] {
                  if (run_kernel(*run)) return;
                  Device& device = *state().devices[static_cast<std::size_t>(run->device)];
                  if (device.sticky == cudaSuccess) device.sticky = cudaErrorIllegalAddress;
                },
            .uses = find_uses(run->kernel, run->name),
            .nanoseconds = duration(config)};
  return call.result(submit(call, *stream, std::move(work)));
}

}  // namespace cuda_host

using namespace cuda_host;

cudaError_t cudaFuncSetAttribute(const void* function, cudaFuncAttribute attribute, int value) {
  Call call("cudaFuncSetAttribute");
  if (const cudaError_t broken = call.sticky(); broken != cudaSuccess) return call.result(broken);
  if (function == nullptr) return call.result(cudaErrorInvalidDeviceFunction);
  if (attribute == cudaFuncAttributePreferredSharedMemoryCarveout) return cudaSuccess;
  if (attribute != cudaFuncAttributeMaxDynamicSharedMemorySize || value < 0 ||
      static_cast<std::size_t>(value) > shared_bytes_max) {
    return call.result(cudaErrorInvalidValue);
  }
  state().shared_limits[{function, current_device()}] = std::max(static_cast<std::size_t>(value), shared_without_asking);
  return cudaSuccess;
}

cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void* function) {
  Call call("cudaFuncGetAttributes");
  if (const cudaError_t broken = call.sticky(); broken != cudaSuccess) return call.result(broken);
  if (attributes == nullptr || function == nullptr) return call.result(cudaErrorInvalidValue);
  *attributes = {};
  attributes->maxThreadsPerBlock = static_cast<int>(threads_max);
  attributes->numRegs = 64;
  attributes->ptxVersion = state().options.major * 10 + state().options.minor;
  attributes->binaryVersion = attributes->ptxVersion;
  attributes->maxDynamicSharedSizeBytes = static_cast<int>(shared_limit(function, current_device()));
  return cudaSuccess;
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, const void* function, int block_size, std::size_t shared) {
  Call call("cudaOccupancyMaxActiveBlocksPerMultiprocessor");
  if (const cudaError_t broken = call.sticky(); broken != cudaSuccess) return call.result(broken);
  if (blocks == nullptr || function == nullptr || block_size < 1 || block_size > static_cast<int>(threads_max)) {
    return call.result(cudaErrorInvalidValue);
  }
  *blocks = 0;
  if (shared > shared_limit(function, current_device())) return cudaSuccess;
  const std::size_t per_block = shared + 1024;  // what the system keeps of each block
  const std::size_t by_shared = std::size_t{228} * 1024 / per_block;
  const int warps = (block_size + 31) / 32;
  *blocks = std::min({32, 64 / warps, static_cast<int>(by_shared)});
  return cudaSuccess;
}
