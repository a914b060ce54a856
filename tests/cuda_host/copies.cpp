// SPDX-License-Identifier: Apache-2.0
// Copies and fills. They read and write when they run, not when they are queued, and every end of them must lie inside one live
// allocation or pinned block.
#include <cstring>
#include <string>

#include "tests/cuda_host/state.h"

namespace cuda_host {

namespace {

enum class Place : std::uint8_t { Device, Pinned, Pageable, Invalid };

Place place_of(const void* pointer, std::size_t count) {
  const auto address = reinterpret_cast<std::uintptr_t>(pointer);
  if (const Allocation* allocation = allocation_at(address); allocation != nullptr) {
    const bool inside = !allocation->freed && address >= allocation->base && count <= allocation->size &&
                        address - allocation->base <= allocation->size - count;
    return inside ? Place::Device : Place::Invalid;
  }
  if (const PinnedBlock* block = pinned_at(address); block != nullptr) {
    return address - block->base <= block->size && count <= block->size - (address - block->base) ? Place::Pinned
                                                                                                  : Place::Invalid;
  }
  return pointer == nullptr ? Place::Invalid : Place::Pageable;
}

std::uintptr_t base_of(const void* pointer) {
  const auto address = reinterpret_cast<std::uintptr_t>(pointer);
  if (const Allocation* allocation = allocation_at(address); allocation != nullptr) return allocation->base;
  if (const PinnedBlock* block = pinned_at(address); block != nullptr) return block->base;
  return 0;
}

bool direction_is_right(Place from, Place to, cudaMemcpyKind kind) {
  const bool from_device = from == Place::Device;
  const bool to_device = to == Place::Device;
  switch (kind) {
    case cudaMemcpyHostToHost:
      return !from_device && !to_device;
    case cudaMemcpyHostToDevice:
      return !from_device && to_device;
    case cudaMemcpyDeviceToHost:
      return from_device && !to_device;
    case cudaMemcpyDeviceToDevice:
      return from_device && to_device;
    case cudaMemcpyDefault:
      return true;
  }
  return false;
}

const char* name_of(Place from, Place to) {
  if (from == Place::Device) return to == Place::Device ? "copy device to device" : "copy device to host";
  return to == Place::Device ? "copy host to device" : "copy host to host";
}

bool both_valid(const char* call, const void* to, const void* from, std::size_t count) {
  for (const void* end : {to, from}) {
    if (place_of(end, count) != Place::Invalid) continue;
    const auto last = reinterpret_cast<std::uintptr_t>(end) + (count > 0 ? count - 1 : 0);
    const Allocation* allocation = allocation_at(reinterpret_cast<std::uintptr_t>(end));
    add_fault(allocation != nullptr && allocation->freed ? FaultKind::UseAfterFree : FaultKind::OutOfBounds, call,
              "a copy of " + std::to_string(count) + " bytes ends at " + describe_address(last));
    return false;
  }
  return true;
}

Work copy_work(void* to, const void* from, std::size_t count, int device) {
  return Work{.kind = WorkKind::Copy,
              .name = name_of(place_of(from, count), place_of(to, count)),
              .device = device,
              .action =
                  [to, from, count] {
                    // Checked again: a graph may replay it long after.
                    if (!both_valid("copy", to, from, count)) return;
                    std::memmove(to, from, count);
                  },
              .uses = {base_of(to), base_of(from)},
              .nanoseconds = 1000 + count / 1000};
}

cudaError_t copy_async(Call& call, void* to, const void* from, std::size_t count, cudaMemcpyKind kind, CUstream_st& stream) {
  if (count == 0) return cudaSuccess;
  if (!both_valid(call.name(), to, from, count)) return cudaErrorInvalidValue;
  const Place source = place_of(from, count);
  const Place target = place_of(to, count);
  if (!direction_is_right(source, target, kind)) return cudaErrorInvalidValue;
  if (source == Place::Pageable || target == Place::Pageable) {
    add_fault(FaultKind::PageableCopy, call.name(), "an asynchronous copy needs pinned host memory");
    if (stream.capture != nullptr) {
      invalidate(*stream.capture);
      return cudaErrorStreamCaptureUnsupported;
    }
    return cudaErrorInvalidValue;
  }
  return submit(call, stream, copy_work(to, from, count, stream.device));
}

cudaError_t set_async(Call& call, void* pointer, int value, std::size_t count, CUstream_st& stream) {
  if (count == 0) return cudaSuccess;
  if (place_of(pointer, count) != Place::Device) {
    add_fault(FaultKind::OutOfBounds, call.name(),
              "fills " + std::to_string(count) + " bytes from " + describe_address(reinterpret_cast<std::uintptr_t>(pointer)));
    return cudaErrorInvalidValue;
  }
  return submit(call, stream,
                Work{.kind = WorkKind::Set,
                     .name = "fill",
                     .device = stream.device,
                     .action =
                         [pointer, value, count] {
                           if (place_of(pointer, count) == Place::Device) {
                             std::memset(pointer, value, count);
                           } else {
                             add_fault(FaultKind::UseAfterFree, "fill",
                                       describe_address(reinterpret_cast<std::uintptr_t>(pointer)));
                           }
                         },
                     .uses = {base_of(pointer)},
                     .nanoseconds = 1000 + count / 1000});
}

}  // namespace

}  // namespace cuda_host

