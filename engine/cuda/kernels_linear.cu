// SPDX-License-Identifier: Apache-2.0
// y = x W^T + bias. Each output is one chain of sums over the inputs in ascending order, sixteen at a time on tensor cores (BF16,
// F16) or one at a time (F32), then the bias. Tiles cut rows and outputs, never the inputs, so the tile may be chosen by the
// number of rows and no bit changes.
#include <type_traits>

#include "engine/cuda/element.cuh"
#include "engine/cuda/kernels.h"
#include "engine/cuda/linear_tiles.h"
#include "engine/cuda/mma.cuh"
#include "engine/cuda/runtime.h"
#include "manifests/check.h"

namespace rubato::engine::cuda {

/// What both kinds of kernel read and write.
template <class Element>
struct LinearOperands {
  const Element* x = nullptr;        // (rows, inputs)
  const Element* weights = nullptr;  // (outputs, inputs)
  const float* bias = nullptr;       // (outputs) or null
  std::int32_t rows = 0;
  std::int32_t outputs = 0;
  std::int32_t inputs = 0;
  std::int64_t x_stride = 0;
  std::int64_t out_stride = 0;
  bool x_packed = false;  // rows begin at multiples of 16 bytes
  bool weights_packed = false;
  bool out_packed = false;  // pairs of outputs can be stored together
};

/// How a block cuts a product: `rows` x `outputs` of it, `depth` inputs per stage of the pipeline.
template <int rows_, int outputs_, int depth_, int stages_, int warps_down_, int warps_across_>
struct TensorTile {
  static constexpr int rows = rows_;
  static constexpr int outputs = outputs_;
  static constexpr int depth = depth_;
  static constexpr int stages = stages_;
  static constexpr int warps_across = warps_across_;
  static constexpr int threads = warps_down_ * warps_across_ * warp_lanes;
  static constexpr int warp_rows = rows / warps_down_;
  static constexpr int warp_outputs = outputs / warps_across_;
  static constexpr int row_fragments = warp_rows / 16;
  static constexpr int output_fragments = warp_outputs / 8;
  // Rows of shared memory are an odd number of 16-byte units apart, so that the eight rows of a matrix load meet no bank twice.
  static constexpr int pitch = depth + 8;
  static constexpr int stage_elements = (rows + outputs) * pitch;
  static constexpr std::size_t shared_bytes = static_cast<std::size_t>(stages) * stage_elements * 2;
  static_assert(warp_rows % 16 == 0 && warp_outputs % 8 == 0 && depth % 16 == 0);
  static_assert((pitch / 8) % 2 == 1);
  static_assert(shared_bytes <= 99 * 1024, "sm_89 has no more");
};

// Few rows are bound by reading weights once: narrow tiles give every multiprocessor work at 4096 outputs, and the stages keep 32
// KiB of weights per block under way, about what latency times bandwidth asks of one Hopper multiprocessor.
using DecodeTile = TensorTile<16, 32, 128, 5, 1, 4>;
using SmallTile = TensorTile<64, 32, 64, 5, 2, 2>;
using MiddleTile = TensorTile<64, 64, 64, 4, 2, 2>;
// Many rows are bound by the tensor cores: each warp has 64 x 32 accumulators, each block loads a byte for 32 multiply-adds.
using LargeTile = TensorTile<128, 128, 32, 4, 2, 4>;

namespace {

/// Queues the copy of inputs [first, first + depth) of `count` matrix rows to shared memory. Rows past the last repeat it: their
/// results are never stored. Inputs past the last are zero.
template <class Tile, int count, class Element>
__device__ inline void load_tile(const Element* matrix, std::int64_t stride, bool packed, std::int32_t first_row,
                                 std::int32_t row_count, std::int32_t first, std::int32_t inputs, Element* shared) {
  constexpr int row_packs = Tile::depth / 8;
  for (int index = static_cast<int>(threadIdx.x); index < count * row_packs; index += Tile::threads) {
    const int row = index / row_packs;
    const std::int32_t column = first + index % row_packs * 8;
    const Element* from = matrix + min(first_row + row, row_count - 1) * stride + column;
    Element* to = shared + row * Tile::pitch + index % row_packs * 8;
    if (packed && column + 8 <= inputs) {
      copy_async_16(to, from);
    } else {
      Pack<Element, 8> pack;
#pragma unroll
      for (int i = 0; i < 8; ++i) pack.at[i] = column + i < inputs ? from[i] : to_element<Element>(0.0F);
      *reinterpret_cast<Pack<Element, 8>*>(to) = pack;
    }
  }
}

template <class Tile, class Element>
__device__ inline void load_stage(const LinearOperands<Element>& operands, std::int32_t stage, Element* shared) {
  Element* to = shared + stage % Tile::stages * Tile::stage_elements;
  const std::int32_t first = stage * Tile::depth;
  load_tile<Tile, Tile::rows>(operands.x, operands.x_stride, operands.x_packed,
                              static_cast<std::int32_t>(blockIdx.x) * Tile::rows, operands.rows, first, operands.inputs, to);
  load_tile<Tile, Tile::outputs>(operands.weights, operands.inputs, operands.weights_packed,
                                 static_cast<std::int32_t>(blockIdx.y) * Tile::outputs, operands.outputs, first, operands.inputs,
                                 to + Tile::rows * Tile::pitch);
}

/// The accumulators of one warp.
template <class Tile>
struct WarpSums {
  FragmentC at[Tile::row_fragments][Tile::output_fragments];
};

/// Sixteen inputs: x and weights point at this warp's first row of each and the first of the inputs.
template <class Tile, class Element>
__device__ inline void multiply_step(const Element* x, const Element* weights, int lane, WarpSums<Tile>& sums) {
  FragmentA a[Tile::row_fragments];
  FragmentB b[Tile::output_fragments];
#pragma unroll
  for (int i = 0; i < Tile::row_fragments; ++i) {
    load_matrix_x4(a[i], x + (i * 16 + lane % 16) * Tile::pitch + lane / 16 * 8);
  }
  if constexpr (Tile::output_fragments % 2 == 0) {
#pragma unroll
    for (int i = 0; i < Tile::output_fragments;
         i += 2) {  // one load brings two: matrices (n, k), (n, k + 8), (n + 8, k), (n + 8, k + 8)
      FragmentA two;
      load_matrix_x4(two, weights + (i * 8 + lane / 16 * 8 + lane % 8) * Tile::pitch + lane / 8 % 2 * 8);
      b[i] = FragmentB{{two.x[0], two.x[1]}};
      b[i + 1] = FragmentB{{two.x[2], two.x[3]}};
    }
  } else {
#pragma unroll
    for (int i = 0; i < Tile::output_fragments; ++i) {
      load_matrix_x2(b[i], weights + (i * 8 + lane % 8) * Tile::pitch + lane / 8 % 2 * 8);
    }
  }
#pragma unroll
  for (int i = 0; i < Tile::row_fragments; ++i) {
#pragma unroll
    for (int j = 0; j < Tile::output_fragments; ++j) mma_m16n8k16<Element>(sums.at[i][j], a[i], b[j]);
  }
}

/// Adds the bias to two neighbouring outputs of a row and stores those that exist.
template <class Element, class Out>
__device__ inline void store_pair(const LinearOperands<Element>& operands, std::int32_t row, std::int32_t output, float first,
                                  float second, Out* out) {
  if (row >= operands.rows || output >= operands.outputs) return;
  float values[2] = {first, second};
  if (operands.bias != nullptr) {
    values[0] = __fadd_rn(values[0], operands.bias[output]);
    if (output + 1 < operands.outputs) values[1] = __fadd_rn(values[1], operands.bias[output + 1]);
  }
  store_columns(values, out + row * operands.out_stride, output, operands.outputs, operands.out_packed);
}

template <class Tile, class Element, class Out>
__device__ inline void store_sums(const LinearOperands<Element>& operands, const WarpSums<Tile>& sums, std::int32_t first_row,
                                  std::int32_t first_output, int lane, Out* out) {
#pragma unroll
  for (int i = 0; i < Tile::row_fragments; ++i) {
#pragma unroll
    for (int j = 0; j < Tile::output_fragments; ++j) {
      const FragmentC& sum = sums.at[i][j];
      const std::int32_t row = first_row + i * 16 + lane / 4;
      const std::int32_t output = first_output + j * 8 + lane % 4 * 2;
      store_pair(operands, row, output, sum.x[0], sum.x[1], out);
      store_pair(operands, row + 8, output, sum.x[2], sum.x[3], out);
    }
  }
}

}  // namespace

/// Grid: x over rows, so that blocks that run together share weights; y over outputs.
template <class Tile, class Element, class Out>
__global__ void __launch_bounds__(Tile::threads) linear_tensor_kernel(LinearOperands<Element> operands, Out* out) {
  extern __shared__ __align__(16) unsigned char shared_bytes[];
  auto* const shared = reinterpret_cast<Element*>(shared_bytes);
  const int lane = static_cast<int>(threadIdx.x) % warp_lanes;
  const int warp = static_cast<int>(threadIdx.x) / warp_lanes;
  const int warp_row = warp / Tile::warps_across * Tile::warp_rows;
  const int warp_output = warp % Tile::warps_across * Tile::warp_outputs;
  const std::int32_t stage_count = (operands.inputs + Tile::depth - 1) / Tile::depth;
  WarpSums<Tile> sums{};

#pragma unroll
  for (int stage = 0; stage < Tile::stages - 1; ++stage) {
    if (stage < stage_count) load_stage<Tile>(operands, stage, shared);
    copy_async_commit();  // an empty group too, so that the number under way says which stage has arrived
  }
  for (std::int32_t stage = 0; stage < stage_count; ++stage) {
    copy_async_wait<Tile::stages - 2>();
    __syncthreads();  // this stage is there for all, and all have left the one that is overwritten next
    if (stage + Tile::stages - 1 < stage_count) load_stage<Tile>(operands, stage + Tile::stages - 1, shared);
    copy_async_commit();
    const Element* x = shared + stage % Tile::stages * Tile::stage_elements + warp_row * Tile::pitch;
    const Element* weights = shared + stage % Tile::stages * Tile::stage_elements + (Tile::rows + warp_output) * Tile::pitch;
    const std::int32_t left = operands.inputs - stage * Tile::depth;
#pragma unroll
    for (int step = 0; step < Tile::depth; step += 16) {
      if (step < left) multiply_step<Tile>(x + step, weights + step, lane, sums);  // as many steps in every tile
    }
  }
  copy_async_wait<0>();
  store_sums(operands, sums, static_cast<std::int32_t>(blockIdx.x) * Tile::rows + warp_row,
             static_cast<std::int32_t>(blockIdx.y) * Tile::outputs + warp_output, lane, out);
}

// ---- F32

/// Each thread sums thread_rows x thread_outputs results.
template <int thread_rows_, int thread_outputs_, int threads_down_, int threads_across_>
struct ScalarTile {
  static constexpr int thread_rows = thread_rows_;
  static constexpr int thread_outputs = thread_outputs_;
  static constexpr int threads_across = threads_across_;
  static constexpr int threads = threads_down_ * threads_across_;
  static constexpr int rows = thread_rows * threads_down_;
  static constexpr int outputs = thread_outputs * threads_across;
  static constexpr int depth = 16;
  static constexpr int pitch = depth + 1;  // neighbouring rows meet different banks
  static constexpr std::size_t shared_bytes = (rows + outputs) * pitch * sizeof(float);
  static_assert(thread_outputs % 2 == 0);
};
using ScalarDecodeTile = ScalarTile<1, 2, 4, 32>;
using ScalarLargeTile = ScalarTile<4, 4, 16, 16>;

namespace {

template <class Tile, int count>
__device__ inline void load_scalar_tile(const float* matrix, std::int64_t stride, bool packed, std::int32_t first_row,
                                        std::int32_t row_count, std::int32_t first, std::int32_t inputs, float* shared) {
  constexpr int row_packs = Tile::depth / 4;
  for (int index = static_cast<int>(threadIdx.x); index < count * row_packs; index += Tile::threads) {
    const int row = index / row_packs;
    const int column = index % row_packs * 4;
    float values[4];
    load_columns(matrix + min(first_row + row, row_count - 1) * stride, first + column, inputs, packed, values);
#pragma unroll
    for (int i = 0; i < 4; ++i) shared[row * Tile::pitch + column + i] = values[i];
  }
}

/// One stage: inputs in ascending order into each sum.
template <class Tile>
__device__ inline void multiply_scalars(const float* x, const float* weights, std::int32_t inputs,
                                        float (&sums)[Tile::thread_rows][Tile::thread_outputs]) {
  for (std::int32_t input = 0; input < inputs; ++input) {
#pragma unroll
    for (int i = 0; i < Tile::thread_rows; ++i) {
#pragma unroll
      for (int j = 0; j < Tile::thread_outputs; ++j) {
        // Outputs of a thread stand threads_across apart in pairs, see linear_scalar_kernel.
        const int output = j / 2 * 2 * Tile::threads_across + j % 2;
        sums[i][j] = fmaf(x[i * Tile::pitch + input], weights[output * Tile::pitch + input], sums[i][j]);
      }
    }
  }
}

}  // namespace

template <class Tile>
__global__ void __launch_bounds__(Tile::threads) linear_scalar_kernel(LinearOperands<float> operands, float* out) {
  extern __shared__ __align__(16) unsigned char shared_bytes[];
  auto* const x = reinterpret_cast<float*>(shared_bytes);
  float* const weights = x + Tile::rows * Tile::pitch;
  const std::int32_t block_row = static_cast<std::int32_t>(blockIdx.x) * Tile::rows;
  const std::int32_t block_output = static_cast<std::int32_t>(blockIdx.y) * Tile::outputs;
  const int row = static_cast<int>(threadIdx.x) / Tile::threads_across * Tile::thread_rows;
  const int output = static_cast<int>(threadIdx.x) % Tile::threads_across * 2;
  float sums[Tile::thread_rows][Tile::thread_outputs] = {};
  for (std::int32_t first = 0; first < operands.inputs; first += Tile::depth) {
    __syncthreads();
    load_scalar_tile<Tile, Tile::rows>(operands.x, operands.x_stride, operands.x_packed, block_row, operands.rows, first,
                                       operands.inputs, x);
    load_scalar_tile<Tile, Tile::outputs>(operands.weights, operands.inputs, operands.weights_packed, block_output,
                                          operands.outputs, first, operands.inputs, weights);
    __syncthreads();
    multiply_scalars<Tile>(x + row * Tile::pitch, weights + output * Tile::pitch, min(Tile::depth, operands.inputs - first),
                           sums);
  }
#pragma unroll
  for (int i = 0; i < Tile::thread_rows; ++i) {
#pragma unroll
    for (int j = 0; j < Tile::thread_outputs; j += 2) {
      store_pair(operands, block_row + row + i, block_output + output + j * Tile::threads_across, sums[i][j], sums[i][j + 1],
                 out);
    }
  }
}

// ---- choice and launch

namespace {

std::uint32_t tiles_of(std::int32_t count, int size) {
  return static_cast<std::uint32_t>((count + size - 1) / size);
}

template <class Tile, class Element, class Out>
void launch_tensor(cudaStream_t stream, const LinearOperands<Element>& operands, Out* out) {
  launch(stream,
         {.blocks = tiles_of(operands.rows, Tile::rows),
          .blocks_y = tiles_of(operands.outputs, Tile::outputs),
          .threads = Tile::threads,
          .shared_bytes = Tile::shared_bytes},
         linear_tensor_kernel<Tile, Element, Out>, operands, out);
}

template <class Element, class Out>
void launch_tensor_tile(cudaStream_t stream, LinearTile tile, const LinearOperands<Element>& operands, Out* out) {
  switch (tile) {
    case LinearTile::Decode:
      return launch_tensor<DecodeTile>(stream, operands, out);
    case LinearTile::Small:
      return launch_tensor<SmallTile>(stream, operands, out);
    case LinearTile::Middle:
      return launch_tensor<MiddleTile>(stream, operands, out);
    case LinearTile::Large:
      return launch_tensor<LargeTile>(stream, operands, out);
  }
}

template <class Tile>
void launch_scalar(cudaStream_t stream, const LinearOperands<float>& operands, float* out) {
  launch(stream,
         {.blocks = tiles_of(operands.rows, Tile::rows),
          .blocks_y = tiles_of(operands.outputs, Tile::outputs),
          .threads = Tile::threads,
          .shared_bytes = Tile::shared_bytes},
         linear_scalar_kernel<Tile>, operands, out);
}

template <class Element>
LinearOperands<Element> operands_of(const void* weights, const float* bias, std::int32_t outputs, const Activations& x) {
  constexpr int count = pack_values<Element>;
  LinearOperands<Element> operands{.x = static_cast<const Element*>(x.data),
                                   .weights = static_cast<const Element*>(weights),
                                   .bias = bias,
                                   .rows = x.count,
                                   .outputs = outputs,
                                   .inputs = x.columns,
                                   .x_stride = x.stride};
  operands.x_packed = holds_packs<count>(operands.x, x.stride);
  operands.weights_packed = holds_packs<count>(operands.weights, x.columns);
  return operands;
}

template <class Element, class Out>
void linear_into(cudaStream_t stream, LinearTile tile, LinearOperands<Element> operands, const Rows<void*>& out) {
  auto* const data = static_cast<Out*>(out.data);
  operands.out_stride = out.stride;
  operands.out_packed = holds_packs<2>(data, out.stride);
  if constexpr (std::is_same_v<Element, float>) {
    if (tile == LinearTile::Decode) return launch_scalar<ScalarDecodeTile>(stream, operands, data);
    launch_scalar<ScalarLargeTile>(stream, operands, data);
  } else {
    launch_tensor_tile(stream, tile, operands, data);
  }
}

template <class Tile, class Element, class Out>
Result<void> allow_tile() {
  return allow_shared_memory(linear_tensor_kernel<Tile, Element, Out>, Tile::shared_bytes);
}

template <class Element, class Out>
Result<void> allow_tiles() {
  for (const auto allow : {&allow_tile<DecodeTile, Element, Out>, &allow_tile<SmallTile, Element, Out>,
                           &allow_tile<MiddleTile, Element, Out>, &allow_tile<LargeTile, Element, Out>}) {
    if (Result<void> allowed = allow(); !allowed) return allowed;
  }
  return {};
}

}  // namespace

LinearTile choose_linear_tile(DataType dtype, std::int32_t rows, std::int32_t outputs) {
  // A large tile only where it leaves no multiprocessor idle; any large GPU has about this many.
  constexpr std::int64_t blocks_wanted = 128;
  const auto blocks = [&](int tile_rows, int tile_outputs) {
    return std::int64_t{tiles_of(rows, tile_rows)} * tiles_of(outputs, tile_outputs);
  };
  if (rows <= DecodeTile::rows) return LinearTile::Decode;
  if (dtype == DataType::Float32) return LinearTile::Large;
  if (rows > MiddleTile::rows && blocks(LargeTile::rows, LargeTile::outputs) >= blocks_wanted) return LinearTile::Large;
  return blocks(MiddleTile::rows, MiddleTile::outputs) >= blocks_wanted ? LinearTile::Middle : LinearTile::Small;
}

void linear_in_tile(cudaStream_t stream, LinearTile tile, DataType dtype, const void* weights, const float* bias,
                    std::int32_t outputs, const Activations& x, DataType out_dtype, const Rows<void*>& out) {
  CHECK(out.columns == outputs && out.count == x.count, "outputs=", outputs, " columns=", out.columns, " rows=", x.count, " and ",
        out.count);
  CHECK(out_dtype == DataType::Float32 || out_dtype == dtype, "out_dtype=", static_cast<int>(out_dtype));
  with_element(dtype, [&](auto type) {
    using Element = typename decltype(type)::Element;
    const auto operands = operands_of<Element>(weights, bias, outputs, x);
    if (out_dtype == DataType::Float32) return linear_into<Element, float>(stream, tile, operands, out);
    linear_into<Element, Element>(stream, tile, operands, out);
  });
}

void linear(cudaStream_t stream, DataType dtype, const void* weights, const float* bias, std::int32_t outputs,
            const Activations& x, DataType out_dtype, const Rows<void*>& out) {
  linear_in_tile(stream, choose_linear_tile(dtype, x.count, outputs), dtype, weights, bias, outputs, x, out_dtype, out);
}

Result<void> prepare_linear() {
  for (const auto allow : {&allow_tiles<__nv_bfloat16, float>, &allow_tiles<__nv_bfloat16, __nv_bfloat16>,
                           &allow_tiles<__half, float>, &allow_tiles<__half, __half>}) {
    if (Result<void> allowed = allow(); !allowed) return allowed;
  }
  return {};
}

}  // namespace rubato::engine::cuda
