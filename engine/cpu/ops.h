// SPDX-License-Identifier: Apache-2.0
// The CPU's Ops: packs weights into panels, cuts every operation into tasks and hands them to the workers. The arithmetic of a
// task is a kernel's (kernels.h).
#pragma once

#include <algorithm>
#include <cstddef>
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
class CpuOps : public HostOps {
 public:
  /// clock: steady time, asked between tasks while a sibling is in a step too; none: every task is taken to last equally long.
  CpuOps(DataType dtype, KernelPath path, std::int32_t threads, CoreGate::Clock clock = {});

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
  void copy_state(const HostOps& source, const StateCopy& copy) override;

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

  /// Weights of one recurrent layer.
  struct Recurrent {
    std::vector<float> taps;  // (window, channels rounded up to groups), zero past the channels
    std::vector<float> taps_bias;
    std::vector<float> time_step_bias;  // (heads)
    std::vector<float> rates;           // (heads): -exp(A_log)
    std::vector<float> skips;           // (heads)
  };
  /// Floats of one layer's part of a state: inputs (window - 1, channels) | (head, group of its elements, state_size,
  /// group_columns), all rounded up to whole groups.
  struct StateLayout {
    std::int32_t channels = 0;
    std::int32_t state_size = 0;      // rounded up
    std::int32_t element_groups = 0;  // of a head
    std::int64_t inputs = 0;
    std::int64_t layer = 0;
    [[nodiscard]] std::int64_t element_group() const { return static_cast<std::int64_t>(state_size) * group_columns; }
  };

  /// What siblings share. Fixed after set-up, but for the contents of cache and states.
  struct Memory {
    std::vector<Linear> linears;
    std::vector<Norm> norms;
    AttentionShape shape;
    HeadLayout layout;
    std::vector<float> cosines;
    std::vector<float> sines;
    HostMemory cache;  // [layer][block][kv head][keys | values]
    std::vector<Recurrent> recurrents;
    RecurrentShape recurrent_shape;  // no layers: none are recurrent
    StateLayout state_layout;
    HostMemory states;               // [slot][layer]
    std::unique_ptr<CoreGate> gate;  // null: one lane alone
  };

  CpuOps(const CpuOps& first, std::unique_ptr<Workers> workers);
  /// Scratch of each worker.
  [[nodiscard]] Result<void> make_scratch();
  [[nodiscard]] Result<void> make_recurrent_scratch();
  /// Runs tasks on the workers, or right here when work (in multiply-adds, roughly) is less than handing it over costs. On a busy
  /// machine a worker may hold its task for a time slice, so small operations must not depend on one.
  template <class Body>
  void spread(std::int64_t work, std::int32_t count, Body&& body) {
    constexpr std::int64_t shared_work_min = 1 << 18;  // one or two microseconds
    if (work >= shared_work_min) return workers_->run(count, body);
    workers_->pass();
    for (std::int32_t task = 0; task < count; ++task) body(task, 0);
  }
  static constexpr std::int64_t elementwise_work = 16;  // of one element, against a multiply-add of linear
  /// Calls body(row, worker) for each of count rows, some of them to a task.
  template <class Body>
  void spread_rows(std::int64_t work, std::int32_t count, Body&& body) {
    const std::int32_t per_task = elementwise_rows(count);
    spread(work, (count + per_task - 1) / per_task, [&](std::int32_t task, std::int32_t worker) {
      const std::int32_t end = std::min(count, (task + 1) * per_task);
      for (std::int32_t row = task * per_task; row < end; ++row) body(row, worker);
    });
  }
  [[nodiscard]] Linear& linear_at(LinearId id);
  /// Of the step's bucket for matrices of its tokens or of its selected tokens; null: eager.
  [[nodiscard]] const TilePlan* plan_of(std::int32_t rows) const;
  [[nodiscard]] std::int32_t elementwise_rows(std::int32_t rows) const;
  [[nodiscard]] Place place_of(const Linear& linear, std::int32_t output) const;
  void load_row(const Linear& linear, std::int32_t output, const TensorView& rows, std::int64_t row) const;
  void embed_token(const Linear& linear, TokenId token, float scale, float* out) const;
  void norm_rows(const Matrix& x, const NormTask& common, const Matrix* delta, NormId weight, const Matrix& out);
  [[nodiscard]] Recurrent& recurrent_at(RecurrentId id) const;
  [[nodiscard]] float* state_at(std::int32_t layer, StateId state) const;
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
  std::vector<Scratch> scratch_;  // one per worker
  struct RecurrentScratch {
    HostMemory memory;
    ScanScratch scan;
    float* product = nullptr;
  };
  std::vector<RecurrentScratch> recurrent_scratch_;  // one per worker
  std::vector<std::int32_t> token_sequence_;         // sequence of each token of the step
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
