// SPDX-License-Identifier: Apache-2.0
// Names and shapes of a model's tensors, and the sizes that follow from them.
#include "engine/model/tensors.h"

#include <utility>

namespace rubato::engine {
namespace {

class TensorList {
 public:
  explicit TensorList(std::vector<TensorSpec>& tensors) : tensors_(tensors) {}
  void add(std::string name, std::vector<std::int64_t> shape) { tensors_.push_back({std::move(name), std::move(shape)}); }
  void add_linear(const std::string& name, std::int64_t outputs, std::int64_t inputs) {
    add(name + ".weight", {outputs, inputs});
  }

 private:
  std::vector<TensorSpec>& tensors_;
};

void add_attention(const ModelConfig& config, const std::string& prefix, TensorList& list) {
  const std::int64_t hidden = config.hidden_size;
  const std::int64_t query = std::int64_t{config.heads} * config.head_size;
  const std::int64_t key = std::int64_t{config.kv_heads} * config.head_size;
  list.add_linear(prefix + "q_proj", query, hidden);
  list.add_linear(prefix + "k_proj", key, hidden);
  list.add_linear(prefix + "v_proj", key, hidden);
  if (config.attention_bias) {
    list.add(prefix + "q_proj.bias", {query});
    list.add(prefix + "k_proj.bias", {key});
    list.add(prefix + "v_proj.bias", {key});
  }
  if (config.qk_norm) {
    list.add(prefix + "q_norm.weight", {config.head_size});
    list.add(prefix + "k_norm.weight", {config.head_size});
  }
  list.add_linear(prefix + "o_proj", hidden, query);
  if (config.attention_output_bias) list.add(prefix + "o_proj.bias", {hidden});
}

void add_mamba2(const ModelConfig& config, const std::string& prefix, TensorList& list) {
  const Mamba2Config& mamba2 = *config.mamba2;
  list.add_linear(prefix + "in_proj", mamba2.projected(), config.hidden_size);
  if (mamba2.projection_bias) list.add(prefix + "in_proj.bias", {mamba2.projected()});
  list.add(prefix + "conv1d.weight", {mamba2.channels(), 1, mamba2.window});
  if (mamba2.convolution_bias) list.add(prefix + "conv1d.bias", {mamba2.channels()});
  list.add(prefix + "dt_bias", {mamba2.heads});
  list.add(prefix + "A_log", {mamba2.heads});
  list.add(prefix + "D", {mamba2.heads});
  if (mamba2.norm) list.add(prefix + "norm.weight", {mamba2.inner()});
  list.add_linear(prefix + "out_proj", config.hidden_size, mamba2.inner());
  if (mamba2.projection_bias) list.add(prefix + "out_proj.bias", {config.hidden_size});
}

void add_feed_forward(const ModelConfig& config, const std::string& prefix, TensorList& list) {
  const std::int64_t hidden = config.hidden_size;
  const std::int64_t feed_forward = config.feed_forward;
  switch (config.feed_forward_kind) {
    case FeedForwardKind::Swiglu:
      list.add_linear(prefix + "gate_proj", feed_forward, hidden);
      list.add_linear(prefix + "up_proj", feed_forward, hidden);
      list.add_linear(prefix + "down_proj", hidden, feed_forward);
      return;
    case FeedForwardKind::FusedSwiglu:
      list.add_linear(prefix + "input_linear", 2 * feed_forward, hidden);
      list.add_linear(prefix + "output_linear", hidden, feed_forward);
      return;
    case FeedForwardKind::ReluSquared:
      list.add_linear(prefix + "up_proj", feed_forward, hidden);
      list.add_linear(prefix + "down_proj", hidden, feed_forward);
      return;
  }
  CHECK(false, "kind=", static_cast<int>(config.feed_forward_kind));
}

}  // namespace

std::vector<TensorSpec> model_tensors(const ModelConfig& config) {
  std::vector<TensorSpec> tensors;
  TensorList list(tensors);
  list.add_linear(config.embedding_name, config.vocabulary, config.hidden_size);
  for (const Sublayer& sublayer : config.sublayers) {
    list.add(sublayer.norm, {config.hidden_size});
    switch (sublayer.kind) {
      case SublayerKind::Attention:
        add_attention(config, sublayer.prefix, list);
        break;
      case SublayerKind::Mamba2:
        add_mamba2(config, sublayer.prefix, list);
        break;
      case SublayerKind::FeedForward:
        add_feed_forward(config, sublayer.prefix, list);
        break;
    }
  }
  list.add(config.final_norm_name + ".weight", {config.hidden_size});
  if (!config.tied_embeddings) list.add_linear("lm_head", config.vocabulary, config.hidden_size);
  return tensors;
}

bool is_kept_in_float32(const TensorSpec& tensor) {
  return tensor.shape.size() != 2;
}

std::int64_t ModelConfig::state_bytes() const {
  if (!mamba2) return 0;
  const std::int64_t inputs = std::int64_t{mamba2->window - 1} * mamba2->channels();
  const std::int64_t state = std::int64_t{mamba2->inner()} * mamba2->state_size;
  return (inputs + state) * count_of(SublayerKind::Mamba2) * element_size(DataType::Float32);
}

std::int64_t ModelConfig::kv_bytes_per_token(DataType kv_dtype) const {
  return std::int64_t{2} * count_of(SublayerKind::Attention) * kv_heads * head_size * element_size(kv_dtype);
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
