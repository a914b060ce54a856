// SPDX-License-Identifier: Apache-2.0
// The passes over a row of logits that sampling is made of. Written so that a compiler vectorises them at any width while every
// result stays the same bits: sums run in sixteen fixed lanes, and exp is a polynomial of our own. Private to sampling.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "engine/tokens.h"

namespace rubato::engine::kernels {

/// Passes work on stretches of this many logits, so that their intermediate values stay in the first-level cache.
constexpr std::size_t stretch_size = 1024;

struct Argmax {
  TokenId token = 0;  // the lowest id among equals
  float value = 0;
  bool finite = true;  // every logit was; token and value mean nothing otherwise
};

/// Of raw logits, none of which may be infinite.
[[nodiscard]] Argmax argmax(std::span<const float> logits);

/// The largest value of logits that may hold -infinity but no NaN; -infinity when empty.
[[nodiscard]] float largest(std::span<const float> logits);

/// How far each logit lies below the largest, in units of temperature: distances[i] = (top - logits[i]) * inverse_temperature, >=
/// 0.
void distances(std::span<const float> logits, float top, float inverse_temperature, float* distances);

/// Beyond this distance a weight counts as zero (exp(-87) is the last normal float).
constexpr float distance_max = 87.0F;

/// weights[i] = exp(-distances[i]); zero where the distance is above limit, which is at most distance_max.
void weights(std::span<const float> distances, float limit, float* weights);

/// The same for one distance; the same bits.
[[nodiscard]] float weight(float distance);

/// Sum of at most stretch_size values, in fixed lanes.
[[nodiscard]] double sum(std::span<const float> values);

/// Sum of exp(logits[i] - top) over all.
[[nodiscard]] double exp_sum(std::span<const float> logits, float top);

}  // namespace rubato::engine::kernels
