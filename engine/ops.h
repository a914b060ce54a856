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

enum class LinearKind : std::uint8_t {
  Plain,   // y = x W^T + b
  Swiglu,  // W = [gate; up], outputs even: y = silu(x gate^T) * (x up^T), half as many columns
};

struct LinearShape {
  std::int32_t outputs = 0;  // rows of W
  std::int32_t inputs = 0;   // columns of W
  LinearKind kind = LinearKind::Plain;
};

/// Shapes that attention needs. heads is a multiple of kv_heads; head_size is even.
struct AttentionShape {
  std::int32_t layers = 0;
  std::int32_t heads = 0;
  std::int32_t kv_heads = 0;
  std::int32_t head_size = 0;
  std::int32_t block_count = 0;   // KV blocks of kv_block_tokens tokens
  std::int32_t max_position = 0;  // positions are below this
  [[nodiscard]] std::int32_t query_columns() const { return heads * head_size; }
  [[nodiscard]] std::int32_t qkv_columns() const { return (heads + 2 * kv_heads) * head_size; }
};

/// One sequence's tokens within a step: rows [first, first + count) of every matrix, at positions position, position + 1, ...
struct SequenceSpan {
  std::int32_t first = 0;
  std::int32_t count = 0;
  std::int32_t position = 0;
  std::span<const BlockId> blocks;  // covers position + count tokens
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

  // ---- operations
  /// out[i] = row tokens[i] of table's weights. out: Accumulator, (tokens, inputs).
  virtual void embed(LinearId table, std::span<const TokenId> tokens, const Matrix& out) = 0;

  /// out = x / sqrt(mean(x^2) + epsilon) * weight. x: Accumulator; out: Activation of the same shape.
  virtual void rms_norm(const Matrix& x, NormId weight, float epsilon, const Matrix& out) = 0;
  /// x += delta, then rms_norm of x. delta: Accumulator.
  virtual void add_rms_norm(const Matrix& x, const Matrix& delta, NormId weight, float epsilon, const Matrix& out) = 0;

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

  /// out[i] = x[rows[i]], same format and columns.
  virtual void gather_rows(const Matrix& x, std::span<const std::int32_t> rows, const Matrix& out) = 0;

  // ---- host access and poison
  /// Copies an Accumulator matrix's rows, without gaps, to host memory of rows * columns.
  virtual void read(const Matrix& x, std::span<float> out) const = 0;
  /// Fills the blocks with NaN in every layer.
  virtual void poison(std::span<const BlockId> blocks) = 0;
};

}  // namespace rubato::engine
