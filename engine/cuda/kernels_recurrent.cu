// SPDX-License-Identifier: Apache-2.0
// Mamba2 layers: the causal convolution, the recurrence, the gated norm; and relu squared, which belongs to some of their
// hybrids. The recurrence is computed as it is defined, token after token, by one kernel for decode and prefill: it reads a state
// once, keeps it in registers and writes it once. Which thread holds which element of a state, and with it the order of every
// sum, depends on the model alone.
#include <algorithm>
#include <string>

#include "engine/cuda/element.cuh"
#include "engine/cuda/kernels.h"
#include "engine/cuda/row_launch.h"
#include "engine/cuda/runtime.h"
#include "manifests/check.h"

namespace rubato::engine::cuda {
namespace {

constexpr std::int32_t window_max = 8;
constexpr std::int32_t state_size_max = 256;
constexpr std::int64_t grid_y_max = 65535;
constexpr std::int32_t convolve_threads = 128;
constexpr std::int32_t scan_slice = 32;  // elements of a head that a full block of the scan has

// ---- functions: one for all paths

/// log(1 + x) for x in 0..1, within 3 units in the last place: 2 artanh(x / (2 + x)), whose argument is at most 1/3.
__device__ inline float log_one_plus(float x) {
  const float z = __fdiv_rn(x, __fadd_rn(2.0F, x));
  const float square = __fmul_rn(z, z);
  float sum = 1.0F / 17.0F;  // the rest is below 1e-9
  sum = fmaf(sum, square, 1.0F / 15.0F);
  sum = fmaf(sum, square, 1.0F / 13.0F);
  sum = fmaf(sum, square, 1.0F / 11.0F);
  sum = fmaf(sum, square, 1.0F / 9.0F);
  sum = fmaf(sum, square, 1.0F / 7.0F);
  sum = fmaf(sum, square, 1.0F / 5.0F);
  sum = fmaf(sum, square, 1.0F / 3.0F);
  sum = fmaf(sum, square, 1.0F);
  return __fmul_rn(__fadd_rn(z, z), sum);
}

/// log(1 + e^x) without overflow. NaN stays NaN.
__device__ inline float softplus(float x) {
  const float rest = log_one_plus(exponential(-fabsf(x)));
  return x > 0.0F ? __fadd_rn(x, rest) : rest;
}

/// Unlike fminf and fmaxf, NaN stays NaN.
__device__ inline float clamped(float x, float low, float high) {
  return x < low ? low : x > high ? high : x;
}

}  // namespace

Result<void> check_recurrent(const StateShape& shape) {
  const auto refused = [](const char* what, std::int32_t value, const std::string& allowed) {
    return unexpected(ErrorCode::InvalidArgument, what,
                      std::string("recurrent layers: ") + what + " " + std::to_string(value) + " is not " + allowed);
  };
  if (shape.head_size < 1 || shape.head_size > 1024) return refused("head_size", shape.head_size, "1 to 1024");
  const std::int64_t heads_max = grid_y_max / blocks_for(shape.head_size, scan_slice);
  if (shape.heads < 1 || shape.heads > heads_max) return refused("heads", shape.heads, "1 to " + std::to_string(heads_max));
  if (shape.groups < 1 || shape.heads % shape.groups != 0) return refused("groups", shape.groups, "a divisor of heads");
  if (shape.state_size < 1 || shape.state_size > state_size_max)
    return refused("state_size", shape.state_size, "1 to " + std::to_string(state_size_max));
  if (shape.window < 1 || shape.window > window_max)
    return refused("window", shape.window, "1 to " + std::to_string(window_max) + " (of the convolution)");
  if (shape.channels > grid_y_max * convolve_threads)
    return refused("channels", shape.channels, "up to " + std::to_string(grid_y_max * convolve_threads));
  return {};
}

// ---- convolve
//
// Blocks of a row own its states for their channels: they read the inputs before the row, compute its first piece of tokens and,
// last, write the inputs that the states end with, from what they read and from `projected`, which nobody writes. All other
// tokens see no input from before their row and belong to blocks over pieces of the bucket, which touch no state. So no state is
// read and written by two blocks.

namespace {

constexpr std::int32_t convolve_tokens = 16;  // of a piece; independent loads, so that many are on their way at once

template <int window>
struct Taps {
  float at[window];
  float bias;
};

template <int window>
__device__ inline Taps<window> load_taps(const RecurrentLayer& layer, std::int32_t channel) {
  Taps<window> taps;
#pragma unroll
  for (int k = 0; k < window; ++k) taps.at[k] = layer.taps[static_cast<std::int64_t>(channel) * window + k];
  taps.bias = layer.taps_bias[channel];
  return taps;
}

/// The last window - 1 inputs of one channel, oldest first, and what is done with the next one.
template <int window>
struct Inputs {
  float at[window];  // [window - 1] is the next one's place

