// SPDX-License-Identifier: Apache-2.0
// What several families read from config.json in the same way. Each function notes what it refuses in json and reads on, so that
// all complaints come together. Private to engine/model/.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <string>

#include "engine/model/config.h"
#include "engine/model/json_object.h"

namespace rubato::engine {

// ---- one reader for each kind of model: config_llama.cpp, config_mamba2.cpp, config_hybrid.cpp
/// config.architecture is set. Special tokens are read by the caller.
void read_llama_family(JsonObject& json, ModelConfig& config);
void read_mamba2(JsonObject& json, ModelConfig& config);
void read_bamba(JsonObject& json, ModelConfig& config);
void read_granite_hybrid(JsonObject& json, ModelConfig& config);
void read_nemotron_hybrid(JsonObject& json, ModelConfig& config);

// ---- parts
struct AttentionDefaults {
  std::int32_t kv_heads = 0;               // 0: as many as heads
  std::int32_t head_size = 0;              // 0: hidden_size / heads
  const char* head_size_key = "head_dim";  // nemotron_h has had two
};
/// heads, kv_heads and head_size. config.hidden_size has been read.
void read_heads(JsonObject& json, const AttentionDefaults& defaults, ModelConfig& config);

/// theta and scaling; turned is the part of a head that the family turns, which the file may state but not change.
void read_rope(JsonObject& json, double turned, ModelConfig& config);

/// checkpoint_dtype; refuses quantised checkpoints and biases of feed-forward layers.
void read_format(JsonObject& json, ModelConfig& config);

/// Refuses an activation other than those allowed, the first of which is what the family assumes.
void check_activation(JsonObject& json, const char* key, std::initializer_list<const char*> allowed);

/// Keys of the recurrent layers, and what a family assumes without them.
struct Mamba2Keys {
  const char* heads;
  const char* head_size;
  const char* groups;
  const char* state_size;
  const char* window;
  const char* expand;  // null: heads and head size stand for themselves
  const char* convolution_bias;
  const char* projection_bias;
  const char* norm_epsilon;
};
struct Mamba2Defaults {
  std::int32_t groups = 1;
  std::int32_t state_size = 128;
  float norm_epsilon = 1e-5F;
};
/// All of config.mamba2. config.hidden_size has been read.
void read_recurrence(JsonObject& json, const Mamba2Keys& keys, const Mamba2Defaults& defaults, ModelConfig& config);

}  // namespace rubato::engine
