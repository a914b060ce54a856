// SPDX-License-Identifier: Apache-2.0
// Private to kernels_linear.cu and its tests: how a product is cut. Any tile gives the same bits; they differ in speed alone.
#pragma once

#include <cstdint>

#include "engine/cuda/kernels.h"

namespace rubato::engine::cuda {

/// From few rows to many.
enum class LinearTile : std::uint8_t { Decode, Small, Middle, Large };

/// The tile that linear() takes.
[[nodiscard]] LinearTile choose_linear_tile(DataType dtype, std::int32_t rows, std::int32_t outputs);

/// linear() in a tile of the caller's choice. F32 has two tiles only: Decode and, for all others, Large.
void linear_in_tile(cudaStream_t stream, LinearTile tile, DataType dtype, const void* weights, const float* bias,
                    std::int32_t outputs, const Activations& x, DataType out_dtype, const Rows<void*>& out);

}  // namespace rubato::engine::cuda
