// SPDX-License-Identifier: Apache-2.0
// Anonymous mappings with huge-page advice.
#include "engine/cpu/memory.h"

#include <sys/mman.h>

#include <cstring>
#include <string>

namespace rubato::engine {
namespace {

constexpr std::int64_t huge_page = 2 << 20;

}  // namespace

Result<HostMemory> HostMemory::take(std::int64_t bytes, const char* purpose) {
  HostMemory memory;
  if (bytes == 0) return memory;
  // Whole huge pages once that wastes little, so that the kernel can back all of the mapping with them.
  const std::int64_t unit = bytes >= 4 * huge_page ? huge_page : 4096;
  const std::int64_t rounded = (bytes + unit - 1) / unit * unit;
  void* data = mmap(nullptr, static_cast<std::size_t>(rounded), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (data == MAP_FAILED) {
    return unexpected(ErrorCode::ResourceExhausted,
                      std::string("cpu backend: no memory for ") + purpose + ": " + std::to_string(rounded) + " bytes");
  }
  memory.data_ = data;
  memory.bytes_ = rounded;
#ifdef MADV_HUGEPAGE
  if (unit == huge_page) madvise(data, static_cast<std::size_t>(rounded), MADV_HUGEPAGE);  // advice: small pages work as well
#endif
#ifdef MADV_POPULATE_WRITE
  if (madvise(data, static_cast<std::size_t>(rounded), MADV_POPULATE_WRITE) == 0) return memory;
#endif
  std::memset(data, 0, static_cast<std::size_t>(rounded));
  return memory;
}

HostMemory::~HostMemory() {
  if (data_ != nullptr) munmap(data_, static_cast<std::size_t>(bytes_));
}

}  // namespace rubato::engine
