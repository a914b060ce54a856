// SPDX-License-Identifier: Apache-2.0
// Attention without tensor cores: F32, and head sizes that fill no matrix fragment. A block takes 8 packed query rows: scores of
// a whole split first, its softmax, then its values in slices of 64 columns. Every sum runs over columns, or keys, in ascending
// order.
#pragma once

#include <cstdint>

#include "engine/cuda/attention_merge.cuh"
#include "manifests/settings.h"

namespace rubato::engine::cuda {

/// One item; as TensorItem in attention_tensor.cuh. Thread t takes key or column t % 64 for half of the rows.
template <class Element>
class SimtItem {
 public:
  static constexpr int tile_rows = 8;
  static constexpr int threads = 128;
  static constexpr int blocks_per_multiprocessor = 4;

  /// Of shared memory.
  __host__ __device__ static constexpr std::int32_t floats(std::int32_t head_size) {
    return tile_rows * score_stride + width * tile_stride + tile_rows * width + tile_rows * head_size + 4 * tile_rows;
  }
  static constexpr int control_bytes = 16;  // before them

  __device__ SimtItem(const AttentionInputs& inputs, const AttentionTask& task, std::int32_t kv_head, float* shared)
      : inputs_(inputs), task_(task), kv_head_(kv_head), head_size_(inputs.shape.head_size) {
    thread_ = static_cast<int>(threadIdx.x);
    scores_ = shared;
    tile_ = scores_ + tile_rows * score_stride;
    query_ = tile_ + width * tile_stride;
    values_ = query_ + tile_rows * width;
    kept_ = values_ + tile_rows * head_size_;
    added_ = kept_ + tile_rows;
    sums_ = added_ + tile_rows;
    largest_ = sums_ + tile_rows;
  }

  __device__ void run() {
    for (std::int32_t i = thread_; i < tile_rows * head_size_; i += threads) values_[i] = 0.0F;
    if (thread_ < tile_rows) {
      largest_[thread_] = lowest_score;
      sums_[thread_] = 0.0F;
    }
    for (std::int32_t split = task_.split_begin; split < task_.split_end; ++split) {
      const std::int32_t first = split * attention_split;
      const std::int32_t tiles = ceil_divide(min(attention_split, task_.end - first), width);
      for (std::int32_t tile = 0; tile < tiles; ++tile) score_tile(first, tile);
      __syncthreads();
      for (int row = thread_ / warp_lanes; row < tile_rows; row += threads / warp_lanes) weigh_row(row, tiles * width);
      for (std::int32_t column = 0; column < head_size_; column += width) add_slice(first, tiles, column);
    }
    __syncthreads();
    if (task_.parts == 1) {
      write_result();
    } else {
      write_part();
    }
  }

 private:
  static constexpr int width = 64;  // of a KV tile in tokens, and of a slice of the head in columns
  static constexpr int tile_stride = width + 1;
  static constexpr int score_stride = attention_split + 1;
  static constexpr int thread_rows = tile_rows * width / threads;
  static_assert(attention_split % width == 0 && tile_rows * width % threads == 0);
  enum class Part : std::uint8_t { Keys, Values };

  /// Puts `slice` columns of a tile of keys or values into shared memory; tokens past the end, never written perhaps, as zero.
  __device__ void load_tile(Part part, std::int32_t first, std::int32_t tile, std::int32_t column, std::int32_t slice) const {
    for (std::int32_t i = thread_; i < width * slice; i += threads) {
      const std::int32_t token = i / slice;
      const std::int32_t position = first + tile * width + token;
      float value = 0.0F;
      if (position < task_.end) {
        const std::int64_t block = inputs_.blocks[task_.blocks + position / kv_block_tokens];
        const std::int64_t row =
            ((block * inputs_.shape.kv_heads + kv_head_) * 2 + (part == Part::Keys ? 0 : 1)) * kv_block_tokens +
            position % kv_block_tokens;
        value = to_float(static_cast<const Element*>(inputs_.cache)[row * head_size_ + column + i % slice]);
      }
      tile_[token * tile_stride + i % slice] = value;
    }
  }

  __device__ void load_query(std::int32_t column, std::int32_t slice) const {
    for (std::int32_t i = thread_; i < tile_rows * slice; i += threads) {
      const std::int32_t row = i / slice;
      float value = 0.0F;
      if (row < task_.rows) {
        value = to_float(head_of<const Element>(inputs_, task_, inputs_.query, kv_head_, row)[column + i % slice]);
      }
      query_[row * width + i % slice] = value;
    }
  }

  /// Masked and scaled scores of one tile.
  __device__ void score_tile(std::int32_t first, std::int32_t tile) const {
    const int key = thread_ % width;
    const int first_row = thread_ / width * thread_rows;
    float scores[thread_rows] = {};
    for (std::int32_t column = 0; column < head_size_; column += width) {
      const std::int32_t slice = min(width, head_size_ - column);
      __syncthreads();  // all are done with what these replace
      load_query(column, slice);
      load_tile(Part::Keys, first, tile, column, slice);
      __syncthreads();
      for (std::int32_t i = 0; i < slice; ++i) {
        const float of_key = tile_[key * tile_stride + i];
#pragma unroll
        for (int row = 0; row < thread_rows; ++row) {
          scores[row] = fmaf(query_[(first_row + row) * width + i], of_key, scores[row]);
        }
      }
    }
    const std::int32_t position = first + tile * width + key;
#pragma unroll
    for (int row = 0; row < thread_rows; ++row) {
      const bool visible = first_row + row < task_.rows && position < visible_end(inputs_, task_, first_row + row);
      scores_[(first_row + row) * score_stride + tile * width + key] =
          visible ? __fmul_rn(scores[row], inputs_.scale) : lowest_score;
    }
  }

