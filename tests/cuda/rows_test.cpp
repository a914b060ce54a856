// SPDX-License-Identifier: Apache-2.0
// Kernels that work on one row at a time: against the reference or the formula on awkward shapes, and bit for bit against
// themselves under everything that must not change a result: other rows, place in the batch, padding, alignment.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "engine/cuda/kernels.h"
#include "engine/reference/ops.h"
#include "tests/cuda/device_rows.h"

namespace rubato::engine::cuda {
namespace {

class RowsTest : public DeviceTest, public testing::WithParamInterface<DataType> {
 protected:
  [[nodiscard]] DataType dtype() const { return GetParam(); }

  /// Rows of one token each, so that a batch is its token ids.
  DeviceBatch batch_of(const std::vector<std::int32_t>& token_ids, std::int32_t bucket) const {
    std::vector<BatchRow> rows;
    for (const std::int32_t id : token_ids) rows.push_back({.token_ids = {id}, .position = 0, .blocks = {0}});
    return DeviceBatch(stream(), rows, {.tokens = bucket, .rows = bucket, .block_count = 1});
  }

  struct Norm {
    Values x;  // after the addition
    Values out;
  };
  struct NormInputs {
    std::int32_t columns = 0;
    Values x;
    std::optional<Values> delta;
    Values weight;
    float scale = 1;  // of delta
  };
  static constexpr float epsilon = 1e-5F;
  Norm run_norm(const NormInputs& inputs, RowLayout layout = {}) const {
    const auto rows = static_cast<std::int32_t>(inputs.x.size()) / inputs.columns;
    const DeviceRows x(stream(), DataType::Float32, rows, inputs.columns, inputs.x, layout);
    const DeviceRows delta(stream(), DataType::Float32, rows, inputs.columns, inputs.delta.value_or(Values()), layout);
    const DeviceVector<float> weight(stream(), inputs.weight);
    const DeviceRows out(stream(), dtype(), rows, inputs.columns, layout);
    add_rms_norm(queue(), dtype(), x.accumulators(),
                 {.delta = inputs.delta ? delta.accumulators() : Accumulators(), .scale = inputs.scale}, weight.data(), epsilon,
                 out.activations());
    return {.x = x.read(stream()), .out = out.read(stream())};
  }

