// SPDX-License-Identifier: Apache-2.0
// Whole models through the CUDA backend: near the reference's logits, and the same bits for any chunking, among others, in any
// block order, as a graph or eagerly, and while shapes are rebuilt on another thread.
#include "engine/cuda/backend.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <thread>

#include "engine/lane.h"
#include "engine/reference/backend.h"
#include "manifests/names.h"
#include "tests/cuda/on_device.h"
#include "tests/engine/backend_harness.h"
#include "tests/support/golden_streams.h"
#include "tests/support/lane_client.h"

namespace rubato::engine {
namespace {

constexpr std::int32_t block_count = 48;

struct Case {
  std::string name;
  ModelConfig config;
  DataType dtype;
};

/// Every configuration, each in one element type or two; every type at least twice.
std::vector<Case> cases() {
  const std::vector<NamedConfig> configs = named_configs();
  constexpr DataType types[] = {DataType::Float32, DataType::BFloat16, DataType::Float16};
  std::vector<Case> all;
  for (std::size_t i = 0; i < configs.size(); ++i) {
    for (const std::size_t type : {i % 3, (i + 1) % 3}) {
      if (i >= 3 && type != i % 3) continue;
      all.push_back({configs[i].name + "_" + std::string(to_string(types[type])), configs[i].config, types[type]});
    }
  }
  return all;
}

BackendOptions options_of(DataType dtype) {
  return {.dtype = dtype,
          .block_count = block_count,
          .max_tokens_per_step = 160,
          .max_rows = 8,
          .max_model_len = 256,
          .poison = true};
}

std::unique_ptr<Backend> make_cuda(const Case& c) {
  const auto weights = make_synthetic_weights(c.config, 11, c.dtype);
  auto backend = make_cuda_backend(c.config, *weights, options_of(c.dtype), 0);
  CHECK(backend, backend.error().message);
  return std::move(*backend);
}

class CudaBackend : public OnDevice, public testing::WithParamInterface<Case> {
 protected:
  void SetUp() override {
    OnDevice::SetUp();
    const Case& c = GetParam();
    sequences = draw_sequences({90, 5, 33, 17}, c.config.vocabulary, block_count, 3);
  }
  std::vector<Sequence> sequences;
};

/// Largest |a - b| over largest |b|.
float error_between(const Logits& a, const Logits& b) {
  float difference = 0;
  float scale = 1e-6F;
  for (std::size_t i = 0; i < b.size(); ++i) {
    if (!(std::abs(a.at(i) - b[i]) <= difference)) difference = std::abs(a[i] - b[i]);
    scale = std::max(scale, std::abs(b[i]));
  }
  return difference / scale;
}

TEST_P(CudaBackend, logits_are_near_the_references) {
  const Case& c = GetParam();
  const auto weights = make_synthetic_weights(c.config, 11, c.dtype);
  Runner reference(make_reference_backend(c.config, *weights, options_of(c.dtype)).value(), sequences);
  Runner cuda(make_cuda(c), sequences);
  const std::vector<Part> parts{{0, 0, 90}, {1, 0, 5}, {2, 0, 33}};
  const Logits expected = reference.step(parts);
  const float tolerance = c.dtype == DataType::Float32 ? 1e-4F : c.dtype == DataType::Float16 ? 1.0F / 128 : 1.0F / 16;
  EXPECT_LT(error_between(cuda.step(parts), expected), tolerance);
}

TEST_P(CudaBackend, bits_do_not_depend_on_chunks_company_blocks_or_graphs) {
  const Case& c = GetParam();
  Runner whole(make_cuda(c), sequences);
  const Logits expected = whole.chunked(0, 90).at(89);
  for (const std::int32_t chunk : {1, 7, 64}) {
    Runner cut(make_cuda(c), sequences);
    EXPECT_TRUE(same_bits(cut.chunked(0, chunk).at(89), expected)) << "chunks of " << chunk;
  }

  // Among others, over other blocks, and in a graph that pads.
  const std::vector<Sequence> moved = draw_sequences({90, 5, 33, 17}, c.config.vocabulary, block_count, 4);
  Runner graphs(make_cuda(c), moved);
  auto shapes = graphs.backend().build_shapes({.tokens = {8, 64, 128}, .decode_max = 8}, {});
  ASSERT_TRUE(shapes) << shapes.error().message;
  EXPECT_GE((*shapes)->bytes(), 0);
  EXPECT_EQ(graphs.backend().use_shapes(std::move(*shapes)), nullptr);
  graphs.step({{1, 0, 5}, {0, 0, 50}});
  EXPECT_EQ(graphs.result().bucket, 64);
  EXPECT_EQ(graphs.result().padding_tokens, 9);
  graphs.step({{2, 0, 33}, {3, 0, 17}, {0, 50, 39}});
  EXPECT_FALSE(graphs.result().bucket) << "128 for 89 tokens would waste more than a quarter";
  const Logits& last = graphs.step({{0, 89, 1}});
  EXPECT_EQ(graphs.result().bucket, 8);
  EXPECT_TRUE(same_bits(last, expected));
}

TEST_P(CudaBackend, a_graphs_padding_leaves_no_trace) {
  const Case& c = GetParam();
  Runner eager(make_cuda(c), sequences);
  Runner graphs(make_cuda(c), sequences);
  auto shapes = graphs.backend().build_shapes({.tokens = {8, 128}, .decode_max = 8}, {});
  ASSERT_TRUE(shapes);
  static_cast<void>(graphs.backend().use_shapes(std::move(*shapes)));
  const std::vector<std::vector<Part>> steps{
      {{0, 0, 90}, {2, 0, 33}}, {{1, 0, 5}}, {{3, 0, 3}, {1, 4, 1}}, {{3, 3, 14}, {0, 89, 1}}};
  for (const std::vector<Part>& step : steps) {
    const Logits expected = eager.step(step);
    EXPECT_TRUE(same_bits(graphs.step(step), expected));
  }
}

TEST_P(CudaBackend, captured_logits_are_those_before_sampling_changed_any) {
  const Case& c = GetParam();
  const std::unique_ptr<Backend> backend = make_cuda(c);
  backend->capture_logits(true);
  const SamplingState plain({.temperature = 0}, {}, c.config.vocabulary);
  // Some tokens are changed by all three: mask, bias, penalty.
  const TokenId seen = sequences[0].tokens[0];
  const TokenId favoured = seen == 9 ? 10 : 9;
  const SamplingState edited({.temperature = 0,
                              .repetition_penalty = 1.3,
                              .logit_bias = {{seen, 5.0F}, {favoured, 1000.0F}},
                              .min_new_tokens = 4,
                              .stop_token_ids = {seen}},
                             sequences[0].tokens, c.config.vocabulary);
  const auto run = [&](const SamplingState& state) {
    StepResult result;
    std::vector<StepRow> rows;
    for (const std::size_t sequence : {0U, 1U, 2U}) {
      rows.push_back({.position = 0,
                      .tokens = sequences[sequence].tokens,
                      .blocks = sequences[sequence].blocks,
                      .sampling = sequence == 1 ? &plain : &state});
    }
    const Result<void> done = backend->run(rows, result);
    CHECK(done, done.error().message);
    return result;
  };
  const StepResult expected = run(plain);
  const StepResult changed = run(edited);
  EXPECT_EQ(changed.samples[0].token, favoured) << "the edits did something";
  EXPECT_TRUE(same_bits(changed.logits, expected.logits));
}

INSTANTIATE_TEST_SUITE_P(Models, CudaBackend, testing::ValuesIn(cases()),
                         [](const auto& parameter) { return parameter.param.name; });

class CudaBackendErrors : public OnDevice {};

TEST_F(CudaBackendErrors, a_device_that_is_not_there_is_named) {
  EXPECT_EQ(cuda_device_index("cuda:3").value(), 3);
  EXPECT_EQ(cuda_device_index("cuda").value(), 0);
  EXPECT_FALSE(cuda_device_index("cuda:x"));
  const ModelConfig config = named_configs()[0].config;
  const auto weights = make_synthetic_weights(config, 1, DataType::Float32);
  const auto backend = make_cuda_backend(config, *weights, options_of(DataType::Float32), 99);
  ASSERT_FALSE(backend);
  EXPECT_EQ(backend.error().code, ErrorCode::NotFound);
  EXPECT_EQ(backend.error().field, "spec.devices");
}

/// The real model through lane, scheduler, graphs and rebuilds on a builder's thread: the golden tokens, whatever the shapes do.
class CudaGolden : public OnDevice {};

TEST_F(CudaGolden, twenty_budget_changes_rebuild_shapes_and_change_no_token) {
  const std::filesystem::path folder = RUBATO_SOURCE_DIR "/../shared/data/models/stories260k";
  if (!std::filesystem::exists(folder)) GTEST_SKIP() << "needs " << folder;
  const auto config = read_model_config(folder);
  ASSERT_TRUE(config) << config.error().message;
  auto weights = open_safetensors(folder);
  ASSERT_TRUE(weights) << weights.error().message;
  const BackendOptions options{.dtype = DataType::Float32,
                               .block_count = 64,
                               .max_tokens_per_step = 64,
                               .max_rows = 8,
                               .max_model_len = 512,
                               .poison = true};
  auto backend = make_cuda_backend(*config, **weights, options, 0);
  ASSERT_TRUE(backend) << backend.error().message;
  Settings settings{.number = 1, .knobs = {.max_num_batched_tokens = 48, .max_num_seqs = 8}};
  Lane lane(**backend,
            {.limits = {.max_model_len = 512, .max_num_seqs = 8, .max_waiting = 16, .block_count = 64}, .initial = settings});
  test::LaneClient client(lane);

  const auto streams = test::add_golden_prompts(client, folder);
  int rebuilds = 0;
  int graph_steps = 0;
  bool more = true;
  while (more) {
    // Another budget, and the shapes for it built beside the steps that go on.
    if (rebuilds < 20) {
      settings.knobs.max_num_batched_tokens = 24 + 8 * (rebuilds % 5);
      ++settings.number;
      lane.apply(settings);
      Result<std::unique_ptr<StepShapes>> built = unexpected(ErrorCode::Internal, "not built");
      const policies::StepBuckets buckets{.tokens = {4 + rebuilds % 3, 8, settings.knobs.max_num_batched_tokens},
                                          .decode_max = 8};
      std::jthread builder([&](const std::stop_token& stop) { built = (*backend)->build_shapes(buckets, stop); });
      for (int i = 0; i < 3 && more; ++i) {
        more = client.step();
        graph_steps += lane.record().bucket ? 1 : 0;
      }
      builder.join();
      ASSERT_TRUE(built) << built.error().message;
      const std::unique_ptr<StepShapes> before = (*backend)->use_shapes(std::move(*built));
      ++rebuilds;
    } else {
      more = client.step();
      graph_steps += lane.record().bucket ? 1 : 0;
    }
  }
  EXPECT_EQ(rebuilds, 20);
  EXPECT_GT(graph_steps, 30);
  test::expect_golden_tokens(client, streams);
  lane.check_integrity();
  static_cast<void>((*backend)->use_shapes(nullptr));
}

}  // namespace
}  // namespace rubato::engine
