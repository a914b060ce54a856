// SPDX-License-Identifier: Apache-2.0
// Attention on tensor cores, BF16 and F16. 16 packed query rows make one strip, which one warp takes alone in tiles of many rows
// and all warps together in tiles of few (decode): they then share keys for the scores and columns for the values, exchanging
// maxima, sums and weights through shared memory. Every product and sum has the same operands in the same order either way.
#pragma once

#include <cstdint>

#include "engine/cuda/attention_merge.cuh"
#include "engine/cuda/attention_tensor_tiling.cuh"
#include "engine/cuda/mma.cuh"
#include "manifests/settings.h"

namespace rubato::engine::cuda {

/// One item: a tile of query rows against a range of splits, for one KV head. strip_warps warps share each strip.
/// Per lane, index i is the strip's row lane / 4 + 8 i, as in the fragments.
template <class Element, int head_size, int strip_warps>
class TensorItem {
  using Tiling = TensorTiling<head_size>;
  static constexpr int kv_tile = Tiling::kv_tile;
  static constexpr int warp_keys = kv_tile / strip_warps;
  static constexpr int key_groups = warp_keys / 8;
  static constexpr int column_groups = head_size / 8;
  static constexpr int columns = (column_groups + strip_warps - 1) / strip_warps;  // groups of 8 of one warp
  static constexpr int tile_blocks = kv_tile / kv_block_tokens;
  using Scores = FragmentC[key_groups];

 public:
  __device__ TensorItem(const AttentionInputs& inputs, const AttentionTask& task, std::int32_t kv_head,
                        const TensorShared<Element, head_size>& shared)
      : inputs_(inputs), task_(task), kv_head_(kv_head), shared_(shared) {
    const int warp = static_cast<int>(threadIdx.x) / warp_lanes;
    lane_ = static_cast<int>(threadIdx.x) % warp_lanes;
    strip_ = warp / strip_warps;
    member_ = warp % strip_warps;
    end_ = min(task.split_end * attention_split, task.end);
  }

  __device__ void run() {
    load_query();
    const std::int32_t first = task_.split_begin * (attention_split / kv_tile);
    const std::int32_t last = ceil_divide(end_, kv_tile);
    std::int32_t blocks[tile_blocks];
    find_blocks(first, blocks);
    load_tile(first, 0, blocks);
    if (first + 1 < last) find_blocks(first + 1, blocks);
    clear_split();
    values_.clear();
    for (int i = 0; i < 2; ++i) state_[i] = {.largest = lowest_score, .sum = 0.0F};
    for (std::int32_t tile = first; tile < last; ++tile) {
      const int stage = (tile - first) % 2;
      copy_async_wait<0>();
      __syncthreads();  // this tile is there, and all are done with the one before it
      if (tile + 1 < last) load_tile(tile + 1, 1 - stage, blocks);
      if (tile + 2 < last) find_blocks(tile + 2, blocks);
      // Warps that share a strip meet at barriers; a warp alone skips what none of its rows sees.
      if (strip_warps > 1 || tile * kv_tile < strip_end_) add_tile(tile, stage);
      if ((tile + 1) % (attention_split / kv_tile) == 0 || tile + 1 == last) finish_split();
    }
    if (task_.parts == 1) {
      write_result();
    } else {
      write_part();
    }
  }

 private:
  __device__ int row_of(int i) const { return strip_ * strip_rows + lane_ / 4 + 8 * i; }
  __device__ int first_key() const { return member_ * warp_keys; }

