// SPDX-License-Identifier: Apache-2.0
// Matching of request paths against the route table.
#include "daemon/http/router.h"

#include <algorithm>
#include <optional>
#include <set>

namespace rubato::http {
namespace {

std::string_view take_segment(std::string_view& rest) {
  rest.remove_prefix(1);  // the slash
  const std::string_view segment = rest.substr(0, rest.find('/'));
  rest.remove_prefix(segment.size());
  return segment;
}

std::optional<PathParameters> match(std::string_view pattern, std::string_view path) {
  PathParameters parameters;
  while (!pattern.empty() && !path.empty() && path.front() == '/') {
    const std::string_view wanted = take_segment(pattern);
    const bool is_parameter = wanted.size() > 2 && wanted.front() == '{' && wanted.back() == '}';
    if (is_parameter && wanted.ends_with("...}")) {
      const std::string_view rest = path.substr(1);
      if (rest.empty()) return std::nullopt;
      parameters.emplace(wanted.substr(1, wanted.size() - 5), rest);
      return parameters;
    }
    const std::string_view found = take_segment(path);
    if (is_parameter) {
      if (found.empty()) return std::nullopt;
      parameters.emplace(wanted.substr(1, wanted.size() - 2), found);
    } else if (wanted != found) {
      return std::nullopt;
    }
  }
  if (!pattern.empty() || !path.empty()) return std::nullopt;
  return parameters;
}

std::string join(const std::set<std::string>& words) {
  std::string out;
  for (const std::string& word : words) out += (out.empty() ? "" : ", ") + word;
  return out;
}

}  // namespace

Router::Router(ErrorResponse error_response, OptionsHeaders options_headers)
    : error_response_(std::move(error_response)), options_headers_(std::move(options_headers)) {}

void Router::add(std::string_view method, std::string_view pattern, RouteHandler handler) {
  CHECK(pattern.starts_with('/') && handler, pattern);
  routes_.push_back({.method = std::string(method), .pattern = std::string(pattern), .handler = std::move(handler)});
}

void Router::handle(Request request, std::shared_ptr<Exchange> exchange) const {
  std::set<std::string> allowed;
  for (const Route& route : routes_) {
    const auto parameters = match(route.pattern, request.path);
    if (!parameters && !(request.path == "*" && request.method == "OPTIONS")) continue;
    if (parameters && (route.method == request.method || (route.method == "GET" && request.method == "HEAD"))) {
      route.handler(std::move(request), std::move(exchange), *parameters);
      return;
    }
    allowed.insert(route.method);
    if (route.method == "GET") allowed.insert("HEAD");
  }
  if (allowed.empty()) {
    exchange->respond(error_response_(404, "no such path: " + request.method + " " + request.path));
    return;
  }
  allowed.insert("OPTIONS");
  if (request.method == "OPTIONS") {
    Response response{.status = 204, .content_type = {}, .body = {}, .headers = {}};
    if (options_headers_) response.headers = options_headers_(request);
    response.headers.emplace_back("Allow", join(allowed));
    exchange->respond(std::move(response));
    return;
  }
  Response response =
      error_response_(405, request.method + " is not allowed for " + request.path + "; allowed: " + join(allowed));
  response.headers.emplace_back("Allow", join(allowed));
  exchange->respond(std::move(response));
}

}  // namespace rubato::http
