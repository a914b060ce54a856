// SPDX-License-Identifier: Apache-2.0
// Typed access to a JSON document that remembers the path to every value, so that each refusal can name it. Used by the tokenizer
// loader alone, which turns BadFile into an Error at its edge.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace rubato::text {

/// Thrown inside the loader only; parse_tokenizer catches it.
struct BadFile {
  std::string message;
};

/// A value and where it stands. Borrowed from the document.
class JsonField {
 public:
  JsonField(const nlohmann::json& value, std::string path) : value_(&value), path_(std::move(path)) {}

  /// The document in bytes; file is its name in messages.
  [[nodiscard]] static nlohmann::json parse(std::string_view bytes, std::string_view file);

  /// Member `key`; absent and null are the same. Fails when this is no object.
  [[nodiscard]] std::optional<JsonField> find(std::string_view key) const;
  [[nodiscard]] JsonField at(std::string_view key) const;

  [[nodiscard]] const std::string& string() const;
  [[nodiscard]] std::int64_t integer(std::int64_t min, std::int64_t max) const;
  [[nodiscard]] bool boolean() const;
  [[nodiscard]] bool boolean_or(std::string_view key, bool fallback) const;  // NOLINT: a JSON boolean
  [[nodiscard]] std::vector<JsonField> items(std::size_t count_max) const;
  [[nodiscard]] const nlohmann::json& object() const;
  [[nodiscard]] bool is_string() const { return value_->is_string(); }
  [[nodiscard]] bool is_array() const { return value_->is_array(); }
  [[nodiscard]] const std::string& path() const { return path_; }

  /// `path: what`
  [[noreturn]] void fail(const std::string& what) const;

 private:
  const nlohmann::json* value_;
  std::string path_;
};

}  // namespace rubato::text
