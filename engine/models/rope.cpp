// SPDX-License-Identifier: Apache-2.0
// The frequencies of plain, linearly scaled and Llama-3 scaled rope. Angles are computed in double: a float angle is off by 0.006
// radians at position 100,000.
#include "engine/models/rope.h"

#include <cmath>
#include <cstddef>
#include <numbers>

namespace rubato::engine {
namespace {

/// Llama 3.1's rule: long waves are stretched by factor, short ones kept, those between blended linearly in the number of turns
/// that the original context holds.
double llama3_scaled(double frequency, const RopeConfig& rope) {
  const double turns = static_cast<double>(rope.original_max_position) * frequency / (2.0 * std::numbers::pi);
  if (turns < rope.low_frequency_factor) return frequency / rope.factor;
  if (turns > rope.high_frequency_factor) return frequency;
  const double blend = (turns - rope.low_frequency_factor) / (rope.high_frequency_factor - rope.low_frequency_factor);
  return (1.0 - blend) * frequency / rope.factor + blend * frequency;
}

}  // namespace

std::vector<double> rope_frequencies(const RopeConfig& rope, std::int32_t head_size) {
  std::vector<double> frequencies(static_cast<std::size_t>(head_size / 2));
  for (std::size_t i = 0; i < frequencies.size(); ++i) {
    const double frequency = std::pow(rope.theta, -2.0 * static_cast<double>(i) / head_size);
    switch (rope.scaling) {
      case RopeScaling::None:
        frequencies[i] = frequency;
        break;
      case RopeScaling::Linear:
        frequencies[i] = frequency / rope.factor;
        break;
      case RopeScaling::Llama3:
        frequencies[i] = llama3_scaled(frequency, rope);
        break;
    }
  }
  return frequencies;
}

RopeTable make_rope_table(const RopeConfig& rope, std::int32_t head_size, std::int32_t positions) {
  return make_partial_rope_table(rope, head_size, head_size, positions);
}

RopeTable make_partial_rope_table(const RopeConfig& rope, std::int32_t rotary_size, std::int32_t head_size,
                                  std::int32_t positions) {
  std::vector<double> frequencies = rope_frequencies(rope, rotary_size);
  frequencies.resize(static_cast<std::size_t>(head_size / 2));  // an angle of zero: cosine 1, sine 0
  RopeTable table;
  table.cosines.reserve(frequencies.size() * static_cast<std::size_t>(positions));
  table.sines.reserve(table.cosines.capacity());
  for (std::int32_t position = 0; position < positions; ++position) {
    for (const double frequency : frequencies) {
      const double angle = static_cast<double>(position) * frequency;
      table.cosines.push_back(static_cast<float>(std::cos(angle)));
      table.sines.push_back(static_cast<float>(std::sin(angle)));
    }
  }
  return table;
}

}  // namespace rubato::engine
