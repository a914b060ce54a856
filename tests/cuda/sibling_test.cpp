// SPDX-License-Identifier: Apache-2.0
// Two lanes on one device: whichever runs a row, on the whole device or on a share of it, as a graph or eagerly, while shares
// move and shapes are built, the bits are those of a lone backend; and blocks that one wrote are read by the other.
#include <gtest/gtest.h>

#include <atomic>
#include <thread>

#include "engine/cuda/backend.h"
#include "manifests/names.h"
#include "tests/cuda/on_device.h"
#include "tests/engine/backend_harness.h"

namespace rubato::engine {
namespace {

constexpr std::int32_t block_count = 48;

struct Lanes {
  Runner first;
  Runner second;
};

class CudaSibling : public OnDevice, public testing::WithParamInterface<DataType> {
 protected:
  void SetUp() override {
    OnDevice::SetUp();
    sequences = draw_sequences({70, 5, 33, 40}, config.vocabulary, block_count, 3);
  }
#if RUBATO_CUDA_EMULATED
  /// Three groups of multiprocessors: two rungs.
  [[nodiscard]] cuda_host::Options emulation() const override {
    return {.multiprocessors = 24, .major = 8, .matmul_candidates = cuda_host::MatmulCandidates::None};
  }
#endif

  [[nodiscard]] std::unique_ptr<Backend> make() const {
    const auto weights = make_synthetic_weights(config, 11, GetParam());
    auto backend = make_cuda_backend(config, *weights,
                                     {.dtype = GetParam(),
                                      .block_count = block_count,
                                      .max_tokens_per_step = 96,
                                      .max_rows = 8,
                                      .max_model_len = 256,
                                      .poison = true},
                                     0);
    CHECK(backend, backend.error().message);
    return std::move(*backend);
  }
  [[nodiscard]] Lanes make_lanes() const {
    std::unique_ptr<Backend> first = make();
    auto second = first->make_sibling();
    CHECK(second, second.error().message);
    return {.first = Runner(std::move(first), sequences), .second = Runner(std::move(*second), sequences)};
  }
  static void build(Runner& lane) {
    auto shapes = lane.backend().build_shapes({.tokens = {8, 48, 96}, .decode_max = 8}, {});
    ASSERT_TRUE(shapes) << shapes.error().message;
    const auto before = lane.backend().use_shapes(std::move(*shapes));
  }

