// SPDX-License-Identifier: Apache-2.0
// Rope, the paged cache and attention: against the reference over head shapes and ragged steps, and bit for bit under chunking,
// batch companions, block tables, threads and NaN in every slot that was never written.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <numeric>
#include <random>

#include "engine/models/rope.h"
#include "engine/ops.h"
#include "manifests/settings.h"
#include "tests/engine/ops_device.h"

namespace rubato::engine {
namespace {

struct HeadCase {
  std::int32_t heads;
  std::int32_t kv_heads;
  std::int32_t head_size;
};

constexpr std::int32_t max_position = 400;
constexpr std::int32_t block_count = 120;

/// One sequence: its q | k | v per position, and the blocks it owns.
struct Sequence {
  Values qkv;
  std::vector<BlockId> blocks;
};

class AttentionTest : public testing::TestWithParam<Variant> {
 protected:
  static AttentionShape shape_of(const HeadCase& heads) {
    return {.layers = 2,
            .heads = heads.heads,
            .kv_heads = heads.kv_heads,
            .head_size = heads.head_size,
            .block_count = block_count,
            .max_position = max_position};
  }

  static Device ready(Device device, const AttentionShape& shape) {
    const RopeTable rope = make_rope_table({}, shape.head_size, max_position);
    EXPECT_TRUE(device.ops->make_cache(shape, rope.cosines, rope.sines));
    std::vector<BlockId> all;
    for (std::int32_t block = 0; block < block_count; ++block) all.push_back({block});
    device.ops->poison(all);
    return device;
  }

  /// Draws count sequences of the given lengths with disjoint, shuffled blocks.
  static std::vector<Sequence> draw_sequences(const AttentionShape& shape, const std::vector<std::int32_t>& lengths,
                                              std::uint64_t seed) {
    std::vector<std::int32_t> order(block_count);
    std::iota(order.begin(), order.end(), 0);
    std::mt19937_64 generator(seed);
    std::shuffle(order.begin(), order.end(), generator);
    std::vector<Sequence> sequences;
    for (std::size_t i = 0; i < lengths.size(); ++i) {
      Sequence& sequence = sequences.emplace_back();
      sequence.qkv = draw(static_cast<std::size_t>(lengths[i] * shape.qkv_columns()), 100 + i);
      for (std::int32_t block = 0; block * kv_block_tokens < lengths[i]; ++block) {
        sequence.blocks.push_back({order.back()});
        order.pop_back();
      }
    }
    return sequences;
  }

  struct Part {
    std::size_t sequence;
    std::int32_t position;
    std::int32_t count;
  };

  /// One step over parts in layer 1; returns (tokens, heads * head_size).
  static Values step(Device& device, const AttentionShape& shape, const std::vector<Sequence>& sequences,
                     const std::vector<Part>& parts, const std::optional<QueryKeyNorm>& norm) {
    Values qkv;
    std::vector<SequenceSpan> spans;
    std::int32_t first = 0;
    for (const Part& part : parts) {
      const Sequence& sequence = sequences[part.sequence];
      const auto begin = sequence.qkv.begin() + static_cast<std::int64_t>(part.position) * shape.qkv_columns();
      qkv.insert(qkv.end(), begin, begin + static_cast<std::int64_t>(part.count) * shape.qkv_columns());
      // Exactly the blocks that this step may read.
      const auto blocks = static_cast<std::size_t>((part.position + part.count + kv_block_tokens - 1) / kv_block_tokens);
      spans.push_back(
          {.first = first, .count = part.count, .position = part.position, .blocks = std::span(sequence.blocks).first(blocks)});
      first += part.count;
    }
    const Matrix in = device.matrix(first, shape.qkv_columns(), Format::Accumulator, qkv);
    const Matrix query = device.matrix(first, shape.query_columns(), Format::Activation);
    const Matrix out = device.matrix(first, shape.query_columns(), Format::Activation);
    device.ops->rope_and_store(in, 1, spans, norm, query);
    device.ops->attention(query, 1, spans, out);
    return device.read(out);
  }

