// SPDX-License-Identifier: Apache-2.0
// Tensor-core tiles, matrix loads and asynchronous copies against plain loops; and the 16-bit formats against their definition.
#include <cmath>
#include <random>

#include "tests/cuda_host/test_device.h"

namespace cuda_host {
namespace {

using Mma = Emulation;

template <class Element>
std::vector<Element> random_elements(std::size_t count, std::uint64_t seed) {
  std::mt19937_64 generator(seed);
  std::normal_distribution<float> normal;
  std::vector<Element> values(count);
  for (Element& value : values) value = Element(normal(generator));
  return values;
}

template <class Element>
void expect_products() {
  constexpr int k = 80;
  const std::vector<Element> a = random_elements<Element>(16 * k, 1);
  const std::vector<Element> b = random_elements<Element>(8 * k, 2);
  std::vector<Element> b_transposed(b.size());
  for (std::size_t n = 0; n < 8; ++n) {
    for (std::size_t i = 0; i < k; ++i) b_transposed[i * 8 + n] = b[n * k + i];
  }
  std::vector<float> expected(16 * 8, 0.0F);
  for (std::size_t m = 0; m < 16; ++m) {
    for (std::size_t n = 0; n < 8; ++n) {
      for (std::size_t i = 0; i < k; ++i)
        expected[m * 8 + n] += static_cast<float>(a[m * k + i]) * static_cast<float>(b[n * k + i]);
    }
  }
  for (std::uint64_t seed = 0; seed < 10; ++seed) {
    set_seed(seed);
    Array<Element> left(a);
    Array<Element> right(b);
    Array<Element> right_transposed(b_transposed);
    Array<float> out(128);
    ASSERT_CUDA(launch(nullptr, 1, 32, 1536, kernels::multiply<Element>, left.get(), right.get(), out.get(), k));
    EXPECT_EQ(out.read(), expected) << "seed " << seed;
    Array<float> again(128);
    ASSERT_CUDA(
        launch(nullptr, 1, 32, 1536, kernels::multiply_transposed<Element>, left.get(), right_transposed.get(), again.get(), k));
    EXPECT_EQ(again.read(), expected) << "seed " << seed;
  }
}

TEST_F(Mma, tiles_of_bfloat16_are_summed_in_ascending_order) {
  expect_products<__nv_bfloat16>();
}
TEST_F(Mma, tiles_of_half_are_summed_in_ascending_order) {
  expect_products<__half>();
}

TEST_F(Mma, asynchronous_copies_have_arrived_after_their_wait) {
  const std::vector<float> in = ascending(5 * 32 * 4);
  for (std::uint64_t seed = 0; seed < 10; ++seed) {
    set_seed(seed);
    Array<float> from(in);
    Array<float> to(5 * 32);
    ASSERT_CUDA(launch(nullptr, 1, 32, 1024, kernels::copy_async_in_stages, from.get(), to.get(), 5));
    const std::vector<float> out = to.read();
    for (std::size_t i = 0; i < out.size(); ++i) ASSERT_EQ(out[i], in[4 * i + 1]) << "seed " << seed;
  }
}

TEST_F(Mma, a_missing_wait_gives_wrong_results) {
  const std::vector<float> in = ascending(32 * 4);
  Array<float> from(in);
  Array<float> to(32);
  ASSERT_CUDA(launch(nullptr, 1, 32, 512, kernels::copy_async_without_wait, from.get(), to.get()));
  int poison = 0;
  for (const float value : to.read()) poison += std::isnan(value) ? 1 : 0;
  EXPECT_GT(poison, 4);
  EXPECT_LT(poison, 28) << "some copies arrive at once";
}

TEST_F(Mma, copies_need_aligned_places) {
  Array<float> from(ascending(64));
  Array<float> to(32);
  ASSERT_CUDA(launch(nullptr, 1, 1, 64, kernels::copy_async_without_wait, from.get() + 1, to.get()));
  EXPECT_NE(cudaDeviceSynchronize(), cudaSuccess);
  expect_faults(FaultKind::IllegalAddress, "copy_async_without_wait", "aligned");
}

TEST_F(Mma, half_survives_every_bit_pattern) {
  for (unsigned int bits = 0; bits < 65536; ++bits) {
    const __half value = __ushort_as_half(static_cast<unsigned short>(bits));
    const float wide = __half2float(value);
    const unsigned int exponent = (bits >> 10U) & 31U;
    if (exponent == 31 && (bits & 0x3ffU) != 0) {
      EXPECT_TRUE(std::isnan(wide));
      EXPECT_EQ(__half_as_ushort(__float2half_rn(wide)), 0x7fff);
      continue;
    }
    ASSERT_EQ(__half_as_ushort(__float2half_rn(wide)), bits);
    // By definition: (-1)^s 2^(e-15) 1.f, or 2^-14 0.f.
    const float size = exponent == 0 ? std::ldexp(static_cast<float>(bits & 0x3ffU), -24)
                                     : std::ldexp(static_cast<float>(1024 + (bits & 0x3ffU)), static_cast<int>(exponent) - 25);
    if (exponent != 31) {
      ASSERT_EQ(wide, (bits & 0x8000U) != 0 ? -size : size);
    }
  }
}

TEST_F(Mma, half_rounds_to_nearest_even) {
  const auto bits = [](float value) { return __half_as_ushort(__float2half_rn(value)); };
  EXPECT_EQ(bits(2049.0F), bits(2048.0F));
  EXPECT_EQ(bits(2051.0F), bits(2052.0F));
  EXPECT_EQ(bits(65519.0F), 0x7bff);
  EXPECT_EQ(bits(65520.0F), 0x7c00);
  EXPECT_EQ(bits(-1e30F), 0xfc00);
  EXPECT_EQ(bits(0x1p-25F), 0);
  EXPECT_EQ(bits(0x1.8p-24F), 2);
  EXPECT_EQ(bits(0x1.ff8p-15F), 0x3ff) << "the largest subnormal";
  EXPECT_EQ(bits(0x1.ffcp-15F), 0x400) << "between it and the smallest normal: to even";
}

TEST_F(Mma, bfloat16_rounds_to_nearest_even) {
  const auto bits = [](float value) { return __bfloat16_as_ushort(__float2bfloat16_rn(value)); };
  EXPECT_EQ(bits(1.0F), 0x3f80);
  EXPECT_EQ(bits(__uint_as_float(0x3f808000U)), 0x3f80);
  EXPECT_EQ(bits(__uint_as_float(0x3f818000U)), 0x3f82);
  EXPECT_EQ(bits(__uint_as_float(0x3f808001U)), 0x3f81);
  EXPECT_EQ(bits(__uint_as_float(0x7f7fffffU)), 0x7f80);
  EXPECT_EQ(bits(__uint_as_float(0xff800001U)), 0x7fff);
  EXPECT_EQ(__bfloat162float(__ushort_as_bfloat16(0xc020)), -2.5F);
}

}  // namespace
}  // namespace cuda_host
