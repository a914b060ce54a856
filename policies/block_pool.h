// SPDX-License-Identifier: Apache-2.0
// The KV blocks of one device: how many hold on to each, which are free, and which can be found again by what stands in them. Who
// holds a block is the scheduler's business; that a free one is held by nobody is this file's.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "policies/ids.h"
#include "policies/prefix_index.h"

namespace rubato::policies {

/// A fixed set of blocks with references. One without any is free, and reused last: its content stays readable, and findable if
/// it is cached, until the block comes to the front of the free list and is taken. Everything costs O(1) and allocates nothing.
class BlockPool {
 public:
  enum class Finding : std::uint8_t { None, ByHash };
  /// None: no block is ever cached, and nothing is kept to find one by.
  explicit BlockPool(std::int32_t block_count, Finding finding = Finding::ByHash);

  /// The block that has been free for longest, with one reference. If it was cached, it no longer is. Precondition:
  /// free_count() > 0.
  [[nodiscard]] BlockId take();
  /// One more reference to a block that is taken, or cached and free.
  void share(BlockId block);
  /// One reference less; without any the block is free. CHECKs that it was taken.
  void give(BlockId block);

  /// Makes a taken block findable. False, and nothing changes, where another one has the same hash. From now on nobody writes it.
  bool cache(BlockId block, const BlockHash& hash);
  [[nodiscard]] std::optional<BlockId> find(const BlockHash& hash) const;

  [[nodiscard]] std::int32_t references(BlockId block) const { return at(block).references; }
  [[nodiscard]] bool is_taken(BlockId block) const { return references(block) > 0; }
  [[nodiscard]] bool is_cached(BlockId block) const { return at(block).cached; }
  /// Without references, cached or not.
  [[nodiscard]] std::int32_t free_count() const { return free_count_; }
  [[nodiscard]] std::int32_t block_count() const { return static_cast<std::int32_t>(entries_.size()) - 1; }
  [[nodiscard]] std::int32_t cached_count() const { return index_.size(); }
  /// References beyond each block's first: so many blocks fewer than references are taken.
  [[nodiscard]] std::int32_t shared_references() const { return shared_references_; }
  /// Cached blocks that were taken for something else, ever.
  [[nodiscard]] std::uint64_t evicted() const { return evicted_; }

  /// CHECKs that the free list holds exactly the blocks without references, each once, and that index and blocks agree.
  void check_integrity() const;

 private:
  // The list runs through all of them, so that each visit is a cache miss: several in a line, the hashes apart.
  struct Entry {
    std::int32_t references = 0;
    std::int32_t before = 0;  // in the free list, while free
    std::int32_t after = 0;
    bool cached = false;
  };
  [[nodiscard]] const Entry& at(BlockId block) const;
  [[nodiscard]] Entry& at(BlockId block) { return const_cast<Entry&>(static_cast<const BlockPool*>(this)->at(block)); }
  void unlink(BlockId block);

  std::vector<Entry> entries_;     // by block; behind the last one the ends of the free list, longest free first
  std::vector<BlockHash> hashes_;  // by block, of cached ones
  PrefixIndex index_;
  std::int32_t free_count_ = 0;
  std::int32_t shared_references_ = 0;
  std::uint64_t evicted_ = 0;
};

}  // namespace rubato::policies
