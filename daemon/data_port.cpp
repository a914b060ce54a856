// SPDX-License-Identifier: Apache-2.0
#include "daemon/data_port.h"

#include <utility>

#include "daemon/control/control_api.h"
#include "daemon/lane_threads.h"
#include "daemon/openai/error_answer.h"

namespace rubato {

DataPort::DataPort(Metrics& metrics, std::function<bool()> can_serve)
    : metrics_(metrics), can_serve_(std::move(can_serve)), routes_(make_routes(nullptr)) {}

DataPort::Routes DataPort::make_routes(std::shared_ptr<openai::OpenAiApi> api) const {
  using ExchangePtr = std::shared_ptr<http::Exchange>;
  Routes routes{
      .api = std::move(api),
      .router = http::Router([](int status, std::string message) { return openai::error_response(status, std::move(message)); },
                             openai::preflight_headers)};
  routes.router.add("GET", "/health", [this](const http::Request&, const ExchangePtr& exchange, const http::PathParameters&) {
    const bool serving = can_serve_();
    exchange->respond({.status = serving ? 200 : 503, .content_type = "text/plain", .body = "", .headers = {}});
  });
  routes.router.add("GET", "/metrics", [this](const http::Request&, const ExchangePtr& exchange, const http::PathParameters&) {
    exchange->respond(control::metrics_response(metrics_, steady_now()));
  });
  if (routes.api) routes.api->add_routes(routes.router);
  return routes;
}

void DataPort::ready(std::shared_ptr<openai::OpenAiApi> api) {
  routes_.store(make_routes(std::move(api)));
}

void DataPort::handle(http::Request request, std::shared_ptr<http::Exchange> exchange) const {
  const std::shared_ptr<const Routes> routes = routes_.load();
  if (!routes->api && request.path.starts_with("/v1/")) {
    exchange->respond(
        openai::error_response(Error{.code = ErrorCode::Unavailable, .field = {}, .message = "the model is still loading"}));
    return;
  }
  routes->router.handle(std::move(request), std::move(exchange));
}

}  // namespace rubato
