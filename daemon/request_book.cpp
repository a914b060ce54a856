// SPDX-License-Identifier: Apache-2.0
#include "daemon/request_book.h"

#include <optional>
#include <utility>

#include "manifests/check.h"

namespace rubato {
namespace {

Outcome outcome_of(engine::FinishReason reason) {
  switch (reason) {
    case engine::FinishReason::Stop:
      return Outcome::Stop;
    case engine::FinishReason::Length:
      return Outcome::Length;
    case engine::FinishReason::Failed:
      return Outcome::Failed;
  }
  return Outcome::Failed;
}

}  // namespace

void RequestBook::enter(Submission& submission) {
  const engine::Request& request = submission.request;
  const Arrival arrival{.id = request.id,
                        .time = request.arrival,
                        .prompt_tokens = static_cast<std::int32_t>(request.prompt.size()),
                        .max_new_tokens = request.sampling.max_new_tokens,
                        .ttft_target = request.ttft_target,
                        .itl_target = request.itl_target};
  for (Observer* observer : observers_) observer->on_arrival(arrival);
  live_.emplace(arrival.id, Live{.timing = RequestTiming(arrival), .sink = std::move(submission.sink)});
}

void RequestBook::book(const engine::TokenEvent& event) {
  const auto live = live_.find(event.id);
  CHECK(live != live_.end(), "token for unknown sequence ", event.id.value);
  RequestTiming& timing = live->second.timing;
  if (event.sample) {
    timing.on_scheduled(event.scheduled, event.cached_tokens);
    if (const std::optional<Duration> gap = timing.on_token(event.time)) {
      for (Observer* observer : observers_) observer->on_token_gap(event.id, *gap);
    } else {
      for (Observer* observer : observers_) observer->on_first_token(timing.arrival(), event.time - timing.arrival().time);
    }
  }
  live->second.sink->on_token(event);
  if (event.finish) end(live, outcome_of(*event.finish), event.time);
}

bool RequestBook::leave(SequenceId id, Outcome reason, TimePoint now) {
  const auto live = live_.find(id);
  if (live == live_.end()) return false;
  end(live, reason, now);
  return true;
}

void RequestBook::fail(SequenceId id, Error error, TimePoint now) {
  const auto live = live_.find(id);
  if (live == live_.end()) return;
  engine::TokenEvent event;
  event.id = id;
  event.finish = engine::FinishReason::Failed;
  event.error = std::move(error);
  event.time = now;
  live->second.sink->on_token(event);
  end(live, Outcome::Failed, now);
}

void RequestBook::fail_all(const Error& error, TimePoint now) {
  while (!live_.empty()) fail(live_.begin()->first, error, now);
}

void RequestBook::end(LiveMap::iterator live, Outcome outcome, TimePoint now) {
  const RequestRecord record = live->second.timing.finish(outcome, now);
  live_.erase(live);
  for (Observer* observer : observers_) observer->on_request_end(record);
  door_.ended(record.id);
}

}  // namespace rubato
