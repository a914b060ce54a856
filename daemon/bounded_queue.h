// SPDX-License-Identifier: Apache-2.0
// BoundedQueue<T>: how work moves from one thread to another. Full is an answer, never a wait; a reader takes everything at once.
#pragma once

#include <cstddef>
#include <mutex>
#include <utility>
#include <vector>

namespace rubato {

template <class T>
class BoundedQueue {
 public:
  explicit BoundedQueue(std::size_t capacity) : capacity_(capacity) {}

  /// False when full; item is then untouched.
  [[nodiscard]] bool try_push(T&& item) {
    const std::lock_guard lock(mutex_);
    if (items_.size() >= capacity_) return false;
    items_.push_back(std::move(item));
    return true;
  }

  /// Swaps everything queued into out (cleared first). Never waits.
  void take_all(std::vector<T>& out) {
    out.clear();
    const std::lock_guard lock(mutex_);
    out.swap(items_);
  }

 private:
  const std::size_t capacity_;
  std::mutex mutex_;
  std::vector<T> items_;
};

}  // namespace rubato
