// SPDX-License-Identifier: Apache-2.0
#include "engine/cuda/runtime.h"

namespace rubato::engine::cuda {
namespace {

Unexpected refused(cudaError_t code, const char* call, std::int64_t bytes) {
  Error error = check(code, call).error();
  error.message += ", " + std::to_string(bytes) + " bytes asked for";
  return Unexpected(std::move(error));
}

}  // namespace

Result<void> check(cudaError_t code, const char* call) {
  if (code == cudaSuccess) return {};
  const ErrorCode kind = code == cudaErrorMemoryAllocation ? ErrorCode::ResourceExhausted : ErrorCode::DeviceLost;
  return unexpected(kind, std::string(call) + ": " + cudaGetErrorString(code) + " (" + cudaGetErrorName(code) + ")");
}

Result<DeviceFacts> open_device(std::int32_t index) {
  int count = 0;
  if (const cudaError_t code = cudaGetDeviceCount(&count); code != cudaSuccess) {
    return unexpected(ErrorCode::NotFound, "spec.devices",
                      std::string("no CUDA device can be used: ") + cudaGetErrorString(code) + "; is the driver installed?");
  }
  if (index < 0 || index >= count) {
    return unexpected(ErrorCode::NotFound, "spec.devices",
                      "cuda:" + std::to_string(index) + " does not exist; this machine has " + std::to_string(count) +
                          (count == 1 ? " device, cuda:0" : " devices, cuda:0.."));
  }
  if (auto set = check(cudaSetDevice(index), "cudaSetDevice"); !set) return Unexpected(std::move(set).error());
  cudaDeviceProp properties{};
  if (auto read = check(cudaGetDeviceProperties(&properties, index), "cudaGetDeviceProperties"); !read)
    return Unexpected(std::move(read).error());
  DeviceFacts facts;
  facts.name = properties.name;
  facts.index = index;
  facts.multiprocessors = properties.multiProcessorCount;
  facts.major = properties.major;
  facts.minor = properties.minor;
  facts.memory_bytes = static_cast<std::int64_t>(properties.totalGlobalMem);
  int version = 0;
  if (cudaDriverGetVersion(&version) == cudaSuccess) facts.driver_version = version;
  if (cudaRuntimeGetVersion(&version) == cudaSuccess) facts.runtime_version = version;
  if (facts.major < 8) {
    return unexpected(ErrorCode::InvalidArgument, "spec.devices",
                      "cuda:" + std::to_string(index) + " (" + facts.name + ") has compute capability " +
                          std::to_string(facts.major) + "." + std::to_string(facts.minor) + "; 8.0 or later is needed");
  }
  return facts;
}

Result<int> Stream::priority(Urgency urgency) {
  int least = 0;
  int greatest = 0;
  if (auto range = check(cudaDeviceGetStreamPriorityRange(&least, &greatest), "cudaDeviceGetStreamPriorityRange"); !range)
    return Unexpected(std::move(range).error());
  return urgency == Urgency::Urgent ? greatest : least;
}

Result<Stream> Stream::make(Urgency urgency) {
  const Result<int> wanted = priority(urgency);
  if (!wanted) return Unexpected(Error(wanted.error()));
  cudaStream_t stream = nullptr;
  if (auto made = check(cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking, *wanted), "cudaStreamCreateWithPriority");
      !made)
    return Unexpected(std::move(made).error());
  return Stream(stream);
}

Stream::~Stream() {
  if (stream_ != nullptr) static_cast<void>(cudaStreamDestroy(stream_));
}

Result<Event> Event::make() {
  cudaEvent_t event = nullptr;
  if (auto made = check(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "cudaEventCreateWithFlags"); !made)
    return Unexpected(std::move(made).error());
  return Event(event);
}

Event::~Event() {
  if (event_ != nullptr) static_cast<void>(cudaEventDestroy(event_));
}

Result<DeviceMemory> DeviceMemory::make(std::int64_t bytes) {
  CHECK(bytes >= 0, "bytes=", bytes);
  DeviceMemory memory;
  if (bytes == 0) return memory;
  if (const cudaError_t code = cudaMalloc(&memory.data_, static_cast<std::size_t>(bytes)); code != cudaSuccess) {
    static_cast<void>(cudaGetLastError());  // memory that is missing is not a broken device
    return refused(code, "cudaMalloc", bytes);
  }
  memory.bytes_ = bytes;
  return memory;
}

DeviceMemory::~DeviceMemory() {
  if (data_ != nullptr) static_cast<void>(cudaFree(data_));
}

Result<PinnedMemory> PinnedMemory::make(std::int64_t bytes) {
  CHECK(bytes >= 0, "bytes=", bytes);
  PinnedMemory memory;
  if (bytes == 0) return memory;
  if (const cudaError_t code = cudaHostAlloc(&memory.data_, static_cast<std::size_t>(bytes), cudaHostAllocDefault);
      code != cudaSuccess) {
    static_cast<void>(cudaGetLastError());
    return refused(code, "cudaHostAlloc", bytes);
  }
  memory.bytes_ = bytes;
  return memory;
}

PinnedMemory::~PinnedMemory() {
  if (data_ != nullptr) static_cast<void>(cudaFreeHost(data_));
}

Result<void> Graph::begin(const Stream& stream) {
  // Thread-local: what other threads do meanwhile, a running step above all, neither breaks the capture nor is broken by it.
  return check(cudaStreamBeginCapture(stream.get(), cudaStreamCaptureModeThreadLocal), "cudaStreamBeginCapture");
}

Result<Graph> Graph::end(const Stream& stream, Result<void> queued) {
  cudaGraph_t graph = nullptr;
  Result<void> ended = check(cudaStreamEndCapture(stream.get(), &graph), "cudaStreamEndCapture");
  cudaGraphExec_t exec = nullptr;
  if (queued && ended) ended = check(cudaGraphInstantiate(&exec, graph, 0), "cudaGraphInstantiate");
  if (graph != nullptr) static_cast<void>(cudaGraphDestroy(graph));
  if (!queued) return Unexpected(std::move(queued).error());
  if (!ended) return Unexpected(std::move(ended).error());
  Graph owned(exec);
  // Otherwise the first launch pays for the upload, within a step.
  if (auto uploaded = check(cudaGraphUpload(exec, stream.get()), "cudaGraphUpload"); !uploaded)
    return Unexpected(std::move(uploaded).error());
  if (auto waited = stream.wait(); !waited) return Unexpected(std::move(waited).error());
  return owned;
}

Graph::~Graph() {
  if (exec_ != nullptr) static_cast<void>(cudaGraphExecDestroy(exec_));
}

}  // namespace rubato::engine::cuda
