// SPDX-License-Identifier: Apache-2.0
// Divides a device's multiprocessors between two lanes with green contexts: one split into small groups, and a ladder of rungs,
// each of which gives so many groups to the first side and the rest to the second. All rungs exist from the start, so that moving
// from one to another costs nothing. Talks to the driver through entry points, so that nothing links it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "engine/cuda/runtime.h"

namespace rubato::engine::cuda {

enum class Side : std::uint8_t { First, Second };

/// Immutable; any thread.
class DeviceSplit {
 public:
  /// The least that a rung moves from one side to the other, in multiprocessors, where the driver asks for no more.
  static constexpr std::int32_t granularity = 8;

  /// NotFound, with the driver's reason, where it has no green contexts, refuses the split, or cannot give either side enough.
  [[nodiscard]] static Result<std::shared_ptr<const DeviceSplit>> make(const DeviceFacts& device);
  ~DeviceSplit();
  DeviceSplit(const DeviceSplit&) = delete;
  DeviceSplit& operator=(const DeviceSplit&) = delete;

  /// At least one; from the smallest share of the first side to its largest.
  [[nodiscard]] std::int32_t rungs() const;
  /// The one whose share of the first side is nearest to percent.
  [[nodiscard]] std::int32_t nearest(std::int32_t percent) const;
  [[nodiscard]] std::int32_t multiprocessors(std::int32_t rung, Side side) const;
  /// Of both sides together 100.
  [[nodiscard]] std::int32_t percent(std::int32_t rung, Side side) const;
  /// A stream whose kernels run on that side's multiprocessors alone. It must end before this does.
  [[nodiscard]] Result<Stream> make_stream(std::int32_t rung, Side side, Stream::Urgency urgency) const;

 private:
  struct Driver;
  struct Part;  // a green context
  struct Rung;

  DeviceSplit();
  [[nodiscard]] Result<void> climb(const DeviceFacts& device);
  [[nodiscard]] const Part& part(std::int32_t rung, Side side) const;

  std::unique_ptr<Driver> driver_;
  std::vector<Rung> rungs_;
};

}  // namespace rubato::engine::cuda
