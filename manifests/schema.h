// SPDX-License-Identifier: Apache-2.0
// The Engine kind as an OpenAPI v3 schema, written from the tables of fields.h: for the API's /openapi/v3, for the CRD and for
// editors. It is structural in the sense of Kubernetes: no $ref, one type everywhere, unknown fields not allowed.
#pragma once

#include <nlohmann/json.hpp>

namespace rubato {

/// The whole object: apiVersion, kind, metadata, spec, status.
[[nodiscard]] nlohmann::ordered_json engine_schema();

/// spec alone.
[[nodiscard]] nlohmann::ordered_json engine_spec_schema();

}  // namespace rubato
