// SPDX-License-Identifier: Apache-2.0
// KV blocks brought from one backend's pool into another's: on a second device where there is one, else into a second pool of the
// first. A sequence goes on there under other block numbers, with the same bits.
#include <gtest/gtest.h>

#include <thread>

#include "engine/cuda/backend.h"
#include "engine/reference/backend.h"
#include "tests/cuda/on_device.h"
#include "tests/engine/backend_harness.h"

namespace rubato::engine {
namespace {

constexpr std::int32_t block_count = 40;
constexpr DataType dtype = DataType::BFloat16;

class CudaCopies : public OnDevice {
 protected:
  void SetUp() override {
    OnDevice::SetUp();
    int count = 0;
    if (cudaGetDeviceCount(&count) == cudaSuccess && count > 1) other_device = 1;
    sequences = draw_sequences({70, 40}, config.vocabulary, block_count, 3);
    moved = draw_sequences({70, 40}, config.vocabulary, block_count, 4);
  }
#if RUBATO_CUDA_EMULATED
  [[nodiscard]] cuda_host::Options emulation() const override {
    return {.devices = 2, .multiprocessors = 4, .major = 8, .matmul_candidates = cuda_host::MatmulCandidates::None};
  }
#endif
  static BackendOptions options() {
    return {.dtype = dtype,
            .block_count = block_count,
            .max_tokens_per_step = 96,
            .max_rows = 8,
            .max_model_len = 256,
            .poison = true};
  }
  [[nodiscard]] std::unique_ptr<Backend> make(std::int32_t device) const {
    const auto weights = make_synthetic_weights(config, 11, dtype);
    auto backend = make_cuda_backend(config, *weights, options(), device);
    CHECK(backend, backend.error().message);
    return std::move(*backend);
  }
  [[nodiscard]] std::vector<BlockCopy> all_blocks(std::size_t sequence) const {
    std::vector<BlockCopy> copies;
    for (std::size_t i = 0; i < sequences[sequence].blocks.size(); ++i)
      copies.push_back({.from = sequences[sequence].blocks[i], .to = moved[sequence].blocks[i]});
    return copies;
  }
  static bool always() {
    return true;
  }

