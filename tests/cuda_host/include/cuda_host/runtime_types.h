// SPDX-License-Identifier: Apache-2.0
// Types, flags and error codes of the CUDA 13 runtime, with the real header's values, as far as engine/cuda/ may meet them.
#pragma once
#pragma GCC system_header

#include <cstddef>

#include "cuda_host/vector_types.h"

#define CUDART_VERSION 13000

using cudaStream_t = struct CUstream_st*;
using cudaEvent_t = struct CUevent_st*;
using cudaGraph_t = struct CUgraph_st*;
using cudaGraphExec_t = struct CUgraphExec_st*;
using cudaGraphNode_t = struct CUgraphNode_st*;

#define cudaStreamLegacy ((cudaStream_t)0x1)

// X(name, value, description)
#define CUDA_HOST_ERRORS(X)                                                                             \
  X(cudaSuccess, 0, "no error")                                                                         \
  X(cudaErrorInvalidValue, 1, "invalid argument")                                                       \
  X(cudaErrorMemoryAllocation, 2, "out of memory")                                                      \
  X(cudaErrorInitializationError, 3, "initialization error")                                            \
  X(cudaErrorInvalidConfiguration, 9, "invalid configuration argument")                                 \
  X(cudaErrorInvalidHostPointer, 16, "invalid host pointer")                                            \
  X(cudaErrorInvalidDevicePointer, 17, "invalid device pointer")                                        \
  X(cudaErrorInvalidMemcpyDirection, 21, "invalid copy direction for memcpy")                           \
  X(cudaErrorInsufficientDriver, 35, "driver version is insufficient for runtime version")              \
  X(cudaErrorDevicesUnavailable, 46, "all devices are busy or unavailable")                             \
  X(cudaErrorInvalidDeviceFunction, 98, "invalid device function")                                      \
  X(cudaErrorNoDevice, 100, "no device is detected")                                                    \
  X(cudaErrorInvalidDevice, 101, "invalid device ordinal")                                              \
  X(cudaErrorNoKernelImageForDevice, 209, "no kernel image is available for execution on the device")   \
  X(cudaErrorECCUncorrectable, 214, "uncorrectable ECC error encountered")                              \
  X(cudaErrorPeerAccessUnsupported, 217, "peer access is not supported between these two devices")      \
  X(cudaErrorInvalidResourceHandle, 400, "invalid resource handle")                                     \
  X(cudaErrorIllegalState, 401, "the operation cannot be performed in the present state")               \
  X(cudaErrorSymbolNotFound, 500, "named symbol not found")                                             \
  X(cudaErrorNotReady, 600, "device not ready")                                                         \
  X(cudaErrorIllegalAddress, 700, "an illegal memory access was encountered")                           \
  X(cudaErrorLaunchOutOfResources, 701, "too many resources requested for launch")                      \
  X(cudaErrorLaunchTimeout, 702, "the launch timed out and was terminated")                             \
  X(cudaErrorPeerAccessAlreadyEnabled, 704, "peer access is already enabled")                           \
  X(cudaErrorPeerAccessNotEnabled, 705, "peer access has not been enabled")                             \
  X(cudaErrorAssert, 710, "device-side assert triggered")                                               \
  X(cudaErrorHostMemoryAlreadyRegistered, 712, "part or all of the memory range is already registered") \
  X(cudaErrorHostMemoryNotRegistered, 713, "pointer does not correspond to a registered memory region") \
  X(cudaErrorMisalignedAddress, 716, "misaligned address")                                              \
  X(cudaErrorLaunchFailure, 719, "unspecified launch failure")                                          \
  X(cudaErrorNotPermitted, 800, "operation not permitted")                                              \
  X(cudaErrorNotSupported, 801, "operation not supported")                                              \
  X(cudaErrorStreamCaptureUnsupported, 900, "operation not permitted when stream is capturing")         \
  X(cudaErrorStreamCaptureInvalidated, 901, "operation failed due to a previous error during capture")  \
  X(cudaErrorStreamCaptureMerge, 902, "operation would result in a merge of separate captures")         \
  X(cudaErrorStreamCaptureUnmatched, 903, "capture was not ended in the stream it began in")            \
  X(cudaErrorStreamCaptureUnjoined, 904, "capturing stream has unjoined work")                          \
  X(cudaErrorStreamCaptureIsolation, 905, "dependency created on uncaptured work in another stream")    \
  X(cudaErrorStreamCaptureImplicit, 906, "operation would make the legacy stream depend on a capture")  \
  X(cudaErrorCapturedEvent, 907, "operation not permitted on an event last recorded in a capture")      \
  X(cudaErrorStreamCaptureWrongThread, 908, "attempt to terminate a capture from another thread")       \
  X(cudaErrorInvalidResourceType, 914, "invalid resource type")                                         \
  X(cudaErrorInvalidResourceConfiguration, 915, "invalid resource configuration")                       \
  X(cudaErrorUnknown, 999, "unknown error")

