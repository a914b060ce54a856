// SPDX-License-Identifier: Apache-2.0
#include "engine/text/json_field.h"

namespace rubato::text {

nlohmann::json JsonField::parse(std::string_view bytes, std::string_view file) {
  try {
    return nlohmann::json::parse(bytes);
  } catch (const nlohmann::json::exception& error) {
    throw BadFile{std::string(file) + ": not JSON: " + error.what()};
  }
}

void JsonField::fail(const std::string& what) const {
  throw BadFile{path_ + ": " + what};
}

std::optional<JsonField> JsonField::find(std::string_view key) const {
  const nlohmann::json& members = object();
  const auto found = members.find(key);
  if (found == members.end() || found->is_null()) return std::nullopt;
  return JsonField(*found, path_ + (path_.ends_with(' ') ? "" : ".") + std::string(key));
}

JsonField JsonField::at(std::string_view key) const {
  const std::optional<JsonField> found = find(key);
  if (!found) fail("member `" + std::string(key) + "` is missing");
  return *found;
}

const std::string& JsonField::string() const {
  if (!value_->is_string()) fail(std::string("expected a string, found ") + value_->type_name());
  return value_->get_ref<const std::string&>();
}

std::int64_t JsonField::integer(std::int64_t min, std::int64_t max) const {
  if (!value_->is_number_integer()) fail(std::string("expected an integer, found ") + value_->type_name());
  const bool too_large = value_->is_number_unsigned() && value_->get<std::uint64_t>() > static_cast<std::uint64_t>(INT64_MAX);
  if (too_large || value_->get<std::int64_t>() < min || value_->get<std::int64_t>() > max) {
    fail(value_->dump() + " is outside " + std::to_string(min) + ".." + std::to_string(max));
  }
  return value_->get<std::int64_t>();
}

bool JsonField::boolean() const {
  if (!value_->is_boolean()) fail(std::string("expected true or false, found ") + value_->type_name());
  return value_->get<bool>();
}

bool JsonField::boolean_or(std::string_view key, bool fallback) const {
  const std::optional<JsonField> found = find(key);
  return found ? found->boolean() : fallback;
}

std::vector<JsonField> JsonField::items(std::size_t count_max) const {
  if (!value_->is_array()) fail(std::string("expected a list, found ") + value_->type_name());
  if (value_->size() > count_max) {
    fail("has " + std::to_string(value_->size()) + " entries, more than " + std::to_string(count_max));
  }
  std::vector<JsonField> fields;
  fields.reserve(value_->size());
  for (std::size_t index = 0; index < value_->size(); ++index) {
    fields.emplace_back((*value_)[index], path_ + "[" + std::to_string(index) + "]");
  }
  return fields;
}

const nlohmann::json& JsonField::object() const {
  if (!value_->is_object()) fail(std::string("expected an object, found ") + value_->type_name());
  return *value_;
}

}  // namespace rubato::text