  ModelConfig config = named_configs()[0].config;
  std::int32_t other_device = 0;
  std::vector<Sequence> sequences;
  std::vector<Sequence> moved;  // the same tokens in other blocks
};

TEST_F(CudaCopies, a_sequence_goes_on_in_another_pool_with_the_same_bits) {
  Runner lone(make(0), sequences);
  const std::map<std::int32_t, Logits> expected = lone.chunked(0, 1);
  Runner from(make(0), sequences);
  Runner to(make(other_device), moved);
  EXPECT_TRUE(same_bits(from.step({{0, 0, 60}}), expected.at(59)));
  const Result<void> copied = to.backend().copy_blocks(from.backend(), {.blocks = all_blocks(0)}, always);
  ASSERT_TRUE(copied) << copied.error().message;
  for (std::int32_t position = 60; position < 70; ++position)
    EXPECT_TRUE(same_bits(to.step({{0, position, 1}}), expected.at(position))) << "position " << position;
  // And it goes on where it was, too.
  EXPECT_TRUE(same_bits(from.step({{0, 60, 10}}), expected.at(69)));
}

TEST_F(CudaCopies, blocks_travel_while_both_lanes_step) {
  Runner lone(make(0), sequences);
  const std::map<std::int32_t, Logits> expected = lone.chunked(0, 1);
  const Logits other = lone.step({{1, 0, 40}});
  Runner from(make(0), sequences);
  Runner to(make(other_device), moved);
  from.step({{0, 0, 60}});
  std::jthread copying([&] { EXPECT_TRUE(to.backend().copy_blocks(from.backend(), {.blocks = all_blocks(0)}, always)); });
  std::jthread prefilling([&] {
    // Reads blocks that are being copied.
    EXPECT_TRUE(same_bits(from.step({{0, 60, 4}, {1, 0, 40}}), [&] {
      Logits both = expected.at(63);
      both.insert(both.end(), other.begin(), other.end());
      return both;
    }()));
  });
  EXPECT_TRUE(same_bits(to.step({{1, 0, 40}}), other));
  copying.join();
  prefilling.join();
  EXPECT_TRUE(same_bits(to.step({{0, 60, 4}}), expected.at(63)));
}

TEST_F(CudaCopies, what_is_no_longer_allowed_is_not_written) {
  Runner from(make(0), sequences);
  Runner to(make(other_device), moved);
  const Logits expected = from.step({{0, 0, 70}});
  const std::vector<BlockCopy> copies = all_blocks(0);
  ASSERT_EQ(copies.size(), 5U);
  int asked = 0;
  const Result<void> stopped = to.backend().copy_blocks(from.backend(), {.blocks = copies}, [&] { return ++asked < 3; });
  ASSERT_FALSE(stopped);
  EXPECT_EQ(stopped.error().code, ErrorCode::Cancelled);
  EXPECT_EQ(asked, 3) << "once it says no, it is not asked again";
  // What was not brought is still the poison of an empty pool.
  to.step({{0, 69, 1}});
  EXPECT_EQ(to.result().sample_valid, std::vector<bool>{false});
  ASSERT_TRUE(to.backend().copy_blocks(from.backend(), {.blocks = copies}, always));
  EXPECT_TRUE(same_bits(to.step({{0, 69, 1}}), expected));
}

TEST_F(CudaCopies, a_pool_takes_blocks_of_its_own_for_other_numbers) {
  std::unique_ptr<Backend> first = make(0);
  std::unique_ptr<Backend> sibling = first->make_sibling().value();
  Runner lane(std::move(first), sequences);
  const Logits expected = lane.step({{0, 0, 20}});
  // Two blocks one further up: what one copy reads the next one writes, so they may not travel together.
  const BlockId begin{7};
  const std::vector<BlockCopy> apart{{.from = sequences[0].blocks[0], .to = {8}}, {.from = sequences[0].blocks[1], .to = {9}}};
  ASSERT_TRUE(sibling->copy_blocks(lane.backend(), {.blocks = apart}, always));
  const std::vector<BlockCopy> shift{{.from = {8}, .to = begin}, {.from = {9}, .to = {8}}};
  ASSERT_TRUE(sibling->copy_blocks(lane.backend(), {.blocks = shift}, always));
  std::vector<Sequence> there = sequences;
  there[0].blocks[0] = begin;
  there[0].blocks[1] = {8};
  Runner other(std::move(sibling), there);
  EXPECT_TRUE(same_bits(other.step({{0, 19, 1}}), expected));
}

TEST_F(CudaCopies, blocks_of_another_kind_are_refused) {
  const std::unique_ptr<Backend> backend = make(0);
  const auto weights = make_synthetic_weights(config, 11, dtype);
  const auto reference = make_reference_backend(config, *weights, options()).value();
  const ModelConfig other_config = named_configs()[4].config;
  const auto other_weights = make_synthetic_weights(other_config, 11, dtype);
  const auto other = make_cuda_backend(other_config, *other_weights, options(), 0).value();
  const std::vector<BlockCopy> copies{{.from = {0}, .to = {1}}};
  for (const Backend* source : {reference.get(), other.get()}) {
    const Result<void> refused = backend->copy_blocks(*source, {.blocks = copies}, always);
    ASSERT_FALSE(refused);
    EXPECT_EQ(refused.error().code, ErrorCode::InvalidArgument);
  }
}

#if RUBATO_CUDA_EMULATED
TEST_F(CudaCopies, neighbours_travel_together_and_no_step_stream_is_touched) {
  const std::unique_ptr<Backend> from = make(0);
  const std::unique_ptr<Backend> to = make(1);
  cuda_host::clear_log();
  const std::vector<BlockCopy> copies{{.from = {3}, .to = {20}},
                                      {.from = {4}, .to = {21}},
                                      {.from = {5}, .to = {22}},
                                      {.from = {6}, .to = {30}},
                                      {.from = {9}, .to = {31}}};
  ASSERT_TRUE(to->copy_blocks(*from, {.blocks = copies}, always));
  int queued = 0;
  int stream = 0;
  for (const cuda_host::LogEntry& entry : cuda_host::log()) {
    EXPECT_NE(entry.action, cuda_host::Action::StreamWaits);
    if (entry.action != cuda_host::Action::Queued) continue;
    EXPECT_EQ(entry.name, "copy device to device");
    EXPECT_EQ(entry.device, 1) << "the receiver's";
    EXPECT_TRUE(stream == 0 || stream == entry.stream);
    stream = entry.stream;
    ++queued;
  }
  EXPECT_EQ(queued, 3 * config.layers);
}

TEST_F(CudaCopies, every_call_finds_its_device_on_a_thread_that_never_named_it) {
  Runner lone(make(0), sequences);
  const Logits expected = lone.step({{0, 0, 40}});
  std::unique_ptr<Backend> made = make(1);
  std::unique_ptr<StepShapes> before;
  // Each on a fresh thread, whose current device is 0.
  std::jthread([&] {
    auto shapes = made->build_shapes({.tokens = {48}, .decode_max = 8}, {});
    ASSERT_TRUE(shapes) << shapes.error().message;
    EXPECT_EQ(made->use_shapes(std::move(*shapes)), nullptr);
  }).join();
  Runner lane(std::move(made), sequences);
  std::jthread([&] { EXPECT_TRUE(same_bits(lane.step({{0, 0, 40}}), expected)); }).join();
  EXPECT_EQ(lane.result().bucket, 48);
  std::jthread([&] {
    const std::vector<BlockId> dead{sequences[0].blocks[0]};
    lane.backend().released(dead);
    before = lane.backend().use_shapes(nullptr);
    before.reset();
  }).join();
  std::jthread([&] { const Runner gone = std::move(lane); }).join();
}
#endif

}  // namespace
}  // namespace rubato::engine
