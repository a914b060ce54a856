// SPDX-License-Identifier: Apache-2.0
#include "engine/cuda/matmul_cache.h"

#include <algorithm>
#include <charconv>
#include <cstring>
#include <fstream>
#include <nlohmann/json.hpp>
#include <optional>
#include <system_error>

#include "manifests/names.h"

namespace rubato::engine::cuda {
namespace {

using nlohmann::json;

std::string to_hex(const cublasLtMatmulAlgo_t& algorithm) {
  std::string text;
  unsigned char bytes[sizeof algorithm];
  std::memcpy(bytes, &algorithm, sizeof algorithm);
  for (const unsigned char byte : bytes) {
    constexpr std::string_view digits = "0123456789abcdef";
    text += digits[byte >> 4U];
    text += digits[byte & 15U];
  }
  return text;
}

std::optional<cublasLtMatmulAlgo_t> from_hex(const std::string& text) {
  cublasLtMatmulAlgo_t algorithm{};
  unsigned char bytes[sizeof algorithm];
  if (text.size() != 2 * sizeof algorithm) return std::nullopt;
  for (std::size_t i = 0; i < sizeof algorithm; ++i) {
    const char* const at = text.data() + 2 * i;
    const auto [end, error] = std::from_chars(at, at + 2, bytes[i], 16);
    if (error != std::errc() || end != at + 2) return std::nullopt;
  }
  std::memcpy(&algorithm, bytes, sizeof algorithm);
  return algorithm;
}

}  // namespace

MatmulCache::MatmulCache(const std::filesystem::path& folder, const DeviceFacts& device, DataType dtype) {
  if (folder.empty()) return;
  key_ = device.name + " " + std::to_string(device.major) + "." + std::to_string(device.minor) + ", " +
         std::to_string(device.multiprocessors) + " multiprocessors, driver " + std::to_string(device.driver_version) +
         ", runtime " + std::to_string(device.runtime_version) + ", cublasLt " + std::to_string(cublasLtGetVersion()) + ", " +
         std::string(to_string(dtype));
  file_ = folder / ("matmul-cuda" + std::to_string(device.index) + ".json");
  load();
}

void MatmulCache::load() {
  std::ifstream stream(file_);
  if (!stream) return;
  try {
    const json document = json::parse(stream);
    if (document.at("key") != key_) return;
    for (const json& row : document.at("products")) {
      Entry entry{.shape = {.outputs = row.at("outputs"),
                            .inputs = row.at("inputs"),
                            .out_dtype = from_string<DataType>(row.at("out").get<std::string>()).value(),
                            .has_bias = row.at("bias")},
                  .max_rows = row.at("maxRows")};
      for (const json& text : row.at("algorithms")) entry.algorithms.push_back(from_hex(text).value());
      if (!entry.algorithms.empty() && entry.algorithms.size() != row_ranges(entry.max_rows).size()) continue;
      entries_.push_back(std::move(entry));
    }
  } catch (const std::exception&) {
    entries_.clear();  // damaged: probe again
  }
}

bool MatmulCache::find(std::int32_t max_rows, MatmulPlan& plan) const {
  const auto entry = std::find_if(entries_.begin(), entries_.end(),
                                  [&](const Entry& other) { return other.shape == plan.shape && other.max_rows == max_rows; });
  if (entry == entries_.end()) return false;
  plan.ranges = row_ranges(max_rows);
  plan.algorithms = entry->algorithms;
  return true;
}

void MatmulCache::add(std::int32_t max_rows, const MatmulPlan& plan) {
  if (file_.empty()) return;
  entries_.push_back({.shape = plan.shape, .max_rows = max_rows, .algorithms = plan.algorithms});
  added_ = true;
}

void MatmulCache::save() const {
  if (!added_) return;
  json products = json::array();
  for (const Entry& entry : entries_) {
    json algorithms = json::array();
    for (const cublasLtMatmulAlgo_t& algorithm : entry.algorithms) algorithms.push_back(to_hex(algorithm));
    products.push_back({{"outputs", entry.shape.outputs},
                        {"inputs", entry.shape.inputs},
                        {"out", to_string(entry.shape.out_dtype)},
                        {"bias", entry.shape.has_bias},
                        {"maxRows", entry.max_rows},
                        {"algorithms", std::move(algorithms)}});
  }
  // Whole or not at all: another start may read it at any time.
  std::filesystem::path written = file_;
  written += ".new";
  {
    std::ofstream stream(written);
    stream << json{{"key", key_}, {"products", std::move(products)}}.dump(1) << '\n';
    if (!stream) return;
  }
  std::error_code ignored;
  std::filesystem::rename(written, file_, ignored);
}

}  // namespace rubato::engine::cuda
