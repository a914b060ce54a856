// SPDX-License-Identifier: Apache-2.0
#include "tests/cuda_host/test_kernels.h"

#include "engine/cuda/mma.cuh"

namespace rubato::engine::cuda {

namespace {

constexpr unsigned int all = 0xffffffffU;

__device__ float warp_sum(float value) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) value = __fadd_rn(value, __shfl_xor_sync(all, value, step));
  return value;
}

}  // namespace

__global__ void __launch_bounds__(1024) scale(float* data, int count, float factor) {
  const int index = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (index < count) data[index] = __fmul_rn(data[index], factor);
}

__global__ void write_at(float* data, long long index, float value) {
  data[index] = value;
}

__global__ void read_at(const float* data, long long index, float* out) {
  *out = data[index];
}

__global__ void write_value(int* out, int value) {
  *out = value;
}

__global__ void copy_value(const int* from, int* out) {
  *out = *from;
}

__global__ void write_indices(uint4* out) {
  const unsigned int block = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
  const unsigned int thread = threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
  out[block * blockDim.x * blockDim.y * blockDim.z + thread] = make_uint4(block, threadIdx.x, threadIdx.y, threadIdx.z);
}

__global__ void do_nothing() {}

__global__ void reverse(const float* in, float* out) {
  extern __shared__ __align__(16) unsigned char shared_bytes[];
  auto* values = reinterpret_cast<float*>(shared_bytes);
  const unsigned int first = blockIdx.x * blockDim.x;
  values[threadIdx.x] = in[first + threadIdx.x];
  __syncthreads();
  out[first + threadIdx.x] = values[blockDim.x - 1 - threadIdx.x];
}

__global__ void reverse_without_barrier(const float* in, float* out) {
  extern __shared__ __align__(16) unsigned char shared_bytes[];
  auto* values = reinterpret_cast<float*>(shared_bytes);
  const unsigned int first = blockIdx.x * blockDim.x;
  values[threadIdx.x] = in[first + threadIdx.x];
  out[first + threadIdx.x] = values[blockDim.x - 1 - threadIdx.x];
}

__global__ void sum(const float* in, float* out) {
  extern __shared__ __align__(16) unsigned char shared_bytes[];
  auto* parts = reinterpret_cast<float*>(shared_bytes);
  const float part = warp_sum(in[blockIdx.x * blockDim.x + threadIdx.x]);
  if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = part;
  __syncthreads();
  if (threadIdx.x < 32) {
    const float total = warp_sum(threadIdx.x < blockDim.x / 32 ? parts[threadIdx.x] : 0.0F);
    if (threadIdx.x == 0) out[blockIdx.x] = total;
  }
}

__global__ void sum_without_barrier(const float* in, float* out) {
  extern __shared__ __align__(16) unsigned char shared_bytes[];
  auto* parts = reinterpret_cast<float*>(shared_bytes);
  const float part = warp_sum(in[blockIdx.x * blockDim.x + threadIdx.x]);
  if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = part;
  if (threadIdx.x < 32) {
    const float total = warp_sum(threadIdx.x < blockDim.x / 32 ? parts[threadIdx.x] : 0.0F);
    if (threadIdx.x == 0) out[blockIdx.x] = total;
  }
}

__global__ void pass_in_warp(int* out) {
  extern __shared__ __align__(16) unsigned char shared_bytes[];
  auto* values = reinterpret_cast<int*>(shared_bytes);
  values[threadIdx.x] = static_cast<int>(threadIdx.x);
  __syncwarp();
  out[threadIdx.x] = values[threadIdx.x ^ 1U];
}

__global__ void pass_in_warp_without_sync(int* out) {
  extern __shared__ __align__(16) unsigned char shared_bytes[];
  auto* values = reinterpret_cast<int*>(shared_bytes);
  values[threadIdx.x] = static_cast<int>(threadIdx.x);
  out[threadIdx.x] = values[threadIdx.x ^ 1U];
}

__global__ void sum_by_last_block(const float* in, float* parts, unsigned int* finished, float* out) {
  extern __shared__ __align__(16) unsigned char shared_bytes[];
  auto* is_last = reinterpret_cast<int*>(shared_bytes);
  const float part = warp_sum(in[blockIdx.x * 32 + threadIdx.x]);
  if (threadIdx.x == 0) {
    parts[blockIdx.x] = part;
    __threadfence();
    *is_last = atomicAdd(finished, 1U) == gridDim.x - 1 ? 1 : 0;
  }
  __syncthreads();
  if (*is_last == 0 || threadIdx.x != 0) return;
  float total = 0;
  for (unsigned int block = 0; block < gridDim.x; ++block) total = __fadd_rn(total, parts[block]);
  *out = total;
}

