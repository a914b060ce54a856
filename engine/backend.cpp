// SPDX-License-Identifier: Apache-2.0
// Sizes that start-up, admission and status must agree on.
#include "engine/backend.h"

#include <algorithm>
#include <limits>

#include "engine/model/tensors.h"
#include "manifests/settings.h"

namespace rubato::engine {

std::int32_t kv_block_count(const ModelConfig& config, DataType dtype, std::int64_t kv_cache_bytes) {
  const std::int64_t block_bytes = config.kv_bytes_per_token(dtype) * kv_block_tokens;
  if (block_bytes <= 0 || kv_cache_bytes <= 0) return 0;
  return static_cast<std::int32_t>(
      std::min<std::int64_t>(kv_cache_bytes / block_bytes, std::numeric_limits<std::int32_t>::max()));
}

std::int64_t weight_bytes(const ModelConfig& config, DataType dtype) {
  std::int64_t bytes = 0;
  for (const TensorSpec& tensor : model_tensors(config)) {
    std::int64_t elements = 1;
    for (const std::int64_t size : tensor.shape) elements *= size;
    // Norms and biases are kept in F32 on every backend: they are small and enter sums directly.
    bytes += elements * (tensor.shape.size() == 1 ? element_size(DataType::Float32) : element_size(dtype));
  }
  return bytes;
}

}  // namespace rubato::engine
