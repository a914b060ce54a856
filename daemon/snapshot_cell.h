// SPDX-License-Identifier: Apache-2.0
// SnapshotCell<T>: the newest immutable value of something, for threads that only need to look. A mutex round a shared_ptr,
// because std::atomic<std::shared_ptr> is reported as a race by TSan with this toolchain and is no faster here.
#pragma once

#include <memory>
#include <mutex>
#include <utility>

namespace rubato {

/// Any thread may store or load. A loaded snapshot stays valid as long as it is held.
template <class T>
class SnapshotCell {
 public:
  explicit SnapshotCell(T initial) : value_(std::make_shared<const T>(std::move(initial))) {}

  void store(T value) {
    auto next = std::make_shared<const T>(std::move(value));
    const std::lock_guard lock(mutex_);
    value_.swap(next);  // the old value dies outside the lock's critical work, with `next`
  }

  [[nodiscard]] std::shared_ptr<const T> load() const {
    const std::lock_guard lock(mutex_);
    return value_;
  }

 private:
  mutable std::mutex mutex_;
  std::shared_ptr<const T> value_;
};

}  // namespace rubato