__global__ void shuffles(int* out) {
  const int lane = static_cast<int>(threadIdx.x);
  out[lane] = __shfl_sync(all, lane, 5);
  out[32 + lane] = __shfl_sync(all, lane, 3, 8);
  out[64 + lane] = __shfl_up_sync(all, lane, 2U, 16);
  out[96 + lane] = __shfl_down_sync(all, lane, 3U);
  out[128 + lane] = __shfl_xor_sync(all, lane, 9);
  long long wide = (static_cast<long long>(lane) << 40) + lane;
  wide = __shfl_xor_sync(all, wide, 1);
  out[160 + lane] = static_cast<int>(wide >> 40);
  // Halves of the warp on ways of their own.
  if (lane < 16) {
    out[192 + lane] = __shfl_xor_sync(0x0000ffffU, lane, 1);
  } else {
    out[192 + lane] = __shfl_xor_sync(0xffff0000U, lane, 2);
  }
}

__global__ void votes(unsigned int* out) {
  const bool odd = threadIdx.x % 2 == 1;
  const unsigned int ballot = __ballot_sync(all, odd);
  const int any = __any_sync(all, threadIdx.x == 40);
  const int every = __all_sync(all, threadIdx.x < 64);
  if (threadIdx.x % 32 != 0) return;
  out[threadIdx.x / 32 * 3] = ballot;
  out[threadIdx.x / 32 * 3 + 1] = static_cast<unsigned int>(any);
  out[threadIdx.x / 32 * 3 + 2] = static_cast<unsigned int>(every);
}

__global__ void shuffle_with_ended_lanes(int* out) {
  if (threadIdx.x >= 16) return;
  out[threadIdx.x] = __shfl_xor_sync(all, static_cast<int>(threadIdx.x), threadIdx.x < 8 ? 1 : 16);
}

__global__ void count_up(unsigned int* counter, int* highest) {
  atomicAdd(counter, 1U);
  atomicMax(highest, static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x));
}

__global__ void read_unwritten_shared(float* out) {
  extern __shared__ __align__(16) unsigned char shared_bytes[];
  auto* values = reinterpret_cast<float*>(shared_bytes);
  out[blockIdx.x] = values[3];
  values[3] = 1;
}

__global__ void write_shared_at(int index) {
  extern __shared__ __align__(16) unsigned char shared_bytes[];
  reinterpret_cast<int*>(shared_bytes)[index] = 1;
}

__global__ void barrier_after_return() {
  if (threadIdx.x >= 32) return;
  __syncthreads();
}

__global__ void barrier_against_shuffle() {
  if (threadIdx.x < 16) {
    __syncthreads();
  } else {
    static_cast<void>(__shfl_sync(all, 1, 0));
  }
}

__global__ void mask_without_self() {
  __syncwarp(0x0000ffffU);
}

__global__ void poll_for_block_zero(unsigned int* flag) {
  if (blockIdx.x == 0) {
    atomicExch(flag, 1U);
  } else {
    while (atomicAdd(flag, 0U) == 0U) {
    }
  }
}

namespace {

__device__ __attribute__((noinline)) int descend(int depth) {
  volatile int room[1024];
  room[depth % 1024] = depth;
  if (depth == 0) return room[0];
  return descend(depth - 1) + room[depth % 1024];
}

}  // namespace

__global__ void overflow_stack(int* out, int depth) {
  *out = descend(depth);
}

__global__ void many_barriers(float* data) {
  extern __shared__ __align__(16) unsigned char shared_bytes[];
  auto* values = reinterpret_cast<float*>(shared_bytes);
  float value = data[blockIdx.x * blockDim.x + threadIdx.x];
  for (int i = 0; i < 4; ++i) {
    values[threadIdx.x] = value;
    __syncthreads();
    value = __fadd_rn(value, values[(threadIdx.x + 1) % blockDim.x]);
    __syncthreads();
  }
  data[blockIdx.x * blockDim.x + threadIdx.x] = value;
}

__global__ void many_shuffles(float* data) {
  float value = data[blockIdx.x * blockDim.x + threadIdx.x];
  for (int i = 0; i < 4; ++i) value = __fmul_rn(warp_sum(value), 0.03125F);
  data[blockIdx.x * blockDim.x + threadIdx.x] = value;
}

