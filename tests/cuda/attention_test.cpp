// SPDX-License-Identifier: Apache-2.0
// Attention on the device: against the reference over dtypes, head shapes and ragged steps, and bit for bit whatever the chunk,
// the companions, the blocks, the grid and the room for partial results. Every slot of the cache that was never written holds
// NaN.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <map>
#include <numeric>
#include <optional>
#include <random>
#include <tuple>

#include "engine/cuda/attention_work.h"
#include "engine/reference/ops.h"
#include "tests/cuda/device_rows.h"

namespace rubato::engine::cuda {
namespace {

struct Model {
  DataType dtype = DataType::BFloat16;
  std::int32_t heads = 0;
  std::int32_t kv_heads = 0;
  std::int32_t head_size = 0;

  [[nodiscard]] std::string text() const {
    return element_name(dtype) + " " + std::to_string(heads) + "/" + std::to_string(kv_heads) + " of " +
           std::to_string(head_size);
  }
  [[nodiscard]] std::int32_t columns() const { return heads * head_size; }
};

constexpr std::int32_t max_position = 1400;

/// What a sequence's tokens ask and hold, by position, and the blocks it owns.
struct Sequence {
  std::int32_t length = 0;
  Values queries;  // (length, heads * head_size)
  Values keys;     // (length, kv_heads * head_size)
  Values values;
  std::vector<std::int32_t> blocks;
};

/// One row of a step.
struct Part {
  std::size_t sequence = 0;
  std::int32_t position = 0;
  std::int32_t count = 0;
};

struct StepOptions {
  std::int32_t multiprocessors = 3;
  std::optional<std::int32_t> partial_units = std::nullopt;  // fewer than the scratch holds
  std::int32_t padding = 3;                                  // tokens and rows
};

std::vector<Sequence> draw_sequences(const Model& model, const std::vector<std::int32_t>& lengths, std::uint64_t seed,
                                     float scale = 1.0F) {
  std::vector<Sequence> sequences;
  for (std::size_t i = 0; i < lengths.size(); ++i) {
    const std::int64_t held = std::int64_t{lengths[i]} * model.kv_heads * model.head_size;
    sequences.push_back({.length = lengths[i],
                         .queries = draw(model.dtype, std::int64_t{lengths[i]} * model.columns(), seed * 100 + i * 3, scale),
                         .keys = draw(model.dtype, held, seed * 100 + i * 3 + 1, scale),
                         .values = draw(model.dtype, held, seed * 100 + i * 3 + 2),
                         .blocks = {}});
  }
  return sequences;
}

/// Blocks in the cache: what the sequences hold, and a few that nobody does.
std::int32_t blocks_for(const std::vector<Sequence>& sequences) {
  std::int32_t count = 5;
  for (const Sequence& sequence : sequences) count += ceil_divide(sequence.length, kv_block_tokens);
  return count;
}

/// Gives every sequence blocks of its own in an order that the seed chooses.
void assign_blocks(std::vector<Sequence>& sequences, std::uint64_t seed) {
  std::vector<std::int32_t> order(static_cast<std::size_t>(blocks_for(sequences)));
  std::iota(order.begin(), order.end(), 0);
  std::mt19937_64 generator(seed);
  std::shuffle(order.begin(), order.end(), generator);
  for (Sequence& sequence : sequences) {
    sequence.blocks.clear();
    for (std::int32_t block = 0; block * kv_block_tokens < sequence.length; ++block) {
      sequence.blocks.push_back(order.back());
      order.pop_back();
    }
  }
}

/// One layer's cache that holds the first written[i] tokens of sequence i and NaN everywhere else.
std::vector<std::byte> make_cache(const Model& model, const std::vector<Sequence>& sequences,
                                  const std::vector<std::int32_t>& written) {
  const std::int64_t row_bytes = model.head_size * element_size(model.dtype);
  std::vector<std::byte> cache(
      static_cast<std::size_t>((blocks_for(sequences) + 1) * model.kv_heads * 2 * kv_block_tokens * row_bytes), std::byte{0xFF});
  for (std::size_t i = 0; i < sequences.size(); ++i) {
    const Sequence& sequence = sequences[i];
    for (const Values* held : {&sequence.keys, &sequence.values}) {
      const std::vector<std::byte> bytes = encode(model.dtype, *held);
      for (std::int32_t position = 0; position < written[i]; ++position) {
        const std::int64_t block = sequence.blocks[static_cast<std::size_t>(position / kv_block_tokens)];
        for (std::int32_t head = 0; head < model.kv_heads; ++head) {
          const std::int64_t row = ((block * model.kv_heads + head) * 2 + (held == &sequence.keys ? 0 : 1)) * kv_block_tokens +
                                   position % kv_block_tokens;
          std::memcpy(cache.data() + row * row_bytes, bytes.data() + (std::int64_t{position} * model.kv_heads + head) * row_bytes,
                      static_cast<std::size_t>(row_bytes));
        }
      }
    }
  }
  return cache;
}

/// One step's attention, ready to be queued: cache, metadata, queries, plan.
struct Step {
  std::int32_t tokens = 0;
  DeviceVector<std::byte> cache;
  std::optional<DeviceBatch> batch;
  std::optional<DeviceRows> query;
  std::optional<DeviceRows> out;
  DeviceMemory scratch;
  AttentionPlan plan;
};

class AttentionTest : public DeviceTest {
 protected:
  [[nodiscard]] Step prepare(const Model& model, const std::vector<Sequence>& sequences, const std::vector<Part>& parts,
                             const StepOptions& options) const {
    Step step;
    std::vector<std::int32_t> written(sequences.size());
    std::vector<BatchRow> rows;
    Values queries;
    for (const Part& part : parts) {
      const Sequence& sequence = sequences[part.sequence];
      const std::int32_t end = part.position + part.count;
      written[part.sequence] = std::max(written[part.sequence], end);
      const auto blocks =
          static_cast<std::ptrdiff_t>((end + kv_block_tokens - 1) / kv_block_tokens);  // exactly those it may read
      rows.push_back({.token_ids = std::vector<std::int32_t>(static_cast<std::size_t>(part.count)),
                      .position = part.position,
                      .blocks = {sequence.blocks.begin(), sequence.blocks.begin() + blocks}});
      queries.insert(queries.end(), sequence.queries.begin() + std::int64_t{part.position} * model.columns(),
                     sequence.queries.begin() + std::int64_t{end} * model.columns());
      step.tokens += part.count;
    }
    const std::int32_t bucket = step.tokens + options.padding;
    const std::int32_t max_rows = static_cast<std::int32_t>(rows.size()) + options.padding;
    queries.resize(static_cast<std::size_t>(bucket) * static_cast<std::size_t>(model.columns()),
                   std::numeric_limits<float>::quiet_NaN());
    step.cache = DeviceVector<std::byte>(stream(), make_cache(model, sequences, written));
    step.batch.emplace(stream(), rows,
                       BatchRoom{.tokens = bucket, .rows = std::max(max_rows, 1), .block_count = blocks_for(sequences)});
    step.query.emplace(stream(), model.dtype, bucket, model.columns(), queries, RowLayout{.gap = 8});
    step.out.emplace(stream(), model.dtype, bucket, model.columns(), RowLayout{.gap = 16});
    const CacheShape shape{
        .heads = model.heads, .kv_heads = model.kv_heads, .head_size = model.head_size, .block_count = blocks_for(sequences)};
    step.scratch = DeviceMemory::make(attention_scratch_size(shape, bucket, std::max(max_rows, 1), max_position).bytes).value();
    step.plan = make_attention_plan(model.dtype, shape, bucket, std::max(max_rows, 1), max_position, options.multiprocessors,
                                    step.scratch.data())
                    .value();
    if (options.partial_units) step.plan.partial_units = std::min(step.plan.partial_units, *options.partial_units);
    return step;
  }

