// SPDX-License-Identifier: Apache-2.0
// Brings KV blocks and recurrent states from one pool into another, on the same device or from a peer, on a stream of the
// receiver's own.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "engine/backend.h"
#include "engine/cuda/ops.h"
#include "engine/cuda/runtime.h"

namespace rubato::engine::cuda {

/// One thread at a time.
class BlockCopier {
 public:
  /// Of the current device, which is the receiver's.
  [[nodiscard]] static Result<BlockCopier> make(std::int32_t device);

  /// Copies blocks of `from`, which lies on from_device, into `to`, whose layers have the same shape; returns when they have
  /// arrived. Neighbours in both pools travel together. allowed is asked before each block, when all that it allowed before has
  /// been written but for the block's own neighbours; a run with a block that is refused is left out whole. Cancelled then.
  [[nodiscard]] Result<void> copy(const CacheView& to, const CacheView& from, std::int32_t from_device,
                                  std::span<const BlockCopy> copies, const std::function<bool()>& allowed);
  /// The same for one state. A state that is wanted where it is stays there.
  [[nodiscard]] Result<void> copy(const StateView& to, const StateView& from, std::int32_t from_device, const StateCopy& copy,
                                  const std::function<bool()>& allowed);

 private:
  BlockCopier(std::int32_t device, Stream stream) : device_(device), stream_(std::move(stream)) {}
  void reach(std::int32_t peer);
  [[nodiscard]] Result<void> queue(const CacheView& to, const CacheView& from, std::int32_t from_device,
                                   std::span<const BlockCopy> run) const;
  [[nodiscard]] Result<void> queue_bytes(std::byte* to, const std::byte* from, std::int32_t from_device,
                                         std::int64_t bytes) const;

  std::int32_t device_;
  Stream stream_;
  std::vector<std::int32_t> reached_;  // peers that have been asked for direct access
};

}  // namespace rubato::engine::cuda
