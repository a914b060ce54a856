// SPDX-License-Identifier: Apache-2.0
// Whole Mamba2 and hybrid models through the CUDA backend: near the reference, and the same bits of logits, states and cache for
// any chunks, company, slots and shapes, on a sibling, from a snapshot, and in another pool.
#include <gtest/gtest.h>

#include <map>
#include <optional>

#include "engine/cuda/backend.h"
#include "engine/model/config.h"
#include "engine/reference/backend.h"
#include "manifests/names.h"
#include "tests/cuda/on_device.h"
#include "tests/engine/backend_harness.h"

namespace rubato::engine {
namespace {

constexpr std::int32_t block_count = 40;
constexpr std::int32_t state_count = 8;

struct RecurrentCase {
  std::string name;
  SyntheticModel model;
  DataType dtype = DataType::Float32;
};

std::vector<RecurrentCase> recurrent_cases() {
  const SyntheticModel mamba2{.architecture = Architecture::Mamba2,
                              .hidden_size = 40,
                              .layers = 2,
                              .mamba_heads = 4,
                              .mamba_head_size = 20,
                              .mamba_groups = 2,
                              .state_size = 24,
                              .vocabulary = 67};
  const SyntheticModel hybrid{.architecture = Architecture::Hybrid,
                              .hidden_size = 48,
                              .layers = 2,
                              .heads = 4,
                              .kv_heads = 2,
                              .head_size = 8,
                              .feed_forward = 64,
                              .attention_every = 2,
                              .mamba_heads = 3,
                              .mamba_head_size = 16,
                              .state_size = 16,
                              .vocabulary = 67};
  return {{"mamba2_Float32", mamba2, DataType::Float32},
          {"mamba2_BFloat16", mamba2, DataType::BFloat16},
          {"hybrid_Float16", hybrid, DataType::Float16},
          {"hybrid_BFloat16", hybrid, DataType::BFloat16}};
}

/// A sequence's part of a step, and which slots it begins from and ends in. begins from none at position 0.
struct StatePart {
  std::size_t sequence = 0;
  std::int32_t position = 0;
  std::int32_t count = 0;
  std::int32_t from = 0;
  std::int32_t to = 0;
  std::optional<StateUse::Save> save{};
};

class StateRunner {
 public:
  StateRunner(std::unique_ptr<Backend> backend, const std::vector<Sequence>& sequences)
      : backend_(std::move(backend)), sequences_(sequences), sampling_({.temperature = 0.0}, {}, backend_->config().vocabulary) {
    backend_->capture_logits(true);
  }

  const Logits& step(const std::vector<StatePart>& parts) {
    std::vector<StepRow> rows;
    for (const StatePart& part : parts) {
      const Sequence& sequence = sequences_[part.sequence];
      StateUse use{.from = std::nullopt, .to = {part.to}, .save = part.save};
      if (part.position > 0) use.from = StateId{part.from};
      rows.push_back(
          {.position = part.position,
           .tokens =
               std::span(sequence.tokens).subspan(static_cast<std::size_t>(part.position), static_cast<std::size_t>(part.count)),
           .blocks = sequence.blocks,
           .sampling = &sampling_,
           .state = use});
    }
    const Result<void> done = backend_->run(rows, result_);
    CHECK(done, done.error().message);
    return result_.logits;
  }
  /// Logits of one part of a step of several.
  [[nodiscard]] Logits of(std::size_t part) const {
    const auto columns = static_cast<std::ptrdiff_t>(backend_->config().vocabulary);
    const auto first = result_.logits.begin() + static_cast<std::ptrdiff_t>(part) * columns;
    return {first, first + columns};
  }
  /// All of one sequence in chunks, in place in one slot; logits by the position of each chunk's last token.
  std::map<std::int32_t, Logits> chunked(std::size_t sequence, std::int32_t chunk, std::int32_t slot) {
    std::map<std::int32_t, Logits> logits;
    const auto length = static_cast<std::int32_t>(sequences_[sequence].tokens.size());
    for (std::int32_t position = 0; position < length; position += chunk) {
      const std::int32_t count = std::min(chunk, length - position);
      logits[position + count - 1] = step({{sequence, position, count, slot, slot}});
    }
    return logits;
  }
  /// All that the backend keeps of a sequence that is computed up to `tokens`, with its state in a slot.
  [[nodiscard]] std::vector<std::byte> kept(std::size_t sequence, std::int32_t tokens, std::int32_t slot) {
    std::vector<std::byte> bytes;
    const ModelConfig& config = backend_->config();
    for (std::int32_t layer = 0; layer < config.count_of(SublayerKind::Mamba2); ++layer)
      backend_->read_state(layer, {slot}, bytes);
    for (std::int32_t layer = 0; layer < config.count_of(SublayerKind::Attention); ++layer) {
      for (std::int32_t token = 0; token < tokens; ++token) {
        const BlockId block = sequences_[sequence].blocks[static_cast<std::size_t>(token / kv_block_tokens)];
        backend_->read_token(layer, block, token % kv_block_tokens, bytes);
      }
    }
    return bytes;
  }
  Backend& backend() { return *backend_; }
  StepResult& result() { return result_; }

