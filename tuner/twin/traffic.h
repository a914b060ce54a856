// SPDX-License-Identifier: Apache-2.0
// Recent traffic as the twin replays it: when requests came, how long they were, what they were promised. Bounded; fed by the
// tuning loop. Futures are made of it: block bootstrap, so that bursts stay bursts.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <span>
#include <unordered_map>
#include <vector>

#include "policies/ids.h"
#include "policies/time.h"

namespace rubato::tuner {

/// One choice of one request, as the scheduler sees it.
struct TrafficRequest {
  TimePoint arrival;                // in a future: from TimePoint{} on
  std::int32_t prompt_tokens = 1;   // to be computed: without what the prefix cache had
  std::int32_t output_tokens = 1;   // that it had; of one that still runs, at least those so far
  std::int32_t max_new_tokens = 1;  // that it was allowed
  Duration ttft_target{};
  Duration itl_target{};
  bool ended = false;  // output_tokens is final

  friend bool operator==(const TrafficRequest&, const TrafficRequest&) = default;
};

/// The last requests, oldest first. Not thread-safe. Memory: count_max requests.
class TrafficLog {
 public:
  explicit TrafficLog(std::size_t count_max = 8192);

  void arrived(SequenceId id, const TrafficRequest& request);
  /// What its first step found in the prefix cache.
  void started(SequenceId id, std::int32_t cached_tokens);
  void ended(SequenceId id, std::int32_t output_tokens);

  /// Those that came in [from, to), in order of arrival. Where one still runs, its output is guessed from those of the log that
  /// ended later than it has got so far (else those that end late would be missing), within its max_new_tokens. How far it has
  /// got is told by those that came after it and have ended. The same log gives the same guesses.
  [[nodiscard]] std::vector<TrafficRequest> between(TimePoint from, TimePoint to) const;
  [[nodiscard]] std::size_t size() const { return requests_.size(); }

 private:
  struct Entry {
    SequenceId id;
    TrafficRequest request;
    bool started = false;
  };
  [[nodiscard]] std::vector<std::int32_t> outputs_so_far() const;

  std::size_t count_max_;
  std::deque<Entry> requests_;
  std::uint64_t first_number_ = 0;  // of requests_.front()
  std::unordered_map<SequenceId, std::uint64_t> running_;
};

/// A part of the past and how much of the future is expected to be like it.
struct TrafficPhase {
  std::vector<TrafficRequest> requests;  // in order of arrival
  TimePoint begin;
  TimePoint end;      // later than begin
  double weight = 1;  // > 0
};

struct FutureOptions {
  Duration length = std::chrono::seconds(60);  // of each future
  Duration block = std::chrono::seconds(2);    // of the past that is kept together
  std::int32_t count = 3;
  std::uint64_t seed = 1;
};

/// Futures from [0, length), each drawn block by block from the phases; within one future the phases follow one another in runs,
/// as they did, each for as long as its weight. The same arguments give the same futures. Empty where no phase has a request.
[[nodiscard]] std::vector<std::vector<TrafficRequest>> bootstrap_futures(std::span<const TrafficPhase> phases,
                                                                         const FutureOptions& options);

}  // namespace rubato::tuner
