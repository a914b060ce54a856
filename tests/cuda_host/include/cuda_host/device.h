// SPDX-License-Identifier: Apache-2.0
// What device code sees: its indices, barriers, warp operations, atomics and arithmetic intrinsics. A thread of a block is a
// fibre; every operation that waits for other threads hands over to another fibre in an order that the seed chooses.
#pragma once
#pragma GCC system_header

#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "cuda_host/vector_types.h"

extern uint3 threadIdx;
extern uint3 blockIdx;
extern dim3 blockDim;
extern dim3 gridDim;
inline constexpr int warpSize = 32;

void __syncthreads();
void __syncwarp(unsigned int mask = 0xffffffffU);

namespace cuda_host {

inline constexpr std::size_t shared_bytes_max = 232448;  // 227 KiB, what a block of sm_90 may ask for

/// Ends the running kernel with an error that names it, the block and the thread.
[[noreturn]] void kernel_fault(const char* what);
/// The running thread's place in its warp.
unsigned int lane_index();

/// Called once per group, by the last lane to arrive, with each lane's operand (nullptr where the lane takes no part).
using WarpOperation = void (*)(unsigned int mask, void* const operands[32]);
enum class MissingLanes { Allowed, Forbidden };  // lanes of the mask that have ended, or that the block does not have
/// Waits until all lanes of mask have come here with the same operation.
void warp_collective(unsigned int mask, WarpOperation operation, void* operand, MissingLanes missing = MissingLanes::Allowed);

struct ShuffleOperand {
  unsigned char value[16];
  unsigned char result[16];
  unsigned int source;  // lane
};
void shuffle(unsigned int mask, void* operand);

template <class T>
T shuffle_from(unsigned int mask, T value, unsigned int source) {
  static_assert(std::is_trivially_copyable_v<T> && sizeof(T) <= 16);
  ShuffleOperand operand;
  std::memcpy(operand.value, &value, sizeof(T));
  operand.source = source;
  shuffle(mask, &operand);
  T result;
  std::memcpy(&result, operand.result, sizeof(T));
  return result;
}

unsigned int ballot(unsigned int mask, bool predicate);

/// Every atomic counts: a thread that does very many without ever waiting spins on a block that cannot run before it ends.
extern unsigned long long atomics_in_a_row;
void report_spinning();
inline void count_atomic() {
  if (++atomics_in_a_row > 50'000'000ULL) report_spinning();
}

bool in_shared_memory(const void* address, std::size_t bytes);
void copy_async(void* shared, const void* global);
void copy_async_commit();
void copy_async_wait(unsigned int pending);

/// c (16, 8) += a (16, 16) b (16, 8), k ascending, one rounding per product and sum.
void multiply_tile(float* c, const float* a, const float* b);

template <class T>
bool shuffle_width_is_valid(T width) {
  return width > 0 && width <= 32 && (width & (width - 1)) == 0;
}

}  // namespace cuda_host

// ---- warp operations
template <class T>
T __shfl_sync(unsigned int mask, T value, int source, int width = warpSize) {
  if (!cuda_host::shuffle_width_is_valid(width)) cuda_host::kernel_fault("__shfl_sync: width is not a power of two up to 32");
  const unsigned int lane = cuda_host::lane_index();
  const unsigned int first = lane & ~static_cast<unsigned int>(width - 1);
  return cuda_host::shuffle_from(mask, value, first + (static_cast<unsigned int>(source) & static_cast<unsigned int>(width - 1)));
}
template <class T>
T __shfl_up_sync(unsigned int mask, T value, unsigned int delta, int width = warpSize) {
  if (!cuda_host::shuffle_width_is_valid(width)) cuda_host::kernel_fault("__shfl_up_sync: width is not a power of two up to 32");
  const unsigned int lane = cuda_host::lane_index();
  const unsigned int first = lane & ~static_cast<unsigned int>(width - 1);
  return cuda_host::shuffle_from(mask, value, lane - first >= delta ? lane - delta : lane);
}
template <class T>
T __shfl_down_sync(unsigned int mask, T value, unsigned int delta, int width = warpSize) {
  if (!cuda_host::shuffle_width_is_valid(width))
    cuda_host::kernel_fault("__shfl_down_sync: width is not a power of two up to 32");
  const unsigned int lane = cuda_host::lane_index();
  const unsigned int end = (lane & ~static_cast<unsigned int>(width - 1)) + static_cast<unsigned int>(width);
  return cuda_host::shuffle_from(mask, value, end - lane > delta ? lane + delta : lane);
}
template <class T>
T __shfl_xor_sync(unsigned int mask, T value, int lane_mask, int width = warpSize) {
  if (!cuda_host::shuffle_width_is_valid(width)) cuda_host::kernel_fault("__shfl_xor_sync: width is not a power of two up to 32");
  const unsigned int lane = cuda_host::lane_index();
  const unsigned int end = (lane & ~static_cast<unsigned int>(width - 1)) + static_cast<unsigned int>(width);
  const unsigned int source = lane ^ static_cast<unsigned int>(lane_mask);
  return cuda_host::shuffle_from(mask, value, source < end ? source : lane);
}
inline unsigned int __ballot_sync(unsigned int mask, int predicate) {
  return cuda_host::ballot(mask, predicate != 0);
}
inline int __any_sync(unsigned int mask, int predicate) {
  return cuda_host::ballot(mask, predicate != 0) != 0 ? 1 : 0;
}
inline int __all_sync(unsigned int mask, int predicate) {
  return cuda_host::ballot(mask, predicate == 0) == 0 ? 1 : 0;
}