  __device__ inline float next(const Taps<window>& taps, float input) {
    at[window - 1] = input;
    float sum = taps.bias;
#pragma unroll
    for (int k = 0; k < window; ++k) sum = fmaf(taps.at[k], at[k], sum);
#pragma unroll
    for (int k = 0; k + 1 < window; ++k) at[k] = at[k + 1];
    return silu(sum);
  }
};

/// One channel's column of a bucket.
struct Column {
  const float* in = nullptr;
  std::int64_t in_stride = 0;
  float* out = nullptr;
  std::int64_t out_stride = 0;
};

/// Tokens [first, first + count), count <= convolve_tokens, going on from inputs.
template <int window>
__device__ inline void convolve_piece(const Column& column, const Taps<window>& taps, std::int32_t first, std::int32_t count,
                                      Inputs<window>& inputs) {
  const float* const in = column.in + first * column.in_stride;
  float* const out = column.out + first * column.out_stride;
  float values[convolve_tokens];
#pragma unroll
  for (int i = 0; i < convolve_tokens; ++i) values[i] = i < count ? in[i * column.in_stride] : 0.0F;
#pragma unroll
  for (int i = 0; i < convolve_tokens; ++i) {
    if (i < count) out[i * column.out_stride] = inputs.next(taps, values[i]);
  }
}

/// What one channel's states hold after `tokens` tokens of the row: its last window - 1 inputs, `before` those from before it.
template <int window>
__device__ inline void store_inputs(const Column& column, std::int32_t row_first, std::int32_t tokens,
                                    const Inputs<window>& before, float* state, std::int32_t channels) {
#pragma unroll
  for (int k = 0; k + 1 < window; ++k) {
    const std::int32_t token = tokens - (window - 1) + k;  // of the row; negative: before it
    float input = 0.0F;
    if (token >= 0) {
      input = column.in[(row_first + token) * column.in_stride];
    } else {
#pragma unroll
      for (int earlier = 0; earlier + 1 < window; ++earlier) {
        if (earlier == window - 1 + token) input = before.at[earlier];
      }
    }
    state[static_cast<std::int64_t>(k) * channels] = input;
  }
}

template <int window>
__device__ inline void convolve_row(const RecurrentLayer& layer, const Batch& batch, std::int32_t row, std::int32_t channel,
                                    const Column& column) {
  if (row >= batch.counts->rows) return;
  const StateShape& shape = layer.shape;
  const std::int32_t first = batch.row_first[row];
  const std::int32_t count = batch.row_first[row + 1] - first;
  const std::int32_t from = batch.state_from[row];
  const Taps<window> taps = load_taps<window>(layer, channel);
  Inputs<window> before{};
  if (from != no_state) {
    const float* const state = layer.states + from * shape.slot_stride + channel;
#pragma unroll
    for (int k = 0; k + 1 < window; ++k) before.at[k] = state[static_cast<std::int64_t>(k) * shape.channels];
  }
  Inputs<window> inputs = before;
  convolve_piece(column, taps, first, min(count, convolve_tokens), inputs);
  const std::int32_t save = batch.state_save[row];
  if (save != no_state) {
    store_inputs(column, first, batch.state_save_tokens[row], before, layer.states + save * shape.slot_stride + channel,
                 shape.channels);
  }
  store_inputs(column, first, count, before, layer.states + batch.state_to[row] * shape.slot_stride + channel, shape.channels);
}

/// Tokens of one piece of the bucket that do not belong to the first piece of their row. All of them are of the row that the
/// piece begins with: the first piece of a row that begins later in it, or with it, reaches to its end.
template <int window>
__device__ inline void convolve_bucket(const RecurrentLayer& layer, const Batch& batch, std::int32_t piece, std::int32_t channel,
                                       const Column& column) {
  static_assert(convolve_tokens >= window - 1);
  const std::int32_t begin = piece * convolve_tokens;
  const std::int32_t end = min(begin + convolve_tokens, batch.counts->tokens);
  if (begin >= end) return;
  const std::int32_t row_first = batch.token_first[begin];
  const std::int32_t first = max(begin, row_first + convolve_tokens);
  std::int32_t count = 0;
  for (std::int32_t token = first; token < end; ++token) count += batch.token_first[token] == row_first ? 1 : 0;
  if (count == 0) return;
  Inputs<window> inputs{};
#pragma unroll
  for (int k = 0; k + 1 < window; ++k) inputs.at[k] = column.in[(first - (window - 1) + k) * column.in_stride];
  convolve_piece(column, load_taps<window>(layer, channel), first, count, inputs);
}

}  // namespace

template <int window>
__global__ void __launch_bounds__(convolve_threads)
    convolve_kernel(RecurrentLayer layer, Batch batch, std::int32_t rows, Accumulators projected, Accumulators out) {
  const auto channel = static_cast<std::int32_t>(blockIdx.y * convolve_threads + threadIdx.x);
  if (channel >= layer.shape.channels) return;
  const Column column{.in = projected.data + layer.shape.inner + channel,
                      .in_stride = projected.stride,
                      .out = out.data + channel,
                      .out_stride = out.stride};
  const auto unit = static_cast<std::int32_t>(blockIdx.x);
  if (unit < rows) return convolve_row<window>(layer, batch, unit, channel, column);
  convolve_bucket<window>(layer, batch, unit - rows + 1, channel, column);
}

namespace {

template <int window>
void queue_convolve(cudaStream_t stream, const RecurrentLayer& layer, const Batch& batch, const Accumulators& projected,
                    const Accumulators& out) {
  if constexpr (window < window_max) {
    if (layer.shape.window != window) return queue_convolve<window + 1>(stream, layer, batch, projected, out);
  }
  const std::int32_t rows = std::min(projected.count, layer.max_rows);
  // The first piece of the bucket is the first piece of a row.
  const std::uint32_t pieces = blocks_for(projected.count, convolve_tokens) - 1;
  launch(stream,
         {.blocks = static_cast<std::uint32_t>(rows) + pieces,
          .blocks_y = blocks_for(layer.shape.channels, convolve_threads),
          .threads = convolve_threads},
         convolve_kernel<window>, layer, batch, rows, projected, out);
}

}  // namespace

void convolve(cudaStream_t stream, const RecurrentLayer& layer, const Batch& batch, const Accumulators& projected,
              const Accumulators& out) {
  CHECK(projected.columns == layer.shape.inner + layer.shape.channels + layer.shape.heads, "columns=", projected.columns);
  CHECK(out.columns == layer.shape.channels && out.count == projected.count, "columns=", out.columns, " rows=", out.count);
  queue_convolve<1>(stream, layer, batch, projected, out);
}

// ---- scan
//
// A block has a slice of one head of one row: eight lanes share the state of an element of the head, each with packs of four n's
// in registers; lane l of them has n = 32 k + 4 l + i. The sum over n: each lane adds over k for each i, then over i in pairs,
// then the lanes in a butterfly. Where the state ends short of 32 k, the rest is zeros. B, C and x of a tile of tokens stand in
// shared memory, and so do the results until the tile is done.

namespace {

constexpr int scan_lanes = 8;  // that share an element's state
constexpr int scan_pack = 4;   // n's side by side: 16 bytes
constexpr int scan_span = scan_lanes * scan_pack;
constexpr int scan_elements = 2;  // of the head, per thread: each B and C is read once for both
constexpr std::int32_t scan_threads_max = 128;

/// Elements of a head that a block of so many threads has.
__host__ __device__ inline std::int32_t slice_elements(std::int32_t threads) {
  return threads / scan_lanes * scan_elements;
}

/// Tokens of a tile: what fits into 48 KiB for either length.
template <int packs>
constexpr std::int32_t tile_tokens = packs > 4 ? 16 : 32;

/// A tile in shared memory.
template <int packs>
struct ScanTile {
  static constexpr std::int32_t tokens = tile_tokens<packs>;
  static constexpr std::int32_t padded = packs * scan_span;  // n's, with zeros behind the state's
  float* b;                                                  // [tokens][padded]
  float* c;                                                  // [tokens][padded]
  float* x;                                                  // [tokens][slice]
  float* y;                                                  // [tokens][slice]
  float* time_steps;                                         // [tokens]
  float* decays;                                             // [tokens]

