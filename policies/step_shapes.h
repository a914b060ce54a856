// SPDX-License-Identifier: Apache-2.0
// Which token counts are worth preparing for: a histogram of the tokens that steps really had, and the exact choice of the
// buckets that waste least for it under the current budget. Pure; what a bucket is made of (a graph, a plan) is the backend's
// business.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <span>
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

}  // namespace rubato::policies
