// SPDX-License-Identifier: Apache-2.0
// The graphs of one set of buckets: for the whole device and, when two lanes share it, for one share of it.
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

  /// Those for a lane's side of a rung; none without a sibling.
  struct Part {
    std::int32_t rung = 0;
    std::vector<Entry> entries{};
  };

  /// whole, and part's unless there is none: one per bucket.
  CudaShapes(std::int32_t device, policies::StepBuckets buckets, std::vector<Entry> whole, Part part, std::int64_t bytes)
      : device_(device), buckets_(std::move(buckets)), whole_(std::move(whole)), part_(std::move(part)), bytes_(bytes) {}
  ~CudaShapes() override {
    static_cast<void>(cudaSetDevice(device_));  // on whatever thread this ends
    whole_.clear();
    part_.entries.clear();
  }

  [[nodiscard]] const policies::StepBuckets& buckets() const override { return buckets_; }
  [[nodiscard]] std::int64_t bytes() const override { return bytes_; }
  /// That of a step's bucket where the step runs (none: the whole device); null: it runs eagerly.
  [[nodiscard]] const Entry* find(std::int32_t step_tokens, std::optional<std::int32_t> rung) const {
    if (rung && (part_.entries.empty() || *rung != part_.rung)) return nullptr;
    const std::optional<std::size_t> bucket = buckets_.find(step_tokens);
    if (!bucket) return nullptr;
    return rung ? &part_.entries[*bucket] : &whole_[*bucket];
  }

 private:
  std::int32_t device_;
  policies::StepBuckets buckets_;
  std::vector<Entry> whole_;
  Part part_;
  std::int64_t bytes_;
};

}  // namespace rubato::engine::cuda
