// SPDX-License-Identifier: Apache-2.0
// What the backend refuses, what it says then, and that a step takes no memory.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>
#include <optional>

#include "engine/cpu/backend.h"
#include "engine/reference/backend.h"
#include "tests/engine/backend_harness.h"

namespace rubato::engine {
namespace {

using testing::HasSubstr;

const BackendOptions options{.block_count = 40, .max_tokens_per_step = 64, .max_rows = 8, .max_model_len = 128, .threads = 2};

/// The synthetic source, with one tensor missing or spoilt.
class DamagedSource final : public WeightSource {
 public:
  DamagedSource(const ModelConfig& config, std::string name, std::optional<float> fill)
      : inner_(make_synthetic_weights(config, 1, DataType::Float32)), name_(std::move(name)), fill_(fill) {}
  [[nodiscard]] bool has(std::string_view name) const override { return name != name_ && inner_->has(name); }
  [[nodiscard]] Result<TensorView> load(std::string_view name, std::span<const std::int64_t> shape) override {
    if (name != name_) return inner_->load(name, shape);
    if (!fill_) return unexpected(ErrorCode::InvalidArgument, "tensor " + name_ + " is missing");
    std::int64_t count = 1;
    for (const std::int64_t size : shape) count *= size;
    values_.assign(static_cast<std::size_t>(count), *fill_);
    return TensorView{
        .dtype = DataType::Float32, .shape = {shape.begin(), shape.end()}, .bytes = std::as_bytes(std::span(values_))};
  }

