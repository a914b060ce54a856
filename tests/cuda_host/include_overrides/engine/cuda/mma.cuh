// SPDX-License-Identifier: Apache-2.0
// The host's version of engine/cuda/mma.cuh: the same interface, with the register layout of mma.sync m16n8k16 and of ldmatrix. A
// warp's 32 lanes meet, and the last to arrive does the work of all from their operands.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <cstring>
#include <type_traits>

namespace rubato::engine::cuda {

struct FragmentA {
  std::uint32_t x[4];  // (group, 2t), (group + 8, 2t), (group, 2t + 8), (group + 8, 2t + 8); two neighbours along k in each
};
struct FragmentB {
  std::uint32_t x[2];  // (2t, group), (2t + 8, group); two neighbours along k in each
};
struct FragmentC {
  float x[4];  // (group, 2t), (group, 2t + 1), (group + 8, 2t), (group + 8, 2t + 1)
};

namespace host {

inline constexpr unsigned int all_lanes = 0xffffffffU;

struct MultiplyOperand {
  FragmentC* c;
  const FragmentA* a;
  const FragmentB* b;
};

template <class Element>
float element_of(std::uint32_t pair, unsigned int which) {
  static_assert(std::is_same_v<Element, __nv_bfloat16> || std::is_same_v<Element, __half>);
  const auto bits = static_cast<unsigned short>(which == 0 ? pair & 0xffffU : pair >> 16U);
  return static_cast<float>(__builtin_bit_cast(Element, bits));
}

template <class Element>
void multiply(unsigned int /*mask*/, void* const operands[32]) {
  float a[16][16];
  float b[16][8];
  float c[16][8];
  for (unsigned int lane = 0; lane < 32; ++lane) {
    const auto& operand = *static_cast<const MultiplyOperand*>(operands[lane]);
    const unsigned int group = lane / 4;
    const unsigned int pair = 2 * (lane % 4);
    for (unsigned int r = 0; r < 4; ++r) {
      const unsigned int row = group + 8 * (r % 2);
      const unsigned int column = pair + 8 * (r / 2);
      a[row][column] = element_of<Element>(operand.a->x[r], 0);
      a[row][column + 1] = element_of<Element>(operand.a->x[r], 1);
      c[group + 8 * (r / 2)][pair + r % 2] = operand.c->x[r];
    }
    for (unsigned int r = 0; r < 2; ++r) {
      b[pair + 8 * r][group] = element_of<Element>(operand.b->x[r], 0);
      b[pair + 8 * r + 1][group] = element_of<Element>(operand.b->x[r], 1);
    }
  }
  cuda_host::multiply_tile(&c[0][0], &a[0][0], &b[0][0]);
  for (unsigned int lane = 0; lane < 32; ++lane) {
    const auto& operand = *static_cast<const MultiplyOperand*>(operands[lane]);
    const unsigned int group = lane / 4;
    const unsigned int pair = 2 * (lane % 4);
    for (unsigned int r = 0; r < 4; ++r) operand.c->x[r] = c[group + 8 * (r / 2)][pair + r % 2];
  }
}

struct LoadOperand {
  std::uint32_t* registers;
  const unsigned char* row;
};

// Matrix j of 8 x 8 16-bit elements has its rows at the addresses of lanes 8 j to 8 j + 7.
template <unsigned int Matrices, bool Transposed>
void load_matrices(unsigned int /*mask*/, void* const operands[32]) {
  for (unsigned int lane = 0; lane < 32; ++lane) {
    const auto& operand = *static_cast<const LoadOperand*>(operands[lane]);
    for (unsigned int j = 0; j < Matrices; ++j) {
      const auto row = [&](unsigned int i) { return static_cast<const LoadOperand*>(operands[8 * j + i])->row; };
      if constexpr (Transposed) {
        unsigned short halves[2];
        std::memcpy(&halves[0], row(2 * (lane % 4)) + 2 * (lane / 4), 2);
        std::memcpy(&halves[1], row(2 * (lane % 4) + 1) + 2 * (lane / 4), 2);
        std::memcpy(&operand.registers[j], halves, 4);
      } else {
        std::memcpy(&operand.registers[j], row(lane / 4) + 4 * (lane % 4), 4);
      }
    }
  }
}

template <unsigned int Matrices, bool Transposed>
void load(std::uint32_t* registers, const void* row) {
  if (cuda_host::lane_index() < 8 * Matrices && !cuda_host::in_shared_memory(row, 16)) {
    cuda_host::kernel_fault("load_matrix: a row is not 16 aligned bytes of the block's shared memory");
  }
  LoadOperand operand{.registers = registers, .row = static_cast<const unsigned char*>(row)};
  cuda_host::warp_collective(all_lanes, load_matrices<Matrices, Transposed>, &operand, cuda_host::MissingLanes::Forbidden);
}

}  // namespace host

/// c += a b, with c (16, 8), a (16, 16) and b (16, 8). All 32 lanes of a warp call it together.
template <class Element>
__device__ void mma_m16n8k16(FragmentC& c, const FragmentA& a, const FragmentB& b) {
  host::MultiplyOperand operand{.c = &c, .a = &a, .b = &b};
  cuda_host::warp_collective(host::all_lanes, host::multiply<Element>, &operand, cuda_host::MissingLanes::Forbidden);
}

__device__ inline void load_matrix_x4(FragmentA& a, const void* shared_row) {
  host::load<4, false>(a.x, shared_row);
}
__device__ inline void load_matrix_x2(FragmentB& b, const void* shared_row) {
  host::load<2, false>(b.x, shared_row);
}
__device__ inline void load_matrix_x2_transposed(FragmentB& b, const void* shared_row) {
  host::load<2, true>(b.x, shared_row);
}

/// The bytes arrive at any moment up to the wait: at once or only then, as the seed chooses.
__device__ inline void copy_async_16(void* shared, const void* global) {
  cuda_host::copy_async(shared, global);
}
__device__ inline void copy_async_commit() {
  cuda_host::copy_async_commit();
}
template <int Pending>
__device__ void copy_async_wait() {
  static_assert(Pending >= 0);
  cuda_host::copy_async_wait(static_cast<unsigned int>(Pending));
}

}  // namespace rubato::engine::cuda
