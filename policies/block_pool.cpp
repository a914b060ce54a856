// SPDX-License-Identifier: Apache-2.0
#include "policies/block_pool.h"

#include <algorithm>

#include "manifests/check.h"

namespace rubato::policies {

BlockPool::BlockPool(std::int32_t block_count, Finding finding)
    : index_(finding == Finding::ByHash ? block_count : 0), free_count_(block_count) {
  CHECK(block_count > 0, "block_count=", block_count);
  entries_.resize(static_cast<std::size_t>(block_count) + 1);
  if (finding == Finding::ByHash) hashes_.resize(static_cast<std::size_t>(block_count));
  for (std::int32_t entry = 0; entry <= block_count; ++entry) {
    entries_[static_cast<std::size_t>(entry)].before = entry == 0 ? block_count : entry - 1;
    entries_[static_cast<std::size_t>(entry)].after = entry == block_count ? 0 : entry + 1;
  }
}

const BlockPool::Entry& BlockPool::at(BlockId block) const {
  CHECK(block.value >= 0 && block.value < block_count(), "block ", block.value, " of ", block_count());
  return entries_[static_cast<std::size_t>(block.value)];
}

void BlockPool::unlink(BlockId block) {
  const Entry& entry = at(block);
  entries_[static_cast<std::size_t>(entry.before)].after = entry.after;
  entries_[static_cast<std::size_t>(entry.after)].before = entry.before;
  --free_count_;
}

BlockId BlockPool::take() {
  CHECK(free_count_ > 0);
  const BlockId block{entries_.back().after};
  unlink(block);
  Entry& entry = at(block);
  entry.references = 1;
  if (entry.cached) {
    index_.erase(hashes_[static_cast<std::size_t>(block.value)]);
    entry.cached = false;
    ++evicted_;
  }
  return block;
}

void BlockPool::share(BlockId block) {
  Entry& entry = at(block);
  CHECK(entry.references > 0 || entry.cached, "block ", block.value, " holds nothing to share");
  if (entry.references == 0) {
    unlink(block);
  } else {
    ++shared_references_;
  }
  ++entry.references;
}

void BlockPool::give(BlockId block) {
  Entry& entry = at(block);
  CHECK(entry.references > 0, "block ", block.value, " is not taken");
  if (--entry.references > 0) {
    --shared_references_;
    return;
  }
  Entry& ends = entries_.back();
  entry.before = ends.before;
  entry.after = block_count();
  entries_[static_cast<std::size_t>(ends.before)].after = block.value;
  ends.before = block.value;
  ++free_count_;
}

bool BlockPool::cache(BlockId block, const BlockHash& hash) {
  Entry& entry = at(block);
  CHECK(entry.references > 0 && !entry.cached, "block ", block.value, " references=", entry.references, " is free or cached");
  if (index_.find(hash)) return false;
  index_.insert(hash, block.value);
  hashes_[static_cast<std::size_t>(block.value)] = hash;
  entry.cached = true;
  return true;
}

std::optional<BlockId> BlockPool::find(const BlockHash& hash) const {
  const std::optional<std::int32_t> found = index_.find(hash);
  return found ? std::optional(BlockId{*found}) : std::nullopt;
}

void BlockPool::check_integrity() const {
  std::vector<std::uint8_t> free(entries_.size(), 0);
  std::int32_t before = block_count();
  for (std::int32_t block = entries_.back().after; block != block_count(); block = at(BlockId{block}).after) {
    CHECK(!is_taken(BlockId{block}), "block ", block, " is both free and taken");
    CHECK(free[static_cast<std::size_t>(block)] == 0, "block ", block, " is free twice");
    CHECK(at(BlockId{block}).before == before, "block ", block, " is linked wrongly");
    free[static_cast<std::size_t>(block)] = 1;
    before = block;
  }
  CHECK(entries_.back().before == before, "the free list ends at ", before);
  std::int32_t taken = 0;
  std::int32_t cached = 0;
  std::int32_t shared = 0;
  for (std::int32_t block = 0; block < block_count(); ++block) {
    const Entry& entry = at(BlockId{block});
    CHECK(entry.references >= 0, "block ", block, " references=", entry.references);
    taken += entry.references > 0 ? 1 : 0;
    shared += std::max(entry.references - 1, 0);
    if (!entry.cached) continue;
    ++cached;
    CHECK(index_.find(hashes_[static_cast<std::size_t>(block)]) == block, "block ", block, " is not found by its hash");
  }
  CHECK(std::count(free.begin(), free.end(), 1) == free_count_ && taken + free_count_ == block_count(), "taken=", taken,
        " free=", free_count_, " of ", block_count());
  CHECK(cached == cached_count(), "cached=", cached, " indexed=", cached_count());
  CHECK(shared == shared_references_, "shared=", shared, " of ", shared_references_);
  index_.check_integrity();
}

}  // namespace rubato::policies
