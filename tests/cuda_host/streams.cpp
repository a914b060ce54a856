// SPDX-License-Identifier: Apache-2.0
// Streams and events. Queued work runs only when a call must wait, when one asks whether it is done, or at moments that the seed
// chooses, in any order that streams and events allow.
#include <algorithm>
#include <utility>

#include "tests/cuda_host/state.h"

namespace cuda_host {

namespace {

// What a device's kernels may touch: its own memory and that of enabled peers.
std::uint64_t reachable(int device) {
  return state().devices[static_cast<std::size_t>(device)]->peers | (1ULL << static_cast<unsigned>(device));
}

std::uint64_t memory_of(const Work& work) {
  if (work.kind == WorkKind::Kernel) return reachable(work.device);
  std::uint64_t mask = 1ULL << static_cast<unsigned>(work.device);
  for (const std::uintptr_t base : work.uses) {
    if (const Allocation* allocation = allocation_at(base); allocation != nullptr) {
      mask |= 1ULL << static_cast<unsigned>(allocation->device);
    }
  }
  return mask;
}

bool failure_is_due(const Work& work) {
  State& s = state();
  return work.kind == WorkKind::Kernel && s.kernels_until_failure != 0 && --s.kernels_until_failure == 0;
}

void run(const OperationPointer& operation) {
  State& s = state();
  const auto at = std::find(s.ready.begin(), s.ready.end(), operation);
  *at = s.ready.back();
  s.ready.pop_back();
  Device& device = *s.devices[static_cast<std::size_t>(operation->work.device)];
  if (device.sticky == cudaSuccess) {
    if (failure_is_due(operation->work)) {
      device.sticky = s.failure;
    } else {
      CUstream_st place;
      place.number = operation->stream;
      place.device = operation->work.device;
      add_log(Action::Ran, operation->work.name, &place, operation->number, operation->graph);
      if (operation->work.action) {
        open_memory(memory_of(operation->work));
        operation->work.action();
        check_guards(operation->work.name, GuardReach::Near);
      }
    }
  }
  s.clock += operation->work.nanoseconds;
  operation->finished_at = s.clock;
  operation->done = true;
  operation->work.action = nullptr;
  operation->dependencies.clear();
  --s.pending;
  for (const auto& dependent : std::exchange(operation->dependents, {})) {
    if (--dependent->waits_for == 0) s.ready.push_back(dependent);
  }
}

// Marks target and all that it waits for.
std::uint64_t mark_needed(const OperationPointer& target) {
  const std::uint64_t mark = ++state().searches;
  std::vector<Operation*> open{target.get()};
  target->mark = mark;
  while (!open.empty()) {
    Operation* operation = open.back();
    open.pop_back();
    for (const auto& weak : operation->dependencies) {
      const OperationPointer dependency = weak.lock();
      if (dependency == nullptr || dependency->done || dependency->mark == mark) continue;
      dependency->mark = mark;
      open.push_back(dependency.get());  // lives on: what waits is held by what it waits for
    }
  }
  return mark;
}

// A ready operation that target needs. mark is of an earlier search for the same target, 0 before the first; another search may
// have taken its marks away, then the search is made again.
OperationPointer choose_needed(const OperationPointer& target, std::uint64_t& mark) {
  State& s = state();
  for (int search = 0; search < 2; ++search) {
    if (mark == 0 || search == 1) mark = mark_needed(target);
    std::vector<const OperationPointer*> needed;
    for (const auto& operation : s.ready) {
      if (operation->mark == mark) needed.push_back(&operation);
    }
    if (!needed.empty()) return *needed[s.random.below(needed.size())];
  }
  return nullptr;
}

OperationPointer choose_any() {
  State& s = state();
  return s.ready.empty() ? nullptr : s.ready[s.random.below(s.ready.size())];
}

cudaError_t make_stream(Call& call, cudaStream_t* stream, unsigned int flags, int priority) {
  if (const cudaError_t broken = call.sticky(); broken != cudaSuccess) return broken;
  if (stream == nullptr || flags > cudaStreamNonBlocking) return cudaErrorInvalidValue;
  auto made = std::make_unique<CUstream_st>();
  made->number = ++state().streams_made;
  made->device = current_device();
  made->blocking = flags != cudaStreamNonBlocking;
  made->priority = std::clamp(priority, -5, 0);
  *stream = made.get();
  state().streams.emplace(made.get(), std::move(made));
  return cudaSuccess;
}

CUevent_st* find_event(cudaEvent_t event, const char* call) {
  const auto found = state().events.find(event);
  if (found == state().events.end()) return nullptr;
  if (found->second->destroyed) add_fault(FaultKind::BadHandle, call, "the event was destroyed");
  return found->second->destroyed ? nullptr : found->second.get();
}

// Waiting for or asking about something that is being captured ends the capture.
cudaError_t refuse_captured(const std::shared_ptr<Capture>& capture, cudaError_t error) {
  if (capture == nullptr) return cudaSuccess;
  invalidate(*capture);
  return error;
}

}  // namespace

CUstream_st* find_stream(cudaStream_t stream, const char* call) {
  State& s = state();
  if (stream == nullptr || stream == cudaStreamLegacy) return &s.devices.at(static_cast<std::size_t>(current_device()))->legacy;
  const auto found = s.streams.find(stream);
  if (found == s.streams.end()) return nullptr;
  if (found->second->destroyed) add_fault(FaultKind::BadHandle, call, "the stream was destroyed");
  return found->second->destroyed ? nullptr : found->second.get();
}

OperationPointer enqueue_node(int stream, Work work, const std::vector<OperationPointer>& dependencies, std::uint64_t graph) {
  State& s = state();
  auto operation = std::make_shared<Operation>();
  operation->work = std::move(work);
  operation->number = ++s.operations_made;
  operation->stream = stream;
  operation->graph = graph;
  for (const auto& dependency : dependencies) {
    if (dependency == nullptr || dependency->done) continue;
    ++operation->waits_for;
    dependency->dependents.push_back(operation);
    operation->dependencies.push_back(dependency);
  }
  ++s.pending;
  if (operation->waits_for == 0) s.ready.push_back(operation);
  return operation;
}

OperationPointer enqueue(CUstream_st& stream, Work work, std::vector<OperationPointer> dependencies, std::uint64_t graph) {
  State& s = state();
  Device& device = *s.devices[static_cast<std::size_t>(stream.device)];
  dependencies.push_back(stream.tail);
  if (stream.legacy) {
    for (const auto& [key, other] : s.streams) {
      if (other->blocking && other->device == stream.device) dependencies.push_back(other->tail);
    }
  } else if (stream.blocking) {
    dependencies.push_back(device.legacy.tail);
  }
  const std::string name = work.name;
  const OperationPointer operation = enqueue_node(stream.number, std::move(work), dependencies, graph);
  add_log(Action::Queued, name, &stream, operation->number, graph);
  stream.tail = operation;
  return operation;
}

cudaError_t submit(Call& call, CUstream_st& stream, Work work) {
  if (stream.capture != nullptr) {
    if (stream.capture->invalidated) return cudaErrorStreamCaptureInvalidated;
    capture_work(stream, std::move(work));
    return cudaSuccess;
  }
  if (const cudaError_t refused = refuse_legacy_while_capturing(stream); refused != cudaSuccess) return refused;
  const cudaError_t broken = state().devices[static_cast<std::size_t>(stream.device)]->sticky;
  if (broken != cudaSuccess) return broken;
  enqueue(stream, std::move(work), {});
  if (state().random.one_in(8)) run_some(call);
  return cudaSuccess;
}

void run_some(Call& call) {
  for (std::uint64_t count = 1 + state().random.below(4); count > 0; --count) {
    const OperationPointer chosen = choose_any();
    if (chosen == nullptr) return;
    run(chosen);
    call.breathe();
  }
}

void run_until(Call& call, const OperationPointer& target) {
  if (target == nullptr || target->done) return;
  // Some waits run the bare minimum, others whatever comes first.
  const bool only_needed = state().random.one_in(2);
  add_log(Action::WaitBegan, call.name(), nullptr, target->number, target->graph);
  std::uint64_t mark = 0;
  while (!target->done) {
    const OperationPointer chosen = only_needed ? choose_needed(target, mark) : choose_any();
    if (chosen != nullptr) run(chosen);
    call.breathe();
  }
  add_log(Action::WaitEnded, call.name(), nullptr, target->number, target->graph);
}

void poll(Call& call, const OperationPointer& target) {
  if (target == nullptr || target->done) return;
  if (state().random.one_in(2)) run_some(call);
  if (target->done || !state().random.one_in(2)) return;
  std::uint64_t mark = 0;
  if (const OperationPointer chosen = choose_needed(target, mark); chosen != nullptr) run(chosen);
}

void synchronize_device(Call& call, int device) {
  std::vector<std::pair<int, OperationPointer>> tails{{0, state().devices[static_cast<std::size_t>(device)]->legacy.tail}};
  for (const auto& [key, stream] : state().streams) {
    if (stream->device == device) tails.emplace_back(stream->number, stream->tail);
  }
  // By number: the order of handles changes from run to run.
  std::sort(tails.begin(), tails.end(), [](const auto& a, const auto& b) { return a.first < b.first; });
  for (const auto& [number, tail] : tails) run_until(call, tail);
}

}  // namespace cuda_host

