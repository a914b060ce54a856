// SPDX-License-Identifier: Apache-2.0
// Probe and accept: of what the library offers only algorithms whose rows depend on nothing else are taken, and where there are
// none the engine's own kernel runs.
#include "engine/cuda/matmul.h"

#include <gtest/gtest.h>

#include <vector>

#include "engine/cuda/matmul_cache.h"
#include "tests/cuda/device_rows.h"
#include "tests/support/temporary_folder.h"
#if RUBATO_CUDA_EMULATED
#include "tests/cuda_host/control.h"
#endif

namespace rubato::engine::cuda {
namespace {

constexpr std::int32_t rows_max = 70;

struct Product {
  std::int32_t outputs;
  std::int32_t inputs;
  DataType out_dtype;
  bool bias;
};

class MatmulTest : public DeviceTest {
 protected:
  /// Chooses, and returns the rows of one product of x's first rows, each bit for bit, for every row count of interest.
  void expect_rows_are_independent(const Product& product, bool wants_own_kernel) {
    ASSERT_TRUE(prepare_linear());
    const auto library = MatmulLibrary::make(facts(), DataType::BFloat16).value();
    const std::int64_t weight_bytes = std::int64_t{product.outputs} * product.inputs * 2;
    const std::int64_t out_size = product.out_dtype == DataType::Float32 ? 4 : 2;
    const DeviceMemory weights = upload(DataType::BFloat16, product.outputs, product.inputs, 1);
    const DeviceMemory bias = upload(DataType::Float32, 1, product.outputs, 2);
    const DeviceMemory x = upload(DataType::BFloat16, rows_max, product.inputs, 3);
    const DeviceMemory out = DeviceMemory::make(rows_max * product.outputs * out_size).value();
    ASSERT_EQ(weights.bytes(), weight_bytes);
    MatmulPlan plan{
        .shape = {.outputs = product.outputs, .inputs = product.inputs, .out_dtype = product.out_dtype, .has_bias = product.bias},
        .weights = weights.data(),
        .bias = product.bias ? reinterpret_cast<const float*>(bias.data()) : nullptr};
    const MatmulReport report = choose_algorithms(*library, stream(), rows_max, plan).value();
    EXPECT_EQ(report.own_kernel, wants_own_kernel);
    EXPECT_EQ(plan.algorithms.empty(), wants_own_kernel);
    MatmulCall call = MatmulCall::make(*library, plan).value();
    const auto run = [&](std::int32_t first, std::int32_t count) {
      const Activations in{.data = x.data() + std::int64_t{first} * product.inputs * 2,
                           .count = count,
                           .columns = product.inputs,
                           .stride = product.inputs};
      EXPECT_TRUE(
          call.queue(queue(), in, {.data = out.data(), .count = count, .columns = product.outputs, .stride = product.outputs}));
      return download(out, count * product.outputs * out_size);
    };
    const std::vector<std::byte> all = run(0, rows_max);
    for (const std::int32_t count : {1, 2, 15, 16, 17, 33, 64, 69}) {
      for (const std::int32_t first : {0, 1}) {
        const std::vector<std::byte> some = run(first, count);
        const std::byte* const expected = all.data() + first * product.outputs * out_size;
        EXPECT_EQ(std::memcmp(some.data(), expected, some.size()), 0) << count << " rows from " << first;
      }
    }
  }

  DeviceMemory upload(DataType dtype, std::int32_t rows, std::int32_t columns, std::uint64_t seed) {
    std::mt19937_64 generator(seed);
    std::normal_distribution<float> normal;
    Values values(static_cast<std::size_t>(rows) * static_cast<std::size_t>(columns));
    for (float& value : values) value = normal(generator);
    const std::vector<std::byte> bytes = encode(dtype, values);
    DeviceMemory memory = DeviceMemory::make(static_cast<std::int64_t>(bytes.size())).value();
    const PinnedMemory pinned = PinnedMemory::make(memory.bytes()).value();
    std::memcpy(pinned.data(), bytes.data(), bytes.size());
    EXPECT_EQ(cudaMemcpyAsync(memory.data(), pinned.data(), bytes.size(), cudaMemcpyHostToDevice, queue()), cudaSuccess);
    wait();
    return memory;
  }
  std::vector<std::byte> download(const DeviceMemory& memory, std::int64_t bytes) {
    const PinnedMemory pinned = PinnedMemory::make(bytes).value();
    EXPECT_EQ(cudaMemcpyAsync(pinned.data(), memory.data(), static_cast<std::size_t>(bytes), cudaMemcpyDeviceToHost, queue()),
              cudaSuccess);
    wait();
    return {pinned.data(), pinned.data() + bytes};
  }
};

TEST_F(MatmulTest, accepted_algorithms_give_each_row_the_same_bits) {
  expect_rows_are_independent({96, 200, DataType::Float32, false}, false);
  expect_rows_are_independent({96, 64, DataType::Float32, true}, false);
  expect_rows_are_independent({120, 96, DataType::BFloat16, false}, false);  // rounding hides most differences of order
}

#if RUBATO_CUDA_EMULATED
TEST_F(MatmulTest, without_an_acceptable_algorithm_the_own_kernel_runs) {
  cuda_host::set_matmul_candidates(cuda_host::MatmulCandidates::NoneAcceptable);
  expect_rows_are_independent({96, 200, DataType::Float32, false}, true);
  cuda_host::set_matmul_candidates(cuda_host::MatmulCandidates::None);
  expect_rows_are_independent({96, 200, DataType::BFloat16, true}, true);
}
#endif

TEST_F(MatmulTest, what_was_chosen_is_remembered_for_this_device_and_element_type_alone) {
  const test::TemporaryFolder folder;
  MatmulPlan plan{.shape = {.outputs = 8, .inputs = 16}, .ranges = row_ranges(20)};
  plan.algorithms.resize(2);
  plan.algorithms[1].data[0] = 0x1234567890abcdefU;
  MatmulCache written(folder.path(), facts(), DataType::BFloat16);
  written.add(20, plan);
  written.save();

  MatmulPlan found{.shape = plan.shape};
  const MatmulCache read(folder.path(), facts(), DataType::BFloat16);
  ASSERT_TRUE(read.find(20, found));
  EXPECT_EQ(found.ranges, plan.ranges);
  ASSERT_EQ(found.algorithms.size(), 2U);
  EXPECT_EQ(found.algorithms[1].data[0], 0x1234567890abcdefU);
  EXPECT_FALSE(read.find(21, found));
  EXPECT_FALSE(MatmulCache(folder.path(), facts(), DataType::Float16).find(20, found));
  DeviceFacts other = facts();
  ++other.driver_version;
  EXPECT_FALSE(MatmulCache(folder.path(), other, DataType::BFloat16).find(20, found));
}

TEST(MatmulRanges, cover_every_row_count_once) {
  EXPECT_EQ(row_ranges(70), (std::vector<std::int32_t>{16, 32, 64, 70}));
  EXPECT_EQ(row_ranges(16), (std::vector<std::int32_t>{16}));
  EXPECT_EQ(row_ranges(3), (std::vector<std::int32_t>{3}));
}

}  // namespace
}  // namespace rubato::engine::cuda
