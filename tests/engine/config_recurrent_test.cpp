// SPDX-License-Identifier: Apache-2.0
// Models with recurrent layers: config.json of each family as it is published, the lists of tensors that follow, and what is
// refused by name.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <map>
#include <nlohmann/json.hpp>

#include "engine/backend.h"
#include "engine/model/config.h"
#include "engine/model/tensors.h"
#include "tests/support/temporary_folder.h"

namespace rubato::engine {
namespace {

using nlohmann::json;
using test::TemporaryFolder;
using testing::AllOf;
using testing::HasSubstr;
using testing::Not;
using Shape = std::vector<std::int64_t>;

/// Python writes infinity without quotes; so do the published files.
constexpr const char* mamba2_130m = R"({
  "architectures": ["Mamba2ForCausalLM"], "bos_token_id": 0, "chunk_size": 256, "conv_kernel": 4, "eos_token_id": 0, "expand": 2,
  "head_dim": 64, "hidden_act": "silu", "hidden_size": 768, "initializer_range": 0.1, "layer_norm_epsilon": 1e-05,
  "model_type": "mamba2", "n_groups": 1, "num_heads": 24, "num_hidden_layers": 24, "pad_token_id": 0,
  "rescale_prenorm_residual": false, "residual_in_fp32": true, "rms_norm": true, "state_size": 128, "tie_word_embeddings": true,
  "time_step_floor": 0.0001, "time_step_limit": [0.0, Infinity], "time_step_max": 0.1, "time_step_min": 0.001,
  "time_step_rank": 48, "torch_dtype": "float32", "use_bias": false, "use_cache": true, "use_conv_bias": true,
  "vocab_size": 50288})";

constexpr const char* bamba_9b = R"({
  "architectures": ["BambaForCausalLM"], "attention_dropout": 0.0, "attn_layer_indices": [9, 18, 27], "attn_rotary_emb": 64,
  "bos_token_id": 128000, "eos_token_id": 128001, "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02,
  "intermediate_size": 14336, "mamba_chunk_size": 256, "mamba_conv_bias": true, "mamba_d_conv": 4, "mamba_d_head": 64,
  "mamba_d_state": 128, "mamba_expand": 2, "mamba_n_groups": 1, "mamba_n_heads": 128, "mamba_proj_bias": false,
  "max_position_embeddings": 4096, "model_type": "bamba", "num_attention_heads": 32, "num_hidden_layers": 32,
  "num_key_value_heads": 8, "num_logits_to_keep": 1, "pad_token_id": 0, "rms_norm_eps": 1e-05, "rope_theta": 10000.0,
  "tie_word_embeddings": false, "torch_dtype": "bfloat16", "use_cache": true, "vocab_size": 128256})";

json granite_micro() {
  json config = json::parse(R"({
    "architectures": ["GraniteMoeHybridForCausalLM"], "attention_bias": false, "attention_dropout": 0.0,
    "attention_multiplier": 0.015625, "bos_token_id": 100257, "embedding_multiplier": 12, "eos_token_id": 100257,
    "hidden_act": "silu", "hidden_size": 2048, "init_method": "mup", "initializer_range": 0.1, "intermediate_size": 8192,
    "logits_scaling": 8, "mamba_chunk_size": 256, "mamba_conv_bias": true, "mamba_d_conv": 4, "mamba_d_head": 64,
    "mamba_d_state": 128, "mamba_expand": 2, "mamba_n_groups": 1, "mamba_n_heads": 64, "mamba_proj_bias": false,
    "max_position_embeddings": 131072, "model_type": "granitemoehybrid", "normalization_function": "rmsnorm",
    "num_attention_heads": 32, "num_experts_per_tok": 0, "num_hidden_layers": 40, "num_key_value_heads": 8,
    "num_local_experts": 0, "output_router_logits": false, "pad_token_id": 100256, "position_embedding_type": "nope",
    "residual_multiplier": 0.22, "rms_norm_eps": 1e-05, "rope_scaling": null, "rope_theta": 10000,
    "shared_intermediate_size": 8192, "tie_word_embeddings": true, "torch_dtype": "bfloat16", "vocab_size": 100352})");
  for (int layer = 0; layer < 40; ++layer) config["layer_types"].push_back(layer % 10 == 5 ? "attention" : "mamba");
  return config;
}

