// SPDX-License-Identifier: Apache-2.0
// The engine's own matrix product: against the reference on shapes that fill no tile, and bit for bit against itself in every
// tile, at every number of rows, place in the batch and alignment.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "engine/cuda/kernels.h"
#include "engine/cuda/linear_tiles.h"
#include "engine/reference/ops.h"
#include "tests/cuda/device_rows.h"

namespace rubato::engine::cuda {
namespace {

constexpr LinearTile every_tile[] = {LinearTile::Decode, LinearTile::Small, LinearTile::Middle, LinearTile::Large};

struct Product {
  std::int32_t outputs = 0;
  std::int32_t inputs = 0;
  Values x;  // (rows, inputs)
  Values weights;
  Values bias;  // empty for none
  [[nodiscard]] std::int32_t rows() const { return static_cast<std::int32_t>(x.size()) / inputs; }
};

struct Layouts {
  RowLayout x;
  RowLayout out;
  std::int64_t weights_offset = 0;
};

class LinearTest : public DeviceTest, public testing::WithParamInterface<DataType> {
 protected:
  void SetUp() override {
    DeviceTest::SetUp();
    if (IsSkipped()) return;
    const Result<void> prepared = prepare_linear();
    ASSERT_TRUE(prepared.has_value()) << prepared.error().message;
  }

  [[nodiscard]] DataType dtype() const { return GetParam(); }

  Product draw_product(std::int32_t outputs, std::int32_t inputs, std::int32_t rows, std::uint64_t seed) const {
    return {.outputs = outputs,
            .inputs = inputs,
            .x = draw(dtype(), std::int64_t{rows} * inputs, seed),
            .weights = draw(dtype(), std::int64_t{outputs} * inputs, seed + 1),
            .bias = draw(DataType::Float32, outputs, seed + 2)};
  }

  /// In the tile that linear() takes where none is given.
  Values run(const Product& product, DataType out_dtype, std::optional<LinearTile> tile = {}, const Layouts& layouts = {}) const {
    const DeviceRows x(stream(), dtype(), product.rows(), product.inputs, product.x, layouts.x);
    const DeviceRows weights(stream(), dtype(), product.outputs, product.inputs, product.weights,
                             {.offset = layouts.weights_offset});
    const DeviceVector<float> bias(stream(), product.bias);
    const float* const bias_data = product.bias.empty() ? nullptr : bias.data();
    const DeviceRows out(stream(), out_dtype, product.rows(), product.outputs, layouts.out);
    if (tile) {
      linear_in_tile(queue(), *tile, dtype(), weights.data(), bias_data, product.outputs, x.activations(), out_dtype,
                     out.activations());
    } else {
      linear(queue(), dtype(), weights.data(), bias_data, product.outputs, x.activations(), out_dtype, out.activations());
    }
    return out.read(stream());
  }

  static Values reference(const Product& product) {
    ReferenceOps ops(DataType::Float32);
    const LinearId id = ops.make_linear({.outputs = product.outputs, .inputs = product.inputs}).value();
    const auto view = [](const Values& values, std::vector<std::int64_t> shape) {
      return TensorView{.dtype = DataType::Float32, .shape = std::move(shape), .bytes = std::as_bytes(std::span(values))};
    };
    ops.load_rows(id, 0, view(product.weights, {product.outputs, product.inputs}));
    if (!product.bias.empty()) ops.load_bias(id, 0, view(product.bias, {product.outputs}));
    const Matrix x = ops.allocate(product.rows(), product.inputs, Format::Activation).value();
    std::copy(product.x.begin(), product.x.end(), static_cast<float*>(x.data));
    const Matrix out = ops.allocate(product.rows(), product.outputs, Format::Accumulator).value();
    ops.linear(id, x, out);
    Values values(static_cast<std::size_t>(product.rows()) * static_cast<std::size_t>(product.outputs));
    ops.read(out, values);
    return values;
  }

