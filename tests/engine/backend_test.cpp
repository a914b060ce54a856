// SPDX-License-Identifier: Apache-2.0
// The CPU backend on whole small models of every kind: equal to the reference within rounding, and equal to itself bit for bit
// whatever the chunks, companions, blocks, threads, preemptions and unwritten memory.
#include "engine/cpu/backend.h"

#include <gtest/gtest.h>

#include <cmath>
#include <ostream>

#include "engine/cpu/ops.h"
#include "engine/reference/backend.h"
#include "tests/engine/backend_harness.h"

namespace rubato::engine {
namespace {

constexpr std::int32_t block_count = 80;
const BackendOptions common_options{
    .block_count = block_count, .max_tokens_per_step = 512, .max_rows = 40, .max_model_len = 512, .poison = true};

struct Case {
  NamedConfig model;
  DataType dtype;
  cpu::KernelPath path;
};

std::string case_name(const Case& one) {
  return one.model.name + (one.dtype == DataType::BFloat16 ? "_bf16" : "_f32") +
         (one.path == cpu::KernelPath::Bfloat16Dot ? "_dot" : "");
}
void PrintTo(const Case& one, std::ostream* out) {
  *out << case_name(one);
}

std::vector<Case> cases() {
  std::vector<Case> all;
  for (const NamedConfig& model : named_configs()) {
    for (const DataType dtype : {DataType::Float32, DataType::BFloat16}) {
      for (const cpu::KernelPath path : cpu::kernel_paths(dtype)) all.push_back({model, dtype, path});
    }
  }
  return all;
}

class BackendTest : public testing::TestWithParam<Case> {
 protected:
  [[nodiscard]] std::unique_ptr<WeightSource> weights() const { return make_synthetic_weights(config(), 7, GetParam().dtype); }
  [[nodiscard]] const ModelConfig& config() const { return GetParam().model.config; }
  [[nodiscard]] BackendOptions options(std::int32_t threads) const {
    BackendOptions options = common_options;
    options.dtype = GetParam().dtype;
    options.threads = threads;
    return options;
  }
  [[nodiscard]] std::unique_ptr<Backend> make_cpu(std::int32_t threads) const {
    return cpu::make_backend(config(), *weights(), options(threads), GetParam().path).value();
  }
  /// Logits after every token of every sequence, each computed alone, token by token, on one thread.
  [[nodiscard]] std::vector<std::map<std::int32_t, Logits>> standard(const std::vector<std::int32_t>& lengths) const {
    Runner runner(make_cpu(1), draw_sequences(lengths, config().vocabulary, block_count, 1));
    std::vector<std::map<std::int32_t, Logits>> all;
    for (std::size_t i = 0; i < lengths.size(); ++i) all.push_back(runner.chunked(i, 1));
    return all;
  }
};

INSTANTIATE_TEST_SUITE_P(Models, BackendTest, testing::ValuesIn(cases()),
                         [](const auto& chosen) { return case_name(chosen.param); });

TEST_P(BackendTest, logits_match_the_reference) {
  const std::vector<Sequence> sequences = draw_sequences({90}, config().vocabulary, block_count, 1);
  Runner cpu(make_cpu(2), sequences);
  Runner reference(make_reference_backend(config(), *weights(), options(1)).value(), sequences);
  const auto got = cpu.chunked(0, 33);
  const auto want = reference.chunked(0, 33);
  ASSERT_EQ(got.size(), want.size());
  const float tolerance = GetParam().dtype == DataType::BFloat16 ? 0.04F : 1e-4F;
  for (const auto& [position, logits] : want) {
    float scale = 0;
    float difference = 0;
    for (std::size_t i = 0; i < logits.size(); ++i) {
      ASSERT_TRUE(std::isfinite(got.at(position)[i]));
      scale = std::max(scale, std::abs(logits[i]));
      difference = std::max(difference, std::abs(logits[i] - got.at(position)[i]));
    }
    EXPECT_GT(scale, 0.0F);
    EXPECT_LE(difference, tolerance * scale) << "position " << position;
  }
}

TEST_P(BackendTest, bits_do_not_depend_on_the_chunk_or_the_threads) {
  const std::vector<std::int32_t> lengths{230};
  const auto want = standard(lengths);
  for (const std::int32_t threads : {1, 2}) {
    for (const std::int32_t chunk : {7, 64, 100, 512}) {
      Runner runner(make_cpu(threads),
                    draw_sequences(lengths, config().vocabulary, block_count, static_cast<std::uint64_t>(chunk)));
      for (const auto& [position, logits] : runner.chunked(0, chunk)) {
        EXPECT_TRUE(same_bits(logits, want[0].at(position)))
            << "chunk " << chunk << " position " << position << " threads " << threads;
      }
    }
  }
}

TEST_P(BackendTest, bits_do_not_depend_on_companions_preemption_or_where_blocks_lie) {
  std::vector<std::int32_t> lengths{120, 70, 33};
  for (std::int32_t i = 0; i < 30; ++i) lengths.push_back(1 + i % 17);
  const auto want = standard(lengths);
  const std::uint64_t seed = 11;
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937_64 generator(seed);
  const std::vector<Sequence> sequences = draw_sequences(lengths, config().vocabulary, block_count, seed);
  Runner runner(make_cpu(2), sequences);
  std::vector<std::int32_t> done(lengths.size());
  bool preempted = false;
  while (done != lengths) {
    std::vector<Part> parts;
    for (std::size_t i = 0; i < lengths.size(); ++i) {
      const std::int32_t left = lengths[i] - done[i];
      if (left == 0 || generator() % 3 == 0) continue;
      const auto count = generator() % 2 == 0 ? 1 : 1 + static_cast<std::int32_t>(generator() % static_cast<std::uint64_t>(left));
      parts.push_back({i, done[i], count});
      done[i] += count;
    }
    if (parts.empty()) continue;
    std::shuffle(parts.begin(), parts.end(), generator);
    const Logits& logits = runner.step(parts);
    const auto size = static_cast<std::size_t>(config().vocabulary);
    for (std::size_t i = 0; i < parts.size(); ++i) {
      EXPECT_TRUE(same_bits(std::span(logits).subspan(i * size, size),
                            want[parts[i].sequence].at(parts[i].position + parts[i].count - 1)))
          << "sequence " << parts[i].sequence << " position " << parts[i].position;
    }
    if (!preempted && done[0] > 60) {  // all its blocks die; it starts again
      preempted = true;
      runner.backend().released(sequences[0].blocks);
      done[0] = 0;
    }
  }
  EXPECT_TRUE(preempted);
}

TEST_P(BackendTest, rows_that_do_not_sample_change_no_bit_and_yield_nothing) {
  const std::vector<std::int32_t> lengths{40, 40};
  const auto want = standard(lengths);
  const std::vector<Sequence> sequences = draw_sequences(lengths, config().vocabulary, block_count, 3);
  const std::unique_ptr<Backend> backend = make_cpu(2);
  backend->capture_logits(true);
  const SamplingState greedy({.temperature = 0.0}, {}, config().vocabulary);
  StepResult result;
  std::vector<StepRow> rows(2);
  for (std::size_t i = 0; i < 2; ++i)
    rows[i] = {.position = 0, .tokens = std::span(sequences[i].tokens).first(39), .blocks = sequences[i].blocks};
  ASSERT_TRUE(backend->run(rows, result));
  EXPECT_TRUE(result.sample_valid.empty());
  EXPECT_TRUE(result.logits.empty());
  for (std::size_t i = 0; i < 2; ++i)
    rows[i] = {.position = 39, .tokens = std::span(sequences[i].tokens).subspan(39), .blocks = sequences[i].blocks};
  rows[1].sampling = &greedy;
  ASSERT_TRUE(backend->run(rows, result));
  ASSERT_EQ(result.sample_valid.size(), 1U);
  EXPECT_TRUE(result.sample_valid[0]);
  const Logits& last = want[1].at(39);
  EXPECT_TRUE(same_bits(result.logits, last));
  EXPECT_EQ(result.samples[0].token, std::max_element(last.begin(), last.end()) - last.begin());
}

}  // namespace
}  // namespace rubato::engine
