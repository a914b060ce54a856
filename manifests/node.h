// SPDX-License-Identifier: Apache-2.0
// A document as a tree without a schema: what YAML and JSON have in common, with positions. The YAML reader and the control API
// both build it, so that one decoder checks both by one set of rules.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "manifests/field_error.h"

namespace rubato {

struct Member;

struct Node {
  enum class Kind : std::uint8_t {
    Null,         // `null`, `~` or nothing
    Boolean,      // true or false, and no other spelling
    BooleanLike,  // yes, No, ON, True: booleans to some readers of YAML and text to others
    Integer,      // plain decimal digits without leading zeros
    NumberLike,   // any other number: 0256, 0x10, 1e3, 1.5, 1_000, .inf
    String,
    List,
    Map,
    Refused,  // an error about it has been reported; decoding goes on around it
  };

  Kind kind = Kind::Null;
  std::string text{};   // of scalars, as written
  bool quoted = false;  // a String written in quotes; always true for JSON
  Position position{};
  std::vector<Node> items{};      // of a List
  std::vector<Member> members;  // of a Map, in order, keys distinct

  /// The member's value, or null.
  [[nodiscard]] const Node* find(std::string_view key) const;
};

struct Member {
  std::string key;
  Position position;
  Node value;
};

/// As JSON schema calls it: `integer`, `object`, ...
[[nodiscard]] std::string_view type_name(Node::Kind kind);

/// A scalar as written (text in quotes), `a list` or `a mapping`: for error messages.
[[nodiscard]] std::string shown(const Node& node);

/// The kind of a plain (unquoted) YAML scalar other than null.
[[nodiscard]] Node::Kind kind_of_plain(std::string_view text);

/// Nesting that no document of ours comes near; a deeper one is refused before anything recurses into it.
inline constexpr std::int32_t node_depth_max = 32;

/// Subtrees deeper than node_depth_max become Refused, with one error.
[[nodiscard]] Node node_from_json(const nlohmann::ordered_json& json, std::string_view path, FieldErrors& errors);

/// Where `field` (spec.knobs.mode, spec.devices[1]) stands, or its nearest ancestor that is there.
[[nodiscard]] Position position_of(const Node& root, std::string_view field);

}  // namespace rubato
