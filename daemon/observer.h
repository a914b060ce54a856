// SPDX-License-Identifier: Apache-2.0
// What serving tells the rest of the daemon about every request and step: metrics count it, latency windows sample it.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "engine/lanes.h"
#include "engine/shape_builder.h"
#include "manifests/settings.h"
#include "policies/scheduler.h"
#include "policies/time.h"

namespace rubato {

enum class Outcome : std::uint8_t { Stop, Length, Aborted, Failed };
/// Judged against the request's own targets. An aborted request that had missed nothing so far is Unjudged.
enum class Verdict : std::uint8_t { Good, Bad, Unjudged };

/// One choice, at its end.
struct RequestRecord {
  SequenceId id;
  TimePoint arrival;                   // when the request had been read completely
  std::optional<TimePoint> scheduled;  // first step with a row of it
  std::optional<TimePoint> first_token;
  TimePoint end;
  std::int32_t prompt_tokens = 0;
  std::int32_t output_tokens = 0;
  std::int32_t max_new_tokens = 0;
  Duration ttft_target{};
  Duration itl_target{};
  Duration itl_p99{};  // nearest rank over its own gaps; zero with fewer than two tokens
  Duration itl_mean{};
  bool ttft_missed = false;
  bool itl_missed = false;
  Outcome outcome = Outcome::Stop;
  Verdict verdict = Verdict::Unjudged;
};

/// One choice entering the lane.
struct Arrival {
  SequenceId id;
  TimePoint time;  // when the request had been read completely
  std::int32_t prompt_tokens = 0;
  std::int32_t cached_tokens = 0;  // of them: came from the prefix cache; known from its first token on
  std::int32_t max_new_tokens = 0;
  Duration ttft_target{};
  Duration itl_target{};
};

/// Called on the lanes' threads, one call after another (on_request and on_rejected: on an HTTP thread); must return quickly and
/// never block on a client. Implemented by Metrics, LatencyWindows and TwinFeed.
class Observer {
 public:
  virtual ~Observer() = default;
  /// A request was let in with this many choices; each arrives by itself as the lane takes it. (On an HTTP thread.)
  virtual void on_request(std::int32_t choices) = 0;
  virtual void on_arrival(const Arrival& arrival) = 0;
  /// Refused at the edge, with all its choices: queue full or draining. Each counts as a miss, as each would have been judged.
  virtual void on_rejected(TimePoint now, std::int32_t choices) = 0;
  /// A token after the first: the gap since the one before it.
  virtual void on_token_gap(SequenceId id, Duration gap) = 0;
  virtual void on_first_token(const Arrival& arrival, Duration ttft) = 0;
  virtual void on_request_end(const RequestRecord& record) = 0;
  /// counts: of all lanes together.
  virtual void on_step(const engine::StepRecord& record, const policies::SchedulerCounts& counts) = 0;
  virtual void on_settings(const Settings& settings, TimePoint now) = 0;
  /// A set of step shapes was built, or could not be. (On the shape builder's thread.)
  virtual void on_shapes_built(const engine::ShapeBuild& /*build*/) {}
  /// The lane has changed over to a new set between two steps, which took so long.
  virtual void on_shapes_taken(Duration /*swap*/) {}
};

}  // namespace rubato
