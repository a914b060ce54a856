// SPDX-License-Identifier: Apache-2.0
// Typed, bounded access to the JSON files of a model folder.
#include "engine/model/json_object.h"

#include <cmath>
#include <fstream>
#include <sstream>

namespace rubato::engine {
namespace {

std::string number_text(double value) {
  std::ostringstream text;
  text << value;
  return text.str();
}

/// Python writes infinite numbers bare, which is no JSON: they become strings, so that whoever reads a number refuses them by
/// name unless it knows what to do with them.
std::string with_quoted_infinities(const std::string& text) {
  constexpr std::string_view word = "Infinity";
  std::string quoted;
  bool in_string = false;
  for (std::size_t i = 0; i < text.size(); ++i) {
    if (in_string && text[i] == '\\') {
      quoted += text[i++];
      if (i < text.size()) quoted += text[i];
      continue;
    }
    if (text[i] == '"') in_string = !in_string;
    const std::size_t sign = text[i] == '-' ? 1 : 0;
    if (!in_string && text.compare(i + sign, word.size(), word) == 0) {
      quoted.append("\"").append(text, i, sign + word.size()).append("\"");
      i += sign + word.size() - 1;
      continue;
    }
    quoted += text[i];
  }
  return quoted;
}

}  // namespace

Result<std::string> read_text_file(const std::filesystem::path& path, std::int64_t size_max) {
  std::error_code error;
  const auto status = std::filesystem::status(path, error);
  if (!std::filesystem::exists(status)) return unexpected(ErrorCode::NotFound, path.string() + ": no such file");
  if (!std::filesystem::is_regular_file(status))
    return unexpected(ErrorCode::InvalidArgument, path.string() + ": is no regular file");
  std::ifstream file(path, std::ios::binary);
  if (!file) return unexpected(ErrorCode::Internal, path.string() + ": cannot be opened for reading");
  std::string text;
  char buffer[1 << 14];
  while (file.read(buffer, sizeof buffer) || file.gcount() > 0) {
    text.append(buffer, static_cast<std::size_t>(file.gcount()));
    if (static_cast<std::int64_t>(text.size()) > size_max) {
      return unexpected(ErrorCode::InvalidArgument, path.string() + ": is larger than " + std::to_string(size_max) + " bytes");
    }
  }
  if (file.bad()) return unexpected(ErrorCode::Internal, path.string() + ": reading failed");
  return text;
}

Result<nlohmann::json> parse_json_object(const std::string& text, const std::string& place) {
  constexpr int depth_max = 8;
  bool too_deep = false;
  const auto bounded = [&too_deep](int depth, nlohmann::json::parse_event_t event, nlohmann::json&) {
    const bool opens =
        event == nlohmann::json::parse_event_t::object_start || event == nlohmann::json::parse_event_t::array_start;
    if (opens && depth >= depth_max) too_deep = true;
    return !too_deep;
  };
  const bool has_infinity = text.find("Infinity") != std::string::npos;
  nlohmann::json json = nlohmann::json::parse(has_infinity ? with_quoted_infinities(text) : text, bounded, false);
  if (too_deep) {
    return unexpected(ErrorCode::InvalidArgument, place + ": is nested more than " + std::to_string(depth_max) + " levels deep");
  }
  if (json.is_discarded()) return unexpected(ErrorCode::InvalidArgument, place + ": is no valid JSON");
  if (!json.is_object()) return unexpected(ErrorCode::InvalidArgument, place + ": holds no JSON object");
  return json;
}

std::string shown(const nlohmann::json& value) {
  constexpr std::size_t shown_max = 60;
  std::string text = value.dump(-1, ' ', true, nlohmann::json::error_handler_t::replace);
  if (text.size() > shown_max) text = text.substr(0, shown_max) + "...";
  return text;
}

JsonObject::JsonObject(const nlohmann::json& object, std::string place, std::vector<std::string>& errors)
    : object_(object), place_(std::move(place)), errors_(errors) {}

const nlohmann::json* JsonObject::find(const char* key) const {
  const auto found = object_.find(key);
  return found == object_.end() || found->is_null() ? nullptr : &*found;
}

bool JsonObject::is_null(const char* key) const {
  const auto found = object_.find(key);
  return found != object_.end() && found->is_null();
}

bool JsonObject::has(const char* key) const {
  return find(key) != nullptr;
}

void JsonObject::refuse(const char* key, const std::string& what) {
  errors_.push_back(place_ + ": " + key + ": " + what);
}

void JsonObject::missing(const char* key) {
  refuse(key, "is missing");
}

std::optional<std::int32_t> JsonObject::checked_integer(const char* key, const nlohmann::json& value, IntegerRange range) {
  const std::string allowed = std::to_string(range.min) + ".." + std::to_string(range.max);
  if (!value.is_number_integer()) {
    refuse(key, shown(value) + " is no integer; allowed: " + allowed);
    return std::nullopt;
  }
  const bool huge = value.is_number_unsigned() && value.get<std::uint64_t>() > static_cast<std::uint64_t>(INT64_MAX);
  if (huge || value.get<std::int64_t>() < range.min || value.get<std::int64_t>() > range.max) {
    refuse(key, shown(value) + " is outside " + allowed);
    return std::nullopt;
  }
  return static_cast<std::int32_t>(value.get<std::int64_t>());
}

std::int32_t JsonObject::integer(const char* key, IntegerRange range) {
  if (const nlohmann::json* value = find(key)) return checked_integer(key, *value, range).value_or(0);
  missing(key);
  return 0;
}

std::int32_t JsonObject::integer(const char* key, IntegerRange range, std::int32_t fallback) {
  const nlohmann::json* value = find(key);
  return value == nullptr ? fallback : checked_integer(key, *value, range).value_or(fallback);
}

double JsonObject::real(const char* key, RealRange range) {
  if (has(key)) return real(key, range, range.max);
  missing(key);
  return range.max;
}

double JsonObject::real(const char* key, RealRange range, double fallback) {
  const nlohmann::json* value = find(key);
  if (value == nullptr) return fallback;
  if (!value->is_number()) {
    refuse(key, shown(*value) + " is no number");
    return fallback;
  }
  const double number = value->get<double>();
  if (!std::isfinite(number) || number <= range.min || number > range.max) {
    refuse(key, shown(*value) + " is outside (" + number_text(range.min) + ", " + number_text(range.max) + "]");
    return fallback;
  }
  return number;
}

bool JsonObject::boolean(const char* key, bool fallback) {
  const nlohmann::json* value = find(key);
  if (value == nullptr) return fallback;
  if (!value->is_boolean()) {
    refuse(key, shown(*value) + " is neither true nor false");
    return fallback;
  }
  return value->get<bool>();
}

std::string JsonObject::text(const char* key, std::string_view fallback) {
  const nlohmann::json* value = find(key);
  if (value == nullptr) return std::string(fallback);
  if (!value->is_string()) {
    refuse(key, shown(*value) + " is no string");
    return std::string(fallback);
  }
  return value->get<std::string>();
}

std::vector<std::int32_t> JsonObject::ids(const char* key, IntegerRange range) {
  constexpr std::size_t count_max = 256;
  std::vector<std::int32_t> ids;
  const nlohmann::json* value = find(key);
  if (value == nullptr) return ids;
  if (!value->is_array()) {
    if (const auto id = checked_integer(key, *value, range)) ids.push_back(*id);
    return ids;
  }
  if (value->size() > count_max) {
    refuse(key, "holds " + std::to_string(value->size()) + " ids; allowed: at most " + std::to_string(count_max));
    return ids;
  }
  for (const nlohmann::json& element : *value) {
    if (const auto id = checked_integer(key, element, range)) ids.push_back(*id);
  }
  return ids;
}

}  // namespace rubato::engine
