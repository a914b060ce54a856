// SPDX-License-Identifier: Apache-2.0
// Llama, Mistral, Qwen2 and Qwen3: attention and a feed-forward in every layer.
#include <algorithm>
#include <iterator>
#include <nlohmann/json.hpp>
#include <string>

#include "engine/model/config_parts.h"
#include "engine/model/config_ranges.h"
#include "manifests/check.h"

namespace rubato::engine {
namespace {

/// What a family assumes when its config.json leaves a key out. Source: the configuration classes of Hugging Face transformers.
struct Family {
  const char* architecture;
  std::int32_t kv_heads;   // 0: as many as heads
  std::int32_t head_size;  // 0: hidden_size / heads
  std::int32_t max_position;
  std::int32_t sliding_window;  // 0: none
  bool has_window_switch;       // use_sliding_window, off by default
  bool query_key_value_bias;    // always there
  bool reads_attention_bias;    // attention_bias: q, k, v and o
  bool qk_norm;
};

constexpr Family families[] = {
    {.architecture = "LlamaForCausalLM",
     .kv_heads = 0,
     .head_size = 0,
     .max_position = 2048,
     .sliding_window = 0,
     .has_window_switch = false,
     .query_key_value_bias = false,
     .reads_attention_bias = true,
     .qk_norm = false},
    {.architecture = "MistralForCausalLM",
     .kv_heads = 8,
     .head_size = 0,
     .max_position = 131072,
     .sliding_window = 4096,
     .has_window_switch = false,
     .query_key_value_bias = false,
     .reads_attention_bias = false,
     .qk_norm = false},
    {.architecture = "Qwen2ForCausalLM",
     .kv_heads = 32,
     .head_size = 0,
     .max_position = 32768,
     .sliding_window = 4096,
     .has_window_switch = true,
     .query_key_value_bias = true,
     .reads_attention_bias = false,
     .qk_norm = false},
    {.architecture = "Qwen3ForCausalLM",
     .kv_heads = 32,
     .head_size = 128,
     .max_position = 32768,
     .sliding_window = 4096,
     .has_window_switch = true,
     .query_key_value_bias = false,
     .reads_attention_bias = true,
     .qk_norm = true},
};

void read_shapes(JsonObject& json, const Family& family, ModelConfig& config) {
  config.hidden_size = json.integer("hidden_size", hidden_range);
  config.layers = json.integer("num_hidden_layers", layers_range);
  config.feed_forward = json.integer("intermediate_size", feed_forward_range);
  config.vocabulary = json.integer("vocab_size", vocabulary_range);
  config.max_position = json.integer("max_position_embeddings", position_range, family.max_position);
  read_heads(json, {.kv_heads = family.kv_heads, .head_size = family.head_size}, config);
}

void check_window(JsonObject& json, const Family& family, const ModelConfig& config) {
  if (const nlohmann::json* types = json.find("layer_types")) {
    const bool full =
        types->is_array() && std::all_of(types->begin(), types->end(), [](const auto& t) { return t == "full_attention"; });
    if (!full) json.refuse("layer_types", shown(*types) + " is not supported; supported: full_attention in every layer");
  }
  // A present null switches the window off; an absent key means the family's default.
  const bool stated = json.has("sliding_window");
  const bool switched_off = family.has_window_switch && !json.boolean("use_sliding_window", false);
  const std::int32_t window = stated ? json.integer("sliding_window", position_range, 0) : family.sliding_window;
  if (switched_off || json.is_null("sliding_window") || window == 0 || window >= config.max_position) return;
  if (family.has_window_switch && json.integer("max_window_layers", {.min = 0, .max = 4096}, 28) >= config.layers) return;
  json.refuse("sliding_window", std::to_string(window) + (stated ? "" : " (the default when the key is absent)") +
                                    " is below max_position_embeddings, " + std::to_string(config.max_position) +
                                    ": sliding window attention is not supported");
}

void read_options(JsonObject& json, const Family& family, ModelConfig& config) {
  config.rms_norm_epsilon = static_cast<float>(json.real("rms_norm_eps", {.min = 0, .max = 0.1}, 1e-6));
  config.tied_embeddings = json.boolean("tie_word_embeddings", false);  // false is the default of all four families
  config.qk_norm = family.qk_norm;
  const bool all_biases = family.reads_attention_bias && json.boolean("attention_bias", false);
  config.attention_bias = family.query_key_value_bias || all_biases;
  config.attention_output_bias = all_biases;
  read_format(json, config);
  check_activation(json, "hidden_act", {"silu", "swish"});
}

}  // namespace

void read_llama_family(JsonObject& json, ModelConfig& config) {
  const auto* family = std::find_if(std::begin(families), std::end(families),
                                    [&](const Family& one) { return one.architecture == config.architecture; });
  CHECK(family != std::end(families), config.architecture);
  read_shapes(json, *family, config);
  read_options(json, *family, config);
  read_rope(json, 1.0, config);
  check_window(json, *family, config);
  config.rotary_size = config.head_size;
  config.sublayers = llama_sublayers(config.layers);
}

}  // namespace rubato::engine
