// SPDX-License-Identifier: Apache-2.0
// Attention's work list, built on the device once per step: which query tiles there are, how much of a tile's cache one block
// goes through, and in which order items are taken. Nothing here changes a bit of any result; it decides how evenly the blocks
// are loaded.
#include <algorithm>
#include <cstdint>
#include <limits>

#include "engine/cuda/attention_work.h"
#include "engine/cuda/element.cuh"
#include "engine/cuda/kernels.h"
#include "engine/cuda/runtime.h"
#include "manifests/check.h"

namespace rubato::engine::cuda {
namespace {

constexpr std::int32_t plan_threads = 256;
constexpr std::int32_t length_unit = 64;  // tokens, in which lengths of tasks are compared

// ---- where everything lies

struct ScratchLayout {
  std::int64_t row_tiles = 0;  // offsets in bytes
  std::int64_t tiles = 0;
  std::int64_t tasks = 0;
  std::int64_t finished = 0;
  std::int64_t partials = 0;
  std::int64_t bytes = 0;
};

std::int64_t tiles_max(const CacheShape& shape, std::int32_t max_tokens, std::int32_t max_rows, std::int32_t tile_rows) {
  const std::int64_t packed = std::int64_t{max_tokens} * (shape.heads / shape.kv_heads);
  return (packed + tile_rows - 1) / tile_rows + std::min(max_rows, max_tokens);
}

constexpr std::int64_t partial_units_max = 65536;  // tiny heads would have room for more than a list should hold

/// Units of partial results that one KV head gets: what the largest step could use, within attention_partial_bytes for all heads.
std::int32_t partial_units(const CacheShape& shape, std::int64_t tiles, std::int32_t max_position,
                           const AttentionTiling& tiling) {
  const std::int64_t splits = (std::int64_t{max_position} + attention_split - 1) / attention_split;
  if (splits < 2) return 0;
  const std::int64_t unit_bytes = std::int64_t{tiling.unit_rows} * (shape.head_size + 2) * 4 * shape.kv_heads;
  const std::int64_t useful = tiles * splits * (tiling.tile_rows / tiling.unit_rows);
  return static_cast<std::int32_t>(std::min({useful, attention_partial_bytes / unit_bytes, partial_units_max}));
}

ScratchLayout scratch_layout(const CacheShape& shape, std::int32_t max_rows, std::int64_t tiles, std::int64_t units,
                             std::int32_t unit_rows) {
  ScratchLayout layout;
  std::int64_t end = 0;
  const auto take = [&](std::int64_t bytes) {
    const std::int64_t begin = end;
    end += (bytes + 255) / 256 * 256;
    return begin;
  };
  take(sizeof(AttentionCounters));
  layout.row_tiles = take((std::int64_t{max_rows} + 1) * 4);
  layout.tiles = take(tiles * static_cast<std::int64_t>(sizeof(AttentionTile)));
  layout.tasks = take((tiles + units) * static_cast<std::int64_t>(sizeof(AttentionTask)));
  layout.finished = take(units * shape.kv_heads * 4);
  layout.partials = take(units * shape.kv_heads * unit_rows * (shape.head_size + 2) * 4);
  layout.bytes = end;
  return layout;
}

}  // namespace

std::int32_t attention_partial_units(const AttentionPlan& plan) {
  const AttentionTiling tiling = attention_tiling(plan.dtype, plan.shape.head_size);
  return partial_units(plan.shape, tiles_max(plan.shape, plan.max_tokens, plan.max_rows, tiling.tile_rows), plan.max_position,
                       tiling);
}

AttentionScratchSize attention_scratch_size(const CacheShape& shape, std::int32_t max_tokens, std::int32_t max_rows,
                                            std::int32_t max_position) {
  CHECK(shape.kv_heads > 0 && shape.heads >= shape.kv_heads && shape.head_size > 0);
  AttentionScratchSize size;
  for (const DataType dtype : {DataType::Float32, DataType::BFloat16}) {
    const AttentionTiling tiling = attention_tiling(dtype, shape.head_size);
    const std::int64_t tiles = tiles_max(shape, max_tokens, max_rows, tiling.tile_rows);
    const std::int32_t units = partial_units(shape, tiles, max_position, tiling);
    size.bytes = std::max(size.bytes, scratch_layout(shape, max_rows, tiles, units, tiling.unit_rows).bytes);
  }
  return size;
}

AttentionScratch attention_scratch(const AttentionPlan& plan) {
  const AttentionTiling tiling = attention_tiling(plan.dtype, plan.shape.head_size);
  const std::int64_t tiles = tiles_max(plan.shape, plan.max_tokens, plan.max_rows, tiling.tile_rows);
  const ScratchLayout layout = scratch_layout(plan.shape, plan.max_rows, tiles, plan.partial_units, tiling.unit_rows);
  return {.counters = reinterpret_cast<AttentionCounters*>(plan.scratch),
          .row_tiles = reinterpret_cast<std::int32_t*>(plan.scratch + layout.row_tiles),
          .tiles = reinterpret_cast<AttentionTile*>(plan.scratch + layout.tiles),
          .tasks = reinterpret_cast<AttentionTask*>(plan.scratch + layout.tasks),
          .finished = reinterpret_cast<std::int32_t*>(plan.scratch + layout.finished),
          .partials = reinterpret_cast<float*>(plan.scratch + layout.partials)};
}

// ---- the planner: one block

namespace {

struct PlannerInputs {
  Batch batch;
  AttentionScratch scratch;
  std::int32_t group = 0;
  std::int32_t kv_heads = 0;
  std::int32_t grid = 0;
  std::int32_t tile_rows = 0;
  std::int32_t unit_rows = 0;
  std::int32_t partial_units = 0;
};

/// The planner's shared memory.
struct PlannerShared {
  std::int32_t scan[plan_threads];
  std::int32_t bins[plan_threads];  // tasks by length; then where each length's tasks go
  std::int32_t warps[plan_threads / warp_lanes];
  std::int32_t units;  // taken
};

/// Sum (or largest) over the block, to all threads.
struct Sum {
  __device__ std::int32_t operator()(std::int32_t a, std::int32_t b) const { return a + b; }
};
struct Largest {
  __device__ std::int32_t operator()(std::int32_t a, std::int32_t b) const { return max(a, b); }
};
template <class Combine>
__device__ std::int32_t over_block(std::int32_t value, PlannerShared& shared, Combine combine) {
#pragma unroll
  for (int offset = warp_lanes / 2; offset > 0; offset /= 2) value = combine(value, __shfl_xor_sync(all_lanes, value, offset));
  if (threadIdx.x % warp_lanes == 0) shared.warps[threadIdx.x / warp_lanes] = value;
  __syncthreads();
  std::int32_t result = shared.warps[0];
  for (int warp = 1; warp < plan_threads / warp_lanes; ++warp) result = combine(result, shared.warps[warp]);
  __syncthreads();
  return result;
}

/// Sum of value over the threads up to and with this one.
__device__ std::int32_t scan_block(std::int32_t value, PlannerShared& shared) {
  const auto thread = static_cast<std::int32_t>(threadIdx.x);
  shared.scan[thread] = value;
  __syncthreads();
  for (std::int32_t step = 1; step < plan_threads; step *= 2) {
    if (thread >= step) value += shared.scan[thread - step];
    __syncthreads();
    shared.scan[thread] = value;
    __syncthreads();
  }
  return value;
}

__device__ std::int32_t packed_rows(const PlannerInputs& in, std::int32_t row) {
  return (in.batch.row_first[row + 1] - in.batch.row_first[row]) * in.group;
}

/// row_tiles; returns how many tiles there are.
__device__ std::int32_t count_tiles(const PlannerInputs& in, PlannerShared& shared) {
  const std::int32_t rows = in.batch.counts->rows;
  std::int32_t total = 0;
  for (std::int32_t base = 0; base < rows; base += plan_threads) {
    const std::int32_t row = base + static_cast<std::int32_t>(threadIdx.x);
    const std::int32_t tiles = row < rows ? ceil_divide(packed_rows(in, row), in.tile_rows) : 0;
    const std::int32_t up_to = scan_block(tiles, shared);
    if (row < rows) in.scratch.row_tiles[row] = total + up_to - tiles;
    total += shared.scan[plan_threads - 1];
    __syncthreads();
  }
  if (threadIdx.x == 0) in.scratch.row_tiles[rows] = total;
  __syncthreads();
  return total;
}

__device__ AttentionTile describe_tile(const PlannerInputs& in, std::int32_t tile) {
  // The last row whose first tile is at or before this one: rows without tokens have none.
  std::int32_t row = 0;
  std::int32_t past = in.batch.counts->rows;
  while (past - row > 1) {
    const std::int32_t middle = row + (past - row) / 2;
    if (in.scratch.row_tiles[middle] <= tile) {
      row = middle;
    } else {
      past = middle;
    }
  }
  const std::int32_t first = (tile - in.scratch.row_tiles[row]) * in.tile_rows;
  const std::int32_t rows = min(in.tile_rows, packed_rows(in, row) - first);
  const std::int32_t end = in.batch.row_position[row] + (first + rows - 1) / in.group + 1;
  return {.row = row, .first = first, .rows = rows, .end = end, .unit = 0};
}

__device__ std::int32_t splits_of(const AttentionTile& tile) {
  return ceil_divide(tile.end, attention_split);
}

/// How many of a tile's first splits one block takes one after another; each further one is a task of its own.
struct SerialLimits {
  std::int32_t few_rows;
  std::int32_t many_rows;
};
__device__ std::int32_t serial_splits(const PlannerInputs& in, const SerialLimits& limits, const AttentionTile& tile) {
  return min(splits_of(tile), tile.rows <= in.unit_rows ? limits.few_rows : limits.many_rows);
}

/// Units of partial results that a tile needs; none when one task covers it.
__device__ std::int32_t units_of(const PlannerInputs& in, const SerialLimits& limits, const AttentionTile& tile) {
  const std::int32_t parts = splits_of(tile) - serial_splits(in, limits, tile) + 1;
  return parts > 1 ? parts * ceil_divide(tile.rows, in.unit_rows) : 0;
}

/// Short enough that the blocks end together, as short as partial results find room. With few rows a partial result costs little
/// beside the split's reads; with many it is worth its cost only against idle blocks.
__device__ SerialLimits choose_limits(const PlannerInputs& in, std::int32_t tiles, PlannerShared& shared) {
  std::int32_t splits = 0;
  std::int32_t longest = 1;
  for (auto i = static_cast<std::int32_t>(threadIdx.x); i < tiles; i += plan_threads) {
    const AttentionTile tile = describe_tile(in, i);
    in.scratch.tiles[i] = tile;
    splits += splits_of(tile);
    longest = max(longest, splits_of(tile));
  }
  splits = over_block(splits, shared, Sum());
  longest = over_block(longest, shared, Largest());
  const auto fair = static_cast<std::int32_t>(static_cast<std::int64_t>(splits) * in.kv_heads / in.grid);  // of one block
  const auto limits_of = [&](std::int32_t least) {
    return SerialLimits{.few_rows = max(least, fair / 8), .many_rows = max(least, fair / 2)};
  };
  std::int32_t low = 1;
  std::int32_t high = longest;
  while (low < high) {
    const std::int32_t middle = low + (high - low) / 2;
    std::int32_t units = 0;
    for (auto i = static_cast<std::int32_t>(threadIdx.x); i < tiles; i += plan_threads) {
      units += units_of(in, limits_of(middle), in.scratch.tiles[i]);
    }
    if (over_block(units, shared, Sum()) <= in.partial_units) {
      high = middle;
    } else {
      low = middle + 1;
    }
  }
  return limits_of(low);
}

__device__ std::int32_t length_of(const AttentionTile& tile, std::int32_t split_begin, std::int32_t split_end) {
  return ceil_divide(min(split_end * attention_split, tile.end) - split_begin * attention_split, length_unit);
}

/// Calls body(split_begin, split_end, part) for each task of a tile.
template <class Body>
__device__ void for_tasks(std::int32_t splits, std::int32_t serial, Body&& body) {
  body(0, serial, 0);
  for (std::int32_t split = serial; split < splits; ++split) body(split, split + 1, split - serial + 1);
}

/// Counts tasks by length, and takes room for partial results.
__device__ void count_tasks(const PlannerInputs& in, std::int32_t tiles, const SerialLimits& limits, std::int32_t shift,
                            PlannerShared& shared) {
  for (auto i = static_cast<std::int32_t>(threadIdx.x); i < tiles; i += plan_threads) {
    AttentionTile tile = in.scratch.tiles[i];
    const std::int32_t units = units_of(in, limits, tile);
    tile.unit = units > 0 ? atomicAdd(&shared.units, units) : 0;
    in.scratch.tiles[i].unit = tile.unit;
    for_tasks(splits_of(tile), serial_splits(in, limits, tile), [&](std::int32_t begin, std::int32_t end, std::int32_t) {
      atomicAdd(&shared.bins[length_of(tile, begin, end) >> shift], 1);
    });
  }
  __syncthreads();
}

__device__ void place_tasks(const PlannerInputs& in, std::int32_t tiles, const SerialLimits& limits, std::int32_t shift,
                            PlannerShared& shared) {
  for (auto i = static_cast<std::int32_t>(threadIdx.x); i < tiles; i += plan_threads) {
    const AttentionTile tile = in.scratch.tiles[i];
    const std::int32_t splits = splits_of(tile);
    const std::int32_t serial = serial_splits(in, limits, tile);
    const std::int32_t parts = splits - serial + 1;
    AttentionTask task{.token = in.batch.row_first[tile.row],
                       .position = in.batch.row_position[tile.row],
                       .blocks = in.batch.row_blocks[tile.row],
                       .first = tile.first,
                       .rows = tile.rows,
                       .end = tile.end,
                       .split_begin = 0,
                       .split_end = 0,
                       .unit = tile.unit,
                       .part = 0,
                       .parts = parts,
                       .unused = 0};
    for_tasks(splits, serial, [&](std::int32_t begin, std::int32_t end, std::int32_t part) {
      task.split_begin = begin;
      task.split_end = end;
      task.part = part;
      in.scratch.tasks[atomicAdd(&shared.bins[length_of(tile, begin, end) >> shift], 1)] = task;
    });
    if (parts == 1) continue;
    for (std::int32_t head = 0; head < in.kv_heads; ++head) in.scratch.finished[tile.unit * in.kv_heads + head] = 0;
  }
}

}  // namespace

__global__ void __launch_bounds__(plan_threads) plan_attention_kernel(PlannerInputs in) {
  extern __shared__ __align__(16) unsigned char shared_bytes[];
  PlannerShared& shared = *reinterpret_cast<PlannerShared*>(shared_bytes);
  const auto thread = static_cast<std::int32_t>(threadIdx.x);
  shared.bins[thread] = 0;
  if (thread == 0) shared.units = 0;
  const std::int32_t tiles = count_tiles(in, shared);
  const SerialLimits limits = choose_limits(in, tiles, shared);
  std::int32_t longest = 0;
  for (std::int32_t i = thread; i < tiles; i += plan_threads) {
    const AttentionTile tile = in.scratch.tiles[i];
    longest = max(longest, length_of(tile, 0, serial_splits(in, limits, tile)));
  }
  longest = over_block(max(longest, attention_split / length_unit), shared, Largest());
  std::int32_t shift = 0;
  while (longest >> shift >= plan_threads) ++shift;
  count_tasks(in, tiles, limits, shift, shared);
  // Longest first: the last items to be taken are then short, and the blocks end together.
  const std::int32_t bin = plan_threads - 1 - thread;
  const std::int32_t count = shared.bins[bin];
  const std::int32_t up_to = scan_block(count, shared);
  shared.bins[bin] = up_to - count;
  if (thread == plan_threads - 1) *in.scratch.counters = {.tasks = up_to, .taken = 0, .left = 0, .unused = 0};
  __syncthreads();
  place_tasks(in, tiles, limits, shift, shared);
}

void plan_attention(cudaStream_t stream, const AttentionPlan& plan, const Batch& batch) {
  const AttentionTiling tiling = attention_tiling(plan.dtype, plan.shape.head_size);
  const PlannerInputs inputs{.batch = batch,
                             .scratch = attention_scratch(plan),
                             .group = plan.shape.heads / plan.shape.kv_heads,
                             .kv_heads = plan.shape.kv_heads,
                             .grid = plan.grid,
                             .tile_rows = tiling.tile_rows,
                             .unit_rows = tiling.unit_rows,
                             .partial_units = plan.partial_units};
  launch(stream, {.blocks = 1, .threads = plan_threads, .shared_bytes = sizeof(PlannerShared)}, plan_attention_kernel, inputs);
}

}  // namespace rubato::engine::cuda
