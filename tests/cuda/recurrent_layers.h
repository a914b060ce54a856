// SPDX-License-Identifier: Apache-2.0
// Two recurrent layers with seeded weights, on the device through staging and CudaOps as a backend runs them, and on the
// reference; and seeded sequences that steps take pieces of.
#pragma once

#include <array>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "engine/cuda/ops.h"
#include "engine/cuda/staging.h"
#include "engine/reference/ops.h"
#include "tests/cuda/device_rows.h"

namespace rubato::engine::cuda {

inline constexpr std::int32_t recurrent_layers = 2;
inline constexpr std::int32_t recurrent_tokens_max = 96;
inline constexpr std::int32_t recurrent_rows_max = 6;
inline constexpr std::int32_t recurrent_blocks_max = 8;  // of a sequence

inline RecurrentShape recurrent_shape(std::int32_t heads, std::int32_t head_size, std::int32_t groups, std::int32_t state_size,
                                      std::int32_t window) {
  return {.layers = recurrent_layers,
          .heads = heads,
          .head_size = head_size,
          .groups = groups,
          .state_size = state_size,
          .window = window,
          .time_step_min = 0.0F,
          .time_step_max = std::numeric_limits<float>::infinity(),
          .state_count = 10};
}

inline std::string to_string(const RecurrentShape& shape) {
  return std::to_string(shape.heads) + " heads of " + std::to_string(shape.head_size) + ", " + std::to_string(shape.groups) +
         " groups, state " + std::to_string(shape.state_size) + ", window " + std::to_string(shape.window);
}

/// From zeros, to a slot.
inline StateUse begins(std::int32_t to, std::optional<StateUse::Save> save = {}) {
  return {.from = std::nullopt, .to = {to}, .save = save};
}
inline StateUse goes_on(std::int32_t from, std::int32_t to, std::optional<StateUse::Save> save = {}) {
  return {.from = StateId{from}, .to = {to}, .save = save};
}
/// A snapshot after so many tokens.
inline StateUse::Save after(std::int32_t tokens, std::int32_t to) {
  return {.to = {to}, .tokens = tokens};
}

/// Part of a step: `count` tokens of a sequence from `position` on.
struct Piece {
  std::size_t sequence = 0;
  std::int32_t position = 0;
  std::int32_t count = 0;
  StateUse state;
};

/// What each layer projected for a sequence: (tokens, projected).
struct Inputs {
  std::int32_t tokens = 0;
  std::array<Values, recurrent_layers> projected;
};

inline std::vector<Inputs> draw_inputs(const RecurrentShape& shape, const std::vector<std::int32_t>& lengths) {
  std::vector<Inputs> all;
  for (const std::int32_t tokens : lengths) {
    Inputs& inputs = all.emplace_back(Inputs{.tokens = tokens, .projected = {}});
    for (std::size_t layer = 0; layer < recurrent_layers; ++layer)
      inputs.projected[layer] = draw(DataType::Float32, std::int64_t{tokens} * shape.projected(), 100 + 10 * all.size() + layer);
  }
  return all;
}

/// What one layer gave for the tokens of a step.
struct LayerOutput {
  Values convolved;
  Values scanned;
};
using StepOutput = std::array<LayerOutput, recurrent_layers>;

inline void load_layers(const RecurrentShape& shape, Ops& ops) {
  const auto load = [&](RecurrentId id, RecurrentPart part, std::vector<std::int64_t> sizes, const Values& values) {
    ops.load_recurrent(id, part,
                       {.dtype = DataType::Float32, .shape = std::move(sizes), .bytes = std::as_bytes(std::span(values))});
  };
  ASSERT_TRUE(ops.make_states(shape));
  for (std::uint64_t layer = 0; layer < recurrent_layers; ++layer) {
    const RecurrentId id = ops.make_recurrent().value();
    ASSERT_EQ(id.value, static_cast<std::int32_t>(layer));
    load(id, RecurrentPart::Taps, {shape.channels(), 1, shape.window},
         draw(DataType::Float32, std::int64_t{shape.channels()} * shape.window, 1 + 10 * layer, 0.5F));
    // A layer without bias has none loaded.
    if (layer == 0) load(id, RecurrentPart::TapsBias, {shape.channels()}, draw(DataType::Float32, shape.channels(), 2, 0.3F));
    load(id, RecurrentPart::TimeStepBias, {shape.heads}, draw(DataType::Float32, shape.heads, 3 + 10 * layer));
    load(id, RecurrentPart::LogDecay, {shape.heads}, draw(DataType::Float32, shape.heads, 4 + 10 * layer));
    load(id, RecurrentPart::Skip, {shape.heads}, draw(DataType::Float32, shape.heads, 5 + 10 * layer));
  }
}

/// On the device.
class DeviceLayers {
 public:
  DeviceLayers(const DeviceFacts& facts, const Stream& stream, const RecurrentShape& shape)
      : shape_(shape),
        stream_(stream),
        staging_(
            Staging::make(
                {.max_tokens = recurrent_tokens_max, .max_rows = recurrent_rows_max, .max_blocks_per_row = recurrent_blocks_max})
                .value()),
        ops_(CudaOps::make(facts,
                           {.dtype = DataType::BFloat16,
                            .max_tokens = recurrent_tokens_max,
                            .max_rows = recurrent_rows_max,
                            .cache_folder = {}},
                           staging_.batch(), stream)
                 .value()),
        tokens_(recurrent_tokens_max),
        blocks_(recurrent_blocks_max) {
    load_layers(shape, *ops_);
    projected_ = ops_->allocate(recurrent_tokens_max, shape.projected(), Format::Accumulator).value();
    convolved_ = ops_->allocate(recurrent_tokens_max, shape.channels(), Format::Accumulator).value();
    scanned_ = ops_->allocate(recurrent_tokens_max, shape.inner(), Format::Accumulator).value();
    // Not finish_loading(): there are no products, and the emulation opens and closes their scratch for every kernel.
    const Result<void> loaded = ops_->take_failure();
    EXPECT_TRUE(loaded) << loaded.error().message;
  }

