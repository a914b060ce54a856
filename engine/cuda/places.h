// SPDX-License-Identifier: Apache-2.0
// Where a lane's steps run: on the whole device while its sibling rests, on its side of a rung while the sibling works too. Keeps
// the streams of every such place, and what the two lanes tell each other: whether they are in a step, and how the device is
// shared.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "engine/backend.h"
#include "engine/cuda/device_split.h"
#include "engine/cuda/runtime.h"

namespace rubato::engine::cuda {

/// Streams of one place: steps run on one, graphs for the place are captured on the other. Kernels of a graph run where they were
/// captured, so a graph is replayed in its own place alone.
struct Place {
  Stream step;
  Stream build;
};

/// What two lanes on one device know of each other. Any thread.
class Sharing {
 public:
  /// split null: no green contexts; then each lane has the whole device, and why says what is missing.
  Sharing(std::shared_ptr<const DeviceSplit> split, std::string why) : split_(std::move(split)), why_(std::move(why)) {}

  [[nodiscard]] const std::shared_ptr<const DeviceSplit>& split() const { return split_; }
  [[nodiscard]] const std::string& why() const { return why_; }

  /// percent: of that side.
  void use_share(Side side, std::int32_t percent) {
    percent_first_.store(side == Side::First ? percent : 100 - percent, std::memory_order_relaxed);
  }
  [[nodiscard]] DeviceShare share(Side side) const;
  /// Of the share that was set last. Only with a split.
  [[nodiscard]] std::int32_t rung() const { return split_->nearest(percent_first_.load(std::memory_order_relaxed)); }

  /// Counts begins and ends of steps of a side: odd while it is in one. Two that begin at once see each other.
  void count(Side side) { steps_[index(side)].fetch_add(1); }
  [[nodiscard]] std::uint64_t counted(Side side) const { return steps_[index(side)].load(); }

 private:
  static std::size_t index(Side side) { return side == Side::First ? 0 : 1; }

  std::shared_ptr<const DeviceSplit> split_;
  std::string why_;
  std::array<std::atomic<std::uint64_t>, 2> steps_{};
  std::atomic<std::int32_t> percent_first_{50};
};

/// One lane's. begin_step() and end_step() belong to the lane's thread, for_builds() to the builder's; share() to all.
class Places {
 public:
  [[nodiscard]] static Result<Places> make(Stream::Urgency urgency);

  /// From now on there is a sibling. Makes the streams of every rung; before the first step.
  [[nodiscard]] Result<void> join(std::shared_ptr<Sharing> sharing, Side side, Stream::Urgency urgency);

  /// The whole device's; also for what is done between steps.
  [[nodiscard]] const Place& whole() const { return whole_; }
  /// A rung's, and its number; none without a sibling or green contexts.
  struct Part {
    std::int32_t rung;
    const Place* place;
  };
  /// Where graphs for the share in use are captured.
  [[nodiscard]] std::optional<Part> for_builds() const;
  /// Where the step that begins runs: on a rung when the sibling is in a step, or has run one since the last step began here. So
  /// between two of its steps a sibling keeps its share, and a lane whose sibling has come to rest has the device after one more
  /// step. None: the whole device.
  [[nodiscard]] std::optional<Part> begin_step();
  void end_step();

  void use_share(std::int32_t percent) const {
    if (sharing_ != nullptr) sharing_->use_share(side_, percent);
  }
  [[nodiscard]] DeviceShare share() const { return sharing_ == nullptr ? DeviceShare{} : sharing_->share(side_); }
  [[nodiscard]] const Sharing* sharing() const { return sharing_.get(); }
  /// No sibling was ever made, or it is gone.
  [[nodiscard]] bool alone() const { return sharing_.use_count() <= 1; }
  /// Until everything queued anywhere is done.
  void wait() const;

 private:
  explicit Places(Place whole) : whole_(std::move(whole)) {}
  std::shared_ptr<Sharing> sharing_;  // outlives the streams of its green contexts
  Side side_ = Side::First;
  std::uint64_t seen_ = 0;  // of the sibling's count
  Place whole_;
  std::vector<Place> rungs_;
};

}  // namespace rubato::engine::cuda