constexpr const char* nemotron_8b = R"({
  "architectures": ["NemotronHForCausalLM"], "attention_bias": false, "attention_dropout": 0.0, "attention_head_dim": 128,
  "bos_token_id": 1, "chunk_size": 128, "conv_kernel": 4, "eos_token_id": 2, "expand": 2, "hidden_dropout": 0.0,
  "hidden_size": 4096, "hybrid_override_pattern": "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-",
  "initializer_range": 0.02, "intermediate_size": 21504, "layer_norm_epsilon": 1e-05, "mamba_head_dim": 64,
  "mamba_hidden_act": "silu", "mamba_num_heads": 128, "mamba_proj_bias": false, "max_position_embeddings": 8192,
  "mlp_bias": false, "mlp_hidden_act": "relu2", "model_type": "nemotron_h", "n_groups": 8, "num_attention_heads": 32,
  "num_hidden_layers": 52, "num_key_value_heads": 8, "num_logits_to_keep": 1, "pad_token_id": 0,
  "rescale_prenorm_residual": true, "residual_in_fp32": false, "rms_norm_eps": 1e-05, "sliding_window": null,
  "ssm_state_size": 128, "tie_word_embeddings": false, "time_step_floor": 0.0001, "time_step_limit": [0.0, Infinity],
  "time_step_max": 0.1, "time_step_min": 0.001, "time_step_rank": 256, "torch_dtype": "bfloat16", "use_bias": false,
  "use_cache": true, "use_conv_bias": true, "vocab_size": 131072})";

Result<ModelConfig> read_text(const std::string& text) {
  const TemporaryFolder folder;
  folder.write("config.json", text);
  return read_model_config(folder.path());
}

ModelConfig read_good(const std::string& text) {
  Result<ModelConfig> config = read_text(text);
  EXPECT_TRUE(config) << config.error().message;
  return config ? *config : ModelConfig{};
}

/// A published file that can be changed.
json editable(const char* text) {
  std::string quoted = text;
  if (const std::size_t at = quoted.find("Infinity"); at != std::string::npos) quoted.replace(at, 8, "\"Infinity\"");
  return json::parse(quoted);
}

std::string refusal(const json& config) {
  const auto result = read_text(config.dump());
  return result ? "accepted" : result.error().message;
}

std::string refusal(json config, const char* key, const json& value) {
  config[key] = value;
  return refusal(config);
}

std::map<std::string, Shape> tensors_of(const ModelConfig& config) {
  std::map<std::string, Shape> tensors;
  for (const TensorSpec& tensor : model_tensors(config)) tensors.emplace(tensor.name, tensor.shape);
  return tensors;
}

TEST(RecurrentConfig, reads_mamba2_130m) {
  const ModelConfig config = read_good(mamba2_130m);
  EXPECT_EQ(config.architecture, "Mamba2ForCausalLM");
  EXPECT_EQ(config.layers, 24);
  EXPECT_EQ(config.count_of(SublayerKind::Mamba2), 24);
  EXPECT_EQ(config.sublayers.size(), 24U);
  EXPECT_EQ(config.heads, 0);
  EXPECT_EQ(config.feed_forward, 0);
  ASSERT_TRUE(config.mamba2);
  EXPECT_EQ(config.mamba2->inner(), 1536);
  EXPECT_EQ(config.mamba2->channels(), 1792);
  EXPECT_EQ(config.mamba2->projected(), 3352);
  EXPECT_EQ(config.mamba2->window, 4);
  EXPECT_EQ(config.mamba2->time_step_min, 0.0F);
  EXPECT_EQ(config.mamba2->time_step_max, std::numeric_limits<float>::infinity());
  EXPECT_FALSE(config.mamba2->norm_before_gate);
  EXPECT_TRUE(config.tied_embeddings);
  const auto tensors = tensors_of(config);
  EXPECT_EQ(tensors.at("backbone.embeddings.weight"), (Shape{50288, 768}));
  EXPECT_EQ(tensors.at("backbone.layers.23.norm.weight"), (Shape{768}));
  EXPECT_EQ(tensors.at("backbone.layers.0.mixer.in_proj.weight"), (Shape{3352, 768}));
  EXPECT_EQ(tensors.at("backbone.layers.0.mixer.conv1d.weight"), (Shape{1792, 1, 4}));
  EXPECT_EQ(tensors.at("backbone.layers.0.mixer.conv1d.bias"), (Shape{1792}));
  EXPECT_EQ(tensors.at("backbone.layers.0.mixer.dt_bias"), (Shape{24}));
  EXPECT_EQ(tensors.at("backbone.layers.0.mixer.A_log"), (Shape{24}));
  EXPECT_EQ(tensors.at("backbone.layers.0.mixer.D"), (Shape{24}));
  EXPECT_EQ(tensors.at("backbone.layers.0.mixer.norm.weight"), (Shape{1536}));
  EXPECT_EQ(tensors.at("backbone.layers.0.mixer.out_proj.weight"), (Shape{768, 1536}));
  EXPECT_EQ(tensors.at("backbone.norm_f.weight"), (Shape{768}));
  EXPECT_EQ(tensors.size(), 24U * 9 + 2);
  EXPECT_EQ(config.parameter_count(), 50288 * 768 + 24 * 3765320 + 768);  // 129.0M
  EXPECT_EQ(config.kv_bytes_per_token(DataType::Float32), 0);
  EXPECT_EQ(config.state_bytes(), 24 * (3 * 1792 + 24 * 64 * 128) * 4);
}

