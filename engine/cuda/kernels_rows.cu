// SPDX-License-Identifier: Apache-2.0
// What works on one row at a time: embedding, norms, rope with the write to the paged cache, SwiGLU, gathering. A row's threads,
// and with them the order of its sums, depend on its length alone. Rows of padding are computed like any other.
#include <algorithm>

#include "engine/cuda/element.cuh"
#include "engine/cuda/kernels.h"
#include "engine/cuda/row_launch.h"
#include "engine/cuda/runtime.h"
#include "manifests/check.h"
#include "manifests/settings.h"

namespace rubato::engine::cuda {
namespace {

/// One block row per matrix row, wide enough for `packs` threads.
LaunchShape elementwise_shape(std::int32_t rows, std::int32_t packs) {
  constexpr std::uint32_t threads_max = 256;
  const std::uint32_t threads = std::min(threads_max, blocks_for(packs, warp_lanes) * warp_lanes);
  return {.blocks = static_cast<std::uint32_t>(rows), .blocks_y = blocks_for(packs, threads), .threads = threads};
}

/// First column of this thread in a launch of elementwise_shape.
__device__ inline std::int32_t first_column(std::int32_t pack_columns) {
  return static_cast<std::int32_t>(blockIdx.y * blockDim.x + threadIdx.x) * pack_columns;
}

__device__ inline std::int64_t this_row() {
  return static_cast<std::int64_t>(blockIdx.x);
}

}  // namespace

// ---- embed

template <class Element>
__global__ void embed_kernel(const Element* table, const std::int32_t* token_ids, float scale, Accumulators out, bool packed) {
  constexpr int count = pack_values<Element>;
  const std::int32_t column = first_column(count);
  if (column >= out.columns) return;
  float values[count];
  load_columns(table + static_cast<std::int64_t>(token_ids[this_row()]) * out.columns, column, out.columns, packed, values);
#pragma unroll
  for (int i = 0; i < count; ++i) values[i] = __fmul_rn(scale, values[i]);
  store_columns(values, out.data + this_row() * out.stride, column, out.columns, packed);
}

void embed(cudaStream_t stream, DataType dtype, const void* table, const Batch& batch, float scale, const Accumulators& out) {
  with_element(dtype, [&](auto type) {
    using Element = typename decltype(type)::Element;
    constexpr int count = pack_values<Element>;
    const auto* rows = static_cast<const Element*>(table);
    const bool packed = holds_packs<count>(rows, out.columns) && holds_packs<count>(out.data, out.stride);
    launch(stream, elementwise_shape(out.count, static_cast<std::int32_t>(blocks_for(out.columns, count))), embed_kernel<Element>,
           rows, batch.token_ids, scale, out, packed);
  });
}

// ---- add_rms_norm

namespace {

struct NormRow {
  float* x = nullptr;
  const float* delta = nullptr;
  float delta_scale = 1;
  std::int32_t columns = 0;
  bool packed = false;
};

/// x += scale * delta for one pack; returns the squares so far.
__device__ inline float add_pack(const NormRow& row, std::int32_t column, float squares, float (&values)[norm_columns]) {
  load_columns(row.x, column, row.columns, row.packed, values);
  if (row.delta != nullptr) {
    float deltas[norm_columns];
    load_columns(row.delta, column, row.columns, row.packed, deltas);
#pragma unroll
    for (int i = 0; i < norm_columns; ++i) values[i] = fmaf(deltas[i], row.delta_scale, values[i]);
    store_columns(values, row.x, column, row.columns, row.packed);
  }
#pragma unroll
  for (int i = 0; i < norm_columns; ++i) squares = fmaf(values[i], values[i], squares);
  return squares;
}

template <class Element>
__device__ inline void scale_pack(const NormRow& row, std::int32_t column, float scale, const float* weight,
                                  float (&values)[norm_columns], Element* out) {
  float weights[norm_columns];
  load_columns(weight, column, row.columns, row.packed, weights);
#pragma unroll
  for (int i = 0; i < norm_columns; ++i) values[i] = __fmul_rn(__fmul_rn(values[i], scale), weights[i]);
  store_columns(values, out, column, row.columns, row.packed);
}

__device__ inline float norm_scale(float squares, std::int32_t columns, float epsilon) {
  return __fdiv_rn(1.0F, sqrtf(__fadd_rn(__fdiv_rn(squares, static_cast<float>(columns)), epsilon)));
}

}  // namespace

template <class Element>
__global__ void add_rms_norm_kernel(Accumulators x, ScaledDelta added, const float* weight, float epsilon, Activations out,
                                    bool packed) {
  extern __shared__ __align__(16) unsigned char shared_bytes[];
  const NormRow row{.x = x.data + this_row() * x.stride,
                    .delta = added.delta.data == nullptr ? nullptr : added.delta.data + this_row() * added.delta.stride,
                    .delta_scale = added.scale,
                    .columns = x.columns,
                    .packed = packed};
  Element* const out_row = static_cast<Element*>(out.data) + this_row() * out.stride;
  const auto stride = static_cast<std::int32_t>(blockDim.x) * norm_columns;
  const std::int32_t first = static_cast<std::int32_t>(threadIdx.x) * norm_columns;

  float kept[norm_kept][norm_columns];
  float squares = 0.0F;
#pragma unroll
  for (int pack = 0; pack < norm_kept; ++pack) {
    const std::int32_t column = first + pack * stride;
    if (column < row.columns) squares = add_pack(row, column, squares, kept[pack]);
  }
  for (std::int32_t column = first + norm_kept * stride; column < row.columns; column += stride) {
    float values[norm_columns];
    squares = add_pack(row, column, squares, values);
  }
  const float scale = norm_scale(block_sum(squares, reinterpret_cast<float*>(shared_bytes)), row.columns, epsilon);
#pragma unroll
  for (int pack = 0; pack < norm_kept; ++pack) {
    const std::int32_t column = first + pack * stride;
    if (column < row.columns) scale_pack(row, column, scale, weight, kept[pack], out_row);
  }
  for (std::int32_t column = first + norm_kept * stride; column < row.columns; column += stride) {
    float values[norm_columns];
    load_columns(row.x, column, row.columns, packed, values);  // what this thread itself wrote above
    scale_pack(row, column, scale, weight, values, out_row);
  }
}

void add_rms_norm(cudaStream_t stream, DataType dtype, const Accumulators& x, const ScaledDelta& added, const float* weight,
                  float epsilon, const Activations& out) {
  with_element(dtype, [&](auto type) {
    using Element = typename decltype(type)::Element;
    const bool packed = holds_packs<norm_columns>(x.data, x.stride) &&
                        holds_packs<norm_columns>(added.delta.data, added.delta.stride) && holds_packs<norm_columns>(weight, 0) &&
                        holds_packs<norm_columns>(static_cast<const Element*>(out.data), out.stride);
    const std::uint32_t threads = norm_threads(x.columns);
    launch(
        stream,
        {.blocks = static_cast<std::uint32_t>(x.count), .threads = threads, .shared_bytes = threads / warp_lanes * sizeof(float)},
        add_rms_norm_kernel<Element>, x, added, weight, epsilon, out, packed);
  });
}

// ---- gather_rows

template <class Word>
__global__ void gather_rows_kernel(Rows<void*> x, const std::int32_t* selected, Rows<void*> out, bool packed) {
  constexpr int count = pack_values<Word>;
  const std::int32_t column = first_column(count);
  if (column >= out.columns) return;
  const Word* from = static_cast<const Word*>(x.data) + static_cast<std::int64_t>(selected[this_row()]) * x.stride + column;
  Word* to = static_cast<Word*>(out.data) + this_row() * out.stride + column;
  if (packed && column + count <= out.columns) {
    *reinterpret_cast<Pack<Word, count>*>(to) = *reinterpret_cast<const Pack<Word, count>*>(from);
  } else {
    for (int i = 0; i < count && column + i < out.columns; ++i) to[i] = from[i];
  }
}

namespace {

template <class Word>
void gather_words(cudaStream_t stream, const Rows<void*>& x, const Batch& batch, const Rows<void*>& out) {
  constexpr int count = pack_values<Word>;
  const bool packed = holds_packs<count>(static_cast<const Word*>(x.data), x.stride) &&
                      holds_packs<count>(static_cast<const Word*>(out.data), out.stride);
  launch(stream, elementwise_shape(out.count, static_cast<std::int32_t>(blocks_for(out.columns, count))),
         gather_rows_kernel<Word>, x, batch.selected, out, packed);
}

}  // namespace

void gather_rows(cudaStream_t stream, std::int32_t bytes_per_element, const Rows<void*>& x, const Batch& batch,
                 const Rows<void*>& out) {
  CHECK(bytes_per_element == 2 || bytes_per_element == 4, "bytes_per_element=", bytes_per_element);
  if (bytes_per_element == 2) return gather_words<std::uint16_t>(stream, x, batch, out);
  gather_words<std::uint32_t>(stream, x, batch, out);
}

// ---- swiglu

template <class Element>
__global__ void swiglu_kernel(Activations gate_up, Activations out, bool packed) {
  constexpr int count = pack_values<Element>;
  const std::int32_t column = first_column(count);
  if (column >= out.columns) return;
  const Element* gate_row = static_cast<const Element*>(gate_up.data) + this_row() * gate_up.stride;
  float gate[count];
  float up[count];
  load_columns(gate_row, column, out.columns, packed, gate);
  load_columns(gate_row + out.columns, column, out.columns, packed, up);
#pragma unroll
  for (int i = 0; i < count; ++i) up[i] = __fmul_rn(silu(gate[i]), up[i]);
  store_columns(up, static_cast<Element*>(out.data) + this_row() * out.stride, column, out.columns, packed);
}

void swiglu(cudaStream_t stream, DataType dtype, const Activations& gate_up, const Activations& out) {
  CHECK(gate_up.columns == 2 * out.columns, "gate_up=", gate_up.columns, " out=", out.columns);
  with_element(dtype, [&](auto type) {
    using Element = typename decltype(type)::Element;
    constexpr int count = pack_values<Element>;
    const auto* gate = static_cast<const Element*>(gate_up.data);
    const bool packed = holds_packs<count>(gate, gate_up.stride) && holds_packs<count>(gate + out.columns, gate_up.stride) &&
                        holds_packs<count>(static_cast<const Element*>(out.data), out.stride);
    launch(stream, elementwise_shape(out.count, static_cast<std::int32_t>(blocks_for(out.columns, count))),
           swiglu_kernel<Element>, gate_up, out, packed);
  });
}

// ---- rope_and_store: one warp per head of one token

namespace {

constexpr int rope_columns = 2;  // of each half, per thread: 32 lanes cover a head of 128
constexpr int rope_warps = 4;

struct RopeHead {
  const float* data = nullptr;  // in qkv
  const float* norm = nullptr;  // null for none
  const float* cosines = nullptr;
  const float* sines = nullptr;
  float epsilon = 0;
  std::int32_t half = 0;
  bool packed = false;
};

/// 1 / sqrt(mean(x^2) + epsilon) of one head, for all lanes.
__device__ inline float head_scale(const RopeHead& head, std::int32_t lane) {
  float squares = 0.0F;
  for (std::int32_t i = lane * rope_columns; i < head.half; i += warp_lanes * rope_columns) {
    float values[rope_columns];
    for (int part = 0; part < 2; ++part) {
      load_columns(head.data + part * head.half, i, head.half, head.packed, values);
#pragma unroll
      for (int j = 0; j < rope_columns; ++j) squares = fmaf(values[j], values[j], squares);
    }
  }
  return norm_scale(warp_sum(squares), 2 * head.half, head.epsilon);
}

/// Normalises where asked and rotates element i with element half + i.
template <class Element>
__device__ inline void rotate_head(const RopeHead& head, std::int32_t lane, Element* out) {
  const float scale = head.norm == nullptr ? 1.0F : head_scale(head, lane);
  for (std::int32_t i = lane * rope_columns; i < head.half; i += warp_lanes * rope_columns) {
    float parts[2][rope_columns];
    for (int part = 0; part < 2; ++part) {
      load_columns(head.data + part * head.half, i, head.half, head.packed, parts[part]);
      if (head.norm == nullptr) continue;
      float weights[rope_columns];
      load_columns(head.norm + part * head.half, i, head.half, head.packed, weights);
#pragma unroll
      for (int j = 0; j < rope_columns; ++j) parts[part][j] = __fmul_rn(__fmul_rn(parts[part][j], scale), weights[j]);
    }
    float cosines[rope_columns];
    float sines[rope_columns];
    load_columns(head.cosines, i, head.half, head.packed, cosines);
    load_columns(head.sines, i, head.half, head.packed, sines);
#pragma unroll
    for (int j = 0; j < rope_columns; ++j) {
      const float a = parts[0][j];
      const float b = parts[1][j];
      parts[0][j] = fmaf(a, cosines[j], -__fmul_rn(b, sines[j]));
      parts[1][j] = fmaf(b, cosines[j], __fmul_rn(a, sines[j]));
    }
    store_columns(parts[0], out, i, head.half, head.packed);
    store_columns(parts[1], out + head.half, i, head.half, head.packed);
  }
}

template <class Element>
__device__ inline void copy_head(const float* from, std::int32_t size, std::int32_t lane, bool packed, Element* out) {
  for (std::int32_t i = lane * rope_columns; i < size; i += warp_lanes * rope_columns) {
    float values[rope_columns];
    load_columns(from, i, size, packed, values);
    store_columns(values, out, i, size, packed);
  }
}

/// Elements from the start of a layer's cache to a token's key; its value lies kv_block_tokens * head_size further on.
__device__ inline std::int64_t key_offset(const CacheShape& shape, std::int32_t slot, std::int32_t kv_head) {
  const std::int64_t block_head = static_cast<std::int64_t>(slot / kv_block_tokens) * shape.kv_heads + kv_head;
  return (block_head * 2 * kv_block_tokens + slot % kv_block_tokens) * shape.head_size;
}

}  // namespace

template <class Element>
__global__ void rope_and_store_kernel(CacheShape shape, Accumulators qkv, RopeInputs rope, const std::int32_t* positions,
                                      const std::int32_t* slots, Element* layer_cache, Activations query, bool packed) {
  const auto lane = static_cast<std::int32_t>(threadIdx.x) % warp_lanes;
  std::int32_t head = static_cast<std::int32_t>(blockIdx.y) * rope_warps + static_cast<std::int32_t>(threadIdx.x) / warp_lanes;
  if (head >= shape.heads + 2 * shape.kv_heads) return;
  const std::int32_t size = shape.head_size;
  const std::int64_t angles = static_cast<std::int64_t>(positions[this_row()]) * (size / 2);
  const bool is_query = head < shape.heads;
  const RopeHead rotated{.data = qkv.data + this_row() * qkv.stride + static_cast<std::int64_t>(head) * size,
                         .norm = is_query ? rope.query_norm : rope.key_norm,
                         .cosines = rope.cosines + angles,
                         .sines = rope.sines + angles,
                         .epsilon = rope.epsilon,
                         .half = size / 2,
                         .packed = packed};
  if (is_query) {
    Element* out = static_cast<Element*>(query.data) + this_row() * query.stride + static_cast<std::int64_t>(head) * size;
    return rotate_head(rotated, lane, out);
  }
  head -= shape.heads;
  if (head < shape.kv_heads) return rotate_head(rotated, lane, layer_cache + key_offset(shape, slots[this_row()], head));
  head -= shape.kv_heads;
  Element* value = layer_cache + key_offset(shape, slots[this_row()], head) + static_cast<std::int64_t>(kv_block_tokens) * size;
  copy_head(rotated.data, size, lane, packed, value);
}

void rope_and_store(cudaStream_t stream, DataType dtype, const CacheShape& shape, const Accumulators& qkv, const RopeInputs& rope,
                    const Batch& batch, void* layer_cache, const Activations& query) {
  CHECK(shape.head_size % 2 == 0 && qkv.columns == (shape.heads + 2 * shape.kv_heads) * shape.head_size, "columns=", qkv.columns);
  with_element(dtype, [&](auto type) {
    using Element = typename decltype(type)::Element;
    auto* cache = static_cast<Element*>(layer_cache);
    const std::int32_t half = shape.head_size / 2;
    const bool packed = holds_packs<rope_columns>(qkv.data, qkv.stride) && holds_packs<rope_columns>(rope.cosines, half) &&
                        holds_packs<rope_columns>(rope.sines, half) && holds_packs<rope_columns>(rope.query_norm, half) &&
                        holds_packs<rope_columns>(rope.key_norm, half) && holds_packs<rope_columns>(cache, half) &&
                        holds_packs<rope_columns>(static_cast<const Element*>(query.data), query.stride);
    launch(stream,
           {.blocks = static_cast<std::uint32_t>(qkv.count),
            .blocks_y = blocks_for(shape.heads + 2 * shape.kv_heads, rope_warps),
            .threads = rope_warps * warp_lanes},
           rope_and_store_kernel<Element>, shape, qkv, rope, batch.positions, batch.slots, cache, query, packed);
  });
}

// ---- poison_blocks

template <class Element>
__global__ void poison_blocks_kernel(const std::int32_t* blocks, std::int32_t block_elements, Element* layer_cache) {
  const std::int32_t at = first_column(1);
  if (at >= block_elements) return;
  const std::int64_t first = static_cast<std::int64_t>(blocks[this_row()]) * block_elements;
  layer_cache[first + at] = to_element<Element>(__uint_as_float(0x7FC00000U));
}

void poison_blocks(cudaStream_t stream, DataType dtype, const CacheShape& shape, const std::int32_t* blocks, std::int32_t count,
                   void* layer_cache) {
  with_element(dtype, [&](auto type) {
    using Element = typename decltype(type)::Element;
    const std::int32_t block_elements = shape.kv_heads * 2 * kv_block_tokens * shape.head_size;
    launch(stream, elementwise_shape(count, block_elements), poison_blocks_kernel<Element>, blocks, block_elements,
           static_cast<Element*>(layer_cache));
  });
}

}  // namespace rubato::engine::cuda
