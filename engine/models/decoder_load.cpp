// SPDX-License-Identifier: Apache-2.0
// Loads a decoder's weights: parts of one product side by side, and everything that only rearranges or scales weights, so that
// the forward pass need not know of it.
#include <array>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "engine/models/decoder.h"
#include "engine/models/tensor_elements.h"
#include "manifests/check.h"

namespace rubato::engine {
namespace {

/// A span of rows that goes elsewhere within a head.
struct RowMove {
  std::int32_t from = 0;
  std::int32_t to = 0;
  std::int32_t count = 0;
};

/// Where the rows of a head of q and k go. Ops rotates pairs (i, i + head_size / 2); a model that turns only the first
/// rotary_size elements pairs (i, i + rotary_size / 2). So those pairs move to where Ops rotates them, and the others, which are
/// not turned, fill up what is left. The same move in q and k leaves their product as it was, but for the order of its sum.
std::vector<RowMove> head_moves(std::int32_t rotary_size, std::int32_t head_size) {
  if (rotary_size == 0 || rotary_size == head_size) return {{.from = 0, .to = 0, .count = head_size}};
  const std::int32_t half = head_size / 2;
  const std::int32_t turned = rotary_size / 2;
  const std::int32_t still = half - turned;
  return {{.from = 0, .to = 0, .count = turned},
          {.from = turned, .to = half, .count = turned},
          {.from = rotary_size, .to = turned, .count = still},
          {.from = rotary_size + still, .to = half + turned, .count = still}};
}

TensorView rows_of(const TensorView& view, std::int64_t first, std::int64_t count) {
  std::int64_t row = element_size(view.dtype);
  for (std::size_t i = 1; i < view.shape.size(); ++i) row *= view.shape[i];
  TensorView part = view;
  part.shape[0] = count;
  part.bytes = view.bytes.subspan(static_cast<std::size_t>(first * row), static_cast<std::size_t>(count * row));
  return part;
}

/// A vector that was computed here, as a tensor.
TensorView view_of(std::span<const float> values) {
  return {.dtype = DataType::Float32, .shape = {static_cast<std::int64_t>(values.size())}, .bytes = std::as_bytes(values)};
}

class Loader {
 public:
  Loader(const ModelConfig& config, WeightSource& weights, Ops& ops)
      : config_(config), weights_(weights), ops_(ops), moves_(head_moves(config.rotary_size, config.head_size)) {}

  Result<DecoderWeights> load();

 private:
  Result<TensorView> vector(const std::string& name, std::int32_t size) {
    return weights_.load(name, std::array<std::int64_t, 1>{size});
  }
  Result<NormId> norm(const std::string& name, std::int32_t size);
  Result<NormId> head_norm(const std::string& name);
  Result<NormId> final_norm();
  Result<void> rows(const std::string& name, LinearId id, std::int32_t first, const LinearShape& part);
  Result<void> bias(const std::string& name, LinearId id, std::int32_t first, std::int32_t outputs);
  Result<void> heads(const std::string& name, LinearId id, std::int32_t first, std::int32_t heads);
  Result<LinearId> linear(const std::string& name, const LinearShape& shape);
  Result<AttentionWeights> attention(const Sublayer& sublayer);
  Result<void> query_key_value(const std::string& prefix, LinearId id);
  Result<RecurrentWeights> recurrent(const Sublayer& sublayer);
  Result<void> recurrence(const std::string& prefix, RecurrentId id);
  Result<FeedForwardWeights> feed_forward(const Sublayer& sublayer);
  Result<SublayerWeights> sublayer(const Sublayer& sublayer);