TEST(RecurrentConfig, reads_bamba_9b) {
  const ModelConfig config = read_good(bamba_9b);
  EXPECT_EQ(config.sublayers.size(), 64U);
  EXPECT_EQ(config.count_of(SublayerKind::Attention), 3);
  EXPECT_EQ(config.count_of(SublayerKind::Mamba2), 29);
  EXPECT_EQ(config.sublayers[18].kind, SublayerKind::Attention);
  EXPECT_EQ(config.sublayers[18].prefix, "model.layers.9.self_attn.");
  EXPECT_EQ(config.sublayers[36].index, 1);
  EXPECT_EQ(config.head_size, 128);
  EXPECT_EQ(config.rotary_size, 64);
  EXPECT_EQ(config.checkpoint_dtype, DataType::BFloat16);
  const auto tensors = tensors_of(config);
  EXPECT_EQ(tensors.at("model.layers.9.self_attn.k_proj.weight"), (Shape{1024, 4096}));
  EXPECT_FALSE(tensors.contains("model.layers.9.mamba.in_proj.weight"));
  EXPECT_EQ(tensors.at("model.layers.0.mamba.in_proj.weight"), (Shape{8192 + 8192 + 2 * 128 + 128, 4096}));
  EXPECT_EQ(tensors.at("model.layers.0.pre_ff_layernorm.weight"), (Shape{4096}));
  EXPECT_EQ(tensors.at("model.layers.31.feed_forward.gate_proj.weight"), (Shape{14336, 4096}));
  EXPECT_EQ(tensors.at("model.final_layernorm.weight"), (Shape{4096}));
  EXPECT_EQ(tensors.at("lm_head.weight"), (Shape{128256, 4096}));
  EXPECT_NEAR(static_cast<double>(config.parameter_count()), 9.78e9, 0.01e9);     // Bamba-9.8B
  EXPECT_EQ(config.kv_bytes_per_token(DataType::BFloat16), 2 * 3 * 8 * 128 * 2);  // three of 32 layers attend
  EXPECT_EQ(weight_bytes(config, DataType::BFloat16),
            2 * config.parameter_count() + 2 * (29 * (8448 * 5 + 3 * 128 + 8192) + 65 * 4096));  // kept in F32: 2 bytes more
}

TEST(RecurrentConfig, bambas_list_of_layer_types_is_read_too_and_may_not_contradict) {
  json config = editable(bamba_9b);
  config["num_hidden_layers"] = 3;
  config["attn_layer_indices"] = nullptr;
  config["layers_block_type"] = {"mamba", "attention", "mamba"};
  const ModelConfig read = read_good(config.dump());
  EXPECT_EQ(read.count_of(SublayerKind::Attention), 1);
  EXPECT_EQ(read.sublayers[2].kind, SublayerKind::Attention);
  EXPECT_THAT(refusal(config, "attn_layer_indices", {0}), HasSubstr("attn_layer_indices: contradicts"));
  EXPECT_EQ(refusal(config, "attn_layer_indices", {1}), "accepted");
  EXPECT_THAT(refusal(config, "layers_block_type", {"mamba", "attention"}), HasSubstr("names 2 layers; num_hidden_layers is 3"));
  EXPECT_THAT(refusal(config, "layers_block_type", {"mamba", "attention", "rwkv"}),
              HasSubstr("layers_block_type: layer 2 is \"rwkv\"; supported: attention"));
}

