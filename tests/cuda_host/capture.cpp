// SPDX-License-Identifier: Apache-2.0
// Stream capture and graphs: capture records work with its arguments frozen, a launch queues the nodes anew, ordered by what they
// depended on and otherwise as the seed chooses.
#include <algorithm>
#include <utility>

#include "tests/cuda_host/state.h"

namespace cuda_host {

namespace {

// Device memory that an executable graph takes while it lives: a part that is fixed and one per node.
constexpr std::size_t graph_bytes = std::size_t{64} << 10U;
constexpr std::size_t node_bytes = std::size_t{1} << 10U;

cudaGraphNodeType type_of(WorkKind kind) {
  switch (kind) {
    case WorkKind::Kernel:
      return cudaGraphNodeTypeKernel;
    case WorkKind::Copy:
      return cudaGraphNodeTypeMemcpy;
    case WorkKind::Set:
      return cudaGraphNodeTypeMemset;
    default:
      return cudaGraphNodeTypeEmpty;
  }
}

void leave_capture(Capture& capture) {
  for (CUstream_st* stream : capture.streams) {
    stream->capture = nullptr;
    stream->captured_tail.clear();
  }
  auto& captures = state().captures;
  captures.erase(std::remove_if(captures.begin(), captures.end(), [&](const auto& other) { return other.get() == &capture; }),
                 captures.end());
}

// Whether every node reaches what the origin stream ends with.
bool everything_is_joined(const Capture& capture) {
  std::vector<bool> reached(capture.nodes.size(), false);
  std::vector<std::size_t> open = capture.origin->captured_tail;
  while (!open.empty()) {
    const std::size_t node = open.back();
    open.pop_back();
    if (reached[node]) continue;
    reached[node] = true;
    for (const std::size_t dependency : capture.nodes[node].dependencies) open.push_back(dependency);
  }
  return std::all_of(reached.begin(), reached.end(), [](bool is) { return is; });
}

template <class T>
T* find_handle(Handles<T>& handles, const T* handle, const char* call, const char* what) {
  const auto found = handles.find(handle);
  if (found == handles.end()) return nullptr;
  if (found->second->destroyed) add_fault(FaultKind::BadHandle, call, std::string("the ") + what + " was destroyed");
  return found->second->destroyed ? nullptr : found->second.get();
}

void report_freed_memory(const CUgraphExec_st& executable, const char* call) {
  for (const Node& node : executable.nodes) {
    for (const std::uintptr_t base : node.work.uses) {
      const Allocation* allocation = allocation_at(base);
      const bool pinned = pinned_at(base) != nullptr;
      if ((allocation != nullptr && !allocation->freed) || pinned) continue;
      add_fault(FaultKind::UseAfterFree, call,
                "graph " + std::to_string(executable.number) + " replays " + node.work.name +
                    " with a pointer to memory that has been freed");
      return;
    }
  }
}

// Kernels of a graph run where they were captured, not where it is launched: real, and never what the engine means.
void report_wrong_place(const CUgraphExec_st& executable, const CUstream_st& stream, const char* call) {
  if (executable.device == stream.device && executable.context == stream.context) return;
  const auto text = [](int device, const CUgreenCtx_st* context) {
    return "device " + std::to_string(device) + (context == nullptr ? "" : ", a green context");
  };
  add_fault(FaultKind::WrongPlace, call,
            "graph " + std::to_string(executable.number) + " was captured on " + text(executable.device, executable.context) +
                " and is launched on " + text(stream.device, stream.context) +
                (executable.context != nullptr && stream.context != nullptr ? " of its own" : ""));
}

}  // namespace

void invalidate(Capture& capture) {
  capture.invalidated = true;
}

void capture_work(CUstream_st& stream, Work work) {
  Capture& capture = *stream.capture;
  capture.nodes.push_back(Node{.work = std::move(work), .dependencies = stream.captured_tail});
  stream.captured_tail = {capture.nodes.size() - 1};
}

cudaError_t refuse_legacy_while_capturing(const CUstream_st& stream) {
  if (!stream.legacy) return cudaSuccess;
  for (const auto& capture : state().captures) {
    for (const CUstream_st* other : capture->streams) {
      if (other->blocking && other->device == stream.device) {
        invalidate(*capture);
        return cudaErrorStreamCaptureImplicit;
      }
    }
  }
  return cudaSuccess;
}

}  // namespace cuda_host

