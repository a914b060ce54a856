// SPDX-License-Identifier: Apache-2.0
// JSON in and out, on top of the one decoder and the one encoder.
#include "manifests/json.h"

#include "manifests/encode.h"
#include "manifests/fields.h"
#include "manifests/node.h"

namespace rubato {
namespace {

using Json = nlohmann::ordered_json;

/// Decodes the tree of `json`; faults of the tree itself (nesting) come first.
template <class Decode>
auto decode_json(const Json& json, std::string_view path, Decode decode) {
  FieldErrors tree_errors;
  const Node node = node_from_json(json, path, tree_errors);
  auto decoded = decode(node);
  decoded.errors.insert(decoded.errors.begin(), tree_errors.begin(), tree_errors.end());
  return decoded;
}

}  // namespace

Json to_json(const EngineSpec& spec) {
  return encode_fields(spec, Fields<EngineSpec>::table());
}

Json to_json(const OverrideSpec& pins) {
  return encode_fields(pins, Fields<OverrideSpec>::table());
}

Json to_json(const KnobValues& knobs) {
  Json object = Json::object();
  for_each(knob_table, [&](const auto& knob) { object[std::string(knob.name)] = encode(knobs.*knob.value, knob.rule); });
  return object;
}

Json to_json(const EngineManifest& manifest) {
  Json metadata{{"name", manifest.name}};
  if (!manifest.labels.empty()) metadata["labels"] = manifest.labels;
  if (!manifest.annotations.empty()) metadata["annotations"] = manifest.annotations;
  Json object = Json::object();
  object["apiVersion"] = api_version;
  object["kind"] = engine_kind;
  object["metadata"] = std::move(metadata);
  object["spec"] = to_json(manifest.spec);
  return object;
}

Decoded<EngineManifest> manifest_from_json(const Json& object) {
  return decode_json(object, "", [](const Node& node) { return decode_manifest(node, Source::Api); });
}

Decoded<EngineSpec> spec_from_json(const Json& spec) {
  return decode_json(spec, "spec", [](const Node& node) { return decode_spec(node, EngineSpec(), Source::Api); });
}

Decoded<OverrideSpec> override_from_json(const Json& pins) {
  return decode_json(pins, "spec.override", [](const Node& node) { return decode_override(node, Source::Api); });
}

}  // namespace rubato
