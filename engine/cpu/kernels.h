// SPDX-License-Identifier: Apache-2.0
// The kernels of the CPU backend as tables of functions, one table per instruction set and element type. Each function does one
// task of an operation on one thread; ops.cpp cuts operations into tasks. All text with SIMD stays inside kernels*.cpp and
// kernels.inl.
//
// Memory is counted in cells of 4 bytes: one F32 element, or a pair of BF16 elements that are adjacent along the summed axis. 16
// cells are one lane group; sums run in lanes, cell after cell, so their order depends on nothing but the length.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "engine/model/weights.h"
#include "policies/ids.h"

namespace rubato::engine::cpu {

inline constexpr std::int32_t group_columns = 16;       // lanes that every kernel computes with, whatever the vector width
inline constexpr std::int32_t attention_tile = 64;      // cache positions per softmax tile, at absolute multiples
inline constexpr std::int32_t attention_rows_max = 64;  // (token, head) pairs of one attention task

/// y(rows, columns of one panel) = x W^T. A panel holds panel_columns outputs: [cell][panel_columns].
struct LinearTask {
  const std::uint32_t* panel = nullptr;
  const float* bias = nullptr;  // (panel_columns), null for none; Plain only
  const void* x = nullptr;      // rows of cells; the cell past an odd length is zero in x and panel
  std::int64_t x_stride = 0;    // cells
  std::int32_t rows = 0;
  std::int32_t cells = 0;
  void* out = nullptr;          // F32 for Plain, elements for Swiglu
  std::int64_t out_stride = 0;  // elements
  std::int32_t out_groups = 0;  // lane groups of out that exist from here on
  float* partial = nullptr;     // (rows, panel_columns) of scratch
};

struct NormTask {
  float* x = nullptr;
  const float* delta = nullptr;  // times delta_scale added to x first; null for none
  float delta_scale = 1;
  const float* weight = nullptr;
  float epsilon = 0;
  std::int32_t columns = 0;
  std::int32_t groups = 0;  // of x, delta, weight, out; zero past columns
  void* out = nullptr;
};

/// Where one KV head's keys and values of a block lie: keys [cell of head][token], values [cell of tokens][head element].
struct HeadLayout {
  std::int32_t heads = 0;
  std::int32_t kv_heads = 0;
  std::int32_t head_size = 0;
  std::int64_t value_offset = 0;  // cells from a head's keys to its values
  std::int64_t head_stride = 0;   // cells
  std::int64_t block_stride = 0;  // cells
};

/// One token.
struct RopeTask {
  HeadLayout layout;
  float* qkv = nullptr;            // overwritten
  const float* cosines = nullptr;  // (head_size / 2) of the token's position
  const float* sines = nullptr;
  const float* query_norm = nullptr;  // (head_size), null for none
  const float* key_norm = nullptr;
  float epsilon = 0;
  void* query = nullptr;           // (heads * head_size) elements
  std::uint32_t* block = nullptr;  // the token's block in this layer's cache
  std::int32_t slot = 0;           // 0 .. kv_block_tokens-1
};

/// Scratch of one worker.
struct AttentionScratch {
  float* scores = nullptr;           // (attention_rows_max, attention_tile)
  std::uint32_t* weights = nullptr;  // the same shape, as elements
  float* sums = nullptr;             // (attention_rows_max, head_size rounded up to lane groups): values weighted so far
};

/// Some consecutive tokens of one sequence against one KV head, and some of the query heads that share it.
struct AttentionTask {
  HeadLayout layout;
  const std::uint32_t* cache = nullptr;  // this layer's blocks
  const BlockId* blocks = nullptr;       // the sequence's block table
  std::int32_t kv_head = 0;
  std::int32_t first_head = 0;  // query heads first_head .. first_head + head_count - 1
  std::int32_t head_count = 0;
  std::int32_t tokens = 0;        // tokens * head_count <= attention_rows_max
  std::int32_t position = 0;      // of the first token
  const void* query = nullptr;    // row of the first token
  std::int64_t query_stride = 0;  // elements
  float scale = 0;                // of the scores
  void* out = nullptr;
  std::int64_t out_stride = 0;
  AttentionScratch scratch;
};

inline constexpr std::int32_t window_max = 64;  // of a convolution

/// Some channels of one sequence through a recurrent layer's convolution, all its tokens. Rows of states and taps are whole lane
/// groups, zero past the last channel; those of in and out end with it.
struct ConvolveTask {
  const float* in = nullptr;  // the first token's inputs
  std::int64_t in_stride = 0;
  std::int32_t tokens = 0;
  std::int32_t channels = 0;    // from here on, of this task
  std::int32_t window = 0;      // inputs that an output sees, at most window_max
  const float* taps = nullptr;  // [window][taps_stride]
  std::int64_t taps_stride = 0;
  const float* bias = nullptr;
  const float* from = nullptr;  // [window - 1][taps_stride], oldest first: the inputs before the first token; null for zeros
  float* to = nullptr;          // those before the token after the last; may be from
  float* save = nullptr;        // those before token save_tokens; null for none, and neither from nor to
  std::int32_t save_tokens = 0;
  float* out = nullptr;
  std::int64_t out_stride = 0;
};

/// Tokens that a scan computes in one go, between two visits of its state; its scratch holds so many.
inline constexpr std::int32_t scan_tokens = 32;

/// Scratch of one worker. Groups of state_size are padded with zeros.
struct ScanScratch {
  float* time_steps = nullptr;  // (scan_tokens)
  float* decays = nullptr;      // (scan_tokens)
  float* x = nullptr;           // (scan_tokens, group_columns): of some elements of the head, times the time step
  float* y = nullptr;           // (scan_tokens, group_columns): summed so far
  float* b = nullptr;           // (state groups, scan_tokens, group_columns)
  float* c = nullptr;           // the same
};

/// Some lane groups of one head of one sequence through a recurrent layer's scan, all its tokens.
struct ScanTask {
  const float* time_step = nullptr;  // of the first token, before bias and softplus
  std::int64_t time_step_stride = 0;
  float time_step_bias = 0;
  float time_step_min = 0;
  float time_step_max = 0;
  float rate = 0;  // -exp(A_log): the decay of a time step dt is exp(rate * dt)
  float skip = 0;
  const float* x = nullptr;  // of the first token: the first element of this task
  const float* b = nullptr;  // (state_size)
  const float* c = nullptr;
  std::int64_t stride = 0;  // of x, b and c
  std::int32_t tokens = 0;
  std::int32_t elements = 0;  // of the head, from here on, of this task
  std::int32_t state_size = 0;
  const float* from = nullptr;  // [group of elements][state_size rounded up to groups][group_columns]; null for zeros
  float* to = nullptr;          // may be from
  float* save = nullptr;        // after save_tokens tokens; null for none, and neither from nor to
  std::int32_t save_tokens = 0;
  float* out = nullptr;
  std::int64_t out_stride = 0;
  ScanScratch scratch;
};

enum class GateOrder : std::uint8_t { GateFirst, NormFirst, GateOnly };

/// One row of a recurrent layer.
struct GatedNormTask {
  GateOrder order = GateOrder::GateFirst;
  const float* y = nullptr;
  const float* gate = nullptr;
  const float* weight = nullptr;  // null for GateOnly
  std::int32_t columns = 0;       // of the row
  std::int32_t norm_columns = 0;  // that share a mean square; divides columns
  float epsilon = 0;
  float* product = nullptr;  // (norm_columns rounded up to groups): scratch
  void* out = nullptr;       // elements
};

/// out = max(x, 0)^2 of one row.
struct ReluSquaredTask {
  const float* x = nullptr;
  std::int32_t groups = 0;  // zero past the row's columns
  void* out = nullptr;      // elements
};

/// Which table: Portable is Highway at the best instruction set found; Bfloat16Dot needs AVX-512 BF16.
enum class KernelPath : std::uint8_t { Portable, Bfloat16Dot };

struct Kernels {
  const char* name = "";           // `avx512_bf16`, `AVX2`
  std::int32_t panel_columns = 0;  // outputs side by side in a panel
  std::int32_t elements_per_cell = 1;
  void (*linear)(const LinearTask&) = nullptr;
  void (*linear_swiglu)(const LinearTask&) = nullptr;
  void (*norm)(const NormTask&) = nullptr;
  void (*rope)(const RopeTask&) = nullptr;
  void (*attention)(const AttentionTask&) = nullptr;
  void (*convolve)(const ConvolveTask&) = nullptr;
  void (*scan)(const ScanTask&) = nullptr;
  void (*gated_norm)(const GatedNormTask&) = nullptr;
  void (*relu_squared)(const ReluSquaredTask&) = nullptr;
};

/// Paths that this machine can run for dtype, best first.
[[nodiscard]] std::vector<KernelPath> kernel_paths(DataType dtype);
[[nodiscard]] Kernels kernels_of(KernelPath path, DataType dtype);

// Private to kernels*.cpp.
[[nodiscard]] bool bfloat16_dot_supported();
[[nodiscard]] Kernels bfloat16_dot_kernels();

}  // namespace rubato::engine::cpu
