// SPDX-License-Identifier: Apache-2.0
// A table of routes: method, path pattern, handler. A new endpoint is one row. Both ports use it; what an error looks like is
// theirs.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "daemon/http/server.h"

namespace rubato::http {

/// What the `{name}` parts of a pattern stood for.
using PathParameters = std::map<std::string, std::string, std::less<>>;
using RouteHandler = std::function<void(Request request, std::shared_ptr<Exchange> exchange, const PathParameters& parameters)>;

struct Route {
  std::string method;   // upper case; GET also answers HEAD
  std::string pattern;  // `/v1/models/{id}`: `{name}` is one segment, `{name...}` at the end the whole non-empty rest
  RouteHandler handler;
};

/// Filled before the server starts, immutable and thread-safe after that. Rows are tried in order; the first whose pattern and
/// method fit wins.
class Router {
 public:
  /// error_response: as the Server's. options_headers: further headers for the answer to OPTIONS (CORS), which otherwise only has
  /// Allow.
  using ErrorResponse = std::function<Response(int status, std::string message)>;
  using OptionsHeaders = std::function<std::vector<std::pair<std::string, std::string>>(const Request& request)>;
  explicit Router(ErrorResponse error_response, OptionsHeaders options_headers = nullptr);

  void add(std::string_view method, std::string_view pattern, RouteHandler handler);

  /// Unknown path: 404; known path, other method: 405 with Allow; OPTIONS without a row of its own: 204 with Allow.
  void handle(Request request, std::shared_ptr<Exchange> exchange) const;

 private:
  ErrorResponse error_response_;
  OptionsHeaders options_headers_;
  std::vector<Route> routes_;
};

}  // namespace rubato::http