using namespace cuda_host;

cudaError_t cudaMemcpyAsync(void* to, const void* from, std::size_t count, cudaMemcpyKind kind, cudaStream_t stream) {
  Call call("cudaMemcpyAsync");
  CUstream_st* found = find_stream(stream, call.name());
  if (found == nullptr) return call.result(cudaErrorInvalidResourceHandle);
  return call.result(copy_async(call, to, from, count, kind, *found));
}

cudaError_t cudaMemcpyPeerAsync(void* to, int to_device, const void* from, int from_device, std::size_t count,
                                cudaStream_t stream) {
  Call call("cudaMemcpyPeerAsync");
  CUstream_st* found = find_stream(stream, call.name());
  if (found == nullptr) return call.result(cudaErrorInvalidResourceHandle);
  const Allocation* target = allocation_at(reinterpret_cast<std::uintptr_t>(to));
  const Allocation* source = allocation_at(reinterpret_cast<std::uintptr_t>(from));
  if (target == nullptr || source == nullptr || target->device != to_device || source->device != from_device) {
    return call.result(cudaErrorInvalidValue);
  }
  return call.result(copy_async(call, to, from, count, cudaMemcpyDeviceToDevice, *found));
}

// Queued on the legacy stream and waited for: streams made with cudaStreamNonBlocking are not ordered with it.
cudaError_t cudaMemcpy(void* to, const void* from, std::size_t count, cudaMemcpyKind kind) {
  Call call("cudaMemcpy");
  if (const cudaError_t refused = call.refuse_unsafe(); refused != cudaSuccess) return call.result(refused);
  if (count == 0) return cudaSuccess;
  if (!both_valid(call.name(), to, from, count) || !direction_is_right(place_of(from, count), place_of(to, count), kind)) {
    return call.result(cudaErrorInvalidValue);
  }
  CUstream_st& stream = call.device().legacy;
  if (const cudaError_t error = submit(call, stream, copy_work(to, from, count, stream.device)); error != cudaSuccess) {
    return call.result(error);
  }
  log_wait(Action::HostWaits, call.name(), nullptr, stream.number);
  run_until(call, stream.tail);
  return call.result(call.sticky());
}

cudaError_t cudaMemset(void* pointer, int value, std::size_t count) {
  Call call("cudaMemset");
  if (const cudaError_t refused = call.refuse_unsafe(); refused != cudaSuccess) return call.result(refused);
  return call.result(
      set_async(call, pointer, value, count, call.device().legacy));  // the caller does not wait, as with the real one
}

cudaError_t cudaMemsetAsync(void* pointer, int value, std::size_t count, cudaStream_t stream) {
  Call call("cudaMemsetAsync");
  CUstream_st* found = find_stream(stream, call.name());
  if (found == nullptr) return call.result(cudaErrorInvalidResourceHandle);
  return call.result(set_async(call, pointer, value, count, *found));
}
