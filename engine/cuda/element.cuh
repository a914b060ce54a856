// SPDX-License-Identifier: Apache-2.0
// What every kernel does with single values: widening and rounding of elements, packs of 16 bytes, sums in one fixed tree, and
// the one exponential. Every operation rounds explicitly, so that no compiler contracts it differently in two instantiations.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

#include "manifests/check.h"
#include "manifests/engine_spec.h"

namespace rubato::engine::cuda {

inline constexpr int warp_lanes = 32;
inline constexpr unsigned all_lanes = 0xFFFFFFFFU;

// ---- elements: float, __nv_bfloat16, __half
__device__ inline float to_float(float value) {
  return value;
}
__device__ inline float to_float(__nv_bfloat16 value) {
  return __bfloat162float(value);
}
__device__ inline float to_float(__half value) {
  return __half2float(value);
}

/// Rounds to nearest even; NaN stays NaN, what is too large becomes infinite.
template <class Element>
__device__ inline Element to_element(float value) {
  if constexpr (std::is_same_v<Element, float>) {
    return value;
  } else if constexpr (std::is_same_v<Element, __nv_bfloat16>) {
    return __float2bfloat16_rn(value);
  } else {
    static_assert(std::is_same_v<Element, __half>);
    return __float2half_rn(value);
  }
}

template <class Element_>
struct ElementType {
  using Element = Element_;
};

/// Calls body(ElementType<E>()) with the E of dtype: [&](auto type) { using Element = typename decltype(type)::Element; ... }
template <class Body>
void with_element(DataType dtype, Body&& body) {
  switch (dtype) {
    case DataType::Float32:
      return body(ElementType<float>());
    case DataType::BFloat16:
      return body(ElementType<__nv_bfloat16>());
    case DataType::Float16:
      return body(ElementType<__half>());
  }
  CHECK(false, "dtype=", static_cast<int>(dtype));
}

// ---- packs: values side by side that one instruction moves
template <class Value, int count>
struct alignas(sizeof(Value) * count) Pack {
  Value at[count];
};

/// Values in 16 bytes.
template <class Value>
inline constexpr int pack_values = 16 / static_cast<int>(sizeof(Value));

template <int count, class Value>
__host__ __device__ inline bool holds_packs(const Value* data, std::int64_t stride) {
  return reinterpret_cast<std::uintptr_t>(data) % (sizeof(Value) * count) == 0 && stride % count == 0;
}

/// Columns column .. column + count - 1 of a row that has `columns`, widened; zero past its end. packed: holds_packs<count> of
/// the matrix; column is a multiple of count. Whether packed or not, the values are the same.
template <int count, class Element>
__device__ inline void load_columns(const Element* row, std::int32_t column, std::int32_t columns, bool packed,
                                    float (&values)[count]) {
  if (packed && column + count <= columns) {
    const auto pack = *reinterpret_cast<const Pack<Element, count>*>(row + column);
#pragma unroll
    for (int i = 0; i < count; ++i) values[i] = to_float(pack.at[i]);
  } else {
#pragma unroll
    for (int i = 0; i < count; ++i) values[i] = column + i < columns ? to_float(row[column + i]) : 0.0F;
  }
}

/// The counterpart: rounds to Element and stores what lies within columns.
template <int count, class Element>
__device__ inline void store_columns(const float (&values)[count], Element* row, std::int32_t column, std::int32_t columns,
                                     bool packed) {
  if (packed && column + count <= columns) {
    Pack<Element, count> pack;
#pragma unroll
    for (int i = 0; i < count; ++i) pack.at[i] = to_element<Element>(values[i]);
    *reinterpret_cast<Pack<Element, count>*>(row + column) = pack;
  } else {
#pragma unroll
    for (int i = 0; i < count; ++i) {
      if (column + i < columns) row[column + i] = to_element<Element>(values[i]);
    }
  }
}

// ---- reductions: all lanes of the warp (threads of the block) take part and all get the result
/// A butterfly: each lane adds the same pairs, so all lanes hold the same bits.
__device__ inline float warp_sum(float value) {
#pragma unroll
  for (int offset = warp_lanes / 2; offset > 0; offset /= 2) {
    value = __fadd_rn(value, __shfl_xor_sync(all_lanes, value, offset));
  }
  return value;
}

__device__ inline float warp_max(float value) {
#pragma unroll
  for (int offset = warp_lanes / 2; offset > 0; offset /= 2) value = fmaxf(value, __shfl_xor_sync(all_lanes, value, offset));
  return value;
}

/// Warp sums, then those in ascending order of warps. blockDim.x is a multiple of 32. scratch: one float per warp, in shared
/// memory; usable again after the next barrier.
__device__ inline float block_sum(float value, float* scratch) {
  const unsigned warps = blockDim.x / warp_lanes;
  value = warp_sum(value);
  if (warps == 1) return value;
  if (threadIdx.x % warp_lanes == 0) scratch[threadIdx.x / warp_lanes] = value;
  __syncthreads();
  float sum = scratch[0];
  for (unsigned warp = 1; warp < warps; ++warp) sum = __fadd_rn(sum, scratch[warp]);
  return sum;
}

// ---- functions
/// e^x within 2 units in the last place, and exactly 1 for 0: the same bits from every compiler, which expf is not. Below -87
/// the result is 0, above 88 infinite; NaN stays NaN.
__device__ inline float exponential(float x) {
  // x = n ln 2 + r with |r| <= ln 2 / 2. Adding 1.5 * 2^23 rounds to an integer, which then stands in the low bits of the sum.
  constexpr float shifter = 12582912.0F;
  const float shifted = fmaf(x, 1.44269504F, shifter);
  const float n = __fadd_rn(shifted, -shifter);
  const float r = fmaf(n, -1.42860677e-6F, fmaf(n, -0.693145752F, x));  // ln 2 in two parts; n times the first is exact
  float sum = 1.0F / 5040.0F;                                           // Taylor: the rest is below 1e-8
  sum = fmaf(sum, r, 1.0F / 720.0F);
  sum = fmaf(sum, r, 1.0F / 120.0F);
  sum = fmaf(sum, r, 1.0F / 24.0F);
  sum = fmaf(sum, r, 1.0F / 6.0F);
  sum = fmaf(sum, r, 0.5F);
  sum = fmaf(sum, r, 1.0F);
  sum = fmaf(sum, r, 1.0F);
  const float power = __uint_as_float((__float_as_uint(shifted) + 127U) << 23);  // 2^n: the shifter's own bits leave at the top
  const float result = __fmul_rn(sum, power);
  if (x < -87.0F) return 0.0F;
  if (x > 88.0F) return __uint_as_float(0x7F800000U);
  return result;
}

/// x / (1 + e^-x)
__device__ inline float silu(float x) {
  return __fdiv_rn(x, __fadd_rn(1.0F, exponential(-x)));
}

}  // namespace rubato::engine::cuda
