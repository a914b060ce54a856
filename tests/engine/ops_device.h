// SPDX-License-Identifier: Apache-2.0
// Drives any host Ops with F32 data in tests: fills and reads matrices of both formats, and draws seeded data.
#pragma once

#include <cstdint>
#include <cstring>
#include <memory>
#include <ostream>
#include <random>
#include <string>
#include <vector>

#include "engine/cpu/ops.h"
#include "engine/model/number_formats.h"
#include "engine/reference/ops.h"

namespace rubato::engine {

using Values = std::vector<float>;

/// A row-major F32 tensor that a TensorView can show.
struct HostTensor {
  std::vector<std::int64_t> shape;
  Values values;
  [[nodiscard]] TensorView view() const {
    return {.dtype = DataType::Float32, .shape = shape, .bytes = std::as_bytes(std::span(values))};
  }
};

/// Normal values, already rounded to BF16 so that every device starts from equal inputs.
inline Values draw(std::size_t count, std::uint64_t seed, float scale = 1.0F) {
  std::mt19937_64 generator(seed);
  std::normal_distribution<float> normal(0.0F, scale);
  Values values(count);
  for (float& value : values) value = bfloat16_to_float(float_to_bfloat16(normal(generator)));
  return values;
}

inline HostTensor draw_tensor(std::vector<std::int64_t> shape, std::uint64_t seed, float scale = 1.0F) {
  std::size_t count = 1;
  for (const std::int64_t size : shape) count *= static_cast<std::size_t>(size);
  return {.shape = std::move(shape), .values = draw(count, seed, scale)};
}

/// One Ops and how its activations are stored.
struct Device {
  std::unique_ptr<HostOps> ops;
  DataType activation = DataType::Float32;
  float tolerance = 0;  // relative to the scale of a result

  Matrix matrix(std::int32_t rows, std::int32_t columns, Format format) { return ops->allocate(rows, columns, format).value(); }
  Matrix matrix(std::int32_t rows, std::int32_t columns, Format format, const Values& values) {
    Matrix out = matrix(rows, columns, format);
    write(out, values);
    return out;
  }
  void write(const Matrix& matrix, const Values& values) const {
    for (std::int64_t row = 0; row < matrix.rows; ++row) {
      for (std::int64_t column = 0; column < matrix.columns; ++column) {
        const float value = values.at(static_cast<std::size_t>(row * matrix.columns + column));
        const std::int64_t at = row * matrix.stride + column;
        if (narrow(matrix)) {
          static_cast<std::uint16_t*>(matrix.data)[at] = float_to_bfloat16(value);
        } else {
          static_cast<float*>(matrix.data)[at] = value;
        }
      }
    }
  }
  [[nodiscard]] Values read(const Matrix& matrix) const {
    Values values;
    for (std::int64_t row = 0; row < matrix.rows; ++row) {
      for (std::int64_t column = 0; column < matrix.columns; ++column) {
        const std::int64_t at = row * matrix.stride + column;
        values.push_back(narrow(matrix) ? bfloat16_to_float(static_cast<const std::uint16_t*>(matrix.data)[at])
                                        : static_cast<const float*>(matrix.data)[at]);
      }
    }
    return values;
  }
  [[nodiscard]] bool narrow(const Matrix& matrix) const {
    return matrix.format == Format::Activation && activation == DataType::BFloat16;
  }
};

/// A kernel table under test.
struct Variant {
  DataType dtype = DataType::Float32;
  cpu::KernelPath path = cpu::KernelPath::Portable;
};

inline std::string variant_name(const Variant& variant) {
  return std::string(variant.dtype == DataType::BFloat16 ? "Bfloat16" : "Float32") +
         (variant.path == cpu::KernelPath::Bfloat16Dot ? "Dot" : "Portable");
}

inline void PrintTo(const Variant& variant, std::ostream* out) {
  *out << variant_name(variant);
}

/// Every kernel table that this machine can run.
inline std::vector<Variant> variants() {
  std::vector<Variant> all;
  for (const DataType dtype : {DataType::Float32, DataType::BFloat16}) {
    for (const cpu::KernelPath path : cpu::kernel_paths(dtype)) all.push_back({.dtype = dtype, .path = path});
  }
  return all;
}

inline Device cpu_device(const Variant& variant, std::int32_t threads) {
  return {.ops = std::make_unique<cpu::CpuOps>(variant.dtype, variant.path, threads),
          .activation = variant.dtype,
          .tolerance = variant.dtype == DataType::BFloat16 ? 1.0F / 64.0F : 2e-5F};
}

inline Device reference_device(DataType dtype) {
  return {.ops = std::make_unique<ReferenceOps>(dtype), .activation = DataType::Float32, .tolerance = 0};
}

/// Largest |a - b| over largest |b|.
inline float relative_error(const Values& a, const Values& b) {
  float difference = 0;
  float scale = 1e-6F;
  for (std::size_t i = 0; i < b.size(); ++i) {
    if (!(std::abs(a.at(i) - b[i]) <= difference)) difference = std::abs(a[i] - b[i]);  // NaN counts as a difference
    scale = std::max(scale, std::abs(b[i]));
  }
  return difference / scale;
}

inline bool same_bits(const Values& a, const Values& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

}  // namespace rubato::engine
