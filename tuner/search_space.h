// SPDX-License-Identifier: Apache-2.0
// The legal settings: which knob values may be proposed, how any values are brought to the nearest legal ones, and the finite
// grid that a search chooses from. Every value it returns keeps max_num_batched_tokens >= max_num_seqs + min_prefill_quantum.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "manifests/settings.h"
#include "tuner/tuner.h"

namespace rubato::tuner {

/// Whether the engine does the same under both: they differ at most in knobs without effect (the margin of another policy than
/// Deadline, share and prefill devices in mode Chunked).
[[nodiscard]] bool act_alike(const KnobValues& a, const KnobValues& b);

/// Bounds, pins and grid of one search. Immutable.
class LegalSettings {
 public:
  explicit LegalSettings(const SearchSpace& space);

  /// Whether anything may move at all.
  [[nodiscard]] bool any_free() const;

  /// Whether these values are within the bounds of every free knob, equal the base in every other (also in reservation, which is
  /// a person's to set), and keep the cross-knob rule.
  [[nodiscard]] bool contains(const KnobValues& knobs) const;

  /// The nearest legal values. Where pins and bounds leave none that keeps the cross-knob rule, the pins win.
  [[nodiscard]] KnobValues clamp(KnobValues knobs) const;

  /// clamp(), with knobs that have no effect set to the base, so that settings that act alike compare equal.
  [[nodiscard]] KnobValues canonical(const KnobValues& knobs) const;

  /// All grid settings, canonical, legal, without repeats, in a fixed order; a seeded sample of them when there are more than
  /// count_max.
  [[nodiscard]] std::vector<KnobValues> grid(std::size_t count_max, std::uint64_t seed) const;

  [[nodiscard]] const SearchSpace& space() const { return space_; }

 private:
  SearchSpace space_;
};

}  // namespace rubato::tuner
