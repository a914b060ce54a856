// SPDX-License-Identifier: Apache-2.0
// The convolution and the recurrence of Mamba2 layers: near the reference on awkward shapes, and the same bits however a sequence
// is cut, in any company, slot, bucket and order of threads and blocks. Of the states, only those that a row names are touched.
#include <gtest/gtest.h>

#include <algorithm>
#include <map>

#include "tests/cuda/recurrent_layers.h"

namespace rubato::engine::cuda {
namespace {

constexpr std::int32_t length = 75;  // of the sequence whose bits are compared

/// One row alone from the start.
std::vector<Piece> whole(std::int32_t count, std::int32_t to, std::optional<StateUse::Save> save = {}) {
  return {{.sequence = 0, .position = 0, .count = count, .state = begins(to, save)}};
}

class RecurrentTest : public DeviceTest {
 protected:
  [[nodiscard]] DeviceLayers device(const RecurrentShape& shape) const { return {facts(), stream(), shape}; }

  /// Outputs of one sequence, token after token, from whatever steps gave them.
  struct Collected {
    explicit Collected(const RecurrentShape& of) : shape(of) {}
    /// first: row of the step's outputs where the piece begins.
    void add(const StepOutput& step, const Piece& piece, std::int32_t first) {
      for (std::size_t layer = 0; layer < recurrent_layers; ++layer) {
        append(step[layer].convolved, shape.channels(), piece, first, out[layer].convolved);
        append(step[layer].scanned, shape.inner(), piece, first, out[layer].scanned);
      }
    }
    static void append(const Values& from, std::int64_t columns, const Piece& piece, std::int32_t first, Values& to) {
      to.insert(to.end(), from.begin() + first * columns, from.begin() + (first + piece.count) * columns);
    }
    RecurrentShape shape;
    StepOutput out;
  };

