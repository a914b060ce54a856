// SPDX-License-Identifier: Apache-2.0
// The clients of lanes: collects every stream's events under virtual time and checks, event by event, what engine/lanes.h
// promises.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "engine/lane.h"

namespace rubato::test {

struct ClientStream {
  std::vector<TokenId> tokens;
  std::vector<engine::Sample> samples;
  std::vector<float> logits;  // of all its tokens one after another, when the backend captures them
  std::optional<engine::FinishReason> finish;
  Error error;
  TimePoint scheduled;
  std::int32_t cached_tokens = 0;
  bool cancelled = false;
};

class LaneClient {
 public:
  explicit LaneClient(engine::Lane& lane) : lanes_(lane.lanes()) {}
  explicit LaneClient(engine::Lanes& lanes) : lanes_(lanes) {}

  /// Adds a request with the next free id.
  Result<SequenceId> add(std::vector<TokenId> prompt, engine::SamplingParameters sampling) {
    const SequenceId id{++last_id_};
    auto added = lanes_.add({.id = id,
                             .prompt = std::move(prompt),
                             .sampling = std::move(sampling),
                             .arrival = now_,
                             .ttft_target = std::chrono::milliseconds(500),
                             .itl_target = std::chrono::milliseconds(50)});
    if (!added) return Unexpected(std::move(added).error());
    streams_[id];
    return id;
  }

  SequenceId must_add(std::vector<TokenId> prompt, engine::SamplingParameters sampling) {
    auto id = add(std::move(prompt), std::move(sampling));
    EXPECT_TRUE(id) << id.error().message;
    return id.value();
  }

  bool cancel(SequenceId id) {
    const bool was_there = lanes_.cancel(id);
    const auto stream = streams_.find(id);
    if (stream != streams_.end()) {
      const bool live = !stream->second.finish && !stream->second.cancelled;
      EXPECT_EQ(was_there, live) << "id " << id.value;
      if (was_there) stream->second.cancelled = true;
    } else {
      EXPECT_FALSE(was_there) << "id " << id.value;
    }
    return was_there;
  }

  /// One step of the first lane; false when it had nothing to do.
  bool step() {
    if (!begin(LaneIndex{0})) return false;
    advance();
    lanes_.run_step(LaneIndex{0}, now_);
    advance();
    end(LaneIndex{0});
    return true;
  }

  // The parts of a step, for steps of several lanes at once.
  bool begin(LaneIndex lane) {
    advance();
    return lanes_.begin_step(lane, now_);
  }
  void end(LaneIndex lane) {
    lanes_.end_step(lane, now_);
    for (const engine::TokenEvent& event : lanes_.events(lane)) take(event);
  }
  void advance(Duration by = std::chrono::microseconds(500)) { now_ += by; }

  /// Steps until idle, at most step_max times.
  void drain(int step_max = 100000) {
    int steps = 0;
    while (step() && ++steps < step_max) {
    }
    EXPECT_LT(steps, step_max) << "the lane does not come to rest";
  }

  [[nodiscard]] ClientStream& stream(SequenceId id) { return streams_.at(id); }
  [[nodiscard]] const std::map<SequenceId, ClientStream>& streams() const { return streams_; }
  [[nodiscard]] TimePoint now() const { return now_; }

 private:
  void take(const engine::TokenEvent& event) {
    const auto found = streams_.find(event.id);
    ASSERT_NE(found, streams_.end()) << "event of an unknown sequence " << event.id.value;
    ClientStream& stream = found->second;
    ASSERT_FALSE(stream.finish.has_value()) << "event after the end of " << event.id.value;
    ASSERT_FALSE(stream.cancelled) << "event after the cancel of " << event.id.value;
    EXPECT_EQ(event.index, static_cast<std::int32_t>(stream.tokens.size())) << "id " << event.id.value;
    EXPECT_EQ(event.time, now_);
    if (stream.tokens.empty()) {
      stream.scheduled = event.scheduled;
      stream.cached_tokens = event.cached_tokens;
    }
    EXPECT_EQ(event.cached_tokens, stream.cached_tokens) << "id " << event.id.value;
    EXPECT_EQ(event.scheduled, stream.scheduled);
    EXPECT_LE(event.scheduled, event.time);
    const bool failed = event.finish == engine::FinishReason::Failed;
    EXPECT_EQ(event.sample.has_value(), !failed);
    EXPECT_EQ(event.error.message.empty(), !failed);
    if (event.sample) {
      stream.tokens.push_back(event.sample->token);
      stream.samples.push_back(*event.sample);
    }
    stream.finish = event.finish;
    stream.error = event.error;
  }

  engine::Lanes& lanes_;
  TimePoint now_{};
  std::uint64_t last_id_ = 0;
  std::map<SequenceId, ClientStream> streams_;
};

}  // namespace rubato::test