 private:
  std::unique_ptr<WeightSource> inner_;
  std::string name_;
  std::optional<float> fill_;
  std::vector<float> values_;
};

using Make = Result<std::unique_ptr<Backend>> (*)(const ModelConfig&, WeightSource&, const BackendOptions&);
constexpr Make makers[] = {make_cpu_backend, make_reference_backend};

TEST(BackendLimits, options_out_of_range_are_named) {
  const ModelConfig config = named_configs()[0].config;
  const std::unique_ptr<WeightSource> weights = make_synthetic_weights(config, 1, DataType::Float32);
  const auto refuses = [&](const char* name, auto&& change) {
    for (const std::int32_t value : {0, -1, std::numeric_limits<std::int32_t>::min(), std::numeric_limits<std::int32_t>::max()}) {
      ModelConfig changed_config = config;
      BackendOptions changed = options;
      change(changed_config, changed, value);
      for (const Make make : makers) {
        const Result<std::unique_ptr<Backend>> made = make(changed_config, *weights, changed);
        ASSERT_FALSE(made) << name << " " << value;
        EXPECT_EQ(made.error().code, ErrorCode::InvalidArgument) << made.error().message;
        EXPECT_THAT(made.error().message, HasSubstr(name));
        EXPECT_THAT(made.error().message, HasSubstr(std::to_string(value)));
      }
    }
  };
  refuses("block_count", [](ModelConfig&, BackendOptions& o, std::int32_t v) { o.block_count = v; });
  refuses("max_tokens_per_step", [](ModelConfig&, BackendOptions& o, std::int32_t v) { o.max_tokens_per_step = v; });
  refuses("max_rows", [](ModelConfig&, BackendOptions& o, std::int32_t v) { o.max_rows = v; });
  refuses("max_model_len", [](ModelConfig&, BackendOptions& o, std::int32_t v) { o.max_model_len = v; });
  refuses("threads", [](ModelConfig&, BackendOptions& o, std::int32_t v) { o.threads = v; });
  refuses("hidden_size", [](ModelConfig& c, BackendOptions&, std::int32_t v) { c.hidden_size = v; });
  refuses("vocabulary", [](ModelConfig& c, BackendOptions&, std::int32_t v) { c.vocabulary = v; });
}

TEST(BackendLimits, shapes_that_contradict_each_other_are_refused) {
  ModelConfig config = named_configs()[0].config;
  const std::unique_ptr<WeightSource> weights = make_synthetic_weights(config, 1, DataType::Float32);
  config.kv_heads = 3;
  EXPECT_THAT(make_cpu_backend(config, *weights, options).error().message, HasSubstr("heads 8 is not a multiple of kv_heads 3"));
  config.kv_heads = 4;
  config.head_size = 7;
  EXPECT_THAT(make_cpu_backend(config, *weights, options).error().message, HasSubstr("head_size 7 is odd"));
}

TEST(BackendLimits, a_cache_larger_than_memory_is_an_error_with_its_bytes) {
  const ModelConfig config = named_configs()[0].config;
  const std::unique_ptr<WeightSource> weights = make_synthetic_weights(config, 1, DataType::Float32);
  BackendOptions huge = options;
  huge.block_count = 1 << 30;  // 2^30 blocks x 2 layers x 4 heads x 16 tokens x 8 x 2 x 4 bytes = 8 TiB
  const Result<std::unique_ptr<Backend>> made = make_cpu_backend(config, *weights, huge);
  ASSERT_FALSE(made);
  EXPECT_EQ(made.error().code, ErrorCode::ResourceExhausted);
  EXPECT_THAT(made.error().message, HasSubstr("KV cache"));
  EXPECT_THAT(made.error().message, HasSubstr("8796093022208"));
}

TEST(BackendLimits, float16_arithmetic_is_refused_with_the_alternatives) {
  const ModelConfig config = named_configs()[0].config;
  const std::unique_ptr<WeightSource> weights = make_synthetic_weights(config, 1, DataType::Float16);
  BackendOptions half = options;
  half.dtype = DataType::Float16;
  const Result<std::unique_ptr<Backend>> made = make_cpu_backend(config, *weights, half);
  ASSERT_FALSE(made);
  EXPECT_EQ(made.error().field, "dtype");
  EXPECT_THAT(made.error().message, HasSubstr("Float32"));
}

TEST(BackendLimits, a_missing_tensor_is_named) {
  const ModelConfig config = named_configs()[2].config;
  for (const std::string name : {"model.embed_tokens.weight", "model.norm.weight", "model.layers.1.self_attn.k_proj.bias",
                                 "model.layers.0.mlp.up_proj.weight", "model.layers.1.post_attention_layernorm.weight"}) {
    DamagedSource weights(config, name, std::nullopt);
    for (const Make make : makers) {
      const Result<std::unique_ptr<Backend>> made = make(config, weights, options);
      ASSERT_FALSE(made) << name;
      EXPECT_THAT(made.error().message, HasSubstr(name));
    }
  }
}

TEST(BackendLimits, a_sequence_whose_logits_are_not_finite_fails_alone) {
  ModelConfig config = named_configs()[0].config;
  config.tied_embeddings = false;
  // Only token 5's embedding is NaN: whoever reads it fails, companions do not.
  class OneBadToken final : public WeightSource {
   public:
    explicit OneBadToken(const ModelConfig& model) : inner_(make_synthetic_weights(model, 1, DataType::Float32)) {}
    [[nodiscard]] bool has(std::string_view name) const override { return inner_->has(name); }
    [[nodiscard]] Result<TensorView> load(std::string_view name, std::span<const std::int64_t> shape) override {
      Result<TensorView> view = inner_->load(name, shape);
      if (!view || name != "model.embed_tokens.weight") return view;
      values_.resize(view->bytes.size() / sizeof(float));
      std::memcpy(values_.data(), view->bytes.data(), view->bytes.size());
      const auto width = static_cast<std::size_t>(shape[1]);
      std::fill_n(values_.begin() + static_cast<std::int64_t>(5 * width), width, std::numeric_limits<float>::quiet_NaN());
      view->bytes = std::as_bytes(std::span(values_));
      return view;
    }

   private:
    std::unique_ptr<WeightSource> inner_;
    std::vector<float> values_;
  } weights(config);
  const std::unique_ptr<Backend> backend = make_cpu_backend(config, weights, options).value();
  const SamplingState greedy({.temperature = 0.0}, {}, config.vocabulary);
  const std::vector<TokenId> good{1, 2, 3};
  const std::vector<TokenId> bad{1, 5, 3};
  const std::vector<BlockId> blocks{{0}, {1}, {2}};
  const std::vector<StepRow> rows{
      {.position = 0, .tokens = good, .blocks = std::span(blocks).subspan(0, 1), .sampling = &greedy},
      {.position = 0, .tokens = bad, .blocks = std::span(blocks).subspan(1, 1), .sampling = &greedy},
      {.position = 0, .tokens = good, .blocks = std::span(blocks).subspan(2, 1), .sampling = &greedy}};
  StepResult result;
  ASSERT_TRUE(backend->run(rows, result));
  ASSERT_EQ(result.sample_valid.size(), 3U);
  EXPECT_TRUE(result.sample_valid[0]);
  EXPECT_FALSE(result.sample_valid[1]);
  EXPECT_TRUE(result.sample_valid[2]);
  EXPECT_EQ(result.samples[0].token, result.samples[2].token);
}

TEST(BackendLimits, description_names_the_kernels_and_threads) {
  const ModelConfig config = named_configs()[0].config;
  const std::unique_ptr<WeightSource> weights = make_synthetic_weights(config, 1, DataType::Float32);
  EXPECT_THAT(make_cpu_backend(config, *weights, options).value()->description(), testing::MatchesRegex("cpu .+, 2 threads"));
}

}  // namespace
}  // namespace rubato::engine
