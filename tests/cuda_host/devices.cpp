// SPDX-License-Identifier: Apache-2.0
// Devices and what they say of themselves, error texts, peers, and green contexts.
#include <algorithm>
#include <cstdio>
#include <cstring>

#include "tests/cuda_host/state.h"

namespace cuda_host {

namespace {

constexpr int version = 13000;
constexpr unsigned int share_granularity = 8;        // of a split with coscheduling, as on sm_90
constexpr unsigned int share_granularity_alone = 2;  // without

bool is_device(int device) {
  return device >= 0 && device < static_cast<int>(state().devices.size());
}

void fill_resource(CUdevResource& resource, unsigned int multiprocessors) {
  resource = {};
  resource.type = CU_DEV_RESOURCE_TYPE_SM;
  resource.sm.smCount = multiprocessors;
  resource.sm.minSmPartitionSize = share_granularity;
  resource.sm.smCoscheduledAlignment = share_granularity;
}

// Which split a resource came from, and which part of it is; kept where the real one keeps what is its own.
struct Origin {
  std::uint64_t split;
  std::uint64_t group;
};
void mark_resource(CUdevResource& resource, Origin origin) {
  static_assert(sizeof(origin) <= sizeof(resource._internal_padding));
  std::memcpy(resource._internal_padding, &origin, sizeof(origin));
}
Origin origin_of(const CUdevResource& resource) {
  Origin origin{};
  std::memcpy(&origin, resource._internal_padding, sizeof(origin));
  return origin;
}

CUgreenCtx_st* find_context(CUgreenCtx context, const char* call) {
  const auto found = state().contexts.find(context);
  if (found == state().contexts.end()) return nullptr;
  if (found->second->destroyed) add_fault(FaultKind::BadHandle, call, "the green context was destroyed");
  return found->second->destroyed ? nullptr : found->second.get();
}

}  // namespace

}  // namespace cuda_host

using namespace cuda_host;

const char* cudaGetErrorName(cudaError_t error) {
  switch (error) {
#define CUDA_HOST_ERROR(name, value, description) \
  case name:                                      \
    return #name;
    CUDA_HOST_ERRORS(CUDA_HOST_ERROR)
#undef CUDA_HOST_ERROR
  }
  return "unrecognized error code";
}
const char* cudaGetErrorString(cudaError_t error) {
  switch (error) {
#define CUDA_HOST_ERROR(name, value, description) \
  case name:                                      \
    return description;
    CUDA_HOST_ERRORS(CUDA_HOST_ERROR)
#undef CUDA_HOST_ERROR
  }
  return "unrecognized error code";
}
cudaError_t cudaDriverGetVersion(int* driver) {
  *driver = version;
  return cudaSuccess;
}
cudaError_t cudaRuntimeGetVersion(int* runtime) {
  *runtime = version;
  return cudaSuccess;
}

