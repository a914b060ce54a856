// SPDX-License-Identifier: Apache-2.0
// Texts follow what a Kubernetes API server answers for a custom resource, because clients show some of them verbatim and match
// others.
#include "daemon/control/status_error.h"

namespace rubato::control {
namespace {

using Json = nlohmann::ordered_json;

std::string qualified(std::string_view kind, const std::string& name) {
  return std::string(kind) + "." + std::string(api_group) + " \"" + name + "\"";
}

}  // namespace

StatusError not_found(const std::string& name) {
  return {.code = 404,
          .reason = "NotFound",
          .message = qualified(engine_plural, name) + " not found",
          .name = name,
          .kind = std::string(engine_plural),
          .causes = {}};
}

StatusError conflict_modified(const std::string& name) {
  return {.code = 409,
          .reason = "Conflict",
          .message = "Operation cannot be fulfilled on " + qualified(engine_plural, name) +
                     ": the object has been modified; please apply your changes to the latest version and try again",
          .name = name,
          .kind = std::string(engine_plural),
          .causes = {}};
}

StatusError bad_request(std::string message) {
  return {.code = 400, .reason = "BadRequest", .message = std::move(message), .name = {}, .kind = {}, .causes = {}};
}

StatusError invalid(const std::string& name, const FieldErrors& errors) {
  StatusError error{
      .code = 422, .reason = "Invalid", .message = {}, .name = name, .kind = std::string(engine_kind), .causes = {}};
  std::string list;
  for (const auto& field : errors) {
    error.causes.push_back(status_cause(field));
    list += (list.empty() ? "" : ", ") + error.causes.back().field + ": " + error.causes.back().message;
  }
  if (errors.size() != 1) list = "[" + list + "]";
  error.message = qualified(engine_kind, name) + " is invalid: " + list;
  return error;
}

std::string unknown_field_text(const FieldError& error) {
  return (error.fault == Fault::Duplicate ? "duplicate field \"" : "unknown field \"") + error.field + "\"";
}

StatusError strict_decoding(const FieldErrors& unknown) {
  std::string list;
  for (const auto& field : unknown) list += (list.empty() ? "" : ", ") + unknown_field_text(field);
  const std::string kind(engine_kind);
  return bad_request(kind + " in version \"" + std::string(version_name) + "\" cannot be handled as a " + kind +
                     ": strict decoding error: " + list);
}

StatusError unsupported_patch_type() {
  return {
      .code = 415,
      .reason = "UnsupportedMediaType",
      .message = "the body of the request was in an unknown format - accepted media types include: application/merge-patch+json",
      .name = {},
      .kind = {},
      .causes = {}};
}

StatusError not_acceptable() {
  return {.code = 406,
          .reason = "NotAcceptable",
          .message = "only the following media types are accepted: application/json",
          .name = {},
          .kind = {},
          .causes = {}};
}

StatusError internal_error(std::string message) {
  return {.code = 500,
          .reason = "InternalError",
          .message = "Internal error occurred: " + std::move(message),
          .name = {},
          .kind = {},
          .causes = {}};
}

StatusError from_http_status(int status, std::string message) {
  StatusError error{
      .code = status, .reason = "InternalError", .message = std::move(message), .name = {}, .kind = {}, .causes = {}};
  switch (status) {
    case 400:
      error.reason = "BadRequest";
      break;
    case 401:
      error.reason = "Unauthorized";
      break;
    case 403:
      error.reason = "Forbidden";
      break;
    case 404:
      error.reason = "NotFound";
      error.message = "the server could not find the requested resource";
      break;
    case 405:
      error.reason = "MethodNotAllowed";
      error.message = "the server does not allow this method on the requested resource";
      break;
    case 406:
      error.reason = "NotAcceptable";
      break;
    case 408:
      error.reason = "Timeout";
      break;
    case 413:
      error.reason = "RequestEntityTooLarge";
      break;
    case 415:
      error.reason = "UnsupportedMediaType";
      break;
    case 429:
      error.reason = "TooManyRequests";
      error.retry_after_seconds = 1;
      break;
    case 431:
      error.reason = "BadRequest";
      break;
    case 503:
      error.reason = "ServiceUnavailable";
      error.retry_after_seconds = 1;
      break;
    case 504:
      error.reason = "Timeout";
      break;
    default:
      break;
  }
  return error;
}

Json to_json(const StatusError& error) {
  Json status{{"kind", "Status"},    {"apiVersion", "v1"},       {"metadata", Json::object()},
              {"status", "Failure"}, {"message", error.message}, {"reason", error.reason}};
  Json details = Json::object();
  if (!error.name.empty()) details["name"] = error.name;
  if (!error.kind.empty()) {
    details["group"] = api_group;
    details["kind"] = error.kind;
  }
  for (const auto& cause : error.causes) {
    details["causes"].push_back({{"reason", cause.reason}, {"message", cause.message}, {"field", cause.field}});
  }
  if (error.retry_after_seconds > 0) details["retryAfterSeconds"] = error.retry_after_seconds;
  if (!details.empty()) status["details"] = std::move(details);
  status["code"] = error.code;
  return status;
}

http::Response json_response(const Json& body) {
  // Bytes that are no UTF-8 can come in with a name or a label; they are replaced, never a reason to throw.
  return {.status = 200,
          .content_type = "application/json",
          .body = body.dump(-1, ' ', false, Json::error_handler_t::replace) + "\n",
          .headers = {{"Cache-Control", "no-cache, private"}}};
}

http::Response to_response(const StatusError& error) {
  http::Response response = json_response(to_json(error));
  response.status = error.code;
  if (error.retry_after_seconds > 0) response.headers.emplace_back("Retry-After", std::to_string(error.retry_after_seconds));
  return response;
}

}  // namespace rubato::control