enum cudaError {
#define CUDA_HOST_ERROR(name, value, description) name = value,
  CUDA_HOST_ERRORS(CUDA_HOST_ERROR)
#undef CUDA_HOST_ERROR
};
using cudaError_t = cudaError;

enum cudaMemcpyKind {
  cudaMemcpyHostToHost = 0,
  cudaMemcpyHostToDevice = 1,
  cudaMemcpyDeviceToHost = 2,
  cudaMemcpyDeviceToDevice = 3,
  cudaMemcpyDefault = 4,
};

enum : unsigned int {
  cudaHostAllocDefault = 0x00,
  cudaHostAllocPortable = 0x01,
  cudaHostAllocMapped = 0x02,
  cudaHostAllocWriteCombined = 0x04,
  cudaHostRegisterDefault = 0x00,
  cudaHostRegisterPortable = 0x01,
  cudaHostRegisterMapped = 0x02,
  cudaHostRegisterReadOnly = 0x08,
  cudaStreamDefault = 0x00,
  cudaStreamNonBlocking = 0x01,
  cudaEventDefault = 0x00,
  cudaEventBlockingSync = 0x01,
  cudaEventDisableTiming = 0x02,
};

enum cudaStreamCaptureStatus {
  cudaStreamCaptureStatusNone = 0,
  cudaStreamCaptureStatusActive = 1,
  cudaStreamCaptureStatusInvalidated = 2,
};

enum cudaStreamCaptureMode {
  cudaStreamCaptureModeGlobal = 0,
  cudaStreamCaptureModeThreadLocal = 1,
  cudaStreamCaptureModeRelaxed = 2,
};

enum cudaGraphNodeType {
  cudaGraphNodeTypeKernel = 0,
  cudaGraphNodeTypeMemcpy = 1,
  cudaGraphNodeTypeMemset = 2,
  cudaGraphNodeTypeHost = 3,
  cudaGraphNodeTypeGraph = 4,
  cudaGraphNodeTypeEmpty = 5,
};

enum cudaFuncAttribute {
  cudaFuncAttributeMaxDynamicSharedMemorySize = 8,
  cudaFuncAttributePreferredSharedMemoryCarveout = 9,
};

struct cudaFuncAttributes {
  std::size_t sharedSizeBytes;
  std::size_t constSizeBytes;
  std::size_t localSizeBytes;
  int maxThreadsPerBlock;
  int numRegs;
  int ptxVersion;
  int binaryVersion;
  int cacheModeCA;
  int maxDynamicSharedSizeBytes;
  int preferredShmemCarveout;
};

