// SPDX-License-Identifier: Apache-2.0
// Loading and the forward pass of the Llama family.
#include "engine/models/decoder.h"

#include <array>
#include <string>
#include <utility>

#include "engine/models/rope.h"
#include "manifests/check.h"

namespace rubato::engine {
namespace {

Result<NormId> load_norm(WeightSource& weights, const std::string& name, std::int32_t size, Ops& ops) {
  const std::array<std::int64_t, 1> shape{size};
  Result<TensorView> view = weights.load(name, shape);
  if (!view) return Unexpected(std::move(view).error());
  return ops.make_norm(*view);
}

Result<void> load_part(WeightSource& weights, const std::string& name, LinearId id, std::int32_t first, const LinearShape& part,
                       Ops& ops) {
  const std::array<std::int64_t, 2> shape{part.outputs, part.inputs};
  Result<TensorView> view = weights.load(name + ".weight", shape);
  if (!view) return Unexpected(std::move(view).error());
  ops.load_rows(id, first, *view);
  return {};
}

Result<void> load_bias(WeightSource& weights, const std::string& name, LinearId id, std::int32_t first, std::int32_t outputs,
                       Ops& ops) {
  const std::array<std::int64_t, 1> shape{outputs};
  Result<TensorView> view = weights.load(name + ".bias", shape);
  if (!view) return Unexpected(std::move(view).error());
  ops.load_bias(id, first, *view);
  return {};
}

/// make_linear and load_part of a matrix that is one tensor.
Result<LinearId> load_linear(WeightSource& weights, const std::string& name, const LinearShape& shape, Ops& ops) {
  Result<LinearId> id = ops.make_linear(shape);
  if (!id) return id;
  if (Result<void> loaded = load_part(weights, name, *id, 0, shape, ops); !loaded) return Unexpected(std::move(loaded).error());
  return id;
}

}  // namespace

Result<Decoder> Decoder::make(const ModelConfig& config, WeightSource& weights, const BackendOptions& options, Ops& ops) {
  Decoder model(config, ops);
  // The cache and scratch first: memory that is missing is known before a long load.
  if (Result<void> cache = model.make_cache(options); !cache) return Unexpected(std::move(cache).error());
  if (Result<void> taken = model.take_scratch(options); !taken) return Unexpected(std::move(taken).error());
  if (Result<void> loaded = model.load(weights); !loaded) return Unexpected(std::move(loaded).error());
  return model;
}

Result<Decoder> Decoder::beside(const BackendOptions& options, Ops& ops) const {
  Decoder model = through(ops);
  if (Result<void> taken = model.take_scratch(options); !taken) return Unexpected(std::move(taken).error());
  return model;
}

AttentionShape Decoder::attention_shape(const BackendOptions& options) const {
  return {.layers = config_.layers,
          .heads = config_.heads,
          .kv_heads = config_.kv_heads,
          .head_size = config_.head_size,
          .block_count = options.block_count,
          .max_position = options.max_model_len};
}

Result<void> Decoder::make_cache(const BackendOptions& options) {
  const RopeTable rope = make_rope_table(config_.rope, config_.head_size, options.max_model_len);
  return ops_->make_cache(attention_shape(options), rope.cosines, rope.sines);
}

Result<void> Decoder::take_scratch(const BackendOptions& options) {
  const AttentionShape attention = attention_shape(options);
  struct Buffer {
    Matrix* matrix;
    std::int32_t rows;
    std::int32_t columns;
    Format format;
  };
  const std::int32_t tokens = options.max_tokens_per_step;
  const std::int32_t rows = options.max_rows;
  const std::array<Buffer, 10> buffers{{
      {&residual_, tokens, config_.hidden_size, Format::Accumulator},
      {&delta_, tokens, config_.hidden_size, Format::Accumulator},
      {&normed_, tokens, config_.hidden_size, Format::Activation},
      {&qkv_, tokens, attention.qkv_columns(), Format::Accumulator},
      {&query_, tokens, attention.query_columns(), Format::Activation},
      {&attended_, tokens, attention.query_columns(), Format::Activation},
      {&gated_, tokens, config_.feed_forward, Format::Activation},
      {&selected_residual_, rows, config_.hidden_size, Format::Accumulator},
      {&selected_attended_, rows, attention.query_columns(), Format::Activation},
      {&logits_, rows, config_.vocabulary, Format::Accumulator},
  }};
  for (const Buffer& buffer : buffers) {
    Result<Matrix> matrix = ops_->allocate(buffer.rows, buffer.columns, buffer.format);
    if (!matrix) return Unexpected(std::move(matrix).error());
    *buffer.matrix = *matrix;
  }
  return {};
}

Result<void> Decoder::load(WeightSource& weights) {
  const LinearShape vocabulary{.outputs = config_.vocabulary, .inputs = config_.hidden_size};
  Result<LinearId> embedding = load_linear(weights, "model.embed_tokens", vocabulary, *ops_);
  if (!embedding) return Unexpected(std::move(embedding).error());
  embedding_ = *embedding;
  head_ = embedding_;
  if (!config_.tied_embeddings) {
    Result<LinearId> head = load_linear(weights, "lm_head", vocabulary, *ops_);
    if (!head) return Unexpected(std::move(head).error());
    head_ = *head;
  }
  Result<NormId> norm = load_norm(weights, "model.norm.weight", config_.hidden_size, *ops_);
  if (!norm) return Unexpected(std::move(norm).error());
  final_norm_ = *norm;
  layers_.reserve(static_cast<std::size_t>(config_.layers));
  for (std::int32_t index = 0; index < config_.layers; ++index) {
    Result<Layer> layer = load_layer(weights, index);
    if (!layer) return Unexpected(std::move(layer).error());
    layers_.push_back(*layer);
  }
  return {};
}

Result<Decoder::Layer> Decoder::load_layer(WeightSource& weights, std::int32_t index) {
  const std::string prefix = "model.layers." + std::to_string(index) + ".";
  const std::int32_t hidden = config_.hidden_size;
  Layer layer;
  Result<NormId> norm = load_norm(weights, prefix + "input_layernorm.weight", hidden, *ops_);
  if (!norm) return Unexpected(std::move(norm).error());
  layer.attention_norm = *norm;
  norm = load_norm(weights, prefix + "post_attention_layernorm.weight", hidden, *ops_);
  if (!norm) return Unexpected(std::move(norm).error());
  layer.feed_forward_norm = *norm;
  if (Result<void> attention = load_attention(weights, index, layer); !attention) return Unexpected(std::move(attention).error());

  const LinearShape half{.outputs = config_.feed_forward, .inputs = hidden};
  Result<LinearId> gate_up =
      ops_->make_linear({.outputs = 2 * config_.feed_forward, .inputs = hidden, .kind = LinearKind::Swiglu});
  if (!gate_up) return Unexpected(std::move(gate_up).error());
  layer.gate_up = *gate_up;
  Result<void> loaded = load_part(weights, prefix + "mlp.gate_proj", layer.gate_up, 0, half, *ops_);
  if (loaded) loaded = load_part(weights, prefix + "mlp.up_proj", layer.gate_up, config_.feed_forward, half, *ops_);
  if (!loaded) return Unexpected(std::move(loaded).error());

  Result<LinearId> down =
      load_linear(weights, prefix + "mlp.down_proj", {.outputs = hidden, .inputs = config_.feed_forward}, *ops_);
  if (!down) return Unexpected(std::move(down).error());
  layer.down = *down;
  return layer;
}

Result<void> Decoder::load_attention(WeightSource& weights, std::int32_t index, Layer& layer) {
  const std::string prefix = "model.layers." + std::to_string(index) + ".self_attn.";
  const std::int32_t query = config_.heads * config_.head_size;
  const std::int32_t key = config_.kv_heads * config_.head_size;
  Result<LinearId> qkv = ops_->make_linear({.outputs = query + 2 * key, .inputs = config_.hidden_size});
  if (!qkv) return Unexpected(std::move(qkv).error());
  layer.qkv = *qkv;
  std::int32_t first = 0;
  for (const auto& [name, outputs] : {std::pair{"q_proj", query}, std::pair{"k_proj", key}, std::pair{"v_proj", key}}) {
    Result<void> loaded =
        load_part(weights, prefix + name, layer.qkv, first, {.outputs = outputs, .inputs = config_.hidden_size}, *ops_);
    if (loaded && config_.attention_bias) loaded = load_bias(weights, prefix + name, layer.qkv, first, outputs, *ops_);
    if (!loaded) return loaded;
    first += outputs;
  }
  Result<LinearId> output = load_linear(weights, prefix + "o_proj", {.outputs = config_.hidden_size, .inputs = query}, *ops_);
  if (!output) return Unexpected(std::move(output).error());
  layer.attention_output = *output;
  if (config_.attention_output_bias) {
    if (Result<void> bias = load_bias(weights, prefix + "o_proj", *output, 0, config_.hidden_size, *ops_); !bias) return bias;
  }
  if (config_.qk_norm) {
    Result<NormId> query_norm = load_norm(weights, prefix + "q_norm.weight", config_.head_size, *ops_);
    if (!query_norm) return Unexpected(std::move(query_norm).error());
    Result<NormId> key_norm = load_norm(weights, prefix + "k_norm.weight", config_.head_size, *ops_);
    if (!key_norm) return Unexpected(std::move(key_norm).error());
    layer.query_key_norm = QueryKeyNorm{.query = *query_norm, .key = *key_norm, .epsilon = config_.rms_norm_epsilon};
  }
  return {};
}

Matrix Decoder::forward(std::span<const TokenId> tokens, std::span<const SequenceSpan> sequences,
                        std::span<const std::int32_t> selected) {
  const float epsilon = config_.rms_norm_epsilon;
  std::int32_t count = static_cast<std::int32_t>(tokens.size());
  Matrix residual = residual_.top(count);
  Matrix attended = attended_.top(count);
  ops_->embed(embedding_, tokens, 1.0F, residual);
  for (std::int32_t index = 0; index < config_.layers; ++index) {
    const Layer& layer = layers_[static_cast<std::size_t>(index)];
    if (index == 0) {
      ops_->rms_norm(residual, layer.attention_norm, epsilon, normed_.top(count));
    } else {
      ops_->add_rms_norm(residual, delta_.top(count), 1.0F, layer.attention_norm, epsilon, normed_.top(count));
    }
    ops_->linear(layer.qkv, normed_.top(count), qkv_.top(count));
    ops_->rope_and_store(qkv_.top(count), index, sequences, layer.query_key_norm, query_.top(count));
    // Past the last layer's cache only the selected tokens matter.
    const bool last = index + 1 == config_.layers;
    if (last && selected.empty()) return logits_.top(0);
    ops_->attention(query_.top(count), index, sequences, attended);
    if (last && (static_cast<std::int32_t>(selected.size()) < count || selected.back() != count - 1)) {
      count = static_cast<std::int32_t>(selected.size());
      ops_->gather_rows(residual, selected, selected_residual_.top(count));
      ops_->gather_rows(attended, selected, selected_attended_.top(count));
      residual = selected_residual_.top(count);
      attended = selected_attended_.top(count);
    }
    ops_->linear(layer.attention_output, attended, delta_.top(count));
    ops_->add_rms_norm(residual, delta_.top(count), 1.0F, layer.feed_forward_norm, epsilon, normed_.top(count));
    ops_->linear(layer.gate_up, normed_.top(count), gated_.top(count));
    ops_->linear(layer.down, gated_.top(count), delta_.top(count));
  }
  ops_->add_rms_norm(residual, delta_.top(count), 1.0F, final_norm_, epsilon, normed_.top(count));
  ops_->linear(head_, normed_.top(count), logits_.top(count));
  return logits_.top(count);
}

}  // namespace rubato::engine
