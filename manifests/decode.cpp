// SPDX-License-Identifier: Apache-2.0
// The decoder: one overload per rule of fields.h, one walk for every table.
#include "manifests/decode.h"

#include <algorithm>
#include <charconv>
#include <concepts>

#include "manifests/checks.h"
#include "manifests/derived_defaults.h"
#include "manifests/fields.h"
#include "manifests/metadata.h"

namespace rubato {
namespace {

using Kind = Node::Kind;

std::string range_text(std::string_view min, std::string_view max) {
  return std::string(min).append("..").append(max);
}

class Decoder {
 public:
  explicit Decoder(Source source) : source_(source) {}

  template <class Struct, class Table>
  void fields(const Node& node, Struct& target, const Table& table, const std::string& path);

  /// metadata of an object: name, labels, annotations.
  void metadata(const Node& node, EngineManifest& manifest, const std::string& path);

  /// False (and an error, unless absent) if there is nothing to decode here.
  bool is_map(const Node& node, const std::string& path) {
    if (node.kind == Kind::Map) return true;
    mismatch(node, path, "object", "must be a mapping of fields");
    return false;
  }
  [[nodiscard]] bool is_absent(const Node& node) const { return node.kind == Kind::Null && source_ == Source::Api; }

  void missing(const Node& parent, const std::string& path) {
    errors.push_back({.fault = Fault::Required, .field = path, .position = parent.position});
  }
  void unknown_field(const Member& member, const std::string& parent, std::vector<std::string> allowed) {
    FieldError error{.fault = Fault::Unknown,
                     .field = join_path(parent, member.key),
                     .suggestion = closest(member.key, allowed),
                     .position = member.position};
    error.choices = std::move(allowed);
    unknown.push_back(std::move(error));
  }
  void mismatch(const Node& node, const std::string& path, std::string_view expected, std::string rule) {
    if (node.kind == Kind::Refused) return;
    errors.push_back({.fault = Fault::TypeInvalid,
                      .field = path,
                      .found = shown(node),
                      .rule = std::move(rule),
                      .found_type = std::string(type_name(node.kind)),
                      .expected_type = std::string(expected),
                      .position = node.position});
  }
  void invalid(const Node& node, const std::string& path, std::string rule) {
    errors.push_back({.field = path, .found = shown(node), .rule = std::move(rule), .position = node.position});
  }

  FieldErrors errors;
  FieldErrors unknown;

 private:
  void value(const Node& node, bool& target, Switch, const std::string& path);
  void value(const Node& node, std::string& target, const Text& rule, const std::string& path);
  void value(const Node& node, Duration& target, const Time& rule, const std::string& path);
  void value(const Node& node, std::int64_t& target, const Bytes& rule, const std::string& path);
  template <std::integral Integer>
  void value(const Node& node, Integer& target, const Whole& rule, const std::string& path);
  template <NamedEnum Enum>
  void value(const Node& node, Enum& target, OneOf, const std::string& path);
  template <class Value, class Item>
  void value(const Node& node, std::vector<Value>& target, const ListOf<Item>& rule, const std::string& path);
  template <class Value, class Rule>
  void value(const Node& node, std::optional<Value>& target, const Rule& rule, const std::string& path);
  template <class Value, class Rule>
  requires Nested<Value, Rule>
  void value(const Node& node, Value& target, const Rule& rule, const std::string& path);

  void entries(const Node& node, std::map<std::string, std::string>& target, const std::string& path);

