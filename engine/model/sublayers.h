// SPDX-License-Identifier: Apache-2.0
// What layers are called in each family's checkpoints, and the list of sublayers that follows. Private to engine/model/.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "engine/model/config.h"

namespace rubato::engine {

/// Names within a layer of one or two sublayers: a mixer, which is attention or Mamba2, and a feed-forward.
struct LayerNames {
  const char* layers;        // before the layer's number: model.layers.
  const char* mixer_norm;    // input_layernorm
  const char* attention;     // self_attn
  const char* mamba2;        // mamba
  const char* feed_norm;     // post_attention_layernorm
  const char* feed_forward;  // mlp
};

constexpr LayerNames llama_names{.layers = "model.layers.",
                                 .mixer_norm = "input_layernorm",
                                 .attention = "self_attn",
                                 .mamba2 = "",
                                 .feed_norm = "post_attention_layernorm",
                                 .feed_forward = "mlp"};
constexpr LayerNames mamba2_names{
    .layers = "backbone.layers.", .mixer_norm = "norm", .attention = "", .mamba2 = "mixer", .feed_norm = "", .feed_forward = ""};
constexpr LayerNames bamba_names{.layers = "model.layers.",
                                 .mixer_norm = "input_layernorm",
                                 .attention = "self_attn",
                                 .mamba2 = "mamba",
                                 .feed_norm = "pre_ff_layernorm",
                                 .feed_forward = "feed_forward"};
constexpr LayerNames granite_names{.layers = "model.layers.",
                                   .mixer_norm = "input_layernorm",
                                   .attention = "self_attn",
                                   .mamba2 = "mamba",
                                   .feed_norm = "post_attention_layernorm",
                                   .feed_forward = "shared_mlp"};
/// One sublayer of any kind in each layer.
constexpr LayerNames nemotron_names{.layers = "backbone.layers.",
                                    .mixer_norm = "norm",
                                    .attention = "mixer",
                                    .mamba2 = "mixer",
                                    .feed_norm = "norm",
                                    .feed_forward = "mixer"};

/// Appends sublayers in order of execution and numbers those of each kind.
class SublayerList {
 public:
  explicit SublayerList(const LayerNames& names) : names_(names) {}
  void add(std::int32_t layer, SublayerKind kind);
  [[nodiscard]] std::vector<Sublayer> take() { return std::move(sublayers_); }

 private:
  LayerNames names_;
  std::int32_t counts_[3]{};
  std::vector<Sublayer> sublayers_;
};

}  // namespace rubato::engine
