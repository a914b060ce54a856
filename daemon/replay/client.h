// SPDX-License-Identifier: Apache-2.0
// Sends a workload to an OpenAI-compatible server at its own pace: an arrival never waits for an earlier answer.
#pragma once

#include <cstdint>
#include <functional>
#include <stop_token>
#include <string>
#include <vector>

#include "daemon/replay/stream_reader.h"
#include "daemon/replay/workload.h"
#include "manifests/result.h"

namespace rubato::replay {

struct ClientOptions {
  std::string url;                              // http://HOST:PORT[/prefix], in front of /v1/completions
  std::string control;                          // rubato's control port, whose settings are watched; empty: none
  std::string model;                            // empty: the first of /v1/models
  std::int32_t vocabulary = 256;                // prompt ids are drawn below it
  Duration timeout = std::chrono::seconds(60);  // of one request, from its arrival
  std::int32_t max_in_flight = 1024;            // an arrival beyond it fails as `in-flight limit`
  std::uint64_t seed = 1;
};

/// The effective settings of the watched engine, as compact JSON, from `at` on.
struct SettingsChange {
  Duration at{};
  std::string settings;
};

struct LoadRun {
  std::vector<Outcome> outcomes;  // in order of their end; requests cut off by a stop are not among them
  std::vector<SettingsChange> settings;
  Duration elapsed{};
};

/// What is known while it runs, once a second. recent: outcomes since the call before.
struct Progress {
  Duration elapsed{};
  std::size_t sent = 0;
  std::size_t in_flight = 0;
  std::size_t ended = 0;
  std::size_t failed = 0;
  std::uint32_t phase = 0;
  const std::vector<Outcome>& outcomes;
  const std::vector<SettingsChange>& settings;
};

/// Runs to the last answer, or until stop. Single-threaded; returns errors only where nothing could be sent at all (bad url,
/// server absent).
[[nodiscard]] Result<LoadRun> run_load(const Workload& workload, const ClientOptions& options,
                                       const std::function<void(const Progress&)>& progress, std::stop_token stop);

}  // namespace rubato::replay
