// SPDX-License-Identifier: Apache-2.0
// The shape builder's thread: brings the lane's settings to engine::ShapeBuilder, builds beside the running steps, and tells
// observers. What to build and when is the ShapeBuilder's to say.
#pragma once

#include <condition_variable>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "daemon/observer.h"
#include "daemon/snapshot_cell.h"
#include "engine/shape_builder.h"
#include "manifests/settings.h"

namespace rubato {

struct ShapeThreadOptions {
  engine::ShapeBuilderOptions builder;
  std::vector<Observer*> observers;  // must outlive the thread
};

/// One lane's. backend and settings must outlive it, and the lane must have stopped before it goes.
class ShapeThread {
 public:
  ShapeThread(engine::Backend& backend, const SnapshotCell<Settings>& settings, const ShapeThreadOptions& options);
  ~ShapeThread();
  ShapeThread(const ShapeThread&) = delete;
  ShapeThread& operator=(const ShapeThread&) = delete;

  // ---- the lane's thread, which never waits here
  void on_step(const engine::StepRecord& record) { builder_.observe(record.features.tokens); }
  /// Between two steps: takes the set that is ready, if there is one.
  void take();

  // ---- any other thread
  /// The settings have moved.
  void nudge();
  [[nodiscard]] std::shared_ptr<const engine::ShapeStatus> status() const { return status_.load(); }
  /// Joins the thread; a build stops between two buckets. Idempotent.
  void stop();

 private:
  void run(const std::stop_token& stop);
  void look(const std::stop_token& stop);

  const engine::Backend& backend_;
  const SnapshotCell<Settings>& settings_;
  const std::vector<Observer*> observers_;
  engine::ShapeBuilder builder_;
  SnapshotCell<engine::ShapeStatus> status_;

  std::mutex mutex_;
  std::condition_variable_any wake_;
  bool nudged_ = false;
  std::jthread thread_;  // last: it uses everything above
};

}  // namespace rubato