  __device__ ScanTile(unsigned char* bytes, std::int32_t slice)
      : b(reinterpret_cast<float*>(bytes)),
        c(b + tokens * padded),
        x(c + tokens * padded),
        y(x + tokens * slice),
        time_steps(y + tokens * slice),
        decays(time_steps + tokens) {}
  static std::size_t bytes(std::int32_t slice) {
    return static_cast<std::size_t>(2 * tokens * (padded + slice) + 2 * tokens) * sizeof(float);
  }
};

/// What a block works on.
struct ScanSlice {
  std::int32_t head = 0;
  std::int32_t first = 0;     // element of the head
  std::int32_t elements = 0;  // of this slice that the head has
  std::int32_t slice = 0;     // elements a full one has
};

struct ScanOperands {
  Accumulators projected;
  Accumulators convolved;
  Accumulators out;
  bool packed = false;  // states lie in whole packs
};

template <int packs>
struct ScanState {
  float at[scan_elements][packs][scan_pack];

  __device__ inline void load(const float* states, const ScanSlice& slice, std::int32_t state_size, bool packed) {
    for_each(slice, [&](int element, int pack, std::int64_t row, std::int32_t column) {
      load_columns(states + row * state_size, column, state_size, packed, at[element][pack]);
    });
  }
  __device__ inline void store(float* states, const ScanSlice& slice, std::int32_t state_size, bool packed) const {
    for_each(slice, [&](int element, int pack, std::int64_t row, std::int32_t column) {
      store_columns(at[element][pack], states + row * state_size, column, state_size, packed);
    });
  }

