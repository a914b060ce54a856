// SPDX-License-Identifier: Apache-2.0
// Which token counts are worth preparing for: a histogram of the tokens that steps really had, and the exact choice of the
// buckets that waste least for it under the current budget. Pure; what a bucket is made of (a graph, a plan) is the backend's
// business, and when a choice is worth building the shape builder's (engine/shape_builder.h).
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <vector>

namespace rubato::policies {

/// Token counts that steps are prepared for, and the one rule of which step runs in which. Everybody who finds a step's bucket
/// (a backend that runs it, the choice that weighs it) asks find().
struct StepBuckets {
  std::vector<std::int32_t> tokens;  // ascending, distinct, each >= 1
  std::int32_t decode_max = 0;       // a step of at most so many tokens runs in its bucket whatever that pads

  /// Index of the smallest bucket that holds the step. None, and the step runs eagerly: it is larger than every bucket, or,
  /// beyond decode_max, its bucket would waste more than a quarter (bucket > 1.25 step).
  [[nodiscard]] std::optional<std::size_t> find(std::int32_t step_tokens) const {
    const auto bucket = std::lower_bound(tokens.begin(), tokens.end(), step_tokens);
    if (bucket == tokens.end() || step_tokens < 1) return std::nullopt;
    const bool wasteful = 4 * static_cast<std::int64_t>(*bucket) > 5 * static_cast<std::int64_t>(step_tokens);
    if (step_tokens > decode_max && wasteful) return std::nullopt;
    return static_cast<std::size_t>(bucket - tokens.begin());
  }

  friend bool operator==(const StepBuckets&, const StepBuckets&) = default;
};

/// Steps by their number of tokens; old ones fade. Weights are integers, so that sums of them, and choices by them, never depend
/// on the order of a sum.
class StepHistogram {
 public:
  /// The weight of one step that has just been seen.
  static constexpr std::int64_t unit = 1024;

  /// Counts of 1..tokens_max are kept apart, larger ones count as tokens_max. After every half_life steps all weights are halved.
  /// Takes 8 bytes per count, and never more.
  StepHistogram(std::int32_t tokens_max, std::int32_t half_life);

  /// Constant but for the halving; allocates nothing.
  void observe(std::int32_t tokens);

  /// The budget has moved. What the old one had cut, the new one will cut: steps of at least `from` tokens, and those above `to`,
  /// are taken for steps of `to` tokens.
  void move_budget(std::int32_t from, std::int32_t to);

  /// Halves all weights until together they are worth at most so many steps.
  void fade(std::int32_t steps);

  [[nodiscard]] std::int64_t weight(std::int32_t tokens) const { return weights_[static_cast<std::size_t>(tokens)]; }
  [[nodiscard]] std::int64_t total() const { return total_; }
  /// Tokens of all steps, by weight.
  [[nodiscard]] std::int64_t token_total() const;
  [[nodiscard]] std::int32_t tokens_max() const { return static_cast<std::int32_t>(weights_.size()) - 1; }

 private:
  void halve();

  std::vector<std::int64_t> weights_;  // by tokens; [0] stays zero
  std::int64_t total_ = 0;
  std::int32_t half_life_;
  std::int32_t since_halving_ = 0;
};

struct ShapeOptions {
  std::int32_t budget = 0;         // tokens of the largest step, >= 1
  std::int32_t max_num_seqs = 0;   // >= 1
  std::int32_t count_max = 0;      // buckets; the decode range is kept even where it alone has more
  std::int32_t token_tile = 16;    // buckets above the decode range are multiples of it, or the budget itself
  std::int32_t eager_tokens = 64;  // what a step outside the buckets costs, in tokens of padding; 0..2^20
};

/// Never more candidates than this above the decode range: where the budget has more tiles, several make up one.
inline constexpr std::int32_t shape_candidates_max = 256;

/// Buckets of the decode range: 8, 16, 32, 64, ... and last min(max_num_seqs, budget).
[[nodiscard]] std::vector<std::int32_t> decode_buckets(const ShapeOptions& options);

/// What may be chosen above it: multiples of the tile, and last the budget.
[[nodiscard]] std::vector<std::int32_t> bucket_candidates(const ShapeOptions& options);

/// For an engine that has seen nothing yet: the decode range; powers of two to 128, steps of 128 to 1024, then of a quarter, as
/// far as they are candidates; the budget. Not cut to count_max.
[[nodiscard]] StepBuckets default_buckets(const ShapeOptions& options);

/// Padding and eager penalties, in tokens times weight, of the histogram's steps up to the budget, plus one step of each default
/// bucket: what has not been seen for long must not become dear, and buckets to spare go where steps are likely.
[[nodiscard]] std::int64_t expected_waste(const StepHistogram& histogram, const StepBuckets& buckets,
                                          const ShapeOptions& options);

struct ShapeChoice {
  StepBuckets buckets;
  std::int64_t waste = 0;        // expected_waste of buckets
  std::int64_t evaluations = 0;  // of an interval's cost: at most K n (n + 1) / 2, with K buckets to choose from n candidates
};

/// The buckets of least expected waste: the decode range, and any of the candidates as far as count_max allows. Exact, by dynamic
/// programming over (buckets left, last bucket). Among equals the fewest, then the smallest.
[[nodiscard]] ShapeChoice choose_shapes(const StepHistogram& histogram, const ShapeOptions& options);

}  // namespace rubato::policies
