// SPDX-License-Identifier: Apache-2.0
// Everything the emulated runtime knows, and the call guard under which it is touched. One lock: a call holds it, and lets others
// in between two pieces of work that it runs.
#pragma once

#include <cuda.h>

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "tests/cuda_host/control.h"

namespace cuda_host {

/// A small generator: seeds must give the same run with every standard library.
class Random {
 public:
  explicit Random(std::uint64_t seed = 1) : state_(seed * 0x9E3779B97F4A7C15ULL + 0x1234567ULL) {}
  std::uint64_t next() {
    std::uint64_t z = (state_ += 0x9E3779B97F4A7C15ULL);
    z = (z ^ (z >> 30U)) * 0xBF58476D1CE4E5B9ULL;
    z = (z ^ (z >> 27U)) * 0x94D049BB133111EBULL;
    return z ^ (z >> 31U);
  }
  /// bound < 2^32.
  std::uint64_t below(std::uint64_t bound) { return ((next() >> 32U) * bound) >> 32U; }
  bool one_in(std::uint64_t count) { return below(count) == 0; }

 private:
  std::uint64_t state_;
};

// ---- memory
struct Allocation {
  std::uintptr_t base = 0;  // what the caller got; its rounded end is the end of the pages
  std::size_t size = 0;
  std::uintptr_t pages = 0;  // accessible while work runs
  std::size_t pages_size = 0;
  std::uintptr_t map = 0;  // with the guard pages before and behind
  std::size_t map_size = 0;
  int device = 0;
  std::uint64_t number = 0;
  bool freed = false;
  bool open = false;
};

struct PinnedBlock {
  std::uintptr_t base = 0;
  std::size_t size = 0;
  std::size_t map_size = 0;  // 0: registered, the caller's own memory
};

// ---- work
enum class WorkKind : std::uint8_t { Kernel, Copy, Set, Record, Wait, GraphEnd };

/// What a stream or a graph node does; frozen when it is queued or captured.
struct Work {
  WorkKind kind = WorkKind::Wait;
  std::string name;
  int device = 0;
  std::function<void()> action;
  std::vector<std::uintptr_t> uses;  // bases of device and pinned memory
  std::uint64_t nanoseconds = 1000;  // of the virtual clock that events read
};

struct Operation {
  Work work;
  std::uint64_t number = 0;
  int stream = 0;
  std::uint64_t graph = 0;
  bool done = false;
  std::uint64_t finished_at = 0;
  std::size_t waits_for = 0;
  std::uint64_t mark = 0;  // of the last search for what a wait needs
  std::vector<std::weak_ptr<Operation>> dependencies;
  std::vector<std::shared_ptr<Operation>> dependents;
};
using OperationPointer = std::shared_ptr<Operation>;

struct Node {
  Work work;
  std::vector<std::size_t> dependencies;
};

struct Capture {
  cudaStreamCaptureMode mode = cudaStreamCaptureModeGlobal;
  std::thread::id owner;
  CUstream_st* origin = nullptr;
  bool invalidated = false;
  std::vector<Node> nodes;
  std::vector<CUstream_st*> streams;
};

}  // namespace cuda_host

struct CUstream_st {
  int number = 0;
  int device = 0;
  bool legacy = false;
  bool blocking = false;  // ordered with the legacy stream
  int priority = 0;
  bool destroyed = false;
  CUgreenCtx_st* context = nullptr;
  cuda_host::OperationPointer tail;
  std::shared_ptr<cuda_host::Capture> capture;
  std::vector<std::size_t> captured_tail;
};

struct CUevent_st {
  int device = 0;
  unsigned int flags = 0;
  bool destroyed = false;
  cuda_host::OperationPointer recorded;
  int stream = 0;                               // where it was recorded
  std::shared_ptr<cuda_host::Capture> capture;  // set: recorded while capturing
  std::vector<std::size_t> captured;
};

struct CUgraphNode_st {
  cudaGraphNodeType type = cudaGraphNodeTypeEmpty;
};

struct CUgraph_st {
  bool destroyed = false;
  int device = 0;
  CUgreenCtx_st* context = nullptr;  // in which it was captured
  std::vector<cuda_host::Node> nodes;
  std::deque<CUgraphNode_st> handles;
};

struct CUgraphExec_st {
  std::uint64_t number = 0;
  int device = 0;
  bool destroyed = false;
  CUgreenCtx_st* context = nullptr;
  std::size_t bytes = 0;
  std::vector<cuda_host::Node> nodes;
  cuda_host::OperationPointer last_launch;
};

struct CUdevResourceDesc_st {
  std::vector<CUdevResource> resources;
};

struct CUgreenCtx_st {
  int device = 0;
  bool destroyed = false;
  CUdevResource resource{};
};

namespace cuda_host {

struct Device {
  cudaError_t sticky = cudaSuccess;
  std::size_t used_bytes = 0;
  std::uint64_t peers = 0;  // bit per device whose memory kernels of this one may touch
  CUstream_st legacy;
};

/// Handles are never given back to the allocator before reset(), so that one used after its end is recognised.
template <class T>
using Handles = std::map<const T*, std::unique_ptr<T>>;

struct State {
  Options options;
  Random random;
  std::vector<std::unique_ptr<Device>> devices;

