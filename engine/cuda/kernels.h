// SPDX-License-Identifier: Apache-2.0
// What queues the CUDA engine's own kernels. Each function queues its kernels on the stream and returns; none allocates, waits or
// reads the device, so all may run under graph capture. Bits: what engine/ops.h asks of every Ops. Launch shapes depend on the
// bucket (`tokens`, `rows`) and the model alone, never on the batch's contents.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <optional>

#include "engine/cuda/batch.h"
#include "engine/model/config.h"
#include "manifests/engine_spec.h"
#include "manifests/result.h"

namespace rubato::engine::cuda {

/// Rows of a matrix in device memory. stride in elements.
template <class Pointer>
struct Rows {
  Pointer data{};
  std::int32_t count = 0;
  std::int32_t columns = 0;
  std::int64_t stride = 0;
};
using Accumulators = Rows<float*>;  // F32
using Activations = Rows<void*>;    // elements of the backend's dtype: F32, BF16 or F16

// ---- kernels_rows.cu: one block (or warp) per row, a fixed tree over the columns
/// out[i] = scale * table[token_ids[i]], widened to F32 before. table: (vocabulary, columns) of dtype. Padding tokens read token
/// 0.
void embed(cudaStream_t stream, DataType dtype, const void* table, const Batch& batch, float scale, const Accumulators& out);

/// What add_rms_norm adds first: x = scale * delta + x in one rounding; nothing where delta.data is null.
struct ScaledDelta {
  Accumulators delta;
  float scale = 1;
};
/// x += scale * delta, then out = x / sqrt(mean(x^2) + epsilon) * weight, rounded to dtype.
void add_rms_norm(cudaStream_t stream, DataType dtype, const Accumulators& x, const ScaledDelta& added, const float* weight,
                  float epsilon, const Activations& out);

/// out[i] = x[selected[i]], both formats by element size: bytes_per_element 2 or 4.
void gather_rows(cudaStream_t stream, std::int32_t bytes_per_element, const Rows<void*>& x, const Batch& batch,
                 const Rows<void*>& out);

/// out = silu(gate) * up with gate_up = [gate | up], (rows, 2 * out.columns), both of dtype, computed in F32.
void swiglu(cudaStream_t stream, DataType dtype, const Activations& gate_up, const Activations& out);

struct RopeInputs {
  const float* cosines = nullptr;  // (max_position, head_size / 2)
  const float* sines = nullptr;
  const float* query_norm = nullptr;  // (head_size) or null: no per-head norm
  const float* key_norm = nullptr;
  float epsilon = 0;
};
/// qkv: (tokens, q | k | v) F32. Normalises q and k per head where asked, rotates them (rotate-half) by positions, writes q to
/// query (rounded to dtype) and k and v to slots of layer_cache.
void rope_and_store(cudaStream_t stream, DataType dtype, const CacheShape& shape, const Accumulators& qkv, const RopeInputs& rope,
                    const Batch& batch, void* layer_cache, const Activations& query);

/// Fills the given blocks (device array) of one layer with NaN; for tests.
void poison_blocks(cudaStream_t stream, DataType dtype, const CacheShape& shape, const std::int32_t* blocks, std::int32_t count,
                   void* layer_cache);

// ---- kernels_attention.cu
/// Tokens of one absolute split of the cache: partial results begin and end at multiples of it and merge in ascending order.
inline constexpr std::int32_t attention_split = 512;

/// Scratch of attention, in device memory, sized at set-up for the largest step: the work list and the partial results of splits
/// that run in parallel. Its bytes are bounded, whatever the positions: at most 32 MiB of partial results and 5 MiB to list them,
/// beside 68 bytes for each tile of query rows (8 of heads / kv_heads rows per token and KV head, and one per sequence). Splits
/// that find no room run one after another, with the same bits.
struct AttentionScratchSize {
  std::int64_t bytes = 0;
};
[[nodiscard]] AttentionScratchSize attention_scratch_size(const CacheShape& shape, std::int32_t max_tokens, std::int32_t max_rows,
                                                          std::int32_t max_position);

/// What attention needs to know once: kernel choice, grid, scratch layout. Made at set-up, before any capture.
struct AttentionPlan {
  DataType dtype = DataType::BFloat16;
  CacheShape shape;
  std::int32_t max_tokens = 0;
  std::int32_t max_rows = 0;
  std::int32_t max_position = 0;
  std::int32_t multiprocessors = 0;
  std::int32_t grid = 0;           // persistent blocks of the main kernel
  std::int32_t partial_units = 0;  // room for partial results, per KV head; fewer, down to none, give the same bits
  std::byte* scratch = nullptr;
  std::optional<float> scale{};  // of the scores; none: 1 / sqrt(head_size)
};
[[nodiscard]] Result<AttentionPlan> make_attention_plan(DataType dtype, const CacheShape& shape, std::int32_t max_tokens,
                                                        std::int32_t max_rows, std::int32_t max_position,
                                                        std::int32_t multiprocessors, std::byte* scratch);

/// Builds the work list of this step from the batch (on the device); once per step, before the first attention().
void plan_attention(cudaStream_t stream, const AttentionPlan& plan, const Batch& batch);

/// Causal softmax attention from the cache alone, scaled as the plan says. query and out: dtype, (tokens, heads *
/// head_size). out's padding rows are left as they are.
void attention(cudaStream_t stream, const AttentionPlan& plan, const Batch& batch, const Activations& query,
               const void* layer_cache, const Activations& out);

// ---- kernels_recurrent.cu: Mamba2 layers, all in F32. Rows of a step are the sequences of the batch; what lies in a bucket
// beyond its tokens is neither read nor written.
/// One layer in device memory.
struct RecurrentLayer {
  StateShape shape;
  const float* taps = nullptr;            // (channels, window)
  const float* taps_bias = nullptr;       // (channels)
  const float* time_step_bias = nullptr;  // (heads)
  const float* log_decay = nullptr;       // (heads)
  const float* skip = nullptr;            // (heads)
  float time_step_min = 0;
  float time_step_max = 0;
  float* states = nullptr;    // the layer's part of slot 0
  std::int32_t max_rows = 0;  // sequences that a step may have
};
/// InvalidArgument, naming the field, for shapes that no kernel is made for. window: the convolution's.
[[nodiscard]] Result<void> check_recurrent(const StateShape& shape);

/// out = silu(bias + the causal convolution of projected's channels), (tokens, channels); the inputs go to the states.
/// projected: (tokens, inner gate | channels | heads).
void convolve(cudaStream_t stream, const RecurrentLayer& layer, const Batch& batch, const Accumulators& projected,
              const Accumulators& out);

/// The recurrence, token after token. convolved: (tokens, x | B | C); out: (tokens, inner).
void scan(cudaStream_t stream, const RecurrentLayer& layer, const Batch& batch, const Accumulators& projected,
          const Accumulators& convolved, const Accumulators& out);

// ---- kernels_gate.cu
enum class GateOrder : std::uint8_t { GateFirst, NormFirst, GateOnly };
struct GatedNormInputs {
  GateOrder order = GateOrder::GateFirst;
  const float* weight = nullptr;   // (columns of y); null with GateOnly
  std::int32_t group_columns = 0;  // that are normalised together
  float epsilon = 0;
};
/// y, and the first columns of gate, F32. See engine::GatedNorm.
void gated_norm(cudaStream_t stream, DataType dtype, const Accumulators& y, const Accumulators& gate,
                const GatedNormInputs& inputs, const Activations& out);

/// out = max(x, 0)^2, rounded to dtype. NaN stays NaN.
void relu_squared(cudaStream_t stream, DataType dtype, const Accumulators& x, const Activations& out);

// ---- kernels_linear.cu: y = x W^T + bias with one fixed order over the inputs, whatever the number of rows. The reference that
// cuBLASLt candidates are NOT compared with (they have an order of their own), and what runs where none of them is accepted.
/// x: (rows, inputs) of dtype; weights: (outputs, inputs) of dtype, row-major, rows 16-byte aligned when inputs is a multiple of
/// 8; bias: (outputs) F32 or null. out: (rows, outputs), F32 when out_dtype is Float32, else dtype.
void linear(cudaStream_t stream, DataType dtype, const void* weights, const float* bias, std::int32_t outputs,
            const Activations& x, DataType out_dtype, const Rows<void*>& out);
/// Raises shared-memory limits where a kernel needs it; once per process and device.
[[nodiscard]] Result<void> prepare_linear();

}  // namespace rubato::engine::cuda
