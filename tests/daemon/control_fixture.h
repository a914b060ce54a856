// SPDX-License-Identifier: Apache-2.0
// A control side without a socket, an engine or a clock: a Serving that remembers what it was told, an Exchange that keeps the
// answer, and the routes over both.
#pragma once

#include <gtest/gtest.h>

#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "daemon/control/control_api.h"
#include "manifests/read_manifest.h"

namespace rubato::testing {

using control::Json;
using control::WallTime;

class RecordingServing final : public Serving {
 public:
  [[nodiscard]] SequenceId next_id() override { return SequenceId{1}; }
  [[nodiscard]] Result<void> submit(std::vector<Submission> /*choices*/) override { return {}; }
  void cancel(SequenceId /*id*/, Outcome /*reason*/) override {}
  std::uint64_t apply(const KnobValues& knobs) override {
    const std::lock_guard lock(mutex_);
    applied.push_back(knobs);
    status_.settings = {.number = status_.settings.number + 1, .knobs = knobs};
    return status_.settings.number;
  }
  [[nodiscard]] std::shared_ptr<const ServingStatus> status() const override {
    const std::lock_guard lock(mutex_);
    return std::make_shared<const ServingStatus>(status_);
  }
  void set_objectives(const ObjectivesSpec& objectives) override { objectives_ = objectives; }
  [[nodiscard]] ObjectivesSpec objectives() const override { return objectives_; }
  [[nodiscard]] TimePoint now() const override { return time; }
  void begin_drain() override { status_.draining = true; }
  [[nodiscard]] bool idle() const override { return is_idle; }

  ServingStatus status_;
  ObjectivesSpec objectives_;
  std::vector<KnobValues> applied;
  TimePoint time{};
  bool is_idle = true;

 private:
  mutable std::mutex mutex_;  // probes look at the status without the reconciler's lock
};

class RecordedExchange final : public http::Exchange {
 public:
  void respond(http::Response response) override { answer = std::move(response); }
  void begin_stream(http::Response /*head*/) override { ADD_FAILURE() << "no control answer is a stream yet"; }
  bool write(std::string /*piece*/) override { return false; }
  void end_stream() override {}
  void abort_stream() override {}
  void on_close(std::function<void()> /*callback*/) override {}
  void post(std::function<void()> work) override { work(); }
  void set_heartbeat(std::string /*piece*/, std::chrono::milliseconds /*silence*/) override {}
  http::Response answer;
};

inline constexpr WallTime control_start{std::chrono::sys_days(std::chrono::year(2026) / 11 / 30)};

inline ReadManifest control_manifest(const std::string& spec_lines = "") {
  const auto read = parse_manifest(
      "apiVersion: rubato.dev/v1alpha1\nkind: Engine\nmetadata: {name: chat, labels: {team: a}}\nspec:\n  model: {path: /m}\n" +
          spec_lines,
      "chat.yaml");
  CHECK(read.has_value(), read.failure().text());
  return *read;
}

/// The whole control side; time stands still unless moved.
struct ControlSide {
  explicit ControlSide(const std::string& state_directory = "", const ReadManifest& manifest = control_manifest())
      : reconciler(manifest,
                   {.state_directory = state_directory,
                    .node = "node-1",
                    .clock = [this] { return now; },
                    .make_uid = [] { return std::string("6f1c8f0e-0000-4000-8000-000000000001"); }},
                   metrics),
        router(control::ControlApi::error_response) {
    control::ControlApi(
        reconciler, metrics,
        {.version = "0.1.0", .wall_clock = [this] { return now; }, .steady_clock = [this] { return serving.time; }})
        .add_routes(router);
  }

  void start_serving() {
    serving.status_.settings = {.number = 1, .knobs = reconciler.knobs()};
    serving.objectives_ = reconciler.objectives();
    serving.status_.backend = "cpu test";
    serving.status_.effective_max_len = 4096;
    serving.status_.vocabulary = 512;
    serving.status_.counts.block_count = 256;
    LaneStatus& lane = serving.status_.lanes.emplace_back();
    lane.counts.scheduler = {.free_blocks = 256, .block_count = 256};
    lane.shapes = std::make_shared<const engine::ShapeStatus>(
        engine::ShapeStatus{.buckets = {.tokens = {8, 16, 32, 64, 256, 512}, .decode_max = 64},
                            .bytes = 1536,
                            .built = 1,
                            .failed = 0,
                            .last_error = ""});
    reconciler.attach(serving);
  }

  /// target: path and query.
  http::Response ask(const std::string& method, const std::string& target,
                     std::map<std::string, std::string, std::less<>> headers = {}, std::string body = "") {
    http::Request request;
    request.method = method;
    const auto mark = target.find('?');
    request.path = target.substr(0, mark);
    std::string rest = mark == std::string::npos ? "" : target.substr(mark + 1);
    while (!rest.empty()) {
      const auto end = rest.find('&');
      const std::string pair = rest.substr(0, end);
      rest = end == std::string::npos ? "" : rest.substr(end + 1);
      const auto equals = pair.find('=');
      request.query[pair.substr(0, equals)] = equals == std::string::npos ? "" : pair.substr(equals + 1);
    }
    request.headers = std::move(headers);
    request.body = std::move(body);
    const auto exchange = std::make_shared<RecordedExchange>();
    router.handle(std::move(request), exchange);
    return exchange->answer;
  }
  http::Response patch(const std::string& body, const std::string& query = "") {
    return ask("PATCH", "/apis/rubato.dev/v1alpha1/engines/chat" + query, {{"content-type", "application/merge-patch+json"}},
               body);
  }
  Json engine() { return Json::parse(ask("GET", "/apis/rubato.dev/v1alpha1/engines/chat").body); }

  WallTime now = control_start;
  Metrics metrics{{.model_name = "chat", .version = "0.1.0", .backend = "cpu test", .objectives = {}}};
  RecordingServing serving;
  control::Reconciler reconciler;
  http::Router router;
};

}  // namespace rubato::testing
