// SPDX-License-Identifier: Apache-2.0
// How a test steers the emulated devices and asks what they did: size and seed, injected errors, faults found, and the order in
// which work was queued and ran. Every function may be called from any thread.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace cuda_host {

/// What the heuristic of cuBLASLt offers. Algorithms are described in matmul.cpp.
enum class MatmulCandidates : std::uint8_t {
  All,             // some whose rows depend on the shape or that split K, then two with a fixed order
  NoneAcceptable,  // only such that a probe must refuse
  None,            // the heuristic finds nothing
};

/// Whether devices can be divided.
enum class GreenContexts : std::uint8_t {
  Offered,
  Missing,  // the driver has no such functions
  Refused,  // it has, and refuses every split
};

struct Options {
  std::uint64_t seed = 1;
  int devices = 1;
  int multiprocessors = 132;
  int major = 9;  // compute capability
  int minor = 0;
  std::size_t memory_bytes = std::size_t{512} << 20U;  // per device; cudaMalloc fails beyond it
  MatmulCandidates matmul_candidates = MatmulCandidates::All;
  GreenContexts green_contexts = GreenContexts::Offered;
};

/// Forgets everything: memory, streams, graphs, errors, faults, log. No other thread may be inside a call, and every handle and
/// pointer from before is void.
void reset(const Options& options = {});
void set_seed(std::uint64_t seed);
void set_matmul_candidates(MatmulCandidates candidates);

/// The count-th kernel to run from here on (1 is the next) breaks its device with error instead of running.
void fail_kernel(std::uint64_t count, cudaError_t error);

// ---- faults: what a real device might let pass, or would break on
enum class FaultKind : std::uint8_t {
  OutOfBounds,     // guard zones written, pages outside an allocation touched
  UseAfterFree,    // freed device memory touched, or in the arguments of what is launched
  IllegalAddress,  // a kernel touched an address that is no memory, or is misaligned
  HostAccess,      // host code touched device memory
  HostPointer,     // a kernel was given pageable host memory
  PageableCopy,    // an asynchronous copy from or to pageable memory
  Divergence,      // threads of a block wait for others that cannot come
  Spinning,        // a thread waits for another block by polling
  InFlight,        // memory, graph or context destroyed while queued work uses it
  BadHandle,       // a destroyed handle was used
  WrongPlace,      // a graph was launched on another device or green context than it was captured in
  Kernel,          // a kernel broke a rule of an instruction
};
struct Fault {
  FaultKind kind;
  std::string where;  // kernel or call
  std::string what;
  [[nodiscard]] std::string text() const { return where + ": " + what; }
};
[[nodiscard]] std::vector<Fault> faults();
/// faults(), and forgets them.
[[nodiscard]] std::vector<Fault> take_faults();
/// All faults, one a line; empty when there are none: EXPECT_EQ(cuda_host::fault_text(), "").
[[nodiscard]] std::string fault_text();
/// Called at each fault, on the thread that meets it; it must not call the runtime.
void on_fault(std::function<void(const Fault&)> callback);

// ---- what happened
enum class Action : std::uint8_t {
  Queued,
  Ran,
  GraphLaunched,
  HostWaits,    // a call waits for a stream, whether or not there is something left to wait for; then, if there is,
  WaitBegan,    //
  WaitEnded,    //
  StreamWaits,  // a stream is made to wait for an event of another
  CaptureBegan,
  CaptureEnded,
  GraphInstantiated,
  GraphDestroyed,
  Allocated,
  Freed,
};
struct LogEntry {
  Action action;
  std::string name;  // kernel, call
  int device = 0;
  int stream = 0;               // stream_number(); 0 is the legacy stream
  int awaited = 0;              // HostWaits, StreamWaits: the stream whose work is waited for; -1: of the whole device
  std::uint64_t operation = 0;  // ties Queued to Ran
  std::uint64_t thread = 0;     // host threads are numbered as they first call
  std::uint64_t graph = 0;      // number of the executable graph it belongs to, 0: none
};
/// The last million entries, oldest first.
[[nodiscard]] std::vector<LogEntry> log();
void clear_log();
[[nodiscard]] int stream_number(cudaStream_t stream);
/// This thread's number in the log.
[[nodiscard]] std::uint64_t thread_number();

struct Live {
  std::size_t allocations = 0;
  std::size_t allocated_bytes = 0;
  std::size_t pinned = 0;
  std::size_t streams = 0;
  std::size_t events = 0;
  std::size_t graphs = 0;
  std::size_t executable_graphs = 0;
  std::size_t green_contexts = 0;
  std::size_t pending_operations = 0;
};
[[nodiscard]] Live live();
/// Everything that is queued runs, in an order that the seed chooses.
void run_pending();

}  // namespace cuda_host
