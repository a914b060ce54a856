// SPDX-License-Identifier: Apache-2.0
#include "daemon/latency_windows.h"

#include <algorithm>
#include <cmath>

namespace rubato {
namespace {

// Nearest rank over a copy's order; samples may be empty.
Duration percentile(std::vector<Duration>& samples, int percent) {
  if (samples.empty()) return Duration::zero();
  const std::size_t rank = std::max<std::size_t>(1, (samples.size() * static_cast<std::size_t>(percent) + 99) / 100);
  const auto nth = samples.begin() + static_cast<std::ptrdiff_t>(rank - 1);
  std::nth_element(samples.begin(), nth, samples.end());
  return *nth;
}

// Coefficient of variation of the intervals between arrivals; 1 for a Poisson stream, 0 when there are too few to tell.
double interval_variation(std::vector<TimePoint> arrivals) {
  if (arrivals.size() < 3) return 0;
  std::sort(arrivals.begin(), arrivals.end());
  double sum = 0;
  double squares = 0;
  for (std::size_t i = 1; i < arrivals.size(); ++i) {
    const double interval = to_seconds(arrivals[i] - arrivals[i - 1]);
    sum += interval;
    squares += interval * interval;
  }
  const double count = static_cast<double>(arrivals.size() - 1);
  const double mean = sum / count;
  return mean > 0 ? std::sqrt(std::max(0.0, squares / count - mean * mean)) / mean : 0;
}

}  // namespace

LatencyWindows::LatencyWindows(std::size_t samples_max) : samples_max_(samples_max) {}

void LatencyWindows::keep(std::vector<Duration>& samples, Duration sample) {
  if (samples.size() < samples_max_) {
    samples.push_back(sample);
    return;
  }
  replacement_state_ = replacement_state_ * 6364136223846793005ULL + 1442695040888963407ULL;
  samples[(replacement_state_ >> 33) % samples.size()] = sample;
}

void LatencyWindows::on_request(std::int32_t /*choices*/) {}  // each choice is sampled by itself

void LatencyWindows::on_arrival(const Arrival& arrival) {
  const std::lock_guard lock(mutex_);
  in_flight_.emplace(arrival.id,
                     InFlight{.arrival = arrival.time, .ttft_target = arrival.ttft_target, .itl_target = arrival.itl_target});
  ++samples_.arrival_count;
  samples_.prompt_tokens += arrival.prompt_tokens;
  if (samples_.arrivals.size() < samples_max_) samples_.arrivals.push_back(arrival.time);
}

void LatencyWindows::on_rejected(TimePoint /*now*/, std::int32_t choices) {
  const std::lock_guard lock(mutex_);
  samples_.arrival_count += choices;
  samples_.rejected += choices;
  samples_.judged += choices;
  samples_.ttft_misses += choices;
}

void LatencyWindows::on_token_gap(SequenceId id, Duration gap) {
  const std::lock_guard lock(mutex_);
  const auto found = in_flight_.find(id);
  if (found == in_flight_.end()) return;
  ++found->second.gaps;
  found->second.wide_gaps += gap > found->second.itl_target ? 1 : 0;
}

void LatencyWindows::on_first_token(const Arrival& arrival, Duration ttft) {
  const std::lock_guard lock(mutex_);
  if (const auto found = in_flight_.find(arrival.id); found != in_flight_.end()) found->second.ttft = ttft;
}

void LatencyWindows::on_request_end(const RequestRecord& record) {
  const std::lock_guard lock(mutex_);
  const auto found = in_flight_.find(record.id);
  const bool counted = found != in_flight_.end() && found->second.counted;
  if (found != in_flight_.end()) in_flight_.erase(found);
  waiting_ = std::min(waiting_, static_cast<std::int32_t>(in_flight_.size()));  // cancels between steps
  if (record.verdict == Verdict::Unjudged || record.arrival < since_) return;
  ++samples_.finished;
  samples_.output_tokens += record.output_tokens;
  keep(samples_.ttft, record.first_token.value_or(record.end) - record.arrival);
  if (record.output_tokens > 1) keep(samples_.itl, record.itl_p99);
  if (counted) return;  // its verdict was given when it became late
  ++samples_.judged;
  samples_.good += record.verdict == Verdict::Good ? 1 : 0;
  samples_.ttft_misses += record.ttft_missed ? 1 : 0;
  samples_.itl_misses += record.itl_missed ? 1 : 0;
}

void LatencyWindows::on_step(const engine::StepRecord& /*record*/, const policies::SchedulerCounts& counts) {
  const std::lock_guard lock(mutex_);
  waiting_ = counts.waiting;
}

void LatencyWindows::on_settings(const Settings& settings, TimePoint /*now*/) {
  const std::lock_guard lock(mutex_);
  settings_changed_ = settings_changed_ || settings.number != settings_number_;
  settings_number_ = settings.number;
}

void LatencyWindows::open(TimePoint now, TimePoint since) {
  const std::lock_guard lock(mutex_);
  samples_ = Samples{};
  samples_.waiting_begin = waiting_;
  opened_ = now;
  since_ = since;
  settings_changed_ = false;
}

bool LatencyWindows::settings_changed() const {
  const std::lock_guard lock(mutex_);
  return settings_changed_;
}

std::int32_t LatencyWindows::judged_so_far() const {
  const std::lock_guard lock(mutex_);
  return samples_.judged;
}

// mutex_ is held. A miss is final and counted once; what is good so far counts for this window and is judged again at its end.
void LatencyWindows::judge_unfinished(InFlight& request, TimePoint now, tuner::Window& window) {
  const Duration age = now - request.arrival;
  if (!request.ttft) window.oldest_wait = std::max(window.oldest_wait, age);
  if (request.arrival < since_ || (!request.ttft && age <= request.ttft_target)) return;
  if (!request.ttft) keep(samples_.ttft, age);
  if (request.counted) return;
  const bool ttft_missed = request.ttft.value_or(age) > request.ttft_target;
  const bool itl_missed = request.itl_missed();
  request.counted = ttft_missed || itl_missed;
  ++samples_.judged;
  samples_.good += request.counted ? 0 : 1;
  samples_.ttft_misses += ttft_missed ? 1 : 0;
  samples_.itl_misses += itl_missed ? 1 : 0;
}

tuner::Window LatencyWindows::close(TimePoint now) {
  tuner::Window window;
  Samples samples;
  {
    const std::lock_guard lock(mutex_);
    for (auto& [id, request] : in_flight_) judge_unfinished(request, now, window);
    samples = std::move(samples_);
    samples_ = Samples{};
    samples_.waiting_begin = waiting_;
    settings_changed_ = false;
    window.begin = opened_;
    opened_ = now;
    window.settings_number = settings_number_;
    window.waiting_end = waiting_;
  }
  window.end = now;
  window.arrivals = samples.arrival_count;
  window.judged = samples.judged;
  window.good = samples.good;
  window.rejected = samples.rejected;
  window.ttft_misses = samples.ttft_misses;
  window.itl_misses = samples.itl_misses;
  window.waiting_begin = samples.waiting_begin;
  window.ttft_p50 = percentile(samples.ttft, 50);
  window.ttft_p99 = percentile(samples.ttft, 99);
  window.itl_p50 = percentile(samples.itl, 50);
  window.itl_p99 = percentile(samples.itl, 99);
  const std::int32_t accepted = samples.arrival_count - samples.rejected;
  window.prompt_tokens_mean = accepted > 0 ? static_cast<double>(samples.prompt_tokens) / accepted : 0;
  window.output_tokens_mean = samples.finished > 0 ? static_cast<double>(samples.output_tokens) / samples.finished : 0;
  window.arrival_interval_cv = interval_variation(std::move(samples.arrivals));
  return window;
}

}  // namespace rubato
