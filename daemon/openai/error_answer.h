// SPDX-License-Identifier: Apache-2.0
// Errors as OpenAI clients expect them: {"error":{"message","type","param","code"}}, with CORS headers so that browsers may read
// them.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "daemon/http/server.h"
#include "daemon/openai/json_body.h"
#include "manifests/result.h"

namespace rubato::openai {

/// The error object alone, as it also appears in an event of a stream that failed.
[[nodiscard]] OrderedJson error_json(const Error& error);

/// Status by daemon/http/status.h, Retry-After where it has one.
[[nodiscard]] http::Response error_response(const Error& error);

/// For the server's and the router's own errors (404, 405, 408, 413, ...).
[[nodiscard]] http::Response error_response(int status, std::string message);

/// What every answer of the data port carries for browsers.
[[nodiscard]] std::vector<std::pair<std::string, std::string>> cors_headers();

}  // namespace rubato::openai
