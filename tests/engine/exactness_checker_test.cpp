// SPDX-License-Identifier: Apache-2.0
// The exactness checker itself: it passes the real backends, and each guard of exactness that is taken out of an engine is caught
// by it, with the layer and token where it first shows.
#include "engine/exactness.h"

#include <gtest/gtest.h>

#include <bit>
#include <cstring>

#include "engine/reference/ops.h"
#include "tests/engine/exactness_matrix.h"

namespace rubato::engine {
namespace {

ExactnessReport check(const ExactnessTarget& target) {
  Result<ExactnessReport> report = check_exactness(target, {}, {});
  EXPECT_TRUE(report) << report.error().message;
  return report ? *report : ExactnessReport{};
}

class CheckedBackend : public testing::TestWithParam<MatrixCase> {};

TEST_P(CheckedBackend, passes_in_every_way) {
  test::MatrixDevice device = make_cpu_matrix_device(GetParam(), 2);
  const ExactnessReport report = check(device.target);
  EXPECT_FALSE(report.failure) << report.text();
  EXPECT_GT(report.cases, 80);
  EXPECT_EQ(report.skipped, 0);
  EXPECT_TRUE(report.text().starts_with("PASS: the same bits in ")) << report.text();
}

INSTANTIATE_TEST_SUITE_P(Models, CheckedBackend, testing::ValuesIn(matrix_cases()), matrix_name);

// ---- guards taken out one by one, in engines that are otherwise the reference

float rounded(float value) {
  return std::bit_cast<float>(std::bit_cast<std::uint32_t>(value) & 0xFFFF0000U);
}

/// A product's sum over the inputs is split in two where many rows are in the step.
class SplitsByBatch final : public ReferenceOps {
 public:
  using ReferenceOps::ReferenceOps;
  void linear(LinearId id, const Matrix& x, const Matrix& out) override {
    if (x.rows <= 8 || out.format != Format::Accumulator) return ReferenceOps::linear(id, x, out);
    const Matrix low = masked(x, 0, x.columns / 2);
    const Matrix high = masked(x, x.columns / 2, x.columns);
    ReferenceOps::linear(id, low, out);
    const Matrix rest = *allocate(out.rows, out.columns, Format::Accumulator);
    ReferenceOps::linear(id, high, rest);
    for (std::int64_t row = 0; row < out.rows; ++row) {
      for (std::int64_t i = 0; i < out.columns; ++i)
        static_cast<float*>(out.data)[row * out.stride + i] += static_cast<float*>(rest.data)[row * rest.stride + i];
    }
  }

