// SPDX-License-Identifier: Apache-2.0
// What the sanitizers must be told: memory that may not be touched, and changes of stack.
#pragma once

#include <cstdint>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#define CUDA_HOST_ASAN 1
#else
#define CUDA_HOST_ASAN 0
#endif
#if defined(__SANITIZE_THREAD__)
#include <sanitizer/tsan_interface.h>
#define CUDA_HOST_TSAN 1
#else
#define CUDA_HOST_TSAN 0
#endif

#define CUDA_HOST_NO_SANITIZE __attribute__((no_sanitize("address", "undefined"), noinline))

namespace cuda_host {

inline void poison_region([[maybe_unused]] std::uintptr_t begin, [[maybe_unused]] std::uintptr_t end) {
#if CUDA_HOST_ASAN
  if (begin < end) __asan_poison_memory_region(reinterpret_cast<const void*>(begin), end - begin);
#endif
}
inline void unpoison_region([[maybe_unused]] std::uintptr_t begin, [[maybe_unused]] std::uintptr_t end) {
#if CUDA_HOST_ASAN
  if (begin < end) __asan_unpoison_memory_region(reinterpret_cast<const void*>(begin), end - begin);
#endif
}

}  // namespace cuda_host
