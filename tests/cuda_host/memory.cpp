// SPDX-License-Identifier: Apache-2.0
// Device memory: pages of its own per allocation, closed to everyone but running work, with guard pages on both sides and a guard
// pattern in what the pages hold beyond the allocation. Freed memory stays mapped and closed until reset(). Pinned host memory.
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstring>

#include "tests/cuda_host/sanitizers.h"
#include "tests/cuda_host/state.h"

namespace cuda_host {

namespace {

constexpr std::size_t alignment = 256;
constexpr std::size_t page = 4096;
constexpr std::size_t guard_size = std::size_t{256} << 10U;
constexpr std::size_t arena_size = std::size_t{128} << 30U;  // addresses, not memory
constexpr std::size_t near_bytes = 256;
constexpr std::uint16_t guard_pattern = 0xfff9;  // a NaN as F32, BF16 and F16, and not what poison looks like

// Addresses of device memory, given out once each until reset().
struct Arena {
  std::atomic<std::uintptr_t> begin{0};  // read by signal handlers
  std::size_t used = 0;
};
Arena arena;

std::size_t round_up(std::size_t value, std::size_t to) {
  return (value + to - 1) / to * to;
}

CUDA_HOST_NO_SANITIZE void fill_guard(std::uintptr_t begin, std::uintptr_t end) {
  for (std::uintptr_t at = begin; at < end; ++at) {
    *reinterpret_cast<unsigned char*>(at) = static_cast<unsigned char>(at % 2 == 0 ? guard_pattern & 0xffU : guard_pattern >> 8U);
  }
}

CUDA_HOST_NO_SANITIZE bool byte_is_right(std::uintptr_t where) {
  const auto expected = static_cast<unsigned char>(where % 2 == 0 ? guard_pattern & 0xffU : guard_pattern >> 8U);
  return *reinterpret_cast<const volatile unsigned char*>(where) == expected;
}

// The first changed byte of [begin, end), or end.
CUDA_HOST_NO_SANITIZE std::uintptr_t find_change(std::uintptr_t begin, std::uintptr_t end) {
  constexpr std::uint64_t word = 0x0001000100010001ULL * guard_pattern;
  std::uintptr_t at = begin;
  for (; at < end && at % 8 != 0; ++at) {
    if (!byte_is_right(at)) return at;
  }
  for (; at + 8 <= end; at += 8) {
    if (*reinterpret_cast<const volatile std::uint64_t*>(at) != word) break;
  }
  for (; at < end; ++at) {
    if (!byte_is_right(at)) return at;
  }
  return end;
}

void protect(Allocation& allocation, bool open) {
  mprotect(reinterpret_cast<void*>(allocation.pages), allocation.pages_size, open ? PROT_READ | PROT_WRITE : PROT_NONE);
  allocation.open = open;
}

// Pages for size bytes that end at the end of the pages, so that what runs over the end leaves them at once.
bool map_allocation(Allocation& allocation, std::size_t size) {
  const std::size_t rounded = round_up(size, alignment);
  allocation.size = size;
  allocation.pages_size = round_up(rounded, page);
  allocation.map_size = allocation.pages_size + 2 * guard_size;
  if (arena.begin == 0) {
    void* reserved = mmap(nullptr, arena_size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (reserved == MAP_FAILED) return false;
    arena.begin = reinterpret_cast<std::uintptr_t>(reserved);
  }
  if (allocation.map_size > arena_size - arena.used) return false;
  allocation.map = arena.begin + arena.used;
  arena.used += allocation.map_size;
  allocation.pages = allocation.map + guard_size;
  allocation.base = allocation.pages + allocation.pages_size - rounded;
  protect(allocation, true);
  std::memset(reinterpret_cast<void*>(allocation.base), 0xff, size);
  fill_guard(allocation.pages, allocation.base);
  fill_guard(allocation.base + size, allocation.pages + allocation.pages_size);
  poison_region(allocation.pages, allocation.base);
  poison_region(allocation.base + size, allocation.pages + allocation.pages_size);
  protect(allocation, false);
  return true;
}

void check_allocation(Allocation& allocation, const std::string& where, GuardReach reach) {
  const std::uintptr_t end = allocation.base + allocation.size;
  const std::uintptr_t begin = reach == GuardReach::Whole || allocation.base - allocation.pages < near_bytes
                                   ? allocation.pages
                                   : allocation.base - near_bytes;
  if (const std::uintptr_t at = find_change(end, allocation.pages + allocation.pages_size);
      at != allocation.pages + allocation.pages_size) {
    add_fault(FaultKind::OutOfBounds, where, "wrote " + describe_address(at));
    unpoison_region(end, allocation.pages + allocation.pages_size);
    fill_guard(end, allocation.pages + allocation.pages_size);
    poison_region(end, allocation.pages + allocation.pages_size);
  }
  if (const std::uintptr_t at = find_change(begin, allocation.base); at != allocation.base) {
    add_fault(FaultKind::OutOfBounds, where, "wrote " + describe_address(at));
    unpoison_region(begin, allocation.base);
    fill_guard(begin, allocation.base);
    poison_region(begin, allocation.base);
  }
}

}  // namespace

Allocation* allocation_at(std::uintptr_t address) {
  auto& memory = state().memory;
  auto after = memory.upper_bound(address);
  if (after == memory.begin()) return nullptr;
  Allocation& allocation = std::prev(after)->second;
  return address < allocation.map + allocation.map_size ? &allocation : nullptr;
}

PinnedBlock* pinned_at(std::uintptr_t address) {
  auto& pinned = state().pinned;
  auto after = pinned.upper_bound(address);
  if (after == pinned.begin()) return nullptr;
  PinnedBlock& block = std::prev(after)->second;
  return address < block.base + block.size ? &block : nullptr;
}

void open_memory(std::uint64_t device_mask) {
  State& s = state();
  if (s.open_devices == device_mask) return;
  for (auto& [map, allocation] : s.memory) {
    const bool wanted = ((device_mask >> static_cast<unsigned>(allocation.device)) & 1U) != 0;
    if (!allocation.freed && allocation.open != wanted) protect(allocation, wanted);
  }
  s.open_devices = device_mask;
}

void close_memory() {
  State& s = state();
  if (s.open_devices == 0 && !s.opened_to_check) return;
  for (auto& [map, allocation] : s.memory) {
    if (allocation.open) protect(allocation, false);
  }
  s.open_devices = 0;
  s.opened_to_check = false;
}

void check_guards(const std::string& where, GuardReach reach) {
  State& s = state();
  for (auto& [map, allocation] : s.memory) {
    if (allocation.freed) continue;
    if (!allocation.open) {
      if (reach == GuardReach::Near) continue;  // nothing ran on its device
      protect(allocation, true);
      s.opened_to_check = true;
    }
    check_allocation(allocation, where, reach);
  }
}

std::string describe_address(std::uintptr_t address) {
  const Allocation* allocation = allocation_at(address);
  if (allocation == nullptr) {
    if (pinned_at(address) != nullptr) return "pinned host memory";
    return address < page ? "address " + std::to_string(address) + " (a null pointer?)" : "an address that is no device memory";
  }
  const std::string subject = "allocation " + std::to_string(allocation->number) + " (" + std::to_string(allocation->size) +
                              " bytes on device " + std::to_string(allocation->device) + (allocation->freed ? ", freed)" : ")");
  if (address < allocation->base) return std::to_string(allocation->base - address) + " bytes before " + subject;
  if (address >= allocation->base + allocation->size) {
    return std::to_string(address - allocation->base - allocation->size + 1) + " bytes past the end of " + subject;
  }
  return "byte " + std::to_string(address - allocation->base) + " of " + subject;
}

bool in_arena(std::uintptr_t address) {
  const std::uintptr_t begin = arena.begin;
  return begin != 0 && address >= begin && address - begin < arena_size;
}
void open_page(std::uintptr_t address) {
  mprotect(reinterpret_cast<void*>(address / page * page), page, PROT_READ | PROT_WRITE);
}
void close_page(std::uintptr_t address) {
  const Allocation* allocation = allocation_at(address);
  const bool stays = allocation != nullptr && allocation->open && address >= allocation->pages &&
                     address < allocation->pages + allocation->pages_size;
  if (!stays) mprotect(reinterpret_cast<void*>(address / page * page), page, PROT_NONE);
}

void release_all_memory() {
  State& s = state();
  for (auto& [map, allocation] : s.memory) unpoison_region(allocation.pages, allocation.pages + allocation.pages_size);
  if (arena.used > 0) {
    mmap(reinterpret_cast<void*>(arena.begin.load()), arena.used, PROT_NONE,
         MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
    arena.used = 0;
  }
  for (auto& [base, block] : s.pinned) {
    if (block.map_size != 0) munmap(reinterpret_cast<void*>(base), block.map_size);
  }
  s.memory.clear();
  s.pinned.clear();
}

namespace {

void visit_pending(const std::function<void(const Operation&)>& visit) {
  State& s = state();
  const std::uint64_t mark = ++s.searches;
  std::vector<OperationPointer> open = s.ready;
  for (const auto& operation : open) operation->mark = mark;
  while (!open.empty()) {
    const OperationPointer operation = open.back();
    open.pop_back();
    visit(*operation);
    for (const auto& dependent : operation->dependents) {
      if (dependent->mark == mark || dependent->done) continue;
      dependent->mark = mark;
      open.push_back(dependent);
    }
  }
}

}  // namespace

void report_if_in_flight(std::uintptr_t base, const char* call, const std::string& what) {
  std::string user;
  visit_pending([&](const Operation& operation) {
    const auto& uses = operation.work.uses;
    if (std::find(uses.begin(), uses.end(), base) != uses.end()) user = operation.work.name;
  });
  if (!user.empty()) add_fault(FaultKind::InFlight, call, what + " while queued " + user + " uses it");
}

}  // namespace cuda_host

using namespace cuda_host;

cudaError_t cudaMalloc(void** pointer, std::size_t size) {
  Call call("cudaMalloc");
  if (const cudaError_t refused = call.refuse_unsafe(); refused != cudaSuccess) return call.result(refused);
  if (pointer == nullptr) return call.result(cudaErrorInvalidValue);
  *pointer = nullptr;
  if (size == 0) return cudaSuccess;
  Device& device = call.device();
  const std::size_t rounded = round_up(size, alignment);
  if (rounded < size || rounded > state().options.memory_bytes - std::min(state().options.memory_bytes, device.used_bytes)) {
    return call.result(cudaErrorMemoryAllocation);
  }
  Allocation allocation;
  if (!map_allocation(allocation, size)) return call.result(cudaErrorMemoryAllocation);
  allocation.device = current_device();
  allocation.number = ++state().allocations_made;
  device.used_bytes += rounded;
  *pointer = reinterpret_cast<void*>(allocation.base);
  state().memory.emplace(allocation.map, allocation);
  add_log(Action::Allocated, call.name());
  return cudaSuccess;
}

cudaError_t cudaFree(void* pointer) {
  Call call("cudaFree");
  if (pointer == nullptr) return call.result(call.refuse_unsafe());
  const cudaError_t refused = call.refuse_unsafe();
  if (refused == cudaErrorStreamCaptureUnsupported) return call.result(refused);
  const auto address = reinterpret_cast<std::uintptr_t>(pointer);
  Allocation* allocation = allocation_at(address);
  if (allocation == nullptr || allocation->base != address || allocation->freed) {
    add_fault(FaultKind::BadHandle, call.name(), "not the begin of an allocation: " + describe_address(address));
    return call.result(cudaErrorInvalidValue);
  }
  report_if_in_flight(allocation->base, call.name(), "allocation " + std::to_string(allocation->number) + " is freed");
  const std::uintptr_t map = allocation->map;
  synchronize_device(call, allocation->device);  // as the real one does
  allocation = &state().memory.at(map);
  protect(*allocation, true);
  check_allocation(*allocation, call.name(), GuardReach::Whole);
  protect(*allocation, false);
  madvise(reinterpret_cast<void*>(allocation->pages), allocation->pages_size, MADV_DONTNEED);
  allocation->freed = true;
  state().devices[static_cast<std::size_t>(allocation->device)]->used_bytes -= round_up(allocation->size, alignment);
  add_log(Action::Freed, call.name());
  return call.result(refused);
}

cudaError_t cudaMemGetInfo(std::size_t* free_bytes, std::size_t* total) {
  Call call("cudaMemGetInfo");
  if (const cudaError_t broken = call.sticky(); broken != cudaSuccess) return call.result(broken);
  *total = state().options.memory_bytes;
  *free_bytes = *total - std::min(*total, call.device().used_bytes);
  return cudaSuccess;
}

cudaError_t cudaHostAlloc(void** pointer, std::size_t size, unsigned int /*flags*/) {
  Call call("cudaHostAlloc");
  if (const cudaError_t refused = call.refuse_unsafe(); refused != cudaSuccess) return call.result(refused);
  if (pointer == nullptr) return call.result(cudaErrorInvalidValue);
  *pointer = nullptr;
  if (size == 0) return cudaSuccess;
  PinnedBlock block{.base = 0, .size = size, .map_size = round_up(size, page) + guard_size};
  void* map = mmap(nullptr, block.map_size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (map == MAP_FAILED) return call.result(cudaErrorMemoryAllocation);
  block.base = reinterpret_cast<std::uintptr_t>(map);
  mprotect(reinterpret_cast<void*>(block.base + round_up(size, page)), guard_size, PROT_NONE);
  std::memset(map, 0xff, size);
  state().pinned.emplace(block.base, block);
  *pointer = map;
  add_log(Action::Allocated, call.name());
  return cudaSuccess;
}

cudaError_t cudaFreeHost(void* pointer) {
  Call call("cudaFreeHost");
  const cudaError_t refused = call.refuse_unsafe();
  if (pointer == nullptr || refused == cudaErrorStreamCaptureUnsupported) return call.result(refused);
  const auto found = state().pinned.find(reinterpret_cast<std::uintptr_t>(pointer));
  if (found == state().pinned.end() || found->second.map_size == 0) {
    add_fault(FaultKind::BadHandle, call.name(), "not the begin of a pinned block");
    return call.result(cudaErrorInvalidValue);
  }
  report_if_in_flight(found->first, call.name(), "pinned memory is freed");
  const std::size_t map_size = found->second.map_size;
  for (std::size_t device = 0; device < state().devices.size(); ++device) synchronize_device(call, static_cast<int>(device));
  state().pinned.erase(reinterpret_cast<std::uintptr_t>(pointer));
  munmap(pointer, map_size);
  add_log(Action::Freed, call.name());
  return call.result(refused);
}

cudaError_t cudaHostRegister(void* pointer, std::size_t size, unsigned int /*flags*/) {
  Call call("cudaHostRegister");
  if (const cudaError_t refused = call.refuse_unsafe(); refused != cudaSuccess) return call.result(refused);
  if (pointer == nullptr || size == 0) return call.result(cudaErrorInvalidValue);
  const auto base = reinterpret_cast<std::uintptr_t>(pointer);
  if (pinned_at(base) != nullptr || pinned_at(base + size - 1) != nullptr) {
    return call.result(cudaErrorHostMemoryAlreadyRegistered);
  }
  state().pinned.emplace(base, PinnedBlock{.base = base, .size = size, .map_size = 0});
  return cudaSuccess;
}

cudaError_t cudaHostUnregister(void* pointer) {
  Call call("cudaHostUnregister");
  const auto found = state().pinned.find(reinterpret_cast<std::uintptr_t>(pointer));
  if (found == state().pinned.end() || found->second.map_size != 0) return call.result(cudaErrorHostMemoryNotRegistered);
  report_if_in_flight(found->first, call.name(), "pinned memory is unregistered");
  state().pinned.erase(found);
  return call.result(call.sticky());
}
