// SPDX-License-Identifier: Apache-2.0
// The few formulas on single rows that several reference operations are made of.
#pragma once

#include <cmath>
#include <cstdint>

#include "engine/ops.h"

namespace rubato::engine::reference {

inline float* row_of(const Matrix& matrix, std::int64_t row) {
  return static_cast<float*>(matrix.data) + row * matrix.stride;
}

inline float dot(const float* a, const float* b, std::int64_t count) {
  float sum = 0;
  for (std::int64_t i = 0; i < count; ++i) sum += a[i] * b[i];
  return sum;
}

inline float silu(float x) {
  return x / (1.0F + std::exp(-x));
}

}  // namespace rubato::engine::reference