  void queue_attention(const Step& step) const {
    attention(queue(), step.plan, step.batch->view(), step.query->activations(), step.cache.data(), step.out->activations());
  }

  /// The result's real rows. Padding rows must be as they were.
  [[nodiscard]] Values read(const Step& step) const {
    Values values = step.out->read(stream());
    const auto real =
        static_cast<std::size_t>(step.tokens) * static_cast<std::size_t>(step.plan.shape.heads * step.plan.shape.head_size);
    EXPECT_TRUE(std::all_of(values.begin() + static_cast<std::ptrdiff_t>(real), values.end(), [](float x) {
      return std::isnan(x);
    })) << "padding rows were written";
    values.resize(real);
    return values;
  }

  [[nodiscard]] Values run(const Model& model, const std::vector<Sequence>& sequences, const std::vector<Part>& parts,
                           const StepOptions& options = {}) const {
    const Step step = prepare(model, sequences, parts, options);
    plan_attention(queue(), step.plan, step.batch->view());
    queue_attention(step);
    return read(step);
  }

  template <class Value>
  [[nodiscard]] std::vector<Value> fetch(const Value* from, std::int64_t count) const {
    std::vector<Value> values(static_cast<std::size_t>(count));
    if (count > 0) copy_and_wait(stream(), values.data(), from, values.size() * sizeof(Value), cudaMemcpyDeviceToHost);
    return values;
  }
};

/// The reference's result of one part: q and k pass its rope unturned.
Values reference(const Model& model, const Sequence& sequence, const Part& part) {
  ReferenceOps ops(DataType::Float32);
  const std::int32_t end = part.position + part.count;
  std::vector<BlockId> blocks;
  for (std::int32_t block = 0; block * kv_block_tokens < end; ++block) blocks.push_back({block});
  const AttentionShape shape{.layers = 1,
                             .heads = model.heads,
                             .kv_heads = model.kv_heads,
                             .head_size = model.head_size,
                             .block_count = static_cast<std::int32_t>(blocks.size()),
                             .max_position = end};
  const std::size_t angles = static_cast<std::size_t>(end) * static_cast<std::size_t>(model.head_size / 2);
  EXPECT_TRUE(ops.make_cache(shape, Values(angles, 1.0F), Values(angles, 0.0F)));
  const Matrix qkv = ops.allocate(end, shape.qkv_columns(), Format::Accumulator).value();
  const Matrix query = ops.allocate(end, model.columns(), Format::Activation).value();
  const std::int64_t held = std::int64_t{model.kv_heads} * model.head_size;
  for (std::int64_t row = 0; row < end; ++row) {
    float* to = static_cast<float*>(qkv.data) + row * qkv.stride;
    std::copy_n(sequence.queries.begin() + row * model.columns(), model.columns(), to);
    std::copy_n(sequence.keys.begin() + row * held, held, to + model.columns());
    std::copy_n(sequence.values.begin() + row * held, held, to + model.columns() + held);
  }
  const SequenceSpan all{.first = 0, .count = end, .position = 0, .blocks = blocks};
  ops.rope_and_store(qkv, 0, std::span(&all, 1), std::nullopt, query);
  const SequenceSpan asked{.first = part.position, .count = part.count, .position = part.position, .blocks = blocks};
  const Matrix out = ops.allocate(end, model.columns(), Format::Activation).value();
  ops.attention(query, 0, std::span(&asked, 1), out);
  const float* first = static_cast<const float*>(out.data) + part.position * out.stride;
  return {first, first + std::int64_t{part.count} * out.stride};
}

/// Weights and the result are rounded to dtype once each; F32 differs by the order of sums and by exp2.
float tolerance(DataType dtype) {
  return dtype == DataType::Float32 ? 1e-5F : 2.0F * element_epsilon(dtype);
}

/// Every path: fragments of each head size, and plain lanes.
std::vector<Model> models() {
  std::vector<Model> all;
  for (const DataType dtype : {DataType::BFloat16, DataType::Float16}) {
    all.push_back({dtype, 14, 2, 64});
    all.push_back({dtype, 3, 3, 80});
    all.push_back({dtype, 4, 1, 96});
    all.push_back({dtype, 8, 2, 128});
    all.push_back({dtype, 4, 1, 256});
    all.push_back({dtype, 4, 2, 8});
  }
  all.push_back({DataType::Float32, 2, 1, 2});
  all.push_back({DataType::Float32, 8, 2, 16});
  all.push_back({DataType::Float32, 7, 1, 64});
  all.push_back({DataType::BFloat16, 3, 1, 200});
  all.push_back({DataType::BFloat16, 70, 1, 64});  // more heads in a group than rows in a tile
  all.push_back({DataType::Float32, 70, 1, 6});
  return all;
}

TEST_F(AttentionTest, matches_the_reference_in_chunks_and_decodes) {
  for (const Model& model : models()) {
    SCOPED_TRACE(model.text());
    std::vector<Sequence> sequences = draw_sequences(model, {90, 40, 1, 600}, 1);
    assign_blocks(sequences, 1);
    const std::vector<Part> parts{{0, 17, 70}, {1, 39, 1}, {2, 0, 1}, {3, 590, 3}};
    const Values got = run(model, sequences, parts);
    Values want;
    for (const Part& part : parts) {
      const Values of_part = reference(model, sequences[part.sequence], part);
      want.insert(want.end(), of_part.begin(), of_part.end());
    }
    EXPECT_LT(relative_error(got, want), tolerance(model.dtype));
  }
}

TEST_F(AttentionTest, the_largest_head_runs_on_plain_lanes) {
  const Model model{DataType::Float32, 1, 1, attention_head_size_max};
  std::vector<Sequence> sequences = draw_sequences(model, {40}, 1);
  assign_blocks(sequences, 1);
  EXPECT_LT(relative_error(run(model, sequences, {{0, 30, 10}}), reference(model, sequences[0], {0, 30, 10})),
            tolerance(model.dtype));
}

/// 1 / sqrt(64) is a power of two: twice the scale is twice the query, bit for bit.
TEST_F(AttentionTest, scores_are_scaled_as_the_plan_says) {
  for (const Model& model : {Model{DataType::BFloat16, 4, 1, 64}, Model{DataType::Float32, 2, 1, 64}}) {
    SCOPED_TRACE(model.text());
    std::vector<Sequence> sequences = draw_sequences(model, {70}, 5);
    assign_blocks(sequences, 1);
    const auto scaled = [&](std::optional<float> scale) {
      Step step = prepare(model, sequences, {{0, 30, 40}}, {});
      step.plan.scale = scale;
      plan_attention(queue(), step.plan, step.batch->view());
      queue_attention(step);
      return read(step);
    };
    const Values plain = scaled(std::nullopt);
    EXPECT_TRUE(same_bits(scaled(0.125F), plain));
    const Values twice = scaled(0.25F);
    EXPECT_FALSE(same_bits(twice, plain));
    for (float& value : sequences[0].queries) value *= 2;
    EXPECT_TRUE(same_bits(scaled(std::nullopt), twice));
  }
}

TEST_F(AttentionTest, scores_beyond_the_range_of_exp_stay_exact) {
  for (const Model& model : {Model{DataType::BFloat16, 4, 1, 64}, Model{DataType::Float32, 2, 1, 16}}) {
    SCOPED_TRACE(model.text());
    std::vector<Sequence> sequences = draw_sequences(model, {70}, 5, 8.0F);  // scores of some hundreds
    assign_blocks(sequences, 1);
    EXPECT_LT(relative_error(run(model, sequences, {{0, 0, 70}}), reference(model, sequences[0], {0, 0, 70})),
              std::max(tolerance(model.dtype), 1e-3F));  // the rounding of such scores, as an error of the weights
  }
}

/// Models whose bits are compared: both kinds of strips for each tile length, plain lanes, groups of 1, 4 and 7.
std::vector<Model> compared_models() {
  return {{DataType::BFloat16, 7, 1, 64},
          {DataType::Float16, 4, 1, 128},
          {DataType::BFloat16, 2, 2, 80},
          {DataType::BFloat16, 4, 1, 256},
          {DataType::Float32, 4, 1, 8}};
}

/// Results by token, each token alone in its step, with NaN in all that comes after it.
class Expected {
 public:
  Expected(std::size_t columns) : columns_(columns) {}
  void add(const Part& part, const Values& values) {
    for (std::int32_t i = 0; i < part.count; ++i) {
      const auto from = values.begin() + static_cast<std::ptrdiff_t>(columns_ * static_cast<std::size_t>(i));
      tokens_[{part.sequence, part.position + i}] = {from, from + static_cast<std::ptrdiff_t>(columns_)};
    }
  }
  /// Compares each token that is known, in a step's result.
  void expect_same(const std::vector<Part>& parts, const Values& got) const {
    std::size_t at = 0;
    std::size_t known = 0;
    for (const Part& part : parts) {
      for (std::int32_t i = 0; i < part.count; ++i, ++at) {
        const auto found = tokens_.find({part.sequence, part.position + i});
        if (found == tokens_.end()) continue;
        ++known;
        EXPECT_TRUE(same_bits(std::span(got).subspan(at * columns_, columns_), found->second))
            << "sequence " << part.sequence << " position " << part.position + i << " in a part of " << part.count << " from "
            << part.position;
      }
    }
    EXPECT_GT(known, 0U);
  }

