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
  const std::int32_t* token_first = nullptr;   // [max_tokens] first token of the token's row; of padding: 0
  const std::int32_t* row_blocks = nullptr;    // [max_rows + 1] where the row's block table begins in blocks
  const std::int32_t* blocks = nullptr;        // all block tables one after another
  const std::int32_t* selected = nullptr;      // [max_rows] ascending token indices

  // Recurrent state; see StateUse. no_state throughout where a model has none, and for padding rows.
  const std::int32_t* state_from = nullptr;         // [max_rows] slot that the row begins from; no_state: from zeros
  const std::int32_t* state_to = nullptr;           // [max_rows] slot of the state after its last token
  const std::int32_t* state_save = nullptr;         // [max_rows] slot of a snapshot, or no_state
  const std::int32_t* state_save_tokens = nullptr;  // [max_rows] tokens of the row after which the snapshot is taken
};

/// On the device, where there is no optional.
inline constexpr std::int32_t no_state = -1;

/// The paged cache of one layer: for each block, for each KV head, kv_block_tokens keys of head_size elements, then as many
/// values. Element type: the backend's. Block block_count is the trash block.
struct CacheShape {
  std::int32_t heads = 0;
  std::int32_t kv_heads = 0;
  std::int32_t head_size = 0;
  std::int32_t block_count = 0;  // without the trash block
};

/// The recurrent states: slot after slot, in each layer after layer: the last window - 1 inputs of the convolution, oldest first,
/// (window - 1, channels), then S, (heads, head_size, state_size). All F32. Both parts begin at 128 bytes.
struct StateShape {
  std::int32_t heads = 0;
  std::int32_t head_size = 0;
  std::int32_t groups = 0;
  std::int32_t state_size = 0;
  std::int32_t window = 0;
  std::int32_t inner = 0;         // heads * head_size
  std::int32_t channels = 0;      // x | B | C
  std::int64_t scan_at = 0;       // floats from the start of a layer's part to S
  std::int64_t layer_stride = 0;  // floats from layer to layer of a slot
  std::int64_t slot_stride = 0;   // floats from slot to slot
};

}  // namespace rubato::engine::cuda
