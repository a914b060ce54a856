// SPDX-License-Identifier: Apache-2.0
// The control port's one form of error: `kind: Status` as Kubernetes clients read it, with reason, details and causes. The
// wordings that kubectl shows or parses stand here and nowhere else.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "daemon/http/server.h"
#include "manifests/decode.h"
#include "manifests/field_error.h"

namespace rubato::control {

// api_group, api_version (`rubato.dev/v1alpha1`) and engine_kind are manifests/decode.h's; these are the parts only REST needs.
inline constexpr std::string_view version_name = "v1alpha1";
inline constexpr std::string_view engine_plural = "engines";
inline constexpr std::string_view engine_singular = "engine";

struct StatusError {
  int code = 500;
  std::string reason;
  std::string message;
  std::string name;  // details: left out when empty
  std::string kind;
  std::vector<StatusCause> causes;
  int retry_after_seconds = 0;
};

[[nodiscard]] StatusError not_found(const std::string& name);
[[nodiscard]] StatusError conflict_modified(const std::string& name);
[[nodiscard]] StatusError bad_request(std::string message);
/// The fields at fault, each one cause.
[[nodiscard]] StatusError invalid(const std::string& name, const FieldErrors& errors);
/// Unknown and duplicate fields under fieldValidation=Strict.
[[nodiscard]] StatusError strict_decoding(const FieldErrors& unknown);
[[nodiscard]] StatusError unsupported_patch_type();
[[nodiscard]] StatusError not_acceptable();
[[nodiscard]] StatusError internal_error(std::string message);

/// For errors that only have an HTTP status: from the server (framing, limits) and from the router (404, 405).
[[nodiscard]] StatusError from_http_status(int status, std::string message);

[[nodiscard]] nlohmann::ordered_json to_json(const StatusError& error);
[[nodiscard]] http::Response to_response(const StatusError& error);

/// `unknown field "spec.targets.tttft"`, as in strict errors and in Warning headers.
[[nodiscard]] std::string unknown_field_text(const FieldError& error);

/// A 200 with a JSON body and the headers of every control answer.
[[nodiscard]] http::Response json_response(const nlohmann::ordered_json& body);

}  // namespace rubato::control
