// SPDX-License-Identifier: Apache-2.0
// YAML text to document trees, strictly: what different readers of YAML take differently is refused with line and column instead
// of guessed (duplicate keys, anchors and aliases, merge keys, tags, keys that are no text). The only place that knows yaml-cpp.
#pragma once

#include <string_view>
#include <vector>

#include "manifests/field_error.h"
#include "manifests/node.h"

namespace rubato {

struct YamlDocument {
  Node root;  // Refused or partly so where there are errors
  FieldErrors errors;
};

struct YamlText {
  std::vector<YamlDocument> documents;  // empty documents (nothing between two `---`) are left out
  FieldErrors errors;                   // the text ends being YAML here; documents before it are complete
};

/// Bounded: documents, nesting, and the number of values; the text's size is the caller's bound. Never throws.
[[nodiscard]] YamlText read_yaml(std::string_view text);

}  // namespace rubato