cudaError_t cudaGetDriverEntryPointByVersion(const char* symbol, void** function, unsigned int asked,
                                             unsigned long long /*flags*/, cudaDriverEntryPointQueryResult* result) {
  const Call call("cudaGetDriverEntryPointByVersion");
  struct Entry {
    const char* name;
    void* function;
  };
  static const Entry entries[] = {
      {"cuInit", reinterpret_cast<void*>(&cuInit)},
      {"cuDeviceGet", reinterpret_cast<void*>(&cuDeviceGet)},
      {"cuGetErrorString", reinterpret_cast<void*>(&cuGetErrorString)},
      {"cuGetErrorName", reinterpret_cast<void*>(&cuGetErrorName)},
      {"cuDeviceGetDevResource", reinterpret_cast<void*>(&cuDeviceGetDevResource)},
      {"cuDevSmResourceSplitByCount", reinterpret_cast<void*>(&cuDevSmResourceSplitByCount)},
      {"cuDevResourceGenerateDesc", reinterpret_cast<void*>(&cuDevResourceGenerateDesc)},
      {"cuGreenCtxCreate", reinterpret_cast<void*>(&cuGreenCtxCreate)},
      {"cuGreenCtxDestroy", reinterpret_cast<void*>(&cuGreenCtxDestroy)},
      {"cuGreenCtxGetDevResource", reinterpret_cast<void*>(&cuGreenCtxGetDevResource)},
      {"cuGreenCtxStreamCreate", reinterpret_cast<void*>(&cuGreenCtxStreamCreate)},
      {"cuStreamGetGreenCtx", reinterpret_cast<void*>(&cuStreamGetGreenCtx)},
      {"cuStreamDestroy", reinterpret_cast<void*>(&cuStreamDestroy)},
  };
  *function = nullptr;
  if (result != nullptr) {
    *result =
        asked > static_cast<unsigned int>(version) ? cudaDriverEntryPointVersionNotSufficent : cudaDriverEntryPointSymbolNotFound;
  }
  for (const Entry& entry : entries) {
    if (state().options.green_contexts == GreenContexts::Missing && std::strstr(symbol, "GreenCtx") != nullptr) continue;
    if (asked > static_cast<unsigned int>(version) || std::strcmp(entry.name, symbol) != 0) continue;
    *function = entry.function;
    if (result != nullptr) *result = cudaDriverEntryPointSuccess;
  }
  return cudaSuccess;
}

cudaError_t cudaGetDeviceCount(int* count) {
  Call call("cudaGetDeviceCount");
  *count = static_cast<int>(state().devices.size());
  return call.result(*count == 0 ? cudaErrorNoDevice : cudaSuccess);
}

cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int device) {
  Call call("cudaGetDeviceProperties");
  if (!is_device(device)) return call.result(cudaErrorInvalidDevice);
  const Options& options = state().options;
  *properties = {};
  std::snprintf(properties->name, sizeof(properties->name), "Host emulation of sm_%d%d", options.major, options.minor);
  properties->uuid.bytes[0] = static_cast<char>(device + 1);
  properties->totalGlobalMem = options.memory_bytes;
  properties->sharedMemPerBlock = 48 * 1024;
  properties->regsPerBlock = 65536;
  properties->warpSize = 32;
  properties->maxThreadsPerBlock = 1024;
  properties->maxThreadsDim[0] = properties->maxThreadsDim[1] = 1024;
  properties->maxThreadsDim[2] = 64;
  properties->maxGridSize[0] = 0x7fffffff;
  properties->maxGridSize[1] = properties->maxGridSize[2] = 65535;
  properties->totalConstMem = 65536;
  properties->major = options.major;
  properties->minor = options.minor;
  properties->multiProcessorCount = options.multiprocessors;
  properties->concurrentKernels = 1;
  properties->pciBusID = device + 1;
  properties->asyncEngineCount = 3;
  properties->unifiedAddressing = 1;
  properties->memoryBusWidth = 5120;
  properties->l2CacheSize = 50 << 20;
  properties->maxThreadsPerMultiProcessor = 2048;
  properties->streamPrioritiesSupported = 1;
  properties->sharedMemPerMultiprocessor = 228 * 1024;
  properties->regsPerMultiprocessor = 65536;
  properties->cooperativeLaunch = 1;
  properties->sharedMemPerBlockOptin = shared_bytes_max;
  properties->maxBlocksPerMultiProcessor = 32;
  properties->reservedSharedMemPerBlock = 1024;
  properties->memoryPoolsSupported = 1;
  return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
  cudaDeviceProp properties;
  if (const cudaError_t error = cudaGetDeviceProperties(&properties, device); error != cudaSuccess) return error;
  switch (attribute) {
    case cudaDevAttrMaxThreadsPerBlock:
      *value = properties.maxThreadsPerBlock;
      break;
    case cudaDevAttrMaxGridDimX:
      *value = properties.maxGridSize[0];
      break;
    case cudaDevAttrMaxGridDimY:
      *value = properties.maxGridSize[1];
      break;
    case cudaDevAttrMaxGridDimZ:
      *value = properties.maxGridSize[2];
      break;
    case cudaDevAttrMaxSharedMemoryPerBlock:
      *value = static_cast<int>(properties.sharedMemPerBlock);
      break;
    case cudaDevAttrWarpSize:
      *value = properties.warpSize;
      break;
    case cudaDevAttrMaxRegistersPerBlock:
      *value = properties.regsPerBlock;
      break;
    case cudaDevAttrClockRate:
      *value = 1'755'000;
      break;
    case cudaDevAttrMultiProcessorCount:
      *value = properties.multiProcessorCount;
      break;
    case cudaDevAttrIntegrated:
      *value = 0;
      break;
    case cudaDevAttrConcurrentKernels:
      *value = 1;
      break;
    case cudaDevAttrMemoryClockRate:
      *value = 2'619'000;
      break;
    case cudaDevAttrGlobalMemoryBusWidth:
      *value = properties.memoryBusWidth;
      break;
    case cudaDevAttrL2CacheSize:
      *value = properties.l2CacheSize;
      break;
    case cudaDevAttrMaxThreadsPerMultiProcessor:
      *value = properties.maxThreadsPerMultiProcessor;
      break;
    case cudaDevAttrAsyncEngineCount:
      *value = properties.asyncEngineCount;
      break;
    case cudaDevAttrUnifiedAddressing:
      *value = 1;
      break;
    case cudaDevAttrComputeCapabilityMajor:
      *value = properties.major;
      break;
    case cudaDevAttrComputeCapabilityMinor:
      *value = properties.minor;
      break;
    case cudaDevAttrStreamPrioritiesSupported:
      *value = 1;
      break;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor:
      *value = static_cast<int>(properties.sharedMemPerMultiprocessor);
      break;
    case cudaDevAttrMaxRegistersPerMultiprocessor:
      *value = properties.regsPerMultiprocessor;
      break;
    case cudaDevAttrCooperativeLaunch:
      *value = properties.cooperativeLaunch;
      break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin:
      *value = static_cast<int>(properties.sharedMemPerBlockOptin);
      break;
    case cudaDevAttrMaxBlocksPerMultiprocessor:
      *value = properties.maxBlocksPerMultiProcessor;
      break;
    case cudaDevAttrReservedSharedMemoryPerBlock:
      *value = static_cast<int>(properties.reservedSharedMemPerBlock);
      break;
    case cudaDevAttrMemoryPoolsSupported:
      *value = properties.memoryPoolsSupported;
      break;
    default:
      return cudaErrorInvalidValue;
  }
  return cudaSuccess;
}

