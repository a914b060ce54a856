// SPDX-License-Identifier: Apache-2.0
// Where a prefix is found again: block hashes to the number of the block or state slot that holds what they stand for.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "policies/ids.h"

namespace rubato::policies {

/// A table of open addressing, at most half full, sized once. Every operation looks at a few neighbouring entries and allocates
/// nothing. Hashes are taken to be spread evenly, as keyed hashes are.
class PrefixIndex {
 public:
  /// capacity: most hashes at once; may be 0.
  explicit PrefixIndex(std::int32_t capacity);

  [[nodiscard]] std::optional<std::int32_t> find(const BlockHash& hash) const;
  /// CHECKs that the hash is not there and that there is room.
  void insert(const BlockHash& hash, std::int32_t value);
  /// CHECKs that it is there.
  void erase(const BlockHash& hash);

  [[nodiscard]] std::int32_t size() const { return size_; }
  /// CHECKs that every entry is found where it lies.
  void check_integrity() const;

 private:
  struct Entry {
    BlockHash hash;
    std::int32_t value = 0;
    bool used = false;
  };
  [[nodiscard]] std::size_t home_of(const BlockHash& hash) const;
  [[nodiscard]] std::size_t place_of(const BlockHash& hash) const;

  std::vector<Entry> entries_;  // a power of two of them
  std::int32_t capacity_ = 0;
  std::int32_t size_ = 0;
};

}  // namespace rubato::policies
