// SPDX-License-Identifier: Apache-2.0
// One step's ragged metadata as kernels see it: arrays in device memory at addresses that never change, so that one captured
// graph serves every step of its token bucket. Filled by one copy per step (staging.h); nothing here depends on the batch.
#pragma once

#include <cstdint>

namespace rubato::engine::cuda {

struct BatchCounts {
  std::int32_t tokens = 0;    // real ones; the rest of the bucket is padding
  std::int32_t rows = 0;      // sequences
  std::int32_t selected = 0;  // tokens whose logits are wanted
};

/// Pointers into device memory; passed to kernels by value. [n] gives capacities. Entries of padding tokens are always valid
/// indices: token 0, position 0, the trash block's slot. Padding rows have no tokens and no
/// blocks; padding selections hold 0.
struct Batch {
  const BatchCounts* counts = nullptr;
  const std::int32_t* token_ids = nullptr;     // [max_tokens]
  const std::int32_t* positions = nullptr;     // [max_tokens] absolute
  const std::int32_t* slots = nullptr;         // [max_tokens] block * kv_block_tokens + slot within it: where k and v are stored
  const std::int32_t* row_first = nullptr;     // [max_rows + 1] first token of each row; row_first[rows] == tokens
  const std::int32_t* row_position = nullptr;  // [max_rows] absolute position of the row's first token
  const std::int32_t* row_blocks = nullptr;    // [max_rows + 1] where the row's block table begins in blocks
  const std::int32_t* blocks = nullptr;        // all block tables one after another
  const std::int32_t* selected = nullptr;      // [max_rows] ascending token indices
};

/// The paged cache of one layer: for each block, for each KV head, kv_block_tokens keys of head_size elements, then as many
/// values. Element type: the backend's. Block block_count is the trash block.
struct CacheShape {
  std::int32_t heads = 0;
  std::int32_t kv_heads = 0;
  std::int32_t head_size = 0;
  std::int32_t block_count = 0;  // without the trash block
};

}  // namespace rubato::engine::cuda
