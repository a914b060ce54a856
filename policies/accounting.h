// SPDX-License-Identifier: Apache-2.0
// How many KV blocks things need. Sizing the pool, admitting a request and simulating a node all ask here, so that they can never
// disagree on what fits.
#pragma once

#include <algorithm>
#include <cstdint>

#include "manifests/settings.h"

namespace rubato::policies {

/// Tokens of further output for which admission keeps room per running sequence, where a request may still produce that many.
inline constexpr std::int32_t default_growth_reserve_tokens = 512;

/// A sequence's lengths, as far as blocks are concerned.
struct SequenceLengths {
  std::int32_t known_tokens = 0;          // prompt and output so far
  std::int32_t remaining_new_tokens = 0;  // it may still sample this many
};

[[nodiscard]] constexpr std::int32_t blocks_for_tokens(std::int32_t tokens) {
  return (tokens + kv_block_tokens - 1) / kv_block_tokens;
}

/// Blocks that must be there for a sequence to run undisturbed: its whole input and a reserve for growth. The last token a
/// sequence samples is never computed, so it needs no room.
[[nodiscard]] constexpr std::int32_t blocks_wanted(const SequenceLengths& lengths, std::int32_t growth_reserve_tokens) {
  const std::int32_t growth = std::min(growth_reserve_tokens, std::max(lengths.remaining_new_tokens - 1, 0));
  return blocks_for_tokens(lengths.known_tokens + growth);
}

/// Blocks admission leaves untouched: 1 % of the pool, at least one, so that running sequences can grow before anybody is
/// preempted.
[[nodiscard]] constexpr std::int32_t watermark_blocks(std::int32_t block_count) {
  return (block_count + 99) / 100;
}

/// Most tokens (prompt and output) one sequence can reach when it has the pool for itself.
[[nodiscard]] constexpr std::int32_t longest_sequence(std::int32_t max_model_len, std::int32_t block_count) {
  const std::int64_t pool_tokens = std::int64_t{block_count} * kv_block_tokens;
  return static_cast<std::int32_t>(std::min<std::int64_t>(max_model_len, pool_tokens));
}

/// What admission decides on.
struct PoolLoad {
  std::int32_t block_count = 0;
  std::int32_t committed_blocks = 0;  // of running sequences: the larger of what each holds and what it wants
  std::int32_t running = 0;
};

/// Whether a sequence that wants this many blocks may start. Alone it always may: reserve and watermark protect others, and the
/// largest request must be able to finish.
[[nodiscard]] constexpr bool may_admit(const PoolLoad& pool, std::int32_t wanted) {
  if (pool.running == 0) return true;
  return std::int64_t{pool.committed_blocks} + wanted + watermark_blocks(pool.block_count) <= pool.block_count;
}

/// Pool size at which `sequences` such sequences run together without waiting for blocks.
[[nodiscard]] constexpr std::int64_t pool_blocks_for(std::int64_t sequences, const SequenceLengths& lengths,
                                                     std::int32_t growth_reserve_tokens) {
  const std::int64_t wanted = sequences * blocks_wanted(lengths, growth_reserve_tokens);
  return wanted + (wanted + 98) / 99;  // the watermark is 1 % of the result, rounded up
}

}  // namespace rubato::policies
