// SPDX-License-Identifier: Apache-2.0
// What stands beside recurrent layers and is no recurrence: the gated norm behind them, and relu squared of some of their
// hybrids. As in kernels_rows.cu, the order of a sum depends on its length alone.
#include <algorithm>

#include "engine/cuda/element.cuh"
#include "engine/cuda/kernels.h"
#include "engine/cuda/row_launch.h"
#include "engine/cuda/runtime.h"
#include "manifests/check.h"

namespace rubato::engine::cuda {

// ---- gated_norm: one block per group of one row

namespace {

struct GatedGroup {
  const float* y = nullptr;
  const float* gate = nullptr;
  const float* weight = nullptr;
  std::int32_t columns = 0;
  bool packed = false;
};

/// What is normalised: y, gated before where the order says so. Returns the squares so far.
__device__ inline float load_gated(const GatedGroup& group, GateOrder order, std::int32_t column, float squares,
                                   float (&values)[norm_columns]) {
  load_columns(group.y, column, group.columns, group.packed, values);
  if (order != GateOrder::NormFirst) {
    float gates[norm_columns];
    load_columns(group.gate, column, group.columns, group.packed, gates);
#pragma unroll
    for (int i = 0; i < norm_columns; ++i) values[i] = __fmul_rn(values[i], silu(gates[i]));
  }
#pragma unroll
  for (int i = 0; i < norm_columns; ++i) squares = fmaf(values[i], values[i], squares);
  return squares;
}

template <class Element>
__device__ inline void store_normed(const GatedGroup& group, GateOrder order, float scale, std::int32_t column,
                                    float (&values)[norm_columns], Element* out) {
  float factors[norm_columns];
  load_columns(group.weight, column, group.columns, group.packed, factors);
#pragma unroll
  for (int i = 0; i < norm_columns; ++i) values[i] = __fmul_rn(__fmul_rn(values[i], scale), factors[i]);
  if (order == GateOrder::NormFirst) {
    load_columns(group.gate, column, group.columns, group.packed, factors);
#pragma unroll
    for (int i = 0; i < norm_columns; ++i) values[i] = __fmul_rn(values[i], silu(factors[i]));
  }
  store_columns(values, out, column, group.columns, group.packed);
}

}  // namespace

template <class Element>
__global__ void gated_norm_kernel(Accumulators y, Accumulators gate, GatedNormInputs inputs, Activations out, bool packed) {
  extern __shared__ __align__(16) unsigned char shared_bytes[];
  const auto row = static_cast<std::int64_t>(blockIdx.x);
  const std::int32_t at = static_cast<std::int32_t>(blockIdx.y) * inputs.group_columns;
  const GatedGroup group{.y = y.data + row * y.stride + at,
                         .gate = gate.data + row * gate.stride + at,
                         .weight = inputs.weight + at,
                         .columns = inputs.group_columns,
                         .packed = packed};
  Element* const out_group = static_cast<Element*>(out.data) + row * out.stride + at;
  const auto stride = static_cast<std::int32_t>(blockDim.x) * norm_columns;
  const std::int32_t first = static_cast<std::int32_t>(threadIdx.x) * norm_columns;

  float kept[norm_kept][norm_columns];
  float squares = 0.0F;
#pragma unroll
  for (int pack = 0; pack < norm_kept; ++pack) {
    const std::int32_t column = first + pack * stride;
    if (column < group.columns) squares = load_gated(group, inputs.order, column, squares, kept[pack]);
  }
  for (std::int32_t column = first + norm_kept * stride; column < group.columns; column += stride) {
    float values[norm_columns];
    squares = load_gated(group, inputs.order, column, squares, values);
  }
  const float sum = block_sum(squares, reinterpret_cast<float*>(shared_bytes));
  const float mean = __fdiv_rn(sum, static_cast<float>(group.columns));
  const float scale = __fdiv_rn(1.0F, sqrtf(__fadd_rn(mean, inputs.epsilon)));
#pragma unroll
  for (int pack = 0; pack < norm_kept; ++pack) {
    const std::int32_t column = first + pack * stride;
    if (column < group.columns) store_normed(group, inputs.order, scale, column, kept[pack], out_group);
  }
  for (std::int32_t column = first + norm_kept * stride; column < group.columns; column += stride) {
    float values[norm_columns];
    load_gated(group, inputs.order, column, 0.0F, values);  // once more: the same bits
    store_normed(group, inputs.order, scale, column, values, out_group);
  }
}

/// GateOnly: y * silu(gate). gate.data null: max(y, 0)^2.
template <class Element>
__global__ void elementwise_kernel(Accumulators y, Accumulators gate, Activations out, bool packed) {
  const auto column = static_cast<std::int32_t>(blockIdx.y * blockDim.x + threadIdx.x) * norm_columns;
  if (column >= y.columns) return;
  const auto row = static_cast<std::int64_t>(blockIdx.x);
  float values[norm_columns];
  load_columns(y.data + row * y.stride, column, y.columns, packed, values);
  if (gate.data != nullptr) {
    float gates[norm_columns];
    load_columns(gate.data + row * gate.stride, column, y.columns, packed, gates);
#pragma unroll
    for (int i = 0; i < norm_columns; ++i) values[i] = __fmul_rn(values[i], silu(gates[i]));
  } else {
#pragma unroll
    for (int i = 0; i < norm_columns; ++i) values[i] = values[i] < 0.0F ? 0.0F : __fmul_rn(values[i], values[i]);
  }
  store_columns(values, static_cast<Element*>(out.data) + row * out.stride, column, y.columns, packed);
}

namespace {

void queue_elementwise(cudaStream_t stream, DataType dtype, const Accumulators& y, const Accumulators& gate,
                       const Activations& out) {
  with_element(dtype, [&](auto type) {
    using Element = typename decltype(type)::Element;
    const bool packed = holds_packs<norm_columns>(y.data, y.stride) && holds_packs<norm_columns>(gate.data, gate.stride) &&
                        holds_packs<norm_columns>(static_cast<const Element*>(out.data), out.stride);
    constexpr std::uint32_t threads = 128;
    launch(stream,
           {.blocks = static_cast<std::uint32_t>(y.count),
            .blocks_y = blocks_for(y.columns, std::int64_t{threads} * norm_columns),
            .threads = threads},
           elementwise_kernel<Element>, y, gate, out, packed);
  });
}

}  // namespace

void gated_norm(cudaStream_t stream, DataType dtype, const Accumulators& y, const Accumulators& gate,
                const GatedNormInputs& inputs, const Activations& out) {
  CHECK(gate.count == y.count && gate.columns >= y.columns && out.count == y.count && out.columns == y.columns);
  if (inputs.order == GateOrder::GateOnly) return queue_elementwise(stream, dtype, y, gate, out);
  CHECK(inputs.weight != nullptr && inputs.group_columns > 0 && y.columns % inputs.group_columns == 0,
        "group_columns=", inputs.group_columns);
  with_element(dtype, [&](auto type) {
    using Element = typename decltype(type)::Element;
    const bool packed = inputs.group_columns % norm_columns == 0 && holds_packs<norm_columns>(y.data, y.stride) &&
                        holds_packs<norm_columns>(gate.data, gate.stride) && holds_packs<norm_columns>(inputs.weight, 0) &&
                        holds_packs<norm_columns>(static_cast<const Element*>(out.data), out.stride);
    const std::uint32_t threads = norm_threads(inputs.group_columns);
    launch(stream,
           {.blocks = static_cast<std::uint32_t>(y.count),
            .blocks_y = static_cast<std::uint32_t>(y.columns / inputs.group_columns),
            .threads = threads,
            .shared_bytes = threads / warp_lanes * sizeof(float)},
           gated_norm_kernel<Element>, y, gate, inputs, out, packed);
  });
}

void relu_squared(cudaStream_t stream, DataType dtype, const Accumulators& x, const Activations& out) {
  CHECK(out.count == x.count && out.columns == x.columns);
  queue_elementwise(stream, dtype, x, {}, out);
}

}  // namespace rubato::engine::cuda
