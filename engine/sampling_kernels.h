// SPDX-License-Identifier: Apache-2.0
// The host's passes over a row of logits that sampling is made of. Written so that a compiler vectorises them at any width while
// every result stays the same bits: sums run in sixteen fixed lanes, and exp is a polynomial of our own. Private to sampling.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "engine/sampling_math.h"
#include "engine/tokens.h"

namespace rubato::engine::kernels {

struct Argmax {
  TokenId token = 0;  // the lowest id among equals
  float value = 0;
  bool finite = true;  // every logit was; token and value mean nothing otherwise
};

/// Of raw logits, none of which may be infinite.
[[nodiscard]] Argmax argmax(std::span<const float> logits);

/// The largest value of logits that may hold -infinity but no NaN; -infinity when empty.
[[nodiscard]] float largest(std::span<const float> logits);

/// distances[i] = distance(top, logits[i], inverse_temperature).
void distances(std::span<const float> logits, float top, float inverse_temperature, float* distances);

/// weights[i] = weight_within(distances[i], limit).
void weights(std::span<const float> distances, float limit, float* weights);

/// Sum of at most stretch_size values, in fixed lanes.
[[nodiscard]] double sum(std::span<const float> values);

/// Sum of exp(logits[i] - top) over all.
[[nodiscard]] double exp_sum(std::span<const float> logits, float top);

}  // namespace rubato::engine::kernels
