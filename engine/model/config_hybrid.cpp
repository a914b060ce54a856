// SPDX-License-Identifier: Apache-2.0
// Attention, recurrent and feed-forward layers in an order that config.json states: Bamba, Granite 4 and Nemotron-H. Source of
// names and defaults: the configuration classes of Hugging Face transformers and the configurations published with the models.
#include <algorithm>
#include <initializer_list>
#include <nlohmann/json.hpp>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "engine/model/config_parts.h"
#include "engine/model/config_ranges.h"
#include "engine/model/sublayers.h"

namespace rubato::engine {
namespace {

using Kinds = std::vector<SublayerKind>;

constexpr Mamba2Keys bamba_keys{.heads = "mamba_n_heads",
                                .head_size = "mamba_d_head",
                                .groups = "mamba_n_groups",
                                .state_size = "mamba_d_state",
                                .window = "mamba_d_conv",
                                .expand = "mamba_expand",
                                .convolution_bias = "mamba_conv_bias",
                                .projection_bias = "mamba_proj_bias",
                                .norm_epsilon = "rms_norm_eps"};
constexpr Mamba2Keys nemotron_keys{.heads = "mamba_num_heads",
                                   .head_size = "mamba_head_dim",
                                   .groups = "n_groups",
                                   .state_size = "ssm_state_size",
                                   .window = "conv_kernel",
                                   .expand = nullptr,
                                   .convolution_bias = "use_conv_bias",
                                   .projection_bias = "use_bias",
                                   .norm_epsilon = "layer_norm_epsilon"};

struct KindName {
  std::string_view name;
  SublayerKind kind;
};
constexpr KindName mixer_names[] = {{"attention", SublayerKind::Attention},
                                    {"full_attention", SublayerKind::Attention},
                                    {"mamba", SublayerKind::Mamba2},
                                    {"linear_attention", SublayerKind::Mamba2}};
constexpr KindName single_names[] = {{"*", SublayerKind::Attention},
                                     {"M", SublayerKind::Mamba2},
                                     {"-", SublayerKind::FeedForward},
                                     {"attention", SublayerKind::Attention},
                                     {"full_attention", SublayerKind::Attention},
                                     {"mamba", SublayerKind::Mamba2},
                                     {"linear_attention", SublayerKind::Mamba2},
                                     {"mlp", SublayerKind::FeedForward}};

/// The kinds that names stand for; notes the first that is none.
Kinds kinds_of(JsonObject& json, const char* key, const std::vector<std::string>& names, std::span<const KindName> known) {
  Kinds kinds;
  for (std::size_t i = 0; i < names.size(); ++i) {
    const auto found = std::find_if(known.begin(), known.end(), [&](const KindName& one) { return one.name == names[i]; });
    if (found != known.end()) {
      kinds.push_back(found->kind);
      continue;
    }
    const std::string layer = "layer " + std::to_string(i) + " is \"" + names[i] + "\"";
    if (names[i] == "E" || names[i] == "moe") {
      json.refuse(key, layer + ": mixtures of experts (MoE) are not supported");
    } else {
      std::string allowed;
      for (const KindName& one : known) allowed += (allowed.empty() ? "" : ", ") + std::string(one.name);
      json.refuse(key, layer + "; supported: " + allowed);
    }
    return {};
  }
  return kinds;
}

/// The layers of a list of names under the first of keys that is there.
std::optional<Kinds> read_layer_list(JsonObject& json, std::initializer_list<const char*> keys, std::span<const KindName> known) {
  for (const char* key : keys) {
    const nlohmann::json* list = json.find(key);
    if (list == nullptr) continue;
    const bool texts =
        list->is_array() && std::all_of(list->begin(), list->end(), [](const auto& one) { return one.is_string(); });
    if (!texts) {
      json.refuse(key, shown(*list) + " is no list of names");
      return Kinds{};
    }
    if (json.has("num_hidden_layers") && *json.find("num_hidden_layers") != list->size()) {
      json.refuse(key, "names " + std::to_string(list->size()) + " layers; num_hidden_layers is " +
                           shown(*json.find("num_hidden_layers")));
    }
    return kinds_of(json, key, list->get<std::vector<std::string>>(), known);
  }
  return std::nullopt;
}

/// Bamba's list of the layers that attend.
Kinds read_attention_indices(JsonObject& json, std::int32_t layers) {
  Kinds kinds(static_cast<std::size_t>(layers), SublayerKind::Mamba2);
  for (const std::int32_t index : json.ids("attn_layer_indices", {.min = 0, .max = std::max(0, layers - 1)})) {
    if (index < layers) kinds[static_cast<std::size_t>(index)] = SublayerKind::Attention;
  }
  return kinds;
}

Kinds read_pattern(JsonObject& json) {
  constexpr const char* key = "hybrid_override_pattern";
  const std::string pattern = json.text(key, "");
  std::vector<std::string> names;
  for (const char letter : pattern) names.emplace_back(1, letter);
  if (json.has("num_hidden_layers") && *json.find("num_hidden_layers") != names.size()) {
    json.refuse(
        key, "names " + std::to_string(names.size()) + " layers; num_hidden_layers is " + shown(*json.find("num_hidden_layers")));
  }
  return kinds_of(json, key, names, single_names);
}

bool has_kind(const Kinds& kinds, SublayerKind kind) {
  return std::find(kinds.begin(), kinds.end(), kind) != kinds.end();
}

void read_sizes(JsonObject& json, const char* epsilon_key, double epsilon, std::int32_t max_position, ModelConfig& config) {
  config.hidden_size = json.integer("hidden_size", hidden_range);
  config.vocabulary = json.integer("vocab_size", vocabulary_range);
  config.max_position = json.integer("max_position_embeddings", position_range, max_position);
  config.rms_norm_epsilon = static_cast<float>(json.real(epsilon_key, {.min = 0, .max = 0.1}, epsilon));
  config.tied_embeddings = json.boolean("tie_word_embeddings", false);
  read_format(json, config);
  if (json.has("sliding_window") && json.integer("sliding_window", position_range, 1) < config.max_position) {
    json.refuse("sliding_window", shown(*json.find("sliding_window")) + " is below max_position_embeddings, " +
                                      std::to_string(config.max_position) + ": sliding window attention is not supported");
  }
}

/// A mixer and a feed-forward in each layer.
void add_pairs(const Kinds& kinds, const LayerNames& names, ModelConfig& config) {
  SublayerList list(names);
  for (std::size_t layer = 0; layer < kinds.size(); ++layer) {
    list.add(static_cast<std::int32_t>(layer), kinds[layer]);
    list.add(static_cast<std::int32_t>(layer), SublayerKind::FeedForward);
  }
  config.sublayers = list.take();
}

float multiplier(JsonObject& json, const char* key) {
  return static_cast<float>(json.real(key, {.min = 0, .max = 1e6}, 1.0));
}

}  // namespace

void read_bamba(JsonObject& json, ModelConfig& config) {
  constexpr double turned = 0.5;  // of each head, whatever the file says
  config.layers = json.integer("num_hidden_layers", layers_range);
  read_sizes(json, "rms_norm_eps", 1e-5, 262144, config);
  config.feed_forward = json.integer("intermediate_size", feed_forward_range);
  config.final_norm_name = "model.final_layernorm";
  check_activation(json, "hidden_act", {"silu", "swish"});
  if (json.boolean("attention_bias", false)) json.refuse("attention_bias", "true is not supported");
  const std::optional<Kinds> listed = read_layer_list(json, {"layers_block_type", "layer_types"}, mixer_names);
  const Kinds indexed = read_attention_indices(json, config.layers);
  if (listed && json.has("attn_layer_indices") && !listed->empty() && *listed != indexed) {
    json.refuse("attn_layer_indices", "contradicts the list of layer types");
  }
  const Kinds kinds = listed.value_or(indexed);
  add_pairs(kinds, bamba_names, config);
  if (has_kind(kinds, SublayerKind::Attention)) {
    read_heads(json, {.kv_heads = 8}, config);
    read_rope(json, turned, config);
    config.rotary_size = config.head_size / 2;
    if (config.rotary_size % 2 != 0) {
      json.refuse("head_dim", std::to_string(config.head_size) + " is no multiple of 4: half of each head is turned, in pairs");
    }
    if (json.has("attn_rotary_emb") && json.integer("attn_rotary_emb", head_size_range) != config.rotary_size) {
      json.refuse("attn_rotary_emb",
                  shown(*json.find("attn_rotary_emb")) + " is not half of the head size, " + std::to_string(config.head_size));
    }
  }
  if (has_kind(kinds, SublayerKind::Mamba2)) read_recurrence(json, bamba_keys, {.state_size = 256}, config);
}

void read_granite_hybrid(JsonObject& json, ModelConfig& config) {
  config.layers = json.integer("num_hidden_layers", layers_range);
  read_sizes(json, "rms_norm_eps", 1e-6, 2048, config);
  config.feed_forward = json.integer("shared_intermediate_size", feed_forward_range, 1024);
  config.feed_forward_kind = FeedForwardKind::FusedSwiglu;
  check_activation(json, "hidden_act", {"silu", "swish"});
  check_activation(json, "normalization_function", {"rmsnorm"});
  if (const std::int32_t experts = json.integer("num_local_experts", {.min = 0, .max = 1 << 16}, 8); experts > 0) {
    json.refuse("num_local_experts", std::to_string(experts) +
                                         (json.has("num_local_experts") ? "" : " (the default when the key is absent)") +
                                         ": mixtures of experts (MoE) are not supported; supported: 0");
  }
  config.embedding_multiplier = multiplier(json, "embedding_multiplier");
  config.residual_multiplier = multiplier(json, "residual_multiplier");
  config.logits_divisor = multiplier(json, "logits_scaling");
  const Kinds all_recurrent(static_cast<std::size_t>(config.layers), SublayerKind::Mamba2);
  const Kinds kinds = read_layer_list(json, {"layer_types", "layers_block_type"}, mixer_names).value_or(all_recurrent);
  add_pairs(kinds, granite_names, config);
  if (has_kind(kinds, SublayerKind::Attention)) {
    read_heads(json, {}, config);
    config.attention_scale = multiplier(json, "attention_multiplier");
    config.attention_bias = json.boolean("attention_bias", false);
    config.attention_output_bias = config.attention_bias;
    const std::string positions = json.text("position_embedding_type", "nope");
    if (positions == "rope") {
      read_rope(json, 1.0, config);
      config.rotary_size = config.head_size;
    } else if (positions != "nope") {
      json.refuse("position_embedding_type", "\"" + positions + "\" is not supported; supported: rope, nope");
    }
  }
  if (has_kind(kinds, SublayerKind::Mamba2)) {
    read_recurrence(json, bamba_keys, {.state_size = 256, .norm_epsilon = 1e-6F}, config);
  }
}

void read_nemotron_hybrid(JsonObject& json, ModelConfig& config) {
  read_sizes(json, "layer_norm_epsilon", 1e-5, 4096, config);
  config.feed_forward_kind = FeedForwardKind::ReluSquared;
  config.embedding_name = "backbone.embeddings";
  config.final_norm_name = "backbone.norm_f";
  const std::optional<Kinds> listed = read_layer_list(json, {"layers_block_type", "layer_types"}, single_names);
  if (!listed && !json.has("hybrid_override_pattern")) {
    json.refuse("hybrid_override_pattern", "is missing");
    return;
  }
  const Kinds kinds = listed ? *listed : read_pattern(json);
  if (kinds.empty() || kinds.size() > static_cast<std::size_t>(layers_range.max)) {
    json.refuse("hybrid_override_pattern",
                "names " + std::to_string(kinds.size()) + " layers; allowed: 1.." + std::to_string(layers_range.max));
    return;
  }
  config.layers = static_cast<std::int32_t>(kinds.size());
  SublayerList list(nemotron_names);
  for (std::int32_t layer = 0; layer < config.layers; ++layer) list.add(layer, kinds[static_cast<std::size_t>(layer)]);
  config.sublayers = list.take();
  const bool attends = has_kind(kinds, SublayerKind::Attention);
  const bool recurs = has_kind(kinds, SublayerKind::Mamba2);
  if (!attends && !recurs) json.refuse("hybrid_override_pattern", "has neither attention nor a recurrent layer");
  if (attends) {
    const char* head_size_key = json.has("head_dim") ? "head_dim" : "attention_head_dim";
    read_heads(json, {.kv_heads = 8, .head_size = 128, .head_size_key = head_size_key}, config);
    config.attention_bias = json.boolean("attention_bias", false);
    config.attention_output_bias = config.attention_bias;
  }
  if (recurs) {
    check_activation(json, "mamba_hidden_act", {"silu", "swish"});
    read_recurrence(json, nemotron_keys, {.groups = 8}, config);
  }
  if (has_kind(kinds, SublayerKind::FeedForward)) {
    config.feed_forward = json.integer("intermediate_size", feed_forward_range);
    check_activation(json, "mlp_hidden_act", {"relu2"});
  }
}

}  // namespace rubato::engine
