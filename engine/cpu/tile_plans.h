// SPDX-License-Identifier: Apache-2.0
// The CPU's step shapes: for each bucket, how every operation on that many rows is cut into tasks, searched once when the set is
// built instead of guessed in every call. A cut splits rows and outputs, never a sum, so that it decides on time alone.
#pragma once

#include <cstdint>
#include <span>
#include <stop_token>
#include <utility>
#include <vector>

#include "engine/backend.h"

namespace rubato::engine::cpu {

/// Rows that share one pass over a panel: few enough that they stay in the second-level cache, enough that weights are read
/// seldom. Scratch holds so many.
inline constexpr std::int32_t linear_rows_max = 128;

/// One task of a linear: so many rows of x against so many neighbouring panels.
struct LinearCut {
  std::int32_t rows = 0;    // 1..linear_rows_max
  std::int32_t panels = 0;  // >= 1
  friend bool operator==(const LinearCut&, const LinearCut&) = default;
};

/// A linear's weights as far as cutting goes.
struct LinearSize {
  std::int32_t panels = 0;
  std::int32_t cells = 0;  // of one output
};

/// Tasks of attention: (piece of a sequence, KV head, part of the query heads).
struct AttentionSize {
  std::int32_t tokens_max = 0;  // of a piece
  std::int32_t per_piece = 0;   // tasks
};

/// What one bucket's steps do.
struct TilePlan {
  std::vector<LinearCut> linears;  // by LinearId
  std::int32_t elementwise_rows = 0;
  std::int32_t attention_tokens = 0;  // of a piece
};

/// Without a bucket: the cut that needs no search.
[[nodiscard]] LinearCut eager_cut(const LinearSize& size, std::int32_t threads);
inline constexpr std::int32_t eager_elementwise_rows = 8;

/// The cut after which the last thread is expected to be done first, for rows of x and so many threads. Never worse than
/// eager_cut by the same measure.
[[nodiscard]] LinearCut best_cut(const LinearSize& size, std::int32_t rows, std::int32_t threads);

/// Expected time of a linear under a cut; in units of one panel's cell for one row.
[[nodiscard]] std::int64_t cut_time(const LinearSize& size, const LinearCut& cut, std::int32_t rows, std::int32_t threads);

class TilePlans final : public StepShapes {
 public:
  struct Sizes {
    std::vector<LinearSize> linears{};
    AttentionSize attention{};
    std::int32_t threads = 1;
  };

  /// Cancelled when stop is requested. May throw std::bad_alloc.
  [[nodiscard]] static Result<std::unique_ptr<StepShapes>> build(const policies::StepBuckets& buckets, const Sizes& sizes,
                                                                 const std::stop_token& stop);

  [[nodiscard]] const policies::StepBuckets& buckets() const override { return buckets_; }
  [[nodiscard]] std::int64_t bytes() const override;

  /// The plan of the bucket that a step of so many rows runs in, or null.
  [[nodiscard]] const TilePlan* find(std::int32_t rows) const;

 private:
  TilePlans(policies::StepBuckets buckets, std::vector<TilePlan> plans)
      : buckets_(std::move(buckets)), plans_(std::move(plans)) {}

  const policies::StepBuckets buckets_;
  const std::vector<TilePlan> plans_;  // by bucket
};

}  // namespace rubato::engine::cpu
