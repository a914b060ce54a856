// SPDX-License-Identifier: Apache-2.0
// The Llama family's decoder (Llama, Mistral, Qwen2, Qwen3), written once over Ops. It owns no memory itself: weights, cache and
// scratch are its Ops'.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "engine/backend.h"
#include "engine/ops.h"

namespace rubato::engine {

/// Not thread-safe; its backend calls it. After make() nothing allocates.
class Decoder {
 public:
  /// Loads every tensor and takes scratch for options' largest step. ops must outlive the model. Errors: a missing or misshapen
  /// tensor (named), memory that cannot be had.
  [[nodiscard]] static Result<Decoder> make(const ModelConfig& config, WeightSource& weights, const BackendOptions& options,
                                            Ops& ops);

  /// The same weights, cache and scratch through another Ops that shares them (a device's second queue).
  [[nodiscard]] Decoder through(Ops& ops) const {
    Decoder model = *this;
    model.ops_ = &ops;
    return model;
  }

  /// The same weights and cache through another Ops over them, with scratch of that Ops' own: both models may be in a pass at
  /// once. options as in make().
  [[nodiscard]] Result<Decoder> beside(const BackendOptions& options, Ops& ops) const;

  /// One forward pass. tokens: all rows of the step one after another; sequences covers them in order; selected: ascending
  /// indices of the tokens whose logits are wanted. Returns (selected, vocabulary) logits, valid until the next pass; with
  /// nothing selected, no rows. A device that reads tokens and indices from its own memory gives zeros of the right counts: all
  /// rows are taken for selected as they stand only where the last index says so.
  Matrix forward(std::span<const TokenId> tokens, std::span<const SequenceSpan> sequences,
                 std::span<const std::int32_t> selected);

 private:
  struct Layer {
    NormId attention_norm;
    LinearId qkv;
    std::optional<QueryKeyNorm> query_key_norm;
    LinearId attention_output;
    NormId feed_forward_norm;
    LinearId gate_up;
    LinearId down;
  };

  Decoder(const ModelConfig& config, Ops& ops) : config_(config), ops_(&ops) {}
  [[nodiscard]] Result<void> load(WeightSource& weights);
  [[nodiscard]] Result<Layer> load_layer(WeightSource& weights, std::int32_t index);
  [[nodiscard]] Result<void> load_attention(WeightSource& weights, std::int32_t index, Layer& layer);
  [[nodiscard]] AttentionShape attention_shape(const BackendOptions& options) const;
  [[nodiscard]] Result<void> make_cache(const BackendOptions& options);
  [[nodiscard]] Result<void> take_scratch(const BackendOptions& options);

  ModelConfig config_;
  Ops* ops_;
  LinearId embedding_;
  LinearId head_;
  NormId final_norm_;
  std::vector<Layer> layers_;

  Matrix residual_;           // Accumulator (tokens, hidden)
  Matrix delta_;              // Accumulator (tokens, hidden): what a sublayer adds
  Matrix normed_;             // Activation  (tokens, hidden)
  Matrix qkv_;                // Accumulator (tokens, q | k | v)
  Matrix query_;              // Activation  (tokens, heads * head)
  Matrix attended_;           // Activation  (tokens, heads * head)
  Matrix gated_;              // Activation  (tokens, feed forward)
  Matrix selected_residual_;  // the last layer's part for tokens whose logits are wanted
  Matrix selected_attended_;
  Matrix logits_;  // Accumulator (rows, vocabulary)
};

}  // namespace rubato::engine
