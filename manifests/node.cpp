// SPDX-License-Identifier: Apache-2.0
// Classifying scalars, making trees from JSON and finding positions in them.
#include "manifests/node.h"

#include <algorithm>
#include <array>

#include "manifests/check.h"

namespace rubato {
namespace {

using Kind = Node::Kind;
using Json = nlohmann::ordered_json;

bool is_digit(char c) {
  return c >= '0' && c <= '9';
}

bool all(std::string_view text, std::string_view allowed) {
  return !text.empty() && text.find_first_not_of(allowed) == std::string_view::npos;
}

std::string lower(std::string_view text) {
  std::string result(text);
  for (char& c : result) {
    if (c >= 'A' && c <= 'Z') c = static_cast<char>(c - 'A' + 'a');
  }
  return result;
}

bool is_boolean_like(std::string_view text) {
  constexpr std::array<std::string_view, 8> words{"true", "false", "yes", "no", "on", "off", "y", "n"};
  return text.size() <= 5 && std::find(words.begin(), words.end(), lower(text)) != words.end();
}

bool is_integer(std::string_view text) {
  if (text.starts_with('-')) text.remove_prefix(1);
  return all(text, "0123456789") && (text.size() == 1 || text.front() != '0');
}

/// What any YAML 1.1 or 1.2 reader takes for a number.
bool is_number_like(std::string_view text) {
  if (text.starts_with('-') || text.starts_with('+')) text.remove_prefix(1);
  const std::string word = lower(text);
  if (word == ".inf" || word == ".nan" || word == "inf" || word == "nan" || word == "infinity") return true;
  if (word.starts_with("0x")) return all(std::string_view(word).substr(2), "0123456789abcdef_");
  if (word.starts_with("0o")) return all(std::string_view(word).substr(2), "01234567_");
  if (word.starts_with("0b")) return all(std::string_view(word).substr(2), "01_");
  std::string_view mantissa = word;
  if (const std::size_t e = word.find('e'); e != std::string::npos) {
    std::string_view exponent = mantissa.substr(e + 1);
    if (exponent.starts_with('-') || exponent.starts_with('+')) exponent.remove_prefix(1);
    if (!all(exponent, "0123456789")) return false;
    mantissa = mantissa.substr(0, e);
  }
  return all(mantissa, "0123456789_.") && std::count(mantissa.begin(), mantissa.end(), '.') <= 1 &&
         (is_digit(mantissa.front()) || (mantissa.front() == '.' && mantissa.size() > 1));
}

Node convert(const Json& json, const std::string& path, std::int32_t depth, FieldErrors& errors) {
  Node node;
  if (depth > node_depth_max) {
    node.kind = Kind::Refused;
    errors.push_back({.field = path, .rule = "is nested deeper than " + std::to_string(node_depth_max) + " levels"});
    return node;
  }
  switch (json.type()) {
    case Json::value_t::null:
    case Json::value_t::discarded:
    case Json::value_t::binary:
      break;
    case Json::value_t::boolean:
      node.kind = Kind::Boolean;
      node.text = json.get<bool>() ? "true" : "false";
      break;
    case Json::value_t::number_integer:
    case Json::value_t::number_unsigned:
      node.kind = Kind::Integer;
      node.text = json.dump();
      break;
    case Json::value_t::number_float:
      node.kind = Kind::NumberLike;
      node.text = json.dump();
      break;
    case Json::value_t::string:
      node.kind = Kind::String;
      node.text = json.get_ref<const std::string&>();
      node.quoted = true;
      break;
    case Json::value_t::array:
      node.kind = Kind::List;
      for (const Json& item : json) {
        node.items.push_back(convert(item, path + "[" + std::to_string(node.items.size()) + "]", depth + 1, errors));
      }
      break;
    case Json::value_t::object:
      node.kind = Kind::Map;
      for (const auto& [key, value] : json.items()) {
        node.members.push_back({.key = key, .position = {}, .value = convert(value, join_path(path, key), depth + 1, errors)});
      }
      break;
  }
  return node;
}

}  // namespace

const Node* Node::find(std::string_view key) const {
  const auto found = std::find_if(members.begin(), members.end(), [&](const Member& member) { return member.key == key; });
  return found == members.end() ? nullptr : &found->value;
}

std::string_view type_name(Kind kind) {
  switch (kind) {
    case Kind::Null:
      return "null";
    case Kind::Boolean:
      return "boolean";
    case Kind::Integer:
      return "integer";
    case Kind::NumberLike:
      return "number";
    case Kind::BooleanLike:
    case Kind::String:
    case Kind::Refused:
      return "string";
    case Kind::List:
      return "array";
    case Kind::Map:
      return "object";
  }
  CHECK(false, "no such kind: ", static_cast<int>(kind));
}

std::string shown(const Node& node) {
  switch (node.kind) {
    case Kind::Null:
      return "an empty value";
    case Kind::List:
      return "a list";
    case Kind::Map:
      return "a mapping";
    case Kind::String:
      return in_quotes(node.text);
    case Kind::Boolean:
    case Kind::BooleanLike:
    case Kind::Integer:
    case Kind::NumberLike:
    case Kind::Refused: {
      const std::string text = in_quotes(node.text);  // escaped and cut; these are never written in quotes
      return text.substr(1, text.size() - 2);
    }
  }
  CHECK(false, "no such kind: ", static_cast<int>(node.kind));
}

Kind kind_of_plain(std::string_view text) {
  if (text == "true" || text == "false") return Kind::Boolean;
  if (is_boolean_like(text)) return Kind::BooleanLike;
  if (is_integer(text)) return Kind::Integer;
  if (is_number_like(text)) return Kind::NumberLike;
  return Kind::String;
}

Node node_from_json(const Json& json, std::string_view path, FieldErrors& errors) {
  return convert(json, std::string(path), 0, errors);
}

Position position_of(const Node& root, std::string_view field) {
  const Node* node = &root;
  Position position = root.position;
  while (!field.empty()) {
    if (field.front() == '[') {
      std::size_t index = 0;
      std::size_t used = 1;
      while (used < field.size() && is_digit(field[used])) index = index * 10 + static_cast<std::size_t>(field[used++] - '0');
      field.remove_prefix(std::min(used + 1, field.size()));
      if (index >= node->items.size()) return position;
      node = &node->items[index];
    } else {
      if (field.front() == '.') field.remove_prefix(1);
      const std::string_view key = field.substr(0, field.find_first_of(".["));
      if (key.empty()) return position;
      field.remove_prefix(key.size());
      node = node->find(key);
      if (node == nullptr) return position;
    }
    position = node->position;
  }
  return position;
}

}  // namespace rubato
