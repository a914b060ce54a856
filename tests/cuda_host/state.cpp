// SPDX-License-Identifier: Apache-2.0
// The state itself, its fair lock, faults and log, and the control functions of tests.
#include "tests/cuda_host/state.h"

#include <atomic>
#include <utility>

namespace cuda_host {

namespace {

constexpr std::size_t log_entries_max = 1'000'000;
constexpr std::size_t faults_max = 1000;

// Served in the order of arrival: a thread that runs much work in small pieces must let others in between them.
class FairLock {
 public:
  void lock() {
    std::unique_lock held(mutex_);
    const std::uint64_t ticket = next_++;
    turn_.wait(held, [&] { return serving_ == ticket; });
  }
  void unlock() {
    {
      const std::scoped_lock held(mutex_);
      ++serving_;
    }
    turn_.notify_all();
  }

 private:
  std::mutex mutex_;
  std::condition_variable turn_;
  std::uint64_t next_ = 0;
  std::uint64_t serving_ = 0;
};

FairLock& lock() {
  static FairLock instance;
  return instance;
}

std::unique_ptr<State> make_state(const Options& options) {
  auto made = std::make_unique<State>();
  made->options = options;
  made->random = Random(options.seed);
  for (int i = 0; i < options.devices; ++i) {
    auto device = std::make_unique<Device>();
    device->legacy.device = i;
    device->legacy.legacy = true;
    device->legacy.blocking = true;
    made->devices.push_back(std::move(device));
  }
  return made;
}

std::unique_ptr<State>& owner() {
  static std::unique_ptr<State> instance = make_state({});
  return instance;
}

thread_local cudaError_t last_error = cudaSuccess;
thread_local int device_of_thread = 0;
thread_local cudaStreamCaptureMode capture_mode_of_thread = cudaStreamCaptureModeGlobal;

}  // namespace

State& state() {
  return *owner();
}

std::uint64_t thread_number() {
  static std::atomic<std::uint64_t> numbers{0};
  thread_local const std::uint64_t number = ++numbers;
  return number;
}

Call::Call(const char* name) : name_(name) {
  lock().lock();
  install_signal_handlers();
  report_host_accesses();
  if (device_of_thread >= static_cast<int>(state().devices.size())) device_of_thread = 0;
}
Call::~Call() {
  close_memory();
  lock().unlock();
}
void Call::breathe() {
  lock().unlock();
  lock().lock();
}
cudaError_t Call::result(cudaError_t error) {
  if (error != cudaSuccess && error != cudaErrorNotReady) last_error = error;
  return error;
}
Device& Call::device() const {
  return *state().devices.at(static_cast<std::size_t>(device_of_thread));
}
cudaError_t Call::sticky() const {
  return state().devices.empty() ? cudaErrorNoDevice : device().sticky;
}
cudaError_t Call::refuse_unsafe() {
  if (const cudaError_t broken = sticky(); broken != cudaSuccess) return broken;
  if (capture_mode_of_thread == cudaStreamCaptureModeRelaxed) return cudaSuccess;
  cudaError_t refusal = cudaSuccess;
  for (const auto& capture : state().captures) {
    const bool own = capture->owner == std::this_thread::get_id() && capture->mode != cudaStreamCaptureModeRelaxed;
    const bool global = capture->mode == cudaStreamCaptureModeGlobal && capture_mode_of_thread == cudaStreamCaptureModeGlobal;
    if (!own && !global) continue;
    invalidate(*capture);
    refusal = cudaErrorStreamCaptureUnsupported;
  }
  return refusal;
}

int current_device() {
  return device_of_thread;
}

void add_fault(FaultKind kind, std::string where, std::string what) {
  State& s = state();
  if (s.faults.size() >= faults_max) return;
  s.faults.push_back(Fault{.kind = kind, .where = std::move(where), .what = std::move(what)});
  if (s.fault_callback) s.fault_callback(s.faults.back());
}

void add_log(Action action, std::string name, const CUstream_st* stream, std::uint64_t operation, std::uint64_t graph) {
  State& s = state();
  if (s.log.size() >= log_entries_max) s.log.pop_front();
  s.log.push_back(LogEntry{.action = action,
                           .name = std::move(name),
                           .device = stream != nullptr ? stream->device : device_of_thread,
                           .stream = stream != nullptr ? stream->number : 0,
                           .operation = operation,
                           .thread = thread_number(),
                           .graph = graph});
}

void log_wait(Action action, std::string name, const CUstream_st* stream, int awaited) {
  add_log(action, std::move(name), stream);
  state().log.back().awaited = awaited;
}

// ---- control.h
void reset(const Options& options) {
  Call call("reset");
  release_all_memory();
  owner() = make_state(options);
  last_error = cudaSuccess;
  device_of_thread = 0;
}
void set_seed(std::uint64_t seed) {
  const Call call("set_seed");
  state().random = Random(seed);
}
void set_matmul_candidates(MatmulCandidates candidates) {
  const Call call("set_matmul_candidates");
  state().options.matmul_candidates = candidates;
}
void fail_kernel(std::uint64_t count, cudaError_t error) {
  const Call call("fail_kernel");
  state().kernels_until_failure = count;
  state().failure = error;
}
std::vector<Fault> faults() {
  const Call call("faults");
  check_guards("end of a test", GuardReach::Whole);
  return state().faults;
}
std::vector<Fault> take_faults() {
  const Call call("take_faults");
  check_guards("end of a test", GuardReach::Whole);
  return std::exchange(state().faults, {});
}
std::string fault_text() {
  std::string text;
  for (const Fault& fault : faults()) text += fault.text() + "\n";
  return text;
}
void on_fault(std::function<void(const Fault&)> callback) {
  const Call call("on_fault");
  state().fault_callback = std::move(callback);
}
std::vector<LogEntry> log() {
  const Call call("log");
  return {state().log.begin(), state().log.end()};
}
void clear_log() {
  const Call call("clear_log");
  state().log.clear();
}
int stream_number(cudaStream_t stream) {
  const Call call("stream_number");
  const CUstream_st* found = find_stream(stream, "stream_number");
  return found != nullptr ? found->number : 0;
}
void run_pending() {
  Call call("run_pending");
  while (!state().ready.empty()) {
    run_some(call);
    call.breathe();
  }
}
Live live() {
  const Call call("live");
  const State& s = state();
  Live live;
  for (const auto& [map, allocation] : s.memory) {
    if (allocation.freed) continue;
    ++live.allocations;
    live.allocated_bytes += allocation.size;
  }
  live.pinned = s.pinned.size();
  const auto count = [](const auto& handles) {
    std::size_t living = 0;
    for (const auto& [key, handle] : handles) living += handle->destroyed ? 0U : 1U;
    return living;
  };
  live.streams = count(s.streams);
  live.events = count(s.events);
  live.graphs = count(s.graphs);
  live.executable_graphs = count(s.executables);
  live.green_contexts = count(s.contexts);
  live.pending_operations = s.pending;
  return live;
}

}  // namespace cuda_host

