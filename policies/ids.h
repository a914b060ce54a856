// SPDX-License-Identifier: Apache-2.0
// Distinct id types, so that a block cannot be passed for a sequence.
#pragma once

#include <compare>
#include <cstdint>
#include <functional>

namespace rubato {

/// One generation (one choice of one request). Never reused while the process lives.
struct SequenceId {
  std::uint64_t value = 0;
  friend auto operator<=>(const SequenceId&, const SequenceId&) = default;
};

/// Dense index of an admitted or waiting sequence: 0 .. capacity-1. Reused after the sequence ends.
struct SequenceIndex {
  std::int32_t value = 0;
  friend auto operator<=>(const SequenceIndex&, const SequenceIndex&) = default;
};

/// One KV block of kv_block_tokens tokens: 0 .. block_count-1.
struct BlockId {
  std::int32_t value = 0;
  friend auto operator<=>(const BlockId&, const BlockId&) = default;
};

/// A block whose contents are wanted in another pool, or in another place of the same.
struct BlockCopy {
  BlockId from;
  BlockId to;
  friend bool operator==(const BlockCopy&, const BlockCopy&) = default;
};

/// One lane of the node: 0 .. lanes-1.
struct LaneIndex {
  std::int32_t value = 0;
  friend auto operator<=>(const LaneIndex&, const LaneIndex&) = default;
};

}  // namespace rubato

template <>
struct std::hash<rubato::SequenceId> {
  std::size_t operator()(const rubato::SequenceId& id) const noexcept { return std::hash<std::uint64_t>()(id.value); }
};
