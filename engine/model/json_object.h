// SPDX-License-Identifier: Apache-2.0
// Reads typed, bounded values out of a JSON file of a model folder and collects every complaint with the file's name and the key.
// Private to engine/model/.
#pragma once

#include <cstdint>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "manifests/result.h"

namespace rubato::engine {

/// The whole file as text. Refused: absent, no regular file, larger than size_max bytes.
[[nodiscard]] Result<std::string> read_text_file(const std::filesystem::path& path, std::int64_t size_max);

/// Parses text as one JSON object nested at most a few levels; place stands before errors. Memory stays in proportion to text.
/// Python's bare Infinity is read as the string "Infinity".
[[nodiscard]] Result<nlohmann::json> parse_json_object(const std::string& text, const std::string& place);

/// One JSON object. Getters return the fallback (or zero) after noting an error; ask errors() once at the end.
class JsonObject {
 public:
  /// place: how errors call it, `config.json` or `config.json: rope_scaling`. errors is shared with nested objects.
  JsonObject(const nlohmann::json& object, std::string place, std::vector<std::string>& errors);

  struct IntegerRange {
    std::int64_t min = 0;
    std::int64_t max = 0;
  };
  struct RealRange {
    double min = 0;  // exclusive
    double max = 0;  // inclusive
  };

  /// Absent and null both count as not there.
  [[nodiscard]] bool has(const char* key) const;
  [[nodiscard]] bool is_null(const char* key) const;                // there, and null
  [[nodiscard]] const nlohmann::json* find(const char* key) const;  // null when not there

  [[nodiscard]] std::int32_t integer(const char* key, IntegerRange range);  // must be there
  [[nodiscard]] std::int32_t integer(const char* key, IntegerRange range, std::int32_t fallback);
  [[nodiscard]] double real(const char* key, RealRange range);  // must be there
  [[nodiscard]] double real(const char* key, RealRange range, double fallback);
  [[nodiscard]] bool boolean(const char* key, bool fallback);
  [[nodiscard]] std::string text(const char* key, std::string_view fallback);
  /// One id, a list of ids, or nothing.
  [[nodiscard]] std::vector<std::int32_t> ids(const char* key, IntegerRange range);
  /// Notes an error about key.
  void refuse(const char* key, const std::string& what);
  [[nodiscard]] const std::string& place() const { return place_; }
  [[nodiscard]] std::vector<std::string>& errors() { return errors_; }

 private:
  [[nodiscard]] std::optional<std::int32_t> checked_integer(const char* key, const nlohmann::json& value, IntegerRange range);
  void missing(const char* key);

  const nlohmann::json& object_;
  std::string place_;
  std::vector<std::string>& errors_;
};

/// A value as errors show it: JSON text, cut when long.
[[nodiscard]] std::string shown(const nlohmann::json& value);

}  // namespace rubato::engine