 private:
  template <class Body>
  __device__ static inline void for_each(const ScanSlice& slice, const Body& body) {
    const auto lane = static_cast<std::int32_t>(threadIdx.x) % scan_lanes;
    const auto group = static_cast<std::int32_t>(threadIdx.x) / scan_lanes;
#pragma unroll
    for (int element = 0; element < scan_elements; ++element) {
      const std::int32_t of_slice = group * scan_elements + element;
      if (of_slice >= slice.elements) continue;
#pragma unroll
      for (int pack = 0; pack < packs; ++pack) body(element, pack, slice.first + of_slice, pack * scan_span + lane * scan_pack);
    }
  }
};

/// Brings `count` tokens from `first` on into the tile.
template <int packs>
__device__ inline void stage_tile(const RecurrentLayer& layer, const ScanOperands& operands, const ScanSlice& slice,
                                  std::int32_t first, std::int32_t count, const ScanTile<packs>& tile) {
  const StateShape& shape = layer.shape;
  const auto threads = static_cast<std::int32_t>(blockDim.x);
  const auto thread = static_cast<std::int32_t>(threadIdx.x);
  const std::int32_t group = slice.head / (shape.heads / shape.groups);
  const std::int32_t b_at = shape.inner + group * shape.state_size;
  const std::int32_t c_at = b_at + shape.groups * shape.state_size;
  for (std::int32_t at = thread; at < count * tile.padded; at += threads) {
    const std::int32_t n = at % tile.padded;
    const float* const row = operands.convolved.data + (first + at / tile.padded) * operands.convolved.stride;
    tile.b[at] = n < shape.state_size ? row[b_at + n] : 0.0F;
    tile.c[at] = n < shape.state_size ? row[c_at + n] : 0.0F;
  }
  const std::int32_t x_at = slice.head * shape.head_size + slice.first;
  for (std::int32_t at = thread; at < count * slice.slice; at += threads) {
    const std::int32_t element = at % slice.slice;
    const float* const row = operands.convolved.data + (first + at / slice.slice) * operands.convolved.stride;
    tile.x[at] = element < slice.elements ? row[x_at + element] : 0.0F;
  }
  for (std::int32_t token = thread; token < count; token += threads) {
    const float raw =
        operands.projected.data[(first + token) * operands.projected.stride + shape.inner + shape.channels + slice.head];
    const float step =
        clamped(softplus(__fadd_rn(raw, layer.time_step_bias[slice.head])), layer.time_step_min, layer.time_step_max);
    tile.time_steps[token] = step;
    tile.decays[token] = exponential(-__fmul_rn(exponential(layer.log_decay[slice.head]), step));
  }
}

/// One token of one element of the head, for the eight lanes that share it: the state's next value, and its product with C.
template <int packs>
__device__ inline float advance(float (&state)[packs][scan_pack], float decay, float input, const float* b, const float* c) {
  float sums[scan_pack] = {};
#pragma unroll
  for (int pack = 0; pack < packs; ++pack) {
    const auto bs = *reinterpret_cast<const Pack<float, scan_pack>*>(b + pack * scan_span);
    const auto cs = *reinterpret_cast<const Pack<float, scan_pack>*>(c + pack * scan_span);
#pragma unroll
    for (int i = 0; i < scan_pack; ++i) {
      state[pack][i] = fmaf(decay, state[pack][i], __fmul_rn(input, bs.at[i]));
      sums[i] = fmaf(state[pack][i], cs.at[i], sums[i]);
    }
  }
  float sum = __fadd_rn(__fadd_rn(sums[0], sums[1]), __fadd_rn(sums[2], sums[3]));
#pragma unroll
  for (int offset = scan_lanes / 2; offset > 0; offset /= 2) {
    sum = __fadd_rn(sum, __shfl_xor_sync(all_lanes, sum, offset));
  }
  return sum;
}

template <int packs>
__device__ inline void scan_tile(const ScanTile<packs>& tile, std::int32_t slice, std::int32_t count, float skip,
                                 ScanState<packs>& state) {
  const auto lane = static_cast<std::int32_t>(threadIdx.x) % scan_lanes;
  const std::int32_t first = static_cast<std::int32_t>(threadIdx.x) / scan_lanes * scan_elements;
#pragma unroll 2
  for (std::int32_t token = 0; token < count; ++token) {
    const float step = tile.time_steps[token];
    const float decay = tile.decays[token];
    const float* const b = tile.b + token * tile.padded + lane * scan_pack;
    const float* const c = tile.c + token * tile.padded + lane * scan_pack;
#pragma unroll
    for (int element = 0; element < scan_elements; ++element) {
      const std::int32_t at = token * slice + first + element;
      const float x = tile.x[at];
      const float sum = advance<packs>(state.at[element], decay, __fmul_rn(step, x), b, c);
      if (lane == 0) tile.y[at] = fmaf(skip, x, sum);
    }
  }
}

}  // namespace

template <int packs>
__global__ void __launch_bounds__(scan_threads_max) scan_kernel(RecurrentLayer layer, Batch batch, ScanOperands operands) {
  extern __shared__ __align__(16) unsigned char shared_bytes[];
  const auto row = static_cast<std::int32_t>(blockIdx.x);
  if (row >= batch.counts->rows) return;
  const StateShape& shape = layer.shape;
  const std::int32_t full = slice_elements(static_cast<std::int32_t>(blockDim.x));
  const std::int32_t slices = (shape.head_size + full - 1) / full;
  ScanSlice slice{.head = static_cast<std::int32_t>(blockIdx.y) / slices, .slice = full};
  slice.first = static_cast<std::int32_t>(blockIdx.y) % slices * full;
  slice.elements = min(full, shape.head_size - slice.first);
  const ScanTile<packs> tile(shared_bytes, full);

  // This block alone reads and writes its slice of the row's states.
  float* const states = layer.states + shape.scan_at + static_cast<std::int64_t>(slice.head) * shape.head_size * shape.state_size;
  ScanState<packs> state{};
  const std::int32_t from = batch.state_from[row];
  if (from != no_state) state.load(states + from * shape.slot_stride, slice, shape.state_size, operands.packed);
  const std::int32_t first = batch.row_first[row];
  const std::int32_t count = batch.row_first[row + 1] - first;
  const std::int32_t save = batch.state_save[row];
  const std::int32_t save_tokens = save == no_state ? 0 : batch.state_save_tokens[row];
  const float skip = layer.skip[slice.head];
  for (std::int32_t done = 0; done < count;) {
    std::int32_t tokens = min(tile.tokens, count - done);
    if (save_tokens > done) tokens = min(tokens, save_tokens - done);  // a snapshot is taken between two tiles
    stage_tile(layer, operands, slice, first + done, tokens, tile);
    __syncthreads();
    scan_tile(tile, full, tokens, skip, state);
    __syncthreads();
    for (auto at = static_cast<std::int32_t>(threadIdx.x); at < tokens * full; at += static_cast<std::int32_t>(blockDim.x)) {
      const std::int32_t element = at % full;
      if (element >= slice.elements) continue;
      float* const out = operands.out.data + (first + done + at / full) * operands.out.stride;
      out[slice.head * shape.head_size + slice.first + element] = tile.y[at];
    }
    done += tokens;
    if (done == save_tokens) state.store(states + save * shape.slot_stride, slice, shape.state_size, operands.packed);
  }
  state.store(states + batch.state_to[row] * shape.slot_stride, slice, shape.state_size, operands.packed);
}

namespace {

template <int packs>
void queue_scan(cudaStream_t stream, const RecurrentLayer& layer, const Batch& batch, const ScanOperands& operands) {
  const StateShape& shape = layer.shape;
  const std::int64_t lanes = std::int64_t{blocks_for(shape.head_size, scan_elements)} * scan_lanes;
  const auto threads =
      static_cast<std::uint32_t>(std::min<std::int64_t>(scan_threads_max, (lanes + warp_lanes - 1) / warp_lanes * warp_lanes));
  const std::int32_t slice = slice_elements(static_cast<std::int32_t>(threads));
  const std::int64_t slices = std::int64_t{shape.heads} * blocks_for(shape.head_size, slice);
  CHECK(slices <= grid_y_max, "slices=", slices);
  launch(stream,
         {.blocks = static_cast<std::uint32_t>(std::min(operands.projected.count, layer.max_rows)),
          .blocks_y = static_cast<std::uint32_t>(slices),
          .threads = threads,
          .shared_bytes = ScanTile<packs>::bytes(slice)},
         scan_kernel<packs>, layer, batch, operands);
}

}  // namespace

void scan(cudaStream_t stream, const RecurrentLayer& layer, const Batch& batch, const Accumulators& projected,
          const Accumulators& convolved, const Accumulators& out) {
  const StateShape& shape = layer.shape;
  CHECK(projected.columns == shape.inner + shape.channels + shape.heads, "columns=", projected.columns);
  CHECK(convolved.columns == shape.channels && out.columns == shape.inner, "convolved=", convolved.columns, " out=", out.columns);
  CHECK(convolved.count == projected.count && out.count == projected.count);
  const ScanOperands operands{.projected = projected,
                              .convolved = convolved,
                              .out = out,
                              .packed = holds_packs<scan_pack>(layer.states, shape.state_size) &&
                                        shape.scan_at % scan_pack == 0 && shape.slot_stride % scan_pack == 0};
  if (shape.state_size <= scan_span) return queue_scan<1>(stream, layer, batch, operands);
  if (shape.state_size <= 2 * scan_span) return queue_scan<2>(stream, layer, batch, operands);
  if (shape.state_size <= 4 * scan_span) return queue_scan<4>(stream, layer, batch, operands);
  queue_scan<8>(stream, layer, batch, operands);
}

}  // namespace rubato::engine::cuda
