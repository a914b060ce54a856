// SPDX-License-Identifier: Apache-2.0
// The header of a safetensors file: 8 bytes of length, then JSON that names every tensor with its type, shape and place. Reads
// bytes that an enemy may have written; nothing leaves here unchecked. Private to engine/model/ and its tests.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "manifests/engine_spec.h"
#include "manifests/result.h"

namespace rubato::engine {

/// An element type of the format. dtype is empty for those the engine does not read: their place is checked, loading them is
/// refused.
struct StoredType {
  std::string_view name;
  std::int32_t bits = 0;
  std::optional<DataType> dtype;
};

struct StoredTensor {
  std::string name;
  const StoredType* type = nullptr;  // points into a constant table
  std::vector<std::int64_t> shape;
  std::int64_t begin = 0;  // from the file's start
  std::int64_t end = 0;
};

constexpr std::int64_t safetensors_length_bytes = 8;
constexpr std::int64_t safetensors_header_max = 100'000'000;  // the format's own limit

/// The header's length, from the first 8 bytes of a file of file_size bytes.
[[nodiscard]] Result<std::int64_t> parse_safetensors_length(std::span<const std::byte> first, std::int64_t file_size,
                                                            const std::string& place);

/// The tensors of a file of file_size bytes whose header is json. Holds afterwards: names differ, every tensor's bytes match its
/// type and shape, and together they cover the file from the header to its end without gap or overlap. place stands before every
/// error.
[[nodiscard]] Result<std::vector<StoredTensor>> parse_safetensors_header(std::string_view json, std::int64_t file_size,
                                                                         const std::string& place);

/// Both of the above for a file held in memory.
[[nodiscard]] Result<std::vector<StoredTensor>> parse_safetensors(std::span<const std::byte> file, const std::string& place);

/// `(32, 64)`
[[nodiscard]] std::string shape_text(std::span<const std::int64_t> shape);

}  // namespace rubato::engine
