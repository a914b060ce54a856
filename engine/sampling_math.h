// SPDX-License-Identifier: Apache-2.0
// The arithmetic of sampling that host and device share, so that equal logits give the same bits on both: every operation rounds
// once, in the order written here, whatever a compiler likes to fuse. Private to sampling. Device compilers see it too: no
// library.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>

#ifdef __CUDACC__
#define RUBATO_HOST_DEVICE __host__ __device__
#else
#define RUBATO_HOST_DEVICE
#endif

namespace rubato::engine::kernels {

// One operation, one rounding. Host code is compiled with -ffp-contract=off; device compilers fuse what is not written like this.
#ifdef __CUDA_ARCH__
#define RUBATO_ON(device, host) device
#else
#define RUBATO_ON(device, host) host
#endif
RUBATO_HOST_DEVICE inline float add(float a, float b) {
  return RUBATO_ON(__fadd_rn(a, b), a + b);
}
RUBATO_HOST_DEVICE inline float subtract(float a, float b) {
  return RUBATO_ON(__fsub_rn(a, b), a - b);
}
RUBATO_HOST_DEVICE inline float multiply(float a, float b) {
  return RUBATO_ON(__fmul_rn(a, b), a * b);
}
RUBATO_HOST_DEVICE inline float divide(float a, float b) {
  return RUBATO_ON(__fdiv_rn(a, b), a / b);
}
RUBATO_HOST_DEVICE inline double add(double a, double b) {
  return RUBATO_ON(__dadd_rn(a, b), a + b);
}
RUBATO_HOST_DEVICE inline double subtract(double a, double b) {
  return RUBATO_ON(__dsub_rn(a, b), a - b);
}
RUBATO_HOST_DEVICE inline double multiply(double a, double b) {
  return RUBATO_ON(__dmul_rn(a, b), a * b);
}
RUBATO_HOST_DEVICE inline double divide(double a, double b) {
  return RUBATO_ON(__ddiv_rn(a, b), a / b);
}
RUBATO_HOST_DEVICE inline std::uint32_t bits_of(float value) {
  return RUBATO_ON(__float_as_uint(value), std::bit_cast<std::uint32_t>(value));
}
RUBATO_HOST_DEVICE inline float float_of(std::uint32_t bits) {
  return RUBATO_ON(__uint_as_float(bits), std::bit_cast<float>(bits));
}
RUBATO_HOST_DEVICE inline std::uint64_t bits_of(double value) {
  return static_cast<std::uint64_t>(RUBATO_ON(__double_as_longlong(value), std::bit_cast<std::int64_t>(value)));
}
RUBATO_HOST_DEVICE inline double double_of(std::uint64_t bits) {
  return RUBATO_ON(__longlong_as_double(static_cast<long long>(bits)), std::bit_cast<double>(bits));
}
#undef RUBATO_ON

/// Passes work on stretches of this many logits: what each adds up is a sum of its own, and those add up in ascending order.
inline constexpr std::size_t stretch_size = 1024;
/// Token i of a stretch adds to partial sum i % sum_lanes; those add up in ascending order, in double precision.
inline constexpr std::size_t sum_lanes = 16;

/// Beyond this distance a weight counts as zero (exp(-87) is the last normal float).
inline constexpr float distance_max = 87.0F;
inline constexpr std::int32_t distance_max_bits = std::bit_cast<std::int32_t>(distance_max);

RUBATO_HOST_DEVICE inline bool is_finite(float value) {
  return (bits_of(value) & 0x7FFFFFFFU) < 0x7F800000U;
}

/// A largest logit as the rest counts from it: a negative zero would put its distances to zeros among the negative numbers.
RUBATO_HOST_DEVICE inline float without_sign_of_zero(float value) {
  return add(value, 0.0F);
}

/// How far a logit lies below the largest, in units of temperature; >= 0.
RUBATO_HOST_DEVICE inline float distance(float top, float logit, float inverse_temperature) {
  return multiply(subtract(top, logit), inverse_temperature);
}

/// exp(-distance) for 0 <= distance <= distance_max, relative error below 2e-7. Splits off a power of two (the addition of 1.5 *
/// 2^23 rounds to an integer whose bits then stand in the low mantissa) and evaluates a polynomial on +-ln(2)/2.
RUBATO_HOST_DEVICE inline float exp_negative(float distance) {
  constexpr float log2_e = 1.44269504F;
  constexpr float round_shift = 12582912.0F;
  constexpr float ln2_high = 0.693359375F;
  constexpr float ln2_low = -2.12194440e-4F;
  const float x = -distance;
  const float shifted = add(multiply(x, log2_e), round_shift);
  const float power = subtract(shifted, round_shift);
  float r = subtract(x, multiply(power, ln2_high));
  r = subtract(r, multiply(power, ln2_low));
  // Taylor coefficients to degree 6: the remainder is below 2e-7 * exp(r) on |r| <= 0.3466.
  float p = 1.0F / 720;
  p = add(multiply(p, r), 1.0F / 120);
  p = add(multiply(p, r), 1.0F / 24);
  p = add(multiply(p, r), 1.0F / 6);
  p = add(multiply(p, r), 0.5F);
  p = add(multiply(p, r), 1.0F);
  p = add(multiply(p, r), 1.0F);
  const std::uint32_t exponent = (bits_of(shifted) - bits_of(round_shift)) << 23;
  return float_of(bits_of(p) + exponent);
}

/// exp(-distance), zero where the distance is above limit (<= distance_max). Integer comparisons on the bits: distances are not
/// negative, so the order is the same, and compilers turn these selections into vector code, which they may not do with floating
/// comparisons (those can trap).
RUBATO_HOST_DEVICE inline float weight_within(float distance, float limit) {
  const auto bits = static_cast<std::int32_t>(bits_of(distance));
  const std::int32_t clamped = bits < distance_max_bits ? bits : distance_max_bits;
  const auto weight = static_cast<std::int32_t>(bits_of(exp_negative(float_of(static_cast<std::uint32_t>(clamped)))));
  const auto kept = static_cast<std::int32_t>(bits <= static_cast<std::int32_t>(bits_of(limit)));
  return float_of(static_cast<std::uint32_t>(weight & -kept));  // a mask: a choice would become a branch
}

/// A weight as a whole number: sums of these are the same in any order. What is below 2^-41 of the largest weight counts as
/// nothing; 2^22 of the largest still fit.
RUBATO_HOST_DEVICE inline std::int64_t mass_of(float weight) {
  return static_cast<std::int64_t>(multiply(weight, 0x1p41F));
}

/// The least mass that is at least share of total; 1..total.
RUBATO_HOST_DEVICE inline std::int64_t share_of(std::int64_t total, double share) {
  const double exact = multiply(share, static_cast<double>(total));
  auto mass = static_cast<std::int64_t>(exact);
  if (static_cast<double>(mass) < exact) ++mass;
  if (mass < 1) mass = 1;
  return mass < total ? mass : total;
}

/// ln(x) for positive, normal x, within a few units in the last place: ln(2^e m) = e ln(2) + 2 artanh((m - 1) / (m + 1)).
RUBATO_HOST_DEVICE inline double natural_log(double x) {
  constexpr double ln2_high = 0x1.62e42feep-1;  // times an exponent it is exact
  constexpr double ln2_low = 0x1.a39ef35793c76p-33;
  constexpr int term_count = 11;  // of the series in s^2 <= 0.0295: the remainder is below 2^-60
  const std::uint64_t bits = bits_of(x);
  auto exponent = static_cast<int>(bits >> 52) - 1023;
  double m = double_of((bits & 0x000FFFFFFFFFFFFFU) | 0x3FF0000000000000U);
  if (m > 1.4142135623730951) {
    m = multiply(m, 0.5);
    ++exponent;
  }
  const double s = divide(subtract(m, 1.0), add(m, 1.0));
  const double z = multiply(s, s);
  double series = 0;
  for (int term = term_count; term >= 1; --term) series = multiply(add(series, 1.0 / (2 * term + 1)), z);
  const double twice = add(s, s);
  const auto e = static_cast<double>(exponent);
  const double low = add(multiply(e, ln2_low), multiply(twice, series));
  return add(multiply(e, ln2_high), add(twice, low));
}

/// log_sum: the logarithm of the sum of exp over all logits.
RUBATO_HOST_DEVICE inline float log_probability(float logit, double log_sum) {
  return static_cast<float>(subtract(static_cast<double>(without_sign_of_zero(logit)), log_sum));
}

// Changes of one logit, in the order in which they apply: bias, then penalties.
RUBATO_HOST_DEVICE inline float biased(float logit, float bias) {
  return add(logit, bias);
}

struct Penalties {
  float repetition = 1;
  float frequency = 0;
  float presence = 0;
};

/// Of a token that occurs in prompt or output; output_count: how often in the output.
RUBATO_HOST_DEVICE inline float penalised(float logit, const Penalties& penalties, std::int32_t output_count) {
  logit = logit > 0 ? divide(logit, penalties.repetition) : multiply(logit, penalties.repetition);
  logit = subtract(logit, multiply(penalties.frequency, static_cast<float>(output_count)));
  return output_count > 0 ? subtract(logit, penalties.presence) : logit;
}

}  // namespace rubato::engine::kernels

#undef RUBATO_HOST_DEVICE
