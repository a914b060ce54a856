// SPDX-License-Identifier: Apache-2.0
// Kernels of the emulation's own tests: right ones, and ones with a planted mistake.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>

namespace rubato::engine::cuda {

__global__ void scale(float* data, int count, float factor);
__global__ void write_at(float* data, long long index, float value);
__global__ void read_at(const float* data, long long index, float* out);
__global__ void write_value(int* out, int value);
__global__ void copy_value(const int* from, int* out);
__global__ void write_indices(uint4* out);
__global__ void do_nothing();

/// Reverses each block's part through shared memory (blockDim.x floats).
__global__ void reverse(const float* in, float* out);
__global__ void reverse_without_barrier(const float* in, float* out);
/// Sums each block's part (warps of 32, shared: 32 floats).
__global__ void sum(const float* in, float* out);
__global__ void sum_without_barrier(const float* in, float* out);
/// Each lane writes, its neighbour reads (shared: blockDim.x ints).
__global__ void pass_in_warp(int* out);
__global__ void pass_in_warp_without_sync(int* out);
/// The last block to finish adds up what all wrote.
__global__ void sum_by_last_block(const float* in, float* parts, unsigned int* finished, float* out);

__global__ void shuffles(int* out);
__global__ void votes(unsigned int* out);
__global__ void shuffle_with_ended_lanes(int* out);
__global__ void count_up(unsigned int* counter, int* highest);
__global__ void read_unwritten_shared(float* out);
__global__ void write_shared_at(int index);
__global__ void barrier_after_return();
__global__ void barrier_against_shuffle();
__global__ void mask_without_self();
__global__ void poll_for_block_zero(unsigned int* flag);
__global__ void overflow_stack(int* out, int depth);
__global__ void many_barriers(float* data);
__global__ void many_shuffles(float* data);

/// out (16, 8) = a (16, k) b (k, 8), b given as (8, k) or, transposed, as (k, 8). Shared: 2 stages of (16 + 8) x 16 elements.
template <class Element>
__global__ void multiply(const Element* a, const Element* b, float* out, int k);
template <class Element>
__global__ void multiply_transposed(const Element* a, const Element* b, float* out, int k);
__global__ void multiply_with_few_lanes(float* out);
__global__ void copy_async_in_stages(const float* in, float* out, int stages);
__global__ void copy_async_without_wait(const float* in, float* out);

}  // namespace rubato::engine::cuda

namespace kernels = rubato::engine::cuda;

template <class... Parameters, class... Arguments>
cudaError_t launch(cudaStream_t stream, dim3 grid, dim3 block, std::size_t shared, void (*kernel)(Parameters...),
                   Arguments... arguments) {
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = block;
  config.dynamicSmemBytes = shared;
  config.stream = stream;
  return cudaLaunchKernelEx(&config, kernel, arguments...);
}
