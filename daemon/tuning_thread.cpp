// SPDX-License-Identifier: Apache-2.0
#include "daemon/tuning_thread.h"

#include <spdlog/spdlog.h>

#include <chrono>
#include <condition_variable>
#include <mutex>
#include <utility>

#include "daemon/calibration_file.h"
#include "daemon/lane_threads.h"
#include "daemon/regimes_command.h"
#include "daemon/tuning_loop.h"
#include "daemon/twin_pace.h"

namespace rubato {
namespace {

using namespace std::chrono_literals;

constexpr auto tuning_interval = 100ms;  // how often the loop looks whether something is due

/// With the regimes that `rubatod regimes import` has left for this model.
std::unique_ptr<tuner::Journal> open_journal(const TuningThreadOptions& options) {
  const std::filesystem::path& state_directory = options.state_directory;
  if (state_directory.empty()) return nullptr;
  auto journal = tuner::Journal::open((state_directory / "journal.sqlite").string());
  if (!journal) {
    spdlog::warn("tuning goes on without a journal: {}", journal.error().message);
    return nullptr;
  }
  if (!(*journal)->cold_start_reason().empty()) spdlog::warn("tuning journal: {}", (*journal)->cold_start_reason());
  const auto imported = take_imported_regimes(**journal, options.model_key, state_directory, wall_seconds());
  if (!imported) {
    spdlog::warn("tuning: regimes that were imported are not used: {}", imported.error().message);
  } else if (*imported > 0) {
    spdlog::info("tuning: {} regimes were imported", *imported);
  }
  return std::move(*journal);
}

Duration wall_at_zero() {
  return std::chrono::duration_cast<Duration>(std::chrono::system_clock::now().time_since_epoch()) -
         steady_now().time_since_epoch();
}

std::string why_unavailable(const Serving& serving) {
  const auto status = serving.status();
  if (status->failure) return "serving has failed: " + status->failure->message;
  return status->draining ? "serving drains" : "";
}

}  // namespace

TuningThread::TuningThread(control::TuningTarget& target, const Serving& serving, LatencyWindows& windows, TwinFeed& feed,
                           TuningThreadOptions options)
    : target_(target),
      serving_(serving),
      windows_(windows),
      feed_(feed),
      options_(std::move(options)),
      journal_(open_journal(options_)),
      thread_([this](const std::stop_token& stop) { run(stop); }) {}

void TuningThread::run(const std::stop_token& stop) {
  if (const auto lowered = lower_thread_priority(); !lowered) {
    spdlog::warn("tuning runs at the priority of serving: {}", lowered.error().message);
  }
  const auto& state = options_.state_directory;
  TuningLoop loop(target_, windows_, feed_, journal_.get(),
                  {.model_key = options_.model_key,
                   .wall_at_zero = wall_at_zero(),
                   .twin = options_.twin,
                   .calibration = state.empty() ? state : calibration_path(state),
                   .pace = {.now = steady_now,
                            .thread_time = thread_cpu_time,
                            .sleep = [](Duration duration) { std::this_thread::sleep_for(duration); },
                            .stopping = [&stop] { return stop.stop_requested(); }},
                   .unavailable = [this] { return why_unavailable(serving_); }},
                  steady_now());
  std::mutex mutex;
  std::condition_variable_any wake;
  std::unique_lock lock(mutex);
  while (!stop.stop_requested()) {
    loop.tick(steady_now());
    wake.wait_for(lock, stop, tuning_interval, [] { return false; });
  }
  loop.stop(steady_now());
}

}  // namespace rubato
