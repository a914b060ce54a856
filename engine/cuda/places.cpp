// SPDX-License-Identifier: Apache-2.0
#include "engine/cuda/places.h"

#include <utility>

namespace rubato::engine::cuda {

DeviceShare Sharing::share(Side side) const {
  const std::int32_t percent_first = percent_first_.load(std::memory_order_relaxed);
  const std::int32_t asked = side == Side::First ? percent_first : 100 - percent_first;
  // Without green contexts both lanes' kernels are spread over the whole device.
  return {.asked_percent = asked,
          .given_percent = split_ == nullptr ? 100 : split_->percent(split_->nearest(percent_first), side)};
}

Result<Places> Places::make(Stream::Urgency urgency) {
  Result<Stream> step = Stream::make(urgency);
  if (!step) return Unexpected(std::move(step).error());
  Result<Stream> build = Stream::make();
  if (!build) return Unexpected(std::move(build).error());
  return Places({.step = std::move(*step), .build = std::move(*build)});
}

Result<void> Places::join(std::shared_ptr<Sharing> sharing, Side side, Stream::Urgency urgency) {
  std::vector<Place> rungs;
  if (const DeviceSplit* const split = sharing->split().get(); split != nullptr) {
    for (std::int32_t rung = 0; rung < split->rungs(); ++rung) {
      Result<Stream> step = split->make_stream(rung, side, urgency);
      if (!step) return Unexpected(std::move(step).error());
      Result<Stream> build = split->make_stream(rung, side, Stream::Urgency::Normal);
      if (!build) return Unexpected(std::move(build).error());
      rungs.push_back({.step = std::move(*step), .build = std::move(*build)});
    }
  }
  rungs_.clear();  // of an earlier sibling's split, which ends with it
  sharing_ = std::move(sharing);
  side_ = side;
  seen_ = 0;
  rungs_ = std::move(rungs);
  return {};
}

std::optional<Places::Part> Places::for_builds() const {
  if (rungs_.empty()) return std::nullopt;
  const std::int32_t rung = sharing_->rung();
  return Part{.rung = rung, .place = &rungs_[static_cast<std::size_t>(rung)]};
}

std::optional<Places::Part> Places::begin_step() {
  if (sharing_ == nullptr) return std::nullopt;
  sharing_->count(side_);
  const std::uint64_t sibling = sharing_->counted(side_ == Side::First ? Side::Second : Side::First);
  const bool in_a_step = sibling % 2 == 1;
  const bool ran_one = std::exchange(seen_, sibling) != sibling;
  return in_a_step || ran_one ? for_builds() : std::nullopt;
}

void Places::end_step() {
  if (sharing_ != nullptr) sharing_->count(side_);
}

void Places::wait() const {
  static_cast<void>(whole_.step.wait());
  static_cast<void>(whole_.build.wait());
  for (const Place& place : rungs_) {
    static_cast<void>(place.step.wait());
    static_cast<void>(place.build.wait());
  }
}

}  // namespace rubato::engine::cuda
