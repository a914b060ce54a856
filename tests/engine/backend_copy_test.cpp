// SPDX-License-Identifier: Apache-2.0
// Blocks copied into another backend's pool hold what it would have written itself: a sequence goes on there with the bits of an
// undisturbed run, also while both backends run steps.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <thread>

#include "engine/cpu/backend.h"
#include "engine/cpu/ops.h"
#include "engine/reference/backend.h"
#include "tests/engine/backend_harness.h"

namespace rubato::engine {
namespace {

using testing::HasSubstr;
using Make = Result<std::unique_ptr<Backend>> (*)(const ModelConfig&, WeightSource&, const BackendOptions&);

struct Case {
  std::string name;
  Make make;
  DataType dtype;
};

void PrintTo(const Case& one, std::ostream* out) {
  *out << one.name;
}

constexpr std::int32_t source_blocks = 40;
constexpr std::int32_t target_blocks = 60;

std::unique_ptr<Backend> make_one(Make make, const ModelConfig& config, DataType dtype, std::int32_t block_count) {
  const std::unique_ptr<WeightSource> weights = make_synthetic_weights(config, 7, dtype);
  return make(config, *weights,
              {.dtype = dtype,
               .block_count = block_count,
               .max_tokens_per_step = 256,
               .max_rows = 8,
               .max_model_len = 256,
               .threads = 2,
               .poison = true})
      .value();
}

bool always() {
  return true;
}

std::vector<BlockCopy> copies_of(const Sequence& from, const Sequence& to) {
  std::vector<BlockCopy> copies;
  for (std::size_t i = 0; i < from.blocks.size(); ++i) copies.push_back({.from = from.blocks[i], .to = to.blocks[i]});
  return copies;
}

class CopyTest : public testing::TestWithParam<Case> {
 protected:
  [[nodiscard]] std::unique_ptr<Backend> make(std::int32_t block_count) const {
    return make_one(GetParam().make, config_, GetParam().dtype, block_count);
  }
  [[nodiscard]] Runner runner(std::int32_t block_count, const std::vector<Sequence>& sequences) const {
    return {make(block_count), sequences};
  }
  const ModelConfig config_ = named_configs()[0].config;
  const std::vector<std::int32_t> lengths_{100, 60, 90};
  const std::vector<Sequence> there_ = draw_sequences(lengths_, config_.vocabulary, source_blocks, 1);
  const std::vector<Sequence> here_ = draw_sequences(lengths_, config_.vocabulary, target_blocks, 2);
};

INSTANTIATE_TEST_SUITE_P(Backends, CopyTest,
                         testing::Values(Case{"cpu_f32", make_cpu_backend, DataType::Float32},
                                         Case{"cpu_bf16", make_cpu_backend, DataType::BFloat16},
                                         Case{"reference_f32", make_reference_backend, DataType::Float32},
                                         Case{"reference_bf16", make_reference_backend, DataType::BFloat16}),
                         [](const auto& one) { return one.param.name; });

TEST_P(CopyTest, a_sequence_goes_on_in_another_pool_with_the_bits_of_an_undisturbed_run) {
  Runner alone = runner(source_blocks, there_);
  Runner source = runner(source_blocks, there_);
  Runner target = runner(target_blocks, here_);
  const auto want = alone.chunked(0, 1);
  source.step({{0, 0, 37}});
  ASSERT_NE(there_[0].blocks[0].value, here_[0].blocks[0].value);
  const std::vector<BlockCopy> copies = copies_of(there_[0], here_[0]);
  ASSERT_TRUE(target.backend().copy_blocks(source.backend(), {.blocks = copies}, always));
  EXPECT_TRUE(same_bits(target.step({{0, 37, 1}}), want.at(37)));
  EXPECT_TRUE(same_bits(target.step({{0, 38, 62}}), want.at(99)));
  EXPECT_TRUE(same_bits(source.step({{0, 37, 20}}), want.at(56)));  // the source still has its own
}

TEST_P(CopyTest, within_one_pool_and_onto_itself_is_allowed) {
  const std::vector<Sequence> elsewhere = draw_sequences({64, 64}, config_.vocabulary, source_blocks, 1);
  Runner one = runner(source_blocks, elsewhere);
  const Logits want = (one.step({{0, 0, 32}}), one.step({{0, 32, 1}}));
  std::vector<BlockCopy> copies = copies_of(elsewhere[0], elsewhere[0]);
  ASSERT_TRUE(one.backend().copy_blocks(one.backend(), {.blocks = copies}, always));
  EXPECT_TRUE(same_bits(one.step({{0, 32, 1}}), want));
  // The other sequence's blocks, and the first sequence's token in front of them.
  copies = copies_of(elsewhere[0], elsewhere[1]);
  ASSERT_TRUE(one.backend().copy_blocks(one.backend(), {.blocks = copies}, always));
  const SamplingState greedy({.temperature = 0.0}, {}, config_.vocabulary);
  const StepRow row{.position = 32,
                    .tokens = std::span(elsewhere[0].tokens).subspan(32, 1),
                    .blocks = elsewhere[1].blocks,
                    .sampling = &greedy};
  ASSERT_TRUE(one.backend().run(std::span(&row, 1), one.result()));
  EXPECT_TRUE(same_bits(one.result().logits, want));
}

TEST_P(CopyTest, nothing_more_is_written_once_it_is_no_longer_allowed) {
  Runner source = runner(source_blocks, there_);
  Runner target = runner(target_blocks, here_);
  source.step({{0, 0, 100}});
  const std::vector<BlockCopy> copies = copies_of(there_[0], here_[0]);
  int asked = 0;
  const Result<void> copied = target.backend().copy_blocks(source.backend(), {.blocks = copies}, [&] { return ++asked <= 2; });
  ASSERT_FALSE(copied);
  EXPECT_EQ(copied.error().code, ErrorCode::Cancelled);
  EXPECT_EQ(asked, 3);
  target.step({{0, 31, 1}});  // reads the two blocks that came
  EXPECT_TRUE(target.result().sample_valid.at(0));
  target.step({{0, 47, 1}});  // and the third, which is as poisoned as it was
  EXPECT_FALSE(target.result().sample_valid.at(0));
}

TEST_P(CopyTest, copies_beside_running_steps_of_both_change_no_bit) {
  Runner alone = runner(source_blocks, there_);
  std::vector<std::map<std::int32_t, Logits>> want;
  for (std::size_t i = 0; i < lengths_.size(); ++i) want.push_back(alone.chunked(i, 1));
  Runner source = runner(source_blocks, there_);
  Runner target = runner(target_blocks, here_);
  source.step({{0, 0, 64}});
  int wrong = 0;
  for (int round = 0; round < 5; ++round) {
    std::thread one([&] {  // reads what is copied from
      for (std::int32_t i = 64; i < 80; ++i) wrong += same_bits(source.step({{0, i, 1}}), want[0].at(i)) ? 0 : 1;
    });
    std::thread copier([&] {
      const std::vector<BlockCopy> all = copies_of(there_[0], here_[0]);
      EXPECT_TRUE(target.backend().copy_blocks(source.backend(), {.blocks = std::span(all).first(4)}, always));
    });
    const auto beside = target.chunked(2, 7);
    copier.join();
    one.join();
    for (const auto& [position, logits] : beside) EXPECT_TRUE(same_bits(logits, want[2].at(position)));
    EXPECT_TRUE(same_bits(target.step({{0, 64, 5}}), want[0].at(68)));
    target.backend().released(here_[0].blocks);
  }
  EXPECT_EQ(wrong, 0);
}

TEST(Copy, what_does_not_fit_is_refused_by_name) {
  const ModelConfig config = named_configs()[0].config;
  const std::unique_ptr<Backend> target = make_one(make_cpu_backend, config, DataType::Float32, 8);
  const std::vector<BlockCopy> copies{{.from = BlockId{0}, .to = BlockId{1}}};
  const auto refuses = [&](const Backend& source, const std::string& what, const std::string& there) {
    const Result<void> copied = target->copy_blocks(source, {.blocks = copies}, [] {
      ADD_FAILURE() << "asked for a block";
      return true;
    });
    ASSERT_FALSE(copied) << what;
    EXPECT_EQ(copied.error().code, ErrorCode::InvalidArgument);
    EXPECT_THAT(copied.error().message, HasSubstr(what));
    EXPECT_THAT(copied.error().message, HasSubstr(there));
  };
  const auto changed = [&](std::int32_t ModelConfig::*member, std::int32_t value) {
    ModelConfig other = config;
    other.*member = value;
    return make_one(make_cpu_backend, other, DataType::Float32, 8);
  };
  refuses(*changed(&ModelConfig::layers, 3), "layers", "3");
  refuses(*changed(&ModelConfig::kv_heads, 2), "kv_heads", "2");
  refuses(*changed(&ModelConfig::head_size, 16), "head_size", "16");
  refuses(*changed(&ModelConfig::hidden_size, 80), "hidden_size", "80");
  refuses(*make_one(make_cpu_backend, config, DataType::BFloat16, 8), "dtype", "BFloat16");
  refuses(*make_one(make_reference_backend, config, DataType::Float32, 8), "kernels", "another kind");

  class Foreign final : public Backend {
   public:
    explicit Foreign(const ModelConfig& model) : config_(model) {}
    Result<void> run(std::span<const StepRow>, StepResult&) override { return {}; }
    void capture_logits(bool) override {}
    void released(std::span<const BlockId>) override {}
    [[nodiscard]] const ModelConfig& config() const override { return config_; }
    [[nodiscard]] std::string description() const override { return "foreign"; }

   private:
    ModelConfig config_;
  } foreign(config);
  refuses(foreign, "takes no blocks", "foreign");
}

TEST(Copy, blocks_that_other_kernels_wrote_are_refused) {
  const std::vector<cpu::KernelPath> paths = cpu::kernel_paths(DataType::BFloat16);
  if (paths.size() < 2) GTEST_SKIP() << "this machine has one kind of kernels";
  const ModelConfig config = named_configs()[0].config;
  const std::unique_ptr<WeightSource> weights = make_synthetic_weights(config, 7, DataType::BFloat16);
  const BackendOptions options{
      .dtype = DataType::BFloat16, .block_count = 8, .max_tokens_per_step = 32, .max_rows = 4, .max_model_len = 64};
  const std::unique_ptr<Backend> one = cpu::make_backend(config, *weights, options, paths[0]).value();
  const std::unique_ptr<Backend> other = cpu::make_backend(config, *weights, options, paths[1]).value();
  const std::vector<BlockCopy> copies{{.from = BlockId{0}, .to = BlockId{1}}};
  const Result<void> copied = one->copy_blocks(*other, {.blocks = copies}, always);
  ASSERT_FALSE(copied);
  EXPECT_EQ(copied.error().field, "kernels");
}

}  // namespace
}  // namespace rubato::engine
