// SPDX-License-Identifier: Apache-2.0
// Keeps a lane's step shapes fit for its load, beside the lane: sees the steps, decides when another set would pay, has the
// backend build it and hands it over at a step boundary. It has no thread and no clock: the lane's thread calls one side, a
// builder thread the other, and they meet in a ring and in one slot, neither of which ever makes the lane wait.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <stop_token>
#include <string>
#include <vector>

#include "engine/backend.h"
#include "manifests/units.h"
#include "policies/step_shapes.h"
#include "policies/time.h"

namespace rubato::engine {

/// The knobs that decide how large steps get, and where they run.
struct ShapeTarget {
  std::int32_t budget = 0;           // max_num_batched_tokens
  std::int32_t max_num_seqs = 0;     // decode rows of a step
  std::int32_t given_percent = 100;  // of the device, Backend::share(); heeded where shapes are made for a share
  friend bool operator==(const ShapeTarget&, const ShapeTarget&) = default;
};

/// When a set is built. A moved target is followed soon; a moved load, whose steps run as well but for some padding, only once it
/// has lasted.
struct ShapeBuilderOptions {
  std::int32_t half_life = 4096;                           // steps after which what was seen counts half
  Duration target_pause = std::chrono::milliseconds(250);  // from one build to the next for a moved target, at the least
  std::int32_t build_share = 5;                            // and building takes at most one part in so many of the time
  Duration weigh_interval = std::chrono::seconds(2);       // how often the set is compared with the best
  std::int32_t excess_percent = 10;                        // a set that wastes so much more than the best is replaced,
  std::int32_t waste_percent = 1;                          // if that is also so much of all tokens computed,
  Duration excess_hold = std::chrono::seconds(6);          // once it has been so for so long
  Duration load_pause = std::chrono::seconds(30);          // and never sooner after a build than this
  std::int32_t evidence_steps = 256;                       // steps seen before a load counts as known
  Duration retry_pause = std::chrono::seconds(10);         // after a build that failed
};

/// What became of a build.
struct ShapeBuild {
  Result<void> outcome;
  Duration duration{};
  std::int32_t buckets = 0;
  std::int64_t bytes = 0;
};

/// For status and metrics.
struct ShapeStatus {
  policies::StepBuckets buckets;  // that the lane runs with; empty: everything runs eagerly
  std::int64_t bytes = 0;
  std::uint64_t built = 0;
  std::uint64_t failed = 0;
  std::string last_error;  // of the last build, if it failed
  friend bool operator==(const ShapeStatus&, const ShapeStatus&) = default;
};

/// Two threads: the lane's and one builder's, each calling only its own side. Both have ended before it is destroyed, and it
/// before the backend.
class ShapeBuilder {
 public:
  ShapeBuilder(Backend& backend, const ShapeBuilderOptions& options);
  ~ShapeBuilder();
  ShapeBuilder(const ShapeBuilder&) = delete;
  ShapeBuilder& operator=(const ShapeBuilder&) = delete;

  // ---- the lane's side: no lock, no wait, no allocation
  /// A step of so many tokens was run. Forgotten when the builder has fallen 4096 steps behind.
  void observe(std::int32_t step_tokens);
  /// A set waits to be taken.
  [[nodiscard]] bool offered() const { return slot_.load(std::memory_order_acquire) == Slot::Offered; }
  /// Between two steps: gives the offered set to the backend and lays the one in use until now into the slot, for the builder to
  /// free. False: nothing was offered.
  bool take();

  // ---- the builder's side
  /// One look: frees what the lane has given back, takes in what it saw, and, when a set is due for this target, builds and
  /// offers it; that may take seconds. Of several targets that came since the last look only the newest counts. now() is called
  /// once, or twice when it builds. Returns what was built, or nothing. Call it every 100 ms or so, and at once when the target
  /// moves.
  template <class Clock>
  std::optional<ShapeBuild> look(const ShapeTarget& target, const std::stop_token& stop, Clock&& now) {
    const TimePoint begin = now();
    if (!plan(target, begin)) return std::nullopt;
    build(stop);
    return finish(begin, now());
  }
  /// As of the last look.
  [[nodiscard]] const ShapeStatus& status() const { return status_; }

 private:
  /// Empty -> Offered (builder) -> Taking -> Returned (lane) -> Empty (builder); or Offered -> Empty, when the builder withdraws.
  /// What is in held_ belongs to the side whose turn it is.
  enum class Slot : std::uint8_t { Empty, Offered, Taking, Returned };
  static constexpr std::uint64_t ring_size = 4096;

  [[nodiscard]] bool plan(ShapeTarget target, TimePoint now);
  void build(const std::stop_token& stop);
  [[nodiscard]] std::optional<ShapeBuild> finish(TimePoint begin, TimePoint end);
  void settle();
  /// Withdraws a set that the lane has not come to, for the newer one that is to be built: no more than two sets ever live. False
  /// while the lane is changing over.
  [[nodiscard]] bool make_room();
  void take_steps();
  void follow(const ShapeTarget& target);
  [[nodiscard]] bool load_has_moved(const policies::ShapeChoice& best, TimePoint now);
  [[nodiscard]] policies::ShapeOptions choice_options() const;

  Backend& backend_;
  const ShapeBuilderOptions options_;
  const ShapeLimits limits_;

  // The lane writes entries below ring_end_, the builder reads them and moves ring_begin_.
  std::vector<std::int32_t> ring_;
  alignas(64) std::atomic<std::uint64_t> ring_end_{0};
  alignas(64) std::atomic<std::uint64_t> ring_begin_{0};

  alignas(64) std::atomic<Slot> slot_{Slot::Empty};
  std::unique_ptr<StepShapes> held_;

  // The builder's own.
  policies::StepHistogram histogram_;
  std::int32_t steps_ = 0;                   // seen under this target and set
  bool steps_are_new_ = false;               // since the set was last weighed
  std::optional<ShapeTarget> target_;        // newest
  std::optional<ShapeTarget> built_target_;  // that the newest set was built, or kept, for
  policies::StepBuckets newest_;             // the newest set's, offered or in use
  std::int32_t newest_percent_ = 100;        // and the share that it was built for
  std::optional<TimePoint> excess_since_;
  TimePoint target_not_before_{};
  TimePoint weigh_not_before_{};
  TimePoint load_not_before_{};
  policies::StepBuckets wish_;             // being built
  std::unique_ptr<StepShapes> built_;      // between build() and finish()
  std::optional<Error> error_;             // of the build
  policies::StepBuckets offered_buckets_;  // of the set in the slot
  std::int64_t offered_bytes_ = 0;
  std::int32_t offered_percent_ = 100;
  std::int32_t used_percent_ = 100;  // of the set that the lane runs with
  ShapeStatus status_;
};

}  // namespace rubato::engine
