// SPDX-License-Identifier: Apache-2.0
// Where a model's tensors come from: memory-mapped safetensors or a seed. A source hands out views; a backend copies or repacks
// them into its own layout and lets go of the source.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "engine/model/config.h"
#include "manifests/result.h"

namespace rubato::engine {

/// Row-major bytes of one tensor, aligned to its element, valid until the next load of its source or the source's end, whichever
/// is first.
struct TensorView {
  DataType dtype = DataType::Float32;
  std::vector<std::int64_t> shape;
  std::span<const std::byte> bytes;
};

/// Names are Hugging Face's (`model.layers.0.self_attn.q_proj.weight`). Two implementations: safetensors and synthetic.
class WeightSource {
 public:
  virtual ~WeightSource() = default;
  [[nodiscard]] virtual bool has(std::string_view name) const = 0;
  /// Error when absent or when its shape differs from the one expected; the message names the tensor, the file and both shapes.
  [[nodiscard]] virtual Result<TensorView> load(std::string_view name, std::span<const std::int64_t> expected_shape) = 0;
  /// What a person should know and a machine need not: stray files, tensors nobody asked for. Fixed once the source is open.
  [[nodiscard]] virtual std::vector<std::string> warnings() const { return {}; }
};

/// Opens model.safetensors, or the shards of model.safetensors.index.json, of folder. Headers and bounds are checked against
/// hostile files before anything is mapped for reading; no path leaves the folder; a missing shard or tensor is an error here,
/// never later.
[[nodiscard]] Result<std::unique_ptr<WeightSource>> open_safetensors(const std::filesystem::path& folder);

/// Compares a whole source with what config needs, before any memory is taken. Error: every tensor that is missing, by name (an
/// untied model without lm_head.weight is one). Value: the source's warnings, and one more when a tied model ships a head that
/// differs from its embedding: the head is not used.
[[nodiscard]] Result<std::vector<std::string>> check_weights(const ModelConfig& config, WeightSource& source);

/// Tensors drawn from seed, name and index: the same on every machine; scaled so that activations stay finite over any depth.
[[nodiscard]] std::unique_ptr<WeightSource> make_synthetic_weights(const ModelConfig& config, std::uint64_t seed, DataType dtype);

}  // namespace rubato::engine
