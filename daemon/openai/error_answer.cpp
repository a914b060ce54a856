// SPDX-License-Identifier: Apache-2.0
// The form of errors on the data port.
#include "daemon/openai/error_answer.h"

#include "daemon/http/status.h"

namespace rubato::openai {
namespace {

const char* type_of(int status) {
  if (status == 401) return "authentication_error";
  if (status == 404) return "not_found_error";
  if (status == 429) return "rate_limit_error";
  return status < 500 ? "invalid_request_error" : "server_error";
}

OrderedJson error_object(int status, const std::string& message, const std::string& param) {
  OrderedJson inner;
  inner["message"] = message;
  inner["type"] = type_of(status);
  inner["param"] = param.empty() ? OrderedJson() : OrderedJson(param);
  inner["code"] = OrderedJson();
  if (status == 401) inner["code"] = "invalid_api_key";
  if (status == 404 && param == "model") inner["code"] = "model_not_found";
  OrderedJson out;
  out["error"] = std::move(inner);
  return out;
}

http::Response response_of(int status, const OrderedJson& body) {
  http::Response response{.status = status, .content_type = "application/json", .body = dump(body), .headers = cors_headers()};
  if (const auto seconds = http::retry_after(status)) {
    response.headers.emplace_back("Retry-After", std::to_string(seconds->count()));
  }
  if (status == 401) response.headers.emplace_back("WWW-Authenticate", "Bearer");
  return response;
}

}  // namespace

OrderedJson error_json(const Error& error) {
  return error_object(http::status_of(error.code), error.message, error.field);
}

http::Response error_response(const Error& error) {
  return response_of(http::status_of(error.code), error_json(error));
}

http::Response error_response(int status, std::string message) {
  return response_of(status, error_object(status, message, {}));
}

std::vector<std::pair<std::string, std::string>> cors_headers() {
  return {{"Access-Control-Allow-Origin", "*"}, {"Access-Control-Expose-Headers", "X-Request-Id, Retry-After"}};
}

}  // namespace rubato::openai