 private:
  std::unique_ptr<Backend> backend_;
  std::vector<Sequence> sequences_;
  SamplingState sampling_;
  StepResult result_;
};

class CudaRecurrent : public OnDevice, public testing::WithParamInterface<RecurrentCase> {
 protected:
  void SetUp() override {
    OnDevice::SetUp();
    int count = 0;
    if (cudaGetDeviceCount(&count) == cudaSuccess && count > 1) other_device = 1;
    sequences = draw_sequences({50, 9, 12}, config.vocabulary, block_count, 3);
  }
#if RUBATO_CUDA_EMULATED
  [[nodiscard]] cuda_host::Options emulation() const override {
    return {.devices = 2, .multiprocessors = 16, .major = 8, .matmul_candidates = cuda_host::MatmulCandidates::None};
  }
#endif
  [[nodiscard]] static BackendOptions options() {
    return {.dtype = GetParam().dtype,
            .block_count = block_count,
            .state_count = state_count,
            .max_tokens_per_step = 80,
            .max_rows = 4,
            .max_model_len = 64,
            .poison = true};
  }
  [[nodiscard]] std::unique_ptr<Backend> make(std::int32_t device = 0) const {
    const auto weights = make_synthetic_weights(config, 11, GetParam().dtype);
    auto backend = make_cuda_backend(config, *weights, options(), device);
    CHECK(backend, backend.error().message);
    return std::move(*backend);
  }