TEST(RecurrentConfig, reads_granite_4_h_micro) {
  const ModelConfig config = read_good(granite_micro().dump());
  EXPECT_EQ(config.count_of(SublayerKind::Attention), 4);
  EXPECT_EQ(config.count_of(SublayerKind::Mamba2), 36);
  EXPECT_EQ(config.feed_forward_kind, FeedForwardKind::FusedSwiglu);
  EXPECT_EQ(config.rotary_size, 0);
  EXPECT_EQ(config.attention_scale, 0.015625F);
  EXPECT_EQ(config.embedding_multiplier, 12.0F);
  EXPECT_EQ(config.residual_multiplier, 0.22F);
  EXPECT_EQ(config.logits_divisor, 8.0F);
  const auto tensors = tensors_of(config);
  EXPECT_EQ(tensors.at("model.layers.0.shared_mlp.input_linear.weight"), (Shape{16384, 2048}));
  EXPECT_EQ(tensors.at("model.layers.0.shared_mlp.output_linear.weight"), (Shape{2048, 8192}));
  EXPECT_EQ(tensors.at("model.layers.0.post_attention_layernorm.weight"), (Shape{2048}));
  EXPECT_EQ(tensors.at("model.layers.5.self_attn.o_proj.weight"), (Shape{2048, 2048}));
  EXPECT_NEAR(static_cast<double>(config.parameter_count()), 3.19e9, 0.01e9);  // a 3B model
}

TEST(RecurrentConfig, granite_may_rotate_and_may_have_attention_alone) {
  json config = granite_micro();
  config["position_embedding_type"] = "rope";
  EXPECT_EQ(read_good(config.dump()).rotary_size, 64);
  for (json& type : config["layer_types"]) type = "attention";
  const ModelConfig dense = read_good(config.dump());
  EXPECT_FALSE(dense.mamba2);
  EXPECT_EQ(dense.state_bytes(), 0);
  for (json& type : config["layer_types"]) type = "mamba";
  const ModelConfig recurrent = read_good(config.dump());
  EXPECT_EQ(recurrent.heads, 0);
  EXPECT_EQ(recurrent.kv_bytes_per_token(DataType::Float32), 0);
}

TEST(RecurrentConfig, reads_nemotron_h_8b) {
  const ModelConfig config = read_good(nemotron_8b);
  EXPECT_EQ(config.layers, 52);
  EXPECT_EQ(config.sublayers.size(), 52U);
  EXPECT_EQ(config.count_of(SublayerKind::Attention), 4);
  EXPECT_EQ(config.count_of(SublayerKind::Mamba2), 24);
  EXPECT_EQ(config.count_of(SublayerKind::FeedForward), 24);
  EXPECT_EQ(config.sublayers[7].kind, SublayerKind::Attention);
  EXPECT_EQ(config.sublayers[7].norm, "backbone.layers.7.norm.weight");
  EXPECT_EQ(config.sublayers[7].prefix, "backbone.layers.7.mixer.");
  EXPECT_EQ(config.feed_forward_kind, FeedForwardKind::ReluSquared);
  EXPECT_EQ(config.head_size, 128);
  EXPECT_EQ(config.rotary_size, 0);
  EXPECT_EQ(config.mamba2->norm_groups, 8);
  const auto tensors = tensors_of(config);
  EXPECT_EQ(tensors.at("backbone.layers.0.mixer.conv1d.weight"), (Shape{8192 + 2 * 8 * 128, 1, 4}));
  EXPECT_EQ(tensors.at("backbone.layers.1.mixer.up_proj.weight"), (Shape{21504, 4096}));
  EXPECT_EQ(tensors.at("backbone.layers.7.mixer.q_proj.weight"), (Shape{4096, 4096}));
  EXPECT_EQ(tensors.at("backbone.norm_f.weight"), (Shape{4096}));
  EXPECT_NEAR(static_cast<double>(config.parameter_count()), 8.1e9, 0.1e9);
}