  /// One warp turns a row's scores into weights. Keys that a row does not see add zeros, so how many follow changes nothing.
  __device__ void weigh_row(int row, std::int32_t keys) const {
    float* scores = scores_ + row * score_stride;
    SoftmaxState split{.largest = lowest_score, .sum = 0.0F};
    for (std::int32_t key = thread_ % warp_lanes; key < keys; key += warp_lanes)
      split.largest = fmaxf(split.largest, scores[key]);
    split.largest = warp_max(split.largest);
    const float base = softmax_base(split.largest);
    for (std::int32_t key = thread_ % warp_lanes; key < keys; key += warp_lanes) {
      scores[key] = softmax_weight(scores[key], base);
      split.sum = __fadd_rn(split.sum, scores[key]);
    }
    split.sum = warp_sum(split.sum);
    if (thread_ % warp_lanes == 0) {
      SoftmaxState state{.largest = largest_[row], .sum = sums_[row]};
      const MergeFactors factors = merge_state(state, split);
      kept_[row] = factors.kept;
      added_[row] = factors.added;
      largest_[row] = state.largest;
      sums_[row] = state.sum;
    }
  }

  /// A split's weighted values, in some columns, join what the item has so far.
  __device__ void add_slice(std::int32_t first, std::int32_t tiles, std::int32_t column) const {
    const std::int32_t slice = min(width, head_size_ - column);
    const int own = thread_ % width;
    const int first_row = thread_ / width * thread_rows;
    float sums[thread_rows] = {};
    for (std::int32_t tile = 0; tile < tiles; ++tile) {
      __syncthreads();  // all are done with the tile before; at first, with the weights
      load_tile(Part::Values, first, tile, column, slice);
      __syncthreads();
      if (own >= slice) continue;
      for (int key = 0; key < width; ++key) {
        const float value = tile_[key * tile_stride + own];
#pragma unroll
        for (int row = 0; row < thread_rows; ++row) {
          sums[row] = fmaf(scores_[(first_row + row) * score_stride + tile * width + key], value, sums[row]);
        }
      }
    }
    if (own >= slice) return;
#pragma unroll
    for (int row = 0; row < thread_rows; ++row) {
      float& value = values_[(first_row + row) * head_size_ + column + own];
      value = merge_value(value, sums[row], {.kept = kept_[first_row + row], .added = added_[first_row + row]});
    }
  }

  __device__ void write_result() const {
    for (std::int32_t i = thread_; i < task_.rows * head_size_; i += threads) {
      const std::int32_t row = i / head_size_;
      const float inverse = __fdiv_rn(1.0F, sums_[row]);
      head_of<Element>(inputs_, task_, inputs_.out, kv_head_, row)[i % head_size_] =
          to_element<Element>(attended(values_[i], inverse));
    }
  }

  __device__ void write_part() const {
    float* out = partial_rows(inputs_, task_, kv_head_, task_.part, tile_rows);
    for (std::int32_t i = thread_; i < task_.rows * head_size_; i += threads) {
      out[i / head_size_ * (head_size_ + 2) + i % head_size_] = values_[i];
    }
    if (thread_ < task_.rows) {
      out[thread_ * (head_size_ + 2) + head_size_] = largest_[thread_];
      out[thread_ * (head_size_ + 2) + head_size_ + 1] = sums_[thread_];
    }
  }

  const AttentionInputs& inputs_;
  const AttentionTask& task_;
  std::int32_t kv_head_;
  std::int32_t head_size_;
  int thread_;
  // In shared memory.
  float* scores_;   // (rows, split): scores, then weights
  float* tile_;     // (tokens, columns) of keys or values
  float* query_;    // (rows, columns)
  float* values_;   // (rows, head_size): merged so far
  float* kept_;     // (rows): factors of the split that is joining
  float* added_;    // (rows)
  float* sums_;     // (rows): states of what is merged so far
  float* largest_;  // (rows)
};

template <class Element>
__global__ void __launch_bounds__(SimtItem<Element>::threads) attend_simt_kernel(AttentionInputs inputs) {
  extern __shared__ __align__(16) unsigned char shared_bytes[];
  using Item = SimtItem<Element>;
  auto* control = reinterpret_cast<std::int32_t*>(shared_bytes);
  auto* floats = reinterpret_cast<float*>(shared_bytes + Item::control_bytes);
  take_items<Element>(inputs, Item::tile_rows, control,
                      [&](const AttentionTask& task, std::int32_t kv_head) { Item(inputs, task, kv_head, floats).run(); });
}

}  // namespace rubato::engine::cuda
