// SPDX-License-Identifier: Apache-2.0
// config.json and generation_config.json to ModelConfig: defaults by family, both rope spellings, united end tokens, and refusals
// that name the file and the key.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "engine/backend.h"
#include "engine/model/config.h"
#include "engine/model/tensors.h"
#include "tests/support/temporary_folder.h"

namespace rubato::engine {
namespace {

using nlohmann::json;
using test::TemporaryFolder;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;

json llama() {
  return {{"architectures", {"LlamaForCausalLM"}},
          {"hidden_size", 64},
          {"num_hidden_layers", 2},
          {"num_attention_heads", 8},
          {"intermediate_size", 172},
          {"vocab_size", 512}};
}

json family(const char* architecture) {
  json config = llama();
  config["architectures"] = {architecture};
  config["num_key_value_heads"] = 4;
  return config;
}

Result<ModelConfig> read(const json& config, const json& generation = nullptr) {
  const TemporaryFolder folder;
  folder.write("config.json", config.dump());
  if (!generation.is_null()) folder.write("generation_config.json", generation.dump());
  return read_model_config(folder.path());
}

std::string refusal(const json& config) {
  const auto result = read(config);
  return result ? "accepted" : result.error().message;
}

TEST(Config, reads_a_real_folder) {
  const std::filesystem::path folder = RUBATO_SOURCE_DIR "/../shared/data/models/stories260k";
  if (!std::filesystem::exists(folder)) GTEST_SKIP() << "needs " << folder;
  const auto config = read_model_config(folder);
  ASSERT_TRUE(config) << config.error().message;
  EXPECT_EQ(config->architecture, "LlamaForCausalLM");
  EXPECT_EQ(config->hidden_size, 64);
  EXPECT_EQ(config->layers, 5);
  EXPECT_EQ(config->heads, 8);
  EXPECT_EQ(config->kv_heads, 4);
  EXPECT_EQ(config->head_size, 8);
  EXPECT_EQ(config->feed_forward, 172);
  EXPECT_EQ(config->vocabulary, 512);
  EXPECT_EQ(config->max_position, 512);
  EXPECT_FLOAT_EQ(config->rms_norm_epsilon, 1e-5F);
  EXPECT_TRUE(config->tied_embeddings);
  EXPECT_FALSE(config->attention_bias);
  EXPECT_EQ(config->begin_token, 1);
  EXPECT_THAT(config->end_tokens, ElementsAre(2));
  EXPECT_EQ(config->checkpoint_dtype, DataType::Float32);
}

TEST(Config, left_out_keys_take_the_familys_defaults) {
  const auto config = read(llama());
  ASSERT_TRUE(config) << config.error().message;
  EXPECT_EQ(config->kv_heads, 8);
  EXPECT_EQ(config->head_size, 8);
  EXPECT_EQ(config->max_position, 2048);
  EXPECT_FLOAT_EQ(config->rms_norm_epsilon, 1e-6F);
  EXPECT_EQ(config->rope.theta, 10000.0);
  EXPECT_EQ(config->rope.scaling, RopeScaling::None);
  EXPECT_FALSE(config->attention_bias);
  EXPECT_FALSE(config->qk_norm);
  EXPECT_THAT(config->end_tokens, IsEmpty());
  EXPECT_FALSE(config->begin_token.has_value());
}

TEST(Config, embeddings_are_untied_unless_stated_in_every_family) {
  for (const char* name : {"LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"}) {
    json config = family(name);
    config["sliding_window"] = nullptr;
    config["max_position_embeddings"] = 4096;
    const auto left_out = read(config);
    ASSERT_TRUE(left_out) << name << ": " << left_out.error().message;
    EXPECT_FALSE(left_out->tied_embeddings) << name;
    config["tie_word_embeddings"] = true;
    EXPECT_TRUE(read(config)->tied_embeddings) << name;
  }
}

TEST(Config, families_differ_in_bias_norm_and_head_size) {
  const auto qwen2 = read(family("Qwen2ForCausalLM"));
  ASSERT_TRUE(qwen2) << qwen2.error().message;
  EXPECT_TRUE(qwen2->attention_bias);
  EXPECT_FALSE(qwen2->attention_output_bias);
  EXPECT_FALSE(qwen2->qk_norm);
  EXPECT_EQ(qwen2->max_position, 32768);

  const auto qwen3 = read(family("Qwen3ForCausalLM"));
  ASSERT_TRUE(qwen3) << qwen3.error().message;
  EXPECT_FALSE(qwen3->attention_bias);
  EXPECT_TRUE(qwen3->qk_norm);
  EXPECT_EQ(qwen3->head_size, 128);

  json biased = llama();
  biased["attention_bias"] = true;
  const auto with_bias = read(biased);
  ASSERT_TRUE(with_bias);
  EXPECT_TRUE(with_bias->attention_bias);
  EXPECT_TRUE(with_bias->attention_output_bias);
}

TEST(Config, end_tokens_of_both_files_are_united) {
  json config = llama();
  config["eos_token_id"] = 2;
  const auto both = read(config, {{"eos_token_id", {2, 7}}, {"bos_token_id", 1}});
  ASSERT_TRUE(both) << both.error().message;
  EXPECT_THAT(both->end_tokens, ElementsAre(2, 7));
  EXPECT_EQ(both->begin_token, 1);

  config["eos_token_id"] = {5, 9};
  EXPECT_THAT(read(config, {{"eos_token_id", 3}})->end_tokens, ElementsAre(5, 9, 3));
  config["eos_token_id"] = nullptr;
  EXPECT_THAT(read(config, {{"eos_token_id", nullptr}})->end_tokens, IsEmpty());
}

TEST(Config, rope_scaling_is_read_in_all_spellings) {
  json old_spelling = llama();
  old_spelling["rope_scaling"] = {{"type", "linear"}, {"factor", 4.0}};
  const auto linear = read(old_spelling);
  ASSERT_TRUE(linear) << linear.error().message;
  EXPECT_EQ(linear->rope.scaling, RopeScaling::Linear);
  EXPECT_EQ(linear->rope.factor, 4.0);

  json llama3 = llama();
  llama3["rope_theta"] = 500000.0;
  llama3["rope_scaling"] = {{"rope_type", "llama3"},
                            {"factor", 8.0},
                            {"low_freq_factor", 1.0},
                            {"high_freq_factor", 4.0},
                            {"original_max_position_embeddings", 8192}};
  json parameters = llama();
  parameters["rope_parameters"] = llama3["rope_scaling"];
  parameters["rope_parameters"]["rope_theta"] = 500000;
  for (const json& spelling : {llama3, parameters}) {
    const auto config = read(spelling);
    ASSERT_TRUE(config) << config.error().message;
    EXPECT_EQ(config->rope.scaling, RopeScaling::Llama3);
    EXPECT_EQ(config->rope.theta, 500000.0);
    EXPECT_EQ(config->rope.factor, 8.0);
    EXPECT_EQ(config->rope.low_frequency_factor, 1.0);
    EXPECT_EQ(config->rope.high_frequency_factor, 4.0);
    EXPECT_EQ(config->rope.original_max_position, 8192);
  }

  json plain = llama();
  plain["rope_parameters"] = {{"rope_theta", 1e6}, {"rope_type", "default"}};
  const auto unscaled = read(plain);
  ASSERT_TRUE(unscaled) << unscaled.error().message;
  EXPECT_EQ(unscaled->rope.theta, 1e6);
  EXPECT_EQ(unscaled->rope.scaling, RopeScaling::None);
}

struct Refusal {
  const char* key;
  json value;
  const char* says;
};

class ConfigRefusal : public testing::TestWithParam<Refusal> {};

TEST_P(ConfigRefusal, names_file_and_key) {
  json config = llama();
  if (GetParam().value.is_discarded()) {
    config.erase(GetParam().key);
  } else {
    config[GetParam().key] = GetParam().value;
  }
  const std::string message = refusal(config);
  EXPECT_THAT(message, HasSubstr("config.json: "));
  EXPECT_THAT(message, HasSubstr(GetParam().key));
  EXPECT_THAT(message, HasSubstr(GetParam().says));
}

const json absent = json(json::value_t::discarded);

INSTANTIATE_TEST_SUITE_P(
    Keys, ConfigRefusal,
    testing::Values(
        Refusal{"hidden_size", absent, "is missing"}, Refusal{"vocab_size", absent, "is missing"},
        Refusal{"hidden_size", 0, "outside 1..131072"}, Refusal{"hidden_size", -64, "outside"},
        Refusal{"hidden_size", "64", "no integer"}, Refusal{"hidden_size", 64.5, "no integer"},
        Refusal{"num_hidden_layers", 18446744073709551615ULL, "outside"}, Refusal{"num_hidden_layers", 2000000, "outside"},
        Refusal{"num_attention_heads", 7, "does not divide hidden_size"},
        Refusal{"num_key_value_heads", 3, "does not divide num_attention_heads"}, Refusal{"num_key_value_heads", 0, "outside"},
        Refusal{"num_key_value_heads", 16, "does not divide"}, Refusal{"head_dim", 7, "even"},
        Refusal{"head_dim", 100000, "outside"}, Refusal{"vocab_size", 1LL << 40, "outside"},
        Refusal{"intermediate_size", true, "no integer"}, Refusal{"max_position_embeddings", 0, "outside"},
        Refusal{"rms_norm_eps", 0, "outside"}, Refusal{"rms_norm_eps", "small", "no number"},
        Refusal{"rope_theta", -1, "outside"}, Refusal{"tie_word_embeddings", "yes", "neither true nor false"},
        Refusal{"hidden_act", "gelu", "supported: silu"}, Refusal{"mlp_bias", true, "not supported"},
        Refusal{"torch_dtype", "float64", "supported: float32"}, Refusal{"quantization_config", {{"bits", 4}}, "not supported"},
        Refusal{"eos_token_id", 512, "outside 0..511"}, Refusal{"eos_token_id", {2, "x"}, "no integer"},
        Refusal{"bos_token_id", -1, "outside"},
        Refusal{"rope_scaling", {{"type", "dynamic"}, {"factor", 2.0}}, "\"dynamic\" is not supported"},
        Refusal{"rope_scaling", {{"rope_type", "yarn"}, {"factor", 2.0}}, "\"yarn\" is not supported"},
        Refusal{"rope_scaling", {{"type", "linear"}}, "factor: is missing"},
        Refusal{"rope_scaling", {{"type", "linear"}, {"factor", 0.5}}, "below 1"},
        Refusal{"rope_scaling", {{"rope_type", "llama3"}, {"factor", 8.0}}, "low_freq_factor: is missing"},
        Refusal{"rope_scaling", 4, "no object"},
        Refusal{"rope_parameters", {{"full_attention", {{"rope_type", "default"}}}}, "rope_type: is missing"},
        Refusal{"partial_rotary_factor", 0.5, "only 1 is supported"},
        Refusal{"architectures", {"GPT2LMHeadModel"}, "supported: LlamaForCausalLM, MistralForCausalLM"},
        Refusal{"architectures", absent, "is missing"}, Refusal{"architectures", "LlamaForCausalLM", "no list of one name"},
        Refusal{"layer_types", {"full_attention", "sliding_attention"}, "not supported"}));

TEST(Config, all_faults_of_a_file_come_together) {
  json config = llama();
  config["hidden_size"] = -1;
  config["vocab_size"] = "many";
  config["hidden_act"] = "relu";
  const std::string message = refusal(config);
  EXPECT_THAT(message, HasSubstr("hidden_size"));
  EXPECT_THAT(message, HasSubstr("vocab_size"));
  EXPECT_THAT(message, HasSubstr("hidden_act"));
}

TEST(Config, a_sliding_window_in_use_is_refused_and_an_unused_one_is_not) {
  json mistral = family("MistralForCausalLM");
  EXPECT_THAT(refusal(mistral), HasSubstr("sliding_window"));  // an absent key means 4096 in this family
  mistral["sliding_window"] = nullptr;
  EXPECT_TRUE(read(mistral));
  mistral["sliding_window"] = 4096;
  EXPECT_THAT(refusal(mistral), HasSubstr("sliding_window: 4096 is below max_position_embeddings"));
  mistral["max_position_embeddings"] = 4096;
  EXPECT_TRUE(read(mistral));

  json qwen = family("Qwen2ForCausalLM");
  qwen["sliding_window"] = 4096;
  EXPECT_TRUE(read(qwen));  // use_sliding_window is off by default
  qwen["use_sliding_window"] = true;
  EXPECT_TRUE(read(qwen));  // only layers from max_window_layers (28) on would use it
  qwen["max_window_layers"] = 1;
  EXPECT_THAT(refusal(qwen), HasSubstr("sliding_window"));
}

TEST(Config, damaged_files_are_refused_by_name) {
  const TemporaryFolder folder;
  EXPECT_EQ(read_model_config(folder.path()).error().code, ErrorCode::NotFound);
  for (const char* content : {"", "{", "[]", "null", "{\"a\":1}}", "\xff\xfe"}) {
    folder.write("config.json", content);
    const auto result = read_model_config(folder.path());
    ASSERT_FALSE(result) << content;
    EXPECT_THAT(result.error().message, HasSubstr("config.json: ")) << content;
  }
  folder.write("config.json", std::string(1 << 20, '['));
  EXPECT_FALSE(read_model_config(folder.path()));
  folder.write("config.json", std::string((4 << 20) + 1, ' '));
  EXPECT_THAT(read_model_config(folder.path()).error().message, HasSubstr("is larger than"));
  folder.write("config.json", llama().dump());
  folder.write("generation_config.json", "{\"eos_token_id\": [1, 99999]}");
  EXPECT_THAT(read_model_config(folder.path()).error().message, HasSubstr("generation_config.json: eos_token_id: 99999"));
  folder.write("generation_config.json", "{");
  EXPECT_THAT(read_model_config(folder.path()).error().message, HasSubstr("generation_config.json: is no valid JSON"));
}

TEST(Config, a_folder_in_the_place_of_the_file_is_refused) {
  const TemporaryFolder folder;
  std::filesystem::create_directories(folder.path() / "config.json");
  EXPECT_THAT(read_model_config(folder.path()).error().message, HasSubstr("no regular file"));
}

SyntheticModel synthetic() {
  return {.architecture = Architecture::Llama,
          .hidden_size = 64,
          .layers = 2,
          .heads = 4,
          .kv_heads = 2,
          .head_size = 0,
          .feed_forward = 128,
          .vocabulary = 256,
          .tied_embeddings = false,
          .seed = 1};
}

TEST(Config, synthetic_models_are_checked_field_by_field) {
  const auto config = synthetic_model_config(synthetic());
  ASSERT_TRUE(config) << config.error().message;
  EXPECT_EQ(config->head_size, 16);
  EXPECT_FALSE(config->tied_embeddings);
  const auto field = [](auto change) {
    SyntheticModel model = synthetic();
    change(model);
    const auto result = synthetic_model_config(model);
    return result ? std::string("accepted") : result.error().field;
  };
  EXPECT_EQ(field([](SyntheticModel& m) { m.hidden_size = 0; }), "spec.model.synthetic.hiddenSize");
  EXPECT_EQ(field([](SyntheticModel& m) { m.layers = 100000; }), "spec.model.synthetic.layers");
  EXPECT_EQ(field([](SyntheticModel& m) { m.heads = 0; }), "spec.model.synthetic.heads");
  EXPECT_EQ(field([](SyntheticModel& m) { m.heads = 6; }), "spec.model.synthetic.heads");
  EXPECT_EQ(field([](SyntheticModel& m) { m.kv_heads = 3; }), "spec.model.synthetic.kvHeads");
  EXPECT_EQ(field([](SyntheticModel& m) { m.head_size = 15; }), "spec.model.synthetic.headSize");
  EXPECT_EQ(field([](SyntheticModel& m) { m.feed_forward = -1; }), "spec.model.synthetic.feedForward");
  EXPECT_EQ(field([](SyntheticModel& m) { m.vocabulary = 0; }), "spec.model.synthetic.vocabulary");
}

TEST(Config, a_pool_is_divided_between_blocks_states_and_snapshots) {
  const auto size = [](Architecture architecture, std::int64_t bytes, bool caching) {
    SyntheticModel model{.architecture = architecture,
                         .hidden_size = 64,
                         .layers = 4,
                         .mamba_heads = 4,
                         .mamba_head_size = 32,
                         .state_size = 32,
                         .vocabulary = 256};
    if (architecture == Architecture::Hybrid) {
      model.heads = 4;
      model.kv_heads = 2;
      model.feed_forward = 128;
      model.attention_every = 2;
    }
    const ModelConfig config = *synthetic_model_config(model);
    return cache_size(
        config, DataType::Float32,
        {.bytes = bytes, .max_model_len = 100, .sequences = 5, .prefix_caching = {.enabled = caching, .snapshot_tokens = 64}});
  };
  // A layer's state: 3 inputs of 128 + 2 * 32 channels, and 128 rows of 32.
  constexpr std::int64_t layer = (3 * 192 + 128 * 32) * 4;
  constexpr std::int64_t block = 2 * 2 * 16 * 4 * 16 * 2;  // keys and values of two layers

  const CacheSize hybrid = size(Architecture::Hybrid, 1 << 20, true);
  EXPECT_EQ(hybrid.state_bytes, 2 * layer);
  EXPECT_EQ(hybrid.block_bytes, block);
  const std::int64_t rest = (1 << 20) - 5 * 2 * layer;
  const std::int64_t snapshots = (rest - 7 * block) / (2 * layer + 4 * block);  // one with four blocks each, beside the longest
  EXPECT_EQ(hybrid.state_count, 5 + snapshots);
  EXPECT_EQ(hybrid.block_count, (rest - snapshots * 2 * layer) / block);
  EXPECT_EQ(size(Architecture::Hybrid, 1 << 20, false).state_count, 5);
  EXPECT_EQ(size(Architecture::Hybrid, 1 << 20, false).block_count, rest / block);
  // Less than all sequences need: fewer run at once, and blocks get what is left.
  EXPECT_EQ(size(Architecture::Hybrid, 5 * layer + 7 * block, true).state_count, 2);
  EXPECT_EQ(size(Architecture::Hybrid, 4 * layer + 7 * block, true).block_count, 7)
      << "the longest one fits whatever runs beside it";
  EXPECT_EQ(size(Architecture::Hybrid, 100, true).state_count, 0);
  EXPECT_EQ(size(Architecture::Hybrid, -1, true).block_count, 0);

  const CacheSize mamba2 = size(Architecture::Mamba2, 1 << 20, true);
  EXPECT_EQ(mamba2.block_bytes, 0);
  EXPECT_EQ(mamba2.state_count, (1 << 20) / (4 * layer));
  EXPECT_EQ(mamba2.block_count, 5 * 7 + (mamba2.state_count - 5) * 4) << "the longest of each, and prefixes of the snapshots";
  EXPECT_EQ(size(Architecture::Mamba2, 1 << 20, false).state_count, 5);
  EXPECT_EQ(size(Architecture::Mamba2, 1 << 20, false).block_count, 5 * 7);
}

TEST(Config, sizes_follow_from_the_tensors) {
  ModelConfig config = *synthetic_model_config(synthetic());
  // embedding and head 2 * 256 * 64, norms 5 * 64, per layer q 64*64, k and v 32*64 each, o 64*64, three of 128*64
  const std::int64_t layer = 64 * 64 * 2 + 2 * 32 * 64 + 3 * 128 * 64;
  const std::int64_t matrices = 2 * 256 * 64 + 2 * layer;
  EXPECT_EQ(config.parameter_count(), matrices + 5 * 64);
  EXPECT_EQ(weight_bytes(config, DataType::BFloat16), matrices * 2 + 5 * 64 * 4);
  EXPECT_EQ(config.kv_bytes_per_token(DataType::Float32), 2 * 2 * 2 * 16 * 4);
  const auto blocks = [&](std::int64_t bytes) { return cache_size(config, DataType::Float32, {.bytes = bytes}).block_count; };
  EXPECT_EQ(blocks(1 << 20), (1 << 20) / (512 * 16));
  EXPECT_EQ(blocks(512 * 16 - 1), 0);
  EXPECT_EQ(blocks(-5), 0);
  config.tied_embeddings = true;
  EXPECT_EQ(config.parameter_count(), matrices + 5 * 64 - 256 * 64);
  config.attention_bias = true;
  config.attention_output_bias = true;
  config.qk_norm = true;
  EXPECT_EQ(config.parameter_count(), matrices + 5 * 64 - 256 * 64 + 2 * (64 + 32 + 32 + 64 + 2 * 16));
}

}  // namespace
}  // namespace rubato::engine
