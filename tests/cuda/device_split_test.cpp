// SPDX-License-Identifier: Apache-2.0
// The ladder of shares: what it gives each side, where it stops, and what becomes of it without green contexts.
#include "engine/cuda/device_split.h"

#include <cuda.h>

#include "tests/cuda/on_device.h"

namespace rubato::engine::cuda {
namespace {

class CudaSplit : public OnDevice {
 protected:
#if RUBATO_CUDA_EMULATED
  [[nodiscard]] cuda_host::Options emulation() const override {
    return {};
  }
#endif
  [[nodiscard]] static Result<std::shared_ptr<const DeviceSplit>> split() {
    return DeviceSplit::make(*open_device(0));
  }
};

TEST_F(CudaSplit, every_rung_gives_the_first_side_more_and_both_sides_something) {
  const auto made = split();
  if (!made) GTEST_SKIP() << made.error().message;
  const DeviceSplit& ladder = **made;
  ASSERT_GE(ladder.rungs(), 1);
  const std::int32_t whole = open_device(0)->multiprocessors;
  std::int32_t before = 0;
  for (std::int32_t rung = 0; rung < ladder.rungs(); ++rung) {
    const std::int32_t first = ladder.multiprocessors(rung, Side::First);
    const std::int32_t second = ladder.multiprocessors(rung, Side::Second);
    EXPECT_GT(first, before);
    EXPECT_EQ(first % DeviceSplit::granularity, 0);
    EXPECT_GE(second, DeviceSplit::granularity);
    EXPECT_LE(first + second, whole);
    EXPECT_EQ(ladder.percent(rung, Side::First) + ladder.percent(rung, Side::Second), 100);
    EXPECT_EQ(ladder.nearest(ladder.percent(rung, Side::First)), rung);
    before = first;
  }
  EXPECT_EQ(ladder.nearest(1), 0);
  EXPECT_EQ(ladder.nearest(99), ladder.rungs() - 1);
}

TEST_F(CudaSplit, streams_of_a_side_do_work_and_end_before_the_split) {
  const auto made = split();
  if (!made) GTEST_SKIP() << made.error().message;
  const Result<DeviceMemory> memory = DeviceMemory::make(4);
  ASSERT_TRUE(memory);
  for (const Side side : {Side::First, Side::Second}) {
    const Result<Stream> stream = (*made)->make_stream(0, side, Stream::Urgency::Urgent);
    ASSERT_TRUE(stream) << stream.error().message;
    EXPECT_TRUE(check(cudaMemsetAsync(memory->data(), 0, 4, stream->get()), "cudaMemsetAsync"));
    EXPECT_TRUE(stream->wait());
  }
}

#if RUBATO_CUDA_EMULATED
TEST_F(CudaSplit, a_hopper_gets_fifteen_rungs_and_what_is_left_over_goes_to_the_second_side) {
  const auto made = split();
  ASSERT_TRUE(made) << made.error().message;
  const DeviceSplit& ladder = **made;
  EXPECT_EQ(ladder.rungs(), 15);
  EXPECT_EQ(ladder.multiprocessors(0, Side::First), 8);
  EXPECT_EQ(ladder.multiprocessors(0, Side::Second), 124);
  EXPECT_EQ(ladder.multiprocessors(14, Side::First), 120);
  EXPECT_EQ(ladder.multiprocessors(14, Side::Second), 12);
  EXPECT_EQ(ladder.multiprocessors(ladder.nearest(50), Side::First), 64);
  EXPECT_EQ(cuda_host::live().green_contexts, 30U);
}

TEST_F(CudaSplit, every_green_context_goes_with_the_split) {
  ASSERT_TRUE(split());
  EXPECT_EQ(cuda_host::live().green_contexts, 0U);
}

TEST_F(CudaSplit, a_device_that_cannot_be_split_says_why_and_stays_usable) {
  const auto refusal = [](const cuda_host::Options& options) {
    cuda_host::reset(options);
    const auto made = split();
    EXPECT_FALSE(made);
    EXPECT_TRUE(Stream::make());
    EXPECT_EQ(cudaGetLastError(), cudaSuccess);
    return made ? std::string() : made.error().message;
  };
  EXPECT_EQ(refusal({.green_contexts = cuda_host::GreenContexts::Missing}),
            "no green contexts: the driver is older than CUDA 13.0");
  EXPECT_EQ(refusal({.green_contexts = cuda_host::GreenContexts::Refused}),
            "no green contexts: 132 multiprocessors cannot be split into groups of 8");
  EXPECT_EQ(refusal({.multiprocessors = 15}), "no green contexts: 15 multiprocessors cannot be split into groups of 8");
}
#endif

}  // namespace
}  // namespace rubato::engine::cuda