  static std::optional<QueryKeyNorm> make_norm(Device& device, std::int32_t head_size) {
    return QueryKeyNorm{.query = device.ops->make_norm(draw_tensor({head_size}, 20).view()).value(),
                        .key = device.ops->make_norm(draw_tensor({head_size}, 21).view()).value(),
                        .epsilon = 1e-6F};
  }
};

INSTANTIATE_TEST_SUITE_P(Every, AttentionTest, testing::ValuesIn(variants()),
                         [](const auto& variant) { return variant_name(variant.param); });

const std::vector<HeadCase> head_cases{{1, 1, 2}, {8, 4, 8}, {4, 4, 20}, {14, 2, 64}, {3, 1, 80}, {4, 2, 128}, {70, 1, 6}};

TEST_P(AttentionTest, matches_the_reference_in_chunks_and_decodes) {
  for (const HeadCase& heads : head_cases) {
    const AttentionShape shape = shape_of(heads);
    const std::vector<Sequence> sequences = draw_sequences(shape, {150, 70, 1}, 1);
    for (const bool normed : {false, true}) {
      Device cpu = ready(cpu_device(GetParam(), 2), shape);
      Device reference = ready(reference_device(GetParam().dtype), shape);
      const auto cpu_norm = normed ? make_norm(cpu, shape.head_size) : std::nullopt;
      const auto reference_norm = normed ? make_norm(reference, shape.head_size) : std::nullopt;
      for (const std::vector<Part>& parts : std::vector<std::vector<Part>>{
               {{0, 0, 100}, {1, 0, 33}}, {{1, 33, 1}, {0, 100, 49}, {2, 0, 1}}, {{0, 149, 1}, {1, 34, 36}}}) {
        const Values got = step(cpu, shape, sequences, parts, cpu_norm);
        const Values want = step(reference, shape, sequences, parts, reference_norm);
        EXPECT_LT(relative_error(got, want), cpu.tolerance)
            << heads.heads << "/" << heads.kv_heads << " head " << heads.head_size;
      }
    }
  }
}

TEST_P(AttentionTest, bits_do_not_depend_on_chunks_companions_blocks_or_threads) {
  for (const HeadCase& heads : head_cases) {
    const AttentionShape shape = shape_of(heads);
    const std::vector<std::int32_t> lengths{200, 65, 131};
    const auto row = static_cast<std::size_t>(shape.query_columns());
    // Alone, token by token, one thread: the standard.
    std::vector<Values> want;
    {
      Device device = ready(cpu_device(GetParam(), 1), shape);
      const std::vector<Sequence> sequences = draw_sequences(shape, lengths, 2);
      for (std::size_t i = 0; i < sequences.size(); ++i) {
        Values& all = want.emplace_back();
        for (std::int32_t position = 0; position < lengths[i]; ++position) {
          const Values one = step(device, shape, sequences, {{i, position, 1}}, std::nullopt);
          all.insert(all.end(), one.begin(), one.end());
        }
      }
    }
    for (const std::uint64_t seed : {3U, 4U, 5U}) {
      SCOPED_TRACE("seed " + std::to_string(seed) + " head " + std::to_string(heads.head_size));
      std::mt19937_64 generator(seed);
      Device device = ready(cpu_device(GetParam(), seed % 2 == 0 ? 1 : 2), shape);
      const std::vector<Sequence> sequences = draw_sequences(shape, lengths, 50 + seed);
      std::vector<std::int32_t> done(lengths.size());
      while (done != lengths) {
        std::vector<Part> parts;
        for (std::size_t i = 0; i < lengths.size(); ++i) {
          const std::int32_t left = lengths[i] - done[i];
          if (left == 0 || generator() % 4 == 0) continue;
          const std::int32_t count =
              generator() % 3 == 0 ? 1 : 1 + static_cast<std::int32_t>(generator() % static_cast<unsigned>(left));
          parts.push_back({i, done[i], count});
          done[i] += count;
        }
        if (parts.empty()) continue;
        std::shuffle(parts.begin(), parts.end(), generator);
        const Values got = step(device, shape, sequences, parts, std::nullopt);
        std::size_t at = 0;
        for (const Part& part : parts) {
          const std::size_t size = static_cast<std::size_t>(part.count) * row;
          const float* expected = want[part.sequence].data() + static_cast<std::size_t>(part.position) * row;
          EXPECT_EQ(std::memcmp(got.data() + at, expected, size * sizeof(float)), 0)
              << "sequence " << part.sequence << " tokens " << part.position << "+" << part.count;
          at += size;
        }
      }
    }
  }
}

TEST_P(AttentionTest, scores_are_scaled_as_asked_and_by_the_root_of_the_head_size_otherwise) {
  AttentionShape shape = shape_of({8, 4, 8});
  const std::vector<Sequence> sequences = draw_sequences(shape, {80}, 1);
  const std::vector<Part> parts{{0, 0, 80}};
  Device plain = ready(cpu_device(GetParam(), 2), shape);
  const Values by_default = step(plain, shape, sequences, parts, std::nullopt);
  shape.scale = 1.0F / std::sqrt(8.0F);
  Device same = ready(cpu_device(GetParam(), 2), shape);
  EXPECT_TRUE(same_bits(step(same, shape, sequences, parts, std::nullopt), by_default));
  shape.scale = 0.125F;
  Device other = ready(cpu_device(GetParam(), 2), shape);
  Device reference = ready(reference_device(GetParam().dtype), shape);
  const Values got = step(other, shape, sequences, parts, std::nullopt);
  EXPECT_LT(relative_error(got, step(reference, shape, sequences, parts, std::nullopt)), other.tolerance);
  EXPECT_GT(relative_error(got, by_default), 0.05F);
}

TEST(Rope, llama3_scaling_keeps_short_waves_and_stretches_long_ones) {
  const RopeConfig plain{.theta = 500000.0};
  RopeConfig scaled = plain;
  scaled.scaling = RopeScaling::Llama3;
  scaled.factor = 8.0;
  scaled.low_frequency_factor = 1.0;
  scaled.high_frequency_factor = 4.0;
  scaled.original_max_position = 8192;
  const std::vector<double> before = rope_frequencies(plain, 128);
  const std::vector<double> after = rope_frequencies(scaled, 128);
  EXPECT_EQ(after.front(), before.front());
  EXPECT_EQ(after.back(), before.back() / 8.0);
  // 8192 f / 2 pi turns lie between 1 and 4 exactly for pairs 29 to 34: blended, so strictly between both.
  for (std::size_t i = 0; i < before.size(); ++i) {
    const double turns = 8192.0 * before[i] / (2.0 * 3.14159265358979323846);
    if (turns > 1.0 && turns < 4.0) {
      EXPECT_LT(after[i], before[i]);
      EXPECT_GT(after[i], before[i] / 8.0);
    } else {
      EXPECT_EQ(after[i], turns >= 4.0 ? before[i] : before[i] / 8.0);
    }
  }
}

TEST(Rope, linear_scaling_divides_every_angle) {
  const RopeTable plain = make_rope_table({.theta = 10000.0}, 8, 9);
  const RopeTable scaled = make_rope_table({.theta = 10000.0, .scaling = RopeScaling::Linear, .factor = 4.0}, 8, 9);
  for (std::size_t i = 0; i < 4; ++i) {
    EXPECT_EQ(scaled.cosines[8 * 4 + i], plain.cosines[2 * 4 + i]);
    EXPECT_EQ(scaled.sines[8 * 4 + i], plain.sines[2 * 4 + i]);
  }
}

}  // namespace
}  // namespace rubato::engine