// ---- atomics and fences. One block runs at a time and a fibre keeps the processor until it waits, so plain operations are
// atomic.
#define CUDA_HOST_ATOMIC(name, type, expression) \
  inline type name(type* address, type value) {  \
    cuda_host::count_atomic();                   \
    const type old = *address;                   \
    *address = (expression);                     \
    return old;                                  \
  }
#define CUDA_HOST_ATOMICS(type)                                    \
  CUDA_HOST_ATOMIC(atomicAdd, type, old + value)                   \
  CUDA_HOST_ATOMIC(atomicExch, type, value)                        \
  CUDA_HOST_ATOMIC(atomicMax, type, old > value ? old : value)     \
  CUDA_HOST_ATOMIC(atomicMin, type, old < value ? old : value)     \
  CUDA_HOST_ATOMIC(atomicOr, type, old | value)                    \
  CUDA_HOST_ATOMIC(atomicAnd, type, old& value)                    \
  inline type atomicCAS(type* address, type compare, type value) { \
    cuda_host::count_atomic();                                     \
    const type old = *address;                                     \
    if (old == compare) *address = value;                          \
    return old;                                                    \
  }
CUDA_HOST_ATOMICS(int)
CUDA_HOST_ATOMICS(unsigned int)
CUDA_HOST_ATOMICS(unsigned long long)
CUDA_HOST_ATOMIC(atomicAdd, float, old + value)
CUDA_HOST_ATOMIC(atomicExch, float, value)
#undef CUDA_HOST_ATOMICS
#undef CUDA_HOST_ATOMIC

inline int atomicSub(int* address, int value) {
  return atomicAdd(address, -value);
}

inline void __threadfence() {}
inline void __threadfence_block() {}
inline void __threadfence_system() {}

// ---- loads, bits and conversions
template <class T>
T __ldg(const T* address) {
  return *address;
}
inline int __popc(unsigned int value) {
  return __builtin_popcount(value);
}
inline int __popcll(unsigned long long value) {
  return __builtin_popcountll(value);
}
inline int __ffs(int value) {
  return __builtin_ffs(value);
}
inline int __ffsll(long long value) {
  return __builtin_ffsll(value);
}
inline int __clz(int value) {
  return value == 0 ? 32 : __builtin_clz(static_cast<unsigned int>(value));
}
inline int __clzll(long long value) {
  return value == 0 ? 64 : __builtin_clzll(static_cast<unsigned long long>(value));
}
inline unsigned int __umulhi(unsigned int a, unsigned int b) {
  return static_cast<unsigned int>((static_cast<std::uint64_t>(a) * b) >> 32U);
}
inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
  return static_cast<unsigned long long>((static_cast<unsigned __int128>(a) * b) >> 64U);
}
inline unsigned int __float_as_uint(float value) {
  return __builtin_bit_cast(unsigned int, value);
}
inline int __float_as_int(float value) {
  return __builtin_bit_cast(int, value);
}
inline float __uint_as_float(unsigned int value) {
  return __builtin_bit_cast(float, value);
}
inline float __int_as_float(int value) {
  return __builtin_bit_cast(float, value);
}
inline long long __double_as_longlong(double value) {
  return __builtin_bit_cast(long long, value);
}
inline double __longlong_as_double(long long value) {
  return __builtin_bit_cast(double, value);
}
inline int __float2int_rn(float value) {
  return static_cast<int>(__builtin_rintf(value));
}
inline int __float2int_rz(float value) {
  return static_cast<int>(value);
}
inline float __int2float_rn(int value) {
  return static_cast<float>(value);
}
inline float __uint2float_rn(unsigned int value) {
  return static_cast<float>(value);
}

// ---- arithmetic, rounded to nearest even
inline float __fmaf_rn(float a, float b, float c) {
  return __builtin_fmaf(a, b, c);
}
inline float __fadd_rn(float a, float b) {
  return a + b;
}
inline float __fsub_rn(float a, float b) {
  return a - b;
}
inline float __fmul_rn(float a, float b) {
  return a * b;
}
inline float __fdiv_rn(float a, float b) {
  return a / b;
}
inline float __frcp_rn(float a) {
  return 1.0F / a;
}
inline float __fsqrt_rn(float a) {
  return __builtin_sqrtf(a);
}
inline double __dadd_rn(double a, double b) {
  return a + b;
}
inline double __dmul_rn(double a, double b) {
  return a * b;
}
inline double __fma_rn(double a, double b, double c) {
  return __builtin_fma(a, b, c);
}
inline float rsqrtf(float a) {
  return 1.0F / __builtin_sqrtf(a);
}

template <class A, class B>
requires(std::is_arithmetic_v<A>&& std::is_arithmetic_v<B>) constexpr std::common_type_t<A, B> min(A a, B b) {
  using C = std::common_type_t<A, B>;
  if constexpr (std::is_floating_point_v<C>) return std::fmin(static_cast<C>(a), static_cast<C>(b));
  return static_cast<C>(b) < static_cast<C>(a) ? static_cast<C>(b) : static_cast<C>(a);
}
template <class A, class B>
requires(std::is_arithmetic_v<A>&& std::is_arithmetic_v<B>) constexpr std::common_type_t<A, B> max(A a, B b) {
  using C = std::common_type_t<A, B>;
  if constexpr (std::is_floating_point_v<C>) return std::fmax(static_cast<C>(a), static_cast<C>(b));
  return static_cast<C>(a) < static_cast<C>(b) ? static_cast<C>(b) : static_cast<C>(a);
}

namespace rubato::engine::cuda {
/// What every `extern __shared__` array of a kernel in this namespace names.
extern unsigned char shared_bytes[];
}  // namespace rubato::engine::cuda
