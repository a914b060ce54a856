// SPDX-License-Identifier: Apache-2.0
// Rope with the write to the paged cache: against the formula and the reference, and bit for bit under other rows, padding and
// alignment.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <string>

#include "engine/cuda/kernels.h"
#include "engine/models/rope.h"
#include "engine/reference/ops.h"
#include "tests/cuda/device_rows.h"

namespace rubato::engine::cuda {
namespace {

constexpr float epsilon = 1e-5F;
constexpr RowLayout misaligned{.gap = 3, .offset = 1};

struct HeadCase {
  std::int32_t heads;
  std::int32_t kv_heads;
  std::int32_t head_size;
};

constexpr std::int32_t block_count = 6;
constexpr std::int32_t max_position = 3 * kv_block_tokens;

/// One layer's cache, all NaN, and what a step left in it.
struct RopeStep {
  Values query;  // (tokens, heads * head_size)
  Values cache;  // (blocks and the trash block, kv_heads, key and value, kv_block_tokens, head_size)
};

class RopeTest : public DeviceTest, public testing::WithParamInterface<DataType> {
 protected:
  [[nodiscard]] DataType dtype() const { return GetParam(); }

  struct Inputs {
    HeadCase heads{};
    std::vector<BatchRow> rows;
    Values qkv;  // (bucket, q | k | v)
    bool normed = false;
  };

  static CacheShape shape_of(const HeadCase& heads) {
    return {.heads = heads.heads, .kv_heads = heads.kv_heads, .head_size = heads.head_size, .block_count = block_count};
  }
  static std::int32_t qkv_columns(const HeadCase& heads) { return (heads.heads + 2 * heads.kv_heads) * heads.head_size; }
  static std::int64_t block_elements(const HeadCase& heads) {
    return std::int64_t{heads.kv_heads} * 2 * kv_block_tokens * heads.head_size;
  }
  static Values norm_weight(std::int32_t head_size, std::uint64_t seed) { return draw(DataType::Float32, head_size, seed); }

  RopeStep run(const Inputs& inputs, RowLayout layout = {}) const {
    const CacheShape shape = shape_of(inputs.heads);
    const std::int32_t size = shape.head_size;
    const auto bucket = static_cast<std::int32_t>(inputs.qkv.size()) / qkv_columns(inputs.heads);
    const DeviceRows qkv(stream(), DataType::Float32, bucket, qkv_columns(inputs.heads), inputs.qkv, layout);
    const DeviceRows query(stream(), dtype(), bucket, shape.heads * size, layout);
    const DeviceRows cache(stream(), dtype(), block_count + 1, static_cast<std::int32_t>(block_elements(inputs.heads)));
    const RopeTable table = make_rope_table({}, size, max_position);
    const DeviceVector<float> cosines(stream(), table.cosines);
    const DeviceVector<float> sines(stream(), table.sines);
    const DeviceVector<float> query_norm(stream(), norm_weight(size, 21));
    const DeviceVector<float> key_norm(stream(), norm_weight(size, 22));
    const DeviceBatch batch(stream(), inputs.rows, {.tokens = bucket, .rows = 8, .block_count = block_count});
    const RopeInputs rope{.cosines = cosines.data(),
                          .sines = sines.data(),
                          .query_norm = inputs.normed ? query_norm.data() : nullptr,
                          .key_norm = inputs.normed ? key_norm.data() : nullptr,
                          .epsilon = epsilon};
    rope_and_store(queue(), dtype(), shape, qkv.accumulators(), rope, batch.view(), cache.data(), query.activations());
    return {.query = query.read(stream()), .cache = cache.read(stream())};
  }

  /// One head by the formula, in double.
  static Values rotated(std::span<const float> head, const Values& norm, std::int32_t position) {
    std::vector<double> x(head.begin(), head.end());
    if (!norm.empty()) {
      double squares = 0;
      for (const double value : x) squares += value * value;
      const double scale = 1.0 / std::sqrt(squares / static_cast<double>(x.size()) + epsilon);
      for (std::size_t i = 0; i < x.size(); ++i) x[i] *= scale * norm[i];
    }
    const std::size_t half = x.size() / 2;
    const RopeTable table = make_rope_table({}, static_cast<std::int32_t>(x.size()), position + 1);
    Values out(x.size());
    for (std::size_t i = 0; i < half; ++i) {
      const double cosine = table.cosines[static_cast<std::size_t>(position) * half + i];
      const double sine = table.sines[static_cast<std::size_t>(position) * half + i];
      out[i] = static_cast<float>(x[i] * cosine - x[half + i] * sine);
      out[half + i] = static_cast<float>(x[half + i] * cosine + x[i] * sine);
    }
    return out;
  }

