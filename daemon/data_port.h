// SPDX-License-Identifier: Apache-2.0
// The data port's routes. The port opens before the model is loaded, so that probes and clients get an answer from the first
// second on: until ready() everything but /health and /metrics is 503.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "daemon/http/router.h"
#include "daemon/http/server.h"
#include "daemon/metrics/metrics.h"
#include "daemon/openai/api.h"
#include "daemon/snapshot_cell.h"

namespace rubato {

/// Thread-safe. Must outlive the server whose handler it is.
class DataPort {
 public:
  /// can_serve: whether new requests are welcome (loaded, not draining, not broken); asked by /health.
  DataPort(Metrics& metrics, std::function<bool()> can_serve);

  /// From now on the API answers. api must not be null.
  void ready(std::shared_ptr<openai::OpenAiApi> api);

  void handle(http::Request request, std::shared_ptr<http::Exchange> exchange) const;

 private:
  struct Routes {
    std::shared_ptr<openai::OpenAiApi> api;  // null while loading
    http::Router router;
  };
  [[nodiscard]] Routes make_routes(std::shared_ptr<openai::OpenAiApi> api) const;

  Metrics& metrics_;
  std::function<bool()> can_serve_;
  SnapshotCell<Routes> routes_;
};

}  // namespace rubato
