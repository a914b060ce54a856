// SPDX-License-Identifier: Apache-2.0
// Sublayers from the kinds of layers and a family's names.
#include "engine/model/sublayers.h"

#include <algorithm>

namespace rubato::engine {

void SublayerList::add(std::int32_t layer, SublayerKind kind) {
  const std::string prefix = names_.layers + std::to_string(layer) + ".";
  const char* norm = kind == SublayerKind::FeedForward ? names_.feed_norm : names_.mixer_norm;
  const char* part = kind == SublayerKind::Attention ? names_.attention
                     : kind == SublayerKind::Mamba2  ? names_.mamba2
                                                     : names_.feed_forward;
  sublayers_.push_back({.kind = kind,
                        .index = counts_[static_cast<std::size_t>(kind)]++,
                        .norm = prefix + norm + ".weight",
                        .prefix = prefix + part + "."});
}

std::vector<Sublayer> llama_sublayers(std::int32_t layers) {
  SublayerList list(llama_names);
  for (std::int32_t layer = 0; layer < layers; ++layer) {
    list.add(layer, SublayerKind::Attention);
    list.add(layer, SublayerKind::FeedForward);
  }
  return list.take();
}

std::int32_t ModelConfig::count_of(SublayerKind kind) const {
  return static_cast<std::int32_t>(
      std::count_if(sublayers.begin(), sublayers.end(), [kind](const Sublayer& sublayer) { return sublayer.kind == kind; }));
}

}  // namespace rubato::engine