using cuda_host::Call;

cudaError_t cudaGetLastError() {
  const Call call("cudaGetLastError");
  const cudaError_t error = cuda_host::last_error;
  cuda_host::last_error = cudaSuccess;
  return call.sticky() != cudaSuccess && call.sticky() != cudaErrorNoDevice ? call.sticky() : error;
}
cudaError_t cudaPeekAtLastError() {
  const Call call("cudaPeekAtLastError");
  return call.sticky() != cudaSuccess && call.sticky() != cudaErrorNoDevice ? call.sticky() : cuda_host::last_error;
}
cudaError_t cudaSetDevice(int device) {
  Call call("cudaSetDevice");
  if (cuda_host::state().devices.empty()) return call.result(cudaErrorNoDevice);
  if (device < 0 || device >= static_cast<int>(cuda_host::state().devices.size())) return call.result(cudaErrorInvalidDevice);
  cuda_host::device_of_thread = device;
  return call.result(call.sticky());
}
cudaError_t cudaGetDevice(int* device) {
  Call call("cudaGetDevice");
  if (cuda_host::state().devices.empty()) return call.result(cudaErrorNoDevice);
  *device = cuda_host::device_of_thread;
  return cudaSuccess;
}
cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  const Call call("cudaThreadExchangeStreamCaptureMode");
  std::swap(*mode, cuda_host::capture_mode_of_thread);
  return cudaSuccess;
}