namespace {

template <class Element, bool transposed>
__device__ void multiply_tiles(const Element* a, const Element* b, float* out, int k, Element* shared) {
  const int lane = static_cast<int>(threadIdx.x);
  FragmentC sums{};
  constexpr int stage_elements = (16 + 8) * 16;
  const auto load = [&](int stage) {
    Element* to = shared + stage % 2 * stage_elements;
    copy_async_16(to + lane / 2 * 16 + lane % 2 * 8, a + lane / 2 * k + stage * 16 + lane % 2 * 8);
    if constexpr (transposed) {
      if (lane < 16) copy_async_16(to + 256 + lane * 8, b + (stage * 16 + lane) * 8);
    } else {
      if (lane < 16) copy_async_16(to + 256 + lane / 2 * 16 + lane % 2 * 8, b + lane / 2 * k + stage * 16 + lane % 2 * 8);
    }
    copy_async_commit();
  };
  load(0);
  for (int stage = 0; stage * 16 < k; ++stage) {
    if ((stage + 1) * 16 < k) {
      load(stage + 1);
      copy_async_wait<1>();
    } else {
      copy_async_wait<0>();
    }
    __syncwarp();
    const Element* tile = shared + stage % 2 * stage_elements;
    FragmentA left;
    FragmentB right;
    load_matrix_x4(left, tile + lane % 16 * 16 + lane / 16 * 8);
    if constexpr (transposed) {
      load_matrix_x2_transposed(right, tile + 256 + lane % 16 * 8);
    } else {
      load_matrix_x2(right, tile + 256 + lane % 8 * 16 + lane / 8 % 2 * 8);
    }
    mma_m16n8k16<Element>(sums, left, right);
    __syncwarp();
  }
  for (int i = 0; i < 4; ++i) out[(lane / 4 + i / 2 * 8) * 8 + lane % 4 * 2 + i % 2] = sums.x[i];
}

}  // namespace

template <class Element>
__global__ void multiply(const Element* a, const Element* b, float* out, int k) {
  extern __shared__ __align__(16) unsigned char shared_bytes[];
  multiply_tiles<Element, false>(a, b, out, k, reinterpret_cast<Element*>(shared_bytes));
}
template <class Element>
__global__ void multiply_transposed(const Element* a, const Element* b, float* out, int k) {
  extern __shared__ __align__(16) unsigned char shared_bytes[];
  multiply_tiles<Element, true>(a, b, out, k, reinterpret_cast<Element*>(shared_bytes));
}
template __global__ void multiply<__nv_bfloat16>(const __nv_bfloat16*, const __nv_bfloat16*, float*, int);
template __global__ void multiply<__half>(const __half*, const __half*, float*, int);
template __global__ void multiply_transposed<__nv_bfloat16>(const __nv_bfloat16*, const __nv_bfloat16*, float*, int);
template __global__ void multiply_transposed<__half>(const __half*, const __half*, float*, int);

__global__ void multiply_with_few_lanes(float* out) {
  if (threadIdx.x == 31) return;
  FragmentC c{};
  const FragmentA a{};
  const FragmentB b{};
  mma_m16n8k16<__half>(c, a, b);
  out[threadIdx.x] = c.x[0];
}

__global__ void copy_async_in_stages(const float* in, float* out, int stages) {
  extern __shared__ __align__(16) unsigned char shared_bytes[];
  auto* values = reinterpret_cast<float*>(shared_bytes) + threadIdx.x * 8;
  for (int stage = 0; stage < stages; ++stage) {
    copy_async_16(values + stage % 2 * 4, in + (static_cast<unsigned int>(stage) * blockDim.x + threadIdx.x) * 4);
    copy_async_commit();
    if (stage == 0) continue;
    copy_async_wait<1>();
    out[static_cast<unsigned int>(stage - 1) * blockDim.x + threadIdx.x] = values[(stage - 1) % 2 * 4 + 1];
  }
  copy_async_wait<0>();
  out[static_cast<unsigned int>(stages - 1) * blockDim.x + threadIdx.x] = values[(stages - 1) % 2 * 4 + 1];
}

__global__ void copy_async_without_wait(const float* in, float* out) {
  extern __shared__ __align__(16) unsigned char shared_bytes[];
  auto* values = reinterpret_cast<float*>(shared_bytes) + threadIdx.x * 4;
  copy_async_16(values, in + threadIdx.x * 4);
  copy_async_commit();
  out[threadIdx.x] = values[1];
}

}  // namespace rubato::engine::cuda
