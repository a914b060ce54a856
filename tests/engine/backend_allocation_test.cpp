// SPDX-License-Identifier: Apache-2.0
// A step takes no memory: every call of operator new in this program is counted, on every thread.
#include <gtest/gtest.h>

#include <atomic>
#include <functional>
#include <thread>

#include "engine/cpu/backend.h"
#include "engine/shape_builder.h"
#include "tests/engine/backend_harness.h"
#include "tests/support/counted_allocations.h"

namespace rubato::engine {
namespace {

TEST(BackendAllocation, a_step_allocates_nothing_once_the_result_has_grown) {
  for (const DataType dtype : {DataType::Float32, DataType::BFloat16}) {
    const ModelConfig config = named_configs()[4].config;
    const std::unique_ptr<WeightSource> weights = make_synthetic_weights(config, 1, dtype);
    const BackendOptions options{.dtype = dtype,
                                 .block_count = 40,
                                 .max_tokens_per_step = 260,
                                 .max_rows = 8,
                                 .max_model_len = 256,
                                 .threads = 2,
                                 .poison = true};
    const std::unique_ptr<Backend> backend = make_cpu_backend(config, *weights, options).value();
    const std::vector<Sequence> sequences = draw_sequences({100, 100, 30, 30}, config.vocabulary, 40, 1);
    const SamplingState greedy({.temperature = 0.0}, {}, config.vocabulary);
    std::vector<StepRow> rows;
    for (const Sequence& sequence : sequences) {
      rows.push_back({.position = 0, .tokens = sequence.tokens, .blocks = sequence.blocks, .sampling = &greedy});
    }
    StepResult result;
    ASSERT_TRUE(backend->run(std::span(rows).first(1), result));
    ASSERT_TRUE(backend->run(rows, result));  // the full-sized step
    std::vector<StepRow> decodes;
    for (const Sequence& sequence : sequences) {
      decodes.push_back(
          {.position = 29, .tokens = std::span(sequence.tokens).subspan(29, 1), .blocks = sequence.blocks, .sampling = &greedy});
    }
    const std::uint64_t before = test::allocations;
    ASSERT_TRUE(backend->run(rows, result));
    ASSERT_TRUE(backend->run(decodes, result));
    ASSERT_TRUE(backend->run(std::span(decodes).first(1), result));
    ASSERT_TRUE(backend->run(rows, result));
    backend->released(sequences[0].blocks);
    EXPECT_EQ(test::allocations - before, 0U);
  }
}

TEST(BackendAllocation, the_lane_takes_shapes_and_runs_in_them_without_allocating_or_freeing) {
  const ModelConfig config = named_configs()[0].config;
  const std::unique_ptr<WeightSource> weights = make_synthetic_weights(config, 1, DataType::Float32);
  const std::unique_ptr<Backend> backend =
      make_cpu_backend(config, *weights,
                       {.block_count = 40, .max_tokens_per_step = 200, .max_rows = 8, .max_model_len = 256, .threads = 2})
          .value();
  const std::vector<Sequence> sequences = draw_sequences({100, 80}, config.vocabulary, 40, 1);
  const SamplingState greedy({.temperature = 0.0}, {}, config.vocabulary);
  std::vector<StepRow> rows;
  for (const Sequence& sequence : sequences) {
    rows.push_back({.position = 0, .tokens = sequence.tokens, .blocks = sequence.blocks, .sampling = &greedy});
  }
  StepResult result;
  ASSERT_TRUE(backend->run(rows, result));
  ShapeBuilder builder(*backend, {});
  TimePoint now{};
  for (const std::int32_t budget : {200, 64, 180}) {
    now += std::chrono::seconds(1);
    ASSERT_TRUE(builder.look({.budget = budget, .max_num_seqs = 8}, {}, [&] { return now; }));
    const std::uint64_t before = test::allocations;
    ASSERT_TRUE(builder.take());
    ASSERT_TRUE(backend->run(rows, result));
    EXPECT_EQ(result.bucket, budget == 64 ? std::nullopt : std::optional(budget == 200 ? 200 : 180));
    ASSERT_TRUE(backend->run(std::span(rows).first(1), result));
    builder.observe(180);
    EXPECT_EQ(test::allocations - before, 0U);
  }
}

TEST(BackendAllocation, siblings_that_are_in_steps_at_once_allocate_nothing) {
  const ModelConfig config = named_configs()[0].config;
  const std::unique_ptr<WeightSource> weights = make_synthetic_weights(config, 1, DataType::Float32);
  for (const std::int32_t threads : {1, 2}) {
    const std::unique_ptr<Backend> backend =
        make_cpu_backend(config, *weights,
                         {.block_count = 40, .max_tokens_per_step = 200, .max_rows = 8, .max_model_len = 256, .threads = threads})
            .value();
    const std::unique_ptr<Backend> sibling = backend->make_sibling().value();
    const std::vector<Sequence> sequences = draw_sequences({100, 80}, config.vocabulary, 40, 1);
    const SamplingState greedy({.temperature = 0.0}, {}, config.vocabulary);
    std::atomic<int> warm{0};
    std::atomic<int> done{0};
    std::atomic<bool> go{false};
    const auto lane = [&](Backend& one, const Sequence& sequence) {
      const StepRow row{.position = 0, .tokens = sequence.tokens, .blocks = sequence.blocks, .sampling = &greedy};
      StepResult result;
      EXPECT_TRUE(one.run(std::span(&row, 1), result));
      ++warm;
      while (!go) std::this_thread::yield();
      for (int i = 0; i < 20; ++i) {
        one.use_share(i % 2 == 0 ? 20 : 70);
        EXPECT_TRUE(one.run(std::span(&row, 1), result));
      }
      ++done;
      while (go) std::this_thread::yield();
    };
    std::thread first(lane, std::ref(*backend), std::cref(sequences[0]));
    std::thread second(lane, std::ref(*sibling), std::cref(sequences[1]));
    while (warm < 2) std::this_thread::yield();
    const std::uint64_t before = test::allocations;
    go = true;
    while (done < 2) std::this_thread::yield();
    EXPECT_EQ(test::allocations - before, 0U) << threads << " threads";
    go = false;
    first.join();
    second.join();
  }
}

TEST(BackendAllocation, the_counter_counts) {
  const std::uint64_t before = test::allocations;
  std::vector<int> memory(100);
  EXPECT_EQ(memory[7], 0);
  EXPECT_GT(test::allocations, before);
}

}  // namespace
}  // namespace rubato::engine
