// SPDX-License-Identifier: Apache-2.0
// The list of tensors a model consists of, with Hugging Face's names and shapes. One list for counting, for synthetic weights and
// for whoever wants to check a checkpoint as a whole.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "engine/model/config.h"
#include "manifests/check.h"

namespace rubato::engine {

struct TensorSpec {
  std::string name;                 // model.layers.0.self_attn.q_proj.weight
  std::vector<std::int64_t> shape;  // matrices are (out, in)
};

/// Every tensor that config needs, in the order of execution; lm_head.weight only when the head is not tied.
[[nodiscard]] std::vector<TensorSpec> model_tensors(const ModelConfig& config);

/// Norms, biases and the parameters of a convolution or a recurrence are: they are small and enter sums directly.
[[nodiscard]] bool is_kept_in_float32(const TensorSpec& tensor);

/// Bytes of one element in memory.
[[nodiscard]] inline std::int64_t element_size(DataType dtype) {
  switch (dtype) {
    case DataType::Float32:
      return 4;
    case DataType::BFloat16:
    case DataType::Float16:
      return 2;
  }
  CHECK(false, "dtype=", static_cast<int>(dtype));
  return 0;
}

}  // namespace rubato::engine
