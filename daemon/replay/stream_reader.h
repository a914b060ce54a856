// SPDX-License-Identifier: Apache-2.0
// One streamed answer as bytes and times come in: server-sent events cut anywhere, tokens counted, gaps measured. Knows no
// socket.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "manifests/units.h"

namespace rubato::replay {

/// How one request went. Times are relative to the start of the run.
struct Outcome {
  std::uint32_t phase = 0;
  Duration arrived{};  // when the workload has it, whether or not the client was in time
  Duration lag{};      // how much later it was sent: the client's own delay, part of ttft
  Duration ended{};
  std::string failure;         // empty: complete. Else its kind, such as `http 429` or `timeout`
  Duration ttft{};             // from arrived to the first token
  std::vector<Duration> gaps;  // between token events
  std::int32_t tokens = 0;
  std::int32_t prompt_tokens = 0;
  std::int32_t shared_tokens = 0;  // of the prompt: an earlier one began with them too
  std::int32_t cached_tokens = 0;  // of the prompt: as the server says, not computed again

  [[nodiscard]] bool complete() const { return failure.empty(); }
};

/// Feeds a response body; owned by the request's coroutine.
class StreamReader {
 public:
  explicit StreamReader(std::int32_t tokens_expected) : tokens_expected_(tokens_expected) {}

  /// Everything in bytes arrived at now.
  void feed(std::string_view bytes, Duration now);
  /// The stream ended. Fills what the stream says into outcome: tokens, ttft, gaps, failure.
  void finish(Outcome& outcome) const;
  [[nodiscard]] bool done() const { return done_ || !failure_.empty(); }

 private:
  void line(std::string_view text, Duration now);
  void event(std::string_view data, Duration now);

  std::int32_t tokens_expected_;
  std::string partial_;  // an unfinished line, bounded by line_bytes_max
  std::string data_;
  bool done_ = false;
  std::string failure_;
  std::vector<Duration> token_times_;
  std::int32_t tokens_reported_ = -1;  // usage.completion_tokens; none yet
  std::int32_t cached_reported_ = 0;   // usage.prompt_tokens_details.cached_tokens
};

}  // namespace rubato::replay
