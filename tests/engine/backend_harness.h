// SPDX-License-Identifier: Apache-2.0
// Runs whole models through a Backend in tests: small configurations of every kind, sequences cut into steps, logits by position.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <map>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "engine/backend.h"
#include "engine/model/weights.h"
#include "manifests/check.h"
#include "manifests/settings.h"

namespace rubato::engine {

struct NamedConfig {
  std::string name;
  ModelConfig config;
};

inline ModelConfig small_config(std::int32_t hidden, std::int32_t heads, std::int32_t kv_heads, std::int32_t head_size) {
  ModelConfig config;
  config.architecture = "LlamaForCausalLM";
  config.hidden_size = hidden;
  config.layers = 2;
  config.sublayers = llama_sublayers(config.layers);
  config.heads = heads;
  config.kv_heads = kv_heads;
  config.head_size = head_size;
  config.rotary_size = head_size;
  config.feed_forward = 172;
  config.vocabulary = 151;
  config.max_position = 512;
  config.tied_embeddings = true;
  return config;
}

/// Every optional part and several head shapes.
inline std::vector<NamedConfig> named_configs() {
  std::vector<NamedConfig> all;
  all.push_back({"llama_gqa_head8", small_config(64, 8, 4, 8)});
  all.push_back({"mha_untied_head64", small_config(100, 2, 2, 64)});
  all.back().config.tied_embeddings = false;
  all.push_back({"qwen2_bias_head64", small_config(96, 14, 2, 64)});
  all.back().config.attention_bias = true;
  all.push_back({"llama_all_biases_head8", small_config(48, 6, 1, 8)});
  all.back().config.attention_bias = true;
  all.back().config.attention_output_bias = true;
  all.push_back({"qwen3_qk_norm_head128", small_config(80, 4, 1, 128)});
  all.back().config.qk_norm = true;
  return all;
}

using Logits = std::vector<float>;

struct Sequence {
  std::vector<TokenId> tokens;
  std::vector<BlockId> blocks;
};

/// Sequences of the given lengths over disjoint shuffled blocks of a pool.
inline std::vector<Sequence> draw_sequences(const std::vector<std::int32_t>& lengths, std::int32_t vocabulary,
                                            std::int32_t block_count, std::uint64_t block_seed) {
  std::vector<std::int32_t> order(static_cast<std::size_t>(block_count));
  std::iota(order.begin(), order.end(), 0);
  std::mt19937_64 blocks(block_seed);
  std::shuffle(order.begin(), order.end(), blocks);
  std::vector<Sequence> sequences;
  for (std::size_t i = 0; i < lengths.size(); ++i) {
    std::mt19937_64 tokens(1000 + i);
    Sequence& sequence = sequences.emplace_back();
    for (std::int32_t j = 0; j < lengths[i]; ++j) {
      sequence.tokens.push_back(static_cast<TokenId>(tokens() % static_cast<std::uint64_t>(vocabulary)));
    }
    for (std::int32_t block = 0; block * kv_block_tokens < lengths[i]; ++block) {
      CHECK(!order.empty());
      sequence.blocks.push_back({order.back()});
      order.pop_back();
    }
  }
  return sequences;
}

struct Part {
  std::size_t sequence = 0;
  std::int32_t position = 0;
  std::int32_t count = 0;
};

/// Runs steps and keeps nothing but the backend and its result.
class Runner {
 public:
  Runner(std::unique_ptr<Backend> backend, const std::vector<Sequence>& sequences)
      : backend_(std::move(backend)), sequences_(sequences), sampling_({.temperature = 0.0}, {}, backend_->config().vocabulary) {
    backend_->capture_logits(true);
  }

  /// Logits after the last token of each part, (parts, vocabulary).
  const Logits& step(const std::vector<Part>& parts) {
    rows_.clear();
    for (const Part& part : parts) {
      const Sequence& sequence = sequences_[part.sequence];
      rows_.push_back(
          {.position = part.position,
           .tokens =
               std::span(sequence.tokens).subspan(static_cast<std::size_t>(part.position), static_cast<std::size_t>(part.count)),
           .blocks = sequence.blocks,
           .sampling = &sampling_});
    }
    const Result<void> done = backend_->run(rows_, result_);
    CHECK(done);
    return result_.logits;
  }

  /// All of one sequence in chunks; logits by the position of each chunk's last token.
  std::map<std::int32_t, Logits> chunked(std::size_t sequence, std::int32_t chunk) {
    std::map<std::int32_t, Logits> logits;
    const auto length = static_cast<std::int32_t>(sequences_[sequence].tokens.size());
    for (std::int32_t position = 0; position < length; position += chunk) {
      const std::int32_t count = std::min(chunk, length - position);
      logits[position + count - 1] = step({{sequence, position, count}});
    }
    return logits;
  }

  Backend& backend() { return *backend_; }
  StepResult& result() { return result_; }

 private:
  std::unique_ptr<Backend> backend_;
  std::vector<Sequence> sequences_;
  SamplingState sampling_;
  std::vector<StepRow> rows_;
  StepResult result_;
};

inline bool same_bits(std::span<const float> a, std::span<const float> b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size_bytes()) == 0;
}

}  // namespace rubato::engine