  __device__ void load_query() {
    const std::int32_t rows = min(strip_rows, task_.rows - strip_ * strip_rows);
    strip_end_ = rows > 0 ? visible_end(inputs_, task_, strip_ * strip_rows + rows - 1) : 0;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = row_of(i);
      const bool real = row < task_.rows;
      visible_[i] = real ? visible_end(inputs_, task_, row) : std::int32_t{0x7FFFFFFF};
      const Element* from = real ? head_of<const Element>(inputs_, task_, inputs_.query, kv_head_, row) : nullptr;
#pragma unroll
      for (int k = 0; k < head_size / 16; ++k) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          std::uint32_t word = 0;
          if (real) word = *reinterpret_cast<const std::uint32_t*>(from + k * 16 + half * 8 + 2 * (lane_ % 4));
          query_[k].x[half * 2 + i] = word;
        }
      }
    }
  }

  /// The cache blocks of a tile; those past the end are not looked up.
  __device__ void find_blocks(std::int32_t tile, std::int32_t (&blocks)[tile_blocks]) const {
#pragma unroll
    for (int b = 0; b < tile_blocks; ++b) {
      const std::int32_t position = tile * kv_tile + b * kv_block_tokens;
      blocks[b] = position < end_ ? inputs_.blocks[task_.blocks + position / kv_block_tokens] : 0;
    }
  }

  /// Starts copying a tile's keys and values. Slots past the end, which may never have been written, become zero.
  __device__ void load_tile(std::int32_t tile, int stage, const std::int32_t (&blocks)[tile_blocks]) const {
    constexpr int row_packs = head_size / 8;
    constexpr int block_packs = kv_block_tokens * row_packs;
    Element* keys = shared_.keys(stage);
    Element* values = shared_.values(stage);
#pragma unroll
    for (int b = 0; b < tile_blocks; ++b) {
      const std::int32_t live = end_ - tile * kv_tile - b * kv_block_tokens;  // tokens of this block
      const Element* from = static_cast<const Element*>(inputs_.cache) +
                            (static_cast<std::int64_t>(blocks[b]) * inputs_.shape.kv_heads + kv_head_) * (2 * block_packs * 8);
      for (int pack = static_cast<int>(threadIdx.x); pack < block_packs; pack += Tiling::threads) {
        const int row = pack / row_packs;
        const int to = (b * kv_block_tokens + row) * Tiling::stride + pack % row_packs * 8;
        if (row < live) {
          copy_async_16(keys + to, from + pack * 8);
          copy_async_16(values + to, from + (block_packs + pack) * 8);
        } else {
          *reinterpret_cast<Pack<std::uint32_t, 4>*>(keys + to) = {};
          *reinterpret_cast<Pack<std::uint32_t, 4>*>(values + to) = {};
        }
      }
    }
    copy_async_commit();
  }

  __device__ void clear_split() {
    split_values_.clear();
    for (int i = 0; i < 2; ++i) split_state_[i] = {.largest = lowest_score, .sum = 0.0F};
  }

  /// One tile's keys and values join the split's partial result.
  __device__ void add_tile(std::int32_t tile, int stage) {
    Scores scores;
    score_keys(shared_.keys(stage), scores);
    float tile_largest[2];
    mask_and_maximise(tile * kv_tile, scores, tile_largest);
    if constexpr (strip_warps > 1) exchange_largest(tile_largest);
    float rescale[2];
    float base[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float largest = fmaxf(split_state_[i].largest, tile_largest[i]);
      base[i] = softmax_base(largest);
      rescale[i] = softmax_weight(split_state_[i].largest, base[i]);
      split_state_[i].largest = largest;
    }
    float sums[2];
    weigh(scores, base, sums);
    if constexpr (strip_warps > 1) exchange_weights(scores, sums);
#pragma unroll
    for (int i = 0; i < 2; ++i) split_state_[i].sum = fmaf(split_state_[i].sum, rescale[i], sums[i]);
#pragma unroll
    for (int n = 0; n < columns; ++n) {
#pragma unroll
      for (int x = 0; x < 4; ++x) split_values_.at[n].x[x] = __fmul_rn(split_values_.at[n].x[x], rescale[x / 2]);
    }
    add_values(shared_.values(stage), scores);
  }

  /// scores = query . keys, of this warp's keys; the sum runs over the head's columns in ascending order.
  __device__ void score_keys(const Element* keys, Scores& scores) const {
#pragma unroll
    for (int n = 0; n < key_groups; ++n) scores[n] = FragmentC{{0.0F, 0.0F, 0.0F, 0.0F}};
    // Lanes 0 to 7 point at 8 keys, 8 to 15 at the same keys 8 columns on, 16 to 31 likewise at the next 8 keys.
    const int key = first_key() + lane_ % 8 + (key_groups > 1 ? lane_ / 16 * 8 : 0);
    const Element* from = keys + key * Tiling::stride + lane_ / 8 % 2 * 8;
#pragma unroll
    for (int k = 0; k < head_size / 16; ++k) {
      if constexpr (key_groups > 1) {
#pragma unroll
        for (int n = 0; n < key_groups; n += 2) {
          FragmentA both;
          load_matrix_x4(both, from + n * 8 * Tiling::stride + k * 16);
          mma_m16n8k16<Element>(scores[n], query_[k], FragmentB{{both.x[0], both.x[1]}});
          mma_m16n8k16<Element>(scores[n + 1], query_[k], FragmentB{{both.x[2], both.x[3]}});
        }
      } else {
        FragmentB keys_k;
        load_matrix_x2(keys_k, from + k * 16);
        mma_m16n8k16<Element>(scores[0], query_[k], keys_k);
      }
    }
  }

  /// Scales the scores, hides what a row may not see, and finds each row's largest among this warp's keys.
  __device__ void mask_and_maximise(std::int32_t tile_first, Scores& scores, float (&largest)[2]) const {
    const bool all_visible = tile_first + kv_tile <= min(visible_[0], visible_[1]);
    const std::int32_t first = tile_first + first_key() + 2 * (lane_ % 4);
    largest[0] = lowest_score;
    largest[1] = lowest_score;
#pragma unroll
    for (int n = 0; n < key_groups; ++n) {
#pragma unroll
      for (int x = 0; x < 4; ++x) {
        float score = __fmul_rn(scores[n].x[x], inputs_.scale);
        if (!all_visible && first + n * 8 + x % 2 >= visible_[x / 2]) score = lowest_score;
        scores[n].x[x] = score;
        largest[x / 2] = fmaxf(largest[x / 2], score);
      }
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      largest[i] = fmaxf(largest[i], __shfl_xor_sync(all_lanes, largest[i], 1));
      largest[i] = fmaxf(largest[i], __shfl_xor_sync(all_lanes, largest[i], 2));
    }
  }

  __device__ void exchange_largest(float (&largest)[2]) const {
    float* of_strip = shared_.largest() + strip_ * strip_warps * strip_rows;
    if (lane_ % 4 == 0) {
#pragma unroll
      for (int i = 0; i < 2; ++i) of_strip[member_ * strip_rows + lane_ / 4 + 8 * i] = largest[i];
    }
    __syncthreads();
#pragma unroll
    for (int warp = 0; warp < strip_warps; ++warp) {
#pragma unroll
      for (int i = 0; i < 2; ++i) largest[i] = fmaxf(largest[i], of_strip[warp * strip_rows + lane_ / 4 + 8 * i]);
    }
  }

  /// Scores become weights; sums: of this lane's, over groups of 8 keys in a balanced tree, which warps that share a strip
  /// continue.
  __device__ void weigh(Scores& scores, const float (&base)[2], float (&sums)[2]) const {
    float of_group[key_groups][2];
#pragma unroll
    for (int n = 0; n < key_groups; ++n) {
#pragma unroll
      for (int x = 0; x < 4; ++x) scores[n].x[x] = softmax_weight(scores[n].x[x], base[x / 2]);
#pragma unroll
      for (int i = 0; i < 2; ++i) of_group[n][i] = __fadd_rn(scores[n].x[2 * i], scores[n].x[2 * i + 1]);
    }
#pragma unroll
    for (int step = 1; step < key_groups; step *= 2) {
#pragma unroll
      for (int n = 0; n < key_groups; n += 2 * step) {
#pragma unroll
        for (int i = 0; i < 2; ++i) of_group[n][i] = __fadd_rn(of_group[n][i], of_group[n + step][i]);
      }
    }
    sums[0] = of_group[0][0];
    sums[1] = of_group[0][1];
  }

  /// Publishes this warp's weights, rounded, and completes the sums of the tile.
  __device__ void exchange_weights(const Scores& scores, float (&sums)[2]) const {
    Element* weights = shared_.weights(strip_);
    float* of_strip = shared_.sums() + strip_ * strip_warps * warp_lanes * 2;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int n = 0; n < key_groups; ++n) {
        Element* to = weights + (lane_ / 4 + 8 * i) * Tiling::weights_stride + first_key() + n * 8 + 2 * (lane_ % 4);
        *reinterpret_cast<std::uint32_t*>(to) = pack_pair<Element>(scores[n].x[2 * i], scores[n].x[2 * i + 1]);
      }
      of_strip[(member_ * warp_lanes + lane_) * 2 + i] = sums[i];
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float of_warp[strip_warps];
#pragma unroll
      for (int warp = 0; warp < strip_warps; ++warp) of_warp[warp] = of_strip[(warp * warp_lanes + lane_) * 2 + i];
