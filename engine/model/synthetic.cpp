// SPDX-License-Identifier: Apache-2.0
// Weights from a seed: every element is a hash of (seed, tensor name, index), so that any element can be had without the ones
// before it and two machines agree bit for bit. Real shapes and real work; the text they write means nothing.
#include <cmath>
#include <cstring>
#include <unordered_map>

#include "engine/model/number_formats.h"
#include "engine/model/safetensors_header.h"
#include "engine/model/tensors.h"
#include "engine/model/weights.h"
#include "manifests/check.h"

namespace rubato::engine {
namespace {

std::uint64_t mix64(std::uint64_t x) {
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9U;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBU;
  return x ^ (x >> 31);
}

std::uint64_t tensor_key(std::uint64_t seed, std::string_view name) {
  std::uint64_t key = mix64(seed + 0x9E3779B97F4A7C15U);
  for (const char c : name) key = mix64(key ^ static_cast<unsigned char>(c)) + 0x9E3779B97F4A7C15U;
  return key;
}

/// Uniform in [-1, 1) with 24 bits. 32-bit arithmetic alone, so that compilers turn the loop round it into vectors.
inline float uniform(std::uint32_t index, std::uint32_t key, std::uint32_t salt) {
  std::uint32_t x = (index ^ key) * 0x9E3779B1U;
  x = (x ^ (x >> 16) ^ salt) * 0x85EBCA6BU;
  x = (x ^ (x >> 13)) * 0xC2B2AE35U;
  x ^= x >> 16;
  return static_cast<float>(static_cast<std::int32_t>(x) >> 8) * 0x1p-23F;
}

/// What a tensor's values look like: centre + scale * uniform.
struct Spread {
  float centre = 0;
  float scale = 0;
};

Spread spread_of(const TensorSpec& tensor) {
  const auto is = [&](std::string_view end) { return tensor.name.ends_with(end); };
  if (is("norm.weight") || is("norm_f.weight")) return {.centre = 1, .scale = 0.1F};
  // Recurrences that neither die nor blow up, spread as trained ones begin: A in -1 .. -16 and time steps of 0.001 .. 0.1, both
  // even on a logarithmic scale. softplus of this bias is its exponential to within 5 %.
  if (is(".A_log")) return {.centre = 1.3863F, .scale = 1.3863F};
  if (is(".dt_bias")) return {.centre = -4.58F, .scale = 2.3F};
  if (is(".D")) return {.centre = 1, .scale = 0.1F};
  if (tensor.shape.size() == 1) return {.centre = 0, .scale = 0.1F};  // a bias
  // Variance 1 / fan_in keeps a normalised input at unit variance; a uniform in [-s, s) has variance s^2 / 3.
  return {.centre = 0, .scale = static_cast<float>(std::sqrt(3.0 / static_cast<double>(tensor.shape.back())))};
}

class SyntheticSource final : public WeightSource {
 public:
  SyntheticSource(const ModelConfig& config, std::uint64_t seed, DataType dtype) : seed_(seed), dtype_(dtype) {
    for (TensorSpec& tensor : model_tensors(config)) {
      std::string name = tensor.name;
      tensors_.emplace(std::move(name), std::move(tensor));
    }
  }

  [[nodiscard]] bool has(std::string_view name) const override { return tensors_.contains(std::string(name)); }

  [[nodiscard]] Result<TensorView> load(std::string_view name, std::span<const std::int64_t> expected_shape) override {
    const auto found = tensors_.find(std::string(name));
    if (found == tensors_.end()) {
      return unexpected(ErrorCode::NotFound, "the synthetic model has no tensor " + std::string(name));
    }
    const TensorSpec& tensor = found->second;
    if (!std::equal(tensor.shape.begin(), tensor.shape.end(), expected_shape.begin(), expected_shape.end())) {
      return unexpected(ErrorCode::InvalidArgument, "synthetic tensor " + tensor.name + " has shape " + shape_text(tensor.shape) +
                                                        ", asked for " + shape_text(expected_shape));
    }
    std::size_t count = 1;
    for (const std::int64_t size : tensor.shape) count *= static_cast<std::size_t>(size);
    fill(tensor, count);
    return TensorView{.dtype = dtype_,
                      .shape = tensor.shape,
                      .bytes = std::span(bytes_).first(count * static_cast<std::size_t>(element_size(dtype_)))};
  }

 private:
  void fill(const TensorSpec& tensor, std::size_t count) {
    bytes_.resize(count * static_cast<std::size_t>(element_size(dtype_)));
    const std::uint64_t key = tensor_key(seed_, tensor.name);
    const Spread spread = spread_of(tensor);
    constexpr std::size_t stretch = 1024;
    float values[stretch];
    for (std::size_t begin = 0; begin < count; begin += stretch) {
      const std::size_t size = std::min(stretch, count - begin);
      const auto low = static_cast<std::uint32_t>(begin);
      // The salt takes in the key's upper half and the index beyond 32 bits.
      const auto salt = static_cast<std::uint32_t>(mix64((key >> 32) + (std::uint64_t{begin} >> 32)));
      for (std::size_t i = 0; i < size; ++i) {
        values[i] =
            spread.centre + spread.scale * uniform(low + static_cast<std::uint32_t>(i), static_cast<std::uint32_t>(key), salt);
      }
      store(std::span(values, size), begin);
    }
  }

  void store(std::span<const float> values, std::size_t begin) {
    if (dtype_ == DataType::Float32) {
      std::memcpy(bytes_.data() + begin * sizeof(float), values.data(), values.size_bytes());
      return;
    }
    std::uint16_t halves[1024];
    CHECK(values.size() <= std::size(halves));
    if (dtype_ == DataType::BFloat16) {
      for (std::size_t i = 0; i < values.size(); ++i) halves[i] = float_to_bfloat16(values[i]);
    } else {
      for (std::size_t i = 0; i < values.size(); ++i) halves[i] = float_to_float16(values[i]);
    }
    std::memcpy(bytes_.data() + begin * sizeof(std::uint16_t), halves, values.size() * sizeof(std::uint16_t));
  }

  std::uint64_t seed_;
  DataType dtype_;
  std::unordered_map<std::string, TensorSpec> tensors_;
  std::vector<std::byte> bytes_;
};

}  // namespace

std::unique_ptr<WeightSource> make_synthetic_weights(const ModelConfig& config, std::uint64_t seed, DataType dtype) {
  return std::make_unique<SyntheticSource>(config, seed, dtype);
}

}  // namespace rubato::engine
