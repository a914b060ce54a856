// SPDX-License-Identifier: Apache-2.0
// Safetensors headers from an enemy: parsing ends, and whatever it accepts lies within the file.
#include <cstddef>
#include <cstdint>
#include <span>

#include "engine/model/safetensors_header.h"
#include "manifests/check.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const auto tensors = rubato::engine::parse_safetensors(std::as_bytes(std::span(data, size)), "fuzz");
  if (!tensors) {
    CHECK(!tensors.error().message.empty());
    return 0;
  }
  std::int64_t covered = 0;
  for (const rubato::engine::StoredTensor& tensor : *tensors) {
    CHECK(tensor.begin >= rubato::engine::safetensors_length_bytes && tensor.begin <= tensor.end, "begin=", tensor.begin);
    CHECK(tensor.end <= static_cast<std::int64_t>(size), "end=", tensor.end, " size=", size);
    covered += tensor.end - tensor.begin;
  }
  CHECK(covered < static_cast<std::int64_t>(size), "covered=", covered);
  return 0;
}
