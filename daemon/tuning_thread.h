// SPDX-License-Identifier: Apache-2.0
// The thread of the tuning loop, at low priority, with the journal and the clocks that the loop itself does not know.
#pragma once

#include <filesystem>
#include <memory>
#include <string>
#include <thread>

#include "daemon/control/tuning_target.h"
#include "daemon/latency_windows.h"
#include "daemon/serving.h"
#include "daemon/twin_feed.h"
#include "tuner/journal.h"
#include "tuner/twin/twin.h"

namespace rubato {

struct TuningThreadOptions {
  std::filesystem::path state_directory;  // keeps the journal and the twin's calibration; empty: nothing survives
  std::string model_key;
  tuner::TwinOptions twin{};
};

class TuningThread {
 public:
  /// Starts at once. All must outlive it.
  TuningThread(control::TuningTarget& target, const Serving& serving, LatencyWindows& windows, TwinFeed& feed,
               TuningThreadOptions options);
  /// Asks the twin to end whatever it does, which takes milliseconds, and keeps what it has learnt.
  ~TuningThread() = default;
  TuningThread(const TuningThread&) = delete;
  TuningThread& operator=(const TuningThread&) = delete;

 private:
  void run(const std::stop_token& stop);

  control::TuningTarget& target_;
  const Serving& serving_;
  LatencyWindows& windows_;
  TwinFeed& feed_;
  const TuningThreadOptions options_;
  std::unique_ptr<tuner::Journal> journal_;
  std::jthread thread_;  // last: it uses everything above
};

}  // namespace rubato
