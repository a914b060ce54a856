// SPDX-License-Identifier: Apache-2.0
// Liveness and readiness: named checks over a snapshot of serving, and the text forms that kubelet, kubectl and people read.
// Probes never wait for the lane: they look at what it last published.
#pragma once

#include <map>
#include <mutex>
#include <span>
#include <string>
#include <string_view>

#include "daemon/control/conditions.h"
#include "daemon/http/server.h"
#include "policies/time.h"

namespace rubato::control {

/// Notices a lane that has work and ends no step. Counts from the first look that saw the work, so that an idle hour before a
/// request is not taken for a stall. Thread-safe: every probe and the main thread's timer look.
class StallDetector {
 public:
  /// True while work has been there without a finished step for longer than stalled_after.
  bool look(std::uint64_t steps, bool busy, TimePoint now);

  /// Longer than any sane step (a big prefill on a slow CPU takes tens of seconds): a kill loses every running request.
  static constexpr std::chrono::seconds stalled_after{120};

 private:
  std::mutex mutex_;
  bool busy_ = false;
  std::uint64_t steps_ = 0;
  TimePoint progress_{};
};

struct Check {
  std::string_view name;
  bool passes = false;
};

/// livez: is a restart the cure? A draining or overloaded daemon is alive.
[[nodiscard]] std::vector<Check> live_checks(const ServingHealth& health);
/// readyz: can it take requests? Never whether it meets its objectives.
[[nodiscard]] std::vector<Check> ready_checks(const ServingHealth& health);

/// GET /livez, /readyz, /healthz: `?verbose` lists the checks, `?exclude=NAME` (or several, with commas) passes over some.
[[nodiscard]] http::Response health_response(std::string_view endpoint, std::span<const Check> checks,
                                             const http::Request& request);
/// GET /readyz/NAME: one check. 404 when there is none of that name.
[[nodiscard]] http::Response single_check_response(std::span<const Check> checks, std::string_view name);

/// The data port's GET /health, as OpenAI-style servers have it: ready or not.
[[nodiscard]] http::Response data_health_response(const ServingHealth& health);

}  // namespace rubato::control