  /// Key (part 0) or value (part 1) of one slot in what run() left.
  static std::span<const float> stored(const RopeStep& step, const HeadCase& heads, std::int32_t block, std::int32_t kv_head,
                                       std::int32_t part, std::int32_t slot) {
    const std::int64_t at =
        block * block_elements(heads) + ((std::int64_t{kv_head} * 2 + part) * kv_block_tokens + slot) * heads.head_size;
    return std::span(step.cache).subspan(static_cast<std::size_t>(at), static_cast<std::size_t>(heads.head_size));
  }

  static std::vector<BatchRow> ragged_rows() {
    return {{.token_ids = {1}, .position = 37, .blocks = {4, 1, 3}},
            {.token_ids = {1, 2, 3, 4, 5}, .position = 14, .blocks = {0, 5}},
            {.token_ids = {1, 2}, .position = 0, .blocks = {2}}};
  }
  static constexpr std::int32_t ragged_tokens = 8;
};

INSTANTIATE_TEST_SUITE_P(Every, RopeTest, testing::ValuesIn(element_types()),
                         [](const auto& type) { return element_name(type.param); });

constexpr HeadCase head_cases[] = {{1, 1, 2}, {3, 1, 6}, {4, 2, 64}, {5, 5, 80}, {8, 2, 128}, {2, 1, 256}};

TEST_P(RopeTest, rotates_normalises_and_stores_as_the_formula_says) {
  for (const HeadCase& heads : head_cases) {
    for (const bool normed : {false, true}) {
      const std::int32_t size = heads.head_size;
      const Inputs inputs{.heads = heads,
                          .rows = ragged_rows(),
                          .qkv = draw(DataType::Float32, ragged_tokens * qkv_columns(heads), 23),
                          .normed = normed};
      const RopeStep step = run(inputs);
      std::int32_t token = 0;
      for (const BatchRow& row : inputs.rows) {
        for (std::size_t i = 0; i < row.token_ids.size(); ++i, ++token) {
          const std::int32_t position = row.position + static_cast<std::int32_t>(i);
          const auto in = row_of(inputs.qkv, token, qkv_columns(heads));
          const auto head_of = [&](std::int32_t head) {
            return in.subspan(static_cast<std::size_t>(head * size), static_cast<std::size_t>(size));
          };
          const auto near = [&](std::span<const float> got, const Values& want, const std::string& what) {
            EXPECT_LT(relative_error(Values(got.begin(), got.end()), want), 2e-6F + element_epsilon(dtype()))
                << what << " of " << heads.heads << "/" << heads.kv_heads << "x" << size << " token " << token;
          };
          for (std::int32_t head = 0; head < heads.heads; ++head) {
            const auto got = row_of(step.query, token, heads.heads * size)
                                 .subspan(static_cast<std::size_t>(head * size), static_cast<std::size_t>(size));
            near(got, rotated(head_of(head), normed ? norm_weight(size, 21) : Values(), position), "query");
          }
          const std::int32_t block = row.blocks[static_cast<std::size_t>(position / kv_block_tokens)];
          const std::int32_t slot = position % kv_block_tokens;
          for (std::int32_t head = 0; head < heads.kv_heads; ++head) {
            near(stored(step, heads, block, head, 0, slot),
                 rotated(head_of(heads.heads + head), normed ? norm_weight(size, 22) : Values(), position), "key");
            const auto value = head_of(heads.heads + heads.kv_heads + head);
            EXPECT_TRUE(
                same_bits(stored(step, heads, block, head, 1, slot), rounded(dtype(), Values(value.begin(), value.end()))));
          }
        }
      }
    }
  }
}

TEST_P(RopeTest, queries_match_the_reference) {
  const HeadCase heads{4, 2, 64};
  const std::int32_t size = heads.head_size;
  ReferenceOps reference(DataType::Float32);
  const RopeTable table = make_rope_table({}, size, max_position);
  ASSERT_TRUE(reference.make_cache({.layers = 1,
                                    .heads = heads.heads,
                                    .kv_heads = heads.kv_heads,
                                    .head_size = size,
                                    .block_count = block_count,
                                    .max_position = max_position},
                                   table.cosines, table.sines));
  const Inputs inputs{
      .heads = heads, .rows = ragged_rows(), .qkv = draw(DataType::Float32, ragged_tokens * qkv_columns(heads), 24)};
  const Matrix qkv = reference.allocate(ragged_tokens, qkv_columns(heads), Format::Accumulator).value();
  std::copy(inputs.qkv.begin(), inputs.qkv.end(), static_cast<float*>(qkv.data));
  std::vector<std::vector<BlockId>> tables;
  for (const BatchRow& row : inputs.rows) {
    tables.emplace_back();
    for (const std::int32_t block : row.blocks) tables.back().push_back({block});
  }
  std::vector<SequenceSpan> spans;
  std::int32_t first = 0;
  for (std::size_t i = 0; i < inputs.rows.size(); ++i) {
    const auto count = static_cast<std::int32_t>(inputs.rows[i].token_ids.size());
    spans.push_back({.first = first, .count = count, .position = inputs.rows[i].position, .blocks = tables[i]});
    first += count;
  }
  const Matrix out = reference.allocate(ragged_tokens, heads.heads * size, Format::Accumulator).value();
  reference.rope_and_store(qkv, 0, spans, {}, out);
  Values expected(static_cast<std::size_t>(ragged_tokens * heads.heads * size));
  reference.read(out, expected);
  EXPECT_LT(relative_error(run(inputs).query, expected), 2e-6F + element_epsilon(dtype()));
}

TEST_P(RopeTest, a_token_has_the_same_bits_alone_in_any_batch_and_at_any_alignment) {
  for (const HeadCase& heads : head_cases) {
    const std::int32_t columns = qkv_columns(heads);
    const Inputs all{
        .heads = heads, .rows = ragged_rows(), .qkv = draw(DataType::Float32, ragged_tokens * columns, 25), .normed = true};
    const RopeStep step = run(all);
    const RopeStep shifted = run(all, misaligned);
    EXPECT_TRUE(same_bits(shifted.query, step.query)) << heads.head_size;
    EXPECT_TRUE(same_bits(shifted.cache, step.cache)) << heads.head_size;
    // The third token of the second row, position 16: first slot of that row's second block.
    const auto in = row_of(all.qkv, 3, columns);
    const RopeStep alone = run({.heads = heads,
                                .rows = {{.token_ids = {3}, .position = 16, .blocks = {0, 5}}},
                                .qkv = Values(in.begin(), in.end()),
                                .normed = true});
    EXPECT_TRUE(same_bits(alone.query, row_of(step.query, 3, heads.heads * heads.head_size))) << heads.head_size;
    for (std::int32_t head = 0; head < heads.kv_heads; ++head) {
      for (const std::int32_t part : {0, 1}) {
        EXPECT_TRUE(same_bits(stored(alone, heads, 5, head, part, 0), stored(step, heads, 5, head, part, 0))) << heads.head_size;
      }
    }
  }
}

TEST_P(RopeTest, padding_tokens_write_to_the_trash_block_alone_and_change_nothing) {
  const HeadCase heads{4, 2, 64};
  const std::int32_t columns = qkv_columns(heads);
  Inputs inputs{.heads = heads, .rows = ragged_rows(), .qkv = draw(DataType::Float32, ragged_tokens * columns, 26)};
  const RopeStep exact = run(inputs);
  inputs.qkv.resize(static_cast<std::size_t>(13 * columns), 1e30F);
  const RopeStep padded = run(inputs);
  const auto real = static_cast<std::size_t>(block_count * block_elements(heads));
  EXPECT_TRUE(same_bits(std::span(padded.cache).first(real), std::span(exact.cache).first(real)));
  EXPECT_TRUE(same_bits(std::span(padded.query).first(exact.query.size()), exact.query));
  const auto trash = std::span(padded.cache).subspan(real);
  EXPECT_TRUE(std::any_of(trash.begin(), trash.end(), [](float value) { return !std::isnan(value); }));
}

TEST_P(RopeTest, slots_that_no_token_owns_are_left_alone) {
  const HeadCase heads{2, 1, 64};
  const Inputs inputs{
      .heads = heads, .rows = ragged_rows(), .qkv = draw(DataType::Float32, ragged_tokens * qkv_columns(heads), 27)};
  const RopeStep step = run(inputs);
  const auto written = std::count_if(step.cache.begin(), step.cache.end(), [](float value) { return !std::isnan(value); });
  EXPECT_EQ(written, ragged_tokens * 2 * heads.kv_heads * heads.head_size);
}

// ---- poison_blocks

TEST_P(RopeTest, poison_fills_the_named_blocks_alone) {
  const HeadCase heads{2, 1, 10};
  const auto elements = static_cast<std::int32_t>(block_elements(heads));
  const DeviceRows cache(stream(), dtype(), block_count + 1, elements,
                         Values(static_cast<std::size_t>((block_count + 1) * elements), 1.0F));
  const DeviceVector<std::int32_t> blocks(stream(), std::vector<std::int32_t>{5, 1});
  poison_blocks(queue(), dtype(), shape_of(heads), blocks.data(), 2, cache.data());
  const Values got = cache.read(stream());
  for (std::int32_t block = 0; block <= block_count; ++block) {
    const bool named = block == 5 || block == 1;
    for (const float value : row_of(got, block, elements)) ASSERT_EQ(std::isnan(value), named) << "block " << block;
  }
}

}  // namespace
}  // namespace rubato::engine::cuda