#pragma unroll
      for (int step = 1; step < strip_warps; step *= 2) {
#pragma unroll
        for (int warp = 0; warp < strip_warps; warp += 2 * step) of_warp[warp] = __fadd_rn(of_warp[warp], of_warp[warp + step]);
      }
      sums[i] = of_warp[0];
    }
  }

  /// The weights of 16 keys as an operand, rounded.
  __device__ FragmentA weights_of(const Scores& scores, int step) const {
    FragmentA weights;
    if constexpr (strip_warps > 1) {
      load_matrix_x4(weights, shared_.weights(strip_) + lane_ % 16 * Tiling::weights_stride + step * 16 + lane_ / 16 * 8);
    } else {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const FragmentC& of = scores[2 * step + half];
          weights.x[half * 2 + i] = pack_pair<Element>(of.x[2 * i], of.x[2 * i + 1]);
        }
      }
    }
    return weights;
  }

  /// split_values += weights . values, in this warp's columns; the sum runs over the tile's keys in ascending order.
  __device__ void add_values(const Element* values, const Scores& scores) {
    const Element* from = values + lane_ % 16 * Tiling::stride + member_ * columns * 8;
#pragma unroll
    for (int step = 0; step < kv_tile / 16; ++step) {
      const FragmentA weights = weights_of(scores, step);
#pragma unroll
      for (int n = 0; n < columns; ++n) {
        if (!has_column_group(n)) continue;
        FragmentB of_columns;
        load_matrix_x2_transposed(of_columns, from + step * 16 * Tiling::stride + n * 8);
        mma_m16n8k16<Element>(split_values_.at[n], weights, of_columns);
      }
    }
  }

  __device__ bool has_column_group(int n) const {
    return column_groups % strip_warps == 0 || member_ * columns + n < column_groups;
  }

  /// The split's partial result joins what the item has so far.
  __device__ void finish_split() {
    MergeFactors factors[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float& sum = split_state_[i].sum;  // each lane of four has added its own keys
      sum = __fadd_rn(sum, __shfl_xor_sync(all_lanes, sum, 1));
      sum = __fadd_rn(sum, __shfl_xor_sync(all_lanes, sum, 2));
      factors[i] = merge_state(state_[i], split_state_[i]);
    }
#pragma unroll
    for (int n = 0; n < columns; ++n) {
#pragma unroll
      for (int x = 0; x < 4; ++x) {
        values_.at[n].x[x] = merge_value(values_.at[n].x[x], split_values_.at[n].x[x], factors[x / 2]);
      }
    }
    clear_split();
  }

  __device__ int column_of(int n) const {
    return (member_ * columns + n) * 8 + 2 * (lane_ % 4);
  }

  __device__ void write_result() const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (row_of(i) >= task_.rows) continue;
      Element* out = head_of<Element>(inputs_, task_, inputs_.out, kv_head_, row_of(i));
      const float inverse = __fdiv_rn(1.0F, state_[i].sum);
