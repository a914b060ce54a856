// SPDX-License-Identifier: Apache-2.0
// Attention from the paged cache: which kernel a model gets, what it needs once, and its launch. The arithmetic is in
// attention_tensor.cuh, attention_simt.cuh and attention_merge.cuh, the work list in kernels_attention_plan.cu.
#include <cmath>
#include <cstdint>
#include <string>
#include <type_traits>

#include "engine/cuda/attention_simt.cuh"
#include "engine/cuda/attention_tensor.cuh"
#include "engine/cuda/attention_work.h"
#include "engine/cuda/element.cuh"
#include "engine/cuda/kernels.h"
#include "engine/cuda/runtime.h"
#include "manifests/check.h"

namespace rubato::engine::cuda {
namespace {

struct AttentionKernel {
  void (*kernel)(AttentionInputs) = nullptr;
  AttentionTiling tiling;
  std::uint32_t threads = 0;
  std::size_t shared_bytes = 0;
};

template <class Element, int head_size>
AttentionKernel tensor_kernel() {
  using Tiling = TensorTiling<head_size>;
  return {.kernel = attend_tensor_kernel<Element, head_size>,
          .tiling = {.tile_rows = Tiling::tile_rows,
                     .unit_rows = strip_rows,
                     .blocks_per_multiprocessor = Tiling::blocks_per_multiprocessor},
          .threads = Tiling::threads,
          .shared_bytes = Tiling::shared_bytes};
}

template <class Element>
AttentionKernel simt_kernel(std::int32_t head_size) {
  using Item = SimtItem<Element>;
  return {.kernel = attend_simt_kernel<Element>,
          .tiling = {.tile_rows = Item::tile_rows,
                     .unit_rows = Item::tile_rows,
                     .blocks_per_multiprocessor = Item::blocks_per_multiprocessor},
          .threads = Item::threads,
          .shared_bytes = Item::control_bytes + static_cast<std::size_t>(Item::floats(head_size)) * sizeof(float)};
}

AttentionKernel choose_kernel(DataType dtype, std::int32_t head_size) {
  AttentionKernel chosen;
  with_element(dtype, [&](auto type) {
    using Element = typename decltype(type)::Element;
    if constexpr (!std::is_same_v<Element, float>) {
      switch (head_size) {
        case 64:
          chosen = tensor_kernel<Element, 64>();
          return;
        case 80:
          chosen = tensor_kernel<Element, 80>();
          return;
        case 96:
          chosen = tensor_kernel<Element, 96>();
          return;
        case 128:
          chosen = tensor_kernel<Element, 128>();
          return;
        case 256:
          chosen = tensor_kernel<Element, 256>();
          return;
        default:
          break;
      }
    }
    chosen = simt_kernel<Element>(head_size);
  });
  return chosen;
}

Unexpected refused(const char* what, std::int32_t value, const char* allowed) {
  return unexpected(ErrorCode::InvalidArgument, what,
                    std::string("attention: ") + what + " " + std::to_string(value) + " is not " + allowed);
}

/// Of a raw score, to the base 2: log2(e) times the plan's.
float score_scale(const AttentionPlan& plan) {
  constexpr double log2_e = 1.4426950408889634;
  if (plan.scale) return static_cast<float>(log2_e * static_cast<double>(*plan.scale));
  return static_cast<float>(log2_e / std::sqrt(static_cast<double>(plan.shape.head_size)));
}

}  // namespace

AttentionTiling attention_tiling(DataType dtype, std::int32_t head_size) {
  return choose_kernel(dtype, head_size).tiling;
}

Result<AttentionPlan> make_attention_plan(DataType dtype, const CacheShape& shape, std::int32_t max_tokens, std::int32_t max_rows,
                                          std::int32_t max_position, std::int32_t multiprocessors, std::byte* scratch) {
  if (shape.head_size < 2 || shape.head_size % 2 != 0 || shape.head_size > attention_head_size_max) {
    return refused("head_size", shape.head_size, "an even number from 2 to 1024");
  }
  if (shape.kv_heads < 1) return refused("kv_heads", shape.kv_heads, "at least 1");
  if (shape.heads < 1 || shape.heads % shape.kv_heads != 0) return refused("heads", shape.heads, "a multiple of kv_heads");
  CHECK(max_tokens > 0 && max_rows > 0 && max_position > 0 && multiprocessors > 0 && scratch != nullptr);
  const AttentionKernel chosen = choose_kernel(dtype, shape.head_size);
  if (auto allowed = allow_shared_memory(chosen.kernel, chosen.shared_bytes); !allowed) {
    return Unexpected(std::move(allowed).error());
  }
  AttentionPlan plan{.dtype = dtype,
                     .shape = shape,
                     .max_tokens = max_tokens,
                     .max_rows = max_rows,
                     .max_position = max_position,
                     .multiprocessors = multiprocessors,
                     .grid = multiprocessors * chosen.tiling.blocks_per_multiprocessor,
                     .partial_units = 0,
                     .scratch = scratch};
  plan.partial_units = attention_partial_units(plan);
  return plan;
}

void attention(cudaStream_t stream, const AttentionPlan& plan, const Batch& batch, const Activations& query,
               const void* layer_cache, const Activations& out) {
  const CacheShape& shape = plan.shape;
  // A query's pair of elements is one load.
  CHECK(query.columns == shape.heads * shape.head_size && out.columns == query.columns && query.stride % 2 == 0 &&
        out.stride % 2 == 0);
  const AttentionKernel chosen = choose_kernel(plan.dtype, shape.head_size);
  const AttentionInputs inputs{.scratch = attention_scratch(plan),
                               .blocks = batch.blocks,
                               .shape = shape,
                               .group = shape.heads / shape.kv_heads,
                               .scale = score_scale(plan),
                               .query = query,
                               .cache = layer_cache,
                               .out = out};
  launch(stream,
         {.blocks = static_cast<std::uint32_t>(plan.grid), .threads = chosen.threads, .shared_bytes = chosen.shared_bytes},
         chosen.kernel, inputs);
}

}  // namespace rubato::engine::cuda
