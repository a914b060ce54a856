// SPDX-License-Identifier: Apache-2.0
// Device and pinned memory: limits, guard zones, freed memory, and host code that touches what it may not.
#include <cstring>

#include "tests/cuda_host/test_device.h"

namespace cuda_host {
namespace {

using Memory = Emulation;

TEST_F(Memory, allocations_fail_beyond_the_device_s_memory) {
  reset({.memory_bytes = 1U << 20U});
  std::size_t free_bytes = 0;
  std::size_t total = 0;
  void* half = nullptr;
  void* more = nullptr;
  ASSERT_CUDA(cudaMalloc(&half, 1U << 19U));
  EXPECT_EQ(cudaMalloc(&more, (1U << 19U) + 1), cudaErrorMemoryAllocation);
  EXPECT_EQ(more, nullptr);
  EXPECT_EQ(cudaGetLastError(), cudaErrorMemoryAllocation);
  EXPECT_CUDA(cudaMemGetInfo(&free_bytes, &total));
  EXPECT_EQ(free_bytes, 1U << 19U);
  EXPECT_EQ(total, 1U << 20U);
  EXPECT_EQ(live().allocations, 1U);
  EXPECT_CUDA(cudaFree(half));
  EXPECT_CUDA(cudaMalloc(&more, 1U << 20U));
  EXPECT_CUDA(cudaFree(more));
  EXPECT_EQ(live().allocations, 0U);
}

TEST_F(Memory, allocations_are_aligned_to_256_bytes) {
  for (const std::size_t size : {1U, 255U, 256U, 4097U}) {
    void* memory = nullptr;
    ASSERT_CUDA(cudaMalloc(&memory, size));
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(memory) % 256, 0U);
    EXPECT_CUDA(cudaFree(memory));
  }
}

TEST_F(Memory, a_write_far_past_the_end_is_an_out_of_bounds_fault_that_names_the_thread) {
  Array<float> data(64);  // 256 bytes: the next float is on the guard page
  ASSERT_CUDA(launch(nullptr, 1, 1, 0, kernels::write_at, data.get(), 64LL, 1.0F));
  EXPECT_EQ(cudaDeviceSynchronize(), cudaErrorIllegalAddress);
  expect_faults(FaultKind::OutOfBounds, "write_at block (0, 0, 0) thread (0, 0, 0)", "wrote 1 bytes past the end");
}

TEST_F(Memory, a_read_past_the_end_is_an_out_of_bounds_fault) {
  Array<float> data(64);
  Array<float> out(1);
  ASSERT_CUDA(launch(nullptr, 1, 1, 0, kernels::read_at, data.get(), 4000LL, out.get()));
  EXPECT_EQ(cudaDeviceSynchronize(), cudaErrorIllegalAddress);
  expect_faults(FaultKind::OutOfBounds, "read_at", "read ");
}

#if !CUDA_HOST_ASAN
TEST_F(Memory, a_write_just_past_the_end_is_found_after_the_kernel) {
  Array<float> data(10);
  ASSERT_CUDA(launch(nullptr, 1, 1, 0, kernels::write_at, data.get(), 10LL, 1.0F));
  EXPECT_CUDA(cudaDeviceSynchronize());
  expect_faults(FaultKind::OutOfBounds, "write_at", "past the end");
}

TEST_F(Memory, a_write_just_before_the_begin_is_found_after_the_kernel) {
  Array<float> data(10);
  ASSERT_CUDA(launch(nullptr, 1, 1, 0, kernels::write_at, data.get(), -3LL, 1.0F));
  EXPECT_CUDA(cudaDeviceSynchronize());
  expect_faults(FaultKind::OutOfBounds, "write_at", "before");
}

TEST_F(Memory, a_null_pointer_in_a_kernel_is_reported) {
  ASSERT_CUDA(launch(nullptr, 1, 1, 0, kernels::write_value, static_cast<int*>(nullptr), 1));
  EXPECT_EQ(cudaDeviceSynchronize(), cudaErrorIllegalAddress);
  expect_faults(FaultKind::IllegalAddress, "write_value", "null");
}

TEST_F(Memory, a_read_just_past_the_end_is_nan) {
  Array<float> data(10);
  Array<float> out(1);
  ASSERT_CUDA(launch(nullptr, 1, 1, 0, kernels::read_at, data.get(), 10LL, out.get()));
  const float read = out.read()[0];
  EXPECT_NE(read, read);
}
#else
TEST_F(Memory, a_write_just_past_the_end_is_trapped) {
  Array<float> data(10);
  EXPECT_DEATH(
      {
        static_cast<void>(launch(nullptr, 1, 1, 0, kernels::write_at, data.get(), 10LL, 1.0F));
        cudaDeviceSynchronize();
      },
      "AddressSanitizer");
}
#endif

TEST_F(Memory, a_kernel_that_uses_freed_memory_is_reported_when_it_is_launched_and_when_it_touches_it) {
  float* data = nullptr;
  ASSERT_CUDA(cudaMalloc(&data, 1024));
  ASSERT_CUDA(cudaFree(data));
  ASSERT_CUDA(launch(nullptr, 1, 1, 0, kernels::write_at, data, 0LL, 1.0F));
  EXPECT_EQ(cudaDeviceSynchronize(), cudaErrorIllegalAddress);
  const std::vector<Fault> found = take_faults();
  ASSERT_EQ(found.size(), 2U);
  EXPECT_EQ(found[0].kind, FaultKind::UseAfterFree);
  EXPECT_NE(found[0].what.find("is launched with"), std::string::npos);
  EXPECT_EQ(found[1].kind, FaultKind::UseAfterFree);
  EXPECT_NE(found[1].what.find("freed"), std::string::npos);
}

TEST_F(Memory, memory_freed_while_queued_work_uses_it_is_reported) {
  int found = 0;
  for (std::uint64_t seed = 0; seed < 20; ++seed) {
    reset({.seed = seed});
    cudaStream_t stream = make_stream();
    float* data = nullptr;
    ASSERT_CUDA(cudaMalloc(&data, 1024));
    ASSERT_CUDA(launch(stream, 1, 1, 0, kernels::write_at, data, 0LL, 1.0F));
    ASSERT_CUDA(cudaFree(data));
    if (live().pending_operations == 0 && faults().empty()) continue;  // it had run already
    expect_faults(FaultKind::InFlight, "cudaFree", "write_at");
    ++found;
  }
  EXPECT_GT(found, 10);
}

TEST_F(Memory, host_code_that_reads_or_writes_device_memory_is_reported) {
  Array<int> data(std::vector<int>{7, 8});
  volatile int* wrong = data.get();
  const int read = wrong[0];
  EXPECT_EQ(read, 7) << "noted, then let go on";
  expect_faults(FaultKind::HostAccess, "host code", "read ");
  wrong[1] = 9;
  expect_faults(FaultKind::HostAccess, "host code", "wrote ");
}

TEST_F(Memory, a_kernel_that_is_given_pageable_host_memory_is_reported) {
  Array<int> out(1);
  const std::vector<int> values{3};
  ASSERT_CUDA(launch(nullptr, 1, 1, 0, kernels::copy_value, values.data(), out.get()));
  expect_faults(FaultKind::HostPointer, "copy_value");
  Pinned<int> pinned(1);
  pinned[0] = 4;
  ASSERT_CUDA(launch(nullptr, 1, 1, 0, kernels::copy_value, static_cast<const int*>(pinned.get()), out.get()));
  EXPECT_EQ(out.read()[0], 4);
}

TEST_F(Memory, freeing_twice_is_reported) {
  void* data = nullptr;
  ASSERT_CUDA(cudaMalloc(&data, 64));
  ASSERT_CUDA(cudaFree(data));
  EXPECT_EQ(cudaFree(data), cudaErrorInvalidValue);
  expect_faults(FaultKind::BadHandle, "cudaFree");
  EXPECT_EQ(cudaGetLastError(), cudaErrorInvalidValue);
}

TEST_F(Memory, copies_must_lie_inside_one_allocation) {
  Array<int> data(4);
  Pinned<int> host(8);
  EXPECT_EQ(cudaMemcpy(data.get(), host.get(), 20, cudaMemcpyHostToDevice), cudaErrorInvalidValue);
  expect_faults(FaultKind::OutOfBounds, "cudaMemcpy", "past the end");
  EXPECT_EQ(cudaMemset(data.get() + 2, 0, 12), cudaErrorInvalidValue);
  expect_faults(FaultKind::OutOfBounds, "cudaMemset");
  EXPECT_EQ(cudaMemcpy(host.get(), data.get(), 4, cudaMemcpyHostToDevice), cudaErrorInvalidValue);
  EXPECT_EQ(fault_text(), "");
}

TEST_F(Memory, another_device_s_memory_needs_peer_access) {
  reset({.devices = 2});
  int* there = nullptr;
  ASSERT_CUDA(cudaSetDevice(1));
  ASSERT_CUDA(cudaMalloc(&there, 4));
  ASSERT_CUDA(cudaSetDevice(0));
  ASSERT_CUDA(launch(nullptr, 1, 1, 0, kernels::write_value, there, 1));
  EXPECT_EQ(cudaDeviceSynchronize(), cudaErrorIllegalAddress);
  expect_faults(FaultKind::OutOfBounds, "write_value", "cudaDeviceEnablePeerAccess");

  reset({.devices = 2});
  ASSERT_CUDA(cudaSetDevice(1));
  ASSERT_CUDA(cudaMalloc(&there, 4));
  ASSERT_CUDA(cudaSetDevice(0));
  int can = 0;
  ASSERT_CUDA(cudaDeviceCanAccessPeer(&can, 0, 1));
  EXPECT_EQ(can, 1);
  ASSERT_CUDA(cudaDeviceEnablePeerAccess(1, 0));
  EXPECT_EQ(cudaDeviceEnablePeerAccess(1, 0), cudaErrorPeerAccessAlreadyEnabled);
  ASSERT_CUDA(launch(nullptr, 1, 1, 0, kernels::write_value, there, 5));
  ASSERT_CUDA(cudaDeviceSynchronize());
  int* here = nullptr;
  ASSERT_CUDA(cudaMalloc(&here, 4));
  ASSERT_CUDA(cudaMemcpyPeerAsync(here, 0, there, 1, 4));
  int value = 0;
  ASSERT_CUDA(cudaMemcpy(&value, here, 4, cudaMemcpyDeviceToHost));
  EXPECT_EQ(value, 5);
}

TEST_F(Memory, faults_reach_the_callback_of_a_test) {
  std::vector<FaultKind> seen;
  on_fault([&](const Fault& fault) { seen.push_back(fault.kind); });
  EXPECT_EQ(cudaFree(&seen), cudaErrorInvalidValue);
  EXPECT_EQ(seen, std::vector<FaultKind>{FaultKind::BadHandle});
  static_cast<void>(take_faults());
  on_fault(nullptr);
}

}  // namespace
}  // namespace cuda_host
