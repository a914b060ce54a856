// SPDX-License-Identifier: Apache-2.0
#include "daemon/control/health.h"

#include <algorithm>
#include <set>

namespace rubato::control {
namespace {

http::Response text_response(int status, std::string body) {
  return {.status = status,
          .content_type = "text/plain; charset=utf-8",
          .body = std::move(body),
          .headers = {{"Cache-Control", "no-cache, private"}, {"X-Content-Type-Options", "nosniff"}}};
}

std::set<std::string, std::less<>> excluded_names(const http::Request& request) {
  std::set<std::string, std::less<>> names;
  const auto given = request.query.find("exclude");
  if (given == request.query.end()) return names;
  std::string_view rest = given->second;
  while (!rest.empty()) {
    const auto comma = rest.find(',');
    names.emplace(rest.substr(0, comma));
    rest = comma == std::string_view::npos ? std::string_view() : rest.substr(comma + 1);
  }
  return names;
}

}  // namespace

bool StallDetector::look(std::uint64_t steps, bool busy, TimePoint now) {
  const std::lock_guard lock(mutex_);
  if (!busy || !busy_ || steps != steps_) progress_ = now;
  busy_ = busy;
  steps_ = steps;
  return now - progress_ > stalled_after;
}

std::vector<Check> live_checks(const ServingHealth& health) {
  return {{.name = "ping", .passes = true}, {.name = "lane", .passes = !health.stalled}};
}

std::vector<Check> ready_checks(const ServingHealth& health) {
  return {{.name = "ping", .passes = true},
          {.name = "model", .passes = health.loaded},
          {.name = "device", .passes = !health.failure.has_value()},
          {.name = "lane", .passes = !health.stalled},
          {.name = "accepting", .passes = !health.draining}};
}

http::Response health_response(std::string_view endpoint, std::span<const Check> checks, const http::Request& request) {
  const auto excluded = excluded_names(request);
  std::string lines;
  bool all_pass = true;
  for (const auto& check : checks) {
    const std::string name(check.name);
    if (excluded.contains(check.name)) {
      lines += "[+]" + name + " excluded: ok\n";
    } else if (check.passes) {
      lines += "[+]" + name + " ok\n";
    } else {
      lines += "[-]" + name + " failed: reason withheld\n";  // conditions of the Engine object say why
      all_pass = false;
    }
  }
  lines += std::string(endpoint) + (all_pass ? " check passed\n" : " check failed\n");
  const bool verbose = request.query.contains("verbose");
  if (all_pass) return text_response(200, verbose ? lines : "ok");
  return text_response(503, lines);
}

http::Response single_check_response(std::span<const Check> checks, std::string_view name) {
  const auto check = std::find_if(checks.begin(), checks.end(), [&](const Check& one) { return one.name == name; });
  if (check == checks.end()) return text_response(404, "404 page not found\n");
  if (check->passes) return text_response(200, "ok");
  return text_response(503, "[-]" + std::string(name) + " failed: reason withheld\n");
}

http::Response data_health_response(const ServingHealth& health) {
  const auto checks = ready_checks(health);
  const bool ready = std::all_of(checks.begin(), checks.end(), [](const Check& check) { return check.passes; });
  http::Response response = text_response(ready ? 200 : 503, ready ? "ok" : "not ready");
  if (!ready) response.headers.emplace_back("Retry-After", "1");
  return response;
}

}  // namespace rubato::control
