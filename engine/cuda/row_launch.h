// SPDX-License-Identifier: Apache-2.0
// How wide kernels over rows are launched. Nothing here depends on a batch's contents.
#pragma once

#include <cstdint>

#include "engine/cuda/element.cuh"

namespace rubato::engine::cuda {

/// Blocks, each of so many, that hold count.
inline std::uint32_t blocks_for(std::int64_t count, std::int64_t size) {
  return static_cast<std::uint32_t>((count + size - 1) / size);
}

// ---- norms: one block for each row or group of columns
inline constexpr int norm_columns = 4;  // of one thread at a time: 16 bytes of F32
inline constexpr int norm_kept = 4;     // packs of a thread that stay in registers between the two passes: up to 8192 columns

inline std::uint32_t norm_threads(std::int32_t columns) {
  std::uint32_t threads = warp_lanes;
  while (threads < 512 && static_cast<std::int64_t>(threads) * 2 * norm_columns < columns) threads *= 2;
  return threads;
}

}  // namespace rubato::engine::cuda
