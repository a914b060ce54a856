// SPDX-License-Identifier: Apache-2.0
// The CPU's Ops: packs weights into panels, cuts every operation into tasks and hands them to the workers. The arithmetic of a
// task is a kernel's (kernels.h).
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "engine/cpu/core_gate.h"
#include "engine/cpu/kernels.h"
#include "engine/cpu/memory.h"
#include "engine/cpu/tile_plans.h"
#include "engine/cpu/workers.h"
#include "engine/models/host_backend.h"

namespace rubato::engine::cpu {

/// Element type, kernels and threads are fixed when it is made. Weights and cache are shared with its sibling; threads, matrices,
/// scratch and plans are its own.
class CpuOps final : public HostOps {
 public:
  /// clock: steady time, asked between tasks while a sibling is in a step too; none: every task is taken to last equally long.
  CpuOps(DataType dtype, KernelPath path, std::int32_t threads, CoreGate::Clock clock = {});

  Result<Matrix> allocate(std::int32_t rows, std::int32_t columns, Format format) override;
  Result<LinearId> make_linear(const LinearShape& shape) override;
  void load_rows(LinearId id, std::int32_t first_output, const TensorView& rows) override;
  void load_bias(LinearId id, std::int32_t first_output, const TensorView& bias) override;
  Result<NormId> make_norm(const TensorView& weight) override;
  Result<void> make_cache(const AttentionShape& shape, std::span<const float> cosines, std::span<const float> sines) override;
  void embed(LinearId table, std::span<const TokenId> tokens, float scale, const Matrix& out) override;
  void rms_norm(const Matrix& x, NormId weight, float epsilon, const Matrix& out) override;
  void add_rms_norm(const Matrix& x, const Matrix& delta, float scale, NormId weight, float epsilon, const Matrix& out) override;
  void linear(LinearId id, const Matrix& x, const Matrix& out) override;
  void rope_and_store(const Matrix& qkv, std::int32_t layer, std::span<const SequenceSpan> sequences,
                      const std::optional<QueryKeyNorm>& norm, const Matrix& out) override;
  void attention(const Matrix& query, std::int32_t layer, std::span<const SequenceSpan> sequences, const Matrix& out) override;
  void gather_rows(const Matrix& x, std::span<const std::int32_t> rows, const Matrix& out) override;
  void read(const Matrix& x, std::span<float> out) const override;
  void poison(std::span<const BlockId> blocks) override;
  void for_each(std::int32_t count, const std::function<void(std::int32_t)>& body) override;
  ShapeLimits shape_limits() const override;
  /// Reads sizes that are fixed after set-up, and nothing of a step.
  Result<std::unique_ptr<StepShapes>> build_shapes(const policies::StepBuckets& buckets,
                                                   const std::stop_token& stop) const override;
  std::unique_ptr<StepShapes> use_shapes(std::unique_ptr<StepShapes> shapes) override;
  std::optional<std::int32_t> begin_step(std::int32_t tokens, std::int32_t selected) override;
  void end_step() override;
  /// May throw what starting threads throws; then nothing has changed.
  Result<std::unique_ptr<HostOps>> make_sibling() override;
  void use_share(std::int32_t percent) override;
  [[nodiscard]] DeviceShare share() const override;
  Result<void> check_source(const HostOps& source) const override;
  void copy_block(const HostOps& source, const BlockCopy& copy) override;

  /// `avx512_bf16, 2 threads`
  [[nodiscard]] std::string description() const;

 private:
  struct Linear {
    LinearShape shape;
    std::int32_t cells = 0;  // of one output
    std::int32_t panels = 0;
    HostMemory weights;  // [panel][cell][panel_columns]
    HostMemory bias;     // (panels * panel_columns) F32
    bool has_bias = false;
  };
  struct Place {
    std::int64_t panel;
    std::int32_t column;
  };
  struct Norm {
    std::vector<float> weights;  // zero past columns, whole groups
  };

  /// What siblings share. Fixed after set-up, but for the cache's contents.
  struct Memory {
    std::vector<Linear> linears;
    std::vector<Norm> norms;
    AttentionShape shape;
    HeadLayout layout;
    std::vector<float> cosines;
    std::vector<float> sines;
    HostMemory cache;                // [layer][block][kv head][keys | values]
    std::unique_ptr<CoreGate> gate;  // null: one lane alone
  };

  CpuOps(const CpuOps& first, std::unique_ptr<Workers> workers);
  /// Scratch of each worker.
  [[nodiscard]] Result<void> make_scratch();
  /// Runs tasks on the workers, or right here when work (in multiply-adds, roughly) is less than handing it over costs. On a busy
  /// machine a worker may hold its task for a time slice, so small operations must not depend on one.
  template <class Body>
  void spread(std::int64_t work, std::int32_t count, Body&& body);
  [[nodiscard]] Linear& linear_at(LinearId id);
  /// Of the step's bucket for matrices of its tokens or of its selected tokens; null: eager.
  [[nodiscard]] const TilePlan* plan_of(std::int32_t rows) const;
  [[nodiscard]] std::int32_t elementwise_rows(std::int32_t rows) const;
  [[nodiscard]] Place place_of(const Linear& linear, std::int32_t output) const;
  void load_row(const Linear& linear, std::int32_t output, const TensorView& rows, std::int64_t row) const;
  void embed_token(const Linear& linear, TokenId token, float* out) const;
  void norm_rows(const Matrix& x, const Matrix* delta, NormId weight, float epsilon, const Matrix& out);
  [[nodiscard]] std::uint32_t* layer_cache(std::int32_t layer) const;
  [[nodiscard]] std::byte* row_of(const Matrix& matrix, std::int64_t row) const;
  [[nodiscard]] std::int64_t bytes_of(Format format) const;

  const Kernels kernels_;
  const CoreGate::Clock clock_;
  const std::shared_ptr<Memory> memory_;  // outlives the workers
  Side side_ = Side::First;
  std::unique_ptr<Workers> workers_;
  std::vector<HostMemory> matrices_;

  struct Scratch {
    HostMemory memory;
    AttentionScratch attention;
    float* partial = nullptr;
  };
  std::vector<Scratch> scratch_;              // one per worker
  std::vector<std::int32_t> token_sequence_;  // sequence of each token of the step
  struct AttentionPiece {
    std::int32_t sequence;
    std::int32_t token;  // within the sequence
    std::int32_t count;
  };
  std::vector<AttentionPiece> pieces_;

  std::unique_ptr<TilePlans> plans_;  // null: every step is eager
  struct PlannedRows {
    std::int32_t rows = 0;
    const TilePlan* plan = nullptr;
  };
  PlannedRows tokens_;    // of the step
  PlannedRows selected_;  // of its last layer's end, where only the selected tokens are left
};

/// make_cpu_backend on a given path, which must be one of kernel_paths(options.dtype).
[[nodiscard]] Result<std::unique_ptr<Backend>> make_backend(const ModelConfig& config, WeightSource& weights,
                                                            const BackendOptions& options, KernelPath path);

}  // namespace rubato::engine::cpu