  Source source_;
};

template <class Struct, class Table>
void Decoder::fields(const Node& node, Struct& target, const Table& table, const std::string& path) {
  std::vector<std::string> names;
  for_each(table, [&](const auto& line) {
    names.emplace_back(line.name);
    const Node* found = node.find(line.name);
    if (found != nullptr && !is_absent(*found)) {
      value(*found, target.*line.member, line.rule, join_path(path, line.name));
    } else if (line.is_required && target.*line.member == typename std::remove_cvref_t<decltype(line)>::Value{}) {
      missing(node, join_path(path, line.name));
    }
  });
  for (const Member& member : node.members) {
    if (std::find(names.begin(), names.end(), member.key) == names.end()) unknown_field(member, path, names);
  }
}

template <class Value, class Rule>
requires Nested<Value, Rule>
void Decoder::value(const Node& node, Value& target, const Rule& rule, const std::string& path) {
  if (is_map(node, path)) fields(node, target, table_of(std::type_identity<Value>(), rule), path);
}

template <class Value, class Rule>
void Decoder::value(const Node& node, std::optional<Value>& target, const Rule& rule, const std::string& path) {
  Value inner = target.value_or(Value{});
  value(node, inner, rule, path);
  target = std::move(inner);
}

void Decoder::value(const Node& node, bool& target, Switch, const std::string& path) {
  if (node.kind == Kind::Boolean) {
    target = node.text == "true";
  } else {
    const bool is_quoted = node.kind == Kind::String && node.quoted;
    mismatch(node, path, "boolean", is_quoted ? "must be true or false, without quotes" : "must be true or false");
  }
}

void Decoder::value(const Node& node, std::string& target, const Text& rule, const std::string& path) {
  if (node.kind != Kind::String) {
    const bool is_scalar = node.kind != Kind::List && node.kind != Kind::Map && node.kind != Kind::Null;
    mismatch(node, path, "string", is_scalar ? "must be text: put it in quotes" : "must be text");
  } else if (node.text.empty()) {
    invalid(node, path, "is empty: leave the field out or give it a value");
  } else if (node.text.size() > rule.length_max) {
    invalid(node, path, "is longer than " + std::to_string(rule.length_max) + " bytes");
  } else if (std::any_of(node.text.begin(), node.text.end(), [](char c) { return static_cast<unsigned char>(c) < 0x20; })) {
    invalid(node, path, "must not hold control characters");
  } else {
    target = node.text;
  }
}

void Decoder::value(const Node& node, Duration& target, const Time& rule, const std::string& path) {
  const Result<Duration> parsed = parse_duration(node.kind == Kind::String ? std::string_view(node.text) : "0");
  if (node.kind != Kind::String) {
    mismatch(node, path, "string",
             node.kind == Kind::Integer || node.kind == Kind::NumberLike ? parsed.error().message
                                                                         : "must be a duration such as 500ms, 1.5s or 1h30m");
  } else if (!parsed) {
    invalid(node, path, parsed.error().message);
  } else if (*parsed < rule.min || *parsed > rule.max) {
    invalid(node, path, "is outside " + range_text(format_duration(rule.min), format_duration(rule.max)));
  } else {
    target = *parsed;
  }
}

void Decoder::value(const Node& node, std::int64_t& target, const Bytes& rule, const std::string& path) {
  if (node.kind != Kind::String && node.kind != Kind::Integer && node.kind != Kind::NumberLike) {
    return mismatch(node, path, "string", "must be a quantity such as 512Mi, 2Gi or 2G");
  }
  const Result<std::int64_t> parsed = parse_quantity(node.text);
  if (!parsed) {
    invalid(node, path, parsed.error().message);
  } else if (*parsed < rule.min || *parsed > rule.max) {
    invalid(node, path, "is outside " + range_text(format_quantity(rule.min), format_quantity(rule.max)));
  } else {
    target = *parsed;
  }
}

template <std::integral Integer>
void Decoder::value(const Node& node, Integer& target, const Whole& rule, const std::string& path) {
  const std::string range = range_text(std::to_string(rule.min), std::to_string(rule.max));
  if (node.kind == Kind::Integer) {
    std::int64_t number = 0;
    const char* end = node.text.data() + node.text.size();
    const auto [rest, fault] = std::from_chars(node.text.data(), end, number);
    if (fault == std::errc() && rest == end && number >= rule.min && number <= rule.max) {
      target = static_cast<Integer>(number);
    } else {
      invalid(node, path, "is outside " + range);
    }
  } else if (node.kind == Kind::NumberLike) {
    mismatch(node, path, "integer",
             "must be a whole number in " + range +
                 " in plain digits (no leading zero, sign, exponent, fraction, underscore or base)");
  } else {
    const bool is_quoted = node.kind == Kind::String && node.quoted;
    mismatch(node, path, "integer", "must be a whole number in " + range + (is_quoted ? ", without quotes" : ""));
  }
}

template <NamedEnum Enum>
void Decoder::value(const Node& node, Enum& target, OneOf, const std::string& path) {
  if (node.kind != Kind::String) return mismatch(node, path, "string", "must be one of " + allowed_names<Enum>());
  if (const std::optional<Enum> named = from_string<Enum>(node.text)) {
    target = *named;
    return;
  }
  FieldError error{.fault = Fault::NotSupported, .field = path, .found = in_quotes(node.text), .position = node.position};
  for (const auto& named : enum_names<Enum>) error.choices.emplace_back(named.name);
  error.suggestion = closest(node.text, error.choices);
  errors.push_back(std::move(error));
}

template <class Value, class Item>
void Decoder::value(const Node& node, std::vector<Value>& target, const ListOf<Item>& rule, const std::string& path) {
  if (node.kind != Kind::List) return mismatch(node, path, "array", "must be a list such as [a, b]");
  if (node.items.empty()) return invalid(node, path, "must not be empty");
  if (node.items.size() > rule.count_max) {
    errors.push_back({.field = path,
                      .found = std::to_string(node.items.size()) + " entries",
                      .rule = "is more than the " + std::to_string(rule.count_max) + " allowed",
                      .position = node.position});
    return;
  }
  std::vector<Value> values;
  for (std::size_t i = 0; i < node.items.size(); ++i) {
    const std::string item_path = path + "[" + std::to_string(i) + "]";
    const std::size_t errors_before = errors.size();
    Value item{};
    value(node.items[i], item, rule.item, item_path);
    if (errors.size() != errors_before) continue;
    if (std::find(values.begin(), values.end(), item) != values.end()) {
      errors.push_back({.fault = Fault::Duplicate,
                        .field = item_path,
                        .found = shown(node.items[i]),
                        .rule = "is in the list twice",
                        .position = node.items[i].position});
    }
    values.push_back(std::move(item));
  }
  target = std::move(values);
}

void Decoder::entries(const Node& node, std::map<std::string, std::string>& target, const std::string& path) {
  constexpr std::size_t entry_count_max = 256;
  if (!is_map(node, path)) return;
  if (node.members.size() > entry_count_max) return invalid(node, path, "must have at most 256 entries");
  for (const Member& member : node.members) {
    if (is_absent(member.value)) continue;
    if (member.value.kind == Kind::String) {
      target[member.key] = member.value.text;
    } else {
      mismatch(member.value, join_path(path, member.key), "string", "must be text: put it in quotes");
    }
  }
}

void Decoder::metadata(const Node& node, EngineManifest& manifest, const std::string& path) {
  if (!is_map(node, path)) return;
  const std::string name_path = join_path(path, "name");
  const Node* name = node.find("name");
  if (name == nullptr || is_absent(*name)) {
    missing(node, name_path);
  } else {
    const std::size_t errors_before = errors.size();
    value(*name, manifest.name, Text{4096}, name_path);
    if (errors.size() == errors_before) check_name(manifest.name, name_path, errors);
  }
  if (const Node* labels = node.find("labels"); labels != nullptr && !is_absent(*labels)) {
    entries(*labels, manifest.labels, join_path(path, "labels"));
    check_labels(manifest.labels, join_path(path, "labels"), errors);
  }
  if (const Node* annotations = node.find("annotations"); annotations != nullptr && !is_absent(*annotations)) {
    entries(*annotations, manifest.annotations, join_path(path, "annotations"));
    check_annotations(manifest.annotations, join_path(path, "annotations"), errors);
  }
  if (source_ == Source::Api) return;
  const std::vector<std::string> names{"name", "labels", "annotations"};
  for (const Member& member : node.members) {
    if (std::find(names.begin(), names.end(), member.key) == names.end()) unknown_field(member, path, names);
  }
}

/// A constant such as apiVersion. False if it is something else, with an error.
bool expect_constant(Decoder& decoder, const Node& root, std::string_view field, std::string_view wanted) {
  const Node* node = root.find(field);
  if (node == nullptr || decoder.is_absent(*node)) {
    decoder.missing(root, std::string(field));
    return false;
  }
  if (node->kind == Kind::String && node->text == wanted) return true;
  if (node->kind != Kind::Refused) {
    decoder.errors.push_back(
        {.fault = Fault::NotSupported,
         .field = std::string(field),
         .found = shown(*node),
         .choices = {std::string(wanted)},
         .suggestion = node->kind == Kind::String ? closest(node->text, std::vector{std::string(wanted)}) : "",
         .position = node->position});
  }
  return false;
}

/// Cross-field rules, without those that rest on a field already found wrong, and with positions.
void add_checks(const EngineSpec& spec, const Node& root, std::string_view spec_path, Decoder& decoder) {
  FieldErrors found = check_spec(spec, decoder.errors);
  for (FieldError& error : found) {
    std::string_view path = error.field;
    if (spec_path.empty()) path = path.size() > 5 ? path.substr(5) : "";  // the tree begins below `spec.`
    error.position = position_of(root, path);
    decoder.errors.push_back(std::move(error));
  }
}

}  // namespace

Decoded<EngineManifest> decode_manifest(const Node& root, Source source) {
  Decoder decoder(source);
  EngineManifest manifest;
  if (!decoder.is_map(root, "")) return {.value = {}, .errors = decoder.errors, .unknown = {}};
  // Of another kind nothing else can be said.
  if (expect_constant(decoder, root, "kind", engine_kind) && expect_constant(decoder, root, "apiVersion", api_version)) {
    const Node* metadata = root.find("metadata");
    const Node* spec = root.find("spec");
    if (metadata == nullptr || decoder.is_absent(*metadata)) {
      decoder.missing(root, "metadata.name");
    } else {
      decoder.metadata(*metadata, manifest, "metadata");
    }
    if (spec == nullptr || decoder.is_absent(*spec)) {
      decoder.missing(root, "spec");
    } else if (decoder.is_map(*spec, "spec")) {
      decoder.fields(*spec, manifest.spec, Fields<EngineSpec>::table(), "spec");
      derive_defaults(*spec, manifest.spec);
      add_checks(manifest.spec, root, "spec", decoder);
    }
    for (const Member& member : root.members) {
      if (member.key == "apiVersion" || member.key == "kind" || member.key == "metadata" || member.key == "spec") continue;
      if (member.key != "status") {
        decoder.unknown_field(member, "", {"apiVersion", "kind", "metadata", "spec"});
      } else if (source == Source::File) {
        decoder.errors.push_back({.fault = Fault::Forbidden,
                                  .field = "status",
                                  .rule = "is written by the engine and may not be set in a manifest",
                                  .position = member.position});
      }
    }
  }
  // Errors of name and labels are found without the tree at hand.
  for (FieldError& error : decoder.errors) {
    if (error.position.line == 0) error.position = position_of(root, error.field);
  }
  return {.value = std::move(manifest), .errors = std::move(decoder.errors), .unknown = std::move(decoder.unknown)};
}

Decoded<EngineSpec> decode_spec(const Node& spec, const EngineSpec& base, Source source) {
  Decoder decoder(source);
  EngineSpec value = base;
  if (decoder.is_map(spec, "spec")) {
    decoder.fields(spec, value, Fields<EngineSpec>::table(), "spec");
    add_checks(value, spec, "", decoder);
  }
  return {.value = std::move(value), .errors = std::move(decoder.errors), .unknown = std::move(decoder.unknown)};
}

Decoded<OverrideSpec> decode_override(const Node& node, Source source) {
  Decoder decoder(source);
  OverrideSpec value;
  if (decoder.is_map(node, "spec.override")) decoder.fields(node, value, Fields<OverrideSpec>::table(), "spec.override");
  return {.value = std::move(value), .errors = std::move(decoder.errors), .unknown = std::move(decoder.unknown)};
}

}  // namespace rubato
