// SPDX-License-Identifier: Apache-2.0
// Distinct id types, so that a block cannot be passed for a sequence.
#pragma once

#include <compare>
#include <cstdint>
#include <functional>
#include <optional>

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

/// One slot of recurrent state: 0 .. state_count-1. A running sequence of a model with recurrent layers has one for what it has
/// computed so far; the others keep snapshots of the prefix cache.
struct StateId {
  std::int32_t value = 0;
  friend auto operator<=>(const StateId&, const StateId&) = default;
};

/// A state whose contents are wanted in another pool, or in another place of the same.
struct StateCopy {
  StateId from;
  StateId to;
  friend bool operator==(const StateCopy&, const StateCopy&) = default;
};

/// What a row of a step does with recurrent state. The state after any token is canonical: it is a function of that token and
/// those before it alone.
struct StateUse {
  /// The state after the row's first `tokens` tokens is kept in `to` as well: a snapshot.
  struct Save {
    StateId to;
    std::int32_t tokens = 0;  // 1 .. the row's
    friend bool operator==(const Save&, const Save&) = default;
  };
  std::optional<StateId> from;  // what the row begins from; none if and only if it begins at position 0, from zeros
  StateId to;                   // where the state after its last token goes; may be `from`
  std::optional<Save> save;     // never to `from` or `to`
  friend bool operator==(const StateUse&, const StateUse&) = default;
};

/// What a full block of tokens is known by: all tokens from the start of the sequence to the block's end, and nothing else.
/// Whoever makes it sees to it that two different prefixes never have the same one.
struct BlockHash {
  std::uint64_t high = 0;
  std::uint64_t low = 0;
  friend auto operator<=>(const BlockHash&, const BlockHash&) = default;
};

/// One lane of the node: 0 .. lanes-1.
struct LaneIndex {
  std::int32_t value = 0;
  friend auto operator<=>(const LaneIndex&, const LaneIndex&) = default;
};

}  // namespace rubato

template <>
struct std::hash<rubato::BlockHash> {
  std::size_t operator()(const rubato::BlockHash& block) const noexcept { return static_cast<std::size_t>(block.low); }
};

template <>
struct std::hash<rubato::SequenceId> {
  std::size_t operator()(const rubato::SequenceId& id) const noexcept { return std::hash<std::uint64_t>()(id.value); }
};
