// SPDX-License-Identifier: Apache-2.0
// What devices say of themselves, green contexts, and handles that tests count.
#include <cuda.h>

#include "tests/cuda_host/test_device.h"

namespace cuda_host {
namespace {

using Devices = Emulation;

TEST_F(Devices, options_show_in_the_properties) {
  reset({.devices = 2, .multiprocessors = 20, .major = 8, .minor = 9, .memory_bytes = 12345678});
  int count = 0;
  ASSERT_CUDA(cudaGetDeviceCount(&count));
  EXPECT_EQ(count, 2);
  cudaDeviceProp properties{};
  ASSERT_CUDA(cudaGetDeviceProperties(&properties, 1));
  EXPECT_EQ(properties.multiProcessorCount, 20);
  EXPECT_EQ(properties.major * 10 + properties.minor, 89);
  EXPECT_EQ(properties.totalGlobalMem, 12345678U);
  int value = 0;
  ASSERT_CUDA(cudaDeviceGetAttribute(&value, cudaDevAttrMultiProcessorCount, 0));
  EXPECT_EQ(value, 20);
  EXPECT_EQ(cudaGetDeviceProperties(&properties, 2), cudaErrorInvalidDevice);
  EXPECT_EQ(cudaSetDevice(2), cudaErrorInvalidDevice);
}

TEST_F(Devices, a_machine_without_devices_says_so) {
  reset({.devices = 0});
  int count = 5;
  EXPECT_EQ(cudaGetDeviceCount(&count), cudaErrorNoDevice);
  EXPECT_EQ(count, 0);
  EXPECT_EQ(cudaSetDevice(0), cudaErrorNoDevice);
}

TEST_F(Devices, a_stream_belongs_to_its_device) {
  reset({.devices = 2});
  cudaStream_t stream = make_stream();
  ASSERT_CUDA(cudaSetDevice(1));
  EXPECT_EQ(launch(stream, 1, 1, 0, kernels::do_nothing), cudaErrorInvalidResourceHandle);
  ASSERT_CUDA(cudaSetDevice(0));
  EXPECT_CUDA(launch(stream, 1, 1, 0, kernels::do_nothing));
  run_pending();
}

TEST_F(Devices, one_split_gives_green_contexts_of_any_number_of_groups) {
  CUdevResource whole{};
  ASSERT_EQ(cuDeviceGetDevResource(0, &whole, CU_DEV_RESOURCE_TYPE_SM), CUDA_SUCCESS);
  EXPECT_EQ(whole.sm.smCount, 132U);
  unsigned int groups = 0;
  ASSERT_EQ(cuDevSmResourceSplitByCount(nullptr, &groups, &whole, nullptr, 0, 8), CUDA_SUCCESS);
  ASSERT_EQ(groups, 16U);
  std::vector<CUdevResource> parts(groups);
  CUdevResource remaining{};
  ASSERT_EQ(cuDevSmResourceSplitByCount(parts.data(), &groups, &whole, &remaining, 0, 5), CUDA_SUCCESS);
  EXPECT_EQ(parts[0].sm.smCount, 8U);
  EXPECT_EQ(remaining.sm.smCount, 4U);
  CUdevResourceDesc description = nullptr;
  ASSERT_EQ(cuDevResourceGenerateDesc(&description, parts.data(), 3), CUDA_SUCCESS);
  CUgreenCtx context = nullptr;
  EXPECT_EQ(cuGreenCtxCreate(&context, description, 0, 0), CUDA_ERROR_INVALID_VALUE) << "the flag is required";
  ASSERT_EQ(cuGreenCtxCreate(&context, description, 0, CU_GREEN_CTX_DEFAULT_STREAM), CUDA_SUCCESS);
  CUdevResource share{};
  ASSERT_EQ(cuGreenCtxGetDevResource(context, &share, CU_DEV_RESOURCE_TYPE_SM), CUDA_SUCCESS);
  EXPECT_EQ(share.sm.smCount, 24U);
  CUstream stream = nullptr;
  ASSERT_EQ(cuGreenCtxStreamCreate(&stream, context, CU_STREAM_NON_BLOCKING, 0), CUDA_SUCCESS);
  Array<int> out(1);
  ASSERT_CUDA(launch(stream, 1, 1, 0, kernels::write_value, out.get(), 3));
  ASSERT_CUDA(cudaStreamSynchronize(stream));
  EXPECT_EQ(out.read()[0], 3);
  ASSERT_CUDA(cudaStreamDestroy(stream));
  ASSERT_EQ(cuGreenCtxDestroy(context), CUDA_SUCCESS);
  EXPECT_EQ(live().green_contexts, 0U);
}

TEST_F(Devices, a_green_context_destroyed_while_its_work_is_queued_is_reported) {
  int found = 0;
  for (std::uint64_t seed = 0; seed < 20; ++seed) {
    reset({.seed = seed});
    CUdevResource whole{};
    ASSERT_EQ(cuDeviceGetDevResource(0, &whole, CU_DEV_RESOURCE_TYPE_SM), CUDA_SUCCESS);
    CUdevResource part{};
    unsigned int groups = 1;
    ASSERT_EQ(cuDevSmResourceSplitByCount(&part, &groups, &whole, nullptr, 0, 8), CUDA_SUCCESS);
    CUdevResourceDesc description = nullptr;
    ASSERT_EQ(cuDevResourceGenerateDesc(&description, &part, 1), CUDA_SUCCESS);
    CUgreenCtx context = nullptr;
    ASSERT_EQ(cuGreenCtxCreate(&context, description, 0, CU_GREEN_CTX_DEFAULT_STREAM), CUDA_SUCCESS);
    CUstream stream = nullptr;
    ASSERT_EQ(cuGreenCtxStreamCreate(&stream, context, CU_STREAM_NON_BLOCKING, 0), CUDA_SUCCESS);
    ASSERT_CUDA(launch(stream, 1, 1, 0, kernels::do_nothing));
    ASSERT_EQ(cuGreenCtxDestroy(context), CUDA_SUCCESS);
    found += take_faults().empty() ? 0 : 1;
    run_pending();
  }
  EXPECT_GT(found, 10);
}

TEST_F(Devices, the_driver_s_functions_can_be_looked_up) {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult result{};
  ASSERT_CUDA(cudaGetDriverEntryPointByVersion("cuGreenCtxCreate", &function, 13000, cudaEnableDefault, &result));
  EXPECT_EQ(result, cudaDriverEntryPointSuccess);
  EXPECT_EQ(function, reinterpret_cast<void*>(&cuGreenCtxCreate));
  ASSERT_CUDA(cudaGetDriverEntryPointByVersion("cuSomethingElse", &function, 13000, cudaEnableDefault, &result));
  EXPECT_EQ(result, cudaDriverEntryPointSymbolNotFound);
}

/// A green context on `groups` groups of 8 multiprocessors of a split of its own.
CUgreenCtx make_green_context(unsigned int groups) {
  CUdevResource whole{};
  EXPECT_EQ(cuDeviceGetDevResource(0, &whole, CU_DEV_RESOURCE_TYPE_SM), CUDA_SUCCESS);
  std::vector<CUdevResource> parts(groups);
  EXPECT_EQ(cuDevSmResourceSplitByCount(parts.data(), &groups, &whole, nullptr, 0, 8), CUDA_SUCCESS);
  CUdevResourceDesc description = nullptr;
  EXPECT_EQ(cuDevResourceGenerateDesc(&description, parts.data(), groups), CUDA_SUCCESS);
  CUgreenCtx context = nullptr;
  EXPECT_EQ(cuGreenCtxCreate(&context, description, 0, CU_GREEN_CTX_DEFAULT_STREAM), CUDA_SUCCESS);
  return context;
}
CUstream stream_in(CUgreenCtx context) {
  CUstream stream = nullptr;
  EXPECT_EQ(cuGreenCtxStreamCreate(&stream, context, CU_STREAM_NON_BLOCKING, 0), CUDA_SUCCESS);
  return stream;
}

TEST_F(Devices, a_graph_is_replayed_only_in_the_green_context_that_it_was_captured_in) {
  CUgreenCtx contexts[] = {make_green_context(2), make_green_context(3)};
  const CUstream capturing = stream_in(contexts[0]);
  const CUstream beside = stream_in(contexts[0]);
  const CUstream elsewhere = stream_in(contexts[1]);
  const cudaStream_t whole = make_stream();
  Array<int> out(1);
  ASSERT_CUDA(cudaStreamBeginCapture(capturing, cudaStreamCaptureModeThreadLocal));
  ASSERT_CUDA(launch(capturing, 1, 1, 0, kernels::write_value, out.get(), 7));
  cudaGraph_t graph = nullptr;
  ASSERT_CUDA(cudaStreamEndCapture(capturing, &graph));
  cudaGraphExec_t executable = nullptr;
  ASSERT_CUDA(cudaGraphInstantiate(&executable, graph));
  ASSERT_CUDA(cudaGraphLaunch(executable, beside));
  EXPECT_EQ(out.read()[0], 7);
  EXPECT_EQ(fault_text(), "") << "another stream of the same context";
  for (const cudaStream_t stream : {elsewhere, whole}) {
    ASSERT_CUDA(cudaGraphLaunch(executable, stream));
    expect_faults(FaultKind::WrongPlace, "cudaGraphLaunch", "green context");
    run_pending();
  }
}

TEST_F(Devices, groups_of_two_splits_and_groups_given_twice_make_no_green_context) {
  CUdevResource whole{};
  ASSERT_EQ(cuDeviceGetDevResource(0, &whole, CU_DEV_RESOURCE_TYPE_SM), CUDA_SUCCESS);
  CUdevResource first[2] = {};
  CUdevResource second[2] = {};
  for (CUdevResource* groups : {first, second}) {
    unsigned int count = 2;
    ASSERT_EQ(cuDevSmResourceSplitByCount(groups, &count, &whole, nullptr, 0, 8), CUDA_SUCCESS);
  }
  CUdevResourceDesc description = nullptr;
  CUdevResource mixed[] = {first[0], second[1]};
  EXPECT_EQ(cuDevResourceGenerateDesc(&description, mixed, 2), CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION);
  CUdevResource twice[] = {first[0], first[0]};
  EXPECT_EQ(cuDevResourceGenerateDesc(&description, twice, 2), CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION);
  EXPECT_EQ(cuDevResourceGenerateDesc(&description, first, 2), CUDA_SUCCESS);
}

TEST_F(Devices, green_contexts_may_be_missing_or_refused) {
  reset({.green_contexts = GreenContexts::Missing});
  void* function = nullptr;
  cudaDriverEntryPointQueryResult result{};
  ASSERT_CUDA(cudaGetDriverEntryPointByVersion("cuGreenCtxCreate", &function, 13000, cudaEnableDefault, &result));
  EXPECT_EQ(result, cudaDriverEntryPointSymbolNotFound);
  reset({.green_contexts = GreenContexts::Refused});
  CUdevResource whole{};
  ASSERT_EQ(cuDeviceGetDevResource(0, &whole, CU_DEV_RESOURCE_TYPE_SM), CUDA_SUCCESS);
  unsigned int groups = 0;
  EXPECT_NE(cuDevSmResourceSplitByCount(nullptr, &groups, &whole, nullptr, 0, 8), CUDA_SUCCESS);
}

/// What device 1 gets of a value that a kernel of device 0 writes: whether it was written before the copy was queued, or only
/// queued itself.
int bring_over(std::uint64_t seed, bool wait) {
  reset({.seed = seed, .devices = 2});
  int brought = 0;
  {
    Array<int> source(std::vector<int>{1});
    cudaStream_t stream = nullptr;
    EXPECT_CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    EXPECT_CUDA(launch(stream, 1, 1, 0, kernels::write_value, source.get(), 2));
    if (wait) {
      EXPECT_CUDA(cudaStreamSynchronize(stream));
    }
    EXPECT_CUDA(cudaSetDevice(1));
    Array<int> target(1);
    cudaStream_t copying = nullptr;
    EXPECT_CUDA(cudaStreamCreateWithFlags(&copying, cudaStreamNonBlocking));
    EXPECT_CUDA(cudaMemcpyPeerAsync(target.get(), 1, source.get(), 0, sizeof(int), copying));
    EXPECT_CUDA(cudaStreamSynchronize(copying));
    brought = target.read()[0];
    EXPECT_CUDA(cudaSetDevice(0));
    run_pending();
  }
  return brought;
}

TEST_F(Devices, a_peer_copy_that_races_with_the_kernel_that_writes_brings_what_was_there_before) {
  int old = 0;
  for (std::uint64_t seed = 1; seed <= 30; ++seed) {
    old += bring_over(seed, false) == 1 ? 1 : 0;
    EXPECT_EQ(bring_over(seed, true), 2) << "seed " << seed;
  }
  EXPECT_GT(old, 5);
}

TEST_F(Devices, errors_have_names_and_texts) {
  EXPECT_STREQ(cudaGetErrorName(cudaErrorMemoryAllocation), "cudaErrorMemoryAllocation");
  EXPECT_STREQ(cudaGetErrorString(cudaErrorMemoryAllocation), "out of memory");
}

TEST_F(Devices, handles_that_live_are_counted) {
  cudaStream_t stream = make_stream();
  cudaEvent_t event = make_event();
  {
    Pinned<int> pinned(1);
    Array<int> array(1);
    EXPECT_EQ(live().pinned, 1U);
    EXPECT_EQ(live().allocations, 1U);
  }
  EXPECT_EQ(live().streams, 1U);
  EXPECT_EQ(live().events, 1U);
  ASSERT_CUDA(cudaEventDestroy(event));
  ASSERT_CUDA(cudaStreamDestroy(stream));
  const Live now = live();
  EXPECT_EQ(now.streams + now.events + now.pinned + now.allocations, 0U);
}

}  // namespace
}  // namespace cuda_host
