// SPDX-License-Identifier: Apache-2.0
// What a Llama-family model is: shapes, rope, and which optional parts it has. Read from a Hugging Face config.json or made from
// a SyntheticModel; everything later works from this struct alone.
#pragma once

#include <cstdint>
#include <filesystem>
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

struct ModelConfig {
  std::string architecture;  // LlamaForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM, MistralForCausalLM
  std::int32_t hidden_size = 0;
  std::int32_t layers = 0;
  std::int32_t heads = 0;
  std::int32_t kv_heads = 0;
  std::int32_t head_size = 0;
  std::int32_t feed_forward = 0;
  std::int32_t vocabulary = 0;  // rows of the embedding, padding included
  std::int32_t max_position = 0;
  float rms_norm_epsilon = 1e-5F;
  RopeConfig rope;
  bool tied_embeddings = false;
  bool attention_bias = false;         // q, k, v projections (Qwen2)
  bool attention_output_bias = false;  // o projection as well (Llama's attention_bias)
  bool qk_norm = false;                // RMSNorm per head on q and k (Qwen3)
  DataType checkpoint_dtype = DataType::Float32;
  std::vector<TokenId> end_tokens;  // every declared EOS: config.json and generation_config.json together
  std::optional<TokenId> begin_token;

  [[nodiscard]] std::int64_t kv_bytes_per_token(DataType kv_dtype) const;
  [[nodiscard]] std::int64_t parameter_count() const;
};

/// Reads config.json and, where present, generation_config.json of folder. Errors name the file and the key: a missing or wrongly
/// typed key, a shape that does not divide, an unsupported architecture, rope type, activation or sliding window in use.
[[nodiscard]] Result<ModelConfig> read_model_config(const std::filesystem::path& folder);

/// The configuration of a synthetic model. InvalidArgument names the field under spec.model.synthetic.
[[nodiscard]] Result<ModelConfig> synthetic_model_config(const SyntheticModel& model);

}  // namespace rubato::engine