using namespace cuda_host;

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode mode) {
  Call call("cudaStreamBeginCapture");
  if (const cudaError_t broken = call.sticky(); broken != cudaSuccess) return call.result(broken);
  CUstream_st* found = find_stream(stream, call.name());
  if (found == nullptr) return call.result(cudaErrorInvalidResourceHandle);
  if (found->legacy) return call.result(cudaErrorStreamCaptureUnsupported);
  if (found->capture != nullptr) return call.result(cudaErrorIllegalState);
  auto capture = std::make_shared<Capture>();
  capture->mode = mode;
  capture->owner = std::this_thread::get_id();
  capture->origin = found;
  capture->streams.push_back(found);
  found->capture = capture;
  found->captured_tail.clear();
  state().captures.push_back(std::move(capture));
  add_log(Action::CaptureBegan, call.name(), found);
  return cudaSuccess;
}

cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph) {
  Call call("cudaStreamEndCapture");
  CUstream_st* found = find_stream(stream, call.name());
  if (found == nullptr || graph == nullptr) return call.result(cudaErrorInvalidResourceHandle);
  *graph = nullptr;
  const std::shared_ptr<Capture> capture = found->capture;
  if (capture == nullptr) return call.result(cudaErrorIllegalState);
  if (capture->mode != cudaStreamCaptureModeRelaxed && capture->owner != std::this_thread::get_id()) {
    return call.result(cudaErrorStreamCaptureWrongThread);
  }
  if (capture->origin != found) {
    invalidate(*capture);
    return call.result(cudaErrorStreamCaptureUnmatched);
  }
  const bool joined = everything_is_joined(*capture);
  leave_capture(*capture);
  add_log(Action::CaptureEnded, call.name(), found);
  if (capture->invalidated) return call.result(cudaErrorStreamCaptureInvalidated);
  if (!joined) return call.result(cudaErrorStreamCaptureUnjoined);
  if (const cudaError_t broken = call.sticky(); broken != cudaSuccess) return call.result(broken);
  auto made = std::make_unique<CUgraph_st>();
  for (const Node& node : capture->nodes) made->handles.push_back(CUgraphNode_st{type_of(node.work.kind)});
  made->nodes = std::move(capture->nodes);
  made->device = found->device;
  made->context = found->context;
  *graph = made.get();
  state().graphs.emplace(made.get(), std::move(made));
  return cudaSuccess;
}

cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
  Call call("cudaStreamIsCapturing");
  const CUstream_st* found = find_stream(stream, call.name());
  if (found == nullptr) return call.result(cudaErrorInvalidResourceHandle);
  *status = found->capture == nullptr     ? cudaStreamCaptureStatusNone
            : found->capture->invalidated ? cudaStreamCaptureStatusInvalidated
                                          : cudaStreamCaptureStatusActive;
  return cudaSuccess;
}

cudaError_t cudaGraphInstantiate(cudaGraphExec_t* executable, cudaGraph_t graph, unsigned long long /*flags*/) {
  Call call("cudaGraphInstantiate");
  if (const cudaError_t broken = call.sticky(); broken != cudaSuccess) return call.result(broken);
  CUgraph_st* found = find_handle(state().graphs, graph, call.name(), "graph");
  if (found == nullptr || executable == nullptr) return call.result(cudaErrorInvalidValue);
  const std::size_t bytes = graph_bytes + node_bytes * found->nodes.size();
  Device& device = *state().devices[static_cast<std::size_t>(found->device)];
  if (device.used_bytes + bytes > state().options.memory_bytes) return call.result(cudaErrorMemoryAllocation);
  device.used_bytes += bytes;
  auto made = std::make_unique<CUgraphExec_st>();
  made->number = ++state().executables_made;
  made->device = found->device;
  made->context = found->context;
  made->bytes = bytes;
  made->nodes = found->nodes;
  *executable = made.get();
  add_log(Action::GraphInstantiated, call.name(), nullptr, 0, made->number);
  state().executables.emplace(made.get(), std::move(made));
  return cudaSuccess;
}

