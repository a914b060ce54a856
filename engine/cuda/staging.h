// SPDX-License-Identifier: Apache-2.0
// Carries a step's metadata to the device: rows are flattened into page-locked memory, then copied in one go to the fixed
// addresses that kernels and graphs know.
#pragma once

#include <cstdint>
#include <span>

#include "engine/backend.h"
#include "engine/cuda/batch.h"
#include "engine/cuda/runtime.h"

namespace rubato::engine::cuda {

/// Thread: the backend's caller. The copy of a step must have run before the next fill(): run() waits for its results.
class Staging {
 public:
  struct Limits {
    std::int32_t max_tokens = 0;
    std::int32_t max_rows = 0;
    std::int32_t max_blocks_per_row = 0;
    std::int32_t trash_slot = 0;  // where padding tokens store their keys and values
  };
  [[nodiscard]] static Result<Staging> make(const Limits& limits);

  /// Flattens rows, padded to bucket tokens: every entry below bucket is a valid index. rows have been checked.
  void fill(std::span<const StepRow> rows, std::int32_t bucket);
  /// Queues the copy of what fill() wrote.
  [[nodiscard]] Result<void> copy(const Stream& stream) const;

  /// The same addresses for as long as this lives.
  [[nodiscard]] const Batch& batch() const { return batch_; }
  /// Of the last fill().
  [[nodiscard]] std::span<const std::int32_t> selected() const {
    return {selected_, static_cast<std::size_t>(counts_->selected)};
  }

 private:
  Staging() = default;
  void fill_states(std::span<const StepRow> rows);

  Limits limits_;
  PinnedMemory host_;
  DeviceMemory device_;
  Batch batch_;
  std::int64_t used_bytes_ = 0;  // block tables come last, so that a step copies no more than it needs

  // In host_, as batch_ in device_.
  BatchCounts* counts_ = nullptr;
  std::int32_t* token_ids_ = nullptr;
  std::int32_t* positions_ = nullptr;
  std::int32_t* slots_ = nullptr;
  std::int32_t* row_first_ = nullptr;
  std::int32_t* row_position_ = nullptr;
  std::int32_t* token_first_ = nullptr;
  std::int32_t* row_blocks_ = nullptr;
  std::int32_t* blocks_ = nullptr;
  std::int32_t* selected_ = nullptr;
  std::int32_t* state_from_ = nullptr;
  std::int32_t* state_to_ = nullptr;
  std::int32_t* state_save_ = nullptr;
  std::int32_t* state_save_tokens_ = nullptr;
};

}  // namespace rubato::engine::cuda
