// SPDX-License-Identifier: Apache-2.0
// Host functions of the CUDA 13 runtime, as far as engine/cuda/ uses them. What each does here, and which misuse it reports, is
// told in ../../README.md.
#pragma once
#pragma GCC system_header

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <tuple>
#include <type_traits>
#include <utility>

#include "cuda_host/runtime_types.h"

// ---- errors and versions
cudaError_t cudaGetLastError();
cudaError_t cudaPeekAtLastError();
const char* cudaGetErrorName(cudaError_t error);
const char* cudaGetErrorString(cudaError_t error);
cudaError_t cudaDriverGetVersion(int* version);
cudaError_t cudaRuntimeGetVersion(int* version);
cudaError_t cudaGetDriverEntryPointByVersion(const char* symbol, void** function, unsigned int version, unsigned long long flags,
                                             cudaDriverEntryPointQueryResult* result = nullptr);

// ---- devices
cudaError_t cudaGetDeviceCount(int* count);
cudaError_t cudaSetDevice(int device);
cudaError_t cudaGetDevice(int* device);
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int device);
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device);
cudaError_t cudaDeviceGetPCIBusId(char* text, int length, int device);
cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest);
cudaError_t cudaDeviceCanAccessPeer(int* can, int device, int peer);
cudaError_t cudaDeviceEnablePeerAccess(int peer, unsigned int flags);
cudaError_t cudaDeviceSynchronize();

// ---- memory
cudaError_t cudaMalloc(void** pointer, std::size_t size);
cudaError_t cudaFree(void* pointer);
cudaError_t cudaHostAlloc(void** pointer, std::size_t size, unsigned int flags);
cudaError_t cudaFreeHost(void* pointer);
cudaError_t cudaHostRegister(void* pointer, std::size_t size, unsigned int flags);
cudaError_t cudaHostUnregister(void* pointer);
cudaError_t cudaMemGetInfo(std::size_t* free_bytes, std::size_t* total);
cudaError_t cudaMemcpy(void* to, const void* from, std::size_t count, cudaMemcpyKind kind);
cudaError_t cudaMemcpyAsync(void* to, const void* from, std::size_t count, cudaMemcpyKind kind, cudaStream_t stream = nullptr);
cudaError_t cudaMemcpyPeerAsync(void* to, int to_device, const void* from, int from_device, std::size_t count,
                                cudaStream_t stream = nullptr);
cudaError_t cudaMemset(void* pointer, int value, std::size_t count);
cudaError_t cudaMemsetAsync(void* pointer, int value, std::size_t count, cudaStream_t stream = nullptr);

template <class T>
cudaError_t cudaMalloc(T** pointer, std::size_t size) {
  return ::cudaMalloc(reinterpret_cast<void**>(pointer), size);
}
template <class T>
cudaError_t cudaHostAlloc(T** pointer, std::size_t size, unsigned int flags) {
  return ::cudaHostAlloc(reinterpret_cast<void**>(pointer), size, flags);
}
template <class T>
cudaError_t cudaMallocHost(T** pointer, std::size_t size, unsigned int flags = cudaHostAllocDefault) {
  return ::cudaHostAlloc(reinterpret_cast<void**>(pointer), size, flags);
}

// ---- streams and events
cudaError_t cudaStreamCreate(cudaStream_t* stream);
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned int flags);
cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned int flags, int priority);
cudaError_t cudaStreamDestroy(cudaStream_t stream);
cudaError_t cudaStreamSynchronize(cudaStream_t stream);
cudaError_t cudaStreamQuery(cudaStream_t stream);
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned int flags = 0);
cudaError_t cudaEventCreate(cudaEvent_t* event);
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned int flags);
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream = nullptr);
cudaError_t cudaEventSynchronize(cudaEvent_t event);
cudaError_t cudaEventQuery(cudaEvent_t event);
cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t start, cudaEvent_t end);
cudaError_t cudaEventDestroy(cudaEvent_t event);

// ---- capture and graphs
cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode mode);
cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph);
cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status);
cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode);
cudaError_t cudaGraphInstantiate(cudaGraphExec_t* executable, cudaGraph_t graph, unsigned long long flags = 0);
cudaError_t cudaGraphUpload(cudaGraphExec_t executable, cudaStream_t stream);
cudaError_t cudaGraphLaunch(cudaGraphExec_t executable, cudaStream_t stream);
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t executable);
cudaError_t cudaGraphDestroy(cudaGraph_t graph);
cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t* nodes, std::size_t* count);
cudaError_t cudaGraphNodeGetType(cudaGraphNode_t node, cudaGraphNodeType* type);

// ---- kernels
cudaError_t cudaFuncSetAttribute(const void* function, cudaFuncAttribute attribute, int value);
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void* function);
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, const void* function, int block_size, std::size_t shared);

template <class T>
cudaError_t cudaFuncSetAttribute(T* function, cudaFuncAttribute attribute, int value) {
  return ::cudaFuncSetAttribute(reinterpret_cast<const void*>(function), attribute, value);
}
template <class T>
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, T* function) {
  return ::cudaFuncGetAttributes(attributes, reinterpret_cast<const void*>(function));
}
template <class T>
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, T function, int block_size, std::size_t shared) {
  return ::cudaOccupancyMaxActiveBlocksPerMultiprocessor(blocks, reinterpret_cast<const void*>(function), block_size, shared);
}

namespace cuda_host {

/// A kernel with its arguments as they were when it was launched or captured.
struct BoundKernel {
  const void* function = nullptr;
  std::function<void()> run;                      // one thread of the kernel
  std::shared_ptr<const void> arguments;          // the bytes below, kept alive
  const unsigned char* argument_bytes = nullptr;  // searched for pointers
  std::size_t argument_size = 0;
};

cudaError_t launch_kernel(const cudaLaunchConfig_t& config, BoundKernel kernel);

}  // namespace cuda_host

template <class... Parameters, class... Arguments>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Parameters...), Arguments&&... arguments) {
  static_assert(sizeof...(Parameters) == sizeof...(Arguments), "a kernel is launched with all of its arguments");
  static_assert((std::is_trivially_copyable_v<std::remove_cvref_t<Parameters>> && ...), "kernel arguments are copied as bytes");
  static_assert((!std::is_reference_v<Parameters> && ...), "a kernel cannot take references");
  using Frozen = std::tuple<std::remove_cv_t<Parameters>...>;
  // Value-initialised first: bytes between the arguments must not hold remnants that look like pointers.
  struct Bytes {
    alignas(16) unsigned char storage[sizeof(Frozen) + 1] = {};
  };
  auto bytes = std::make_shared<Bytes>();
  const Frozen* frozen = new (bytes->storage) Frozen(static_cast<Parameters>(std::forward<Arguments>(arguments))...);
  return cuda_host::launch_kernel(*config, cuda_host::BoundKernel{.function = reinterpret_cast<const void*>(kernel),
                                                           .run = [kernel, frozen] { std::apply(kernel, *frozen); },
                                                           .arguments = bytes,
                                                           .argument_bytes = bytes->storage,
                                                           .argument_size = sizeof(Frozen)});
}
