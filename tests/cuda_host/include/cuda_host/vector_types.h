// SPDX-License-Identifier: Apache-2.0
// CUDA's vector types with their alignments, their make_ functions, and the words that mark device code, which mean nothing to a
// host compiler.
#pragma once
#pragma GCC system_header

#define __host__
#define __device__
#define __global__
#define __shared__
#define __grid_constant__
#define __launch_bounds__(...)
#define __forceinline__ inline __attribute__((always_inline))
#define __align__(n) __attribute__((aligned(n)))

#define CUDA_HOST_VECTOR_2(name, element, alignment) \
  struct alignas(alignment) name {                   \
    element x, y;                                    \
  };                                                 \
  inline name make_##name(element x, element y) {    \
    return {x, y};                                   \
  }
#define CUDA_HOST_VECTOR_3(name, element)                    \
  struct name {                                              \
    element x, y, z;                                         \
  };                                                         \
  inline name make_##name(element x, element y, element z) { \
    return {x, y, z};                                        \
  }
#define CUDA_HOST_VECTOR_4(name, element, alignment)                    \
  struct alignas(alignment) name {                                      \
    element x, y, z, w;                                                 \
  };                                                                    \
  inline name make_##name(element x, element y, element z, element w) { \
    return {x, y, z, w};                                                \
  }

CUDA_HOST_VECTOR_2(char2, signed char, 2)
CUDA_HOST_VECTOR_4(char4, signed char, 4)
CUDA_HOST_VECTOR_2(uchar2, unsigned char, 2)
CUDA_HOST_VECTOR_4(uchar4, unsigned char, 4)
CUDA_HOST_VECTOR_2(short2, short, 4)
CUDA_HOST_VECTOR_4(short4, short, 8)
CUDA_HOST_VECTOR_2(ushort2, unsigned short, 4)
CUDA_HOST_VECTOR_4(ushort4, unsigned short, 8)
CUDA_HOST_VECTOR_2(int2, int, 8)
CUDA_HOST_VECTOR_3(int3, int)
CUDA_HOST_VECTOR_4(int4, int, 16)
CUDA_HOST_VECTOR_2(uint2, unsigned int, 8)
CUDA_HOST_VECTOR_3(uint3, unsigned int)
CUDA_HOST_VECTOR_4(uint4, unsigned int, 16)
CUDA_HOST_VECTOR_2(longlong2, long long, 16)
CUDA_HOST_VECTOR_2(ulonglong2, unsigned long long, 16)
CUDA_HOST_VECTOR_2(float2, float, 8)
CUDA_HOST_VECTOR_3(float3, float)
CUDA_HOST_VECTOR_4(float4, float, 16)
CUDA_HOST_VECTOR_2(double2, double, 16)

#undef CUDA_HOST_VECTOR_2
#undef CUDA_HOST_VECTOR_3
#undef CUDA_HOST_VECTOR_4

struct dim3 {
  unsigned int x = 1;
  unsigned int y = 1;
  unsigned int z = 1;
  constexpr dim3(unsigned int x_count = 1, unsigned int y_count = 1, unsigned int z_count = 1)
      : x(x_count), y(y_count), z(z_count) {}
  constexpr dim3(uint3 counts) : x(counts.x), y(counts.y), z(counts.z) {}
  constexpr operator uint3() const { return {x, y, z}; }
};