  ModelConfig config = named_configs()[0].config;
  std::vector<Sequence> sequences;
};

TEST_P(CudaSibling, a_prompt_read_by_one_lane_is_continued_by_the_other_with_the_bits_of_one_backend) {
  Runner lone(make(), sequences);
  Lanes lanes = make_lanes();
  for (const std::size_t sequence : {0U, 2U}) {
    const auto length = static_cast<std::int32_t>(sequences[sequence].tokens.size());
    const std::int32_t prompt = length - 4;
    const std::map<std::int32_t, Logits> expected = lone.chunked(sequence, 1);
    EXPECT_TRUE(same_bits(lanes.second.step({{sequence, 0, 16}}), expected.at(15)));
    EXPECT_TRUE(same_bits(lanes.second.step({{sequence, 16, prompt - 16}}), expected.at(prompt - 1)));
    for (std::int32_t position = prompt; position < length; ++position) {
      Runner& lane = position % 3 == 0 ? lanes.second : lanes.first;
      EXPECT_TRUE(same_bits(lane.step({{sequence, position, 1}}), expected.at(position))) << "position " << position;
    }
  }
}

TEST_P(CudaSibling, graphs_are_replayed_only_in_the_place_that_they_were_captured_for) {
  Lanes lanes = make_lanes();
  Backend& backend = lanes.first.backend();
  if (backend.share().given_percent == 100) GTEST_SKIP() << "no green contexts: " << backend.description();
  backend.use_share(20);
  build(lanes.first);
  Runner lone(make(), sequences);
  const Logits expected = lone.step({{0, 0, 5}});
  const auto step = [&] {
    EXPECT_TRUE(same_bits(lanes.first.step({{0, 0, 5}}), expected));
    return lanes.first.result().bucket;
  };
  EXPECT_EQ(step(), 8) << "alone, on the whole device";
  lanes.second.step({{1, 0, 5}});
  EXPECT_EQ(step(), 8) << "beside the sibling, on the share that the set was built for";
  backend.use_share(80);
  lanes.second.step({{1, 0, 5}});
  EXPECT_FALSE(step()) << "on another share, eagerly";
  EXPECT_EQ(step(), 8) << "the sibling rests";
  build(lanes.first);
  lanes.second.step({{1, 0, 5}});
  EXPECT_EQ(step(), 8);
}

TEST_P(CudaSibling, two_lanes_step_at_once_while_shares_move_and_shapes_are_built) {
  Runner lone(make(), sequences);
  const std::map<std::int32_t, Logits> long_prompt = lone.chunked(0, 16);
  const std::map<std::int32_t, Logits> decoded = lone.chunked(1, 1);
  const Logits others = lone.step({{2, 0, 33}, {3, 0, 40}});
  Lanes lanes = make_lanes();
  build(lanes.first);
  std::atomic<int> running{2};
  std::jthread prefill([&] {
    for (int round = 0; round < 2; ++round) {
      for (const auto& [position, logits] : lanes.second.chunked(0, 16))
        EXPECT_TRUE(same_bits(logits, long_prompt.at(position))) << "position " << position;
      EXPECT_TRUE(same_bits(lanes.second.step({{2, 0, 33}, {3, 0, 40}}), others));
    }
    --running;
  });
  std::jthread decode([&] {
    for (int round = 0; round < 4; ++round) {
      for (const auto& [position, logits] : lanes.first.chunked(1, 1))
        EXPECT_TRUE(same_bits(logits, decoded.at(position))) << "position " << position;
    }
    --running;
  });
  // The builder's thread of the prefill lane; the sets wait for its next step.
  std::vector<std::unique_ptr<StepShapes>> built;
  for (int move = 0; running > 0 || move < 4; ++move) {
    lanes.first.backend().use_share(move % 2 == 0 ? 30 : 70);
    if (built.size() == 3) {
      std::this_thread::yield();
      continue;
    }
    auto shapes = lanes.second.backend().build_shapes({.tokens = {16, 96}, .decode_max = 8}, {});
    ASSERT_TRUE(shapes) << shapes.error().message;
    built.push_back(std::move(*shapes));
  }
  prefill.join();
  decode.join();
  EXPECT_EQ(lanes.second.backend().use_shapes(std::move(built.back())), nullptr);
  // The sibling has just run steps; from the second one on this lane has the whole device.
  for (int i = 0; i < 2; ++i) EXPECT_TRUE(same_bits(lanes.second.step({{0, 0, 16}}), long_prompt.at(15)));
  EXPECT_EQ(lanes.second.result().bucket, 16);
}

TEST_P(CudaSibling, each_lane_is_told_its_share) {
  const std::unique_ptr<Backend> first = make();
  EXPECT_EQ(first->share().asked_percent, 100);
  EXPECT_EQ(first->share().given_percent, 100);
  const std::int32_t shapes_alone = first->shape_limits().count_max;
  const auto second = first->make_sibling();
  ASSERT_TRUE(second) << second.error().message;
  EXPECT_EQ(first->share().asked_percent, 50);
  (*second)->use_share(70);
  EXPECT_EQ(first->share().asked_percent, 30);
  EXPECT_EQ((*second)->share().asked_percent, 70);
  EXPECT_LT(first->shape_limits().count_max, shapes_alone) << "every bucket is captured twice";
  EXPECT_GE(first->shape_limits().count_max, 16);
#if RUBATO_CUDA_EMULATED
  EXPECT_EQ(first->share().given_percent, 33);
  EXPECT_EQ((*second)->share().given_percent, 67);
  EXPECT_NE(first->description().find("green contexts, 2 shares"), std::string::npos) << first->description();
#endif
}

TEST_P(CudaSibling, lanes_end_in_any_order) {
  for (const bool first_goes_first : {true, false}) {
    std::unique_ptr<Backend> first = make();
    std::unique_ptr<Backend> second = first->make_sibling().value();
    std::unique_ptr<Backend>& gone = first_goes_first ? first : second;
    std::unique_ptr<Backend>& left = first_goes_first ? second : first;
    gone.reset();
    Runner lane(std::move(left), sequences);
    Runner lone(make(), sequences);
    EXPECT_TRUE(same_bits(lane.step({{0, 0, 40}}), lone.step({{0, 0, 40}})));
  }
#if RUBATO_CUDA_EMULATED
  const cuda_host::Live live = cuda_host::live();
  EXPECT_EQ(live.allocations + live.pinned + live.streams + live.green_contexts, 0U);
#endif
}

#if RUBATO_CUDA_EMULATED
TEST_P(CudaSibling, without_green_contexts_two_lanes_have_priorities_and_say_so) {
  cuda_host::Options options = emulation();
  options.green_contexts = cuda_host::GreenContexts::Missing;
  cuda_host::reset(options);
  Lanes lanes = make_lanes();
  build(lanes.first);
  EXPECT_NE(lanes.second.backend().description().find("stream priorities alone"), std::string::npos);
  lanes.first.backend().use_share(30);
  EXPECT_EQ(lanes.first.backend().share().asked_percent, 30);
  EXPECT_EQ(lanes.first.backend().share().given_percent, 100);
  Runner lone(make(), sequences);
  lanes.second.step({{1, 0, 5}});
  EXPECT_TRUE(same_bits(lanes.first.step({{0, 0, 7}}), lone.step({{0, 0, 7}})));
  EXPECT_EQ(lanes.first.result().bucket, 8) << "there is one place only";
}

TEST_P(CudaSibling, memory_that_a_sibling_cannot_have_leaves_the_first_as_it_was) {
  Runner first(make(), sequences);
  // A second device, so that what a backend alone takes is known; then a first one with hardly more.
  const std::size_t needed = cuda_host::live().allocated_bytes;
  const Logits expected = first.step({{0, 0, 20}});
  cuda_host::Options options = emulation();
  options.memory_bytes = needed + needed / 16;
  { const Runner gone = std::move(first); }
  cuda_host::reset(options);
  Runner tight(make(), sequences);
  const auto refused = tight.backend().make_sibling();
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code, ErrorCode::ResourceExhausted);
  EXPECT_EQ(tight.backend().share().given_percent, 100);
  EXPECT_TRUE(same_bits(tight.step({{0, 0, 20}}), expected));
}
#endif

INSTANTIATE_TEST_SUITE_P(Types, CudaSibling, testing::Values(DataType::Float32, DataType::BFloat16),
                         [](const auto& parameter) { return std::string(to_string(parameter.param)); });

}  // namespace
}  // namespace rubato::engine
