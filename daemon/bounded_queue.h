// SPDX-License-Identifier: Apache-2.0
// BoundedQueue<T>: how work moves from one thread to another. Full is an answer, never a wait; the reader takes everything at
// once.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <mutex>
#include <stop_token>
#include <utility>
#include <vector>

namespace rubato {

/// Many writers, one reader.
template <class T>
class BoundedQueue {
 public:
  explicit BoundedQueue(std::size_t capacity) : capacity_(capacity) {}

  /// False when full; item is then untouched.
  [[nodiscard]] bool try_push(T&& item) {
    {
      const std::lock_guard lock(mutex_);
      if (items_.size() >= capacity_) return false;
      items_.push_back(std::move(item));
    }
    ready_.notify_one();
    return true;
  }

  /// Wakes the reader without an item: something outside the queue has changed.
  void nudge() {
    {
      const std::lock_guard lock(mutex_);
      nudged_ = true;
    }
    ready_.notify_one();
  }

  /// Swaps everything queued into out (cleared first). Never waits.
  void take_all(std::vector<T>& out) {
    out.clear();
    const std::lock_guard lock(mutex_);
    out.swap(items_);
    nudged_ = false;
  }

  /// Waits until there is something to take, a nudge, a stop or the time-out.
  void wait(const std::stop_token& stop, std::chrono::milliseconds timeout) {
    std::unique_lock lock(mutex_);
    ready_.wait_for(lock, stop, timeout, [this] { return !items_.empty() || nudged_; });
  }

 private:
  const std::size_t capacity_;
  std::mutex mutex_;
  std::condition_variable_any ready_;
  std::vector<T> items_;
  bool nudged_ = false;
};

}  // namespace rubato