TEST(RecurrentConfig, infinity_is_read_in_every_spelling_and_a_limit_must_be_one) {
  json config = editable(mamba2_130m);
  const auto limit = [&](const json& value) {
    config["time_step_limit"] = value;
    return read_good(config.dump()).mamba2.value_or(Mamba2Config{});
  };
  EXPECT_EQ(limit({0.0, "Infinity"}).time_step_max, std::numeric_limits<float>::infinity());
  EXPECT_EQ(limit({0.0, {{"__float__", "Infinity"}}}).time_step_max, std::numeric_limits<float>::infinity());
  EXPECT_EQ(limit({0.001, 0.1}).time_step_min, 0.001F);
  EXPECT_EQ(limit({0.001, 0.1}).time_step_max, 0.1F);
  for (const json& bad : {json{0.1}, json{0.1, 0.1}, json{-1.0, 2.0}, json{0.0, "big"}, json(3), json{"Infinity", "Infinity"}}) {
    EXPECT_THAT(refusal(config, "time_step_limit", bad), HasSubstr("time_step_limit: " + bad.dump())) << bad;
  }
  // Bare, elsewhere: no number that any other key may have.
  EXPECT_THAT(read_text(R"({"architectures": ["Mamba2ForCausalLM"], "hidden_size": Infinity})").error().message,
              HasSubstr("hidden_size: \"Infinity\" is no integer"));
  EXPECT_THAT(read_text(R"({"a \"Infinity": -Infinity, "architectures": ["Infinity"]})").error().message,
              HasSubstr("architectures: \"Infinity\" is not supported"));
}

TEST(RecurrentConfig, what_would_be_computed_wrongly_is_refused_by_name) {
  const json mamba2 = editable(mamba2_130m);
  EXPECT_THAT(refusal(mamba2, "hidden_act", "gelu"), HasSubstr("hidden_act: \"gelu\" is not supported; supported: silu"));
  EXPECT_THAT(refusal(mamba2, "rms_norm", false), HasSubstr("rms_norm: false is not supported"));
  EXPECT_THAT(refusal(mamba2, "n_groups", 5), HasSubstr("n_groups: 5 does not divide num_heads, 24"));
  EXPECT_THAT(refusal(mamba2, "num_heads", 23),
              HasSubstr("num_heads: 23 heads of 64 elements are not expand * hidden_size, 1536"));
  EXPECT_THAT(refusal(mamba2, "conv_kernel", 1), HasSubstr("conv_kernel: 1 is outside 2..16"));
  EXPECT_THAT(refusal(mamba2, "quantization_config", {{"bits", 4}}), HasSubstr("quantised"));

  const json bamba = editable(bamba_9b);
  EXPECT_THAT(refusal(bamba, "partial_rotary_factor", 1.0), HasSubstr("partial_rotary_factor: only 0.5 is supported"));
  EXPECT_THAT(refusal(bamba, "attn_rotary_emb", 128), HasSubstr("attn_rotary_emb: 128 is not half of the head size"));
  EXPECT_THAT(refusal(bamba, "attention_bias", true), HasSubstr("attention_bias: true is not supported"));
  EXPECT_THAT(refusal(bamba, "mlp_bias", true), HasSubstr("mlp_bias: true is not supported"));
  EXPECT_THAT(refusal(bamba, "attn_layer_indices", {9, 32}), HasSubstr("attn_layer_indices: 32 is outside 0..31"));
  EXPECT_THAT(refusal(bamba, "sliding_window", 1024), HasSubstr("sliding window attention is not supported"));
  EXPECT_THAT(refusal(bamba, "rope_scaling", {{"rope_type", "yarn"}}), HasSubstr("\"yarn\" is not supported"));

  json granite = granite_micro();
  EXPECT_THAT(refusal(granite, "num_local_experts", 62), HasSubstr("num_local_experts: 62: mixtures of experts (MoE) are not"));
  EXPECT_THAT(refusal(granite, "position_embedding_type", "learned"), HasSubstr("supported: rope, nope"));
  EXPECT_THAT(refusal(granite, "normalization_function", "layernorm"), HasSubstr("normalization_function: \"layernorm\""));
  granite.erase("num_local_experts");
  EXPECT_THAT(refusal(granite), HasSubstr("num_local_experts: 8 (the default when the key is absent)"));

  const json nemotron = editable(nemotron_8b);
  EXPECT_THAT(refusal(nemotron, "mlp_hidden_act", "silu"),
              HasSubstr("mlp_hidden_act: \"silu\" is not supported; supported: relu2"));
  json moe = nemotron;
  moe["num_hidden_layers"] = 4;
  EXPECT_THAT(refusal(moe, "hybrid_override_pattern", "MEM*"), HasSubstr("layer 1 is \"E\": mixtures of experts (MoE) are not"));
  EXPECT_THAT(refusal(moe, "hybrid_override_pattern", "M?M*"), HasSubstr("layer 1 is \"?\"; supported: *, M, -"));
  EXPECT_THAT(refusal(moe, "hybrid_override_pattern", "M-M"), HasSubstr("names 3 layers; num_hidden_layers is 4"));
  EXPECT_THAT(refusal(moe, "hybrid_override_pattern", "----"), HasSubstr("neither attention nor a recurrent layer"));
  moe.erase("hybrid_override_pattern");
  EXPECT_THAT(refusal(moe), HasSubstr("hybrid_override_pattern: is missing"));
  EXPECT_EQ(refusal(moe, "layers_block_type", {"linear_attention", "mlp", "full_attention", "mamba"}), "accepted");
}