cudaError_t cudaGraphUpload(cudaGraphExec_t executable, cudaStream_t stream) {
  Call call("cudaGraphUpload");
  const CUgraphExec_st* found = find_handle(state().executables, executable, call.name(), "executable graph");
  CUstream_st* place = find_stream(stream, call.name());
  if (found == nullptr || place == nullptr) return call.result(cudaErrorInvalidValue);
  if (place->capture != nullptr) {
    invalidate(*place->capture);
    return call.result(cudaErrorStreamCaptureUnsupported);
  }
  return call.result(
      submit(call, *place, Work{.kind = WorkKind::Wait, .name = call.name(), .device = place->device, .action = {}, .uses = {}}));
}

cudaError_t cudaGraphLaunch(cudaGraphExec_t executable, cudaStream_t stream) {
  Call call("cudaGraphLaunch");
  CUgraphExec_st* found = find_handle(state().executables, executable, call.name(), "executable graph");
  CUstream_st* place = find_stream(stream, call.name());
  if (found == nullptr || place == nullptr) return call.result(cudaErrorInvalidValue);
  if (place->capture != nullptr) {  // child graphs are not offered here
    invalidate(*place->capture);
    return call.result(cudaErrorStreamCaptureUnsupported);
  }
  if (const cudaError_t refused = refuse_legacy_while_capturing(*place); refused != cudaSuccess) return call.result(refused);
  if (const cudaError_t broken = state().devices[static_cast<std::size_t>(place->device)]->sticky; broken != cudaSuccess) {
    return call.result(broken);
  }
  report_freed_memory(*found, call.name());
  report_wrong_place(*found, *place, call.name());
  add_log(Action::GraphLaunched, call.name(), place, 0, found->number);
  const OperationPointer begin =
      enqueue(*place, Work{.kind = WorkKind::Wait, .name = "graph begin", .device = place->device, .action = {}, .uses = {}},
              {found->last_launch}, found->number);
  std::vector<OperationPointer> queued;
  for (const Node& node : found->nodes) {
    std::vector<OperationPointer> dependencies{begin};
    for (const std::size_t dependency : node.dependencies) dependencies.push_back(queued[dependency]);
    queued.push_back(enqueue_node(place->number, node.work, dependencies, found->number));
    add_log(Action::Queued, node.work.name, place, queued.back()->number, found->number);
  }
  found->last_launch =
      enqueue(*place, Work{.kind = WorkKind::GraphEnd, .name = "graph end", .device = place->device, .action = {}, .uses = {}},
              std::move(queued), found->number);
  if (state().random.one_in(8)) run_some(call);
  return cudaSuccess;
}

cudaError_t cudaGraphExecDestroy(cudaGraphExec_t executable) {
  Call call("cudaGraphExecDestroy");
  CUgraphExec_st* found = find_handle(state().executables, executable, call.name(), "executable graph");
  if (found == nullptr) return call.result(cudaErrorInvalidValue);
  if (found->last_launch != nullptr && !found->last_launch->done) {
    add_fault(FaultKind::InFlight, call.name(),
              "graph " + std::to_string(found->number) + " is destroyed while a replay is queued");
  }
  found->destroyed = true;
  found->nodes.clear();
  state().devices[static_cast<std::size_t>(found->device)]->used_bytes -= found->bytes;
  add_log(Action::GraphDestroyed, call.name(), nullptr, 0, found->number);
  return call.result(call.sticky());
}

cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  Call call("cudaGraphDestroy");
  CUgraph_st* found = find_handle(state().graphs, graph, call.name(), "graph");
  if (found == nullptr) return call.result(cudaErrorInvalidValue);
  found->destroyed = true;
  found->nodes.clear();
  return call.result(call.sticky());
}

cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t* nodes, std::size_t* count) {
  Call call("cudaGraphGetNodes");
  CUgraph_st* found = find_handle(state().graphs, graph, call.name(), "graph");
  if (found == nullptr || count == nullptr) return call.result(cudaErrorInvalidValue);
  if (nodes != nullptr) {
    for (std::size_t i = 0; i < *count; ++i) nodes[i] = i < found->handles.size() ? &found->handles[i] : nullptr;
  }
  *count = found->handles.size();
  return cudaSuccess;
}

cudaError_t cudaGraphNodeGetType(cudaGraphNode_t node, cudaGraphNodeType* type) {
  Call call("cudaGraphNodeGetType");
  if (node == nullptr || type == nullptr) return call.result(cudaErrorInvalidValue);
  *type = node->type;
  return cudaSuccess;
}