  std::map<std::uintptr_t, Allocation> memory;   // by map
  std::map<std::uintptr_t, PinnedBlock> pinned;  // by base
  std::uint64_t allocations_made = 0;
  std::uint64_t open_devices = 0;  // bit per device whose memory is accessible now
  bool opened_to_check = false;    // some memory was opened to look at its guard zones

  Handles<CUstream_st> streams;
  Handles<CUevent_st> events;
  Handles<CUgraph_st> graphs;
  Handles<CUgraphExec_st> executables;
  Handles<CUgreenCtx_st> contexts;
  std::vector<std::unique_ptr<CUdevResourceDesc_st>> descriptions;
  std::uint64_t splits_made = 0;
  int streams_made = 0;
  std::uint64_t executables_made = 0;
  std::vector<std::shared_ptr<Capture>> captures;  // not yet ended

  std::vector<OperationPointer> ready;
  std::size_t pending = 0;
  std::uint64_t operations_made = 0;
  std::uint64_t searches = 0;
  std::uint64_t clock = 0;  // virtual nanoseconds

  std::map<std::pair<const void*, int>, std::size_t> shared_limits;  // raised by cudaFuncSetAttribute, per kernel and device
  std::uint64_t kernels_until_failure = 0;                           // 0: none is to fail
  cudaError_t failure = cudaSuccess;

  std::vector<Fault> faults;
  std::function<void(const Fault&)> fault_callback;
  std::deque<LogEntry> log;
};

/// Under a Call only.
State& state();

/// One call of the runtime: takes the lock, and at its end closes device memory and gives the lock back.
class Call {
 public:
  explicit Call(const char* name);
  ~Call();
  Call(const Call&) = delete;
  Call& operator=(const Call&) = delete;

  [[nodiscard]] const char* name() const { return name_; }
  /// Notes a failure for cudaGetLastError and passes it on.
  cudaError_t result(cudaError_t error);
  /// The current device's first fatal error, else that of a call that may not be made while capturing.
  [[nodiscard]] cudaError_t refuse_unsafe();
  [[nodiscard]] cudaError_t sticky() const;
  [[nodiscard]] Device& device() const;
  /// Lets other threads' calls in.
  void breathe();

 private:
  const char* name_;
};

[[nodiscard]] int current_device();

void add_fault(FaultKind kind, std::string where, std::string what);
void add_log(Action action, std::string name, const CUstream_st* stream = nullptr, std::uint64_t operation = 0,
             std::uint64_t graph = 0);
/// stream: the one that waits, null for the host; awaited: -1 for all of the device.
void log_wait(Action action, std::string name, const CUstream_st* stream, int awaited);

// ---- memory.cpp
[[nodiscard]] Allocation* allocation_at(std::uintptr_t address);
[[nodiscard]] PinnedBlock* pinned_at(std::uintptr_t address);
/// Makes the memory of the devices in mask accessible, and that of others not.
void open_memory(std::uint64_t device_mask);
void close_memory();
/// Reports what was written round the allocations. whole: every byte of the zones, else the nearest.
enum class GuardReach : std::uint8_t { Near, Whole };
void check_guards(const std::string& where, GuardReach reach);
[[nodiscard]] std::string describe_address(std::uintptr_t address);
/// All device memory lies in one reserved range. The first two may be called by a signal handler.
[[nodiscard]] bool in_arena(std::uintptr_t address);
void open_page(std::uintptr_t address);
/// Back to what its allocation says.
void close_page(std::uintptr_t address);
void release_all_memory();
void report_if_in_flight(std::uintptr_t base, const char* call, const std::string& what);

// ---- streams.cpp
[[nodiscard]] CUstream_st* find_stream(cudaStream_t stream, const char* call);
/// Queues work, or adds it to the capture that the stream is part of.
[[nodiscard]] cudaError_t submit(Call& call, CUstream_st& stream, Work work);
OperationPointer enqueue(CUstream_st& stream, Work work, std::vector<OperationPointer> more_dependencies,
                         std::uint64_t graph = 0);
OperationPointer enqueue_node(int stream, Work work, const std::vector<OperationPointer>& dependencies, std::uint64_t graph);
void run_until(Call& call, const OperationPointer& target);
void run_some(Call& call);
void poll(Call& call, const OperationPointer& target);
void synchronize_device(Call& call, int device);

// ---- capture.cpp
void invalidate(Capture& capture);
void capture_work(CUstream_st& stream, Work work);
[[nodiscard]] cudaError_t refuse_legacy_while_capturing(const CUstream_st& stream);

// ---- launch.cpp and blocks.cpp
struct KernelRun {
  dim3 grid;
  dim3 block;
  std::size_t shared_bytes = 0;
  BoundKernel kernel;
  std::string name;
  int device = 0;
};
/// False when the kernel broke a rule; the fault is noted.
[[nodiscard]] bool run_kernel(const KernelRun& run);
[[nodiscard]] std::string kernel_name(const void* function);

// ---- signals.cpp
void install_signal_handlers();
/// Faults of host code since the last call.
void report_host_accesses();
void use_signal_stack();
/// Whether this thread is inside a kernel.
void mark_on_device(bool is);

}  // namespace cuda_host