  /// Rows [first, first + count) of product alone.
  static Product rows_of(const Product& product, std::int32_t first, std::int32_t count) {
    Product part = product;
    const auto begin = product.x.begin() + std::int64_t{first} * product.inputs;
    part.x.assign(begin, begin + std::int64_t{count} * product.inputs);
    return part;
  }
};

INSTANTIATE_TEST_SUITE_P(Every, LinearTest, testing::ValuesIn(element_types()),
                         [](const auto& type) { return element_name(type.param); });

struct Shape {
  std::int32_t outputs;
  std::int32_t inputs;
  std::int32_t rows;
};

// Around the edges of tiles (16, 32, 64, 128), of a step (16), a pack (8) and a stage (32, 64, 128); inputs beyond all stages of
// a ring.
constexpr Shape shapes[] = {{1, 1, 1},    {3, 5, 2},     {64, 64, 6},   {65, 63, 7},     {151, 130, 13}, {130, 257, 33},
                            {32, 600, 1}, {17, 31, 129}, {129, 72, 65}, {128, 160, 128}, {33, 800, 16},  {66, 16, 17}};

TEST_P(LinearTest, matches_the_reference_on_odd_shapes) {
  for (const Shape& shape : shapes) {
    Product product = draw_product(shape.outputs, shape.inputs, shape.rows, 1);
    for (const bool biased : {true, false}) {
      if (!biased) product.bias.clear();
      const Values expected = reference(product);
      EXPECT_LT(relative_error(run(product, DataType::Float32), expected), 2e-5F)
          << shape.outputs << "x" << shape.inputs << " rows " << shape.rows;
      EXPECT_LT(relative_error(run(product, dtype()), expected), 2e-5F + element_epsilon(dtype()))
          << shape.outputs << "x" << shape.inputs << " rows " << shape.rows;
    }
  }
}

TEST_P(LinearTest, rounding_to_the_element_type_is_all_that_differs_between_outputs) {
  const Product product = draw_product(75, 200, 20, 2);
  EXPECT_TRUE(same_bits(run(product, dtype()), rounded(dtype(), run(product, DataType::Float32))));
}

TEST_P(LinearTest, every_tile_gives_the_same_bits) {
  for (const Shape& shape : shapes) {
    const Product product = draw_product(shape.outputs, shape.inputs, shape.rows, 3);
    const Values expected = run(product, DataType::Float32);
    for (const LinearTile tile : every_tile) {
      EXPECT_TRUE(same_bits(run(product, DataType::Float32, tile), expected))
          << "tile " << static_cast<int>(tile) << ", " << shape.outputs << "x" << shape.inputs << " rows " << shape.rows;
    }
  }
}

TEST_P(LinearTest, rows_have_the_same_bits_alone_and_in_any_batch) {
  Product product = draw_product(70, 331, 130, 4);
  // Half of the rows cancel: large terms that nearly sum to nothing show any change of order.
  for (std::size_t row = 0; row < 130; row += 2) {
    for (std::size_t i = 0; i + 1 < 331; i += 2) product.x[row * 331 + i + 1] = -product.x[row * 331 + i] * 1024.0F;
  }
  product.x = rounded(dtype(), product.x);
  const Values all = run(product, DataType::Float32);
  for (const std::int32_t count : {1, 2, 15, 16, 17, 64, 65, 129}) {
    for (const std::int32_t first : {0, 130 - count}) {
      const Values part = run(rows_of(product, first, count), DataType::Float32);
      for (std::int32_t row = 0; row < count; ++row) {
        ASSERT_TRUE(same_bits(row_of(part, row, 70), row_of(all, first + row, 70)))
            << count << " rows from " << first << ", row " << row;
      }
    }
  }
}

TEST_P(LinearTest, alignment_and_strides_change_no_bit_and_gaps_are_not_read) {
  for (const Shape& shape : {Shape{70, 264, 18}, Shape{33, 77, 5}}) {
    const Product product = draw_product(shape.outputs, shape.inputs, shape.rows, 5);
    const Values expected = run(product, dtype());
    for (const Layouts& layouts : {Layouts{.x = {.gap = 8}, .out = {.gap = 2}}, Layouts{.x = {.gap = 3}, .out = {.gap = 5}},
                                   Layouts{.x = {.offset = 1}, .out = {.offset = 1}, .weights_offset = 1}}) {
      for (const LinearTile tile : every_tile) EXPECT_TRUE(same_bits(run(product, dtype(), tile, layouts), expected));
    }
  }
}

TEST_P(LinearTest, a_row_that_is_not_finite_spoils_no_other) {
  Product product = draw_product(40, 100, 20, 6);
  const Values clean = run(product, DataType::Float32);
  product.x[7 * 100 + 99] = std::numeric_limits<float>::quiet_NaN();
  product.x[8 * 100] = std::numeric_limits<float>::infinity();
  const Values got = run(product, DataType::Float32);
  for (std::int32_t row = 0; row < 20; ++row) {
    if (row == 7 || row == 8) {
      for (const float value : row_of(got, row, 40)) EXPECT_FALSE(std::isfinite(value));
    } else {
      EXPECT_TRUE(same_bits(row_of(got, row, 40), row_of(clean, row, 40))) << "row " << row;
    }
  }
}

TEST_P(LinearTest, zero_inputs_give_exactly_the_bias) {
  Product product = draw_product(50, 24, 3, 7);
  std::fill(product.x.begin(), product.x.end(), 0.0F);
  const Values got = run(product, DataType::Float32);
  for (std::int32_t row = 0; row < 3; ++row) EXPECT_TRUE(same_bits(row_of(got, row, 50), product.bias));
}

TEST_P(LinearTest, the_order_of_threads_and_blocks_changes_no_bit) {
  const Product product = draw_product(70, 300, 40, 9);
  const Values expected = run(product, DataType::Float32);
  in_any_order(6, [&] {
    for (const LinearTile tile : every_tile) EXPECT_TRUE(same_bits(run(product, DataType::Float32, tile), expected));
  });
}

/// F32 states its order in full: one chain of fused multiply-adds, inputs ascending, the bias last. (Tensor cores sum the sixteen
/// products of a step in an order of their own.)
class LinearChainTest : public LinearTest {};
INSTANTIATE_TEST_SUITE_P(Every, LinearChainTest, testing::Values(DataType::Float32),
                         [](const auto& type) { return element_name(type.param); });

TEST_P(LinearChainTest, is_ascending_bit_for_bit) {
  const Product product = draw_product(70, 301, 21, 8);
  Values expected;
  for (std::int64_t row = 0; row < 21; ++row) {
    for (std::int64_t output = 0; output < 70; ++output) {
      float sum = 0.0F;
      const auto x = row_of(product.x, row, 301);
      const auto weights = row_of(product.weights, output, 301);
      for (std::size_t i = 0; i < x.size(); ++i) sum = std::fma(x[i], weights[i], sum);
      expected.push_back(sum + product.bias[static_cast<std::size_t>(output)]);
    }
  }
  for (const LinearTile tile : {LinearTile::Decode, LinearTile::Large}) {
    EXPECT_TRUE(same_bits(run(product, DataType::Float32, tile), expected)) << "tile " << static_cast<int>(tile);
  }
}

TEST(LinearTile, few_rows_take_narrow_tiles_and_large_ones_only_where_they_fill_the_device) {
  EXPECT_EQ(choose_linear_tile(DataType::BFloat16, 1, 151936), LinearTile::Decode);
  EXPECT_EQ(choose_linear_tile(DataType::BFloat16, 16, 4096), LinearTile::Decode);
  EXPECT_EQ(choose_linear_tile(DataType::BFloat16, 17, 4096), LinearTile::Small);
  EXPECT_EQ(choose_linear_tile(DataType::BFloat16, 64, 28672), LinearTile::Middle);
  EXPECT_EQ(choose_linear_tile(DataType::BFloat16, 128, 4096), LinearTile::Middle);
  EXPECT_EQ(choose_linear_tile(DataType::BFloat16, 2048, 4096), LinearTile::Large);
  EXPECT_EQ(choose_linear_tile(DataType::Float32, 17, 64), LinearTile::Large);
}

}  // namespace
}  // namespace rubato::engine::cuda
