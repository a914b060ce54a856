// SPDX-License-Identifier: Apache-2.0
// The CUDA runtime as owners: device, stream, event, memory and graph each end with their scope, and every failure is a Result
// that names the call. Kernels are launched through launch() alone, which is plain C++.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "manifests/check.h"
#include "manifests/result.h"

namespace rubato::engine::cuda {

/// `cudaMalloc: out of memory (cudaErrorMemoryAllocation)`. Memory that cannot be had is ResourceExhausted, everything else
/// DeviceLost: CUDA errors are sticky.
[[nodiscard]] Result<void> check(cudaError_t code, const char* call);

struct DeviceFacts {
  std::string name;
  std::int32_t index = 0;
  std::int32_t multiprocessors = 0;
  std::int32_t major = 0;  // compute capability
  std::int32_t minor = 0;
  std::int64_t memory_bytes = 0;
  std::int32_t driver_version = 0;
  std::int32_t runtime_version = 0;
};

/// Makes device `index` current for this thread. NotFound when there is no such device or no driver.
[[nodiscard]] Result<DeviceFacts> open_device(std::int32_t index);

/// A non-blocking stream.
class Stream {
 public:
  /// Urgent streams get the device's highest priority.
  enum class Urgency : std::uint8_t { Normal, Urgent };
  [[nodiscard]] static Result<Stream> make(Urgency urgency = Urgency::Normal);
  /// Takes over a stream that was made elsewhere (in a part of the device).
  [[nodiscard]] static Stream own(cudaStream_t stream) { return Stream(stream); }
  /// What CUDA calls it on the current device.
  [[nodiscard]] static Result<int> priority(Urgency urgency);

  Stream(Stream&& other) noexcept : stream_(std::exchange(other.stream_, nullptr)) {}
  Stream& operator=(Stream&& other) noexcept {
    std::swap(stream_, other.stream_);
    return *this;
  }
  ~Stream();

  [[nodiscard]] cudaStream_t get() const { return stream_; }
  [[nodiscard]] Result<void> wait() const { return check(cudaStreamSynchronize(stream_), "cudaStreamSynchronize"); }

 private:
  explicit Stream(cudaStream_t stream) : stream_(stream) {}
  cudaStream_t stream_ = nullptr;
};

/// An event without timing.
class Event {
 public:
  [[nodiscard]] static Result<Event> make();
  Event(Event&& other) noexcept : event_(std::exchange(other.event_, nullptr)) {}
  Event& operator=(Event&& other) noexcept {
    std::swap(event_, other.event_);
    return *this;
  }
  ~Event();

  [[nodiscard]] Result<void> record(const Stream& stream) const {
    return check(cudaEventRecord(event_, stream.get()), "cudaEventRecord");
  }
  [[nodiscard]] Result<void> wait() const { return check(cudaEventSynchronize(event_), "cudaEventSynchronize"); }
  /// Work queued on stream from here on starts after what was recorded.
  [[nodiscard]] Result<void> hold(const Stream& stream) const {
    return check(cudaStreamWaitEvent(stream.get(), event_, 0), "cudaStreamWaitEvent");
  }

 private:
  explicit Event(cudaEvent_t event) : event_(event) {}
  cudaEvent_t event_ = nullptr;
};

/// Device memory, 256-byte aligned, uninitialised.
class DeviceMemory {
 public:
  DeviceMemory() = default;
  [[nodiscard]] static Result<DeviceMemory> make(std::int64_t bytes);
  DeviceMemory(DeviceMemory&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)), bytes_(std::exchange(other.bytes_, 0)) {}
  DeviceMemory& operator=(DeviceMemory&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
    return *this;
  }
  ~DeviceMemory();

  [[nodiscard]] std::byte* data() const { return static_cast<std::byte*>(data_); }
  [[nodiscard]] std::int64_t bytes() const { return bytes_; }

 private:
  void* data_ = nullptr;
  std::int64_t bytes_ = 0;
};

/// Page-locked host memory: what asynchronous copies read and write.
class PinnedMemory {
 public:
  PinnedMemory() = default;
  [[nodiscard]] static Result<PinnedMemory> make(std::int64_t bytes);
  PinnedMemory(PinnedMemory&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)), bytes_(std::exchange(other.bytes_, 0)) {}
  PinnedMemory& operator=(PinnedMemory&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
    return *this;
  }
  ~PinnedMemory();

  [[nodiscard]] std::byte* data() const { return static_cast<std::byte*>(data_); }
  [[nodiscard]] std::int64_t bytes() const { return bytes_; }

 private:
  void* data_ = nullptr;
  std::int64_t bytes_ = 0;
};

/// An executable graph: what one pass over a stream queued, with its arguments frozen.
class Graph {
 public:
  /// Captures what body queues on stream. body returns Result<void>; while it runs, allocation, synchronisation and host reads
  /// are forbidden. Other threads go on using the device.
  template <class Body>
  [[nodiscard]] static Result<Graph> capture(const Stream& stream, Body&& body) {
    if (auto begun = begin(stream); !begun) return Unexpected(std::move(begun).error());
    Result<void> queued = body();
    return end(stream, std::move(queued));
  }
  Graph(Graph&& other) noexcept : exec_(std::exchange(other.exec_, nullptr)) {}
  Graph& operator=(Graph&& other) noexcept {
    std::swap(exec_, other.exec_);
    return *this;
  }
  ~Graph();

  [[nodiscard]] Result<void> launch(const Stream& stream) const {
    return check(cudaGraphLaunch(exec_, stream.get()), "cudaGraphLaunch");
  }

 private:
  explicit Graph(cudaGraphExec_t exec) : exec_(exec) {}
  [[nodiscard]] static Result<void> begin(const Stream& stream);
  [[nodiscard]] static Result<Graph> end(const Stream& stream, Result<void> queued);
  cudaGraphExec_t exec_ = nullptr;
};

struct LaunchShape {
  std::uint32_t blocks = 1;  // x
  std::uint32_t blocks_y = 1;
  std::uint32_t threads = 1;
  std::size_t shared_bytes = 0;
};

/// Queues one kernel. Launch errors are kept by the runtime; the step's end reads them (cudaPeekAtLastError).
template <class... Parameters, class... Arguments>
void launch(cudaStream_t stream, const LaunchShape& shape, void (*kernel)(Parameters...), Arguments&&... arguments) {
  if (shape.blocks == 0 || shape.blocks_y == 0) return;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(shape.blocks, shape.blocks_y, 1);
  config.blockDim = dim3(shape.threads, 1, 1);
  config.dynamicSmemBytes = shape.shared_bytes;
  config.stream = stream;
  static_cast<void>(cudaLaunchKernelEx(&config, kernel, std::forward<Arguments>(arguments)...));
}

/// Raises a kernel's limit of dynamic shared memory; at set-up, once per kernel that needs more than 48 KiB.
template <class... Parameters>
[[nodiscard]] Result<void> allow_shared_memory(void (*kernel)(Parameters...), std::size_t bytes) {
  return check(cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel), cudaFuncAttributeMaxDynamicSharedMemorySize,
                                    static_cast<int>(bytes)),
               "cudaFuncSetAttribute");
}

}  // namespace rubato::engine::cuda
