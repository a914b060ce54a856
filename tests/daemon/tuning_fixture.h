// SPDX-License-Identifier: Apache-2.0
// What a tuning loop hangs on, on virtual time: traffic that tells all observers, steps for the twin, and a pace that never
// waits.
#pragma once

#include <filesystem>
#include <string>
#include <utility>

#include "daemon/latency_windows.h"
#include "daemon/tuning_loop.h"
#include "daemon/twin_feed.h"

namespace rubato::testing {

struct TuningSide {
  /// Of a small engine; everything else as the test wants it.
  [[nodiscard]] TuningLoopOptions options() {
    TuningLoopOptions options;
    options.model_key = model_key;
    options.twin.limits.each = {
        .max_model_len = 4096, .max_num_seqs = 64, .max_waiting = 1024, .block_count = 4096, .token_tile = 16};
    options.twin.shapes = false;
    options.calibration = calibration;
    options.pace = {.now = [this] { return now; },
                    .thread_time = [] { return Duration::zero(); },
                    .sleep = [](Duration) {},
                    .stopping = {},
                    .superseded = {}};
    options.unavailable = [this] { return unavailable; };
    return options;
  }

  /// One request that is over within a moment, told as the lanes tell it.
  void request(TimePoint arrived, std::int32_t prompt_tokens, std::int32_t output_tokens, Verdict verdict) {
    const Duration ttft = verdict == Verdict::Good ? std::chrono::milliseconds(50) : std::chrono::milliseconds(900);
    const Arrival arrival{.id = SequenceId{++last_id},
                          .time = arrived,
                          .prompt_tokens = prompt_tokens,
                          .max_new_tokens = output_tokens,
                          .ttft_target = std::chrono::milliseconds(500),
                          .itl_target = std::chrono::milliseconds(50)};
    RequestRecord record;
    record.id = arrival.id;
    record.arrival = arrived;
    record.first_token = arrived + ttft;
    record.end = *record.first_token + std::chrono::milliseconds(200);
    record.prompt_tokens = prompt_tokens;
    record.output_tokens = output_tokens;
    record.itl_p99 = std::chrono::milliseconds(10);
    record.verdict = verdict;
    record.ttft_missed = verdict == Verdict::Bad;
    for (Observer* observer : {static_cast<Observer*>(&windows), static_cast<Observer*>(&feed)}) {
      observer->on_arrival(arrival);
      observer->on_first_token(arrival, ttft);
      observer->on_request_end(record);
    }
  }

  /// Decode steps of 10 ms.
  void steps(int count) {
    for (int i = 0; i < count; ++i) {
      engine::StepRecord record;
      record.features = {.tokens = 4 + i % 8, .decode_rows = 4 + i % 8, .context = 100.0 * (4 + i % 8)};
      record.begin = now;
      record.end = now + std::chrono::milliseconds(10);
      record.predicted = std::chrono::milliseconds(10);
      feed.on_step(record, {});
    }
  }

  LatencyWindows windows;
  TwinFeed feed;
  TimePoint now{};
  std::string model_key = "test";
  std::filesystem::path calibration;
  std::string unavailable;
  std::uint64_t last_id = 0;
};

}  // namespace rubato::testing
