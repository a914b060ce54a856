// SPDX-License-Identifier: Apache-2.0
// The online softmax's arithmetic, written once for decode rows and chunks, tensor cores and plain lanes: how the partial result
// of one split joins those before it, and how the last block to finish a tile merges parts that ran in parallel. Scores are to
// the base 2. Rounding is explicit throughout: contraction must not differ between two instantiations.
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>

#include "engine/cuda/attention_work.h"
#include "engine/cuda/element.cuh"

namespace rubato::engine::cuda {

inline constexpr float lowest_score = -std::numeric_limits<float>::infinity();

/// A row's largest score so far and the sum of its weights relative to it. No key seen: {lowest_score, 0}.
struct SoftmaxState {
  float largest;
  float sum;
};

/// What weights are relative to: never infinite, so that rows without a visible key give weights of 0 and not of NaN.
__device__ inline float softmax_base(float largest) {
  return largest == lowest_score ? 0.0F : largest;
}

__device__ inline float softmax_weight(float score, float base) {
  return exp2f(__fadd_rn(score, -base));
}

struct MergeFactors {
  float kept;   // of what was there
  float added;  // of what joins
};

/// state joined by the next split's partial result. Merging into the empty state, and merging an empty result, changes nothing.
__device__ inline MergeFactors merge_state(SoftmaxState& state, const SoftmaxState& next) {
  const float largest = fmaxf(state.largest, next.largest);
  const float base = softmax_base(largest);
  const MergeFactors factors{.kept = softmax_weight(state.largest, base), .added = softmax_weight(next.largest, base)};
  state.largest = largest;
  state.sum = fmaf(state.sum, factors.kept, __fmul_rn(next.sum, factors.added));
  return factors;
}

__device__ inline float merge_value(float value, float next, const MergeFactors& factors) {
  return fmaf(value, factors.kept, __fmul_rn(next, factors.added));
}

/// The result of a row from its merged value. Adding +0 gives zeros one sign: tiles that a row does not see add zeros of either
/// sign to it, and how many there are depends on the chunk.
__device__ inline float attended(float value, float inverse_sum) {
  return __fadd_rn(__fmul_rn(value, inverse_sum), 0.0F);
}

/// Positions below this are visible to packed row `row` of the tile.
__device__ inline std::int32_t visible_end(const AttentionInputs& inputs, const AttentionTask& task, std::int32_t row) {
  return task.position + (task.first + row) / inputs.group + 1;
}

/// Where packed row `row` of the tile lies in query or out.
template <class Element>
__device__ inline Element* head_of(const AttentionInputs& inputs, const AttentionTask& task, const Activations& matrix,
                                   std::int32_t kv_head, std::int32_t row) {
  const std::int32_t packed = task.first + row;
  const std::int32_t head = kv_head * inputs.group + packed % inputs.group;
  return static_cast<Element*>(matrix.data) + (task.token + packed / inputs.group) * matrix.stride +
         static_cast<std::int64_t>(head) * inputs.shape.head_size;
}

/// Merges all parts of one row in ascending order and writes the result; one warp.
template <class Element>
__device__ inline void merge_row(const AttentionInputs& inputs, const AttentionTask& task, std::int32_t kv_head, std::int32_t row,
                                 std::int32_t unit_rows) {
  constexpr std::int32_t columns = 4;  // of a lane at a time
  const std::int32_t head_size = inputs.shape.head_size;
  const std::int64_t part_stride =
      static_cast<std::int64_t>(ceil_divide(task.rows, unit_rows)) * inputs.shape.kv_heads * unit_rows * (head_size + 2);
  const float* first_part = partial_rows(inputs, task, kv_head, 0, unit_rows) + static_cast<std::int64_t>(row) * (head_size + 2);
  Element* out = head_of<Element>(inputs, task, inputs.out, kv_head, row);
  const auto lane = static_cast<std::int32_t>(threadIdx.x % warp_lanes);
  for (std::int32_t base = lane; base < head_size; base += columns * warp_lanes) {
    SoftmaxState state{.largest = lowest_score, .sum = 0.0F};
    float values[columns] = {};
#pragma unroll 4
    for (std::int32_t part = 0; part < task.parts; ++part) {
      const float* from = first_part + part * part_stride;
      float next[columns];
#pragma unroll
      for (std::int32_t i = 0; i < columns; ++i) {
        const std::int32_t column = base + i * warp_lanes;
        next[i] = column < head_size ? from[column] : 0.0F;
      }
      const MergeFactors factors = merge_state(state, {.largest = from[head_size], .sum = from[head_size + 1]});
#pragma unroll
      for (std::int32_t i = 0; i < columns; ++i) values[i] = merge_value(values[i], next[i], factors);
    }
    const float inverse = __fdiv_rn(1.0F, state.sum);
#pragma unroll
    for (std::int32_t i = 0; i < columns; ++i) {
      const std::int32_t column = base + i * warp_lanes;
      if (column < head_size) out[column] = to_element<Element>(attended(values[i], inverse));
    }
  }
}

/// After a block has written its part of a tile: if it is the last part to finish, merges them all. All threads; shared_flag may
/// be written again after the next barrier.
template <class Element>
__device__ inline void merge_when_last(const AttentionInputs& inputs, const AttentionTask& task, std::int32_t kv_head,
                                       std::int32_t unit_rows, std::int32_t* shared_flag) {
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) {
    std::int32_t* finished = inputs.scratch.finished + static_cast<std::int64_t>(task.unit) * inputs.shape.kv_heads + kv_head;
    const bool last = atomicAdd(finished, 1) == task.parts - 1;
    if (last) atomicExch(finished, 0);  // the next layer counts again
    *shared_flag = last ? 1 : 0;
  }
  __syncthreads();
  if (*shared_flag == 0) return;
  __threadfence();
  const auto warps = static_cast<std::int32_t>(blockDim.x / warp_lanes);
  for (auto row = static_cast<std::int32_t>(threadIdx.x / warp_lanes); row < task.rows; row += warps) {
    merge_row<Element>(inputs, task, kv_head, row, unit_rows);
  }
}

/// Runs attend(task, kv_head) for items of the work list until none is left. Which block runs an item changes no bit of it.
/// Blocks take their first item by their index and further ones from a counter, which the last block to leave sets back for the
/// next layer.
template <class Element, class Attend>
__device__ inline void take_items(const AttentionInputs& inputs, std::int32_t unit_rows, std::int32_t* shared_item,
                                  Attend&& attend) {
  AttentionCounters* counters = inputs.scratch.counters;
  const std::int32_t items = counters->tasks * inputs.shape.kv_heads;
  auto item = static_cast<std::int32_t>(blockIdx.x);
  while (item < items) {
    std::int32_t following = 0;
    if (threadIdx.x == 0) following = static_cast<std::int32_t>(gridDim.x) + atomicAdd(&counters->taken, 1);
    const AttentionTask task = inputs.scratch.tasks[item / inputs.shape.kv_heads];
    const std::int32_t kv_head = item % inputs.shape.kv_heads;
    attend(task, kv_head);
    if (task.parts > 1) merge_when_last<Element>(inputs, task, kv_head, unit_rows, shared_item + 1);
    if (threadIdx.x == 0) *shared_item = following;
    __syncthreads();  // and shared memory is free for the next item
    item = *shared_item;
  }
  if (threadIdx.x == 0 && atomicAdd(&counters->left, 1) == static_cast<std::int32_t>(gridDim.x) - 1) {
    atomicExch(&counters->taken, 0);
    atomicExch(&counters->left, 0);
  }
}

}  // namespace rubato::engine::cuda
