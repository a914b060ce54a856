// SPDX-License-Identifier: Apache-2.0
// The CPU backend's compute threads: they share the tasks of one operation with the caller, and sleep when no operation runs.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <thread>
#include <type_traits>
#include <vector>

#include "engine/cpu/core_gate.h"

namespace rubato::engine {

/// Owned by one CpuOps; run() and pass() are called by the backend's thread alone. Which thread runs which task never shows in a
/// result: tasks write disjoint memory. A worker that the system has taken off its core delays no one unless it holds a task.
class Workers {
 public:
  /// threads >= 1, the caller included. At a gate, a thread asks it before each task whether this side has a core for it, and
  /// while it has none, sleeps.
  explicit Workers(std::int32_t threads, cpu::GateSide gate = {});
  ~Workers();
  Workers(const Workers&) = delete;
  Workers& operator=(const Workers&) = delete;

  [[nodiscard]] std::int32_t thread_count() const { return static_cast<std::int32_t>(threads_.size()) + 1; }

  /// Before work on the caller's thread alone: waits while this side has no core.
  void pass() {
    if (gate_.gate != nullptr) gate_.gate->pass(gate_.side);
  }

  /// Calls body(task, worker) once for each task of 0 .. count-1, count < 2^20, worker in 0 .. thread_count()-1; returns when all
  /// are done.
  template <class Body>
  void run(std::int32_t count, Body&& body) {
    using Plain = std::remove_reference_t<Body>;
    run_tasks(
        count, [](void* context, std::int32_t task, std::int32_t worker) { (*static_cast<Plain*>(context))(task, worker); },
        const_cast<void*>(static_cast<const void*>(&body)));
  }

 private:
  using Call = void (*)(void* context, std::int32_t task, std::int32_t worker);

  void run_tasks(std::int32_t count, Call call, void* context);
  /// Whether worker may claim a task. The caller's thread waits until it may.
  bool admitted(std::int32_t worker);
  /// Runs tasks of the operation that ticket belongs to until none is left to claim or worker is no longer admitted.
  void drain(std::uint64_t ticket, std::int32_t worker);
  void work(std::int32_t worker);
  /// A ticket with tasks left to claim; sleeps if that takes long or worker is not admitted. 0 means stop.
  std::uint64_t await(std::int32_t worker);
  /// A ticket with tasks left to claim, or 0 if there is none soon.
  [[nodiscard]] std::uint64_t look_for_tasks() const;

  const cpu::GateSide gate_;
  // The ticket holds operation number, task count and next task in one word, so that a claim by a thread that slept through an
  // operation fails instead of running a task of the wrong one.
  alignas(64) std::atomic<std::uint64_t> ticket_{0};
  alignas(64) std::atomic<std::int32_t> done_{0};
  alignas(64) std::atomic<std::uint32_t> epoch_{0};
  std::atomic<std::int32_t> sleepers_{0};
  std::atomic<bool> stop_{false};
  std::atomic<Call> call_{nullptr};
  std::atomic<void*> context_{nullptr};
  std::uint64_t operation_ = 0;
  std::vector<std::thread> threads_;
};

}  // namespace rubato::engine
