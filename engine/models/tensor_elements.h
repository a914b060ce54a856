// SPDX-License-Identifier: Apache-2.0
// Reads single elements of a tensor as F32, for loading weights of any checkpoint format.
#pragma once

#include <cstdint>
#include <cstring>

#include "engine/model/number_formats.h"
#include "engine/model/weights.h"

namespace rubato::engine {

[[nodiscard]] inline std::int64_t element_bytes(DataType dtype) { return dtype == DataType::Float32 ? 4 : 2; }

/// Element index of a tensor's bytes, widened: exact. The bytes need not be aligned.
[[nodiscard]] inline float widen_element(const TensorView& view, std::int64_t index) {
  const std::byte* at = view.bytes.data() + index * element_bytes(view.dtype);
  if (view.dtype == DataType::Float32) {
    float value;
    std::memcpy(&value, at, sizeof value);
    return value;
  }
  std::uint16_t bits;
  std::memcpy(&bits, at, sizeof bits);
  return view.dtype == DataType::BFloat16 ? bfloat16_to_float(bits) : float16_to_float(bits);
}

}  // namespace rubato::engine