  Values run_swiglu(std::int32_t columns, const Values& gate_up, RowLayout layout = {}) const {
    const auto rows = static_cast<std::int32_t>(gate_up.size()) / (2 * columns);
    const DeviceRows in(stream(), dtype(), rows, 2 * columns, gate_up, layout);
    const DeviceRows out(stream(), dtype(), rows, columns, layout);
    swiglu(queue(), dtype(), in.activations(), out.activations());
    return out.read(stream());
  }
};

INSTANTIATE_TEST_SUITE_P(Every, RowsTest, testing::ValuesIn(element_types()),
                         [](const auto& type) { return element_name(type.param); });

constexpr RowLayout aligned{.gap = 8, .offset = 0};
constexpr RowLayout misaligned{.gap = 3, .offset = 1};

// ---- embed

TEST_P(RowsTest, embed_widens_the_rows_of_the_tokens_and_gives_padding_token_0) {
  constexpr std::int32_t vocabulary = 37;
  for (const std::int32_t columns : {1, 7, 8, 64, 130, 2056}) {
    const Values values = draw(dtype(), vocabulary * columns, 1);
    const DeviceRows table(stream(), dtype(), vocabulary, columns, values);
    std::vector<std::int32_t> ids{36, 0, 5, 5, 17};
    const DeviceBatch batch = batch_of(ids, 9);
    for (const RowLayout layout : {RowLayout(), aligned, misaligned}) {
      const DeviceRows out(stream(), DataType::Float32, 9, columns, layout);
      embed(queue(), dtype(), table.data(), batch.view(), 1.0F, out.accumulators());
      const Values got = out.read(stream());
      for (std::int32_t row = 0; row < 9; ++row) {
        const std::int32_t id = row < 5 ? ids[static_cast<std::size_t>(row)] : 0;
        EXPECT_TRUE(same_bits(row_of(got, row, columns), row_of(values, id, columns))) << columns << " columns, row " << row;
      }
    }
  }
}

TEST_P(RowsTest, embed_scales_after_widening) {
  constexpr std::int32_t columns = 66;
  constexpr float scale = 11.3F;
  const Values values = draw(dtype(), 3 * columns, 1);
  const DeviceRows table(stream(), dtype(), 3, columns, values);
  const DeviceBatch batch = batch_of({2, 1}, 2);
  const DeviceRows out(stream(), DataType::Float32, 2, columns);
  embed(queue(), dtype(), table.data(), batch.view(), scale, out.accumulators());
  Values expected;
  for (const std::int32_t id : {2, 1}) {
    for (const float value : row_of(values, id, columns)) expected.push_back(scale * value);
  }
  EXPECT_TRUE(same_bits(out.read(stream()), expected));
}

// ---- add_rms_norm

TEST_P(RowsTest, norm_adds_a_scaled_delta_in_one_rounding) {
  for (const std::int32_t columns : {7, 130, 8204}) {
    NormInputs inputs{.columns = columns,
                      .x = draw(DataType::Float32, 2 * columns, 20),
                      .delta = draw(DataType::Float32, 2 * columns, 21),
                      .weight = draw(DataType::Float32, columns, 22),
                      .scale = 0.37F};
    const Norm got = run_norm(inputs);
    NormInputs added{.columns = columns, .x = inputs.x, .delta = {}, .weight = inputs.weight};
    for (std::size_t i = 0; i < added.x.size(); ++i) added.x[i] = std::fma(inputs.scale, (*inputs.delta)[i], inputs.x[i]);
    EXPECT_TRUE(same_bits(got.x, added.x)) << columns;
    EXPECT_TRUE(same_bits(got.out, run_norm(added).out)) << columns;
  }
}

TEST_P(RowsTest, norm_matches_the_reference_and_adds_exactly) {
  constexpr std::int32_t rows = 3;
  for (const std::int32_t columns : {1, 2, 7, 64, 130, 576, 2049, 8200}) {
    NormInputs inputs{.columns = columns,
                      .x = draw(DataType::Float32, rows * columns, 2),
                      .delta = draw(DataType::Float32, rows * columns, 3),
                      .weight = draw(DataType::Float32, columns, 4)};
    ReferenceOps reference(DataType::Float32);
    const auto matrix = [&](const Values& values) {
      const Matrix made = reference.allocate(rows, columns, Format::Accumulator).value();
      std::copy(values.begin(), values.end(), static_cast<float*>(made.data));
      return made;
    };
    const NormId weight =
        reference.make_norm({.dtype = DataType::Float32, .shape = {columns}, .bytes = std::as_bytes(std::span(inputs.weight))})
            .value();
    const Matrix x = matrix(inputs.x);
    const Matrix out = reference.allocate(rows, columns, Format::Accumulator).value();
    const auto values_of = [&](const Matrix& made) {
      Values values(static_cast<std::size_t>(rows * columns));
      reference.read(made, values);
      return values;
    };
    const float tolerance = 4e-6F + element_epsilon(dtype());
    reference.rms_norm(x, weight, epsilon, out);
    NormInputs plain = inputs;
    plain.delta.reset();
    const Norm normed = run_norm(plain);
    EXPECT_LT(relative_error(normed.out, values_of(out)), tolerance) << columns;
    EXPECT_TRUE(same_bits(normed.x, inputs.x)) << columns;

    reference.add_rms_norm(x, matrix(*inputs.delta), 1.0F, weight, epsilon, out);
    for (const RowLayout layout : {RowLayout(), aligned, misaligned}) {
      const Norm added = run_norm(inputs, layout);
      EXPECT_LT(relative_error(added.out, values_of(out)), tolerance) << columns;
      EXPECT_TRUE(same_bits(added.x, values_of(x))) << columns;
    }
  }
}

TEST_P(RowsTest, norm_has_the_same_bits_alone_in_any_batch_and_at_any_alignment) {
  constexpr std::int32_t rows = 9;
  for (const std::int32_t columns : {7, 130, 1028, 8204}) {
    const NormInputs inputs{.columns = columns,
                            .x = draw(DataType::Float32, rows * columns, 5, 30.0F),
                            .delta = draw(DataType::Float32, rows * columns, 6),
                            .weight = draw(DataType::Float32, columns, 7)};
    const Norm all = run_norm(inputs);
    EXPECT_TRUE(same_bits(run_norm(inputs, misaligned).out, all.out)) << columns;
    for (const std::int32_t row : {0, 4, 8}) {
      const auto part = [&](const Values& values) {
        const auto view = row_of(values, row, columns);
        return Values(view.begin(), view.end());
      };
      const Norm one = run_norm({.columns = columns, .x = part(inputs.x), .delta = part(*inputs.delta), .weight = inputs.weight});
      EXPECT_TRUE(same_bits(one.out, row_of(all.out, row, columns))) << columns << " columns, row " << row;
      EXPECT_TRUE(same_bits(one.x, row_of(all.x, row, columns))) << columns << " columns, row " << row;
    }
  }
}

TEST_P(RowsTest, the_order_of_threads_and_blocks_changes_no_bit_of_a_norm) {
  const NormInputs inputs{.columns = 1030,
                          .x = draw(DataType::Float32, 2 * 1030, 11, 30.0F),
                          .delta = draw(DataType::Float32, 2 * 1030, 12),
                          .weight = draw(DataType::Float32, 1030, 13)};
  const Norm expected = run_norm(inputs);
  in_any_order(12, [&] {
    const Norm got = run_norm(inputs);
    EXPECT_TRUE(same_bits(got.out, expected.out));
    EXPECT_TRUE(same_bits(got.x, expected.x));
  });
}

TEST_P(RowsTest, norm_keeps_a_nan_in_its_row) {
  constexpr std::int32_t columns = 66;
  NormInputs inputs{
      .columns = columns, .x = draw(DataType::Float32, 3 * columns, 8), .delta = {}, .weight = Values(columns, 1.0F)};
  const Norm clean = run_norm(inputs);
  inputs.x[columns + 65] = std::numeric_limits<float>::quiet_NaN();
  const Norm got = run_norm(inputs);
  for (const std::int32_t row : {0, 2}) EXPECT_TRUE(same_bits(row_of(got.out, row, columns), row_of(clean.out, row, columns)));
  for (const float value : row_of(got.out, 1, columns)) EXPECT_TRUE(std::isnan(value));
}

// ---- gather_rows

TEST_P(RowsTest, gather_copies_selected_rows_and_row_0_for_padding) {
  for (const std::int32_t columns : {1, 7, 64, 129, 2056}) {
    const Values values = draw(dtype(), 6 * columns, 9);
    const std::vector<BatchRow> rows{{.token_ids = {1, 2, 3}, .position = 0, .blocks = {0}},
                                     {.token_ids = {4, 5, 6}, .position = 0, .blocks = {0}}};
    const DeviceBatch batch(stream(), rows, {.tokens = 6, .rows = 5, .block_count = 1}, {1, 2, 5});
    const std::vector<std::int32_t> expected{1, 2, 5, 0, 0};
    for (const RowLayout layout : {RowLayout(), aligned, misaligned}) {
      const DeviceRows x(stream(), dtype(), 6, columns, values, layout);
      const DeviceRows out(stream(), dtype(), 5, columns, layout);
      gather_rows(queue(), static_cast<std::int32_t>(element_size(dtype())), x.activations(), batch.view(), out.activations());
      const Values got = out.read(stream());
      for (std::size_t row = 0; row < expected.size(); ++row) {
        EXPECT_TRUE(same_bits(row_of(got, static_cast<std::int64_t>(row), columns), row_of(values, expected[row], columns)))
            << columns << " columns, row " << row;
      }
    }
  }
}

// ---- swiglu

TEST_P(RowsTest, swiglu_matches_the_formula_at_any_alignment) {
  constexpr std::int32_t rows = 3;
  for (const std::int32_t columns : {1, 7, 64, 172, 2049}) {
    const Values gate_up = draw(dtype(), rows * 2 * columns, 10, 3.0F);
    Values expected;
    for (std::int32_t row = 0; row < rows; ++row) {
      const auto in = row_of(gate_up, row, 2 * columns);
      for (std::size_t i = 0; i < static_cast<std::size_t>(columns); ++i) {
        const double gate = in[i];
        expected.push_back(static_cast<float>(gate / (1.0 + std::exp(-gate)) * in[static_cast<std::size_t>(columns) + i]));
      }
    }
    const Values got = run_swiglu(columns, gate_up);
    EXPECT_LT(relative_error(got, expected), 1e-6F + element_epsilon(dtype())) << columns;
    EXPECT_TRUE(same_bits(run_swiglu(columns, gate_up, aligned), got)) << columns;
    EXPECT_TRUE(same_bits(run_swiglu(columns, gate_up, misaligned), got)) << columns;
    const auto last = row_of(gate_up, rows - 1, 2 * columns);
    EXPECT_TRUE(same_bits(run_swiglu(columns, Values(last.begin(), last.end())), row_of(got, rows - 1, columns))) << columns;
  }
}

TEST_P(RowsTest, swiglu_is_right_for_extreme_gates) {
  const float infinity = std::numeric_limits<float>::infinity();
  const Values gates{-60000.0F, -95.0F, 0.0F, 40000.0F, infinity, std::numeric_limits<float>::quiet_NaN()};
  Values gate_up = gates;
  gate_up.resize(2 * gates.size(), 1.0F);
  const Values got = run_swiglu(static_cast<std::int32_t>(gates.size()), gate_up);
  EXPECT_EQ(got[0], 0.0F);
  EXPECT_EQ(got[1], 0.0F);
  EXPECT_EQ(got[2], 0.0F);
  EXPECT_EQ(got[3], rounded(dtype(), {40000.0F})[0]);
  EXPECT_EQ(got[4], infinity);
  EXPECT_TRUE(std::isnan(got[5]));
}

/// silu shows the exponential: each value to a few units in the last place over the whole range.
TEST_F(DeviceTest, exponential_is_accurate_over_its_whole_range) {
  Values gate_up;
  for (float gate = -86.5F; gate < 87.0F; gate += 0.0371F) gate_up.push_back(gate);
  const std::size_t count = gate_up.size();
  gate_up.resize(2 * count, 1.0F);
  const auto columns = static_cast<std::int32_t>(count);
  const DeviceRows in(stream(), DataType::Float32, 1, 2 * columns, gate_up);
  const DeviceRows out(stream(), DataType::Float32, 1, columns);
  swiglu(queue(), DataType::Float32, in.activations(), out.activations());
  const Values got = out.read(stream());
  for (std::size_t i = 0; i < count; ++i) {
    const double exact = gate_up[i] / (1.0 + std::exp(-static_cast<double>(gate_up[i])));
    ASSERT_LE(std::abs(got[i] - exact), std::abs(exact) * 0x1p-21) << "at " << gate_up[i];
  }
}

}  // namespace
}  // namespace rubato::engine::cuda