 private:
  Matrix masked(const Matrix& x, std::int32_t begin, std::int32_t end) {
    const Matrix copy = *allocate(x.rows, x.columns, x.format);
    for (std::int64_t row = 0; row < x.rows; ++row) {
      std::memcpy(static_cast<float*>(copy.data) + row * copy.stride + begin,
                  static_cast<float*>(x.data) + row * x.stride + begin, static_cast<std::size_t>(end - begin) * sizeof(float));
    }
    return copy;
  }
};

/// Chunks attend with queries of another precision than decodes.
class RoundsChunks final : public ReferenceOps {
 public:
  using ReferenceOps::ReferenceOps;
  void attention(const Matrix& query, std::int32_t layer, std::span<const SequenceSpan> sequences, const Matrix& out) override {
    for (const SequenceSpan& sequence : sequences) {
      for (std::int64_t row = sequence.first; sequence.count > 1 && row < sequence.first + sequence.count; ++row) {
        for (std::int64_t i = 0; i < query.columns; ++i) {
          float& value = static_cast<float*>(query.data)[row * query.stride + i];
          value = rounded(value);
        }
      }
    }
    ReferenceOps::attention(query, layer, sequences, out);
  }
};

/// The scan of a chunk sees inputs of another precision than that of a decode.
class RoundsScans final : public ReferenceOps {
 public:
  using ReferenceOps::ReferenceOps;
  void scan(RecurrentId layer, const Matrix& projected, const Matrix& convolved, std::span<const SequenceSpan> sequences,
            const Matrix& out) override {
    for (const SequenceSpan& sequence : sequences) {
      for (std::int64_t row = sequence.first; sequence.count > 1 && row < sequence.first + sequence.count; ++row) {
        float& value = static_cast<float*>(convolved.data)[row * convolved.stride];
        value = rounded(value);
      }
    }
    ReferenceOps::scan(layer, projected, convolved, sequences, out);
  }
};

/// A snapshot is one token late.
class SavesLate final : public ReferenceOps {
 public:
  using ReferenceOps::ReferenceOps;
  void scan(RecurrentId layer, const Matrix& projected, const Matrix& convolved, std::span<const SequenceSpan> sequences,
            const Matrix& out) override {
    std::vector<SequenceSpan> late(sequences.begin(), sequences.end());
    for (SequenceSpan& sequence : late) {
      if (sequence.state.save && sequence.state.save->tokens < sequence.count) ++sequence.state.save->tokens;
    }
    ReferenceOps::scan(layer, projected, convolved, late, out);
  }
};

/// The convolution forgets what came before a chunk.
class ForgetsInputs final : public ReferenceOps {
 public:
  using ReferenceOps::ReferenceOps;
  void convolve(RecurrentId layer, const Matrix& projected, std::span<const SequenceSpan> sequences, const Matrix& out) override {
    std::vector<SequenceSpan> forgetful(sequences.begin(), sequences.end());
    for (SequenceSpan& sequence : forgetful) {
      if (sequence.count > 1) sequence.state.from.reset();
    }
    ReferenceOps::convolve(layer, projected, forgetful, out);
  }
};

/// A state does not come along when blocks are copied.
class LeavesStates final : public ReferenceOps {
 public:
  using ReferenceOps::ReferenceOps;
  void copy_state(const HostOps&, const StateCopy&) override {}
};

/// One block of a copy is forgotten.
class LeavesBlocks final : public ReferenceOps {
 public:
  using ReferenceOps::ReferenceOps;
  void copy_block(const HostOps& source, const BlockCopy& copy) override {
    if (++copies_ != 3) ReferenceOps::copy_block(source, copy);
  }

