// SPDX-License-Identifier: Apache-2.0
// Type and range checks with their messages.
#include "daemon/openai/field_reader.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <utility>

namespace rubato::openai {
namespace {

std::string number_text(double value) {
  std::array<char, 32> text{};
  std::snprintf(text.data(), text.size(), "%g", value);
  return text.data();
}

}  // namespace

std::string shown(const Json& value) {
  if (value.is_structured()) return value.is_array() ? "an array" : "an object";
  std::string text = dump(value);
  if (text.size() > 60) {
    text.resize(60);
    text = dump(Json(text + "..."));  // mends a character cut in two
  }
  return text;
}

FieldReader::FieldReader(const Json& object, std::string path) : object_(object), path_(std::move(path)) {}

std::string FieldReader::path_of(std::string_view name) const {
  std::string out = path_;
  if (!out.empty()) out += '.';
  out += name;
  return out;
}

void FieldReader::fail(std::string_view name, std::string message) {
  if (error_) return;
  const std::string path = path_of(name);
  error_ = Error{.code = ErrorCode::InvalidArgument, .field = path, .message = path + ": " + std::move(message)};
}

void FieldReader::adopt(const std::optional<Error>& error) {
  if (!error_) error_ = error;
}

const Json* FieldReader::find(std::string_view name) {
  known_.emplace(name);
  const auto found = object_.find(name);
  return found == object_.end() || found->is_null() ? nullptr : &*found;
}

std::optional<std::int32_t> FieldReader::integer(std::string_view name, Range<std::int32_t> range) {
  const Json* value = find(name);
  if (value == nullptr) return std::nullopt;
  const auto refuse = [&] {
    fail(name,
         "must be an integer in " + std::to_string(range.min) + ".." + std::to_string(range.max) + ", found " + shown(*value));
    return std::nullopt;
  };
  if (!value->is_number_integer()) return refuse();
  if (value->is_number_unsigned() && value->get<std::uint64_t>() > INT32_MAX) return refuse();
  const auto number = value->get<std::int64_t>();
  if (number < range.min || number > range.max) return refuse();
  return static_cast<std::int32_t>(number);
}

std::optional<double> FieldReader::number(std::string_view name, Range<double> range) {
  const Json* value = find(name);
  if (value == nullptr) return std::nullopt;
  const double number = value->is_number() ? value->get<double>() : NAN;
  if (!(number >= range.min && number <= range.max)) {
    // The smallest positive double as a bound means "above 0".
    const std::string low = range.min > 0 && range.min < 1e-300 ? "above 0, up to " : "in " + number_text(range.min) + "..";
    fail(name, "must be a number " + low + number_text(range.max) + ", found " + shown(*value));
    return std::nullopt;
  }
  return number;
}

std::optional<bool> FieldReader::flag(std::string_view name) {
  const Json* value = find(name);
  if (value == nullptr) return std::nullopt;
  if (!value->is_boolean()) {
    fail(name, "must be true or false, found " + shown(*value));
    return std::nullopt;
  }
  return value->get<bool>();
}

std::optional<std::string> FieldReader::text(std::string_view name) {
  const Json* value = find(name);
  if (value == nullptr) return std::nullopt;
  if (!value->is_string()) {
    fail(name, "must be a string, found " + shown(*value));
    return std::nullopt;
  }
  return value->get<std::string>();
}

void FieldReader::ignore(std::initializer_list<std::string_view> names) {
  for (const std::string_view name : names) known_.emplace(name);
}

void FieldReader::only_neutral(std::string_view name, std::initializer_list<Json> neutral) {
  const Json* value = find(name);
  if (value == nullptr) return;
  for (const Json& one : neutral) {
    if (*value == one) return;
  }
  std::string allowed;
  for (const Json& one : neutral) {
    if (!allowed.empty()) allowed += " or ";
    allowed += dump(one);
  }
  fail(name, "not supported; found " + shown(*value) + (allowed.empty() ? "" : ", allowed: absent or " + allowed));
}

void FieldReader::refuse_unknown() {
  for (const auto& [name, value] : object_.items()) {
    if (!known_.contains(name) && !value.is_null()) return fail(name, "unknown parameter");
  }
}

}  // namespace rubato::openai
