// SPDX-License-Identifier: Apache-2.0
// Drives the recurrent operations of any host Ops in tests: layers with drawn weights, sequences of drawn inputs, and steps over
// parts of them with states wherever a test wants them.
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <span>
#include <string>
#include <vector>

#include "tests/engine/ops_device.h"

namespace rubato::engine {

struct RecurrentCase {
  RecurrentShape shape;
  bool taps_bias = true;
};

inline std::string to_text(const RecurrentCase& one) {
  const RecurrentShape& shape = one.shape;
  return std::to_string(shape.heads) + " heads of " + std::to_string(shape.head_size) + ", " + std::to_string(shape.groups) +
         " groups of state " + std::to_string(shape.state_size) + ", window " + std::to_string(shape.window) +
         (one.taps_bias ? ", bias" : ", no bias");
}

/// Odd and usual sizes in all combinations that a seed draws.
inline RecurrentCase draw_case(std::uint64_t seed, std::int32_t state_count) {
  std::mt19937_64 generator(seed);
  const auto pick = [&](std::vector<std::int32_t> values) { return values[generator() % values.size()]; };
  RecurrentCase one;
  one.shape.layers = 2;
  one.shape.groups = pick({1, 1, 2, 3});
  one.shape.heads = one.shape.groups * pick({1, 2, 3});
  one.shape.head_size = pick({8, 24, 64, 5, 16});
  one.shape.state_size = pick({16, 17, 64, 128, 1});
  one.shape.window = pick({2, 3, 4, 4, 5, 1});
  one.shape.time_step_min = generator() % 2 == 0 ? 0.0F : 0.05F;
  one.shape.time_step_max = generator() % 2 == 0 ? std::numeric_limits<float>::infinity() : 0.5F;
  one.shape.state_count = state_count;
  one.taps_bias = generator() % 2 == 0;
  return one;
}

/// The weights of one layer, as a checkpoint has them.
struct LayerWeights {
  HostTensor taps;
  HostTensor taps_bias;
  HostTensor time_step_bias;
  HostTensor log_decay;
  HostTensor skip;
};

inline LayerWeights draw_weights(const RecurrentShape& shape, std::uint64_t seed) {
  LayerWeights weights{.taps = draw_tensor({shape.channels(), 1, shape.window}, seed, 0.5F),
                       .taps_bias = draw_tensor({shape.channels()}, seed + 1, 0.3F),
                       .time_step_bias = draw_tensor({shape.heads}, seed + 2),
                       .log_decay = draw_tensor({shape.heads}, seed + 3),
                       .skip = draw_tensor({shape.heads}, seed + 4)};
  for (float& value : weights.time_step_bias.values) value -= 1.5F;  // time steps around 0.2, as trained models have them
  return weights;
}

inline void load_weights(Device& device, RecurrentId id, const LayerWeights& weights, const RecurrentCase& one) {
  device.ops->load_recurrent(id, RecurrentPart::Taps, weights.taps.view());
  if (one.taps_bias) device.ops->load_recurrent(id, RecurrentPart::TapsBias, weights.taps_bias.view());
  device.ops->load_recurrent(id, RecurrentPart::TimeStepBias, weights.time_step_bias.view());
  device.ops->load_recurrent(id, RecurrentPart::LogDecay, weights.log_decay.view());
  device.ops->load_recurrent(id, RecurrentPart::Skip, weights.skip.view());
}

inline constexpr std::uint64_t weights_seed = 500;

/// Gives device states, all of them NaN, and layers whose weights are drawn from weights_seed + 10 * layer.
inline Device with_layers(Device device, const RecurrentCase& one) {
  EXPECT_TRUE(device.ops->make_cache({}, {}, {}));
  EXPECT_TRUE(device.ops->make_states(one.shape));
  for (std::int32_t layer = 0; layer < one.shape.layers; ++layer) {
    const RecurrentId id = device.ops->make_recurrent().value();
    EXPECT_EQ(id.value, layer);
    load_weights(device, id, draw_weights(one.shape, weights_seed + 10 * static_cast<std::uint64_t>(layer)), one);
  }
  std::vector<StateId> all;
  for (std::int32_t state = 0; state < one.shape.state_count; ++state) all.push_back({state});
  device.ops->poison_states(all);
  return device;
}

/// Rows of projected values, (tokens, shape.projected()).
inline Values draw_projected(const RecurrentShape& shape, std::int32_t tokens, std::uint64_t seed) {
  return draw(static_cast<std::size_t>(tokens) * static_cast<std::size_t>(shape.projected()), seed);
}

/// Tokens [position, position + count) of one sequence in a step.
struct RecurrentPiece {
  std::size_t sequence = 0;
  std::int32_t position = 0;
  std::int32_t count = 0;
  StateUse state{};
};

inline constexpr RecurrentId tested_layer{1};

/// One step of a layer over pieces of sequences; returns (tokens, inner).
inline Values recurrent_step(Device& device, const RecurrentShape& shape, const std::vector<Values>& sequences,
                             const std::vector<RecurrentPiece>& pieces, RecurrentId layer = tested_layer) {
  Values projected;
  std::vector<SequenceSpan> spans;
  std::int32_t first = 0;
  for (const RecurrentPiece& piece : pieces) {
    const auto begin = sequences.at(piece.sequence).begin() + static_cast<std::int64_t>(piece.position) * shape.projected();
    projected.insert(projected.end(), begin, begin + static_cast<std::int64_t>(piece.count) * shape.projected());
    spans.push_back({.first = first, .count = piece.count, .position = piece.position, .blocks = {}, .state = piece.state});
    first += piece.count;
  }
  const Matrix in = device.matrix(first, shape.projected(), Format::Accumulator, projected);
  const Matrix convolved = device.matrix(first, shape.channels(), Format::Accumulator);
  const Matrix out = device.matrix(first, shape.inner(), Format::Accumulator);
  device.ops->convolve(layer, in, spans, convolved);
  device.ops->scan(layer, in, convolved, spans, out);
  return device.read(out);
}

inline std::vector<std::byte> state_of(const Device& device, StateId state) {
  std::vector<std::byte> bytes;
  device.ops->read_state(tested_layer.value, state, bytes);
  return bytes;
}

}  // namespace rubato::engine
