// SPDX-License-Identifier: Apache-2.0
// Engine objects as JSON, for the control API. Reading obeys the same tables and checks as the manifest file; faults come as
// FieldErrors, which status_cause() words as Kubernetes does.
#pragma once

#include <nlohmann/json.hpp>

#include "manifests/decode.h"
#include "manifests/engine_spec.h"

namespace rubato {

/// Complete and canonical: every field with its value, defaults too, in the order of the tables; what is not set is left out.
/// Reads back equal.
[[nodiscard]] nlohmann::ordered_json to_json(const EngineSpec& spec);
[[nodiscard]] nlohmann::ordered_json to_json(const OverrideSpec& pins);
/// Every knob by its YAML name, as in status.settings.
[[nodiscard]] nlohmann::ordered_json to_json(const KnobValues& knobs);
/// apiVersion, kind, metadata (name, labels, annotations) and spec. The API adds what a server adds.
[[nodiscard]] nlohmann::ordered_json to_json(const EngineManifest& manifest);

/// A whole object as posted. status and the metadata that a server writes are ignored, nulls count as left out.
[[nodiscard]] Decoded<EngineManifest> manifest_from_json(const nlohmann::ordered_json& object);

/// A whole spec over the defaults.
[[nodiscard]] Decoded<EngineSpec> spec_from_json(const nlohmann::ordered_json& spec);
[[nodiscard]] Decoded<OverrideSpec> override_from_json(const nlohmann::ordered_json& pins);

}  // namespace rubato