TEST(RecurrentConfig, all_complaints_come_together) {
  json granite = granite_micro();
  granite["num_local_experts"] = 2;
  granite["hidden_act"] = "gelu";
  granite["mamba_n_groups"] = 7;
  granite["time_step_limit"] = {3};
  EXPECT_THAT(refusal(granite), AllOf(HasSubstr("num_local_experts"), HasSubstr("hidden_act"), HasSubstr("mamba_n_groups"),
                                      HasSubstr("time_step_limit"), Not(HasSubstr("layer_types"))));
}

SyntheticModel synthetic_hybrid() {
  return {.architecture = Architecture::Hybrid,
          .hidden_size = 64,
          .layers = 5,
          .heads = 4,
          .kv_heads = 2,
          .feed_forward = 96,
          .attention_every = 2,
          .mamba_head_size = 16,
          .mamba_groups = 2,
          .state_size = 24,
          .vocabulary = 100};
}

TEST(RecurrentConfig, a_synthetic_hybrid_attends_in_the_last_of_each_so_many_layers) {
  const ModelConfig config = *synthetic_model_config(synthetic_hybrid());
  std::string kinds;
  for (const Sublayer& sublayer : config.sublayers) kinds += "*M-"[static_cast<int>(sublayer.kind)];
  EXPECT_EQ(kinds, "M-*-M-*-M-");
  EXPECT_EQ(config.mamba2->heads, 8);  // 2 * 64 / 16
  EXPECT_EQ(config.mamba2->norm_groups, 2);
  EXPECT_EQ(config.rotary_size, 16);
  EXPECT_TRUE(tensors_of(config).contains("model.layers.4.mamba.A_log"));
  SyntheticModel by_default = synthetic_hybrid();
  by_default.attention_every = 0;
  EXPECT_EQ(synthetic_model_config(by_default)->sublayers[6].kind, SublayerKind::Attention);  // layer 3: 0 means 4
}

TEST(RecurrentConfig, a_synthetic_mamba2_has_recurrent_layers_alone) {
  const ModelConfig config = *synthetic_model_config(
      {.architecture = Architecture::Mamba2, .hidden_size = 64, .layers = 3, .mamba_heads = 3, .vocabulary = 100});
  EXPECT_EQ(config.sublayers.size(), 3U);
  EXPECT_EQ(config.count_of(SublayerKind::Mamba2), 3);
  EXPECT_EQ(config.mamba2->inner(), 3 * 64);
  EXPECT_EQ(config.heads, 0);
  EXPECT_TRUE(tensors_of(config).contains("backbone.layers.2.mixer.dt_bias"));
}

TEST(RecurrentConfig, synthetic_refusals_name_the_field) {
  const auto field = [](auto change) {
    SyntheticModel model = synthetic_hybrid();
    change(model);
    const auto result = synthetic_model_config(model);
    return result ? std::string("accepted") : result.error().field;
  };
  EXPECT_EQ(field([](SyntheticModel& m) { m.attention_every = 6; }), "spec.model.synthetic.attentionEvery");
  EXPECT_EQ(field([](SyntheticModel& m) { m.attention_every = 1; }), "spec.model.synthetic.attentionEvery");
  EXPECT_EQ(field([](SyntheticModel& m) { m.mamba_groups = 3; }), "spec.model.synthetic.mambaGroups");
  EXPECT_EQ(field([](SyntheticModel& m) { m.mamba_head_size = 48; }), "spec.model.synthetic.mambaHeadSize");
  EXPECT_EQ(field([](SyntheticModel& m) { m.state_size = 0; }), "spec.model.synthetic.stateSize");
  EXPECT_EQ(field([](SyntheticModel& m) { m.convolution_window = 1; }), "spec.model.synthetic.convolutionWindow");
  EXPECT_EQ(field([](SyntheticModel& m) { m.mamba_heads = -1; }), "spec.model.synthetic.mambaHeads");
  EXPECT_EQ(field([](SyntheticModel& m) { m.kv_heads = 3; }), "spec.model.synthetic.kvHeads");
}

}  // namespace
}  // namespace rubato::engine
