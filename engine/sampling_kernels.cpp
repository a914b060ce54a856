// SPDX-License-Identifier: Apache-2.0
// The vectorisable passes of sampling, in plain C++.
#include "engine/sampling_kernels.h"

#include <algorithm>
#include <bit>
#include <limits>

namespace rubato::engine::kernels {
namespace {

constexpr std::size_t lanes = sum_lanes;

}  // namespace

Argmax argmax(std::span<const float> logits) {
  constexpr std::uint32_t infinity_bits = 0x7F800000U;
  float best[lanes];
  std::int32_t at[lanes];
  std::uint32_t bad[lanes] = {};
  std::fill(std::begin(best), std::end(best), -std::numeric_limits<float>::infinity());
  std::fill(std::begin(at), std::end(at), 0);
  const std::size_t whole = logits.size() / lanes * lanes;
  const float* values = logits.data();
  for (std::size_t begin = 0; begin < whole; begin += lanes) {
    for (std::size_t lane = 0; lane < lanes; ++lane) {
      const float value = values[begin + lane];
      bad[lane] |= static_cast<std::uint32_t>((std::bit_cast<std::uint32_t>(value) & 0x7FFFFFFFU) >= infinity_bits);
      const bool better = value > best[lane];
      best[lane] = better ? value : best[lane];
      at[lane] = better ? static_cast<std::int32_t>(begin + lane) : at[lane];
    }
  }
  for (std::size_t i = whole; i < logits.size(); ++i) {
    const std::size_t lane = i - whole;
    bad[lane] |= static_cast<std::uint32_t>((std::bit_cast<std::uint32_t>(values[i]) & 0x7FFFFFFFU) >= infinity_bits);
    if (values[i] > best[lane]) {
      best[lane] = values[i];
      at[lane] = static_cast<std::int32_t>(i);
    }
  }
  Argmax result{.token = at[0], .value = best[0], .finite = bad[0] == 0};
  for (std::size_t lane = 1; lane < lanes; ++lane) {
    result.finite = result.finite && bad[lane] == 0;
    if (best[lane] > result.value || (best[lane] == result.value && at[lane] < result.token)) {
      result.value = best[lane];
      result.token = at[lane];
    }
  }
  return result;
}

float largest(std::span<const float> logits) {
  float best[lanes];
  std::fill(std::begin(best), std::end(best), -std::numeric_limits<float>::infinity());
  const std::size_t whole = logits.size() / lanes * lanes;
  const float* values = logits.data();
  for (std::size_t begin = 0; begin < whole; begin += lanes) {
    for (std::size_t lane = 0; lane < lanes; ++lane)
      best[lane] = values[begin + lane] > best[lane] ? values[begin + lane] : best[lane];
  }
  for (std::size_t i = whole; i < logits.size(); ++i) best[i - whole] = std::max(best[i - whole], values[i]);
  return *std::max_element(std::begin(best), std::end(best));
}

void distances(std::span<const float> logits, float top, float inverse_temperature, float* distances) {
  for (std::size_t i = 0; i < logits.size(); ++i) distances[i] = distance(top, logits[i], inverse_temperature);
}

void weights(std::span<const float> distances, float limit, float* weights) {
  for (std::size_t i = 0; i < distances.size(); ++i) weights[i] = weight_within(distances[i], limit);
}

double sum(std::span<const float> values) {
  float partial[lanes] = {};
  const std::size_t whole = values.size() / lanes * lanes;
  for (std::size_t begin = 0; begin < whole; begin += lanes) {
    for (std::size_t lane = 0; lane < lanes; ++lane) partial[lane] += values[begin + lane];
  }
  for (std::size_t i = whole; i < values.size(); ++i) partial[i - whole] += values[i];
  double total = 0;
  for (const float value : partial) total += static_cast<double>(value);
  return total;
}

double exp_sum(std::span<const float> logits, float top) {
  float distance[stretch_size];
  float weight[stretch_size];
  double total = 0;
  for (std::size_t begin = 0; begin < logits.size(); begin += stretch_size) {
    const std::span<const float> part = logits.subspan(begin, std::min(stretch_size, logits.size() - begin));
    distances(part, top, 1.0F, distance);
    weights(std::span<const float>(distance, part.size()), distance_max, weight);
    total += sum(std::span<const float>(weight, part.size()));
  }
  return total;
}

}  // namespace rubato::engine::kernels
