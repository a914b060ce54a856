// SPDX-License-Identifier: Apache-2.0
// How attention on tensor cores is cut for each head size, and where a block keeps what in shared memory.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <cstring>

#include "engine/cuda/element.cuh"
#include "engine/cuda/kernels.h"
#include "engine/cuda/mma.cuh"
#include "manifests/settings.h"

namespace rubato::engine::cuda {

inline constexpr std::int32_t strip_rows = 16;

/// Compile-time choices for one head size. What may change bits (kv_tile) is the same for all strips.
template <int head_size>
struct TensorTiling {
  static constexpr int warps = 4;
  static constexpr int threads = warps * warp_lanes;
  static constexpr int kv_tile = head_size > 128 ? 32 : 64;  // tokens; two stages of both keys and values fit in 99 KiB
  static constexpr int wide_strip_warps = head_size > 128 ? 2 : 1;
  static constexpr int tile_rows = strip_rows * warps / wide_strip_warps;
  static constexpr int blocks_per_multiprocessor = head_size <= 64 ? 3 : 2;
  // In elements. An odd multiple of 16 bytes: the eight rows of a matrix load lie in different banks.
  static constexpr int stride = head_size + 8;
  static constexpr int weights_stride = kv_tile + 8;
  // In bytes, one after another.
  static constexpr int stage_bytes = 2 * kv_tile * stride * 2;
  static constexpr int weights_bytes = strip_rows * wide_strip_warps * weights_stride * 2;
  static constexpr int largest_bytes = warps * strip_rows * 4;
  static constexpr int sums_bytes = warps * warp_lanes * 2 * 4;
  static constexpr int control_bytes = 16;
  static constexpr int shared_bytes = 2 * stage_bytes + weights_bytes + largest_bytes + sums_bytes + control_bytes;
  static_assert(attention_split % kv_tile == 0 && kv_tile % kv_block_tokens == 0 && kv_tile % 16 == 0);
  static_assert(head_size % 16 == 0 && (stride / 8) % 2 == 1 && (weights_stride / 8) % 2 == 1);
};

/// A block's shared memory.
template <class Element, int head_size>
struct TensorShared {
  using Tiling = TensorTiling<head_size>;
  unsigned char* bytes;

  __device__ Element* keys(int stage) const { return reinterpret_cast<Element*>(bytes + stage * Tiling::stage_bytes); }
  __device__ Element* values(int stage) const { return keys(stage) + Tiling::kv_tile * Tiling::stride; }
  __device__ Element* weights(int strip) const {
    return reinterpret_cast<Element*>(bytes + 2 * Tiling::stage_bytes) + strip * strip_rows * Tiling::weights_stride;
  }
  __device__ float* largest() const { return reinterpret_cast<float*>(bytes + 2 * Tiling::stage_bytes + Tiling::weights_bytes); }
  __device__ float* sums() const { return largest() + Tiling::largest_bytes / 4; }
  __device__ std::int32_t* control() const { return reinterpret_cast<std::int32_t*>(sums() + Tiling::sums_bytes / 4); }
};

template <class Element>
__device__ inline std::uint32_t pack_pair(float first, float second) {
  const Pack<Element, 2> pair{{to_element<Element>(first), to_element<Element>(second)}};
  std::uint32_t word = 0;
  std::memcpy(&word, &pair, sizeof(word));
  return word;
}

/// Values of the strip's rows in one warp's columns.
template <int columns>
struct StripValues {
  FragmentC at[columns];  // 8 columns each

  __device__ void clear() {
#pragma unroll
    for (int n = 0; n < columns; ++n) at[n] = FragmentC{{0.0F, 0.0F, 0.0F, 0.0F}};
  }
};

}  // namespace rubato::engine::cuda
