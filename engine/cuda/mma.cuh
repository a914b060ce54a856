// SPDX-License-Identifier: Apache-2.0
// The only inline PTX: warp-wide matrix products, matrix loads from shared memory and asynchronous copies into it. Layouts are those
// of the PTX ISA, "Matrix Fragments for mma.m16n8k16" and "ldmatrix". sm_80 and later.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

namespace rubato::engine::cuda {

// With group = lane / 4 and pair = lane % 4:
struct FragmentA {  // 16 x 16, row-major: x[0] (group, 2 pair..), x[1] (group + 8, 2 pair..), x[2] (group, 2 pair + 8..), x[3] both + 8
  std::uint32_t x[4];
};
struct FragmentB {  // 16 (k) x 8 (n): x[0] (k = 2 pair.., n = group), x[1] (k = 2 pair + 8.., n = group)
  std::uint32_t x[2];
};
struct FragmentC {  // 16 x 8: x[0..1] (group, 2 pair..), x[2..3] (group + 8, 2 pair..)
  float x[4];
};

/// c += a b, all 32 lanes together. Element: __nv_bfloat16 or __half.
template <class Element>
__device__ inline void mma_m16n8k16(FragmentC& c, const FragmentA& a, const FragmentB& b) {
  if constexpr (std::is_same_v<Element, __nv_bfloat16>) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};\n"
        : "+f"(c.x[0]), "+f"(c.x[1]), "+f"(c.x[2]), "+f"(c.x[3])
        : "r"(a.x[0]), "r"(a.x[1]), "r"(a.x[2]), "r"(a.x[3]), "r"(b.x[0]), "r"(b.x[1]));
  } else {
    static_assert(std::is_same_v<Element, __half>);
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};\n"
        : "+f"(c.x[0]), "+f"(c.x[1]), "+f"(c.x[2]), "+f"(c.x[3])
        : "r"(a.x[0]), "r"(a.x[1]), "r"(a.x[2]), "r"(a.x[3]), "r"(b.x[0]), "r"(b.x[1]));
  }
}

__device__ inline std::uint32_t shared_address(const void* shared) {
  return static_cast<std::uint32_t>(__cvta_generic_to_shared(shared));
}

/// Four 8 x 8 matrices of 2-byte elements; lane l gives the address of row l % 8 of matrix l / 8 (16 bytes, aligned). With the rows of a
/// 16 x 16 tile given as lanes 0..15 = rows 0..15 at column 0 and lanes 16..31 = rows 0..15 at column 8, the result is FragmentA.
__device__ inline void load_matrix_x4(FragmentA& a, const void* shared_row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];\n"
               : "=r"(a.x[0]), "=r"(a.x[1]), "=r"(a.x[2]), "=r"(a.x[3])
               : "r"(shared_address(shared_row)));
}
/// Two matrices; lanes 0..15 give addresses. Rows of an (n, k) tile: lanes 0..7 = n 0..7 at k 0, lanes 8..15 = n 0..7 at k 8.
__device__ inline void load_matrix_x2(FragmentB& b, const void* shared_row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0,%1}, [%2];\n"
               : "=r"(b.x[0]), "=r"(b.x[1])
               : "r"(shared_address(shared_row)));
}
/// The same from a (k, n) tile: lanes 0..15 = k 0..15 at n 0.
__device__ inline void load_matrix_x2_transposed(FragmentB& b, const void* shared_row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0,%1}, [%2];\n"
               : "=r"(b.x[0]), "=r"(b.x[1])
               : "r"(shared_address(shared_row)));
}

/// 16 bytes from global to shared memory, visible to this thread after copy_async_wait (to others after a barrier as well).
__device__ inline void copy_async_16(void* shared, const void* global) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;\n" ::"r"(shared_address(shared)), "l"(global) : "memory");
}
__device__ inline void copy_async_commit() {
  asm volatile("cp.async.commit_group;\n" ::: "memory");
}
/// Until at most Pending of the committed groups are still under way.
template <int Pending>
__device__ inline void copy_async_wait() {
  asm volatile("cp.async.wait_group %0;\n" ::"n"(Pending) : "memory");
}

}  // namespace rubato::engine::cuda
