// SPDX-License-Identifier: Apache-2.0
// Each operation of the CPU against the scalar reference on awkward shapes, and bit for bit against itself under everything that
// must not change a result: other rows, place in the batch, threads.
#include "engine/ops.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <utility>

#include "tests/engine/ops_device.h"

namespace rubato::engine {
namespace {

class OpsTest : public testing::TestWithParam<Variant> {
 protected:
  Device cpu_ = cpu_device(GetParam(), 2);
  Device reference_ = reference_device(GetParam().dtype);

  void SetUp() override {
    // Scratch of the workers comes with the cache.
    const AttentionShape shape{.layers = 1, .heads = 1, .kv_heads = 1, .head_size = 2, .block_count = 1, .max_position = 1};
    const Values angle{1.0F};
    for (Device* device : {&cpu_, &reference_}) ASSERT_TRUE(device->ops->make_cache(shape, angle, angle));
  }

  LinearId load(Device& device, const LinearShape& shape, const HostTensor& weights, const HostTensor* bias) {
    const LinearId id = device.ops->make_linear(shape).value();
    device.ops->load_rows(id, 0, weights.view());
    if (bias != nullptr) device.ops->load_bias(id, 0, bias->view());
    return id;
  }

  Values run_linear(Device& device, const LinearShape& shape, LinearId id, std::int32_t rows, const Values& x) {
    const bool gated = shape.kind == LinearKind::Swiglu;
    const Matrix in = device.matrix(rows, shape.inputs, Format::Activation, x);
    const Matrix out =
        device.matrix(rows, gated ? shape.outputs / 2 : shape.outputs, gated ? Format::Activation : Format::Accumulator);
    device.ops->linear(id, in, out);
    return device.read(out);
  }
};

INSTANTIATE_TEST_SUITE_P(Every, OpsTest, testing::ValuesIn(variants()),
                         [](const auto& variant) { return variant_name(variant.param); });

TEST_P(OpsTest, linear_matches_the_reference_on_odd_shapes) {
  for (const auto& [outputs, inputs, rows] : std::vector<std::tuple<int, int, int>>{
           {1, 1, 1}, {3, 5, 2}, {64, 64, 6}, {65, 63, 7}, {151, 130, 13}, {200, 257, 33}, {64, 600, 150}, {17, 31, 129}}) {
    const LinearShape shape{.outputs = outputs, .inputs = inputs};
    const HostTensor weights = draw_tensor({outputs, inputs}, 1);
    const HostTensor bias = draw_tensor({outputs}, 2);
    const Values x = draw(static_cast<std::size_t>(rows * inputs), 3);
    for (const HostTensor* with : {static_cast<const HostTensor*>(nullptr), &bias}) {
      const Values got = run_linear(cpu_, shape, load(cpu_, shape, weights, with), rows, x);
      const Values want = run_linear(reference_, shape, load(reference_, shape, weights, with), rows, x);
      EXPECT_LT(relative_error(got, want), 1e-5F) << outputs << "x" << inputs << " rows " << rows;  // F32 sums on every path
    }
  }
}

TEST_P(OpsTest, swiglu_matches_the_reference_on_odd_shapes) {
  for (const auto& [half, inputs, rows] :
       std::vector<std::tuple<int, int, int>>{{1, 2, 1}, {16, 5, 2}, {33, 64, 7}, {172, 64, 9}, {31, 300, 140}}) {
    const LinearShape shape{.outputs = 2 * half, .inputs = inputs, .kind = LinearKind::Swiglu};
    const HostTensor weights = draw_tensor({2 * half, inputs}, 4, 0.3F);
    const Values x = draw(static_cast<std::size_t>(rows * inputs), 5);
    const Values got = run_linear(cpu_, shape, load(cpu_, shape, weights, nullptr), rows, x);
    const Values want = run_linear(reference_, shape, load(reference_, shape, weights, nullptr), rows, x);
    EXPECT_LT(relative_error(got, want), cpu_.tolerance) << half << "x" << inputs << " rows " << rows;
  }
}

TEST_P(OpsTest, swiglu_stays_finite_for_extreme_gates) {
  const LinearShape shape{.outputs = 2, .inputs = 1, .kind = LinearKind::Swiglu};
  const LinearId id = load(cpu_, shape, {.shape = {2, 1}, .values = {1.0F, 1.0F}}, nullptr);
  const Values got = run_linear(cpu_, shape, id, 4, {-1000.0F, -90.0F, 0.0F, 1000.0F});
  EXPECT_EQ(got[0], 0.0F);
  EXPECT_EQ(got[1], 0.0F);
  EXPECT_EQ(got[2], 0.0F);
  EXPECT_NEAR(got[3], 1e6F, 1e4F);
}

TEST_P(OpsTest, linear_rows_have_the_same_bits_alone_and_in_any_batch) {
  for (const LinearKind kind : {LinearKind::Plain, LinearKind::Swiglu}) {
    const LinearShape shape{.outputs = 154, .inputs = 331, .kind = kind};
    const HostTensor weights = draw_tensor({shape.outputs, shape.inputs}, 6, 0.2F);
    const LinearId id = load(cpu_, shape, weights, nullptr);
    constexpr std::int32_t rows = 140;
    const Values x = draw(static_cast<std::size_t>(rows * shape.inputs), 7);
    const Values all = run_linear(cpu_, shape, id, rows, x);
    Device single = cpu_device(GetParam(), 1);
    ASSERT_TRUE(
        single.ops->make_cache({.layers = 1, .heads = 1, .kv_heads = 1, .head_size = 2, .block_count = 1, .max_position = 1},
                               Values{1.0F}, Values{0.0F}));
    const LinearId single_id = load(single, shape, weights, nullptr);
    const std::size_t columns = all.size() / rows;
    for (const std::int32_t count : {1, 2, 3, 5, 6, 7, 11, 12, 13, 32, 127, 128, 129}) {
      const std::int32_t first = (count * 7) % (rows - count + 1);
      const Values part(x.begin() + first * shape.inputs, x.begin() + (first + count) * shape.inputs);
      const Values want(all.begin() + first * static_cast<std::int64_t>(columns),
                        all.begin() + (first + count) * static_cast<std::int64_t>(columns));
      EXPECT_TRUE(same_bits(run_linear(cpu_, shape, id, count, part), want)) << count << " rows from " << first;
      EXPECT_TRUE(same_bits(run_linear(single, shape, single_id, count, part), want))
          << "one thread, " << count << " rows from " << first;
    }
  }
}

TEST_P(OpsTest, a_row_of_nan_leaves_its_neighbours_untouched) {
  const LinearShape shape{.outputs = 70, .inputs = 40};
  const LinearId id = load(cpu_, shape, draw_tensor({70, 40}, 8), nullptr);
  Values x = draw(3 * 40, 9);
  const Values clean = run_linear(cpu_, shape, id, 3, x);
  x[45] = std::numeric_limits<float>::quiet_NaN();
  const Values dirty = run_linear(cpu_, shape, id, 3, x);
  for (std::size_t i = 0; i < 70; ++i) {
    EXPECT_EQ(dirty[i], clean[i]);
    EXPECT_TRUE(std::isnan(dirty[70 + i]));
    EXPECT_EQ(dirty[140 + i], clean[140 + i]);
  }
}

TEST_P(OpsTest, weights_load_from_every_checkpoint_format) {
  const Values exact{1.0F, -0.5F, 0.25F, 3.0F, 0.0F, -2.0F};  // exact in all three
  std::vector<std::uint16_t> halves;
  std::vector<std::uint16_t> brains;
  for (const float value : exact) {
    halves.push_back(float_to_float16(value));
    brains.push_back(float_to_bfloat16(value));
  }
  const LinearShape shape{.outputs = 2, .inputs = 3};
  const Values x{1.0F, 2.0F, 4.0F};
  const auto run = [&](DataType dtype, std::span<const std::byte> bytes) {
    const LinearId id = cpu_.ops->make_linear(shape).value();
    cpu_.ops->load_rows(id, 0, {.dtype = dtype, .shape = {2, 3}, .bytes = bytes});
    return run_linear(cpu_, shape, id, 1, x);
  };
  const Values want{1.0F, -5.0F};
  EXPECT_EQ(run(DataType::Float32, std::as_bytes(std::span(exact))), want);
  EXPECT_EQ(run(DataType::Float16, std::as_bytes(std::span(halves))), want);
  EXPECT_EQ(run(DataType::BFloat16, std::as_bytes(std::span(brains))), want);
}

TEST_P(OpsTest, rms_norm_matches_the_reference_and_its_bits_ignore_the_batch) {
  for (const std::int32_t columns : {1, 15, 16, 64, 100, 896, 1000}) {
    const std::int32_t rows = 19;
    const HostTensor weight = draw_tensor({columns}, 10);
    const Values x = draw(static_cast<std::size_t>(rows * columns), 11);
    const Values delta = draw(static_cast<std::size_t>(rows * columns), 12);
    const auto run = [&](Device& device, std::int32_t first, std::int32_t count) {
      const NormId norm = device.ops->make_norm(weight.view()).value();
      const auto part = [&](const Values& values) {
        return Values(values.begin() + first * columns, values.begin() + (first + count) * columns);
      };
      const Matrix in = device.matrix(count, columns, Format::Accumulator, part(x));
      const Matrix add = device.matrix(count, columns, Format::Accumulator, part(delta));
      const Matrix out = device.matrix(count, columns, Format::Activation);
      device.ops->add_rms_norm(in, add, 1.0F, norm, 1e-5F, out);
      Values result = device.read(out);
      const Values sum = device.read(in);
      result.insert(result.end(), sum.begin(), sum.end());
      device.ops->rms_norm(in, norm, 1e-5F, out);
      EXPECT_TRUE(same_bits(device.read(out), Values(result.begin(), result.begin() + count * columns)));
      return result;
    };
    const Values all = run(cpu_, 0, rows);
    EXPECT_LT(relative_error(all, run(reference_, 0, rows)), cpu_.tolerance) << columns;
    const Values one = run(cpu_, 7, 1);
    EXPECT_TRUE(
        same_bits(Values(one.begin(), one.begin() + columns), Values(all.begin() + 7 * columns, all.begin() + 8 * columns)));
  }
}

TEST_P(OpsTest, a_scaled_delta_is_added_in_one_rounding) {
  constexpr std::int32_t columns = 45;
  const HostTensor weight = draw_tensor({columns}, 10);
  const Values x = draw(3 * columns, 11);
  const Values delta = draw(3 * columns, 12);
  for (const float scale : {1.0F, 0.22F, -3.0F}) {
    for (Device* device : {&cpu_, &reference_}) {
      const Matrix sum = device->matrix(3, columns, Format::Accumulator, x);
      const Matrix add = device->matrix(3, columns, Format::Accumulator, delta);
      const Matrix out = device->matrix(3, columns, Format::Activation);
      const NormId norm = device->ops->make_norm(weight.view()).value();
      device->ops->add_rms_norm(sum, add, scale, norm, 1e-5F, out);
      const Values got = device->read(sum);
      for (std::size_t i = 0; i < x.size(); ++i) EXPECT_EQ(got[i], std::fma(scale, delta[i], x[i])) << scale;
      const Matrix plain = device->matrix(3, columns, Format::Activation);
      device->ops->rms_norm(sum, norm, 1e-5F, plain);
      EXPECT_TRUE(same_bits(device->read(out), device->read(plain)));
    }
  }
}

TEST_P(OpsTest, embed_scales_the_rows_of_the_table) {
  const HostTensor table = draw_tensor({33, 21}, 13);
  for (Device* device : {&cpu_, &reference_}) {
    const LinearId id = load(*device, {.outputs = 33, .inputs = 21}, table, nullptr);
    const Matrix out = device->matrix(2, 21, Format::Accumulator);
    device->ops->embed(id, std::vector<TokenId>{32, 5}, 12.3F, out);
    const Values got = device->read(out);
    for (std::size_t i = 0; i < 21; ++i) {
      EXPECT_EQ(got[i], 12.3F * table.values[32 * 21 + i]);
      EXPECT_EQ(got[21 + i], 12.3F * table.values[5 * 21 + i]);
    }
  }
}

TEST_P(OpsTest, without_attention_layers_everything_else_still_works) {
  Device bare = cpu_device(GetParam(), 2);
  ASSERT_TRUE(bare.ops->make_cache({}, {}, {}));
  const LinearShape shape{.outputs = 200, .inputs = 300};
  const HostTensor weights = draw_tensor({200, 300}, 15);
  const Values x = draw(130 * 300, 16);
  EXPECT_TRUE(same_bits(run_linear(bare, shape, load(bare, shape, weights, nullptr), 130, x),
                        run_linear(cpu_, shape, load(cpu_, shape, weights, nullptr), 130, x)));
  const Result<std::unique_ptr<StepShapes>> shapes = bare.ops->build_shapes({.tokens = {16, 130}}, {});
  ASSERT_TRUE(shapes);
  EXPECT_EQ((*shapes)->buckets().tokens.size(), 2U);
  bare.ops->poison({});
}

TEST_P(OpsTest, embed_returns_the_rows_of_the_table) {
  const LinearShape shape{.outputs = 151, .inputs = 37};
  const HostTensor table = draw_tensor({151, 37}, 13);
  const LinearId id = load(cpu_, shape, table, nullptr);
  std::vector<TokenId> tokens{0, 150, 63, 64, 150, 1, 2, 3, 4, 5, 6, 7, 8, 99};
  const Matrix out = cpu_.matrix(static_cast<std::int32_t>(tokens.size()), 37, Format::Accumulator);
  cpu_.ops->embed(id, tokens, 1.0F, out);
  const Values got = cpu_.read(out);
  for (std::size_t i = 0; i < tokens.size(); ++i) {
    for (std::size_t j = 0; j < 37; ++j) EXPECT_EQ(got[i * 37 + j], table.values[static_cast<std::size_t>(tokens[i]) * 37 + j]);
  }
}

TEST_P(OpsTest, gather_rows_copies_the_chosen_rows_in_order) {
  const Values x = draw(9 * 21, 14);
  for (const Format format : {Format::Accumulator, Format::Activation}) {
    const Matrix in = cpu_.matrix(9, 21, format, x);
    const Matrix out = cpu_.matrix(3, 21, format);
    cpu_.ops->gather_rows(in, std::vector<std::int32_t>{1, 5, 8}, out);
    const Values got = cpu_.read(out);
    for (std::size_t i = 0; i < 21; ++i) {
      EXPECT_EQ(got[i], x[21 + i]);
      EXPECT_EQ(got[21 + i], x[5 * 21 + i]);
      EXPECT_EQ(got[42 + i], x[8 * 21 + i]);
    }
  }
}

}  // namespace
}  // namespace rubato::engine