  ModelConfig config = synthetic_model_config(GetParam().model).value();
  std::vector<Sequence> sequences;
  std::int32_t other_device = 0;
};

INSTANTIATE_TEST_SUITE_P(Models, CudaRecurrent, testing::ValuesIn(recurrent_cases()),
                         [](const auto& parameter) { return parameter.param.name; });

float error_between(const Logits& a, const Logits& b) {
  float difference = 0;
  float scale = 1e-6F;
  for (std::size_t i = 0; i < b.size(); ++i) {
    if (!(std::abs(a.at(i) - b[i]) <= difference)) difference = std::abs(a[i] - b[i]);
    scale = std::max(scale, std::abs(b[i]));
  }
  return difference / scale;
}

TEST_P(CudaRecurrent, logits_are_near_the_references) {
  const DataType dtype = GetParam().dtype;
  const auto weights = make_synthetic_weights(config, 11, dtype);
  StateRunner reference(make_reference_backend(config, *weights, options()).value(), sequences);
  StateRunner cuda(make(), sequences);
  const float tolerance = dtype == DataType::Float32 ? 1e-4F : dtype == DataType::Float16 ? 1.0F / 128 : 1.0F / 16;
  for (const std::vector<StatePart>& parts :
       {std::vector<StatePart>{{0, 0, 33, 0, 2}, {1, 0, 9, 0, 0}}, std::vector<StatePart>{{2, 0, 12, 0, 5}, {0, 33, 17, 2, 3}}}) {
    const Logits expected = reference.step(parts);
    EXPECT_LT(error_between(cuda.step(parts), expected), tolerance);
  }
}

TEST_P(CudaRecurrent, bits_do_not_depend_on_chunks_company_slots_or_graphs) {
  StateRunner lone(make(), sequences);
  const std::map<std::int32_t, Logits> expected = lone.chunked(0, 1, 2);
  const std::vector<std::byte> kept = lone.kept(0, 50, 2);
  StateRunner runner(make(), sequences);
  for (const bool graphs : {false, true}) {
    SCOPED_TRACE(graphs ? "graphs" : "eager");
    if (graphs) {
      auto shapes = runner.backend().build_shapes({.tokens = {8, 32, 80}, .decode_max = 80}, {});
      ASSERT_TRUE(shapes) << shapes.error().message;
      EXPECT_EQ(runner.backend().use_shapes(std::move(*shapes)), nullptr);
    }
    for (const std::int32_t chunk : {7, 64}) {
      std::int32_t slot = 4;
      for (std::int32_t position = 0; position < 50; position += chunk) {
        const std::int32_t count = std::min(chunk, 50 - position);
        const std::int32_t next = slot == 4 ? 6 : 4;
        runner.step({{1, 0, 9, 0, 0}, {0, position, count, slot, next}, {2, 0, 12, 0, 1}});
        EXPECT_EQ(runner.result().bucket.has_value(), graphs);
        EXPECT_TRUE(same_bits(runner.of(1), expected.at(position + count - 1))) << "position " << position;
        slot = next;
      }
      EXPECT_EQ(runner.kept(0, 50, slot), kept) << "chunk " << chunk;
    }
  }
  static_cast<void>(runner.backend().use_shapes(nullptr));
}

TEST_P(CudaRecurrent, a_sequence_goes_on_from_a_snapshot_with_the_same_bits) {
  StateRunner runner(make(), sequences);
  const Logits expected = runner.step({{0, 0, 50, 0, 2}});
  const std::vector<std::byte> kept = runner.kept(0, 50, 2);
  EXPECT_TRUE(same_bits(runner.step({{0, 0, 50, 0, 3, StateUse::Save{.to = {5}, .tokens = 32}}}), expected));
  EXPECT_TRUE(same_bits(runner.step({{0, 32, 18, 5, 6}}), expected));
  EXPECT_EQ(runner.kept(0, 50, 6), kept);
  EXPECT_TRUE(same_bits(runner.step({{0, 32, 18, 5, 5}}), expected)) << "in place, from a slot that another has read";
}

TEST_P(CudaRecurrent, a_sibling_goes_on_where_the_other_stopped) {
  StateRunner lone(make(), sequences);
  const std::map<std::int32_t, Logits> expected = lone.chunked(0, 1, 2);
  std::unique_ptr<Backend> made = make();
  StateRunner second(made->make_sibling().value(), sequences);
  StateRunner first(std::move(made), sequences);
  EXPECT_TRUE(same_bits(second.step({{0, 0, 40, 0, 1}}), expected.at(39)));
  for (std::int32_t position = 40; position < 50; ++position) {
    StateRunner& lane = position % 3 == 0 ? second : first;
    EXPECT_TRUE(same_bits(lane.step({{0, position, 1, 1, 1}}), expected.at(position))) << "position " << position;
  }
}

TEST_P(CudaRecurrent, a_sequence_goes_on_in_another_pool_with_the_same_bits) {
  const std::vector<Sequence> moved = draw_sequences({50, 9, 12}, config.vocabulary, block_count, 4);
  StateRunner from(make(), sequences);
  const Logits expected = from.step({{0, 0, 50, 0, 2}});
  const std::vector<std::byte> kept = from.kept(0, 50, 2);
  from.step({{0, 0, 40, 0, 2}});
  StateRunner to(make(other_device), moved);
  std::vector<BlockCopy> blocks;
  for (std::size_t i = 0; i < sequences[0].blocks.size(); ++i)
    blocks.push_back({.from = sequences[0].blocks[i], .to = moved[0].blocks[i]});
  const StateCopy state{.from = {2}, .to = {7}};

  std::size_t asked = 0;
  const Result<void> stopped =
      to.backend().copy_blocks(from.backend(), {.blocks = blocks, .state = state}, [&] { return ++asked <= blocks.size(); });
  ASSERT_FALSE(stopped);
  EXPECT_EQ(stopped.error().code, ErrorCode::Cancelled);
  EXPECT_EQ(asked, blocks.size() + 1) << "the state comes last, and is asked for";
  to.step({{0, 40, 10, 7, 6}});
  EXPECT_EQ(to.result().sample_valid, std::vector<bool>{false}) << "what was not brought is poison";

  const Result<void> copied = to.backend().copy_blocks(from.backend(), {.blocks = blocks, .state = state}, [] { return true; });
  ASSERT_TRUE(copied) << copied.error().message;
  EXPECT_TRUE(same_bits(to.step({{0, 40, 10, 7, 7}}), expected));
  EXPECT_EQ(to.kept(0, 50, 7), kept);
  EXPECT_TRUE(same_bits(from.step({{0, 40, 10, 2, 2}}), expected)) << "and where it was, too";

  // Within one pool.
  ASSERT_TRUE(to.backend().copy_blocks(to.backend(), {.state = StateCopy{.from = {7}, .to = {3}}}, [] { return true; }));
  EXPECT_EQ(to.kept(0, 50, 3), kept);
}

TEST_P(CudaRecurrent, states_of_another_shape_are_refused) {
  StateRunner runner(make(), sequences);
  SyntheticModel other = GetParam().model;
  other.state_size *= 2;
  const ModelConfig other_config = synthetic_model_config(other).value();
  const auto weights = make_synthetic_weights(other_config, 11, GetParam().dtype);
  const auto backend = make_cuda_backend(other_config, *weights, options(), 0).value();
  const Result<void> refused =
      runner.backend().copy_blocks(*backend, {.state = StateCopy{.from = {0}, .to = {1}}}, [] { return true; });
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code, ErrorCode::InvalidArgument);
}

TEST_P(CudaRecurrent, released_states_are_dead) {
  StateRunner runner(make(), sequences);
  runner.step({{0, 0, 40, 0, 2}, {1, 0, 5, 0, 3}});
  const std::vector<StateId> dead{{2}};
  runner.backend().released_states(dead);
  runner.step({{0, 40, 10, 2, 4}, {1, 5, 4, 3, 3}});
  EXPECT_EQ(runner.result().sample_valid, (std::vector<bool>{false, true}));
}

}  // namespace
}  // namespace rubato::engine
