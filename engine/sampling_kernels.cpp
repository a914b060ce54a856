// SPDX-License-Identifier: Apache-2.0
// The vectorisable passes of sampling, in plain C++.
#include "engine/sampling_kernels.h"

#include <algorithm>
#include <bit>
#include <limits>

namespace rubato::engine::kernels {
namespace {

constexpr std::size_t lanes = 16;
constexpr auto distance_max_bits = std::bit_cast<std::int32_t>(distance_max);

/// exp(-distance) for 0 <= distance <= distance_max, relative error below 2e-7. Splits off a power of two (the addition of 1.5 *
/// 2^23 rounds to an integer whose bits then stand in the low mantissa) and evaluates a polynomial on +-ln(2)/2.
inline float exp_negative(float distance) {
  constexpr float log2_e = 1.44269504F;
  constexpr float round_shift = 12582912.0F;
  constexpr float ln2_high = 0.693359375F;
  constexpr float ln2_low = -2.12194440e-4F;
  const float x = -distance;
  const float shifted = x * log2_e + round_shift;
  const float power = shifted - round_shift;
  float r = x - power * ln2_high;
  r = r - power * ln2_low;
  // Taylor coefficients to degree 6: the remainder is below 2e-7 * exp(r) on |r| <= 0.3466.
  float p = 1.0F / 720;
  p = p * r + 1.0F / 120;
  p = p * r + 1.0F / 24;
  p = p * r + 1.0F / 6;
  p = p * r + 0.5F;
  p = p * r + 1.0F;
  p = p * r + 1.0F;
  const std::uint32_t exponent = (std::bit_cast<std::uint32_t>(shifted) - std::bit_cast<std::uint32_t>(round_shift)) << 23;
  return std::bit_cast<float>(std::bit_cast<std::uint32_t>(p) + exponent);
}

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
  for (std::size_t i = 0; i < logits.size(); ++i) distances[i] = (top - logits[i]) * inverse_temperature;
}

void weights(std::span<const float> distances, float limit, float* weights) {
  // Integer comparisons on the bits: distances are not negative, so the order is the same, and compilers turn these selections
  // into vector code, which they may not do with floating comparisons (those can trap).
  const auto limit_bits = std::bit_cast<std::int32_t>(limit);
  const float* from = distances.data();
  for (std::size_t i = 0; i < distances.size(); ++i) {
    const auto bits = std::bit_cast<std::int32_t>(from[i]);
    const auto clamped = bits < distance_max_bits ? bits : distance_max_bits;
    const auto weight = std::bit_cast<std::int32_t>(exp_negative(std::bit_cast<float>(clamped)));
    weights[i] =
        std::bit_cast<float>(weight & -static_cast<std::int32_t>(bits <= limit_bits));  // a mask: a choice would become a branch
  }
}

float weight(float distance) {
  return distance <= distance_max ? exp_negative(distance) : 0.0F;
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
