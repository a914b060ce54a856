// SPDX-License-Identifier: Apache-2.0
// Operations that may sum in whatever order is fastest for the batch: what an engine without the exactness contract would use.
// For the comparison in exactness_cost alone.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "engine/cpu/ops.h"

namespace rubato::bench {

/// Products by oneDNN, which chooses blocking and splits for each number of rows; the recurrence of a chunk in its chunked,
/// semi-separable form (SSD) by matrix products. Everything else, and steps of single tokens, is the CPU backend's own. Products
/// run in as many threads as OMP_NUM_THREADS says. States of chunked scans are kept beside those of single steps: a sequence is
/// either prefilled or decoded with it, not both.
class FreeOps final : public engine::cpu::CpuOps {
 public:
  FreeOps(DataType dtype, engine::cpu::KernelPath path, std::int32_t threads);
  ~FreeOps() override;

  Result<engine::LinearId> make_linear(const engine::LinearShape& shape) override;
  void load_rows(engine::LinearId id, std::int32_t first_output, const engine::TensorView& rows) override;
  void load_bias(engine::LinearId id, std::int32_t first_output, const engine::TensorView& bias) override;
  void linear(engine::LinearId id, const engine::Matrix& x, const engine::Matrix& out) override;

  Result<void> make_states(const engine::RecurrentShape& shape) override;
  Result<engine::RecurrentId> make_recurrent() override;
  void load_recurrent(engine::RecurrentId id, engine::RecurrentPart part, const engine::TensorView& view) override;
  void scan(engine::RecurrentId layer, const engine::Matrix& projected, const engine::Matrix& convolved,
            std::span<const engine::SequenceSpan> sequences, const engine::Matrix& out) override;

 private:
  struct Products;
  struct Recurrent {
    std::vector<float> time_step_bias, decay, skip;  // (heads); decay: -exp(A_log)
  };
  void scan_chunked(const Recurrent& layer, const engine::Matrix& projected, const engine::Matrix& convolved,
                    const engine::SequenceSpan& sequence, const engine::Matrix& out);

  const DataType dtype_;
  std::unique_ptr<Products> products_;
  engine::RecurrentShape shape_;
  std::vector<Recurrent> recurrent_;
};

}  // namespace rubato::bench