cudaError_t cudaDeviceGetPCIBusId(char* text, int length, int device) {
  Call call("cudaDeviceGetPCIBusId");
  if (!is_device(device)) return call.result(cudaErrorInvalidDevice);
  std::snprintf(text, static_cast<std::size_t>(std::max(length, 0)), "0000:%02x:00.0", device + 1);
  return cudaSuccess;
}
cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  *least = 0;
  *greatest = -5;
  return cudaSuccess;
}
cudaError_t cudaDeviceCanAccessPeer(int* can, int device, int peer) {
  Call call("cudaDeviceCanAccessPeer");
  if (!is_device(device) || !is_device(peer)) return call.result(cudaErrorInvalidDevice);
  *can = device != peer ? 1 : 0;
  return cudaSuccess;
}
cudaError_t cudaDeviceEnablePeerAccess(int peer, unsigned int flags) {
  Call call("cudaDeviceEnablePeerAccess");
  if (flags != 0 || !is_device(peer) || peer == current_device()) return call.result(cudaErrorInvalidDevice);
  const std::uint64_t bit = 1ULL << static_cast<unsigned>(peer);
  if ((call.device().peers & bit) != 0) return call.result(cudaErrorPeerAccessAlreadyEnabled);
  call.device().peers |= bit;
  return cudaSuccess;
}