  const ModelConfig& config_;
  WeightSource& weights_;
  Ops& ops_;
  std::vector<RowMove> moves_;  // of each head of q and k
};

Result<NormId> Loader::norm(const std::string& name, std::int32_t size) {
  Result<TensorView> view = vector(name, size);
  if (!view) return Unexpected(std::move(view).error());
  return ops_.make_norm(*view);
}

/// A norm of each head of q or k, whose elements move with the heads' rows.
Result<NormId> Loader::head_norm(const std::string& name) {
  Result<TensorView> view = vector(name, config_.head_size);
  if (!view) return Unexpected(std::move(view).error());
  std::vector<float> moved(static_cast<std::size_t>(config_.head_size));
  for (const RowMove& move : moves_) {
    for (std::int32_t i = 0; i < move.count; ++i)
      moved[static_cast<std::size_t>(move.to + i)] = widen_element(*view, move.from + i);
  }
  return ops_.make_norm(view_of(moved));
}

/// Logits are divided here, once: they are linear in the final norm's weights.
Result<NormId> Loader::final_norm() {
  Result<TensorView> view = vector(config_.final_norm_name + ".weight", config_.hidden_size);
  if (!view) return Unexpected(std::move(view).error());
  if (config_.logits_divisor == 1.0F) return ops_.make_norm(*view);
  std::vector<float> divided(static_cast<std::size_t>(config_.hidden_size));
  for (std::size_t i = 0; i < divided.size(); ++i) {
    divided[i] = widen_element(*view, static_cast<std::int64_t>(i)) / config_.logits_divisor;
  }
  return ops_.make_norm(view_of(divided));
}

Result<void> Loader::rows(const std::string& name, LinearId id, std::int32_t first, const LinearShape& part) {
  Result<TensorView> view = weights_.load(name + ".weight", std::array<std::int64_t, 2>{part.outputs, part.inputs});
  if (!view) return Unexpected(std::move(view).error());
  ops_.load_rows(id, first, *view);
  return {};
}

Result<void> Loader::bias(const std::string& name, LinearId id, std::int32_t first, std::int32_t outputs) {
  Result<TensorView> view = vector(name + ".bias", outputs);
  if (!view) return Unexpected(std::move(view).error());
  ops_.load_bias(id, first, *view);
  return {};
}

/// Rows, and bias where there is one, of q or k.
Result<void> Loader::heads(const std::string& name, LinearId id, std::int32_t first, std::int32_t heads) {
  const std::int32_t outputs = heads * config_.head_size;
  if (moves_.size() == 1) {
    Result<void> loaded = rows(name, id, first, {.outputs = outputs, .inputs = config_.hidden_size});
    return loaded && config_.attention_bias ? bias(name, id, first, outputs) : loaded;
  }
  const auto moved = [&](const TensorView& view, auto&& load) {
    for (std::int32_t head = 0; head < outputs; head += config_.head_size) {
      for (const RowMove& move : moves_) load(first + head + move.to, rows_of(view, head + move.from, move.count));
    }
  };
  Result<TensorView> view = weights_.load(name + ".weight", std::array<std::int64_t, 2>{outputs, config_.hidden_size});
  if (!view) return Unexpected(std::move(view).error());
  moved(*view, [&](std::int32_t to, const TensorView& part) { ops_.load_rows(id, to, part); });
  if (!config_.attention_bias) return {};
  view = vector(name + ".bias", outputs);
  if (!view) return Unexpected(std::move(view).error());
  moved(*view, [&](std::int32_t to, const TensorView& part) { ops_.load_bias(id, to, part); });
  return {};
}

/// A matrix that is one tensor.
Result<LinearId> Loader::linear(const std::string& name, const LinearShape& shape) {
  Result<LinearId> id = ops_.make_linear(shape);
  if (!id) return id;
  if (Result<void> loaded = rows(name, *id, 0, shape); !loaded) return Unexpected(std::move(loaded).error());
  return id;
}

Result<void> Loader::query_key_value(const std::string& prefix, LinearId id) {
  const std::int32_t query = config_.heads * config_.head_size;
  const std::int32_t key = config_.kv_heads * config_.head_size;
  Result<void> loaded = heads(prefix + "q_proj", id, 0, config_.heads);
  if (loaded) loaded = heads(prefix + "k_proj", id, query, config_.kv_heads);
  const std::string value = prefix + "v_proj";
  if (loaded) loaded = rows(value, id, query + key, {.outputs = key, .inputs = config_.hidden_size});
  if (loaded && config_.attention_bias) loaded = bias(value, id, query + key, key);
  return loaded;
}

Result<AttentionWeights> Loader::attention(const Sublayer& sublayer) {
  const std::string& prefix = sublayer.prefix;
  const std::int32_t query = config_.heads * config_.head_size;
  const std::int32_t key = config_.kv_heads * config_.head_size;
  AttentionWeights attention;
  attention.layer = sublayer.index;
  Result<LinearId> qkv = ops_.make_linear({.outputs = query + 2 * key, .inputs = config_.hidden_size});
  if (!qkv) return Unexpected(std::move(qkv).error());
  attention.qkv = *qkv;
  if (Result<void> loaded = query_key_value(prefix, *qkv); !loaded) return Unexpected(std::move(loaded).error());
  Result<LinearId> output = linear(prefix + "o_proj", {.outputs = config_.hidden_size, .inputs = query});
  if (!output) return Unexpected(std::move(output).error());
  attention.output = *output;
  if (config_.attention_output_bias) {
    Result<void> loaded = bias(prefix + "o_proj", *output, 0, config_.hidden_size);
    if (!loaded) return Unexpected(std::move(loaded).error());
  }
  if (config_.qk_norm) {
    Result<NormId> query_norm = head_norm(prefix + "q_norm.weight");
    if (!query_norm) return Unexpected(std::move(query_norm).error());
    Result<NormId> key_norm = head_norm(prefix + "k_norm.weight");
    if (!key_norm) return Unexpected(std::move(key_norm).error());
    attention.norm = QueryKeyNorm{.query = *query_norm, .key = *key_norm, .epsilon = config_.rms_norm_epsilon};
  }
  return attention;
}

/// What convolution and scan need.
Result<void> Loader::recurrence(const std::string& prefix, RecurrentId id) {
  const Mamba2Config& mamba2 = *config_.mamba2;
  Result<TensorView> taps =
      weights_.load(prefix + "conv1d.weight", std::array<std::int64_t, 3>{mamba2.channels(), 1, mamba2.window});
  if (!taps) return Unexpected(std::move(taps).error());
  ops_.load_recurrent(id, RecurrentPart::Taps, *taps);
  struct Part {
    RecurrentPart part;
    const char* name;
    std::int32_t size;
  };
  for (const Part& part : {Part{RecurrentPart::TapsBias, "conv1d.bias", mamba2.channels()},
                           Part{RecurrentPart::TimeStepBias, "dt_bias", mamba2.heads},
                           Part{RecurrentPart::LogDecay, "A_log", mamba2.heads}, Part{RecurrentPart::Skip, "D", mamba2.heads}}) {
    if (part.part == RecurrentPart::TapsBias && !mamba2.convolution_bias) continue;
    Result<TensorView> view = vector(prefix + part.name, part.size);
    if (!view) return Unexpected(std::move(view).error());
    ops_.load_recurrent(id, part.part, *view);
  }
  return {};
}

Result<RecurrentWeights> Loader::recurrent(const Sublayer& sublayer) {
  const std::string& prefix = sublayer.prefix;
  const Mamba2Config& mamba2 = *config_.mamba2;
  RecurrentWeights recurrent;
  Result<RecurrentId> layer = ops_.make_recurrent();
  if (!layer) return Unexpected(std::move(layer).error());
  recurrent.layer = *layer;
  CHECK(layer->value == sublayer.index, "layer=", layer->value, " index=", sublayer.index);
  Result<LinearId> input = linear(prefix + "in_proj", {.outputs = mamba2.projected(), .inputs = config_.hidden_size});
  if (!input) return Unexpected(std::move(input).error());
  recurrent.input = *input;
  if (Result<void> loaded = recurrence(prefix, *layer); !loaded) return Unexpected(std::move(loaded).error());
  recurrent.norm = {.order = !mamba2.norm              ? GatedNorm::Order::GateOnly
                             : mamba2.norm_before_gate ? GatedNorm::Order::NormFirst
                                                       : GatedNorm::Order::GateFirst,
                    .weight = {},
                    .group_columns = mamba2.inner() / mamba2.norm_groups,
                    .epsilon = mamba2.norm_epsilon};
  if (mamba2.norm) {
    Result<NormId> weight = norm(prefix + "norm.weight", mamba2.inner());
    if (!weight) return Unexpected(std::move(weight).error());
    recurrent.norm.weight = *weight;
  }
  Result<LinearId> output = linear(prefix + "out_proj", {.outputs = config_.hidden_size, .inputs = mamba2.inner()});
  if (!output) return Unexpected(std::move(output).error());
  recurrent.output = *output;
  if (mamba2.projection_bias) {
    Result<void> loaded = bias(prefix + "in_proj", *input, 0, mamba2.projected());
    if (loaded) loaded = bias(prefix + "out_proj", *output, 0, config_.hidden_size);
    if (!loaded) return Unexpected(std::move(loaded).error());
  }
  return recurrent;
}

Result<FeedForwardWeights> Loader::feed_forward(const Sublayer& sublayer) {
  const std::string& prefix = sublayer.prefix;
  const FeedForwardKind kind = config_.feed_forward_kind;
  const std::int32_t wide = config_.feed_forward;
  const LinearShape half{.outputs = wide, .inputs = config_.hidden_size};
  const LinearShape both{.outputs = 2 * wide, .inputs = config_.hidden_size, .kind = LinearKind::Swiglu};
  FeedForwardWeights feed_forward;
  Result<LinearId> up = ops_.make_linear(kind == FeedForwardKind::ReluSquared ? half : both);
  if (!up) return Unexpected(std::move(up).error());
  feed_forward.up = *up;
  Result<void> loaded;
  switch (kind) {
    case FeedForwardKind::Swiglu:
      loaded = rows(prefix + "gate_proj", *up, 0, half);
      if (loaded) loaded = rows(prefix + "up_proj", *up, wide, half);
      break;
    case FeedForwardKind::FusedSwiglu:
      loaded = rows(prefix + "input_linear", *up, 0, both);
      break;
    case FeedForwardKind::ReluSquared:
      loaded = rows(prefix + "up_proj", *up, 0, half);
      break;
  }
  if (!loaded) return Unexpected(std::move(loaded).error());
  const char* name = kind == FeedForwardKind::FusedSwiglu ? "output_linear" : "down_proj";
  Result<LinearId> down = linear(prefix + name, {.outputs = config_.hidden_size, .inputs = wide});
  if (!down) return Unexpected(std::move(down).error());
  feed_forward.down = *down;
  return feed_forward;
}

Result<SublayerWeights> Loader::sublayer(const Sublayer& sublayer) {
  SublayerWeights loaded;
  Result<NormId> id = norm(sublayer.norm, config_.hidden_size);
  if (!id) return Unexpected(std::move(id).error());
  loaded.norm = *id;
  const auto take = [&](auto&& part) -> Result<SublayerWeights> {
    if (!part) return Unexpected(std::move(part).error());
    loaded.part = *part;
    return loaded;
  };
  switch (sublayer.kind) {
    case SublayerKind::Attention:
      return take(attention(sublayer));
    case SublayerKind::Mamba2:
      return take(recurrent(sublayer));
    case SublayerKind::FeedForward:
      return take(feed_forward(sublayer));
  }
  CHECK(false, "kind=", static_cast<int>(sublayer.kind));
  return loaded;
}

Result<DecoderWeights> Loader::load() {
  DecoderWeights loaded;
  const LinearShape vocabulary{.outputs = config_.vocabulary, .inputs = config_.hidden_size};
  Result<LinearId> embedding = linear(config_.embedding_name, vocabulary);
  if (!embedding) return Unexpected(std::move(embedding).error());
  loaded.embedding = *embedding;
  loaded.head = *embedding;
  if (!config_.tied_embeddings) {
    Result<LinearId> head = linear("lm_head", vocabulary);
    if (!head) return Unexpected(std::move(head).error());
    loaded.head = *head;
  }
  Result<NormId> last = final_norm();
  if (!last) return Unexpected(std::move(last).error());
  loaded.final_norm = *last;
  loaded.sublayers.reserve(config_.sublayers.size());
  for (const Sublayer& part : config_.sublayers) {
    Result<SublayerWeights> weights = sublayer(part);
    if (!weights) return Unexpected(std::move(weights).error());
    loaded.sublayers.push_back(std::move(weights).value());
  }
  return loaded;
}

}  // namespace

Result<DecoderWeights> load_decoder(const ModelConfig& config, WeightSource& weights, Ops& ops) {
  return Loader(config, weights, ops).load();
}

}  // namespace rubato::engine
