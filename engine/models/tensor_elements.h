// SPDX-License-Identifier: Apache-2.0
// Single elements of a tensor, read as F32 and written from F32, for loading weights of any checkpoint format.
#pragma once

#include <cstdint>
#include <cstring>

#include "engine/model/number_formats.h"
#include "engine/model/tensors.h"
#include "engine/model/weights.h"

namespace rubato::engine {

/// Element index of a tensor's bytes, widened: exact. The bytes need not be aligned.
[[nodiscard]] inline float widen_element(const TensorView& view, std::int64_t index) {
  const std::byte* at = view.bytes.data() + index * element_size(view.dtype);
  if (view.dtype == DataType::Float32) {
    float value;
    std::memcpy(&value, at, sizeof value);
    return value;
  }
  std::uint16_t bits;
  std::memcpy(&bits, at, sizeof bits);
  return view.dtype == DataType::BFloat16 ? bfloat16_to_float(bits) : float16_to_float(bits);
}

/// Rounds value to dtype and writes it; out need not be aligned.
inline void narrow_element(DataType dtype, float value, std::byte* out) {
  if (dtype == DataType::Float32) {
    std::memcpy(out, &value, sizeof value);
    return;
  }
  const std::uint16_t bits = dtype == DataType::BFloat16 ? float_to_bfloat16(value) : float_to_float16(value);
  std::memcpy(out, &bits, sizeof bits);
}

}  // namespace rubato::engine