// ---- the driver's part
CUresult cuInit(unsigned int flags) {
  return flags == 0 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
CUresult cuDeviceGet(CUdevice* device, int ordinal) {
  const Call call("cuDeviceGet");
  if (!is_device(ordinal)) return CUDA_ERROR_INVALID_DEVICE;
  *device = ordinal;
  return CUDA_SUCCESS;
}
CUresult cuDriverGetVersion(int* driver) {
  *driver = version;
  return CUDA_SUCCESS;
}
CUresult cuGetErrorString(CUresult error, const char** text) {
  *text = cudaGetErrorString(static_cast<cudaError_t>(error));
  return CUDA_SUCCESS;
}
CUresult cuGetErrorName(CUresult error, const char** name) {
  switch (error) {
    case CUDA_SUCCESS:
      *name = "CUDA_SUCCESS";
      break;
    case CUDA_ERROR_INVALID_VALUE:
      *name = "CUDA_ERROR_INVALID_VALUE";
      break;
    case CUDA_ERROR_INVALID_DEVICE:
      *name = "CUDA_ERROR_INVALID_DEVICE";
      break;
    case CUDA_ERROR_INVALID_HANDLE:
      *name = "CUDA_ERROR_INVALID_HANDLE";
      break;
    case CUDA_ERROR_INVALID_RESOURCE_TYPE:
      *name = "CUDA_ERROR_INVALID_RESOURCE_TYPE";
      break;
    case CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION:
      *name = "CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION";
      break;
    default:
      *name = "CUDA_ERROR_UNKNOWN";
      break;
  }
  return CUDA_SUCCESS;
}

CUresult cuDeviceGetDevResource(CUdevice device, CUdevResource* resource, CUdevResourceType type) {
  const Call call("cuDeviceGetDevResource");
  if (!is_device(device)) return CUDA_ERROR_INVALID_DEVICE;
  if (type != CU_DEV_RESOURCE_TYPE_SM) return CUDA_ERROR_INVALID_RESOURCE_TYPE;
  fill_resource(*resource, static_cast<unsigned int>(state().options.multiprocessors));
  return CUDA_SUCCESS;
}

CUresult cuDevSmResourceSplitByCount(CUdevResource* result, unsigned int* groups, const CUdevResource* input,
                                     CUdevResource* remaining, unsigned int flags, unsigned int minimum) {
  if (groups == nullptr || input == nullptr || minimum > input->sm.smCount) return CUDA_ERROR_INVALID_VALUE;
  if (input->type != CU_DEV_RESOURCE_TYPE_SM) return CUDA_ERROR_INVALID_RESOURCE_TYPE;
  const Call call("cuDevSmResourceSplitByCount");
  if (state().options.green_contexts == GreenContexts::Refused) return CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION;
  const std::uint64_t split = ++state().splits_made;
  const unsigned int granularity =
      (flags & CU_DEV_SM_RESOURCE_SPLIT_IGNORE_SM_COSCHEDULING) != 0 ? share_granularity_alone : share_granularity;
  const unsigned int each = std::max(granularity, (minimum + granularity - 1) / granularity * granularity);
  const unsigned int possible = input->sm.smCount / each;
  const unsigned int made = result == nullptr ? possible : std::min(possible, *groups);
  *groups = made;
  if (result != nullptr) {
    for (unsigned int i = 0; i < made; ++i) {
      fill_resource(result[i], each);
      mark_resource(result[i], {.split = split, .group = i + 1});
    }
  }
  if (remaining != nullptr) {
    fill_resource(*remaining, input->sm.smCount - made * each);
    mark_resource(*remaining, {.split = split, .group = 0});
    if (remaining->sm.smCount == 0) remaining->type = CU_DEV_RESOURCE_TYPE_INVALID;
  }
  return CUDA_SUCCESS;
}

CUresult cuDevResourceGenerateDesc(CUdevResourceDesc* description, CUdevResource* resources, unsigned int count) {
  const Call call("cuDevResourceGenerateDesc");
  if (description == nullptr || resources == nullptr || count == 0) return CUDA_ERROR_INVALID_VALUE;
  auto made = std::make_unique<CUdevResourceDesc_st>();
  for (unsigned int i = 0; i < count; ++i) {
    if (resources[i].type != CU_DEV_RESOURCE_TYPE_SM) return CUDA_ERROR_INVALID_RESOURCE_TYPE;
    // All from one split, each once.
    for (const CUdevResource& other : made->resources) {
      if (origin_of(other).split != origin_of(resources[i]).split || origin_of(other).group == origin_of(resources[i]).group)
        return CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION;
    }
    made->resources.push_back(resources[i]);
  }
  *description = made.get();
  state().descriptions.push_back(std::move(made));
  return CUDA_SUCCESS;
}

CUresult cuGreenCtxCreate(CUgreenCtx* context, CUdevResourceDesc description, CUdevice device, unsigned int flags) {
  const Call call("cuGreenCtxCreate");
  const auto& known = state().descriptions;
  const bool is_known = std::any_of(known.begin(), known.end(), [&](const auto& other) { return other.get() == description; });
  if (context == nullptr || !is_known || (flags & CU_GREEN_CTX_DEFAULT_STREAM) == 0) return CUDA_ERROR_INVALID_VALUE;
  if (!is_device(device)) return CUDA_ERROR_INVALID_DEVICE;
  auto made = std::make_unique<CUgreenCtx_st>();
  made->device = device;
  unsigned int multiprocessors = 0;
  for (const CUdevResource& resource : description->resources) multiprocessors += resource.sm.smCount;
  if (multiprocessors > static_cast<unsigned int>(state().options.multiprocessors))
    return CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION;
  fill_resource(made->resource, multiprocessors);
  *context = made.get();
  state().contexts.emplace(made.get(), std::move(made));
  return CUDA_SUCCESS;
}

CUresult cuGreenCtxDestroy(CUgreenCtx context) {
  const Call call("cuGreenCtxDestroy");
  CUgreenCtx_st* found = find_context(context, call.name());
  if (found == nullptr) return CUDA_ERROR_INVALID_HANDLE;
  for (const auto& [key, stream] : state().streams) {
    if (stream->context == found && stream->tail != nullptr && !stream->tail->done) {
      add_fault(FaultKind::InFlight, call.name(), "the green context is destroyed while work of its streams is queued");
      break;
    }
  }
  found->destroyed = true;
  return CUDA_SUCCESS;
}

CUresult cuGreenCtxGetDevResource(CUgreenCtx context, CUdevResource* resource, CUdevResourceType type) {
  const Call call("cuGreenCtxGetDevResource");
  const CUgreenCtx_st* found = find_context(context, call.name());
  if (found == nullptr) return CUDA_ERROR_INVALID_HANDLE;
  if (type != CU_DEV_RESOURCE_TYPE_SM) return CUDA_ERROR_INVALID_RESOURCE_TYPE;
  *resource = found->resource;
  return CUDA_SUCCESS;
}

CUresult cuGreenCtxStreamCreate(CUstream* stream, CUgreenCtx context, unsigned int flags, int priority) {
  const Call call("cuGreenCtxStreamCreate");
  CUgreenCtx_st* found = find_context(context, call.name());
  if (found == nullptr) return CUDA_ERROR_INVALID_HANDLE;
  if (stream == nullptr || flags != CU_STREAM_NON_BLOCKING) return CUDA_ERROR_INVALID_VALUE;
  auto made = std::make_unique<CUstream_st>();
  made->number = ++state().streams_made;
  made->device = found->device;
  made->priority = std::clamp(priority, -5, 0);
  made->context = found;
  *stream = made.get();
  state().streams.emplace(made.get(), std::move(made));
  return CUDA_SUCCESS;
}

CUresult cuStreamGetGreenCtx(CUstream stream, CUgreenCtx* context) {
  const Call call("cuStreamGetGreenCtx");
  const CUstream_st* found = find_stream(stream, call.name());
  if (found == nullptr || context == nullptr) return CUDA_ERROR_INVALID_HANDLE;
  *context = found->context;
  return CUDA_SUCCESS;
}

CUresult cuStreamDestroy(CUstream stream) {
  return cudaStreamDestroy(stream) == cudaSuccess ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}
