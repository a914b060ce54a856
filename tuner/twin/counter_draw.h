// SPDX-License-Identifier: Apache-2.0
// Random numbers by counter: the n-th of a stream without those before it, so that what is drawn for one thing does not depend on
// how often something else drew.
#pragma once

#include <cstdint>

namespace rubato::tuner {

/// The finaliser of SplitMix64 (Steele, Lea, Flood 2014): every bit of the value reaches every bit of the result.
[[nodiscard]] constexpr std::uint64_t mix_bits(std::uint64_t value) {
  value = (value ^ (value >> 30U)) * 0xbf58476d1ce4e5b9ULL;
  value = (value ^ (value >> 27U)) * 0x94d049bb133111ebULL;
  return value ^ (value >> 31U);
}

/// Uniform in (0, 1), never either end.
[[nodiscard]] constexpr double counter_draw(std::uint64_t seed, std::uint64_t stream, std::uint64_t counter) {
  constexpr std::uint64_t step = 0x9e3779b97f4a7c15ULL;  // 2^64 over the golden ratio, odd
  const std::uint64_t begin = mix_bits(mix_bits(seed + step) + step * (stream + 1));
  return (static_cast<double>(mix_bits(begin + step * counter) >> 12U) + 0.5) * 0x1.0p-52;
}

}  // namespace rubato::tuner
