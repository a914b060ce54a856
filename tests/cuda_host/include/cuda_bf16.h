// SPDX-License-Identifier: Apache-2.0
// bfloat16 as CUDA's header names it: storage and conversions. Arithmetic is left out, because rubato computes in F32.
#pragma once
#pragma GCC system_header

#include "cuda_host/device.h"

struct __nv_bfloat16_raw {
  unsigned short x;
};

struct __nv_bfloat16 {
  __nv_bfloat16() = default;
  __nv_bfloat16(float value) : x_(from_float(value)) {}
  __nv_bfloat16(__nv_bfloat16_raw raw) : x_(raw.x) {}
  operator float() const { return __uint_as_float(static_cast<unsigned int>(x_) << 16U); }
  operator __nv_bfloat16_raw() const { return {x_}; }

 private:
  static unsigned short from_float(float value) {
    const unsigned int bits = __float_as_uint(value);
    if ((bits & 0x7fffffffU) > 0x7f800000U) return 0x7fffU;
    return static_cast<unsigned short>((bits + 0x7fffU + ((bits >> 16U) & 1U)) >> 16U);
  }

  unsigned short x_;
};

struct alignas(4) __nv_bfloat162 {
  __nv_bfloat16 x;
  __nv_bfloat16 y;
};

using nv_bfloat16 = __nv_bfloat16;
using nv_bfloat162 = __nv_bfloat162;

inline __nv_bfloat16 __float2bfloat16_rn(float value) {
  return __nv_bfloat16(value);
}
inline __nv_bfloat16 __float2bfloat16(float value) {
  return __nv_bfloat16(value);
}
inline float __bfloat162float(__nv_bfloat16 value) {
  return static_cast<float>(value);
}
inline unsigned short __bfloat16_as_ushort(__nv_bfloat16 value) {
  return __builtin_bit_cast(unsigned short, value);
}
inline __nv_bfloat16 __ushort_as_bfloat16(unsigned short bits) {
  return __nv_bfloat16(__nv_bfloat16_raw{bits});
}
inline __nv_bfloat162 __halves2bfloat162(__nv_bfloat16 low, __nv_bfloat16 high) {
  return {low, high};
}
inline __nv_bfloat162 __floats2bfloat162_rn(float low, float high) {
  return {__nv_bfloat16(low), __nv_bfloat16(high)};
}
inline __nv_bfloat162 __float22bfloat162_rn(float2 value) {
  return {__nv_bfloat16(value.x), __nv_bfloat16(value.y)};
}
inline float2 __bfloat1622float2(__nv_bfloat162 value) {
  return {static_cast<float>(value.x), static_cast<float>(value.y)};
}
inline float __low2float(__nv_bfloat162 value) {
  return static_cast<float>(value.x);
}
inline float __high2float(__nv_bfloat162 value) {
  return static_cast<float>(value.y);
}
inline __nv_bfloat16 __ldg(const __nv_bfloat16* address) {
  return *address;
}