using namespace cuda_host;

cudaError_t cudaStreamCreate(cudaStream_t* stream) {
  Call call("cudaStreamCreate");
  return call.result(make_stream(call, stream, cudaStreamDefault, 0));
}
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned int flags) {
  Call call("cudaStreamCreateWithFlags");
  return call.result(make_stream(call, stream, flags, 0));
}
cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned int flags, int priority) {
  Call call("cudaStreamCreateWithPriority");
  return call.result(make_stream(call, stream, flags, priority));
}
cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  Call call("cudaStreamDestroy");
  CUstream_st* found = find_stream(stream, call.name());
  if (found == nullptr || found->legacy) return call.result(cudaErrorInvalidResourceHandle);
  if (found->capture != nullptr) {
    invalidate(*found->capture);
    return call.result(cudaErrorStreamCaptureUnsupported);
  }
  found->destroyed = true;  // queued work still runs
  return call.result(call.sticky());
}
cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  Call call("cudaStreamSynchronize");
  CUstream_st* found = find_stream(stream, call.name());
  if (found == nullptr) return call.result(cudaErrorInvalidResourceHandle);
  if (const auto refused = refuse_captured(found->capture, cudaErrorStreamCaptureUnsupported); refused != cudaSuccess) {
    return call.result(refused);
  }
  if (const cudaError_t refused = call.refuse_unsafe(); refused != cudaSuccess) return call.result(refused);
  if (const cudaError_t refused = refuse_legacy_while_capturing(*found); refused != cudaSuccess) return call.result(refused);
  const std::size_t device = static_cast<std::size_t>(found->device);
  log_wait(Action::HostWaits, call.name(), nullptr, found->number);
  if (found->legacy) {
    const OperationPointer marker =
        enqueue(*found, Work{.name = call.name(), .device = found->device, .action = {}, .uses = {}}, {});
    run_until(call, marker);
  } else {
    run_until(call, found->tail);
  }
  return call.result(state().devices[device]->sticky);
}
cudaError_t cudaStreamQuery(cudaStream_t stream) {
  Call call("cudaStreamQuery");
  CUstream_st* found = find_stream(stream, call.name());
  if (found == nullptr) return call.result(cudaErrorInvalidResourceHandle);
  if (const auto refused = refuse_captured(found->capture, cudaErrorStreamCaptureUnsupported); refused != cudaSuccess) {
    return call.result(refused);
  }
  if (const cudaError_t refused = call.refuse_unsafe(); refused != cudaSuccess) return call.result(refused);
  const OperationPointer tail = found->tail;
  poll(call, tail);
  if (const cudaError_t broken = call.sticky(); broken != cudaSuccess) return call.result(broken);
  return tail == nullptr || tail->done ? cudaSuccess : cudaErrorNotReady;
}
cudaError_t cudaDeviceSynchronize() {
  Call call("cudaDeviceSynchronize");
  if (const cudaError_t refused = call.refuse_unsafe(); refused != cudaSuccess) return call.result(refused);
  for (const auto& capture : state().captures) {  // a handle that takes in a capturing stream may not be waited for
    if (capture->origin->device != current_device()) continue;
    invalidate(*capture);
    return call.result(cudaErrorStreamCaptureUnsupported);
  }
  log_wait(Action::HostWaits, call.name(), nullptr, -1);
  synchronize_device(call, current_device());
  return call.result(call.sticky());
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned int flags) {
  Call call("cudaEventCreateWithFlags");
  if (const cudaError_t broken = call.sticky(); broken != cudaSuccess) return call.result(broken);
  if (event == nullptr) return call.result(cudaErrorInvalidValue);
  auto made = std::make_unique<CUevent_st>();
  made->device = current_device();
  made->flags = flags;
  *event = made.get();
  state().events.emplace(made.get(), std::move(made));
  return cudaSuccess;
}
cudaError_t cudaEventCreate(cudaEvent_t* event) {
  return cudaEventCreateWithFlags(event, cudaEventDefault);
}
cudaError_t cudaEventDestroy(cudaEvent_t event) {
  Call call("cudaEventDestroy");
  CUevent_st* found = find_event(event, call.name());
  if (found == nullptr) return call.result(cudaErrorInvalidResourceHandle);
  found->destroyed = true;
  return call.result(call.sticky());
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  Call call("cudaEventRecord");
  CUevent_st* found = find_event(event, call.name());
  CUstream_st* place = find_stream(stream, call.name());
  if (found == nullptr || place == nullptr || found->device != place->device) return call.result(cudaErrorInvalidResourceHandle);
  if (place->capture != nullptr) {
    if (place->capture->invalidated) return call.result(cudaErrorStreamCaptureInvalidated);
    found->capture = place->capture;
    found->captured = place->captured_tail;
    found->recorded = nullptr;
    return cudaSuccess;
  }
  if (const cudaError_t refused = refuse_legacy_while_capturing(*place); refused != cudaSuccess) return call.result(refused);
  const cudaError_t broken = state().devices[static_cast<std::size_t>(place->device)]->sticky;
  if (broken != cudaSuccess) return call.result(broken);
  found->capture = nullptr;
  found->stream = place->number;
  found->recorded =
      enqueue(*place, Work{.kind = WorkKind::Record, .name = call.name(), .device = place->device, .action = {}, .uses = {}}, {});
  if (state().random.one_in(8)) run_some(call);
  return cudaSuccess;
}
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned int /*flags*/) {
  Call call("cudaStreamWaitEvent");
  CUevent_st* found = find_event(event, call.name());
  CUstream_st* place = find_stream(stream, call.name());
  if (found == nullptr || place == nullptr) return call.result(cudaErrorInvalidResourceHandle);
  if (found->capture != nullptr) {  // the stream joins the capture
    if (place->capture == nullptr) {
      if (place->legacy) return call.result(cudaErrorStreamCaptureImplicit);
      place->capture = found->capture;
      place->captured_tail.clear();
      place->capture->streams.push_back(place);
    }
    if (place->capture != found->capture) {
      invalidate(*place->capture);
      return call.result(cudaErrorStreamCaptureMerge);
    }
    for (const std::size_t node : found->captured) {
      if (std::find(place->captured_tail.begin(), place->captured_tail.end(), node) == place->captured_tail.end()) {
        place->captured_tail.push_back(node);
      }
    }
    return cudaSuccess;
  }
  if (place->capture != nullptr) {
    if (found->recorded == nullptr) return cudaSuccess;
    invalidate(*place->capture);
    return call.result(cudaErrorStreamCaptureIsolation);
  }
  if (found->recorded != nullptr) log_wait(Action::StreamWaits, call.name(), place, found->stream);
  if (found->recorded == nullptr || found->recorded->done) return call.result(call.sticky());
  enqueue(*place, Work{.kind = WorkKind::Wait, .name = call.name(), .device = place->device, .action = {}, .uses = {}},
          {found->recorded});
  return call.result(call.sticky());
}
cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  Call call("cudaEventSynchronize");
  CUevent_st* found = find_event(event, call.name());
  if (found == nullptr) return call.result(cudaErrorInvalidResourceHandle);
  if (const auto refused = refuse_captured(found->capture, cudaErrorCapturedEvent); refused != cudaSuccess) {
    return call.result(refused);
  }
  if (const cudaError_t refused = call.refuse_unsafe(); refused != cudaSuccess) return call.result(refused);
  const OperationPointer recorded = found->recorded;
  const std::size_t device = static_cast<std::size_t>(found->device);
  if (recorded != nullptr) log_wait(Action::HostWaits, call.name(), nullptr, found->stream);
  run_until(call, recorded);
  return call.result(state().devices[device]->sticky);
}
cudaError_t cudaEventQuery(cudaEvent_t event) {
  Call call("cudaEventQuery");
  CUevent_st* found = find_event(event, call.name());
  if (found == nullptr) return call.result(cudaErrorInvalidResourceHandle);
  if (const auto refused = refuse_captured(found->capture, cudaErrorCapturedEvent); refused != cudaSuccess) {
    return call.result(refused);
  }
  if (const cudaError_t refused = call.refuse_unsafe(); refused != cudaSuccess) return call.result(refused);
  const OperationPointer recorded = found->recorded;
  poll(call, recorded);
  if (const cudaError_t broken = call.sticky(); broken != cudaSuccess) return call.result(broken);
  return recorded == nullptr || recorded->done ? cudaSuccess : cudaErrorNotReady;
}
cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t start, cudaEvent_t end) {
  Call call("cudaEventElapsedTime");
  const CUevent_st* first = find_event(start, call.name());
  const CUevent_st* last = find_event(end, call.name());
  if (first == nullptr || last == nullptr || first->recorded == nullptr || last->recorded == nullptr ||
      ((first->flags | last->flags) & cudaEventDisableTiming) != 0) {
    return call.result(cudaErrorInvalidResourceHandle);
  }
  if (!first->recorded->done || !last->recorded->done) return cudaErrorNotReady;
  const auto difference = static_cast<std::int64_t>(last->recorded->finished_at - first->recorded->finished_at);
  *milliseconds = static_cast<float>(static_cast<double>(difference) * 1e-6);
  return call.result(call.sticky());
}
