// SPDX-License-Identifier: Apache-2.0
#include "daemon/shape_thread.h"

#include <spdlog/spdlog.h>

#include <chrono>
#include <exception>
#include <optional>

#include "daemon/lane_threads.h"

namespace rubato {
namespace {

using namespace std::chrono_literals;

constexpr auto look_interval = 100ms;  // between looks while nobody nudges: the load is weighed, returned sets are freed

}  // namespace

ShapeThread::ShapeThread(engine::Backend& backend, const SnapshotCell<Settings>& settings, const ShapeThreadOptions& options)
    : backend_(backend),
      settings_(settings),
      observers_(options.observers),
      builder_(backend, options.builder),
      status_(engine::ShapeStatus{}),
      thread_([this](const std::stop_token& stop) { run(stop); }) {}

ShapeThread::~ShapeThread() {
  stop();
}

void ShapeThread::stop() {
  thread_.request_stop();
  if (thread_.joinable()) thread_.join();
}

void ShapeThread::take() {
  if (!builder_.offered()) return;
  const TimePoint begin = steady_now();
  if (!builder_.take()) return;
  const Duration duration = steady_now() - begin;
  for (Observer* observer : observers_) observer->on_shapes_taken(duration);
}

void ShapeThread::nudge() {
  {
    const std::lock_guard lock(mutex_);
    nudged_ = true;
  }
  wake_.notify_one();
}

void ShapeThread::run(const std::stop_token& stop) {
  try {
    std::unique_lock lock(mutex_);
    while (!stop.stop_requested()) {
      nudged_ = false;
      lock.unlock();
      look(stop);
      lock.lock();
      wake_.wait_for(lock, stop, look_interval, [this] { return nudged_; });
    }
  } catch (const std::exception& exception) {
    // Nothing here is meant to throw; bad_alloc is what is left. Serving goes on with the shapes it has.
    spdlog::error("the building of step shapes has stopped: {}", exception.what());
  }
}

void ShapeThread::look(const std::stop_token& stop) {
  const KnobValues knobs = settings_.load()->knobs;
  const engine::ShapeTarget target{.budget = knobs.max_num_batched_tokens,
                                   .max_num_seqs = knobs.max_num_seqs,
                                   .given_percent = backend_.share().given_percent};
  const std::optional<engine::ShapeBuild> built = builder_.look(target, stop, [] { return steady_now(); });
  if (*status_.load() != builder_.status()) status_.store(builder_.status());
  if (!built) return;
  for (Observer* observer : observers_) observer->on_shapes_built(*built);
  if (built->outcome) {
    spdlog::info("step shapes: {} buckets for a budget of {}, {} bytes, built in {:.1f} ms", built->buckets, target.budget,
                 built->bytes, to_milliseconds(built->duration));
  } else {
    spdlog::warn("step shapes for a budget of {} could not be built; the old ones stay: {}", target.budget,
                 built->outcome.error().message);
  }
}

}  // namespace rubato
