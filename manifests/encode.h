// SPDX-License-Identifier: Apache-2.0
// Values to JSON by the rules of fields.h: durations and quantities as canonical text, enumerations by name. Private to this
// room; json.cpp and schema.cpp (for defaults) share it.
#pragma once

#include <nlohmann/json.hpp>

#include "manifests/fields.h"

namespace rubato {

template <class Value, class Rule>
[[nodiscard]] nlohmann::ordered_json encode(const Value& value, const Rule& rule);

/// Texts that are empty and optionals without a value are not set, hence left out.
template <class Value>
[[nodiscard]] bool is_unset(const Value& value) {
  if constexpr (std::is_same_v<Value, std::string>) return value.empty();
  if constexpr (!std::is_same_v<typename Unwrap<Value>::Inner, Value>) return !value.has_value();
  return false;
}

template <class Struct, class Table>
[[nodiscard]] nlohmann::ordered_json encode_fields(const Struct& value, const Table& table) {
  nlohmann::ordered_json object = nlohmann::ordered_json::object();
  for_each(table, [&](const auto& line) {
    const auto& member = value.*line.member;
    if (!is_unset(member)) object[std::string(line.name)] = encode(member, line.rule);
  });
  return object;
}

template <class Item>
[[nodiscard]] const Item& item_rule(const ListOf<Item>& rule) {
  return rule.item;
}

template <class Value, class Rule>
nlohmann::ordered_json encode(const Value& value, const Rule& rule) {
  if constexpr (!std::is_same_v<typename Unwrap<Value>::Inner, Value>) {
    return encode(*value, rule);
  } else if constexpr (Nested<Value, Rule>) {
    return encode_fields(value, table_of(std::type_identity<Value>(), rule));
  } else if constexpr (std::is_same_v<Rule, Time>) {
    return format_duration(value);
  } else if constexpr (std::is_same_v<Rule, Bytes>) {
    return format_quantity(value);
  } else if constexpr (std::is_same_v<Rule, OneOf>) {
    return std::string(to_string(value));
  } else if constexpr (requires { item_rule(rule); }) {
    nlohmann::ordered_json list = nlohmann::ordered_json::array();
    for (const auto& item : value) list.push_back(encode(item, item_rule(rule)));
    return list;
  } else {
    return value;
  }
}

}  // namespace rubato
