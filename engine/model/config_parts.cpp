// SPDX-License-Identifier: Apache-2.0
// Attention heads, rope, formats and activations, as most families write them.
#include "engine/model/config_parts.h"

#include <sstream>
#include <string>
#include <vector>

#include "engine/model/config_ranges.h"

namespace rubato::engine {
namespace {

void read_llama3_rope(JsonObject& json, RopeConfig& rope) {
  constexpr JsonObject::RealRange frequency_range{.min = 0, .max = 1e6};
  rope.low_frequency_factor = json.real("low_freq_factor", frequency_range);
  rope.high_frequency_factor = json.real("high_freq_factor", frequency_range);
  rope.original_max_position = json.integer("original_max_position_embeddings", position_range);
  if (rope.high_frequency_factor <= rope.low_frequency_factor && json.errors().empty()) {
    json.refuse("high_freq_factor", "is not above low_freq_factor");
  }
}

void check_turned(JsonObject& json, double turned) {
  if (json.real("partial_rotary_factor", {.min = 0, .max = 1}, turned) == turned) return;
  std::ostringstream allowed;
  allowed << "only " << turned << " is supported";
  json.refuse("partial_rotary_factor", allowed.str());
}

/// object is rope_scaling (older folders) or rope_parameters (newer ones, which hold rope_theta as well).
void read_rope_object(const nlohmann::json& object, const std::string& place, std::vector<std::string>& errors, double turned,
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
  check_turned(json, turned);
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

}  // namespace

void read_heads(JsonObject& json, const AttentionDefaults& defaults, ModelConfig& config) {
  config.heads = json.integer("num_attention_heads", heads_range);
  if (config.heads == 0 || config.hidden_size == 0) return;
  config.kv_heads = json.integer("num_key_value_heads", heads_range, defaults.kv_heads == 0 ? config.heads : defaults.kv_heads);
  if (config.heads % config.kv_heads != 0) {
    json.refuse("num_key_value_heads",
                std::to_string(config.kv_heads) + " does not divide num_attention_heads, " + std::to_string(config.heads));
  }
  if (json.has(defaults.head_size_key) || defaults.head_size != 0) {
    config.head_size = json.integer(defaults.head_size_key, head_size_range, defaults.head_size);
  } else if (config.hidden_size % config.heads != 0) {
    json.refuse("num_attention_heads", std::to_string(config.heads) + " does not divide hidden_size, " +
                                           std::to_string(config.hidden_size) + ", and there is no " + defaults.head_size_key);
  } else {
    config.head_size = config.hidden_size / config.heads;
  }
  if (config.head_size % 2 != 0 || config.head_size > head_size_range.max) {
    json.refuse(defaults.head_size_key,
                std::to_string(config.head_size) + " is no even number up to " + std::to_string(head_size_range.max));
  }
}

void read_rope(JsonObject& json, double turned, ModelConfig& config) {
  config.rope.theta = json.real("rope_theta", {.min = 0, .max = 1e15}, 10000.0);
  check_turned(json, turned);
  for (const char* key : {"rope_parameters", "rope_scaling"}) {
    if (const nlohmann::json* object = json.find(key)) {
      read_rope_object(*object, json.place() + ": " + key, json.errors(), turned, config.rope);
      return;
    }
  }
}

void read_format(JsonObject& json, ModelConfig& config) {
  config.checkpoint_dtype = read_dtype(json);
  if (json.boolean("mlp_bias", false)) json.refuse("mlp_bias", "true is not supported");
  if (json.has("quantization_config")) json.refuse("quantization_config", "quantised checkpoints are not supported");
}

void check_activation(JsonObject& json, const char* key, std::initializer_list<const char*> allowed) {
  const std::string activation = json.text(key, *allowed.begin());
  std::string names;
  for (const char* name : allowed) {
    if (activation == name) return;
    names += (names.empty() ? "" : ", ") + std::string(name);
  }
  json.refuse(key, "\"" + activation + "\" is not supported; supported: " + names);
}

}  // namespace rubato::engine
