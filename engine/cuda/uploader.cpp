// SPDX-License-Identifier: Apache-2.0
#include "engine/cuda/uploader.h"

#include <algorithm>
#include <cstring>

#include "engine/models/tensor_elements.h"

namespace rubato::engine::cuda {
namespace {

constexpr std::int64_t buffer_bytes = std::int64_t{16} << 20;  // large enough that the copy engine's set-up does not show

void convert(const TensorView& view, std::int64_t first, std::int64_t count, DataType dtype, std::byte* out) {
  if (view.dtype == dtype) {
    const std::int64_t size = element_size(dtype);
    std::memcpy(out, view.bytes.data() + first * size, static_cast<std::size_t>(count * size));
    return;
  }
  for (std::int64_t i = 0; i < count; ++i) narrow_element(dtype, widen_element(view, first + i), out + i * element_size(dtype));
}

}  // namespace

Result<Uploader> Uploader::make(const Stream& stream) {
  const auto make_buffer = [&]() -> Result<Buffer> {
    Result<PinnedMemory> memory = PinnedMemory::make(buffer_bytes);
    if (!memory) return Unexpected(std::move(memory).error());
    Result<Event> free = Event::make();
    if (!free) return Unexpected(std::move(free).error());
    return Buffer{.memory = std::move(*memory), .free = std::move(*free)};
  };
  Result<Buffer> first = make_buffer();
  if (!first) return Unexpected(std::move(first).error());
  Result<Buffer> second = make_buffer();
  if (!second) return Unexpected(std::move(second).error());
  return Uploader(stream, std::move(*first), std::move(*second));
}

Result<void> Uploader::upload(const TensorView& view, std::int64_t first, std::int64_t count, DataType dtype, std::byte* to) {
  const std::int64_t size = element_size(dtype);
  const std::int64_t piece_max = buffer_bytes / size;
  for (std::int64_t done = 0; done < count;) {
    const std::int64_t piece = std::min(piece_max, count - done);
    Buffer& buffer = buffers_[next_];
    next_ = 1 - next_;
    if (auto free = buffer.free.wait(); !free) return free;  // an event that was never recorded is complete
    convert(view, first + done, piece, dtype, buffer.memory.data());
    const auto copied = check(cudaMemcpyAsync(to + done * size, buffer.memory.data(), static_cast<std::size_t>(piece * size),
                                              cudaMemcpyHostToDevice, stream_->get()),
                              "cudaMemcpyAsync");
    if (!copied) return copied;
    if (auto recorded = buffer.free.record(*stream_); !recorded) return recorded;
    done += piece;
  }
  return {};
}

}  // namespace rubato::engine::cuda
