// SPDX-License-Identifier: Apache-2.0
// One choice's clockwork: when it arrived, when each token came, and the verdict against its own targets. Pure arithmetic on
// times handed in, so that the rules for good, bad and unjudged are tested without a thread.
#pragma once

#include <optional>
#include <vector>

#include "daemon/observer.h"

namespace rubato {

/// Owned by the lane thread; one per choice in flight.
class RequestTiming {
 public:
  explicit RequestTiming(const Arrival& arrival);

  /// Books a token. Returns the gap since the token before, none for the first.
  std::optional<Duration> on_token(TimePoint time);
  /// The first step with a row of it, and what that step found of its prompt in the prefix cache.
  void on_scheduled(TimePoint time, std::int32_t cached_tokens);

  /// The record at the end. Finished requests are judged on both targets; an aborted one is Bad if it had missed a target by then
  /// (its waiting so far is a lower bound of what it would have got), else Unjudged; a failed one is Bad.
  [[nodiscard]] RequestRecord finish(Outcome outcome, TimePoint end);

  [[nodiscard]] const Arrival& arrival() const { return arrival_; }
  [[nodiscard]] bool has_token() const { return first_token_.has_value(); }

 private:
  Arrival arrival_;
  std::optional<TimePoint> scheduled_;
  std::optional<TimePoint> first_token_;
  TimePoint last_token_{};
  std::vector<Duration> gaps_;  // at most max_new_tokens - 1
};

}  // namespace rubato
