// SPDX-License-Identifier: Apache-2.0
// ModelConfig of a SyntheticModel: Llama, Mamba2, or a hybrid with Bamba's names.
#include <span>
#include <string>
#include <utility>

#include "engine/model/config.h"
#include "engine/model/config_ranges.h"
#include "engine/model/sublayers.h"
#include "manifests/check.h"

namespace rubato::engine {
namespace {

Unexpected refused(const char* name, const std::string& what) {
  const std::string field = std::string("spec.model.synthetic.") + name;
  return unexpected(ErrorCode::InvalidArgument, field, field + ": " + what);
}

struct Field {
  const char* name;
  std::int32_t value;
  JsonObject::IntegerRange range;
};

Result<void> check_ranges(std::span<const Field> fields) {
  for (const Field& field : fields) {
    if (field.value >= field.range.min && field.value <= field.range.max) continue;
    return refused(field.name, std::to_string(field.value) + " is outside " + std::to_string(field.range.min) + ".." +
                                   std::to_string(field.range.max));
  }
  return {};
}

Result<void> read_common(const SyntheticModel& model, ModelConfig& config) {
  const Field fields[] = {
      {"hiddenSize", model.hidden_size, hidden_range},
      {"layers", model.layers, layers_range},
      {"vocabulary", model.vocabulary, vocabulary_range},
  };
  if (Result<void> checked = check_ranges(fields); !checked) return checked;
  config.hidden_size = model.hidden_size;
  config.layers = model.layers;
  config.vocabulary = model.vocabulary;
  config.max_position = static_cast<std::int32_t>(position_range.max);  // rope knows no limit; capacity sets it
  config.tied_embeddings = model.tied_embeddings;
  return {};
}

Result<void> read_attention(const SyntheticModel& model, ModelConfig& config) {
  const std::int32_t head_size = model.head_size != 0 || model.heads <= 0 ? model.head_size : model.hidden_size / model.heads;
  const Field fields[] = {
      {"heads", model.heads, heads_range},
      {"kvHeads", model.kv_heads, heads_range},
      {"headSize", head_size, head_size_range},
      {"feedForward", model.feed_forward, feed_forward_range},
  };
  if (Result<void> checked = check_ranges(fields); !checked) return checked;
  if (model.heads % model.kv_heads != 0) {
    return refused("kvHeads", std::to_string(model.kv_heads) + " does not divide heads, " + std::to_string(model.heads));
  }
  if (model.head_size == 0 && model.hidden_size % model.heads != 0) {
    return refused("heads", std::to_string(model.heads) + " does not divide hiddenSize, " + std::to_string(model.hidden_size));
  }
  if (head_size % 2 != 0) return refused("headSize", std::to_string(head_size) + " is odd");
  config.heads = model.heads;
  config.kv_heads = model.kv_heads;
  config.head_size = head_size;
  config.rotary_size = head_size;
  config.feed_forward = model.feed_forward;
  return {};
}

Result<void> read_mamba2(const SyntheticModel& model, ModelConfig& config) {
  const Field sizes[] = {
      {"mambaHeadSize", model.mamba_head_size, mamba_head_size_range},
      {"mambaGroups", model.mamba_groups, mamba_heads_range},
      {"stateSize", model.state_size, state_size_range},
      {"convolutionWindow", model.convolution_window, window_range},
  };
  if (Result<void> checked = check_ranges(sizes); !checked) return checked;
  const std::int32_t inner = 2 * model.hidden_size;
  if (model.mamba_heads == 0 && inner % model.mamba_head_size != 0) {
    return refused("mambaHeadSize", std::to_string(model.mamba_head_size) + " does not divide 2 * hiddenSize, " +
                                        std::to_string(inner) + ", and there is no mambaHeads");
  }
  const std::int32_t heads = model.mamba_heads != 0 ? model.mamba_heads : inner / model.mamba_head_size;
  const Field counts[] = {{"mambaHeads", heads, mamba_heads_range}};
  if (Result<void> checked = check_ranges(counts); !checked) return checked;
  if (heads % model.mamba_groups != 0) {
    return refused("mambaGroups",
                   std::to_string(model.mamba_groups) + " does not divide the number of heads, " + std::to_string(heads));
  }
  config.mamba2 = Mamba2Config{.heads = heads,
                               .head_size = model.mamba_head_size,
                               .groups = model.mamba_groups,
                               .state_size = model.state_size,
                               .window = model.convolution_window,
                               .norm_groups = model.mamba_groups};
  return {};
}

Result<void> read_llama(const SyntheticModel& model, ModelConfig& config) {
  config.architecture = "LlamaForCausalLM";
  if (Result<void> read = read_attention(model, config); !read) return read;
  config.sublayers = llama_sublayers(config.layers);
  return {};
}

Result<void> read_mamba2_alone(const SyntheticModel& model, ModelConfig& config) {
  config.architecture = "Mamba2ForCausalLM";
  config.embedding_name = "backbone.embeddings";
  config.final_norm_name = "backbone.norm_f";
  SublayerList list(mamba2_names);
  for (std::int32_t layer = 0; layer < config.layers; ++layer) list.add(layer, SublayerKind::Mamba2);
  config.sublayers = list.take();
  return read_mamba2(model, config);
}

Result<void> read_hybrid(const SyntheticModel& model, ModelConfig& config) {
  config.architecture = "BambaForCausalLM";
  config.final_norm_name = "model.final_layernorm";
  const Field fields[] = {{"attentionEvery", model.attention_every, {.min = 0, .max = layers_range.max}}};
  if (Result<void> checked = check_ranges(fields); !checked) return checked;
  const std::int32_t every = model.attention_every != 0 ? model.attention_every : 4;
  if (every > config.layers || every == 1) {
    return refused("attentionEvery", std::to_string(every) + " leaves no " + (every == 1 ? "recurrent" : "attention") +
                                         " layer among " + std::to_string(config.layers));
  }
  SublayerList list(bamba_names);
  for (std::int32_t layer = 0; layer < config.layers; ++layer) {
    list.add(layer, (layer + 1) % every == 0 ? SublayerKind::Attention : SublayerKind::Mamba2);
    list.add(layer, SublayerKind::FeedForward);
  }
  config.sublayers = list.take();
  if (Result<void> read = read_attention(model, config); !read) return read;
  return read_mamba2(model, config);
}

}  // namespace

Result<ModelConfig> synthetic_model_config(const SyntheticModel& model) {
  ModelConfig config;
  if (Result<void> read = read_common(model, config); !read) return Unexpected(std::move(read).error());
  const auto read = [&]() -> Result<void> {
    switch (model.architecture) {
      case Architecture::Llama:
        return read_llama(model, config);
      case Architecture::Mamba2:
        return read_mamba2_alone(model, config);
      case Architecture::Hybrid:
        return read_hybrid(model, config);
    }
    CHECK(false, "architecture=", static_cast<int>(model.architecture));
    return {};
  };
  if (Result<void> done = read(); !done) return Unexpected(std::move(done).error());
  return config;
}

}  // namespace rubato::engine