 private:
  std::size_t columns_;
  std::map<std::pair<std::size_t, std::int32_t>, Values> tokens_;
};

/// Positions around the edges of blocks, tiles and splits.
const std::vector<std::int32_t> edge_positions{0,   1,   15,  16,  31,  32,  63,   64,   65,  99,
                                               127, 128, 500, 511, 512, 513, 1023, 1024, 1030};

class AttentionBitsTest : public AttentionTest {
 protected:
  /// Each edge position of sequence 0 and a few of the others, alone.
  [[nodiscard]] Expected alone(const Model& model, const std::vector<Sequence>& sequences) const {
    Expected expected(static_cast<std::size_t>(model.columns()));
    for (std::size_t i = 0; i < sequences.size(); ++i) {
      for (const std::int32_t position : edge_positions) {
        if (position >= sequences[i].length || (i > 0 && position % 2 != 0)) continue;
        const Part part{i, position, 1};
        expected.add(part, run(model, sequences, {part}, {.multiprocessors = 1, .partial_units = 0}));
      }
    }
    return expected;
  }
};

TEST_F(AttentionBitsTest, do_not_depend_on_how_a_prompt_was_cut) {
  for (const Model& model : compared_models()) {
    SCOPED_TRACE(model.text());
    std::vector<Sequence> sequences = draw_sequences(model, {1031}, 2);
    assign_blocks(sequences, 2);
    const Expected expected = alone(model, sequences);
    std::mt19937_64 generator(3);
    for (const std::int32_t chunk : {7, 64, 100, 0}) {  // 0: random
      SCOPED_TRACE("chunks of " + std::to_string(chunk));
      // Windows around the edges; what lies between them is in the cache already.
      for (const auto& [begin, end] : {std::pair{0, 130}, std::pair{498, 520}, std::pair{1019, 1031}}) {
        for (std::int32_t position = begin; position < end;) {
          const std::int32_t size = chunk > 0 ? chunk : 1 + static_cast<std::int32_t>(generator() % 90);
          const std::vector<Part> parts{{0, position, std::min(size, end - position)}};
          const bool compared = std::any_of(edge_positions.begin(), edge_positions.end(), [&](std::int32_t edge) {
            return edge >= position && edge < position + parts[0].count;
          });
          if (compared) expected.expect_same(parts, run(model, sequences, parts));
          position += parts[0].count;
        }
      }
    }
  }
}

TEST_F(AttentionBitsTest, do_not_depend_on_companions_or_blocks) {
  for (const Model& model : compared_models()) {
    SCOPED_TRACE(model.text());
    std::vector<Sequence> sequences = draw_sequences(model, {514, 130, 70}, 4);
    assign_blocks(sequences, 1);
    const Expected expected = alone(model, sequences);
    for (const std::uint64_t seed : {2U, 3U}) {
      SCOPED_TRACE("seed " + std::to_string(seed));
      std::mt19937_64 generator(seed);
      assign_blocks(sequences, seed);
      std::vector<Part> parts;
      for (std::size_t i = 0; i < sequences.size(); ++i) {
        for (const std::int32_t position : edge_positions) {
          if (position >= sequences[i].length || generator() % 3 != 0) continue;
          const std::int32_t room = std::min(sequences[i].length - position, 40);
          parts.push_back(
              {i, position, generator() % 2 == 0 ? 1 : 1 + static_cast<std::int32_t>(generator() % static_cast<unsigned>(room))});
        }
      }
      std::shuffle(parts.begin(), parts.end(), generator);
      ASSERT_FALSE(parts.empty());
      expected.expect_same(parts, run(model, sequences, parts, {.padding = static_cast<std::int32_t>(generator() % 20)}));
    }
  }
}

TEST_F(AttentionBitsTest, do_not_depend_on_the_grid_or_on_room_for_partial_results) {
  for (const Model& model : compared_models()) {
    SCOPED_TRACE(model.text());
    std::vector<Sequence> sequences = draw_sequences(model, {1031, 130}, 6);
    assign_blocks(sequences, 1);
    const std::vector<Part> parts{{0, 1000, 31}, {1, 129, 1}, {0, 1030, 1}, {0, 513, 1}, {1, 60, 30}};
    const Values serial = run(model, sequences, parts, {.multiprocessors = 1, .partial_units = 0});
    for (const std::int32_t multiprocessors : {1, 3, 132}) {
      for (const std::optional<std::int32_t> units : {std::optional<std::int32_t>{}, std::optional{3}, std::optional{7}}) {
        if (multiprocessors != 3 && units) continue;
        SCOPED_TRACE(std::to_string(multiprocessors) + " multiprocessors, units " + (units ? std::to_string(*units) : "all"));
        EXPECT_TRUE(
            same_bits(run(model, sequences, parts, {.multiprocessors = multiprocessors, .partial_units = units}), serial));
      }
    }
  }
}

/// The results of single splits, in F32: what rounding to 16 bits would hide. Some positions' as decodes, all as one chunk.
TEST_F(AttentionTest, partial_results_of_decodes_and_chunks_have_the_same_bits) {
  for (const Model& model :
       {Model{DataType::BFloat16, 7, 1, 64}, Model{DataType::BFloat16, 4, 2, 80}, Model{DataType::Float16, 4, 1, 96},
        Model{DataType::BFloat16, 4, 1, 128}, Model{DataType::Float16, 3, 1, 256}, Model{DataType::Float32, 4, 1, 8}}) {
    SCOPED_TRACE(model.text());
    std::vector<Sequence> sequences = draw_sequences(model, {570}, 8);
    assign_blocks(sequences, 1);
    // (position, head, first split) -> values, largest, sum
    using Partials = std::map<std::tuple<std::int32_t, std::int32_t, std::int32_t>, Values>;
    const auto partials_of = [&](const std::vector<Part>& parts) {
      const Step step = prepare(model, sequences, parts, {.multiprocessors = 40});
      plan_attention(queue(), step.plan, step.batch->view());
      queue_attention(step);
      const AttentionScratch scratch = attention_scratch(step.plan);
      const std::int32_t unit_rows = attention_tiling(model.dtype, model.head_size).unit_rows;
      const std::int64_t row_floats = model.head_size + 2;
      const Values floats =
          fetch(scratch.partials, std::int64_t{step.plan.partial_units} * model.kv_heads * unit_rows * row_floats);
      const std::int32_t group = model.heads / model.kv_heads;
      Partials partials;
      for (const AttentionTask& task : fetch(scratch.tasks, fetch(scratch.counters, 1)[0].tasks)) {
        EXPECT_EQ(task.parts, 2);
        const std::int32_t units = ceil_divide(task.rows, unit_rows);
        for (std::int32_t kv_head = 0; kv_head < model.kv_heads; ++kv_head) {
          const std::int64_t unit = std::int64_t{task.unit + task.part * units} * model.kv_heads + kv_head * units;
          for (std::int32_t row = 0; row < task.rows; ++row) {
            const std::int32_t packed = task.first + row;
            const std::span<const float> of_row = row_of(floats, unit * unit_rows + row, row_floats);
            partials[{task.position + packed / group, kv_head * group + packed % group, task.split_begin}] = {of_row.begin(),
                                                                                                              of_row.end()};
          }
        }
      }
      return partials;
    };
    const Partials chunk = partials_of({{0, 530, 40}});
    const Partials decodes = partials_of({{0, 530, 1}, {0, 531, 1}, {0, 543, 1}, {0, 544, 1}, {0, 569, 1}});
    EXPECT_EQ(chunk.size(), static_cast<std::size_t>(40 * model.heads * 2));
    EXPECT_EQ(decodes.size(), static_cast<std::size_t>(5 * model.heads * 2));
    for (const auto& [key, want] : decodes) {
      EXPECT_EQ(chunk.at(key), want) << "position " << std::get<0>(key) << " split "
                                     << std::get<2>(key);  // zeros may differ in sign
    }
  }
}

TEST_F(AttentionTest, one_list_serves_every_layer_and_every_replay) {
  const Model model{DataType::BFloat16, 4, 2, 64};
  std::vector<Sequence> sequences = draw_sequences(model, {1031, 130}, 7);
  assign_blocks(sequences, 1);
  const std::vector<Part> parts{{0, 1030, 1}, {1, 100, 30}};
  const Step step = prepare(model, sequences, parts, {});
  const auto queue_step = [&] {
    plan_attention(queue(), step.plan, step.batch->view());
    queue_attention(step);
    const Activations out = step.out->activations();
    const auto bytes = static_cast<std::size_t>(out.count * out.stride * element_size(model.dtype));
    ASSERT_EQ(cudaMemsetAsync(out.data, 0xFF, bytes, queue()), cudaSuccess);  // the next layer writes all of it again
    queue_attention(step);
  };
  queue_step();
  const Values eager = read(step);
  EXPECT_TRUE(same_bits(eager, run(model, sequences, parts)));
  const AttentionCounters counters = fetch(attention_scratch(step.plan).counters, 1)[0];
  EXPECT_EQ(counters.taken, 0);
  EXPECT_EQ(counters.left, 0);
  Result<Graph> graph = Graph::capture(stream(), [&]() -> Result<void> {
    queue_step();
    return {};
  });
  ASSERT_TRUE(graph) << graph.error().message;
  for (int i = 0; i < 2; ++i) {
    ASSERT_TRUE(graph->launch(stream()));
    EXPECT_TRUE(same_bits(read(step), eager));
  }
}

TEST_F(AttentionTest, a_step_without_rows_does_nothing) {
  const Model model{DataType::BFloat16, 4, 2, 64};
  std::vector<Sequence> sequences = draw_sequences(model, {16}, 7);
  assign_blocks(sequences, 1);
  EXPECT_TRUE(run(model, sequences, {}).empty());
}

/// The work list of a step.
class AttentionPlanTest : public AttentionTest {
 protected:
  struct List {
    std::vector<AttentionTask> tasks;
    AttentionPlan plan;
    AttentionTiling tiling;
  };
  [[nodiscard]] List list(const Model& model, const std::vector<Part>& parts, const StepOptions& options) const {
    std::vector<std::int32_t> lengths;
    for (const Part& part : parts) lengths.push_back(part.position + part.count);
    std::vector<Sequence> sequences = draw_sequences(model, lengths, 1);
    assign_blocks(sequences, 1);
    const Step step = prepare(model, sequences, parts, options);
    plan_attention(queue(), step.plan, step.batch->view());
    const AttentionScratch scratch = attention_scratch(step.plan);
    const std::int32_t count = fetch(scratch.counters, 1)[0].tasks;
    return {.tasks = fetch(scratch.tasks, count), .plan = step.plan, .tiling = attention_tiling(model.dtype, model.head_size)};
  }
};

TEST_F(AttentionPlanTest, covers_every_row_and_split_once) {
  for (const Model& model : {Model{DataType::BFloat16, 7, 1, 64}, Model{DataType::Float32, 4, 2, 16}}) {
    for (const std::int32_t units : {0, 5, 40, 10000}) {
      for (const std::int32_t multiprocessors : {1, 132}) {
        SCOPED_TRACE(model.text() + " units " + std::to_string(units));
        const std::vector<Part> parts{{0, 1390, 10}, {1, 0, 70}, {2, 700, 1}, {3, 0, 0}, {4, 511, 1}, {5, 512, 1}, {6, 520, 50}};
        const List got = list(model, parts, {.multiprocessors = multiprocessors, .partial_units = units});
        const std::int32_t group = model.heads / model.kv_heads;
        // (token of the row, packed row) -> splits seen
        std::map<std::pair<std::int32_t, std::int32_t>, std::vector<std::int32_t>> seen;
        std::vector<std::int32_t> taken(static_cast<std::size_t>(got.plan.partial_units));
        for (const AttentionTask& task : got.tasks) {
          ASSERT_GT(task.rows, 0);
          ASSERT_LE(task.rows, got.tiling.tile_rows);
          ASSERT_LT(task.split_begin, task.split_end);
          EXPECT_EQ(task.end, task.position + (task.first + task.rows - 1) / group + 1);
          for (std::int32_t row = task.first; row < task.first + task.rows; ++row) {
            for (std::int32_t split = task.split_begin; split < task.split_end; ++split) seen[{task.token, row}].push_back(split);
          }
          if (task.parts == 1) continue;
          const std::int32_t each = ceil_divide(task.rows, got.tiling.unit_rows);
          for (std::int32_t unit = 0; unit < each; ++unit)
            ++taken.at(static_cast<std::size_t>(task.unit + task.part * each + unit));
        }
        EXPECT_TRUE(std::all_of(taken.begin(), taken.end(), [](std::int32_t count) { return count <= 1; }));
        std::size_t rows = 0;
        std::int32_t token = 0;
        for (const Part& part : parts) {
          for (std::int32_t row = 0; row < part.count * group; ++row, ++rows) {
            std::vector<std::int32_t> splits = seen[{token, row}];
            std::sort(splits.begin(), splits.end());
            const std::int32_t needed = ceil_divide(part.position + row / group + 1, attention_split);
            ASSERT_GE(static_cast<std::int32_t>(splits.size()), needed);
            for (std::size_t i = 0; i < splits.size(); ++i) ASSERT_EQ(splits[i], static_cast<std::int32_t>(i));
          }
          token += part.count;
        }
        EXPECT_EQ(seen.size(), rows);
      }
    }
  }
}

TEST_F(AttentionPlanTest, runs_splits_in_parallel_where_blocks_would_idle_and_one_after_another_where_not) {
  const Model model{DataType::BFloat16, 8, 2, 64};
  const std::vector<Part> lone{{0, 1399, 1}};
  EXPECT_EQ(list(model, lone, {.multiprocessors = 132}).tasks.size(), 3U);
  EXPECT_EQ(list(model, lone, {.multiprocessors = 132, .partial_units = 0}).tasks.size(), 1U);
  EXPECT_EQ(list(model, lone, {.multiprocessors = 132, .partial_units = 2}).tasks.size(), 2U);
  // 16 tiles of 64 rows, 3 splits each, on 3 blocks: more than enough for all.
  EXPECT_EQ(list(model, {{0, 1144, 256}}, {.multiprocessors = 1}).tasks.size(), 16U);
}

TEST_F(AttentionPlanTest, lists_the_longest_first) {
  const Model model{DataType::BFloat16, 4, 1, 64};
  const List got = list(model, {{0, 10, 1}, {1, 900, 1}, {2, 300, 1}, {3, 0, 100}, {4, 1200, 1}}, {.partial_units = 0});
  std::int32_t before = max_position;
  for (const AttentionTask& task : got.tasks) {
    const std::int32_t tiles = ceil_divide(task.end, 64);
    EXPECT_LE(tiles, before);
    before = tiles;
  }
}

TEST(AttentionScratch, is_bounded_whatever_the_positions) {
  const CacheShape shape{.heads = 32, .kv_heads = 8, .head_size = 128, .block_count = 1000};
  const std::int64_t bytes = attention_scratch_size(shape, 8192, 256, 1 << 20).bytes;
  EXPECT_GE(bytes, attention_scratch_size(shape, 8192, 256, 4096).bytes);
  const std::int64_t tiles = 8192 * 4 / 8 + 256;
  EXPECT_LE(bytes, (std::int64_t{37} << 20U) + 68 * tiles + 4096);
  const CacheShape tiny{.heads = 1, .kv_heads = 1, .head_size = 2, .block_count = 1000};
  EXPECT_LE(attention_scratch_size(tiny, 8192, 256, 1 << 20).bytes, (std::int64_t{37} << 20U) + 68 * (8192 / 8 + 256) + 4096);
}

TEST(AttentionScratch, a_short_model_takes_no_room_for_partial_results) {
  const CacheShape shape{.heads = 8, .kv_heads = 4, .head_size = 64, .block_count = 10};
  EXPECT_LT(attention_scratch_size(shape, 64, 4, attention_split).bytes, 10000);
}

TEST_F(AttentionTest, shapes_that_no_kernel_takes_are_refused_by_name) {
  std::byte scratch{};
  const auto error_of = [&](const CacheShape& shape) {
    const Result<AttentionPlan> plan = make_attention_plan(DataType::Float32, shape, 8, 2, 100, 1, &scratch);
    return plan ? std::string("accepted") : plan.error().message;
  };
  EXPECT_EQ(error_of({.heads = 2, .kv_heads = 1, .head_size = 7}), "attention: head_size 7 is not an even number from 2 to 1024");
  EXPECT_EQ(error_of({.heads = 2, .kv_heads = 1, .head_size = 1026}),
            "attention: head_size 1026 is not an even number from 2 to 1024");
  EXPECT_EQ(error_of({.heads = 3, .kv_heads = 2, .head_size = 8}), "attention: heads 3 is not a multiple of kv_heads");
  EXPECT_EQ(error_of({.heads = 3, .kv_heads = 0, .head_size = 8}), "attention: kv_heads 0 is not at least 1");
}

}  // namespace
}  // namespace rubato::engine::cuda
