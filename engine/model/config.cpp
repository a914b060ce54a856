// SPDX-License-Identifier: Apache-2.0
// config.json and generation_config.json of a Hugging Face folder to ModelConfig. What the engine would compute wrongly (another
// rope, a sliding window in use, a quantised checkpoint) is refused here by name, never approximated.
#include "engine/model/config.h"

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>

#include "engine/model/config_ranges.h"
#include "engine/model/json_object.h"

namespace rubato::engine {
namespace {

constexpr std::int64_t file_size_max = 4 << 20;
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

const Family* find_family(JsonObject& json) {
  std::string supported;
  for (const Family& family : families) supported += (supported.empty() ? "" : ", ") + std::string(family.architecture);
  const nlohmann::json* names = json.find("architectures");
  if (names == nullptr || !names->is_array() || names->size() != 1 || !names->front().is_string()) {
    json.refuse("architectures", (names == nullptr ? "is missing" : shown(*names) + " is no list of one name") +
                                     std::string("; supported: ") + supported);
    return nullptr;
  }
  const std::string name = names->front().get<std::string>();
  for (const Family& family : families) {
    if (name == family.architecture) return &family;
  }
  json.refuse("architectures", shown(names->front()) + " is not supported; supported: " + supported);
  return nullptr;
}

void read_shapes(JsonObject& json, const Family& family, ModelConfig& config) {
  config.hidden_size = json.integer("hidden_size", hidden_range);
  config.layers = json.integer("num_hidden_layers", layers_range);
  config.heads = json.integer("num_attention_heads", heads_range);
  config.feed_forward = json.integer("intermediate_size", feed_forward_range);
  config.vocabulary = json.integer("vocab_size", vocabulary_range);
  config.max_position = json.integer("max_position_embeddings", position_range, family.max_position);
  if (config.heads == 0 || config.hidden_size == 0) return;
  config.kv_heads = json.integer("num_key_value_heads", heads_range, family.kv_heads == 0 ? config.heads : family.kv_heads);
  if (config.heads % config.kv_heads != 0) {
    json.refuse("num_key_value_heads",
                std::to_string(config.kv_heads) + " does not divide num_attention_heads, " + std::to_string(config.heads));
  }
  if (json.has("head_dim") || family.head_size != 0) {
    config.head_size = json.integer("head_dim", head_size_range, family.head_size);
  } else if (config.hidden_size % config.heads != 0) {
    json.refuse("num_attention_heads", std::to_string(config.heads) + " does not divide hidden_size, " +
                                           std::to_string(config.hidden_size) + ", and there is no head_dim");
  } else {
    config.head_size = config.hidden_size / config.heads;
  }
  if (config.head_size % 2 != 0 || config.head_size > head_size_range.max) {
    json.refuse("head_dim", std::to_string(config.head_size) + " is no even number up to " + std::to_string(head_size_range.max));
  }
}

void read_llama3_rope(JsonObject& json, RopeConfig& rope) {
  constexpr JsonObject::RealRange frequency_range{.min = 0, .max = 1e6};
  rope.low_frequency_factor = json.real("low_freq_factor", frequency_range);
  rope.high_frequency_factor = json.real("high_freq_factor", frequency_range);
  rope.original_max_position = json.integer("original_max_position_embeddings", position_range);
  if (rope.high_frequency_factor <= rope.low_frequency_factor && json.errors().empty()) {
    json.refuse("high_freq_factor", "is not above low_freq_factor");
  }
}

/// object is rope_scaling (older folders) or rope_parameters (newer ones, which hold rope_theta as well).
void read_rope_object(const nlohmann::json& object, const std::string& place, std::vector<std::string>& errors,
                      RopeConfig& rope) {
  if (!object.is_object()) {
    errors.push_back(place + ": " + shown(object) + " is no object");
    return;
  }
  JsonObject json(object, place, errors);
  rope.theta = json.real("rope_theta", {.min = 0, .max = 1e15}, rope.theta);
  const char* key = json.has("rope_type") ? "rope_type" : "type";
  if (!json.has(key) && !json.has("rope_theta")) {
    json.refuse("rope_type", "is missing");  // also rope_parameters by layer type, which no supported model has
    return;
  }
  const std::string type = json.text(key, "default");
  if (const double part = json.real("partial_rotary_factor", {.min = 0, .max = 1}, 1.0); part != 1.0) {
    json.refuse("partial_rotary_factor", "only 1 is supported");
  }
  if (type == "default") return;
  if (type != "linear" && type != "llama3") {
    json.refuse(key, "\"" + type + "\" is not supported; supported: default, linear, llama3");
    return;
  }
  rope.factor = json.real("factor", {.min = 0, .max = 1e6});
  if (rope.factor < 1) json.refuse("factor", shown(*json.find("factor")) + " is below 1");
  rope.scaling = type == "linear" ? RopeScaling::Linear : RopeScaling::Llama3;
  if (rope.scaling == RopeScaling::Llama3) read_llama3_rope(json, rope);
}

void read_rope(JsonObject& json, ModelConfig& config) {
  config.rope.theta = json.real("rope_theta", {.min = 0, .max = 1e15}, 10000.0);
  if (const double part = json.real("partial_rotary_factor", {.min = 0, .max = 1}, 1.0); part != 1.0) {
    json.refuse("partial_rotary_factor", "only 1 is supported");
  }
  for (const char* key : {"rope_parameters", "rope_scaling"}) {
    if (const nlohmann::json* object = json.find(key)) {
      read_rope_object(*object, json.place() + ": " + key, json.errors(), config.rope);
      return;
    }
  }
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

DataType read_dtype(JsonObject& json) {
  const char* key = json.has("dtype") ? "dtype" : "torch_dtype";
  std::string name = json.text(key, "float32");
  if (name.starts_with("torch.")) name.erase(0, 6);
  if (name == "float32") return DataType::Float32;
  if (name == "bfloat16") return DataType::BFloat16;
  if (name == "float16") return DataType::Float16;
  json.refuse(key, "\"" + name + "\" is not supported; supported: float32, bfloat16, float16");
  return DataType::Float32;
}

void read_options(JsonObject& json, const Family& family, ModelConfig& config) {
  config.rms_norm_epsilon = static_cast<float>(json.real("rms_norm_eps", {.min = 0, .max = 0.1}, 1e-6));
  config.tied_embeddings = json.boolean("tie_word_embeddings", false);  // false is the default of all four families
  config.qk_norm = family.qk_norm;
  const bool all_biases = family.reads_attention_bias && json.boolean("attention_bias", false);
  config.attention_bias = family.query_key_value_bias || all_biases;
  config.attention_output_bias = all_biases;
  config.checkpoint_dtype = read_dtype(json);
  const std::string activation = json.text("hidden_act", "silu");
  if (activation != "silu" && activation != "swish") {
    json.refuse("hidden_act", "\"" + activation + "\" is not supported; supported: silu");
  }
  if (json.boolean("mlp_bias", false)) json.refuse("mlp_bias", "true is not supported");
  if (json.has("quantization_config")) json.refuse("quantization_config", "quantised checkpoints are not supported");
}

/// Adds the end tokens of one file to those of the other, each once, and takes its begin token when there is none yet.
void read_special_tokens(JsonObject& json, ModelConfig& config) {
  const JsonObject::IntegerRange range{.min = 0, .max = std::max(0, config.vocabulary - 1)};
  for (const TokenId id : json.ids("eos_token_id", range)) {
    if (std::find(config.end_tokens.begin(), config.end_tokens.end(), id) == config.end_tokens.end())
      config.end_tokens.push_back(id);
  }
  if (!config.begin_token && json.has("bos_token_id")) config.begin_token = json.integer("bos_token_id", range);
}

Result<nlohmann::json> parse_object(const std::filesystem::path& path) {
  auto text = read_text_file(path, file_size_max);
  if (!text) return Unexpected(std::move(text).error());
  return parse_json_object(*text, path.string());
}

Unexpected joined(const std::vector<std::string>& errors) {
  std::string message;
  for (const std::string& error : errors) message += (message.empty() ? "" : "\n") + error;
  return unexpected(ErrorCode::InvalidArgument, message);
}

}  // namespace

Result<ModelConfig> read_model_config(const std::filesystem::path& folder) {
  const std::filesystem::path path = folder / "config.json";
  auto object = parse_object(path);
  if (!object) return Unexpected(std::move(object).error());
  std::vector<std::string> errors;
  JsonObject json(*object, path.string(), errors);
  ModelConfig config;
  const Family* family = find_family(json);
  if (family == nullptr) return joined(errors);
  config.architecture = family->architecture;
  read_shapes(json, *family, config);
  read_options(json, *family, config);
  read_rope(json, config);
  check_window(json, *family, config);
  config.rotary_size = config.head_size;
  config.sublayers = llama_sublayers(config.layers);
  read_special_tokens(json, config);

  const std::filesystem::path generation_path = folder / "generation_config.json";
  std::error_code ignored;
  if (std::filesystem::exists(generation_path, ignored)) {
    auto generation = parse_object(generation_path);
    if (!generation) return Unexpected(std::move(generation).error());
    JsonObject generation_json(*generation, generation_path.string(), errors);
    read_special_tokens(generation_json, config);
  }
  if (!errors.empty()) return joined(errors);
  return config;
}

}  // namespace rubato::engine
