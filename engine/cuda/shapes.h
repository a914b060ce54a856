// SPDX-License-Identifier: Apache-2.0
// The graphs of one set of buckets.
#pragma once

#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "engine/backend.h"
#include "engine/cuda/runtime.h"
#include "engine/ops.h"

namespace rubato::engine::cuda {

class CudaShapes final : public StepShapes {
 public:
  /// What a step of one bucket queues, and where it leaves its logits.
  struct Entry {
    std::int32_t tokens = 0;
    Graph graph;
    Matrix logits;
  };

  /// entries: one per bucket.
  CudaShapes(policies::StepBuckets buckets, std::vector<Entry> entries, std::int64_t bytes)
      : buckets_(std::move(buckets)), entries_(std::move(entries)), bytes_(bytes) {}

  [[nodiscard]] const policies::StepBuckets& buckets() const override { return buckets_; }
  [[nodiscard]] std::int64_t bytes() const override { return bytes_; }
  /// That of a step's bucket; null: the step runs eagerly.
  [[nodiscard]] const Entry* find(std::int32_t step_tokens) const {
    const std::optional<std::size_t> bucket = buckets_.find(step_tokens);
    return bucket ? &entries_[*bucket] : nullptr;
  }

 private:
  policies::StepBuckets buckets_;
  std::vector<Entry> entries_;
  std::int64_t bytes_;
};

}  // namespace rubato::engine::cuda
