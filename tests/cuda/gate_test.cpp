// SPDX-License-Identifier: Apache-2.0
// The gated norm behind a recurrence, and relu squared: near the reference in each order of gate and norm, and the same bits
// alone, in any batch and at any alignment.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <string>

#include "engine/cuda/kernels.h"
#include "engine/reference/ops.h"
#include "tests/cuda/device_rows.h"

namespace rubato::engine::cuda {
namespace {

constexpr float epsilon = 1e-5F;

struct GateCase {
  GateOrder order = GateOrder::GateFirst;
  std::int32_t columns = 0;
  std::int32_t group_columns = 0;
};

std::vector<GateCase> gate_cases() {
  std::vector<GateCase> all;
  for (const GateOrder order : {GateOrder::GateFirst, GateOrder::NormFirst}) {
    for (const auto& [columns, group] :
         {std::pair(1, 1), std::pair(15, 5), std::pair(64, 64), std::pair(132, 44), std::pair(8200, 8200)})
      all.push_back({order, columns, group});
  }
  all.push_back({GateOrder::GateOnly, 70, 70});
  return all;
}

GatedNorm::Order reference_order(GateOrder order) {
  return order == GateOrder::GateFirst   ? GatedNorm::Order::GateFirst
         : order == GateOrder::NormFirst ? GatedNorm::Order::NormFirst
                                         : GatedNorm::Order::GateOnly;
}

class GateTest : public DeviceTest, public testing::WithParamInterface<DataType> {
 protected:
  [[nodiscard]] DataType dtype() const { return GetParam(); }

  /// gate has `extra` columns more than y, as what was projected has.
  [[nodiscard]] Values run(const GateCase& c, const Values& y, const Values& gate, std::int32_t extra, const Values& weight,
                           RowLayout layout = {}) const {
    const auto rows = static_cast<std::int32_t>(y.size()) / c.columns;
    const DeviceRows ys(stream(), DataType::Float32, rows, c.columns, y, layout);
    const DeviceRows gates(stream(), DataType::Float32, rows, c.columns + extra, gate, layout);
    const DeviceVector<float> weights(stream(), weight);
    const DeviceRows out(stream(), dtype(), rows, c.columns, layout);
    gated_norm(queue(), dtype(), ys.accumulators(), gates.accumulators(),
               {.order = c.order,
                .weight = c.order == GateOrder::GateOnly ? nullptr : weights.data(),
                .group_columns = c.group_columns,
                .epsilon = epsilon},
               out.activations());
    return out.read(stream());
  }
};

INSTANTIATE_TEST_SUITE_P(Every, GateTest, testing::ValuesIn(element_types()),
                         [](const auto& type) { return element_name(type.param); });

TEST_P(GateTest, matches_the_reference_in_each_order_alone_and_at_any_alignment) {
  constexpr std::int32_t rows = 3;
  constexpr std::int32_t extra = 6;
  for (const GateCase& c : gate_cases()) {
    SCOPED_TRACE(std::to_string(static_cast<int>(c.order)) + ": " + std::to_string(c.columns) + " in groups of " +
                 std::to_string(c.group_columns));
    const Values y = draw(DataType::Float32, rows * c.columns, 1, 3.0F);
    const Values gate = draw(DataType::Float32, rows * (c.columns + extra), 2, 3.0F);
    const Values weight = draw(DataType::Float32, c.columns, 3);

    ReferenceOps reference(DataType::Float32);
    const auto matrix = [&](std::int32_t columns, const Values& values) {
      const Matrix made = reference.allocate(rows, columns, Format::Accumulator).value();
      std::copy(values.begin(), values.end(), static_cast<float*>(made.data));
      return made;
    };
    const NormId id =
        reference.make_norm({.dtype = DataType::Float32, .shape = {c.columns}, .bytes = std::as_bytes(std::span(weight))})
            .value();
    const Matrix out = reference.allocate(rows, c.columns, Format::Accumulator).value();
    reference.gated_norm(matrix(c.columns, y), matrix(c.columns + extra, gate),
                         {.order = reference_order(c.order), .weight = id, .group_columns = c.group_columns, .epsilon = epsilon},
                         out);
    Values expected(y.size());
    reference.read(out, expected);

    const Values got = run(c, y, gate, extra, weight);
    EXPECT_LT(relative_error(got, expected), 4e-6F + element_epsilon(dtype()));
    EXPECT_TRUE(same_bits(run(c, y, gate, extra, weight, {.gap = 8, .offset = 0}), got));
    EXPECT_TRUE(same_bits(run(c, y, gate, extra, weight, {.gap = 3, .offset = 1}), got));
    const auto part = [](std::span<const float> row) { return Values(row.begin(), row.end()); };
    const Values one = run(c, part(row_of(y, 1, c.columns)), part(row_of(gate, 1, c.columns + extra)), extra, weight);
    EXPECT_TRUE(same_bits(one, row_of(got, 1, c.columns)));
  }
}

TEST_P(GateTest, the_order_of_threads_and_blocks_changes_no_bit) {
  const GateCase c{.order = GateOrder::GateFirst, .columns = 1040, .group_columns = 520};
  const Values y = draw(DataType::Float32, 2 * c.columns, 4);
  const Values gate = draw(DataType::Float32, 2 * c.columns, 5);
  const Values weight = draw(DataType::Float32, c.columns, 6);
  const Values expected = run(c, y, gate, 0, weight);
  in_any_order(8, [&] { EXPECT_TRUE(same_bits(run(c, y, gate, 0, weight), expected)); });
}

TEST_P(GateTest, relu_squared_takes_what_is_positive_and_keeps_nan) {
  const float infinity = std::numeric_limits<float>::infinity();
  for (const std::int32_t columns : {7, 64}) {
    Values x = draw(DataType::Float32, 2 * columns, 7, 4.0F);
    x[0] = NAN;
    x[1] = -infinity;
    x[2] = infinity;
    x[3] = -0.0F;
    Values expected;
    for (const float value : x) expected.push_back(value < 0 ? 0.0F : value * value);
    for (const RowLayout layout : {RowLayout(), RowLayout{.gap = 8, .offset = 0}, RowLayout{.gap = 3, .offset = 1}}) {
      const DeviceRows in(stream(), DataType::Float32, 2, columns, x, layout);
      const DeviceRows out(stream(), dtype(), 2, columns, layout);
      relu_squared(queue(), dtype(), in.accumulators(), out.activations());
      Values got = out.read(stream());
      EXPECT_TRUE(std::isnan(got[0]));
      got[0] = 0;
      Values rest = rounded(dtype(), expected);
      rest[0] = 0;
      EXPECT_TRUE(same_bits(got, rest)) << columns;
    }
  }
}

}  // namespace
}  // namespace rubato::engine::cuda