#pragma unroll
      for (int n = 0; n < columns; ++n) {
        if (!has_column_group(n)) continue;
        *reinterpret_cast<std::uint32_t*>(out + column_of(n)) =
            pack_pair<Element>(attended(values_.at[n].x[2 * i], inverse), attended(values_.at[n].x[2 * i + 1], inverse));
      }
    }
  }

  __device__ void write_part() const {
    float* rows = partial_rows(inputs_, task_, kv_head_, task_.part, strip_rows);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (row_of(i) >= task_.rows) continue;
      float* out = rows + row_of(i) * (head_size + 2);
#pragma unroll
      for (int n = 0; n < columns; ++n) {
        if (!has_column_group(n)) continue;
        *reinterpret_cast<Pack<float, 2>*>(out + column_of(n)) = {{values_.at[n].x[2 * i], values_.at[n].x[2 * i + 1]}};
      }
      if (member_ == 0 && lane_ % 4 == 0) {
        out[head_size] = state_[i].largest;
        out[head_size + 1] = state_[i].sum;
      }
    }
  }

  const AttentionInputs& inputs_;
  const AttentionTask& task_;
  std::int32_t kv_head_;
  TensorShared<Element, head_size> shared_;
  int lane_;
  int strip_;
  int member_;              // which of the warps that share the strip
  std::int32_t end_;        // of the positions that this item reads
  std::int32_t strip_end_;  // of those that the strip's last row sees
  std::int32_t visible_[2];
  FragmentA query_[head_size / 16];
  SoftmaxState split_state_[2];
  SoftmaxState state_[2];
  StripValues<columns> split_values_;
  StripValues<columns> values_;
};

template <class Element, int head_size>
__global__ void __launch_bounds__(TensorTiling<head_size>::threads, TensorTiling<head_size>::blocks_per_multiprocessor)
    attend_tensor_kernel(AttentionInputs inputs) {
  extern __shared__ __align__(16) unsigned char shared_bytes[];
  const TensorShared<Element, head_size> shared{shared_bytes};
  take_items<Element>(inputs, strip_rows, shared.control(), [&](const AttentionTask& task, std::int32_t kv_head) {
    if (task.rows <= strip_rows) {
      TensorItem<Element, head_size, TensorTiling<head_size>::warps>(inputs, task, kv_head, shared).run();
    } else {
      TensorItem<Element, head_size, TensorTiling<head_size>::wide_strip_warps>(inputs, task, kv_head, shared).run();
    }
  });
}

}  // namespace rubato::engine::cuda
