// SPDX-License-Identifier: Apache-2.0
// A decoder of attention, recurrent and feed-forward sublayers in any order, written once over Ops: Llama's family, Mamba2 and
// hybrids of both. It owns no memory itself: weights, cache, states and scratch are its Ops'.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <variant>
#include <vector>

#include "engine/backend.h"
#include "engine/ops.h"

namespace rubato::engine {

/// The weights of one sublayer of each kind.
struct AttentionWeights {
  std::int32_t layer = 0;  // of the cache
  LinearId qkv;
  std::optional<QueryKeyNorm> norm;
  LinearId output;
};
struct RecurrentWeights {
  LinearId input;
  RecurrentId layer;
  GatedNorm norm;
  LinearId output;
};
struct FeedForwardWeights {
  LinearId up;  // gate above up, where there is a gate
  LinearId down;
};

struct SublayerWeights {
  NormId norm;
  std::variant<AttentionWeights, RecurrentWeights, FeedForwardWeights> part;
};

struct DecoderWeights {
  LinearId embedding;
  std::vector<SublayerWeights> sublayers;
  NormId final_norm;
  LinearId head;
};

/// Loads every tensor that config needs, in the layout that the forward pass works on. ops has its cache and states already.
/// Errors: a missing or misshapen tensor (named), memory that cannot be had.
[[nodiscard]] Result<DecoderWeights> load_decoder(const ModelConfig& config, WeightSource& weights, Ops& ops);

/// Not thread-safe; its backend calls it. After make() nothing allocates.
class Decoder {
 public:
  /// Loads every tensor and takes scratch for options' largest step. ops must outlive the model. Errors: those of load_decoder.
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
  /// nothing selected, no rows, and cache and states are written all the same. A device that reads tokens and indices from its
  /// own memory gives zeros of the right counts: all rows are taken for selected as they stand only where the last index says so.
  Matrix forward(std::span<const TokenId> tokens, std::span<const SequenceSpan> sequences,
                 std::span<const std::int32_t> selected);

 private:
  /// What one pass hands from sublayer to sublayer.
  struct Pass {
    std::span<const SequenceSpan> sequences;
    std::span<const std::int32_t> selected;
    std::int32_t count = 0;  // rows that go on
    Matrix residual{};
  };
  /// Whether a sublayer's result is wanted; its cache or state always is.
  enum class Onward : std::uint8_t { All, Selected, Nothing };

  Decoder(const ModelConfig& config, Ops& ops);
  [[nodiscard]] Result<void> make_cache(const BackendOptions& options);
  [[nodiscard]] Result<void> make_states(const BackendOptions& options);
  [[nodiscard]] Result<void> take_scratch(const BackendOptions& options);
  void run(const AttentionWeights& weights, Onward onward, Pass& pass);
  void run(const RecurrentWeights& weights, Onward onward, Pass& pass);
  void run(const FeedForwardWeights& weights, Onward onward, Pass& pass);
  [[nodiscard]] Matrix narrowed(const Matrix& mixed, const Matrix& selected_mixed, Onward onward, Pass& pass);

  ModelConfig config_;
  Ops* ops_;
  std::size_t last_memory_ = 0;  // the last sublayer with cache or state: past it only the selected tokens matter
  DecoderWeights weights_;

  Matrix residual_;           // Accumulator (tokens, hidden)
  Matrix delta_;              // Accumulator (tokens, hidden): what a sublayer adds
  Matrix normed_;             // Activation  (tokens, hidden)
  Matrix selected_residual_;  // of tokens whose logits are wanted
  Matrix logits_;             // Accumulator (rows, vocabulary)
  // Of attention.
  Matrix qkv_;                // Accumulator (tokens, q | k | v)
  Matrix query_;              // Activation  (tokens, heads * head)
  Matrix attended_;           // Activation  (tokens, heads * head)
  Matrix selected_attended_;  // Activation  (rows, heads * head)
  // Of recurrent sublayers.
  Matrix projected_;       // Accumulator (tokens, gate | x | B | C | time step)
  Matrix convolved_;       // Accumulator (tokens, x | B | C)
  Matrix scanned_;         // Accumulator (tokens, inner)
  Matrix gated_;           // Activation  (tokens, inner)
  Matrix selected_gated_;  // Activation  (rows, inner)
  // Of feed-forward sublayers.
  Matrix raised_;     // Accumulator (tokens, feed forward), where an activation is an operation of its own
  Matrix activated_;  // Activation  (tokens, feed forward)
};

}  // namespace rubato::engine