 private:
  int copies_ = 0;
};

template <class Faulty>
ExactnessReport check_faulty(std::size_t model) {
  const ModelConfig config = *synthetic_model_config(test::matrix_models()[model].synthetic);
  const BackendOptions options = test::matrix_options(config, DataType::Float32);
  const auto weights = make_synthetic_weights(config, 7, DataType::Float32);
  Result<std::unique_ptr<Backend>> backend =
      HostBackend::make(config, *weights, options, std::make_unique<Faulty>(DataType::Float32), "faulty");
  EXPECT_TRUE(backend) << backend.error().message;
  return check({.lanes = {backend->get()}, .options = options, .prompt_tokens = 70, .new_tokens = 4});
}

constexpr std::size_t llama = 0;
constexpr std::size_t mamba2 = 1;
constexpr std::size_t hybrid = 2;

template <class Faulty>
void expect_caught(std::size_t model, const std::string& layer) {
  const ExactnessReport report = check_faulty<Faulty>(model);
  ASSERT_TRUE(report.failure) << report.text();
  EXPECT_EQ(report.failure->difference.layer, layer) << report.text();
  EXPECT_TRUE(report.text().starts_with("FAIL: other bits at token ")) << report.text();
}

TEST(ExactnessChecker, passes_the_reference) {
  for (const std::size_t model : {llama, mamba2, hybrid}) {
    const ExactnessReport report = check_faulty<ReferenceOps>(model);
    EXPECT_FALSE(report.failure) << report.text();
    EXPECT_GT(report.skipped, 0);  // it has neither a second lane nor shapes
  }
}

TEST(ExactnessChecker, catches_sums_that_are_split_by_the_size_of_the_batch) {
  expect_caught<SplitsByBatch>(llama, "model.layers.0.self_attn.");
  EXPECT_TRUE(check_faulty<SplitsByBatch>(mamba2).failure);
  EXPECT_TRUE(check_faulty<SplitsByBatch>(hybrid).failure);
}

TEST(ExactnessChecker, catches_chunks_of_another_precision) {
  expect_caught<RoundsChunks>(llama, "model.layers.1.self_attn.");  // its keys are the first to follow from layer 0's attention
  EXPECT_TRUE(check_faulty<RoundsScans>(mamba2).failure);
  EXPECT_TRUE(check_faulty<RoundsScans>(hybrid).failure);
}

TEST(ExactnessChecker, catches_a_snapshot_that_is_late) {
  EXPECT_TRUE(check_faulty<SavesLate>(mamba2).failure);
  EXPECT_TRUE(check_faulty<SavesLate>(hybrid).failure);
  EXPECT_FALSE(check_faulty<SavesLate>(llama).failure);
}

TEST(ExactnessChecker, catches_a_convolution_that_forgets) {
  EXPECT_TRUE(check_faulty<ForgetsInputs>(mamba2).failure);
  EXPECT_TRUE(check_faulty<ForgetsInputs>(hybrid).failure);
}

TEST(ExactnessChecker, catches_what_stays_behind_when_a_sequence_moves) {
  EXPECT_TRUE(check_faulty<LeavesStates>(mamba2).failure);
  EXPECT_TRUE(check_faulty<LeavesStates>(hybrid).failure);
  expect_caught<LeavesBlocks>(llama, "model.layers.0.self_attn.");
  EXPECT_TRUE(check_faulty<LeavesBlocks>(hybrid).failure);
}

TEST(ExactnessChecker, says_when_there_is_no_room_to_check_anything) {
  const ModelConfig config = *synthetic_model_config(test::matrix_models()[llama].synthetic);
  BackendOptions options = test::matrix_options(config, DataType::Float32);
  options.block_count = 5;
  const auto weights = make_synthetic_weights(config, 7, DataType::Float32);
  const auto backend = make_cpu_backend(config, *weights, options);
  ASSERT_TRUE(backend);
  const Result<ExactnessReport> report = check_exactness({.lanes = {backend->get()}, .options = options}, {}, {});
  ASSERT_FALSE(report);
  EXPECT_EQ(report.error().code, ErrorCode::InvalidArgument);
}

TEST(ExactnessChecker, keeps_to_the_longest_sequence_that_an_engine_takes) {
  for (const std::size_t model : {llama, mamba2, hybrid}) {
    const ModelConfig config = *synthetic_model_config(test::matrix_models()[model].synthetic);
    BackendOptions options = test::matrix_options(config, DataType::Float32);
    options.max_model_len = 32;
    const auto weights = make_synthetic_weights(config, 7, DataType::Float32);
    const auto backend = make_cpu_backend(config, *weights, options);
    ASSERT_TRUE(backend);
    const ExactnessReport report = check({.lanes = {backend->get()}, .options = options});
    EXPECT_FALSE(report.failure) << report.text();
    EXPECT_GT(report.cases, 0);
  }
}

TEST(ExactnessChecker, stops_when_asked_to) {
  test::MatrixDevice device = make_cpu_matrix_device(matrix_cases().front(), 1);
  std::stop_source stop;
  int cases = 0;
  const Result<ExactnessReport> report = check_exactness(
      device.target,
      [&](const ExactnessCase&) {
        if (++cases == 3) stop.request_stop();
      },
      stop.get_token());
  ASSERT_FALSE(report);
  EXPECT_EQ(report.error().code, ErrorCode::Cancelled);
  EXPECT_EQ(cases, 3);
}

}  // namespace
}  // namespace rubato::engine
