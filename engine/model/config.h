// SPDX-License-Identifier: Apache-2.0
// What a model is: its layers in order, their shapes, rope, and which optional parts they have. Read from a Hugging Face
// config.json or made from a SyntheticModel; everything later works from this struct alone.
#pragma once

#include <cstdint>
#include <filesystem>
#include <limits>
#include <optional>
#include <string>
#include <vector>

#include "engine/tokens.h"
#include "manifests/engine_spec.h"
#include "manifests/result.h"

namespace rubato::engine {

enum class RopeScaling : std::uint8_t { None, Linear, Llama3 };

struct RopeConfig {
  double theta = 10000.0;
  RopeScaling scaling = RopeScaling::None;
  double factor = 1.0;
  double low_frequency_factor = 1.0;          // Llama3 only
  double high_frequency_factor = 4.0;         // Llama3 only
  std::int32_t original_max_position = 8192;  // Llama3 only
};

/// What a sublayer adds to the residual stream: x += residual_multiplier * f(norm(x)).
enum class SublayerKind : std::uint8_t { Attention, Mamba2, FeedForward };

struct Sublayer {
  SublayerKind kind = SublayerKind::Attention;
  std::int32_t index = 0;  // among those of its kind: the layer of its cache or states
  std::string norm;        // the norm's tensor: model.layers.0.input_layernorm.weight
  std::string prefix;      // of its own tensors: model.layers.0.self_attn.
};

enum class FeedForwardKind : std::uint8_t {
  Swiglu,       // gate_proj, up_proj, down_proj
  FusedSwiglu,  // input_linear (gate above up), output_linear
  ReluSquared,  // up_proj, down_proj
};

/// The recurrent layers of a model, which are all alike. See RecurrentShape and GatedNorm in engine/ops.h.
struct Mamba2Config {
  std::int32_t heads = 0;
  std::int32_t head_size = 0;
  std::int32_t groups = 0;
  std::int32_t state_size = 0;
  std::int32_t window = 0;  // of the convolution
  bool convolution_bias = true;
  bool projection_bias = false;  // of in_proj and out_proj
  float time_step_min = 0;
  float time_step_max = std::numeric_limits<float>::infinity();
  bool norm = true;               // false: the gate alone
  bool norm_before_gate = false;  // false: norm(y * silu(gate))
  std::int32_t norm_groups = 1;   // that are normalised each for itself
  float norm_epsilon = 1e-5F;
  [[nodiscard]] std::int32_t inner() const { return heads * head_size; }
  [[nodiscard]] std::int32_t channels() const { return inner() + 2 * groups * state_size; }
  [[nodiscard]] std::int32_t projected() const { return inner() + channels() + heads; }
};

/// An attention and a feed-forward sublayer in each layer, under the names of Llama's checkpoints.
[[nodiscard]] std::vector<Sublayer> llama_sublayers(std::int32_t layers);

struct ModelConfig {
  std::string architecture;  // LlamaForCausalLM, Mamba2ForCausalLM, BambaForCausalLM, ...
  std::int32_t hidden_size = 0;
  std::int32_t layers = 0;            // as its makers count them: one or two sublayers each
  std::vector<Sublayer> sublayers{};  // in order of execution
  std::int32_t heads = 0;             // attention: heads, kv_heads and head_size are 0 without it
  std::int32_t kv_heads = 0;
  std::int32_t head_size = 0;
  std::int32_t feed_forward = 0;  // 0 without such sublayers
  FeedForwardKind feed_forward_kind = FeedForwardKind::Swiglu;
  std::optional<Mamba2Config> mamba2{};  // if and only if some sublayer is one
  std::int32_t vocabulary = 0;           // rows of the embedding, padding included
  std::int32_t max_position = 0;
  float rms_norm_epsilon = 1e-5F;
  RopeConfig rope;
  std::int32_t rotary_size = 0;  // elements of a head that rope turns, the first ones; even; 0: positions are not encoded
  float embedding_multiplier = 1.0F;
  float residual_multiplier = 1.0F;
  float logits_divisor = 1.0F;
  std::optional<float> attention_scale{};  // of the scores; none: 1 / sqrt(head_size)
  std::string embedding_name = "model.embed_tokens";
  std::string final_norm_name = "model.norm";
  bool tied_embeddings = false;
  bool attention_bias = false;         // q, k, v projections (Qwen2)
  bool attention_output_bias = false;  // o projection as well (Llama's attention_bias)
  bool qk_norm = false;                // RMSNorm per head on q and k (Qwen3)
  DataType checkpoint_dtype = DataType::Float32;
  std::vector<TokenId> end_tokens;  // every declared EOS: config.json and generation_config.json together
  std::optional<TokenId> begin_token;

  [[nodiscard]] std::int32_t count_of(SublayerKind kind) const;
  /// Keys and values of all attention sublayers.
  [[nodiscard]] std::int64_t kv_bytes_per_token(DataType kv_dtype) const;
  /// One state of all recurrent sublayers: always F32.
  [[nodiscard]] std::int64_t state_bytes() const;
  [[nodiscard]] std::int64_t parameter_count() const;
};

/// Reads config.json and, where present, generation_config.json of folder. Errors name the file and the key: a missing or wrongly
/// typed key, a shape that does not divide, an unsupported architecture, rope type, activation or sliding window in use.
[[nodiscard]] Result<ModelConfig> read_model_config(const std::filesystem::path& folder);

/// The configuration of a synthetic model. InvalidArgument names the field under spec.model.synthetic.
[[nodiscard]] Result<ModelConfig> synthetic_model_config(const SyntheticModel& model);

}  // namespace rubato::engine
