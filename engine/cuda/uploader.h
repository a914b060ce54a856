// SPDX-License-Identifier: Apache-2.0
// Carries tensors from pageable (memory-mapped) host memory to the device: through two page-locked buffers, so that reading the
// file and copying to the device overlap and a load runs at the disk's speed.
#pragma once

#include <array>
#include <cstdint>
#include <optional>

#include "engine/cuda/runtime.h"
#include "engine/model/weights.h"

namespace rubato::engine::cuda {

class Uploader {
 public:
  /// stream must outlive it.
  [[nodiscard]] static Result<Uploader> make(const Stream& stream);

  /// Elements [first, first + count) of view, converted to dtype, to `to`. Returns when the source has been read.
  [[nodiscard]] Result<void> upload(const TensorView& view, std::int64_t first, std::int64_t count, DataType dtype,
                                    std::byte* to);
  /// Until everything has arrived.
  [[nodiscard]] Result<void> finish() const { return stream_->wait(); }

 private:
  struct Buffer {
    PinnedMemory memory;
    Event free;
  };
  Uploader(const Stream& stream, Buffer first, Buffer second) : stream_(&stream), buffers_{std::move(first), std::move(second)} {}

  const Stream* stream_;
  std::array<Buffer, 2> buffers_;
  std::size_t next_ = 0;
};

}  // namespace rubato::engine::cuda
