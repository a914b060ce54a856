// SPDX-License-Identifier: Apache-2.0
// Large zeroed memory for weights, cache and scratch, on huge pages where the system grants them, and touched when taken so that
// no step pays for a page fault.
#pragma once

#include <cstdint>
#include <utility>

#include "manifests/result.h"

namespace rubato::engine {

class HostMemory {
 public:
  HostMemory() = default;
  HostMemory(HostMemory&& other) noexcept { swap(other); }
  HostMemory& operator=(HostMemory&& other) noexcept {
    swap(other);
    return *this;
  }
  ~HostMemory();

  /// ResourceExhausted names purpose and the bytes asked for. bytes >= 0.
  [[nodiscard]] static Result<HostMemory> take(std::int64_t bytes, const char* purpose);

  [[nodiscard]] void* data() const { return data_; }
  [[nodiscard]] std::int64_t bytes() const { return bytes_; }

 private:
  void swap(HostMemory& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
  }
  void* data_ = nullptr;  // at least 64-byte aligned; huge-page aligned when that large
  std::int64_t bytes_ = 0;
};

}  // namespace rubato::engine
