// SPDX-License-Identifier: Apache-2.0
// Each recurrent operation of the CPU against the scalar reference: shapes odd and usual, states that move between slots, norms
// of every order, and the functions that have to be right from end to end.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "engine/ops.h"
#include "tests/engine/recurrent_device.h"

namespace rubato::engine {
namespace {

constexpr float scan_tolerance = 3e-6F;  // F32 sums in another order, on every path

class RecurrentOpsTest : public testing::TestWithParam<Variant> {};

INSTANTIATE_TEST_SUITE_P(Every, RecurrentOpsTest, testing::ValuesIn(variants()),
                         [](const auto& variant) { return variant_name(variant.param); });

TEST_P(RecurrentOpsTest, convolution_and_scan_match_the_reference_over_steps_that_move_states) {
  for (std::uint64_t seed = 1; seed <= 24; ++seed) {
    const RecurrentCase one = draw_case(seed, 6);
    SCOPED_TRACE("seed " + std::to_string(seed) + ": " + to_text(one));
    Device cpu = with_layers(cpu_device(GetParam(), 2), one);
    Device reference = with_layers(reference_device(GetParam().dtype), one);
    const std::vector<Values> sequences{draw_projected(one.shape, 60, seed), draw_projected(one.shape, 50, seed + 100)};
    const StateUse::Save save{.to = {3}, .tokens = 17};
    for (const std::vector<RecurrentPiece>& pieces : std::vector<std::vector<RecurrentPiece>>{
             {{0, 0, 41, {.from = {}, .to = {0}, .save = save}}, {1, 0, 2, {.from = {}, .to = {1}, .save = {}}}},
             {{1, 2, 1, {.from = StateId{1}, .to = {1}, .save = {}}},
              {0, 41, 3, {.from = StateId{0}, .to = {2}, .save = StateUse::Save{.to = {4}, .tokens = 1}}}},
             {{0, 44, 16, {.from = StateId{2}, .to = {2}, .save = {}}},
              {1, 3, 47, {.from = StateId{1}, .to = {5}, .save = {}}},
              {0, 17, 20, {.from = StateId{3}, .to = {0}, .save = {}}}}}) {
      const Values got = recurrent_step(cpu, one.shape, sequences, pieces);
      const Values want = recurrent_step(reference, one.shape, sequences, pieces);
      EXPECT_LT(relative_error(got, want), scan_tolerance);
    }
    // What was kept after one of three tokens.
    const std::vector<RecurrentPiece> resumed{{0, 42, 18, {.from = StateId{4}, .to = {4}, .save = {}}}};
    EXPECT_LT(relative_error(recurrent_step(cpu, one.shape, sequences, resumed),
                             recurrent_step(reference, one.shape, sequences, resumed)),
              scan_tolerance);
  }
}

/// One head, one element, one entry, no convolution to speak of: out = time step for x = B = C = 1 and a state of zero.
class TimeStepTest : public testing::TestWithParam<Variant> {
 protected:
  static constexpr float unit = 1.2784645F;  // silu of it is 1
  static RecurrentShape shape() {
    return {.layers = 2,
            .heads = 1,
            .head_size = 1,
            .groups = 1,
            .state_size = 1,
            .window = 1,
            .time_step_min = 0.0F,
            .time_step_max = std::numeric_limits<float>::infinity(),
            .state_count = 1};
  }
  static Device ready(float time_step_max, float log_decay) {
    RecurrentShape limited = shape();
    limited.time_step_max = time_step_max;
    Device device = cpu_device(GetParam(), 1);
    EXPECT_TRUE(device.ops->make_cache({}, {}, {}));
    EXPECT_TRUE(device.ops->make_states(limited));
    for (int layer = 0; layer < 2; ++layer) {
      const RecurrentId id = device.ops->make_recurrent().value();
      device.ops->load_recurrent(id, RecurrentPart::Taps, HostTensor{.shape = {3, 1, 1}, .values = {1, 1, 1}}.view());
      device.ops->load_recurrent(id, RecurrentPart::LogDecay, HostTensor{.shape = {1}, .values = {log_decay}}.view());
    }
    return device;
  }
  static Values run(Device& device, const std::vector<float>& time_steps, const std::vector<float>& x) {
    Values projected;
    for (std::size_t i = 0; i < x.size(); ++i) projected.insert(projected.end(), {0.0F, x[i], unit, unit, time_steps[i]});
    return recurrent_step(device, shape(), {projected},
                          {{0, 0, static_cast<std::int32_t>(x.size()), {.from = {}, .to = {0}, .save = {}}}});
  }
};

INSTANTIATE_TEST_SUITE_P(Every, TimeStepTest, testing::ValuesIn(variants()),
                         [](const auto& variant) { return variant_name(variant.param); });

TEST_P(TimeStepTest, softplus_is_right_to_a_few_roundings_from_end_to_end) {
  Device device = ready(std::numeric_limits<float>::infinity(), 0.0F);
  for (float raw = -85.0F; raw < 100.0F; raw += 0.37F) {
    const double want = std::max<double>(raw, 0.0) + std::log1p(std::exp(-std::abs(static_cast<double>(raw))));
    EXPECT_NEAR(run(device, {raw}, {unit})[0] / want, 1.0, 3e-6) << raw;  // the unit's own rounding, three times, is 1e-6
  }
  EXPECT_EQ(run(device, {-1000.0F}, {unit})[0], 0.0F);
}

TEST_P(TimeStepTest, the_decay_is_right_and_ends_in_zero) {
  for (const float log_decay : {-3.0F, 0.0F, 2.5F}) {
    Device device = ready(std::numeric_limits<float>::infinity(), log_decay);
    for (float raw = -8.0F; raw < 8.0F; raw += 0.5F) {
      const Values got = run(device, {1.0F, raw}, {unit, 0.0F});
      const double time_step = std::max<double>(raw, 0.0) + std::log1p(std::exp(-std::abs(static_cast<double>(raw))));
      const double want = std::exp(-std::exp(static_cast<double>(log_decay)) * time_step);
      // rate * time step is rounded before exp, and that counts times its size. What is left of less is lost below 2^-126.
      if (want < 1e-30) continue;
      EXPECT_NEAR(got[1] / got[0] / want, 1.0, 2e-5) << raw;
    }
    EXPECT_EQ(run(device, {1.0F, 1e6F}, {unit, 0.0F})[1], 0.0F);
  }
}

TEST_P(TimeStepTest, time_steps_are_clamped_and_nan_is_not) {
  Device device = ready(0.5F, 0.0F);
  EXPECT_NEAR(run(device, {3.0F}, {unit})[0], 0.5F, 1e-6F);
  EXPECT_TRUE(std::isnan(run(device, {std::numeric_limits<float>::quiet_NaN()}, {unit})[0]));
}

TEST_P(RecurrentOpsTest, gated_norm_matches_the_reference_in_every_order_and_group_and_its_bits_ignore_the_batch) {
  for (const auto& [inner, groups] : std::vector<std::pair<int, int>>{{24, 1}, {48, 3}, {64, 4}, {192, 1}, {200, 8}, {5, 1}}) {
    RecurrentCase one{.shape = {.layers = 1,
                                .heads = inner,
                                .head_size = 1,
                                .groups = 1,
                                .state_size = 3,
                                .window = 2,
                                .time_step_max = 1.0F,
                                .state_count = 1}};
    constexpr std::int32_t rows = 21;
    const Values y = draw(static_cast<std::size_t>(rows * inner), 1);
    const Values projected = draw_projected(one.shape, rows, 2);
    const HostTensor weight = draw_tensor({inner}, 3);
    for (const auto order : {GatedNorm::Order::GateFirst, GatedNorm::Order::NormFirst, GatedNorm::Order::GateOnly}) {
      SCOPED_TRACE("inner " + std::to_string(inner) + " order " + std::to_string(static_cast<int>(order)));
      const auto run = [&](Device& device, std::int32_t first, std::int32_t count) {
        const auto part = [&](const Values& values, std::int32_t columns) {
          return Values(values.begin() + first * columns, values.begin() + (first + count) * columns);
        };
        GatedNorm norm{.order = order, .weight = {}, .group_columns = inner / groups, .epsilon = 1e-5F};
        if (order != GatedNorm::Order::GateOnly) norm.weight = device.ops->make_norm(weight.view()).value();
        const Matrix in = device.matrix(count, inner, Format::Accumulator, part(y, inner));
        const Matrix gate =
            device.matrix(count, one.shape.projected(), Format::Accumulator, part(projected, one.shape.projected()));
        const Matrix out = device.matrix(count, inner, Format::Activation);
        device.ops->gated_norm(in, gate, norm, out);
        EXPECT_TRUE(same_bits(device.read(in), part(y, inner)));
        return device.read(out);
      };
      Device cpu = with_layers(cpu_device(GetParam(), 2), one);
      Device reference = with_layers(reference_device(GetParam().dtype), one);
      const Values all = run(cpu, 0, rows);
      EXPECT_LT(relative_error(all, run(reference, 0, rows)), cpu.tolerance);
      EXPECT_TRUE(same_bits(run(cpu, 13, 1), Values(all.begin() + 13 * inner, all.begin() + 14 * inner)));
    }
  }
}

TEST_P(RecurrentOpsTest, the_cells_past_a_gated_row_stay_zero) {
  // linear reads whole cells and groups: what gated_norm leaves there would be summed.
  RecurrentCase one{.shape = {.layers = 1,
                              .heads = 21,
                              .head_size = 1,
                              .groups = 1,
                              .state_size = 1,
                              .window = 2,
                              .time_step_max = 1.0F,
                              .state_count = 1}};
  Device cpu = with_layers(cpu_device(GetParam(), 1), one);
  const Matrix y = cpu.matrix(2, 21, Format::Accumulator, draw(42, 1));
  const Matrix gate = cpu.matrix(2, one.shape.projected(), Format::Accumulator, draw_projected(one.shape, 2, 2));
  const Matrix out = cpu.matrix(2, 21, Format::Activation);
  cpu.ops->gated_norm(y, gate, {.order = GatedNorm::Order::GateOnly, .weight = {}, .group_columns = 7}, out);
  Matrix whole = out;
  whole.columns = static_cast<std::int32_t>(out.stride);
  const Values got = cpu.read(whole);
  for (std::size_t row = 0; row < 2; ++row) {
    for (std::size_t i = 21; i < static_cast<std::size_t>(out.stride); ++i) {
      EXPECT_EQ(got[row * static_cast<std::size_t>(out.stride) + i], 0.0F) << i;
    }
  }
}

TEST_P(RecurrentOpsTest, relu_squared_matches_the_reference_and_keeps_nan) {
  Device cpu = cpu_device(GetParam(), 2);
  Device reference = reference_device(GetParam().dtype);
  Values x = draw(7 * 37, 4);
  const auto run = [&](Device& device) {
    const Matrix in = device.matrix(7, 37, Format::Accumulator, x);
    const Matrix out = device.matrix(7, 37, Format::Activation);
    device.ops->relu_squared(in, out);
    return device.read(out);
  };
  EXPECT_LT(relative_error(run(cpu), run(reference)), cpu.tolerance);
  x[40] = std::numeric_limits<float>::quiet_NaN();
  EXPECT_TRUE(std::isnan(run(cpu)[40]));
  EXPECT_FALSE(std::isnan(run(cpu)[41]));
}

TEST_P(RecurrentOpsTest, more_memory_than_there_is_for_states_is_an_error) {
  Device cpu = cpu_device(GetParam(), 1);
  RecurrentShape shape = draw_case(1, 1).shape;
  shape.heads = shape.groups * 4096;
  shape.state_count = 1 << 24;
  shape.layers = 4096;
  const Result<void> made = cpu.ops->make_states(shape);
  ASSERT_FALSE(made);
  EXPECT_EQ(made.error().code, ErrorCode::ResourceExhausted);
}

}  // namespace
}  // namespace rubato::engine
