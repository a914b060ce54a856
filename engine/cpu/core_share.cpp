// SPDX-License-Identifier: Apache-2.0
// Whole cores by division, the rest by a ledger of who has held the shared core for how long.
#include "engine/cpu/core_share.h"

#include <algorithm>

#include "manifests/check.h"

namespace rubato::engine::cpu {

CoreShare::CoreShare(std::int32_t cores) : cores_(cores) {
  CHECK(cores >= 1, "cores=", cores);
}

void CoreShare::begin(Side side, std::int32_t percent, TimePoint now) {
  CHECK(!in_step_[index_of(side)], "side=", index_of(side));
  in_step_[index_of(side)] = true;
  since_ = std::max(since_, now);
  if (!contended()) return;
  holder_ = other(side);  // it may be within a task on any core
  split(percent);
}

void CoreShare::end(Side side, TimePoint now) {
  CHECK(in_step_[index_of(side)], "side=", index_of(side));
  settle(now);
  in_step_[index_of(side)] = false;
}

void CoreShare::turn(Side side, std::int32_t percent, TimePoint now) {
  if (!contended()) return;
  settle(now);
  if (percent != percent_) split(percent);
  if (fractions_[0] > 0 && holder_ == side && ahead(side) >= turn_length() / 2) holder_ = other(side);
}

void CoreShare::resume(Side side, TimePoint now) {
  if (holder_ == side) since_ = std::max(since_, now);
}

std::int32_t CoreShare::cores(Side side) const {
  if (!contended()) return in_step_[index_of(other(side))] ? 0 : cores_;
  const bool holds = fractions_[0] > 0 && holder_ == side;
  return own_[index_of(side)] + (holds ? 1 : 0);
}

TimePoint CoreShare::next_turn(Side side) const {
  if (!contended() || fractions_[0] == 0 || holder_ != side) return TimePoint::max();
  const std::int64_t rate = fractions_[index_of(other(side))];
  const std::int64_t left = std::max<std::int64_t>(0, turn_length() / 2 - ahead(side));
  return since_ + Duration((left + rate - 1) / rate);
}

void CoreShare::settle(TimePoint now) {
  const std::int64_t elapsed = std::max<std::int64_t>(0, (now - since_).count());
  since_ = std::max(since_, now);
  if (!contended() || fractions_[0] == 0) return;
  lead_ += holder_ == Side::First ? elapsed * fractions_[1] : -elapsed * fractions_[0];
  lead_ = std::clamp(lead_, -fractions_[1] * memory.count(), fractions_[0] * memory.count());
}

void CoreShare::split(std::int32_t percent) {
  CHECK(percent >= 1 && percent <= 99, "percent=", percent);
  percent_ = percent;
  const std::int64_t due = static_cast<std::int64_t>(percent) * cores_;
  fractions_[0] = static_cast<std::int32_t>(due % 100);
  fractions_[1] = fractions_[0] > 0 ? 100 - fractions_[0] : 0;
  own_[0] = static_cast<std::int32_t>(due / 100);
  own_[1] = cores_ - own_[0] - (fractions_[0] > 0 ? 1 : 0);
}

/// In the unit of lead_: from being behind by half of it to being ahead by half of it, each side holds the core for its
/// fraction of a round.
std::int64_t CoreShare::turn_length() const {
  return static_cast<std::int64_t>(fractions_[0]) * fractions_[1] * round.count() / 100;
}

}  // namespace rubato::engine::cpu
