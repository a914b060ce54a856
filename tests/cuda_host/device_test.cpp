// SPDX-License-Identifier: Apache-2.0
// Threads, warps, barriers, atomics and shared memory, under many seeds.
#include <cmath>
#include <numeric>

#include "tests/cuda_host/test_device.h"

namespace cuda_host {
namespace {

constexpr std::uint64_t seeds = 20;

using Device = Emulation;

TEST_F(Device, every_thread_sees_its_own_indices) {
  const dim3 grid(3, 2, 2);
  const dim3 block(5, 4, 3);
  Array<uint4> out(12 * 60);
  ASSERT_CUDA(launch(nullptr, grid, block, 0, kernels::write_indices, out.get()));
  const std::vector<uint4> written = out.read();
  for (unsigned int i = 0; i < written.size(); ++i) {
    EXPECT_EQ(written[i].x, i / 60);
    EXPECT_EQ(written[i].y + 5 * (written[i].z + 4 * written[i].w), i % 60);
  }
}

TEST_F(Device, barriers_make_shared_memory_visible_under_every_seed) {
  const std::vector<float> in = ascending(4 * 128);
  for (std::uint64_t seed = 0; seed < seeds; ++seed) {
    set_seed(seed);
    Array<float> from(in);
    Array<float> to(in.size());
    ASSERT_CUDA(launch(nullptr, 4, 128, 512, kernels::reverse, from.get(), to.get()));
    const std::vector<float> out = to.read();
    for (std::size_t i = 0; i < in.size(); ++i) ASSERT_EQ(out[i], in[i / 128 * 128 + 127 - i % 128]) << "seed " << seed;
  }
}

TEST_F(Device, warp_and_block_sums_are_right_under_every_seed) {
  const std::vector<float> in = ascending(3 * 256);
  for (std::uint64_t seed = 0; seed < seeds; ++seed) {
    set_seed(seed);
    Array<float> from(in);
    Array<float> to(3);
    ASSERT_CUDA(launch(nullptr, 3, 256, 128, kernels::sum, from.get(), to.get()));
    const std::vector<float> out = to.read();
    for (std::size_t block = 0; block < 3; ++block) {
      EXPECT_EQ(out[block], std::accumulate(in.begin() + block * 256, in.begin() + (block + 1) * 256, 0.0F)) << "seed " << seed;
    }
  }
}

TEST_F(Device, shuffles_take_from_the_lanes_that_cuda_says) {
  for (std::uint64_t seed = 0; seed < seeds; ++seed) {
    set_seed(seed);
    Array<int> out(224);
    ASSERT_CUDA(launch(nullptr, 1, 32, 0, kernels::shuffles, out.get()));
    const std::vector<int> got = out.read();
    for (int lane = 0; lane < 32; ++lane) {
      const auto at = static_cast<std::size_t>(lane);
      EXPECT_EQ(got[at], 5);
      EXPECT_EQ(got[32 + at], lane / 8 * 8 + 3);
      EXPECT_EQ(got[64 + at], lane % 16 >= 2 ? lane - 2 : lane);
      EXPECT_EQ(got[96 + at], lane + 3 < 32 ? lane + 3 : lane);
      EXPECT_EQ(got[128 + at], lane ^ 9);
      EXPECT_EQ(got[160 + at], lane ^ 1);
      EXPECT_EQ(got[192 + at], lane < 16 ? lane ^ 1 : lane ^ 2);
    }
  }
}

TEST_F(Device, votes_count_the_warp_alone) {
  Array<unsigned int> out(6);
  ASSERT_CUDA(launch(nullptr, 1, 64, 0, kernels::votes, out.get()));
  EXPECT_EQ(out.read(), (std::vector<unsigned int>{0xaaaaaaaaU, 0, 1, 0xaaaaaaaaU, 1, 1}));
}

TEST_F(Device, a_shuffle_goes_on_without_ended_lanes_and_reads_poison_from_them) {
  Array<int> out(16);
  ASSERT_CUDA(launch(nullptr, 1, 32, 0, kernels::shuffle_with_ended_lanes, out.get()));
  const std::vector<int> got = out.read();
  for (int lane = 0; lane < 16; ++lane) EXPECT_EQ(got[static_cast<std::size_t>(lane)], lane < 8 ? lane ^ 1 : -1);
}

TEST_F(Device, atomics_of_all_blocks_add_up) {
  Array<unsigned int> counter(std::vector<unsigned int>{0});
  Array<int> highest(std::vector<int>{0});
  ASSERT_CUDA(launch(nullptr, 10, 96, 0, kernels::count_up, counter.get(), highest.get()));
  EXPECT_EQ(counter.read()[0], 960U);
  EXPECT_EQ(highest.read()[0], 959);
}

TEST_F(Device, the_last_block_sees_what_all_others_wrote_whatever_their_order) {
  const std::vector<float> in = ascending(8 * 32);
  for (std::uint64_t seed = 0; seed < seeds; ++seed) {
    set_seed(seed);
    Array<float> from(in);
    Array<float> parts(8);
    Array<unsigned int> finished(std::vector<unsigned int>{0});
    Array<float> out(1);
    ASSERT_CUDA(launch(nullptr, 8, 32, 16, kernels::sum_by_last_block, from.get(), parts.get(), finished.get(), out.get()));
    EXPECT_EQ(out.read()[0], 256.0F * 257.0F / 2) << "seed " << seed;
  }
}

TEST_F(Device, shared_memory_is_poison_before_every_block) {
  Array<float> out(4);
  ASSERT_CUDA(launch(nullptr, 4, 1, 64, kernels::read_unwritten_shared, out.get()));
  for (const float value : out.read()) EXPECT_TRUE(std::isnan(value));
}

TEST_F(Device, memory_is_poison_when_it_is_allocated) {
  Array<float> out(3);
  for (const float value : out.read()) EXPECT_TRUE(std::isnan(value));
}

TEST_F(Device, launches_beyond_the_limits_are_refused) {
  EXPECT_EQ(launch(nullptr, 1, 1025, 0, kernels::do_nothing), cudaErrorInvalidConfiguration);
  EXPECT_EQ(launch(nullptr, 1, dim3(32, 32, 2), 0, kernels::do_nothing), cudaErrorInvalidConfiguration);
  EXPECT_EQ(launch(nullptr, 1, dim3(1, 1, 65), 0, kernels::do_nothing), cudaErrorInvalidConfiguration);
  EXPECT_EQ(launch(nullptr, 0, 1, 0, kernels::do_nothing), cudaErrorInvalidConfiguration);
  EXPECT_EQ(launch(nullptr, dim3(1, 65536), 1, 0, kernels::do_nothing), cudaErrorInvalidConfiguration);
  EXPECT_EQ(cudaPeekAtLastError(), cudaErrorInvalidConfiguration);
  EXPECT_EQ(cudaGetLastError(), cudaErrorInvalidConfiguration);
  EXPECT_EQ(cudaGetLastError(), cudaSuccess);
}

TEST_F(Device, shared_memory_beyond_48_kib_must_be_asked_for) {
  EXPECT_EQ(launch(nullptr, 1, 1, 48 * 1024, kernels::do_nothing), cudaSuccess);
  EXPECT_EQ(launch(nullptr, 1, 1, 48 * 1024 + 1, kernels::do_nothing), cudaErrorInvalidValue);
  EXPECT_EQ(cudaFuncSetAttribute(kernels::do_nothing, cudaFuncAttributeMaxDynamicSharedMemorySize, 232449),
            cudaErrorInvalidValue);
  EXPECT_EQ(cudaFuncSetAttribute(kernels::do_nothing, cudaFuncAttributeMaxDynamicSharedMemorySize, 232448), cudaSuccess);
  EXPECT_EQ(launch(nullptr, 1, 1, 232448, kernels::do_nothing), cudaSuccess);
  EXPECT_EQ(launch(nullptr, 1, 1, 232449, kernels::do_nothing), cudaErrorInvalidValue);
  int blocks = 0;
  EXPECT_CUDA(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kernels::do_nothing, 256, 100 * 1024));
  EXPECT_EQ(blocks, 2);
  cudaGetLastError();
}

TEST_F(Device, kernels_are_named_in_the_log) {
  clear_log();
  Array<float> a(std::vector<float>(16 * 16, 0.0F));
  ASSERT_CUDA(launch(nullptr, 1, 16, 0, kernels::scale, a.get(), 16, 2.0F));
  ASSERT_CUDA(launch(nullptr, 1, 32, 1536, kernels::multiply<__half>, reinterpret_cast<const __half*>(a.get()),
                     reinterpret_cast<const __half*>(a.get()), a.get(), 16));
  ASSERT_CUDA(cudaDeviceSynchronize());
  std::vector<std::string> ran;
  for (const LogEntry& entry : log()) {
    if (entry.action == Action::Ran && entry.name.find("rubato") == 0) ran.push_back(entry.name);
  }
  EXPECT_EQ(ran, (std::vector<std::string>{"rubato::engine::cuda::scale", "rubato::engine::cuda::multiply<__half>"}));
}

TEST_F(Device, many_threads_go_on_through_many_barriers_and_shuffles) {
  Array<float> data(std::vector<float>(100 * 256, 1.0F));
  ASSERT_CUDA(launch(nullptr, 100, 256, 1024, kernels::many_barriers, data.get()));
  ASSERT_CUDA(launch(nullptr, 100, 256, 1024, kernels::many_shuffles, data.get()));
  for (const float value : data.read()) ASSERT_EQ(value, 16.0F);
}

// ---- planted mistakes
template <class Run>
int wrong_seeds(Run run) {
  int wrong = 0;
  for (std::uint64_t seed = 0; seed < seeds; ++seed) {
    set_seed(seed);
    wrong += run() ? 0 : 1;
  }
  return wrong;
}

TEST_F(Device, a_missing_barrier_gives_wrong_results) {
  const std::vector<float> in = ascending(128);
  EXPECT_GT(wrong_seeds([&] {
              Array<float> from(in);
              Array<float> to(128);
              EXPECT_CUDA(launch(nullptr, 1, 128, 512, kernels::reverse_without_barrier, from.get(), to.get()));
              return to.read() == std::vector<float>(in.rbegin(), in.rend());
            }),
            static_cast<int>(seeds) * 3 / 4);
  EXPECT_GT(wrong_seeds([&] {
              Array<float> from(in);
              Array<float> to(1);
              EXPECT_CUDA(launch(nullptr, 1, 128, 128, kernels::sum_without_barrier, from.get(), to.get()));
              return to.read()[0] == 128.0F * 129.0F / 2;
            }),
            static_cast<int>(seeds) / 2);
}

TEST_F(Device, a_missing_syncwarp_gives_wrong_results) {
  const auto passes = [](void (*kernel)(int*)) {
    return wrong_seeds([kernel] {
      Array<int> out(32);
      EXPECT_CUDA(launch(nullptr, 1, 32, 128, kernel, out.get()));
      std::vector<int> expected(32);
      for (int i = 0; i < 32; ++i) expected[static_cast<std::size_t>(i)] = i ^ 1;
      return out.read() == expected;
    });
  };
  EXPECT_EQ(passes(kernels::pass_in_warp), 0);
  EXPECT_EQ(passes(kernels::pass_in_warp_without_sync), static_cast<int>(seeds));
}

TEST_F(Device, barriers_that_not_all_reach_name_the_kernel) {
  ASSERT_CUDA(launch(nullptr, 1, 64, 0, kernels::barrier_after_return));
  EXPECT_EQ(cudaDeviceSynchronize(), cudaErrorIllegalAddress);
  expect_faults(FaultKind::Divergence, "barrier_after_return", "32 at __syncthreads");
  reset();
  ASSERT_CUDA(launch(nullptr, 1, 32, 0, kernels::barrier_against_shuffle));
  EXPECT_EQ(cudaDeviceSynchronize(), cudaErrorIllegalAddress);
  expect_faults(FaultKind::Divergence, "barrier_against_shuffle", "16 in a warp operation");
  reset();
  Array<float> out(32);
  ASSERT_CUDA(launch(nullptr, 1, 32, 0, kernels::multiply_with_few_lanes, out.get()));
  EXPECT_EQ(cudaDeviceSynchronize(), cudaErrorIllegalAddress);
  expect_faults(FaultKind::Divergence, "multiply_with_few_lanes");
}

TEST_F(Device, a_mask_that_leaves_out_its_caller_is_reported) {
  ASSERT_CUDA(launch(nullptr, 1, 32, 0, kernels::mask_without_self));
  EXPECT_EQ(cudaDeviceSynchronize(), cudaErrorIllegalAddress);
  expect_faults(FaultKind::Kernel, "mask_without_self", "leaves out");
}

TEST_F(Device, a_block_that_polls_for_another_is_reported) {
  bool found = false;
  for (std::uint64_t seed = 0; seed < seeds && !found; ++seed) {  // until the polling block comes first
    reset({.seed = seed});
    Array<unsigned int> flag(std::vector<unsigned int>{0});
    ASSERT_CUDA(launch(nullptr, 2, 1, 0, kernels::poll_for_block_zero, flag.get()));
    found = cudaDeviceSynchronize() != cudaSuccess;
    if (found) expect_faults(FaultKind::Spinning, "poll_for_block_zero");
  }
  EXPECT_TRUE(found);
}

TEST_F(Device, a_broken_kernel_leaves_the_emulation_usable_after_reset) {
  for (int round = 0; round < 3; ++round) {
    ASSERT_CUDA(launch(nullptr, 1, 64, 0, kernels::barrier_after_return));
    EXPECT_EQ(cudaDeviceSynchronize(), cudaErrorIllegalAddress);
    EXPECT_EQ(launch(nullptr, 1, 64, 0, kernels::do_nothing), cudaErrorIllegalAddress);
    EXPECT_EQ(cudaGetLastError(), cudaErrorIllegalAddress) << "a broken device stays broken";
    EXPECT_EQ(cudaGetLastError(), cudaErrorIllegalAddress);
    reset();
    const std::vector<float> in = ascending(64);
    Array<float> from(in);
    Array<float> to(64);
    ASSERT_CUDA(launch(nullptr, 1, 64, 256, kernels::reverse, from.get(), to.get()));
    EXPECT_EQ(to.read(), std::vector<float>(in.rbegin(), in.rend()));
  }
}

#if !CUDA_HOST_ASAN
TEST_F(Device, a_stack_overflow_is_reported) {
  Array<int> out(1);
  ASSERT_CUDA(launch(nullptr, 1, 1, 0, kernels::overflow_stack, out.get(), 1000));
  EXPECT_EQ(cudaDeviceSynchronize(), cudaErrorIllegalAddress);
  expect_faults(FaultKind::IllegalAddress, "overflow_stack", "stack");
}

TEST_F(Device, writing_behind_the_launch_s_shared_memory_is_reported) {
  ASSERT_CUDA(launch(nullptr, 1, 1, 64, kernels::write_shared_at, 15));
  EXPECT_CUDA(cudaDeviceSynchronize());
  EXPECT_EQ(fault_text(), "");
  ASSERT_CUDA(launch(nullptr, 1, 1, 64, kernels::write_shared_at, 16));
  EXPECT_EQ(cudaDeviceSynchronize(), cudaErrorIllegalAddress);
  expect_faults(FaultKind::OutOfBounds, "write_shared_at", "beyond the 64 bytes");
}
#else
TEST_F(Device, writing_behind_the_launch_s_shared_memory_is_trapped) {
  EXPECT_DEATH(
      {
        static_cast<void>(launch(nullptr, 1, 1, 64, kernels::write_shared_at, 16));
        cudaDeviceSynchronize();
      },
      "AddressSanitizer");
}
#endif

}  // namespace
}  // namespace cuda_host
