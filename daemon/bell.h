// SPDX-License-Identifier: Apache-2.0
// Bell: how a thread that found nothing to do sleeps until something may have changed, and misses no change in between.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <stop_token>

namespace rubato {

/// Many ring, one waits. Read count(), look for work, then wait(): a ring since the count ends the wait at once.
class Bell {
 public:
  void ring() {
    {
      const std::lock_guard lock(mutex_);
      ++count_;
    }
    rung_.notify_one();
  }

  [[nodiscard]] std::uint64_t count() const {
    const std::lock_guard lock(mutex_);
    return count_;
  }

  /// Until it has been rung more than seen times, a stop, or the time-out.
  void wait(std::uint64_t seen, const std::stop_token& stop, std::chrono::milliseconds timeout) {
    std::unique_lock lock(mutex_);
    rung_.wait_for(lock, stop, timeout, [&] { return count_ != seen; });
  }

 private:
  mutable std::mutex mutex_;
  std::condition_variable_any rung_;
  std::uint64_t count_ = 0;
};

}  // namespace rubato
