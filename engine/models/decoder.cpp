// SPDX-License-Identifier: Apache-2.0
// Memory and the forward pass of the decoder. Weights are loaded in decoder_load.cpp.
#include "engine/models/decoder.h"

#include <array>
#include <utility>

#include "engine/models/rope.h"
#include "manifests/check.h"

namespace rubato::engine {
namespace {

AttentionShape attention_shape(const ModelConfig& config, const BackendOptions& options) {
  return {.layers = config.count_of(SublayerKind::Attention),
          .heads = config.heads,
          .kv_heads = config.kv_heads,
          .head_size = config.head_size,
          .block_count = options.block_count,
          .max_position = options.max_model_len,
          .scale = config.attention_scale};
}

RecurrentShape recurrent_shape(const ModelConfig& config, const BackendOptions& options) {
  const Mamba2Config& mamba2 = *config.mamba2;
  return {.layers = config.count_of(SublayerKind::Mamba2),
          .heads = mamba2.heads,
          .head_size = mamba2.head_size,
          .groups = mamba2.groups,
          .state_size = mamba2.state_size,
          .window = mamba2.window,
          .time_step_min = mamba2.time_step_min,
          .time_step_max = mamba2.time_step_max,
          .state_count = options.state_count};
}

}  // namespace

Decoder::Decoder(const ModelConfig& config, Ops& ops) : config_(config), ops_(&ops) {
  bool found = false;
  for (std::size_t i = 0; i < config.sublayers.size(); ++i) {
    if (config.sublayers[i].kind == SublayerKind::FeedForward) continue;
    last_memory_ = i;
    found = true;
  }
  CHECK(found, "sublayers=", config.sublayers.size());
}

Result<Decoder> Decoder::make(const ModelConfig& config, WeightSource& weights, const BackendOptions& options, Ops& ops) {
  Decoder model(config, ops);
  // The cache and scratch first: memory that is missing is known before a long load.
  if (Result<void> cache = model.make_cache(options); !cache) return Unexpected(std::move(cache).error());
  if (Result<void> states = model.make_states(options); !states) return Unexpected(std::move(states).error());
  if (Result<void> taken = model.take_scratch(options); !taken) return Unexpected(std::move(taken).error());
  Result<DecoderWeights> loaded = load_decoder(config, weights, ops);
  if (!loaded) return Unexpected(std::move(loaded).error());
  model.weights_ = std::move(loaded).value();
  return model;
}

Result<Decoder> Decoder::beside(const BackendOptions& options, Ops& ops) const {
  Decoder model = through(ops);
  if (Result<void> taken = model.take_scratch(options); !taken) return Unexpected(std::move(taken).error());
  return model;
}

Result<void> Decoder::make_cache(const BackendOptions& options) {
  const AttentionShape shape = attention_shape(config_, options);
  if (shape.layers == 0) return ops_->make_cache(shape, {}, {});
  const RopeTable rope = make_partial_rope_table(config_.rope, config_.rotary_size, config_.head_size, options.max_model_len);
  return ops_->make_cache(shape, rope.cosines, rope.sines);
}

Result<void> Decoder::make_states(const BackendOptions& options) {
  if (!config_.mamba2) return {};
  return ops_->make_states(recurrent_shape(config_, options));
}

Result<void> Decoder::take_scratch(const BackendOptions& options) {
  const AttentionShape attention = attention_shape(config_, options);
  const Mamba2Config mamba2 = config_.mamba2.value_or(Mamba2Config{});
  const bool raises = config_.feed_forward_kind == FeedForwardKind::ReluSquared;
  struct Buffer {
    Matrix* matrix;
    std::int32_t rows;
    std::int32_t columns;  // 0: the model has no such sublayer
    Format format;
  };
  const std::int32_t tokens = options.max_tokens_per_step;
  const std::int32_t rows = options.max_rows;
  const std::array<Buffer, 16> buffers{{
      {&residual_, tokens, config_.hidden_size, Format::Accumulator},
      {&delta_, tokens, config_.hidden_size, Format::Accumulator},
      {&normed_, tokens, config_.hidden_size, Format::Activation},
      {&qkv_, tokens, attention.qkv_columns(), Format::Accumulator},
      {&query_, tokens, attention.query_columns(), Format::Activation},
      {&attended_, tokens, attention.query_columns(), Format::Activation},
      {&projected_, tokens, mamba2.projected(), Format::Accumulator},
      {&convolved_, tokens, mamba2.channels(), Format::Accumulator},
      {&scanned_, tokens, mamba2.inner(), Format::Accumulator},
      {&gated_, tokens, mamba2.inner(), Format::Activation},
      {&raised_, tokens, raises ? config_.feed_forward : 0, Format::Accumulator},
      {&activated_, tokens, config_.feed_forward, Format::Activation},
      {&selected_residual_, rows, config_.hidden_size, Format::Accumulator},
      {&selected_attended_, rows, attention.query_columns(), Format::Activation},
      {&selected_gated_, rows, mamba2.inner(), Format::Activation},
      {&logits_, rows, config_.vocabulary, Format::Accumulator},
  }};
  for (const Buffer& buffer : buffers) {
    if (buffer.columns == 0) continue;
    Result<Matrix> matrix = ops_->allocate(buffer.rows, buffer.columns, buffer.format);
    if (!matrix) return Unexpected(std::move(matrix).error());
    *buffer.matrix = *matrix;
  }
  return {};
}

Matrix Decoder::forward(std::span<const TokenId> tokens, std::span<const SequenceSpan> sequences,
                        std::span<const std::int32_t> selected) {
  const float epsilon = config_.rms_norm_epsilon;
  Pass pass{.sequences = sequences, .selected = selected, .count = static_cast<std::int32_t>(tokens.size())};
  const bool all = static_cast<std::int32_t>(selected.size()) == pass.count && selected.back() == pass.count - 1;
  const Onward onward = selected.empty() ? Onward::Nothing : all ? Onward::All : Onward::Selected;
  pass.residual = residual_.top(pass.count);
  ops_->embed(weights_.embedding, tokens, config_.embedding_multiplier, pass.residual);
  for (std::size_t i = 0; i < weights_.sublayers.size(); ++i) {
    const SublayerWeights& sublayer = weights_.sublayers[i];
    if (i == 0) {
      ops_->rms_norm(pass.residual, sublayer.norm, epsilon, normed_.top(pass.count));
    } else {
      ops_->add_rms_norm(pass.residual, delta_.top(pass.count), config_.residual_multiplier, sublayer.norm, epsilon,
                         normed_.top(pass.count));
    }
    std::visit([&](const auto& part) { run(part, i == last_memory_ ? onward : Onward::All, pass); }, sublayer.part);
    if (i == last_memory_ && onward == Onward::Nothing) return logits_.top(0);
  }
  ops_->add_rms_norm(pass.residual, delta_.top(pass.count), config_.residual_multiplier, weights_.final_norm, epsilon,
                     normed_.top(pass.count));
  ops_->linear(weights_.head, normed_.top(pass.count), logits_.top(pass.count));
  return logits_.top(pass.count);
}

/// What goes on of a mixer's result, and of the residual stream with it.
Matrix Decoder::narrowed(const Matrix& mixed, const Matrix& selected_mixed, Onward onward, Pass& pass) {
  if (onward == Onward::All) return mixed;
  pass.count = static_cast<std::int32_t>(pass.selected.size());
  const Matrix residual = selected_residual_.top(pass.count);
  ops_->gather_rows(pass.residual, pass.selected, residual);
  ops_->gather_rows(mixed, pass.selected, selected_mixed.top(pass.count));
  pass.residual = residual;
  return selected_mixed.top(pass.count);
}

void Decoder::run(const AttentionWeights& weights, Onward onward, Pass& pass) {
  const Matrix query = query_.top(pass.count);
  ops_->linear(weights.qkv, normed_.top(pass.count), qkv_.top(pass.count));
  ops_->rope_and_store(qkv_.top(pass.count), weights.layer, pass.sequences, weights.norm, query);
  if (onward == Onward::Nothing) return;
  const Matrix attended = attended_.top(pass.count);
  ops_->attention(query, weights.layer, pass.sequences, attended);
  const Matrix kept = narrowed(attended, selected_attended_, onward, pass);
  ops_->linear(weights.output, kept, delta_.top(pass.count));
}

void Decoder::run(const RecurrentWeights& weights, Onward onward, Pass& pass) {
  const Matrix projected = projected_.top(pass.count);
  const Matrix convolved = convolved_.top(pass.count);
  const Matrix scanned = scanned_.top(pass.count);
  ops_->linear(weights.input, normed_.top(pass.count), projected);
  ops_->convolve(weights.layer, projected, pass.sequences, convolved);
  ops_->scan(weights.layer, projected, convolved, pass.sequences, scanned);
  if (onward == Onward::Nothing) return;
  const Matrix gated = gated_.top(pass.count);
  ops_->gated_norm(scanned, projected, weights.norm, gated);
  const Matrix kept = narrowed(gated, selected_gated_, onward, pass);
  ops_->linear(weights.output, kept, delta_.top(pass.count));
}

void Decoder::run(const FeedForwardWeights& weights, Onward /*onward*/, Pass& pass) {
  const Matrix activated = activated_.top(pass.count);
  if (config_.feed_forward_kind == FeedForwardKind::ReluSquared) {
    ops_->linear(weights.up, normed_.top(pass.count), raised_.top(pass.count));
    ops_->relu_squared(raised_.top(pass.count), activated);
  } else {
    ops_->linear(weights.up, normed_.top(pass.count), activated);
  }
  ops_->linear(weights.down, activated, delta_.top(pass.count));
}

}  // namespace rubato::engine
