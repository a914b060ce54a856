// SPDX-License-Identifier: Apache-2.0
// Every operation of a decoder's forward pass, stated once: shapes, preconditions, and what must be bit-equal. A device
// implements this interface (reference/ is the executable specification); models/ writes each architecture over it and never sees
// a device.
//
// What holds for every operation of every implementation:
//  - Row independence, bit for bit. A row of the output is a function of the same row of the inputs (for attention: of that
//  sequence's
//    cache up to the row's position) and of the weights. How many other rows there are, where in the batch the row stands, how
//    the sequence was cut into steps, which blocks hold its cache and how many threads run must not change one bit.
//  - So the order of every sum is fixed by its length alone, and for attention by absolute positions.
//  - Slots of the cache that were never written may hold NaN and must not reach any result.
//  - After set-up nothing allocates.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "engine/model/weights.h"
#include "engine/tokens.h"
#include "manifests/result.h"
#include "policies/ids.h"

namespace rubato::engine {

/// How the elements of a Matrix are stored.
enum class Format : std::uint8_t {
  Accumulator,  // F32: residual stream, results of linear, logits
  Activation,   // what linear and attention read: F32, or BF16 on a device that computes in BF16
};

/// Row-major rows in the memory of the Ops that allocated them; only that Ops looks inside. Copies are views of the same memory.
struct Matrix {
  void* data = nullptr;
  std::int32_t rows = 0;
  std::int32_t columns = 0;
  std::int64_t stride = 0;  // elements from row to row, >= columns
  Format format = Format::Accumulator;

  /// The first count rows.
  [[nodiscard]] Matrix top(std::int32_t count) const {
    Matrix view = *this;
    view.rows = count;
    return view;
  }
};

/// Weights held by an Ops: index of a matrix for linear() and embed(), or of a vector for a norm.
struct LinearId {
  std::int32_t value = 0;
};
struct NormId {
  std::int32_t value = 0;
};

/// Weights of one recurrent layer.
struct RecurrentId {
  std::int32_t value = 0;
};

enum class LinearKind : std::uint8_t {
  Plain,   // y = x W^T + b
  Swiglu,  // W = [gate; up], outputs even: y = silu(x gate^T) * (x up^T), half as many columns
};

struct LinearShape {
  std::int32_t outputs = 0;  // rows of W
  std::int32_t inputs = 0;   // columns of W
  LinearKind kind = LinearKind::Plain;
};

/// Shapes that attention needs. layers may be 0: then there is no cache, heads, kv_heads and head_size are 0 too, and neither
/// rope_and_store nor attention is called. Otherwise heads is a multiple of kv_heads; head_size is even.
struct AttentionShape {
  std::int32_t layers = 0;
  std::int32_t heads = 0;
  std::int32_t kv_heads = 0;
  std::int32_t head_size = 0;
  std::int32_t block_count = 0;   // KV blocks of kv_block_tokens tokens
  std::int32_t max_position = 0;  // positions are below this
  std::optional<float> scale{};   // of the scores before softmax; none: 1 / sqrt(head_size)
  [[nodiscard]] std::int32_t query_columns() const { return heads * head_size; }
  [[nodiscard]] std::int32_t qkv_columns() const { return (heads + 2 * kv_heads) * head_size; }
};

/// Shapes of the recurrent (Mamba2) layers, which are all alike. Columns of what projects into such a layer:
/// gate (inner) | x (inner) | B (groups * state_size) | C (groups * state_size) | time step (heads); x, B and C together are the
/// channels that are convolved. One state of one layer: the last window - 1 inputs of every channel, and (heads, head_size,
/// state_size) of F32.
struct RecurrentShape {
  std::int32_t layers = 0;
  std::int32_t heads = 0;
  std::int32_t head_size = 0;
  std::int32_t groups = 0;  // divides heads: as many heads in a row share B and C
  std::int32_t state_size = 0;
  std::int32_t window = 0;       // inputs that the convolution sees, the present one included
  float time_step_min = 0;       // softplus(dt + bias) is clamped to these
  float time_step_max = 0;       // may be infinite
  std::int32_t state_count = 0;  // slots
  [[nodiscard]] std::int32_t inner() const { return heads * head_size; }
  [[nodiscard]] std::int32_t channels() const { return inner() + 2 * groups * state_size; }
  [[nodiscard]] std::int32_t projected() const { return inner() + channels() + heads; }
};

enum class RecurrentPart : std::uint8_t {
  Taps,          // (channels, 1, window)
  TapsBias,      // (channels); zero where it is not loaded
  TimeStepBias,  // (heads)
  LogDecay,      // (heads): A_log; the decay of a time step dt is exp(-exp(A_log) * dt)
  Skip,          // (heads): D
};

/// The norm between a recurrent layer's scan and its output projection.
struct GatedNorm {
  enum class Order : std::uint8_t {
    GateFirst,  // norm(y * silu(gate))
    NormFirst,  // norm(y) * silu(gate)
    GateOnly,   // y * silu(gate); weight is not used
  };
  Order order = Order::GateFirst;
  NormId weight;
  std::int32_t group_columns = 0;  // each so many columns have a mean square of their own; divides inner
  float epsilon = 0;
};

/// One sequence's tokens within a step: rows [first, first + count) of every matrix, at positions position, position + 1, ...
struct SequenceSpan {
  std::int32_t first = 0;
  std::int32_t count = 0;
  std::int32_t position = 0;
  std::span<const BlockId> blocks;  // covers position + count tokens
  StateUse state{};                 // only with recurrent layers
};

/// Per-head RMS norm of q and k before rope (Qwen3).
struct QueryKeyNorm {
  NormId query;
  NormId key;
  float epsilon = 0;
};

/// Thread: the backend's caller. Set-up calls come first and may fail; the operations cannot.
class Ops {
 public:
  virtual ~Ops() = default;

