// SPDX-License-Identifier: Apache-2.0
// Streams and events: what is ordered stays ordered under every seed, what is not does come in another order under some.
#include <set>

#include "tests/cuda_host/test_device.h"

namespace cuda_host {
namespace {

using Streams = Emulation;

constexpr std::uint64_t seeds = 40;

std::vector<std::uint64_t> ran_operations(const std::string& name_part) {
  std::vector<std::uint64_t> ran;
  for (const LogEntry& entry : log()) {
    if (entry.action == Action::Ran && entry.name.find(name_part) != std::string::npos) ran.push_back(entry.operation);
  }
  return ran;
}

TEST_F(Streams, nothing_runs_before_something_waits_unless_the_seed_says_so) {
  int early = 0;
  for (std::uint64_t seed = 0; seed < seeds; ++seed) {
    reset({.seed = seed});
    cudaStream_t stream = make_stream();
    Array<int> out(1);
    clear_log();
    ASSERT_CUDA(launch(stream, 1, 1, 0, kernels::write_value, out.get(), 1));
    early += ran_operations("write_value").empty() ? 0 : 1;
    ASSERT_CUDA(cudaStreamSynchronize(stream));
    EXPECT_EQ(ran_operations("write_value").size(), 1U);
  }
  EXPECT_GT(early, 0);
  EXPECT_LT(early, static_cast<int>(seeds) / 2);
}

TEST_F(Streams, one_stream_keeps_its_order) {
  for (std::uint64_t seed = 0; seed < seeds; ++seed) {
    reset({.seed = seed});
    cudaStream_t stream = make_stream();
    Array<int> out(1);
    for (int value = 0; value < 10; ++value) ASSERT_CUDA(launch(stream, 1, 1, 0, kernels::write_value, out.get(), value));
    EXPECT_EQ(out.read()[0], 9);
  }
}

TEST_F(Streams, two_streams_without_an_event_come_in_either_order) {
  std::set<int> last;
  for (std::uint64_t seed = 0; seed < seeds; ++seed) {
    reset({.seed = seed});
    cudaStream_t first = make_stream();
    cudaStream_t second = make_stream();
    Array<int> out(1);
    ASSERT_CUDA(launch(first, 1, 1, 0, kernels::write_value, out.get(), 1));
    ASSERT_CUDA(launch(second, 1, 1, 0, kernels::write_value, out.get(), 2));
    last.insert(out.read()[0]);
  }
  EXPECT_EQ(last, (std::set<int>{1, 2}));
}

TEST_F(Streams, an_event_orders_two_streams) {
  for (std::uint64_t seed = 0; seed < seeds; ++seed) {
    reset({.seed = seed});
    cudaStream_t first = make_stream();
    cudaStream_t second = make_stream();
    cudaEvent_t event = make_event();
    Array<int> out(1);
    ASSERT_CUDA(launch(first, 1, 1, 0, kernels::write_value, out.get(), 1));
    ASSERT_CUDA(cudaEventRecord(event, first));
    ASSERT_CUDA(cudaStreamWaitEvent(second, event, 0));
    ASSERT_CUDA(launch(second, 1, 1, 0, kernels::write_value, out.get(), 2));
    EXPECT_EQ(out.read()[0], 2) << "seed " << seed;
  }
}

TEST_F(Streams, waiting_for_one_stream_need_not_run_another) {
  int left = 0;
  for (std::uint64_t seed = 0; seed < seeds; ++seed) {
    reset({.seed = seed});
    cudaStream_t first = make_stream();
    cudaStream_t second = make_stream();
    Array<int> out(2);
    ASSERT_CUDA(launch(first, 1, 1, 0, kernels::write_value, out.get(), 1));
    ASSERT_CUDA(launch(second, 1, 1, 0, kernels::write_value, out.get() + 1, 1));
    ASSERT_CUDA(cudaStreamSynchronize(second));
    left += cudaStreamQuery(first) == cudaErrorNotReady ? 1 : 0;
    run_pending();
    EXPECT_EQ(live().pending_operations, 0U);
  }
  EXPECT_GT(left, 0);
}

TEST_F(Streams, queries_come_true_in_the_end) {
  for (std::uint64_t seed = 0; seed < seeds; ++seed) {
    reset({.seed = seed});
    cudaStream_t stream = make_stream();
    cudaEvent_t event = make_event();
    EXPECT_EQ(cudaEventQuery(event), cudaSuccess) << "never recorded";
    Array<int> out(1);
    for (int i = 0; i < 5; ++i) ASSERT_CUDA(launch(stream, 1, 1, 0, kernels::write_value, out.get(), i));
    ASSERT_CUDA(cudaEventRecord(event, stream));
    int tries = 0;
    while (cudaEventQuery(event) == cudaErrorNotReady) ASSERT_LT(++tries, 1000);
    EXPECT_EQ(cudaGetLastError(), cudaSuccess) << "not ready is no error";
    EXPECT_EQ(out.read()[0], 4);
  }
}

TEST_F(Streams, fills_of_the_legacy_stream_are_not_ordered_with_non_blocking_streams) {
  std::set<int> seen;
  for (std::uint64_t seed = 0; seed < seeds; ++seed) {
    reset({.seed = seed});
    cudaStream_t stream = make_stream();
    Array<int> out(1);
    ASSERT_CUDA(cudaMemset(out.get(), 0, 4));
    ASSERT_CUDA(launch(stream, 1, 1, 0, kernels::write_value, out.get(), 1));
    seen.insert(out.read()[0]);
  }
  EXPECT_EQ(seen, (std::set<int>{0, 1}));
}

TEST_F(Streams, blocking_streams_are_ordered_with_the_legacy_stream) {
  for (std::uint64_t seed = 0; seed < seeds; ++seed) {
    reset({.seed = seed});
    cudaStream_t stream = nullptr;
    ASSERT_CUDA(cudaStreamCreate(&stream));
    Array<int> out(1);
    ASSERT_CUDA(cudaMemset(out.get(), 0, 4));
    ASSERT_CUDA(launch(stream, 1, 1, 0, kernels::write_value, out.get(), 1));
    int value = -1;
    ASSERT_CUDA(cudaMemcpy(&value, out.get(), 4, cudaMemcpyDeviceToHost));
    EXPECT_EQ(value, 1);
  }
}

TEST_F(Streams, staging_memory_that_is_reused_too_early_gives_wrong_results) {
  int wrong = 0;
  for (std::uint64_t seed = 0; seed < seeds; ++seed) {
    reset({.seed = seed});
    cudaStream_t stream = make_stream();
    Array<int> metadata(1);
    Array<int> out(2);
    Pinned<int> staging(1);
    for (int step = 0; step < 2; ++step) {
      staging[0] = 10 + step;  // the second time before the first copy is known to have run
      ASSERT_CUDA(cudaMemcpyAsync(metadata.get(), staging.get(), 4, cudaMemcpyHostToDevice, stream));
      ASSERT_CUDA(launch(stream, 1, 1, 0, kernels::copy_value, static_cast<const int*>(metadata.get()), out.get() + step));
    }
    wrong += out.read() == std::vector<int>{10, 11} ? 0 : 1;
  }
  EXPECT_GT(wrong, static_cast<int>(seeds) / 2);
}

TEST_F(Streams, results_read_before_the_wait_are_not_there) {
  int early = 0;
  for (std::uint64_t seed = 0; seed < seeds; ++seed) {
    reset({.seed = seed});
    cudaStream_t stream = make_stream();
    Array<int> value(std::vector<int>{5});
    Pinned<int> host(1);
    host[0] = 0;
    ASSERT_CUDA(cudaMemcpyAsync(host.get(), value.get(), 4, cudaMemcpyDeviceToHost, stream));
    early += host[0] == 0 ? 1 : 0;
    ASSERT_CUDA(cudaStreamSynchronize(stream));
    EXPECT_EQ(host[0], 5);
  }
  EXPECT_GT(early, static_cast<int>(seeds) / 2);
}

TEST_F(Streams, asynchronous_copies_need_pinned_memory) {
  cudaStream_t stream = make_stream();
  Array<int> data(1);
  const std::vector<int> pageable{1};
  EXPECT_EQ(cudaMemcpyAsync(data.get(), pageable.data(), 4, cudaMemcpyHostToDevice, stream), cudaErrorInvalidValue);
  expect_faults(FaultKind::PageableCopy, "cudaMemcpyAsync");
}

TEST_F(Streams, pinned_memory_freed_while_a_copy_is_queued_is_reported) {
  int found = 0;
  for (std::uint64_t seed = 0; seed < seeds; ++seed) {
    reset({.seed = seed});
    cudaStream_t stream = make_stream();
    Array<int> data(1);
    int* pinned = nullptr;
    ASSERT_CUDA(cudaHostAlloc(&pinned, 4, cudaHostAllocDefault));
    ASSERT_CUDA(cudaMemcpyAsync(data.get(), pinned, 4, cudaMemcpyHostToDevice, stream));
    ASSERT_CUDA(cudaFreeHost(pinned));
    found += take_faults().empty() ? 0 : 1;
  }
  EXPECT_GT(found, static_cast<int>(seeds) / 2);
}

TEST_F(Streams, a_destroyed_stream_is_recognised) {
  cudaStream_t stream = make_stream();
  ASSERT_CUDA(cudaStreamDestroy(stream));
  EXPECT_EQ(launch(stream, 1, 1, 0, kernels::do_nothing), cudaErrorInvalidResourceHandle);
  expect_faults(FaultKind::BadHandle, "cudaLaunchKernelEx", "stream");
}

TEST_F(Streams, events_measure_a_virtual_time) {
  cudaStream_t stream = make_stream();
  cudaEvent_t begin = nullptr;
  cudaEvent_t end = nullptr;
  ASSERT_CUDA(cudaEventCreate(&begin));
  ASSERT_CUDA(cudaEventCreate(&end));
  ASSERT_CUDA(cudaEventRecord(begin, stream));
  ASSERT_CUDA(launch(stream, 1000, 1, 0, kernels::do_nothing));
  ASSERT_CUDA(cudaEventRecord(end, stream));
  float milliseconds = 0;
  ASSERT_CUDA(cudaStreamSynchronize(stream));
  ASSERT_CUDA(cudaEventElapsedTime(&milliseconds, begin, end));
  EXPECT_GT(milliseconds, 0.01F);
}

TEST_F(Streams, the_nth_kernel_breaks_the_device_and_what_follows_returns_its_error) {
  cudaStream_t stream = make_stream();
  Array<int> out(1);
  fail_kernel(3, cudaErrorECCUncorrectable);
  for (int i = 0; i < 4; ++i) static_cast<void>(launch(stream, 1, 1, 0, kernels::write_value, out.get(), i));
  EXPECT_EQ(cudaStreamSynchronize(stream), cudaErrorECCUncorrectable);
  EXPECT_EQ(ran_operations("write_value").size(), 2U);
  EXPECT_EQ(launch(stream, 1, 1, 0, kernels::do_nothing), cudaErrorECCUncorrectable);
  void* more = nullptr;
  EXPECT_EQ(cudaMalloc(&more, 16), cudaErrorECCUncorrectable);
  EXPECT_EQ(cudaGetLastError(), cudaErrorECCUncorrectable);
}

TEST_F(Streams, the_same_seed_gives_the_same_order) {
  const auto order = [](std::uint64_t seed) {
    reset({.seed = seed});
    std::vector<int> streams;
    Array<int> out(1);
    for (int s = 0; s < 4; ++s) {
      cudaStream_t stream = make_stream();
      for (int i = 0; i < 3; ++i) EXPECT_CUDA(launch(stream, 1, 1, 0, kernels::write_value, out.get(), s));
    }
    EXPECT_CUDA(cudaDeviceSynchronize());
    for (const LogEntry& entry : log()) {
      if (entry.action == Action::Ran) streams.push_back(entry.stream);
    }
    return streams;
  };
  EXPECT_EQ(order(3), order(3));
  EXPECT_NE(order(3), order(4));
}

TEST_F(Streams, the_log_tells_who_waits_for_which_stream) {
  const cudaStream_t first = make_stream();
  const cudaStream_t second = make_stream();
  const cudaEvent_t event = make_event();
  ASSERT_CUDA(cudaEventRecord(event, first));
  clear_log();
  ASSERT_CUDA(cudaStreamWaitEvent(second, event));
  ASSERT_CUDA(cudaStreamSynchronize(second));
  ASSERT_CUDA(cudaEventSynchronize(event));
  ASSERT_CUDA(cudaStreamSynchronize(second));  // nothing is left to wait for, but the call may have
  ASSERT_CUDA(cudaDeviceSynchronize());
  std::vector<std::pair<int, int>> waits;  // who (0: the host), for what
  for (const LogEntry& entry : log()) {
    if (entry.action == Action::HostWaits || entry.action == Action::StreamWaits) waits.emplace_back(entry.stream, entry.awaited);
  }
  const int one = stream_number(first);
  const int two = stream_number(second);
  EXPECT_EQ(waits, (std::vector<std::pair<int, int>>{{two, one}, {0, two}, {0, one}, {0, two}, {0, -1}}));
}

}  // namespace
}  // namespace cuda_host
