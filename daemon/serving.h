// SPDX-License-Identifier: Apache-2.0
// Serving: the lanes' threads and the door to them. HTTP threads submit requests and cancel them; the tuning thread and the
// control API change settings; everything reaches the lanes as moves in one bounded queue and takes effect at the next step
// boundary.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "daemon/observer.h"
#include "engine/lanes.h"
#include "engine/shape_builder.h"
#include "manifests/engine_spec.h"
#include "manifests/result.h"
#include "manifests/settings.h"

namespace rubato {

/// Receives one choice's tokens. Called on a lane's thread, one call after another; must not block. After an event with a finish
/// nothing follows.
class TokenSink {
 public:
  virtual ~TokenSink() = default;
  virtual void on_token(const engine::TokenEvent& event) = 0;
};

struct Submission {
  engine::Request request;  // id from next_id()
  std::shared_ptr<TokenSink> sink;
};

/// One lane in the status.
struct LaneStatus {
  policies::LaneCounts counts;
  std::int32_t device = 0;    // index in spec.devices
  engine::DeviceShare share;  // of the device, while its other lane is in a step
  std::uint64_t steps = 0;
  std::shared_ptr<const engine::ShapeStatus> shapes;  // null: not known yet
};

/// A snapshot for status and metrics, published after every step.
struct ServingStatus {
  policies::SchedulerCounts counts;  // of all lanes together
  std::vector<LaneStatus> lanes;
  policies::HandoffCounts handoffs;
  policies::LockstepCounts lockstep;
  std::int64_t kv_block_bytes = 0;
  std::int64_t state_bytes = 0;
  Settings settings;
  std::uint64_t steps = 0;
  std::int32_t effective_max_len = 0;
  std::int32_t vocabulary = 0;
  std::string backend;
  bool draining = false;
  std::optional<Error> failure;              // a device broke
  std::optional<TimePoint> step_open_since;  // of the step that has been running longest; for liveness
};

class Serving {
 public:
  virtual ~Serving() = default;

  [[nodiscard]] virtual SequenceId next_id() = 0;

  /// All of one request's choices together, or none. Any thread; never blocks. InvalidArgument (`prompt`, `max_tokens`): does not
  /// fit the effective limit or a token outside the vocabulary. ResourceExhausted: too many outstanding. Unavailable: draining.
  /// DeviceLost.
  [[nodiscard]] virtual Result<void> submit(std::vector<Submission> choices) = 0;

  /// Ends sequences whose client is gone (or whose stop string matched): blocks are free within one step. reason decides how it
  /// is counted. Unknown and ended ids are ignored.
  virtual void cancel(SequenceId id, Outcome reason) = 0;

  /// Current from the next step on; returns the number the settings got.
  virtual std::uint64_t apply(const KnobValues& knobs) = 0;

  [[nodiscard]] virtual std::shared_ptr<const ServingStatus> status() const = 0;

  /// Default targets for requests without headers of their own.
  virtual void set_objectives(const ObjectivesSpec& objectives) = 0;
  [[nodiscard]] virtual ObjectivesSpec objectives() const = 0;

  /// Now, on the timeline of every record. (The daemon owns the clock.)
  [[nodiscard]] virtual TimePoint now() const = 0;

  /// Refuses new submissions from now on.
  virtual void begin_drain() = 0;
  /// Nothing waiting or running.
  [[nodiscard]] virtual bool idle() const = 0;
};

}  // namespace rubato
