// SPDX-License-Identifier: Apache-2.0
#include "daemon/latency_windows.h"

#include <optional>
#include <utility>

namespace rubato {

LatencyWindows::LatencyWindows(std::size_t samples_max) : cut_(samples_max) {}

void LatencyWindows::on_request(std::int32_t /*choices*/) {}  // each choice is sampled by itself

void LatencyWindows::on_arrival(const Arrival& arrival) {
  const std::lock_guard lock(mutex_);
  const tuner::RequestSoFar request{
      .arrival = arrival.time, .ttft_target = arrival.ttft_target, .itl_target = arrival.itl_target};
  in_flight_.emplace(arrival.id, cut_.arrived(request, arrival.prompt_tokens));
}

void LatencyWindows::on_rejected(TimePoint /*now*/, std::int32_t choices) {
  const std::lock_guard lock(mutex_);
  cut_.rejected(choices);
}

void LatencyWindows::on_token_gap(SequenceId id, Duration gap) {
  const std::lock_guard lock(mutex_);
  if (const auto found = in_flight_.find(id); found != in_flight_.end()) cut_.at(found->second).gap(gap);
}

void LatencyWindows::on_first_token(const Arrival& arrival, Duration ttft) {
  const std::lock_guard lock(mutex_);
  if (const auto found = in_flight_.find(arrival.id); found != in_flight_.end()) cut_.at(found->second).first_token(ttft);
}

void LatencyWindows::on_request_end(const RequestRecord& record) {
  const std::lock_guard lock(mutex_);
  std::optional<tuner::WindowCut::Place> place;
  if (const auto found = in_flight_.find(record.id); found != in_flight_.end()) {
    place = found->second;
    in_flight_.erase(found);
  }
  if (record.verdict == Verdict::Unjudged) {
    if (place) cut_.left(*place);
    return;
  }
  cut_.ended(place, {.arrival = record.arrival,
                     .ttft = record.first_token.value_or(record.end) - record.arrival,
                     .itl_p99 = record.itl_p99,
                     .output_tokens = record.output_tokens,
                     .ttft_missed = record.ttft_missed,
                     .itl_missed = record.itl_missed,
                     .good = record.verdict == Verdict::Good});
}

void LatencyWindows::on_step(const engine::StepRecord& /*record*/, const policies::SchedulerCounts& counts) {
  const std::lock_guard lock(mutex_);
  cut_.waiting(counts.waiting);
}

void LatencyWindows::on_settings(const Settings& settings, TimePoint /*now*/) {
  const std::lock_guard lock(mutex_);
  cut_.settings(settings.number);
}

void LatencyWindows::open(TimePoint now, TimePoint since) {
  const std::lock_guard lock(mutex_);
  cut_.open(now, since);
}

bool LatencyWindows::settings_changed() const {
  const std::lock_guard lock(mutex_);
  return cut_.settings_changed();
}

std::int32_t LatencyWindows::judged_so_far() const {
  const std::lock_guard lock(mutex_);
  return cut_.judged_so_far();
}

tuner::Window LatencyWindows::close(TimePoint now) {
  tuner::WindowSamples samples;
  {
    const std::lock_guard lock(mutex_);
    samples = cut_.close(now);
  }
  return tuner::measure(std::move(samples));
}

tuner::Window LatencyWindows::so_far(TimePoint now) const {
  tuner::WindowSamples samples;
  {
    const std::lock_guard lock(mutex_);
    samples = cut_.so_far(now);
  }
  return tuner::measure(std::move(samples));
}

}  // namespace rubato