  /// One step in a bucket of so many tokens (0: no padding). Fails the test when something beyond its tokens was written.
  StepOutput step(const std::vector<Inputs>& sequences, const std::vector<Piece>& pieces, std::int32_t bucket = 0) {
    std::vector<StepRow> rows;
    std::int32_t tokens = 0;
    for (const Piece& piece : pieces) {
      rows.push_back({.position = piece.position,
                      .tokens = std::span(tokens_).first(static_cast<std::size_t>(piece.count)),
                      .blocks = blocks_,
                      .sampling = nullptr,
                      .state = piece.state});
      tokens += piece.count;
    }
    bucket = std::max(bucket, tokens);
    staging_.fill(rows, bucket);
    EXPECT_TRUE(staging_.copy(stream_));
    StepOutput out;
    for (std::size_t layer = 0; layer < recurrent_layers; ++layer) {
      Values projected;
      for (const Piece& piece : pieces) {
        const Values& from = sequences[piece.sequence].projected[layer];
        projected.insert(projected.end(), from.begin() + std::int64_t{piece.position} * shape_.projected(),
                         from.begin() + std::int64_t{piece.position + piece.count} * shape_.projected());
      }
      fill(projected_, projected);
      fill(convolved_, {});
      fill(scanned_, {});
      const RecurrentId id{static_cast<std::int32_t>(layer)};
      ops_->convolve(id, projected_.top(bucket), {}, convolved_.top(bucket));
      ops_->scan(id, projected_.top(bucket), convolved_.top(bucket), {}, scanned_.top(bucket));
      const Result<void> queued = ops_->take_failure();
      EXPECT_TRUE(queued) << queued.error().message;
      out[layer] = {.convolved = read(convolved_, tokens), .scanned = read(scanned_, tokens)};
    }
    return out;
  }

