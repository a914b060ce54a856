// SPDX-License-Identifier: Apache-2.0
// The work list of attention in device memory: what the planner writes, what the attention kernels take items from, and where
// partial results lie. Shared by kernels_attention*.cu; everybody else sees kernels.h.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "engine/cuda/kernels.h"

namespace rubato::engine::cuda {

inline constexpr std::int32_t attention_head_size_max = 1024;
inline constexpr std::int64_t attention_partial_bytes = std::int64_t{32} << 20U;  // at most, of partial results

/// How a model's attention is cut; depends on dtype and head size alone. Query rows are packed: for one KV head, the heads of its
/// group of the row's first token, then those of the next, and so on.
struct AttentionTiling {
  std::int32_t tile_rows = 0;  // packed query rows of one item
  std::int32_t unit_rows = 0;  // rows of one unit of partial results; tiles of so few rows are bound by memory alone
  std::int32_t blocks_per_multiprocessor = 0;
};
[[nodiscard]] AttentionTiling attention_tiling(DataType dtype, std::int32_t head_size);

/// A tile of packed query rows, while the list is being built.
struct AttentionTile {
  std::int32_t row;    // of the batch
  std::int32_t first;  // packed query row
  std::int32_t rows;
  std::int32_t end;   // positions below this are visible to its last query row
  std::int32_t unit;  // of its first partial result
};

/// One entry of the work list, run once for every KV head: a tile's rows against splits [split_begin, split_end) of its cache.
/// With one part the result is final; else each part leaves its partial result, and the last of them to finish merges all. Part 0
/// may cover several splits; every other part covers one.
struct AttentionTask {
  std::int32_t token;     // the row's first token in the step
  std::int32_t position;  // its absolute position
  std::int32_t blocks;    // where the row's block table begins
  std::int32_t first;     // packed query row
  std::int32_t rows;
  std::int32_t end;  // of the tile
  std::int32_t split_begin;
  std::int32_t split_end;
  std::int32_t unit;   // of the tile's first partial result
  std::int32_t part;   // this one, 0 .. parts - 1
  std::int32_t parts;  // of the tile
  std::int32_t unused;
};

struct AttentionCounters {
  std::int32_t tasks;  // in the list
  std::int32_t taken;  // items taken beyond the first of each block
  std::int32_t left;   // blocks that found no more items; the last one sets both back to 0
  std::int32_t unused;
};

struct AttentionScratch {
  AttentionCounters* counters = nullptr;
  std::int32_t* row_tiles = nullptr;  // [max_rows + 1] first tile of each row
  AttentionTile* tiles = nullptr;     // [tiles_max]
  AttentionTask* tasks = nullptr;     // [tiles_max + partial_units]
  std::int32_t* finished = nullptr;   // [partial_units * kv_heads] parts that are done, at the tile's first unit
  float* partials = nullptr;          // [partial_units * kv_heads] units of unit_rows rows: values, largest, sum
};
/// Units of partial results per KV head that the plan's scratch has room for.
[[nodiscard]] std::int32_t attention_partial_units(const AttentionPlan& plan);
/// Where everything lies in plan.scratch.
[[nodiscard]] AttentionScratch attention_scratch(const AttentionPlan& plan);

/// What an attention kernel is given.
struct AttentionInputs {
  AttentionScratch scratch;
  const std::int32_t* blocks = nullptr;  // Batch::blocks
  CacheShape shape;
  std::int32_t group = 0;  // heads per KV head
  float scale = 0;         // of a raw score, to the base 2
  Activations query;
  const void* cache = nullptr;
  Activations out;
};

__host__ __device__ inline std::int32_t ceil_divide(std::int32_t count, std::int32_t size) {
  return (count + size - 1) / size;
}

/// Partial result `part` of a tile of so many rows, for one KV head: rows of head_size values, then largest and sum.
__device__ inline float* partial_rows(const AttentionInputs& inputs, const AttentionTask& task, std::int32_t kv_head,
                                      std::int32_t part, std::int32_t unit_rows) {
  const std::int32_t units = ceil_divide(task.rows, unit_rows);
  const std::int64_t unit =
      static_cast<std::int64_t>(task.unit + part * units) * inputs.shape.kv_heads + static_cast<std::int64_t>(kv_head) * units;
  return inputs.scratch.partials + unit * unit_rows * (inputs.shape.head_size + 2);
}

}  // namespace rubato::engine::cuda