enum cudaDeviceAttr {
  cudaDevAttrMaxThreadsPerBlock = 1,
  cudaDevAttrMaxGridDimX = 5,
  cudaDevAttrMaxGridDimY = 6,
  cudaDevAttrMaxGridDimZ = 7,
  cudaDevAttrMaxSharedMemoryPerBlock = 8,
  cudaDevAttrWarpSize = 10,
  cudaDevAttrMaxRegistersPerBlock = 12,
  cudaDevAttrClockRate = 13,
  cudaDevAttrMultiProcessorCount = 16,
  cudaDevAttrIntegrated = 18,
  cudaDevAttrConcurrentKernels = 31,
  cudaDevAttrMemoryClockRate = 36,
  cudaDevAttrGlobalMemoryBusWidth = 37,
  cudaDevAttrL2CacheSize = 38,
  cudaDevAttrMaxThreadsPerMultiProcessor = 39,
  cudaDevAttrAsyncEngineCount = 40,
  cudaDevAttrUnifiedAddressing = 41,
  cudaDevAttrComputeCapabilityMajor = 75,
  cudaDevAttrComputeCapabilityMinor = 76,
  cudaDevAttrStreamPrioritiesSupported = 78,
  cudaDevAttrMaxSharedMemoryPerMultiprocessor = 81,
  cudaDevAttrMaxRegistersPerMultiprocessor = 82,
  cudaDevAttrCooperativeLaunch = 95,
  cudaDevAttrMaxSharedMemoryPerBlockOptin = 97,
  cudaDevAttrMaxBlocksPerMultiprocessor = 106,
  cudaDevAttrReservedSharedMemoryPerBlock = 111,
  cudaDevAttrMemoryPoolsSupported = 115,
};

struct CUuuid_st {
  char bytes[16];
};
using cudaUUID_t = CUuuid_st;

struct cudaDeviceProp {
  char name[256];
  cudaUUID_t uuid;
  std::size_t totalGlobalMem;
  std::size_t sharedMemPerBlock;
  int regsPerBlock;
  int warpSize;
  int maxThreadsPerBlock;
  int maxThreadsDim[3];
  int maxGridSize[3];
  std::size_t totalConstMem;
  int major;
  int minor;
  int multiProcessorCount;
  int integrated;
  int concurrentKernels;
  int ECCEnabled;
  int pciBusID;
  int pciDeviceID;
  int pciDomainID;
  int asyncEngineCount;
  int unifiedAddressing;
  int memoryBusWidth;
  int l2CacheSize;
  int maxThreadsPerMultiProcessor;
  int streamPrioritiesSupported;
  std::size_t sharedMemPerMultiprocessor;
  int regsPerMultiprocessor;
  int cooperativeLaunch;
  std::size_t sharedMemPerBlockOptin;
  int maxBlocksPerMultiProcessor;
  std::size_t reservedSharedMemPerBlock;
  int memoryPoolsSupported;
  int clusterLaunch;
};

enum cudaLaunchAttributeID {
  cudaLaunchAttributeIgnore = 0,
  cudaLaunchAttributeCooperative = 2,
  cudaLaunchAttributeClusterDimension = 4,
  cudaLaunchAttributeProgrammaticStreamSerialization = 6,
  cudaLaunchAttributePriority = 8,
  cudaLaunchAttributePreferredSharedMemoryCarveout = 14,
};

union cudaLaunchAttributeValue {
  char pad[64];
  int cooperative;
  struct {
    unsigned int x;
    unsigned int y;
    unsigned int z;
  } clusterDim;
  int programmaticStreamSerializationAllowed;
  int priority;
  unsigned int sharedMemCarveout;
};

struct cudaLaunchAttribute {
  cudaLaunchAttributeID id;
  char pad[8 - sizeof(cudaLaunchAttributeID)];
  cudaLaunchAttributeValue val;
};

struct cudaLaunchConfig_t {
  dim3 gridDim;
  dim3 blockDim;
  std::size_t dynamicSmemBytes;
  cudaStream_t stream;
  cudaLaunchAttribute* attrs;
  unsigned int numAttrs;
};

enum cudaDriverEntryPointQueryResult {
  cudaDriverEntryPointSuccess = 0,
  cudaDriverEntryPointSymbolNotFound = 1,
  cudaDriverEntryPointVersionNotSufficent = 2,
};

enum : unsigned long long {
  cudaEnableDefault = 0x0,
};