  [[nodiscard]] std::vector<std::byte> state(StateId state) const {
    std::vector<std::byte> bytes;
    for (std::int32_t layer = 0; layer < recurrent_layers; ++layer) ops_->read_state(layer, state, bytes);
    return bytes;
  }
  [[nodiscard]] CudaOps& ops() const { return *ops_; }

 private:
  /// NaN where no values are given.
  void fill(const Matrix& matrix, const Values& values) const {
    Values all(static_cast<std::size_t>(matrix.rows) * static_cast<std::size_t>(matrix.columns),
               std::numeric_limits<float>::quiet_NaN());
    std::copy(values.begin(), values.end(), all.begin());
    copy_and_wait(stream_, matrix.data, all.data(), all.size() * sizeof(float), cudaMemcpyHostToDevice);
  }
  [[nodiscard]] Values read(const Matrix& matrix, std::int32_t rows) const {
    Values all(static_cast<std::size_t>(matrix.rows) * static_cast<std::size_t>(matrix.columns));
    copy_and_wait(stream_, all.data(), matrix.data, all.size() * sizeof(float), cudaMemcpyDeviceToHost);
    const auto real = static_cast<std::ptrdiff_t>(rows) * matrix.columns;
    EXPECT_TRUE(std::all_of(all.begin() + real, all.end(), [](float x) { return std::isnan(x); })) << "padding was written";
    all.resize(static_cast<std::size_t>(real));
    return all;
  }

  RecurrentShape shape_;
  const Stream& stream_;
  Staging staging_;
  std::unique_ptr<CudaOps> ops_;
  Matrix projected_;
  Matrix convolved_;
  Matrix scanned_;
  std::vector<TokenId> tokens_;
  std::vector<BlockId> blocks_;
};

/// On the reference.
class ReferenceLayers {
 public:
  explicit ReferenceLayers(const RecurrentShape& shape) : shape_(shape), ops_(DataType::Float32) { load_layers(shape, ops_); }

  StepOutput step(const std::vector<Inputs>& sequences, const std::vector<Piece>& pieces) {
    std::vector<SequenceSpan> spans;
    std::int32_t tokens = 0;
    for (const Piece& piece : pieces) {
      spans.push_back({.first = tokens, .count = piece.count, .position = piece.position, .blocks = {}, .state = piece.state});
      tokens += piece.count;
    }
    const Matrix projected = ops_.allocate(tokens, shape_.projected(), Format::Accumulator).value();
    const Matrix convolved = ops_.allocate(tokens, shape_.channels(), Format::Accumulator).value();
    const Matrix scanned = ops_.allocate(tokens, shape_.inner(), Format::Accumulator).value();
    StepOutput out;
    for (std::size_t layer = 0; layer < recurrent_layers; ++layer) {
      auto* to = static_cast<float*>(projected.data);
      for (const Piece& piece : pieces) {
        const Values& from = sequences[piece.sequence].projected[layer];
        to = std::copy_n(from.begin() + std::int64_t{piece.position} * shape_.projected(),
                         std::int64_t{piece.count} * shape_.projected(), to);
      }
      const RecurrentId id{static_cast<std::int32_t>(layer)};
      ops_.convolve(id, projected, spans, convolved);
      ops_.scan(id, projected, convolved, spans, scanned);
      out[layer] = {.convolved = read(convolved), .scanned = read(scanned)};
    }
    return out;
  }

 private:
  [[nodiscard]] Values read(const Matrix& matrix) const {
    Values values(static_cast<std::size_t>(matrix.rows) * static_cast<std::size_t>(matrix.columns));
    ops_.read(matrix, values);
    return values;
  }

  RecurrentShape shape_;
  ReferenceOps ops_;
};

}  // namespace rubato::engine::cuda
