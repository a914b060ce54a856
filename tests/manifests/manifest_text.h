// SPDX-License-Identifier: Apache-2.0
// Small manifests for tests and one-line views of what reading them gave.
#pragma once

#include <string>
#include <string_view>

#include "manifests/read_manifest.h"

namespace rubato {

/// A good manifest; `spec` is added below spec.model, in block style with two spaces of indent.
inline std::string manifest_with(std::string_view spec) {
  return "apiVersion: rubato.dev/v1alpha1\nkind: Engine\nmetadata: {name: chat}\nspec:\n  model: {path: /models/llama}\n" +
         std::string(spec) + "\n";
}

/// Line of manifest_with()'s addition.
inline constexpr int added_line = 6;

/// The errors, or `good`.
inline std::string errors_of(std::string_view text) {
  const auto result = parse_manifest(text, "chat.yaml");
  return result ? "good" : result.failure().text();
}

}  // namespace rubato
