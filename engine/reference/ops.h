// SPDX-License-Identifier: Apache-2.0
// The scalar Ops: each operation as its formula, one loop after another, in F32. What every other implementation is tested
// against.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "engine/models/host_backend.h"

namespace rubato::engine {

class ReferenceOps : public HostOps {
 public:
  /// Weights are rounded to dtype on load and widened again; everything else is F32.
  explicit ReferenceOps(DataType dtype) : ReferenceOps(std::make_shared<Memory>()) { memory_->dtype = dtype; }

  Result<Matrix> allocate(std::int32_t rows, std::int32_t columns, Format format) override;
  Result<LinearId> make_linear(const LinearShape& shape) override;
  void load_rows(LinearId id, std::int32_t first_output, const TensorView& rows) override;
  void load_bias(LinearId id, std::int32_t first_output, const TensorView& bias) override;
  Result<NormId> make_norm(const TensorView& weight) override;
  Result<void> make_cache(const AttentionShape& shape, std::span<const float> cosines, std::span<const float> sines) override;
  Result<void> make_states(const RecurrentShape& shape) override;
  Result<RecurrentId> make_recurrent() override;
  void load_recurrent(RecurrentId id, RecurrentPart part, const TensorView& view) override;

  void embed(LinearId table, std::span<const TokenId> tokens, float scale, const Matrix& out) override;
  void rms_norm(const Matrix& x, NormId weight, float epsilon, const Matrix& out) override;
  void add_rms_norm(const Matrix& x, const Matrix& delta, float scale, NormId weight, float epsilon, const Matrix& out) override;
  void linear(LinearId id, const Matrix& x, const Matrix& out) override;
  void rope_and_store(const Matrix& qkv, std::int32_t layer, std::span<const SequenceSpan> sequences,
                      const std::optional<QueryKeyNorm>& norm, const Matrix& out) override;
  void attention(const Matrix& query, std::int32_t layer, std::span<const SequenceSpan> sequences, const Matrix& out) override;
  void convolve(RecurrentId layer, const Matrix& projected, std::span<const SequenceSpan> sequences, const Matrix& out) override;
  void scan(RecurrentId layer, const Matrix& projected, const Matrix& convolved, std::span<const SequenceSpan> sequences,
            const Matrix& out) override;
  void gated_norm(const Matrix& y, const Matrix& projected, const GatedNorm& norm, const Matrix& out) override;
  void relu_squared(const Matrix& x, const Matrix& out) override;
  void gather_rows(const Matrix& x, std::span<const std::int32_t> rows, const Matrix& out) override;
  void read(const Matrix& x, std::span<float> out) const override;
  void poison(std::span<const BlockId> blocks) override;
  void poison_states(std::span<const StateId> states) override;
  void read_token(std::int32_t layer, BlockId block, std::int32_t slot, std::vector<std::byte>& out) const override;
  void read_state(std::int32_t layer, StateId state, std::vector<std::byte>& out) const override;
  void for_each(std::int32_t count, const std::function<void(std::int32_t)>& body) override;
  /// Each computes on its caller's thread; the device is not divided.
  Result<std::unique_ptr<HostOps>> make_sibling() override;
  Result<void> check_source(const HostOps& source) const override;
  void copy_block(const HostOps& source, const BlockCopy& copy) override;
  void copy_state(const HostOps& source, const StateCopy& copy) override;

 private:
  struct Linear {
    LinearShape shape;
    std::vector<float> weights;  // (outputs, inputs)
    std::vector<float> bias;     // (outputs)
  };

  struct Recurrent {
    std::vector<float> taps;  // (channels, window)
    std::vector<float> taps_bias;
    std::vector<float> time_step_bias;
    std::vector<float> log_decay;
    std::vector<float> skip;
  };

  /// What siblings share.
  struct Memory {
    DataType dtype = DataType::Float32;
    std::vector<Linear> linears;
    std::vector<std::vector<float>> norms;
    AttentionShape shape;
    std::vector<float> cosines;
    std::vector<float> sines;
    std::vector<float> keys;                      // (layers, blocks, slots, kv_heads, head_size)
    std::vector<float> values;                    // the same
    RecurrentShape recurrent_shape{.window = 1};  // no layers: none are recurrent
    std::vector<Recurrent> recurrents;
    std::vector<float> states;  // (slots, layers, inputs of the convolution | state of the scan)
    bool has_sibling = false;
  };

  explicit ReferenceOps(std::shared_ptr<Memory> memory) : memory_(std::move(memory)) {}
  /// Floats of one block in one layer's keys (values), and where they begin.
  [[nodiscard]] std::int64_t block_size() const;
  [[nodiscard]] std::int64_t block_begin(std::int32_t layer, BlockId block) const;
  void rotate(float* head, std::int32_t position) const;
  void attend(const float* query, std::int32_t layer, std::int32_t kv_head, std::int32_t position,
              std::span<const BlockId> blocks, float* out);
  /// First of head_size floats of one token's key (value) in one layer's cache.
  [[nodiscard]] std::size_t slot(std::int32_t layer, std::int32_t kv_head, std::int32_t position,
                                 std::span<const BlockId> blocks) const;

  /// Floats of one layer's part of a state, and where it begins.
  [[nodiscard]] std::int64_t inputs_size() const;
  [[nodiscard]] std::int64_t scan_size() const;
  [[nodiscard]] float* state_at(std::int32_t layer, StateId state) const;
  /// Brings floats [first, first + count) of what a row begins from to where its state will be; returns where that is.
  float* begin_state(std::int32_t layer, const StateUse& use, std::int64_t first, std::int64_t count) const;

  const std::shared_ptr<Memory> memory_;
  std::deque<std::vector<float>> matrices_;
  std::vector<float> scores_;  // (max_position)
};

}  // namespace rubato::engine
