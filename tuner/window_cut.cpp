// SPDX-License-Identifier: Apache-2.0
#include "tuner/window_cut.h"

#include <algorithm>
#include <cmath>
#include <utility>

namespace rubato::tuner {
namespace {

// Nearest rank; reorders the samples, which may be none.
Duration percentile(std::vector<Duration>& samples, int percent) {
  if (samples.empty()) return Duration::zero();
  const std::size_t rank = std::max<std::size_t>(1, (samples.size() * static_cast<std::size_t>(percent) + 99) / 100);
  const auto nth = samples.begin() + static_cast<std::ptrdiff_t>(rank - 1);
  std::nth_element(samples.begin(), nth, samples.end());
  return *nth;
}

// Coefficient of variation of the intervals between arrivals; 1 for a Poisson stream, 0 when there are too few to tell.
double interval_variation(std::vector<TimePoint>& arrivals) {
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

Window measure(WindowSamples samples) {
  Window window = samples.window;
  window.ttft_p50 = percentile(samples.ttft, 50);
  window.ttft_p99 = percentile(samples.ttft, 99);
  window.itl_p50 = percentile(samples.itl, 50);
  window.itl_p99 = percentile(samples.itl, 99);
  window.arrival_interval_cv = interval_variation(samples.arrivals);
  return window;
}

void WindowCut::keep(std::vector<Duration>& samples, Duration sample, std::uint64_t& replacement) const {
  if (samples.size() < samples_max_) {
    samples.push_back(sample);
    return;
  }
  replacement = replacement * 6364136223846793005ULL + 1442695040888963407ULL;
  samples[(replacement >> 33) % samples.size()] = sample;
}

WindowCut::Place WindowCut::arrived(const RequestSoFar& request, std::int32_t prompt_tokens) {
  ++window_.arrivals;
  ++sums_.accepted;
  sums_.prompt_tokens += prompt_tokens;
  if (arrivals_.size() < samples_max_) arrivals_.push_back(request.arrival);
  if (free_.empty()) {
    free_.push_back(static_cast<std::uint32_t>(records_.size()));
    records_.emplace_back();
  }
  const std::uint32_t place = free_.back();
  free_.pop_back();
  records_[place] = {.request = request, .live_place = static_cast<std::uint32_t>(live_.size())};
  live_.push_back(place);
  return Place{place};
}

void WindowCut::forget(Place place) {
  const std::uint32_t hole = records_[place.value].live_place;
  live_[hole] = live_.back();
  records_[live_[hole]].live_place = hole;
  live_.pop_back();
  free_.push_back(place.value);
  waiting_ = std::min(waiting_, static_cast<std::int32_t>(live_.size()));  // cancels between steps
}

void WindowCut::rejected(std::int32_t requests) {
  window_.arrivals += requests;
  window_.rejected += requests;
  window_.judged += requests;
  window_.ttft_misses += requests;
}

void WindowCut::ended(std::optional<Place> place, const EndedRequest& end) {
  const bool counted = place && at(*place).counted;
  if (place) forget(*place);
  if (end.arrival < since_) return;
  ++sums_.finished;
  sums_.output_tokens += end.output_tokens;
  keep(ttft_, end.ttft, replacement_);
  if (end.output_tokens > 1) keep(itl_, end.itl_p99, replacement_);
  if (counted) return;  // its verdict was given when it became late
  ++window_.judged;
  window_.good += end.good ? 1 : 0;
  window_.ttft_misses += end.ttft_missed ? 1 : 0;
  window_.itl_misses += end.itl_missed ? 1 : 0;
}

void WindowCut::left(Place place) {
  forget(place);
}

void WindowCut::settings(std::uint64_t number) {
  settings_changed_ = settings_changed_ || number != settings_number_;
  settings_number_ = number;
}

void WindowCut::start(TimePoint now) {
  window_ = {};
  window_.waiting_begin = waiting_;
  sums_ = {};
  ttft_.clear();
  itl_.clear();
  arrivals_.clear();
  opened_ = now;
  settings_changed_ = false;
}

void WindowCut::open(TimePoint now, TimePoint since) {
  start(now);
  since_ = since;
}

bool WindowCut::judge(const RequestSoFar& request, TimePoint now, WindowSamples& into, std::uint64_t& replacement) const {
  const Duration age = now - request.arrival;
  if (!request.ttft) into.window.oldest_wait = std::max(into.window.oldest_wait, age);
  if (request.arrival < since_ || (!request.ttft && age <= request.ttft_target)) return false;
  if (!request.ttft) keep(into.ttft, age, replacement);
  if (request.counted) return false;
  const bool ttft_missed = request.ttft.value_or(age) > request.ttft_target;
  const bool itl_missed = request.itl_missed();
  const bool missed = ttft_missed || itl_missed;
  ++into.window.judged;
  into.window.good += missed ? 0 : 1;
  into.window.ttft_misses += ttft_missed ? 1 : 0;
  into.window.itl_misses += itl_missed ? 1 : 0;
  return missed;
}

void WindowCut::finish(TimePoint now, WindowSamples& samples) const {
  Window& window = samples.window;
  window.begin = opened_;
  window.end = now;
  window.settings_number = settings_number_;
  window.waiting_end = waiting_;
  if (sums_.accepted > 0) window.prompt_tokens_mean = static_cast<double>(sums_.prompt_tokens) / sums_.accepted;
  if (sums_.finished > 0) window.output_tokens_mean = static_cast<double>(sums_.output_tokens) / sums_.finished;
}

WindowSamples WindowCut::close(TimePoint now) {
  WindowSamples samples{.window = window_, .ttft = std::move(ttft_), .itl = std::move(itl_), .arrivals = std::move(arrivals_)};
  for (const std::uint32_t place : live_) {
    RequestSoFar& request = records_[place].request;
    if (judge(request, now, samples, replacement_)) request.counted = true;
  }
  finish(now, samples);
  start(now);
  return samples;
}

WindowSamples WindowCut::so_far(TimePoint now) const {
  WindowSamples samples{.window = window_, .ttft = ttft_, .itl = itl_, .arrivals = arrivals_};
  std::uint64_t replacement = replacement_;
  for (const std::uint32_t place : live_) judge(records_[place].request, now, samples, replacement);
  finish(now, samples);
  return samples;
}

}  // namespace rubato::tuner
