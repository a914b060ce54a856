// SPDX-License-Identifier: Apache-2.0
// Cosines and sines of rotary position embeddings by absolute position. One table for every backend, so that they rotate by equal
// angles.
#pragma once

#include <cstdint>
#include <vector>

#include "engine/model/config.h"

namespace rubato::engine {

struct RopeTable {
  std::vector<float> cosines;  // (positions, head_size / 2)
  std::vector<float> sines;    // (positions, head_size / 2)
};

/// Angle per token of each of the head_size / 2 pairs, after scaling.
[[nodiscard]] std::vector<double> rope_frequencies(const RopeConfig& rope, std::int32_t head_size);

[[nodiscard]] RopeTable make_rope_table(const RopeConfig& rope, std::int32_t head_size, std::int32_t positions);

/// Of heads that are turned in part: the first rotary_size / 2 pairs as a head of rotary_size would be, the others by no angle.
[[nodiscard]] RopeTable make_partial_rope_table(const RopeConfig& rope, std::int32_t rotary_size, std::int32_t head_size,
                                                std::int32_t positions);

}  // namespace rubato::engine