  // ---- set-up
  /// Zeroed. ResourceExhausted (with the bytes) when the memory cannot be had.
  [[nodiscard]] virtual Result<Matrix> allocate(std::int32_t rows, std::int32_t columns, Format format) = 0;
  /// Weights start at zero; load_rows fills outputs [first_output, first_output + view rows). Every dtype is converted on load.
  [[nodiscard]] virtual Result<LinearId> make_linear(const LinearShape& shape) = 0;
  virtual void load_rows(LinearId id, std::int32_t first_output, const TensorView& rows) = 0;
  /// Only for LinearKind::Plain.
  virtual void load_bias(LinearId id, std::int32_t first_output, const TensorView& bias) = 0;
  [[nodiscard]] virtual Result<NormId> make_norm(const TensorView& weight) = 0;
  /// The paged cache, and cosines and sines (max_position, head_size / 2) by absolute position. Called once.
  [[nodiscard]] virtual Result<void> make_cache(const AttentionShape& shape, std::span<const float> cosines,
                                                std::span<const float> sines) = 0;

  /// The states of all recurrent layers, zeroed. Called once, before make_recurrent, and only where there are such layers.
  [[nodiscard]] virtual Result<void> make_states(const RecurrentShape& shape) = 0;
  /// The next recurrent layer, in order: the first is 0, and so are its states.
  [[nodiscard]] virtual Result<RecurrentId> make_recurrent() = 0;
  virtual void load_recurrent(RecurrentId id, RecurrentPart part, const TensorView& view) = 0;

  // ---- operations
  /// out[i] = scale * row tokens[i] of table's weights. out: Accumulator, (tokens, inputs).
  virtual void embed(LinearId table, std::span<const TokenId> tokens, float scale, const Matrix& out) = 0;

  /// out = x / sqrt(mean(x^2) + epsilon) * weight. x: Accumulator; out: Activation of the same shape.
  virtual void rms_norm(const Matrix& x, NormId weight, float epsilon, const Matrix& out) = 0;
  /// x = x + scale * delta in one rounding, then rms_norm of x. delta: Accumulator.
  virtual void add_rms_norm(const Matrix& x, const Matrix& delta, float scale, NormId weight, float epsilon,
                            const Matrix& out) = 0;

