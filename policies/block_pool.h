// SPDX-License-Identifier: Apache-2.0
// The free list of KV blocks of one lane: who holds a block is the scheduler's business, that nobody holds it twice is this
// file's.
#pragma once

#include <cstdint>
#include <vector>

#include "policies/ids.h"

namespace rubato::policies {

/// A fixed set of blocks. A freed block is reused last, so that its old content stays readable for as long as possible. take()
/// and give() cost O(1) and allocate nothing.
class BlockPool {
 public:
  explicit BlockPool(std::int32_t block_count);

  /// Precondition: free_count() > 0.
  [[nodiscard]] BlockId take();

  /// CHECKs that the block was taken and not yet given back.
  void give(BlockId block);

  [[nodiscard]] std::int32_t free_count() const { return free_count_; }
  [[nodiscard]] std::int32_t block_count() const { return static_cast<std::int32_t>(taken_.size()); }
  [[nodiscard]] bool is_taken(BlockId block) const;

  /// CHECKs that the free list holds exactly the blocks that are not taken, each once.
  void check_integrity() const;

 private:
  std::vector<BlockId> ring_;        // free blocks, oldest first from first_free_, wrapping round
  std::vector<std::uint8_t> taken_;  // by block
  std::int32_t first_free_ = 0;
  std::int32_t free_count_ = 0;
};

}  // namespace rubato::policies
