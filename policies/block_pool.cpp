// SPDX-License-Identifier: Apache-2.0
#include "policies/block_pool.h"

#include <algorithm>

#include "manifests/check.h"

namespace rubato::policies {

BlockPool::BlockPool(std::int32_t block_count) {
  CHECK(block_count > 0, "block_count=", block_count);
  ring_.reserve(static_cast<std::size_t>(block_count));
  for (std::int32_t block = 0; block < block_count; ++block) ring_.push_back(BlockId{block});
  taken_.assign(static_cast<std::size_t>(block_count), 0);
  free_count_ = block_count;
}

BlockId BlockPool::take() {
  CHECK(free_count_ > 0);
  const BlockId block = ring_[static_cast<std::size_t>(first_free_)];
  first_free_ = first_free_ + 1 == block_count() ? 0 : first_free_ + 1;
  --free_count_;
  taken_[static_cast<std::size_t>(block.value)] = 1;
  return block;
}

void BlockPool::give(BlockId block) {
  CHECK(is_taken(block), "block ", block.value, " is not taken");
  std::int32_t end = first_free_ + free_count_;
  if (end >= block_count()) end -= block_count();
  ring_[static_cast<std::size_t>(end)] = block;
  ++free_count_;
  taken_[static_cast<std::size_t>(block.value)] = 0;
}

bool BlockPool::is_taken(BlockId block) const {
  CHECK(block.value >= 0 && block.value < block_count(), "block ", block.value, " of ", block_count());
  return taken_[static_cast<std::size_t>(block.value)] != 0;
}

void BlockPool::check_integrity() const {
  std::vector<std::uint8_t> seen(taken_.size(), 0);
  for (std::int32_t offset = 0; offset < free_count_; ++offset) {
    const BlockId block = ring_[static_cast<std::size_t>((first_free_ + offset) % block_count())];
    CHECK(!is_taken(block), "block ", block.value, " is both free and taken");
    CHECK(seen[static_cast<std::size_t>(block.value)] == 0, "block ", block.value, " is free twice");
    seen[static_cast<std::size_t>(block.value)] = 1;
  }
  const auto taken = static_cast<std::int32_t>(std::count(taken_.begin(), taken_.end(), 1));
  CHECK(taken + free_count_ == block_count(), "taken=", taken, " free=", free_count_, " of ", block_count());
}

}  // namespace rubato::policies
