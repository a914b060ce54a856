// SPDX-License-Identifier: Apache-2.0
// One schema per rule, one walk for every table. Defaults are read off default-constructed structs.
#include "manifests/schema.h"

#include "manifests/decode.h"
#include "manifests/encode.h"
#include "manifests/fields.h"

namespace rubato {
namespace {

using Json = nlohmann::ordered_json;

constexpr std::string_view duration_pattern = R"(^(([0-9]+(\.[0-9]*)?|\.[0-9]+)(ns|us|ms|s|m|h))+$)";
constexpr std::string_view quantity_pattern = R"(^([0-9]+(\.[0-9]*)?|\.[0-9]+)([kKMGT]|[KMGT]i)?$)";

template <class Table, class Struct>
Json schema_of_fields(const Table& table, const Struct& defaults, Change inherited);

template <class Value>
Json schema_of(const Whole& rule) {
  return {{"type", "integer"}, {"format", sizeof(Value) == 4 ? "int32" : "int64"}, {"minimum", rule.min}, {"maximum", rule.max}};
}
template <class Value>
Json schema_of(const Bytes&) {
  Json schema = Json::object();
  schema["anyOf"] = Json::array({Json{{"type", "integer"}}, Json{{"type", "string"}}});
  schema["pattern"] = quantity_pattern;
  schema["x-kubernetes-int-or-string"] = true;
  return schema;
}
template <class Value>
Json schema_of(const Time&) {
  return {{"type", "string"}, {"pattern", duration_pattern}, {"maxLength", 64}};
}
template <class Value>
Json schema_of(const Switch&) {
  return {{"type", "boolean"}};
}
template <class Value>
Json schema_of(const Text& rule) {
  return {{"type", "string"}, {"minLength", 1}, {"maxLength", rule.length_max}};
}
template <class Value>
Json schema_of(const OneOf&) {
  Json names = Json::array();
  for (const auto& named : enum_names<Value>) names.push_back(named.name);
  return {{"type", "string"}, {"enum", std::move(names)}};
}
template <class Value, class Item>
Json schema_of(const ListOf<Item>& rule) {
  Json schema = Json::object();
  schema["type"] = "array";
  schema["minItems"] = 1;
  schema["maxItems"] = rule.count_max;
  schema["x-kubernetes-list-type"] = "set";
  schema["items"] = schema_of<typename Value::value_type>(rule.item);
  return schema;
}

/// What a rule allows beyond the reach of a pattern.
std::string range_help(const Time& rule) {
  return std::string(" From ").append(format_duration(rule.min)).append(" to ").append(format_duration(rule.max)).append(".");
}
std::string range_help(const Bytes& rule) {
  return std::string(" From ").append(format_quantity(rule.min)).append(" to ").append(format_quantity(rule.max)).append(".");
}
template <class Rule>
std::string range_help(const Rule&) {
  return {};
}

template <class Value>
std::string value_help() {
  std::string text;
  if constexpr (NamedEnum<Value>) {
    for (const auto& named : enum_names<Value>) text.append(" ").append(named.name).append(": ").append(named.help).append(".");
  }
  return text;
}

template <class Table, class Struct>
Json schema_of_fields(const Table& table, const Struct& defaults, Change inherited) {
  Json properties = Json::object();
  Json required = Json::array();
  for_each(table, [&](const auto& line) {
    using Member = typename std::remove_cvref_t<decltype(line)>::Value;
    using Value = typename Unwrap<Member>::Inner;
    using Rule = std::remove_cvref_t<decltype(line.rule)>;
    const Member& member = defaults.*line.member;
    const Change change = line.change.value_or(inherited);
    Json schema = Json::object();
    schema["description"] = std::string(line.help) + value_help<Value>() + range_help(line.rule) +
                            (change == Change::Restart && inherited == Change::Live ? " A change needs a restart." : "");
    if constexpr (Nested<Value, Rule>) {
      Value inner{};
      if constexpr (std::is_same_v<Value, Member>) inner = member;
      schema.update(schema_of_fields(table_of(std::type_identity<Value>(), line.rule), inner, change));
    } else {
      schema.update(schema_of<Value>(line.rule));
      if (!line.is_required && !is_unset(member)) schema["default"] = encode(member, line.rule);
    }
    if (line.is_required) required.push_back(line.name);
    properties[std::string(line.name)] = std::move(schema);
  });
  Json object = Json::object();
  object["type"] = "object";
  if (!required.empty()) object["required"] = std::move(required);
  object["properties"] = std::move(properties);
  return object;
}

}  // namespace

Json engine_spec_schema() {
  Json schema = Json::object();
  schema["description"] = "What the engine is asked to do.";
  schema.update(schema_of_fields(Fields<EngineSpec>::table(), EngineSpec(), Change::Live));
  return schema;
}

Json engine_schema() {
  Json properties = Json::object();
  properties["apiVersion"] = {{"type", "string"}, {"description", std::string("Always ").append(api_version).append(".")}};
  properties["kind"] = {{"type", "string"}, {"description", std::string("Always ").append(engine_kind).append(".")}};
  properties["metadata"] = {{"type", "object"}};
  properties["spec"] = engine_spec_schema();
  properties["status"] = {{"description", "What the engine reports; never written by people."},
                          {"type", "object"},
                          {"x-kubernetes-preserve-unknown-fields", true}};
  Json schema = Json::object();
  schema["description"] = "One language model served on this node within its latency objectives.";
  schema["type"] = "object";
  schema["required"] = {"apiVersion", "kind", "metadata", "spec"};
  schema["properties"] = std::move(properties);
  return schema;
}

}  // namespace rubato
