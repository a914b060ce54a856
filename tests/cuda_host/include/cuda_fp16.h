// SPDX-License-Identifier: Apache-2.0
// IEEE half as CUDA's header names it: storage and conversions. Arithmetic is left out, because rubato computes in F32.
#pragma once
#pragma GCC system_header

#include "cuda_host/device.h"

struct __half_raw {
  unsigned short x;
};

struct __half {
  __half() = default;
  __half(float value) : x_(from_float(value)) {}
  __half(__half_raw raw) : x_(raw.x) {}
  operator float() const { return to_float(x_); }
  operator __half_raw() const { return {x_}; }

 private:
  static float to_float(unsigned short half) {
    const unsigned int sign = (half & 0x8000U) << 16U;
    const unsigned int exponent = (half >> 10U) & 31U;
    const unsigned int fraction = half & 0x3ffU;
    if (exponent == 31U) return __uint_as_float(sign | 0x7f800000U | (fraction << 13U));
    if (exponent != 0U) return __uint_as_float(sign | ((exponent + 112U) << 23U) | (fraction << 13U));
    const float small = static_cast<float>(fraction) * 0x1p-24F;
    return sign != 0U ? -small : small;
  }
  static unsigned short from_float(float value) {
    const unsigned int bits = __float_as_uint(value);
    const unsigned int sign = (bits >> 16U) & 0x8000U;
    const unsigned int size = bits & 0x7fffffffU;
    if (size > 0x7f800000U) return 0x7fffU;
    if (size >= 0x477ff000U) return static_cast<unsigned short>(sign | 0x7c00U);  // rounds to infinity from 65520 on
    if (size < 0x38800000U) {                                                     // subnormal: a multiple of 2^-24
      const float scaled = __uint_as_float(size) * 0x1p24F;
      return static_cast<unsigned short>(sign | static_cast<unsigned int>(__builtin_rintf(scaled)));
    }
    const unsigned int rounded = size + 0xfffU + ((size >> 13U) & 1U);
    return static_cast<unsigned short>(sign | ((rounded - 0x38000000U) >> 13U));
  }

  unsigned short x_;
};

struct alignas(4) __half2 {
  __half x;
  __half y;
};

using half = __half;
using half2 = __half2;

inline __half __float2half_rn(float value) {
  return __half(value);
}
inline __half __float2half(float value) {
  return __half(value);
}
inline float __half2float(__half value) {
  return static_cast<float>(value);
}
inline unsigned short __half_as_ushort(__half value) {
  return __builtin_bit_cast(unsigned short, value);
}
inline __half __ushort_as_half(unsigned short bits) {
  return __half(__half_raw{bits});
}
inline __half2 __halves2half2(__half low, __half high) {
  return {low, high};
}
inline __half2 __floats2half2_rn(float low, float high) {
  return {__half(low), __half(high)};
}
inline __half2 __float22half2_rn(float2 value) {
  return {__half(value.x), __half(value.y)};
}
inline float2 __half22float2(__half2 value) {
  return {static_cast<float>(value.x), static_cast<float>(value.y)};
}
inline float __low2float(__half2 value) {
  return static_cast<float>(value.x);
}
inline float __high2float(__half2 value) {
  return static_cast<float>(value.y);
}
inline __half __ldg(const __half* address) {
  return *address;
}
