// SPDX-License-Identifier: Apache-2.0
// The control port's table of routes: probes, metrics, discovery, the Engine object, trials, events and the dashboard. It turns
// HTTP into calls of the Reconciler and back; what a change means is decided there.
#pragma once

#include <functional>
#include <string>

#include "daemon/control/reconciler.h"
#include "daemon/control/trials.h"
#include "daemon/http/router.h"
#include "daemon/metrics/metrics.h"

namespace rubato::control {

struct ControlApiOptions {
  std::string version;
  std::function<WallTime()> wall_clock;     // ages in tables
  std::function<TimePoint()> steady_clock;  // age of rendered metrics
};

/// Handlers are thread-safe and answer at once. reconciler and metrics must outlive the router.
class ControlApi {
 public:
  ControlApi(Reconciler& reconciler, Metrics& metrics, ControlApiOptions options);

  /// Adds every route of the control port.
  void add_routes(http::Router& router) const;

  /// The control port's form of what the server or the router refuse by themselves.
  [[nodiscard]] static http::Response error_response(int status, std::string message);

  static constexpr std::size_t patch_bytes_max = 3 << 20;  // as the Kubernetes API server allows
  static constexpr int json_depth_max = 64;

 private:
  [[nodiscard]] http::Response list_engines(const http::Request& request) const;
  [[nodiscard]] http::Response get_engine(const http::Request& request, const std::string& name) const;
  [[nodiscard]] http::Response patch_engine(const http::Request& request, const std::string& name) const;
  [[nodiscard]] http::Response list_trials(const http::Request& request) const;
  [[nodiscard]] http::Response get_trial(const http::Request& request, const std::string& name) const;
  [[nodiscard]] http::Response get_regimes(const http::Request& request, const std::string& name) const;
  [[nodiscard]] EngineIdentity identity() const;
  [[nodiscard]] http::Response list_events(const http::Request& request, const std::string& name_space) const;

  Reconciler& reconciler_;
  Metrics& metrics_;
  ControlApiOptions options_;
};

/// GET /metrics, the same on both ports.
[[nodiscard]] http::Response metrics_response(Metrics& metrics, TimePoint now);

}  // namespace rubato::control
