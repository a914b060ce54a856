// SPDX-License-Identifier: Apache-2.0
// From a document tree to the Engine structs, by the tables of fields.h and the rules of checks.h. Every fault is reported; the
// value is complete whenever `errors` is empty.
#pragma once

#include "manifests/engine_spec.h"
#include "manifests/field_error.h"
#include "manifests/node.h"

namespace rubato {

inline constexpr std::string_view api_group = "rubato.dev";
inline constexpr std::string_view api_version = "rubato.dev/v1alpha1";
inline constexpr std::string_view engine_kind = "Engine";

template <class T>
struct Decoded {
  T value;
  FieldErrors errors;
  FieldErrors unknown;  // fields that do not exist: an error in a file, up to fieldValidation in the API

  [[nodiscard]] bool ok() const { return errors.empty(); }
};

/// A file holds what a person wrote: an empty value is a slip and an error. An object of the API may hold nulls (absent) and what
/// the server wrote itself (status, metadata.uid, ...), which is ignored.
enum class Source : std::uint8_t { File, Api };

/// A whole object. Positions come from the tree.
[[nodiscard]] Decoded<EngineManifest> decode_manifest(const Node& root, Source source);

/// The fields in `spec` laid over `base`; what is not mentioned keeps base's value. Lists are replaced as a whole.
[[nodiscard]] Decoded<EngineSpec> decode_spec(const Node& spec, const EngineSpec& base, Source source);

/// An override alone, by the ranges of its fields; whether it fits an engine is for check_spec().
[[nodiscard]] Decoded<OverrideSpec> decode_override(const Node& node, Source source);

}  // namespace rubato
