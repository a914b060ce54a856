// SPDX-License-Identifier: Apache-2.0
#include "engine/cuda/block_copies.h"

#include <algorithm>
#include <cstdlib>
#include <utility>

#include "manifests/check.h"

namespace rubato::engine::cuda {
namespace {

constexpr std::size_t run_max = 16;  // blocks; what is on its way when a wish is withdrawn stays small

/// How many of the first copies can travel as one: neighbours in both pools, and in one pool no block both read and written.
std::size_t run_length(std::span<const BlockCopy> copies, const CacheView& to, const CacheView& from) {
  std::size_t length = 1;
  while (length < std::min(copies.size(), run_max) && copies[length].from.value == copies[length - 1].from.value + 1 &&
         copies[length].to.value == copies[length - 1].to.value + 1)
    ++length;
  if (to.data != from.data) return length;
  const auto apart = static_cast<std::size_t>(std::abs(copies[0].from.value - copies[0].to.value));
  return std::min(length, std::max<std::size_t>(1, apart));
}

}  // namespace

Result<BlockCopier> BlockCopier::make(std::int32_t device) {
  Result<Stream> stream = Stream::make();
  if (!stream) return Unexpected(std::move(stream).error());
  return BlockCopier(device, std::move(*stream));
}

/// Where devices cannot reach each other, the driver carries copies through the host.
void BlockCopier::reach(std::int32_t peer) {
  if (peer == device_ || std::find(reached_.begin(), reached_.end(), peer) != reached_.end()) return;
  reached_.push_back(peer);
  int can = 0;
  if (cudaDeviceCanAccessPeer(&can, device_, peer) != cudaSuccess || can == 0 ||
      cudaDeviceEnablePeerAccess(peer, 0) != cudaSuccess) {
    static_cast<void>(cudaGetLastError());  // also when another backend of this device has been here before
  }
}

Result<void> BlockCopier::queue_bytes(std::byte* to, const std::byte* from, std::int32_t from_device, std::int64_t bytes) const {
  const auto size = static_cast<std::size_t>(bytes);
  if (from_device == device_)
    return check(cudaMemcpyAsync(to, from, size, cudaMemcpyDeviceToDevice, stream_.get()), "cudaMemcpyAsync");
  return check(cudaMemcpyPeerAsync(to, device_, from, from_device, size, stream_.get()), "cudaMemcpyPeerAsync");
}

Result<void> BlockCopier::queue(const CacheView& to, const CacheView& from, std::int32_t from_device,
                                std::span<const BlockCopy> run) const {
  const std::int64_t bytes = to.block_bytes * static_cast<std::int64_t>(run.size());
  for (std::int32_t layer = 0; layer < to.layers; ++layer) {
    std::byte* const target = to.data + layer * to.layer_bytes + run[0].to.value * to.block_bytes;
    const std::byte* const source = from.data + layer * from.layer_bytes + run[0].from.value * from.block_bytes;
    if (Result<void> queued = queue_bytes(target, source, from_device, bytes); !queued) return queued;
  }
  return {};
}

Result<void> BlockCopier::copy(const CacheView& to, const CacheView& from, std::int32_t from_device,
                               std::span<const BlockCopy> copies, const std::function<bool()>& allowed) {
  CHECK(to.layers == from.layers && to.block_bytes == from.block_bytes);
  for (const BlockCopy& copy : copies) {
    CHECK(copy.from.value >= 0 && copy.from.value < from.block_count, "from=", copy.from.value, " pool=", from.block_count);
    CHECK(copy.to.value >= 0 && copy.to.value < to.block_count, "to=", copy.to.value, " pool=", to.block_count);
  }
  if (auto set = check(cudaSetDevice(device_), "cudaSetDevice"); !set) return set;
  reach(from_device);
  while (!copies.empty()) {
    const std::span<const BlockCopy> run = copies.first(run_length(copies, to, from));
    for (std::size_t block = 0; block < run.size(); ++block) {
      if (!allowed()) return unexpected(ErrorCode::Cancelled, "the blocks are no longer wanted");
    }
    Result<void> copied = queue(to, from, from_device, run);
    // What has been queued ends before anything is said, an error too: the blocks are their owners' again.
    Result<void> arrived = stream_.wait();
    if (!copied) return copied;
    if (!arrived) return arrived;
    copies = copies.subspan(run.size());
  }
  return {};
}

Result<void> BlockCopier::copy(const StateView& to, const StateView& from, std::int32_t from_device, const StateCopy& copy,
                               const std::function<bool()>& allowed) {
  CHECK(to.bytes == from.bytes, "to=", to.bytes, " from=", from.bytes);
  CHECK(copy.from.value >= 0 && copy.from.value < from.count, "from=", copy.from.value, " pool=", from.count);
  CHECK(copy.to.value >= 0 && copy.to.value < to.count, "to=", copy.to.value, " pool=", to.count);
  if (auto set = check(cudaSetDevice(device_), "cudaSetDevice"); !set) return set;
  if (!allowed()) return unexpected(ErrorCode::Cancelled, "the state is no longer wanted");
  std::byte* const target = to.data + copy.to.value * to.bytes;
  const std::byte* const source = from.data + copy.from.value * from.bytes;
  if (target == source) return {};
  reach(from_device);
  Result<void> queued = queue_bytes(target, source, from_device, to.bytes);
  Result<void> arrived = stream_.wait();
  return queued ? std::move(arrived) : std::move(queued);
}

}  // namespace rubato::engine::cuda