  /// x: Activation, (rows, inputs). out: (rows, outputs) in Accumulator for Plain; (rows, outputs / 2) in Activation for Swiglu.
  virtual void linear(LinearId id, const Matrix& x, const Matrix& out) = 0;

  /// qkv: Accumulator, (tokens, q | k | v). Normalises q and k per head when norm is given, rotates them by their absolute
  /// position (rotate-half), writes q to out (Activation, (tokens, heads * head_size)) and k and v to their slots of layer's
  /// cache.
  virtual void rope_and_store(const Matrix& qkv, std::int32_t layer, std::span<const SequenceSpan> sequences,
                              const std::optional<QueryKeyNorm>& norm, const Matrix& out) = 0;

  /// Causal softmax attention of decode rows and chunks in one call, from the cache alone, scaled by 1 / sqrt(head_size).
  /// query and out: Activation, (tokens, heads * head_size). rope_and_store of the same layer and sequences came before.
  virtual void attention(const Matrix& query, std::int32_t layer, std::span<const SequenceSpan> sequences, const Matrix& out) = 0;

  /// The causal convolution of one recurrent layer: out[t][c] = silu(bias[c] + sum over k of taps[c][k] * in[t - window + 1 +
  /// k]), the sum in ascending k from the bias on, `in` being the layer's own inputs of all tokens so far. projected:
  /// Accumulator, (tokens, shape.projected()). out: Accumulator, (tokens, shape.channels()). Inputs before the row come from
  /// state.from (zero at position 0); the last window - 1 go to state.to, and those of a snapshot to state.save.
  virtual void convolve(RecurrentId layer, const Matrix& projected, std::span<const SequenceSpan> sequences,
                        const Matrix& out) = 0;

  /// The recurrence of one recurrent layer, token after token, all in F32: with dt = clamp(softplus(time step + bias)),
  ///   S[h][p][n] = exp(-exp(A_log[h]) dt) * S[h][p][n] + (dt * x[h][p]) * B[g][n]
  ///   out[h][p]  = sum over n of S[h][p][n] * C[g][n] + D[h] * x[h][p]
  /// The sum over n is one fixed tree, whatever the rest of the batch. This is the definition, for decode and prefill alike: one
  /// implementation, so that where a sequence is cut changes no bit. projected gives the time steps, convolved x, B and C. out:
  /// Accumulator, (tokens, shape.inner()). States as in convolve.
  virtual void scan(RecurrentId layer, const Matrix& projected, const Matrix& convolved, std::span<const SequenceSpan> sequences,
                    const Matrix& out) = 0;

  /// y: Accumulator, (tokens, inner). gate: the first inner columns of projected. out: Activation, (tokens, inner).
  virtual void gated_norm(const Matrix& y, const Matrix& projected, const GatedNorm& norm, const Matrix& out) = 0;

  /// out = max(x, 0)^2. x: Accumulator; out: Activation of the same shape.
  virtual void relu_squared(const Matrix& x, const Matrix& out) = 0;

  /// out[i] = x[rows[i]], same format and columns.
  virtual void gather_rows(const Matrix& x, std::span<const std::int32_t> rows, const Matrix& out) = 0;

  // ---- host access and poison
  /// Copies an Accumulator matrix's rows, without gaps, to host memory of rows * columns.
  virtual void read(const Matrix& x, std::span<float> out) const = 0;
  /// Fills the blocks with NaN in every layer.
  virtual void poison(std::span<const BlockId> blocks) = 0;
  /// The same for states.
  virtual void poison_states(std::span<const StateId> states) = 0;
  /// Appends what the cache of one layer holds of one token (slot 0 .. kv_block_tokens-1 of block): its keys, then its values.
  /// What bytes mean is the device's; equal contents give equal bytes. No operation writes them meanwhile.
  virtual void read_token(std::int32_t layer, BlockId block, std::int32_t slot, std::vector<std::byte>& out) const = 0;
  /// The same for one recurrent layer's part of a state.
  virtual void read_state(std::int32_t layer, StateId state, std::vector<std::byte>& out) const = 0;
};

}  // namespace rubato::engine
