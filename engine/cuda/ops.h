// SPDX-License-Identifier: Apache-2.0
// The CUDA Ops: what a decoder's layers queue on a stream. Row counts come from the arguments, everything ragged from the batch
// in device memory, so that a queued pass may be captured once and replayed for every step of its bucket: the spans of tokens,
// sequences and rows that the operations are given count here, their contents do not.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "engine/cuda/batch.h"
#include "engine/cuda/kernels.h"
#include "engine/cuda/matmul.h"
#include "engine/cuda/runtime.h"
#include "engine/ops.h"

namespace rubato::engine::cuda {

struct OpsLimits {
  DataType dtype = DataType::BFloat16;
  std::int32_t max_tokens = 0;
  std::int32_t max_rows = 0;
  std::filesystem::path cache_folder{};  // of what probing chose; empty: nothing is remembered
};

/// Where a model's cache lies: layer after layer, block after block.
struct CacheView {
  std::byte* data = nullptr;
  std::int32_t layers = 0;
  std::int32_t block_count = 0;
  std::int64_t layer_bytes = 0;
  std::int64_t block_bytes = 0;
};

/// Where its recurrent states lie, each in one piece.
struct StateView {
  std::byte* data = nullptr;
  std::int32_t count = 0;
  std::int64_t bytes = 0;  // of one
};

/// Thread: one at a time for each CudaOps; two that share memory may queue at once. An operation that cannot be queued is kept as
/// failure().
class CudaOps final : public Ops {
 public:
  /// stream must outlive it. batch: the addresses that every pass reads.
  [[nodiscard]] static Result<std::unique_ptr<CudaOps>> make(const DeviceFacts& device, const OpsLimits& limits,
                                                             const Batch& batch, const Stream& stream);
  ~CudaOps() override;

  /// After the last load: waits for uploads and chooses the algorithm of each product. Errors of set-up calls without a result
  /// show here.
  [[nodiscard]] Result<void> finish_loading();
  [[nodiscard]] const std::vector<MatmulReport>& matmul_reports() const;
  /// Another Ops over the same weights, cache and matrices that queues on its own stream: passes of both may be queued at once,
  /// but not run at once. After finish_loading().
  [[nodiscard]] Result<std::unique_ptr<CudaOps>> on(const Stream& stream) const;
  /// Another Ops over the same weights and cache, with scratch, batch and (still to be allocated) matrices of its own: passes of
  /// both may run at once. After finish_loading().
  [[nodiscard]] Result<std::unique_ptr<CudaOps>> beside(const Batch& batch, const Stream& stream) const;
  /// Between two passes: queues on another stream from here on. What this has queued before must be done.
  void move_to(const Stream& stream) { stream_ = &stream; }
  [[nodiscard]] CacheView cache() const;
  [[nodiscard]] StateView states() const;

  /// First of a pass: builds the step's attention work list, where some layer attends.
  void begin_pass();
  /// The first failure since the last call; also what the runtime kept of launches.
  [[nodiscard]] Result<void> take_failure();

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

 private:
  struct Memory;   // weights and cache, shared by all Ops over them
  struct Scratch;  // what a pass works in, shared by those whose passes never run at once
  CudaOps(std::shared_ptr<Memory> memory, std::shared_ptr<Scratch> scratch, const Stream& stream);
  [[nodiscard]] Result<void> take_attention_scratch();
  [[nodiscard]] Result<void> take_product_scratch();
  [[nodiscard]] Result<void> make_calls();
  [[nodiscard]] void* layer_cache(std::int32_t layer) const;
  [[nodiscard]] const float* norm_weight(NormId id) const;
  [[nodiscard]] RecurrentLayer recurrent_layer(RecurrentId id) const;
  /// Device memory on the host, until the next call. All NaN where it cannot be had.
  [[nodiscard]] std::span<const std::byte> fetch(const std::byte* from, std::int64_t bytes) const;
  void keep(Result<void> result);

  std::shared_ptr<Memory> memory_;
  std::shared_ptr<Scratch> scratch_;
  const Stream* stream_;
  std::vector<MatmulCall> calls_;  // by LinearId; after finish_loading()
  std::optional<Error> failure_;
};

}  // namespace rubato::engine::cuda
