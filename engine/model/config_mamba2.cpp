// SPDX-License-Identifier: Apache-2.0
// Recurrent layers in config.json, and models of nothing else.
#include <cmath>
#include <limits>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>

#include "engine/model/config_parts.h"
#include "engine/model/config_ranges.h"
#include "engine/model/sublayers.h"

namespace rubato::engine {
namespace {

constexpr JsonObject::RealRange epsilon_range{.min = 0, .max = 0.1};
constexpr Mamba2Keys mamba2_keys{.heads = "num_heads",
                                 .head_size = "head_dim",
                                 .groups = "n_groups",
                                 .state_size = "state_size",
                                 .window = "conv_kernel",
                                 .expand = "expand",
                                 .convolution_bias = "use_conv_bias",
                                 .projection_bias = "use_bias",
                                 .norm_epsilon = "layer_norm_epsilon"};

/// One end of time_step_limit. Infinity is written bare, as a string, or as {"__float__": "Infinity"}.
std::optional<float> limit_of(const nlohmann::json& value) {
  if (value.is_number() && value >= 0) return value.get<float>();
  const nlohmann::json* word = &value;
  if (value.is_object() && value.size() == 1 && value.contains("__float__")) word = &value["__float__"];
  if (*word == "Infinity" || *word == "inf") return std::numeric_limits<float>::infinity();
  return std::nullopt;
}

void read_time_step_limit(JsonObject& json, Mamba2Config& mamba2) {
  const nlohmann::json* limit = json.find("time_step_limit");
  if (limit == nullptr) return;
  const std::optional<float> low = limit->is_array() && limit->size() == 2 ? limit_of((*limit)[0]) : std::nullopt;
  const std::optional<float> high = low ? limit_of((*limit)[1]) : std::nullopt;
  if (!high || !(*low < *high)) {
    json.refuse("time_step_limit", shown(*limit) + " is no pair of a lower and an upper limit, the lower one at least 0");
    return;
  }
  mamba2.time_step_min = *low;
  mamba2.time_step_max = *high;
}

/// The head size may be "auto" or left out: what expand * hidden_size leaves for each head.
void read_head_size(JsonObject& json, const Mamba2Keys& keys, std::int32_t hidden_size, Mamba2Config& mamba2) {
  constexpr JsonObject::RealRange expand_range{.min = 0, .max = 64};
  const nlohmann::json* stated = json.find(keys.head_size);
  if (keys.expand == nullptr) {
    mamba2.head_size = json.integer(keys.head_size, mamba_head_size_range, 64);
    return;
  }
  const auto inner = static_cast<std::int32_t>(json.real(keys.expand, expand_range, 2.0) * hidden_size);
  const bool is_given = stated != nullptr && *stated != "auto";
  mamba2.head_size = is_given ? json.integer(keys.head_size, mamba_head_size_range) : inner / mamba2.heads;
  if (mamba2.head_size != 0 && mamba2.inner() == inner && mamba2.head_size <= mamba_head_size_range.max) return;
  json.refuse(keys.heads, std::to_string(mamba2.heads) + " heads of " + std::to_string(mamba2.head_size) + " elements are not " +
                              keys.expand + " * hidden_size, " + std::to_string(inner) + ", or wider than " +
                              std::to_string(mamba_head_size_range.max));
}

}  // namespace

void read_recurrence(JsonObject& json, const Mamba2Keys& keys, const Mamba2Defaults& defaults, ModelConfig& config) {
  Mamba2Config& mamba2 = config.mamba2.emplace();
  mamba2.heads = json.integer(keys.heads, mamba_heads_range, 128);
  mamba2.groups = json.integer(keys.groups, mamba_heads_range, defaults.groups);
  mamba2.state_size = json.integer(keys.state_size, state_size_range, defaults.state_size);
  mamba2.window = json.integer(keys.window, window_range, 4);
  mamba2.convolution_bias = json.boolean(keys.convolution_bias, true);
  mamba2.projection_bias = json.boolean(keys.projection_bias, false);
  mamba2.norm_epsilon = static_cast<float>(json.real(keys.norm_epsilon, epsilon_range, defaults.norm_epsilon));
  // As the layers are trained, each group of heads that shares B and C is normalised for itself, after the gate. Readers of such
  // folders that normalise all groups at once differ from it only with more than one group.
  mamba2.norm_groups = mamba2.groups;
  read_time_step_limit(json, mamba2);
  read_head_size(json, keys, config.hidden_size, mamba2);
  if (mamba2.heads % mamba2.groups != 0) {
    json.refuse(keys.groups,
                std::to_string(mamba2.groups) + " does not divide " + keys.heads + ", " + std::to_string(mamba2.heads));
  }
}

void read_mamba2(JsonObject& json, ModelConfig& config) {
  config.hidden_size = json.integer("hidden_size", hidden_range);
  config.layers = json.integer("num_hidden_layers", layers_range);
  config.vocabulary = json.integer("vocab_size", vocabulary_range);
  config.max_position = static_cast<std::int32_t>(position_range.max);  // a state knows no position
  config.rms_norm_epsilon = static_cast<float>(json.real("layer_norm_epsilon", epsilon_range, 1e-5));
  config.tied_embeddings = json.boolean("tie_word_embeddings", false);
  read_format(json, config);
  check_activation(json, "hidden_act", {"silu", "swish"});
  // norm_before_gate is not read: folders that say true are computed with the gate first by everything that runs them.
  if (!json.boolean("rms_norm", true)) {
    json.refuse("rms_norm", "false is not supported: readers of such folders disagree on which norm it takes away");
  }
  read_recurrence(json, mamba2_keys, {.groups = 8}, config);
  config.embedding_name = "backbone.embeddings";
  config.final_norm_name = "backbone.norm_f";
  SublayerList list(mamba2_names);
  for (std::int32_t layer = 0; layer < config.layers; ++layer) list.add(layer, SublayerKind::Mamba2);
  config.sublayers = list.take();
}

}  // namespace rubato::engine
