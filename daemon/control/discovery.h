// SPDX-License-Identifier: Apache-2.0
// What the control port tells clients that ask which resources it has. Plain discovery on purpose: an aggregated document would
// break kubectl up to 1.29 and save two requests.
#pragma once

#include <nlohmann/json.hpp>
#include <string>

namespace rubato::control {

[[nodiscard]] nlohmann::ordered_json discovery_groups();     // GET /apis
[[nodiscard]] nlohmann::ordered_json discovery_group();      // GET /apis/rubato.dev
[[nodiscard]] nlohmann::ordered_json discovery_resources();  // GET /apis/rubato.dev/v1alpha1
[[nodiscard]] nlohmann::ordered_json core_versions();        // GET /api
[[nodiscard]] nlohmann::ordered_json core_resources();       // GET /api/v1
/// GET /version: what kubectl reads (it picks its own release by the minor) and vLLM's `version` in one object.
[[nodiscard]] nlohmann::ordered_json version_info(const std::string& version);

}  // namespace rubato::control