  static void expect_same(const StepOutput& got, const StepOutput& expected) {
    for (std::size_t layer = 0; layer < recurrent_layers; ++layer) {
      EXPECT_TRUE(same_bits(got[layer].convolved, expected[layer].convolved)) << "layer " << layer;
      EXPECT_TRUE(same_bits(got[layer].scanned, expected[layer].scanned)) << "layer " << layer;
    }
  }
};

std::vector<RecurrentShape> every_shape() {
  std::vector<RecurrentShape> all{
      recurrent_shape(4, 8, 1, 16, 4),   recurrent_shape(1, 1, 1, 1, 1),  // no inputs to remember
      recurrent_shape(6, 5, 3, 20, 2),                                    // fewer elements than a warp has room for
      recurrent_shape(2, 70, 2, 33, 4),   // three slices of a head; states that are no whole packs
      recurrent_shape(2, 64, 1, 128, 4),  // as models have it
      recurrent_shape(3, 33, 1, 64, 3),  recurrent_shape(2, 3, 2, 250, 8),
  };
  all[2].time_step_min = 0.4F;
  all[2].time_step_max = 0.9F;
  return all;
}

/// Those that the tests of bits go through: whole packs and not, one slice and several.
std::vector<RecurrentShape> some_shapes() {
  return {recurrent_shape(3, 40, 1, 64, 4), recurrent_shape(4, 6, 2, 35, 3)};
}

TEST_F(RecurrentTest, matches_the_reference_on_awkward_shapes) {
  for (const RecurrentShape& shape : every_shape()) {
    SCOPED_TRACE(to_string(shape));
    const std::vector<Inputs> sequences = draw_inputs(shape, {90, 2, 6});
    DeviceLayers layers = device(shape);
    ReferenceLayers reference(shape);
    const std::vector<std::vector<Piece>> steps{
        {{0, 0, 37, begins(3, after(20, 5))}, {1, 0, 1, begins(0)}, {2, 0, 5, begins(7)}},
        {{1, 1, 1, goes_on(0, 0)}, {0, 37, 53, goes_on(3, 3)}, {2, 5, 1, goes_on(7, 8)}},
        {{0, 20, 20, goes_on(5, 9)}},  // from the snapshot
    };
    for (std::size_t step = 0; step < steps.size(); ++step) {
      SCOPED_TRACE("step " + std::to_string(step));
      const StepOutput got = layers.step(sequences, steps[step]);
      const StepOutput expected = reference.step(sequences, steps[step]);
      for (std::size_t layer = 0; layer < recurrent_layers; ++layer) {
        EXPECT_LT(relative_error(got[layer].convolved, expected[layer].convolved), 3e-6F) << "layer " << layer;
        EXPECT_LT(relative_error(got[layer].scanned, expected[layer].scanned), 1e-5F) << "layer " << layer;
      }
    }
  }
}

TEST_F(RecurrentTest, bits_do_not_depend_on_chunks_company_slots_or_buckets) {
  for (const RecurrentShape& shape : some_shapes()) {
    SCOPED_TRACE(to_string(shape));
    const std::vector<Inputs> sequences = draw_inputs(shape, {length, 5, 12});
    DeviceLayers layers = device(shape);
    const StepOutput expected = layers.step(sequences, whole(length, 2));
    const std::vector<std::byte> state = layers.state({2});
    for (const std::int32_t chunk : {1, 7, 16, 64}) {
      SCOPED_TRACE("chunk " + std::to_string(chunk));
      Collected alone(shape);
      Collected among(shape);
      StateId slot{4};
      for (std::int32_t position = 0; position < length; position += chunk) {
        Piece piece{.sequence = 0, .position = position, .count = std::min(chunk, length - position), .state = begins(3)};
        if (position > 0) piece.state.from = StateId{3};
        alone.add(layers.step(sequences, {piece}), piece, 0);

        // Between others, in a larger bucket, and in another slot each time.
        const StateId next{slot.value == 4 ? 6 : 4};
        if (position > 0) piece.state.from = slot;
        piece.state.to = next;
        slot = next;
        const std::vector<Piece> company{{.sequence = 1, .position = 0, .count = 5, .state = begins(0)},
                                         piece,
                                         {.sequence = 2, .position = 0, .count = 12, .state = begins(9)}};
        among.add(layers.step(sequences, company, position % 2 == 0 ? 96 : 0), piece, 5);
      }
      expect_same(alone.out, expected);
      expect_same(among.out, expected);
      EXPECT_EQ(layers.state({3}), state);
      EXPECT_EQ(layers.state(slot), state);
    }
  }
}

TEST_F(RecurrentTest, a_snapshot_is_the_state_after_exactly_its_tokens) {
  for (const RecurrentShape& shape : some_shapes()) {
    SCOPED_TRACE(to_string(shape));
    const std::vector<Inputs> sequences = draw_inputs(shape, {length});
    DeviceLayers layers = device(shape);
    const StepOutput expected = layers.step(sequences, whole(length, 0));
    const std::vector<std::byte> state = layers.state({0});
    for (const std::int32_t tokens : {1, 3, 4, 16, 17, 32, 33, 64, 75}) {
      SCOPED_TRACE("after " + std::to_string(tokens));
      layers.step(sequences, whole(tokens, 1));
      expect_same(layers.step(sequences, whole(length, 2, after(tokens, 3))), expected);
      EXPECT_EQ(layers.state({3}), layers.state({1}));
      EXPECT_EQ(layers.state({2}), state);
      // In a row that goes on from there: the state after two more.
      if (tokens > length - 5) continue;
      layers.step(sequences, {{0, tokens, 5, goes_on(3, 4, after(2, 5))}});
      layers.step(sequences, whole(tokens + 2, 6));
      EXPECT_EQ(layers.state({5}), layers.state({6}));
      EXPECT_EQ(layers.state({3}), layers.state({1})) << "what a row begins from stays as it is";
    }
  }
}

TEST_F(RecurrentTest, states_that_no_row_names_are_neither_read_nor_written) {
  for (const RecurrentShape& shape : some_shapes()) {
    SCOPED_TRACE(to_string(shape));
    const std::vector<Inputs> sequences = draw_inputs(shape, {40, 9});
    DeviceLayers layers = device(shape);
    const std::vector<Piece> pieces{{0, 0, 40, begins(4, after(33, 7))}, {1, 0, 9, begins(2)}};
    const StepOutput expected = layers.step(sequences, pieces, 64);
    std::vector<StateId> all;
    for (std::int32_t slot = 0; slot < shape.state_count; ++slot) all.push_back({slot});
    layers.ops().poison_states(all);
    const std::vector<std::byte> poison = layers.state({0});
    EXPECT_TRUE(std::all_of(poison.begin(), poison.end(), [](std::byte b) { return b == std::byte{0xFF}; }));
    expect_same(layers.step(sequences, pieces, 64), expected);
    for (const StateId slot : all) {
      const bool named = slot == StateId{2} || slot == StateId{4} || slot == StateId{7};
      EXPECT_EQ(layers.state(slot) == poison, !named) << "slot " << slot.value;
    }
  }
}

TEST_F(RecurrentTest, the_order_of_threads_and_blocks_changes_no_bit) {
  const RecurrentShape shape = recurrent_shape(2, 40, 1, 35, 4);
  const std::vector<Inputs> sequences = draw_inputs(shape, {75, 3});
  DeviceLayers layers = device(shape);
  // States in place: who reads the old one too late, or writes the new one too early, computes something else.
  const auto run = [&] {
    Collected out(shape);
    const std::vector<Piece> first = whole(2, 1);
    out.add(layers.step(sequences, first), first[0], 0);
    const std::vector<Piece> second{{1, 0, 3, begins(0)}, {0, 2, 60, goes_on(1, 1, after(47, 2))}};
    out.add(layers.step(sequences, second, 70), second[1], 3);
    const std::vector<Piece> third{{0, 62, 13, goes_on(1, 1)}};
    out.add(layers.step(sequences, third), third[0], 0);
    return out.out;
  };
  const StepOutput expected = run();
  const std::vector<std::byte> state = layers.state({1});
  const std::vector<std::byte> snapshot = layers.state({2});
  in_any_order(12, [&] {
    expect_same(run(), expected);
    EXPECT_EQ(layers.state({1}), state);
    EXPECT_EQ(layers.state({2}), snapshot);
  });
}

TEST_F(RecurrentTest, a_nan_stays_in_its_sequence_and_goes_on_in_it) {
  const RecurrentShape shape = recurrent_shape(2, 8, 1, 16, 4);
  std::vector<Inputs> sequences = draw_inputs(shape, {20, 20, 20});
  const std::vector<Piece> pieces{{0, 0, 20, begins(0)}, {1, 0, 20, begins(1)}, {2, 0, 20, begins(2)}};
  DeviceLayers layers = device(shape);
  const StepOutput clean = layers.step(sequences, pieces);
  // A time step: clamping must not make a number of it.
  for (Values& projected : sequences[1].projected) projected[static_cast<std::size_t>(7 * shape.projected() - 1)] = NAN;
  const StepOutput got = layers.step(sequences, pieces);
  for (std::size_t layer = 0; layer < recurrent_layers; ++layer) {
    EXPECT_TRUE(same_bits(got[layer].convolved, clean[layer].convolved));
    for (std::int64_t token = 0; token < 60; ++token) {
      const std::span<const float> row = row_of(got[layer].scanned, token, shape.inner());
      if (token < 26 || token >= 40) {
        EXPECT_TRUE(same_bits(row, row_of(clean[layer].scanned, token, shape.inner()))) << "token " << token;
      } else {
        EXPECT_TRUE(std::all_of(row.begin() + shape.head_size, row.end(), [](float x) { return std::isnan(x); })) << token;
      }
    }
  }
}

/// With one of everything and no skip, the first result is the time step itself.
TEST_F(RecurrentTest, softplus_is_accurate_over_its_whole_range_and_clamped) {
  RecurrentShape shape = recurrent_shape(1, 1, 1, 1, 1);
  std::vector<float> raws;
  for (float raw = -85.0F; raw < 85.0F; raw += 0.173F) raws.push_back(raw);
  for (const float raw : {-200.0F, 0.0F, 1000.0F}) raws.push_back(raw);
  for (const bool clamp : {false, true}) {
    if (clamp) {
      shape.time_step_min = 0.01F;
      shape.time_step_max = 3.0F;
    }
    const std::unique_ptr<Staging> staging =
        std::make_unique<Staging>(Staging::make({.max_tokens = 8, .max_rows = 8, .max_blocks_per_row = 1}).value());
    const StateShape states{.heads = 1,
                            .head_size = 1,
                            .groups = 1,
                            .state_size = 1,
                            .window = 1,
                            .inner = 1,
                            .channels = 3,
                            .scan_at = 0,
                            .layer_stride = 32,
                            .slot_stride = 32};
    const DeviceVector<float> memory(stream(), Values(32 * 8));
    const DeviceVector<float> zero(stream(), Values(1));
    const RecurrentLayer layer{.shape = states,
                               .taps = zero.data(),
                               .taps_bias = zero.data(),
                               .time_step_bias = zero.data(),
                               .log_decay = zero.data(),
                               .skip = zero.data(),
                               .time_step_min = shape.time_step_min,
                               .time_step_max = shape.time_step_max,
                               .states = memory.data(),
                               .max_rows = 8};
    const std::vector<TokenId> token(1);
    const std::vector<BlockId> block(1);
    for (std::size_t first = 0; first < raws.size(); first += 8) {
      const std::size_t count = std::min<std::size_t>(8, raws.size() - first);
      std::vector<StepRow> rows;
      Values projected;
      for (std::size_t i = 0; i < count; ++i) {
        rows.push_back({.position = 0,
                        .tokens = token,
                        .blocks = block,
                        .sampling = nullptr,
                        .state = begins(static_cast<std::int32_t>(i))});
        for (const float value : {0.0F, 0.0F, 0.0F, 0.0F, raws[first + i]}) projected.push_back(value);
      }
      staging->fill(rows, static_cast<std::int32_t>(count));
      ASSERT_TRUE(staging->copy(stream()));
      const auto tokens = static_cast<std::int32_t>(count);
      const DeviceRows in(stream(), DataType::Float32, tokens, 5, projected);
      const DeviceRows ones(stream(), DataType::Float32, tokens, 3, Values(3 * count, 1.0F));
      const DeviceRows out(stream(), DataType::Float32, tokens, 1);
      scan(queue(), layer, staging->batch(), in.accumulators(), ones.accumulators(), out.accumulators());
      const Values got = out.read(stream());
      for (std::size_t i = 0; i < count; ++i) {
        const double raw = raws[first + i];
        const double exact = std::clamp(std::max(raw, 0.0) + std::log1p(std::exp(-std::abs(raw))),
                                        static_cast<double>(shape.time_step_min), static_cast<double>(shape.time_step_max));
        EXPECT_LE(std::abs(got[i] - exact), exact * 0x1p-21 + 1e-37) << "at " << raw;
      }
    }
  }
}

TEST_F(RecurrentTest, shapes_that_no_kernel_is_made_for_are_refused_by_name) {
  const Staging staging = Staging::make({.max_tokens = 8, .max_rows = 8, .max_blocks_per_row = 1}).value();
  const auto ops = CudaOps::make(facts(), {.dtype = DataType::BFloat16, .max_tokens = 8, .max_rows = 8, .cache_folder = {}},
                                 staging.batch(), stream())
                       .value();
  const std::map<std::string, RecurrentShape> refused{{"state_size", recurrent_shape(2, 8, 1, 257, 4)},
                                                      {"heads", recurrent_shape(4096, 1024, 1, 16, 4)},
                                                      {"channels", recurrent_shape(32000, 64, 32000, 100, 4)},
                                                      {"window", recurrent_shape(2, 8, 1, 16, 9)},
                                                      {"groups", recurrent_shape(4, 8, 3, 16, 4)},
                                                      {"head_size", recurrent_shape(2, 1025, 1, 16, 4)}};
  for (const auto& [field, shape] : refused) {
    const Result<void> made = ops->make_states(shape);
    ASSERT_FALSE(made) << field;
    EXPECT_EQ(made.error().code, ErrorCode::InvalidArgument);
    EXPECT_EQ(made.error().field, field) << made.error().message;
  }
  ASSERT_TRUE(ops->make_states(recurrent_shape(2, 8, 1, 16, 4))) << "what was refused took nothing";
  wait();
}

TEST_F(RecurrentTest, memory_that_states_cannot_have_is_named) {
  const Staging staging = Staging::make({.max_tokens = 8, .max_rows = 8, .max_blocks_per_row = 1}).value();
  const auto ops = CudaOps::make(facts(), {.dtype = DataType::BFloat16, .max_tokens = 8, .max_rows = 8, .cache_folder = {}},
                                 staging.batch(), stream())
                       .value();
  RecurrentShape shape = recurrent_shape(128, 64, 1, 256, 4);
  shape.state_count = 1 << 30;
  const Result<void> made = ops->make_states(shape);
  ASSERT_FALSE(made);
  EXPECT_EQ(made.error().code, ErrorCode::ResourceExhausted);
}

}  // namespace
}  // namespace rubato::engine::cuda
