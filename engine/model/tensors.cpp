// SPDX-License-Identifier: Apache-2.0
// Names and shapes of a Llama-family model's tensors, and the sizes that follow from them.
#include "engine/model/tensors.h"

namespace rubato::engine {
namespace {

void add_layer(const ModelConfig& config, const std::string& prefix, std::vector<TensorSpec>& tensors) {
  const std::int64_t hidden = config.hidden_size;
  const std::int64_t feed_forward = config.feed_forward;
  const std::int64_t query = std::int64_t{config.heads} * config.head_size;
  const std::int64_t key = std::int64_t{config.kv_heads} * config.head_size;
  const auto add = [&](const char* name, std::vector<std::int64_t> shape) {
    tensors.push_back({prefix + name, std::move(shape)});
  };
  add("input_layernorm.weight", {hidden});
  add("self_attn.q_proj.weight", {query, hidden});
  add("self_attn.k_proj.weight", {key, hidden});
  add("self_attn.v_proj.weight", {key, hidden});
  if (config.attention_bias) {
    add("self_attn.q_proj.bias", {query});
    add("self_attn.k_proj.bias", {key});
    add("self_attn.v_proj.bias", {key});
  }
  if (config.qk_norm) {
    add("self_attn.q_norm.weight", {config.head_size});
    add("self_attn.k_norm.weight", {config.head_size});
  }
  add("self_attn.o_proj.weight", {hidden, query});
  if (config.attention_output_bias) add("self_attn.o_proj.bias", {hidden});
  add("post_attention_layernorm.weight", {hidden});
  add("mlp.gate_proj.weight", {feed_forward, hidden});
  add("mlp.up_proj.weight", {feed_forward, hidden});
  add("mlp.down_proj.weight", {hidden, feed_forward});
}

}  // namespace

std::vector<TensorSpec> model_tensors(const ModelConfig& config) {
  std::vector<TensorSpec> tensors;
  tensors.push_back({"model.embed_tokens.weight", {config.vocabulary, config.hidden_size}});
  for (std::int32_t layer = 0; layer < config.layers; ++layer) {
    add_layer(config, "model.layers." + std::to_string(layer) + ".", tensors);
  }
  tensors.push_back({"model.norm.weight", {config.hidden_size}});
  if (!config.tied_embeddings) tensors.push_back({"lm_head.weight", {config.vocabulary, config.hidden_size}});
  return tensors;
}

std::int64_t ModelConfig::kv_bytes_per_token(DataType kv_dtype) const {
  return std::int64_t{2} * layers * kv_heads * head_size * element_size(kv_dtype);
}

std::int64_t ModelConfig::parameter_count() const {
  std::int64_t total = 0;
  for (const TensorSpec& tensor : model_tensors(*this)) {
    std::int64_t elements = 1;
    for (const std::int64_t size : tensor.shape) elements *= size;
    total += elements;
  }
  return total;
}

}  // namespace rubato::engine
