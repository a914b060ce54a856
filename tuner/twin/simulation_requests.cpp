// SPDX-License-Identifier: Apache-2.0
// Requests of a simulation: how they come in, what they get, and what is known of them afterwards.
#include <algorithm>
#include <functional>

#include "manifests/check.h"
#include "tuner/twin/simulation_state.h"

namespace rubato::tuner {

void LargestGaps::begin(std::int32_t gaps_max) {
  count_ = 0;
  kept_max_ = static_cast<std::size_t>(std::max(gaps_max, 0)) / 100 + 1;
  largest_ = Duration::zero();
  kept_.clear();
  if (kept_max_ > 1) kept_.reserve(kept_max_);
}

void LargestGaps::keep(Duration gap) {
  if (kept_.size() == kept_max_) {
    std::pop_heap(kept_.begin(), kept_.end(), std::greater<>());
    kept_.pop_back();
  }
  kept_.push_back(gap);
  std::push_heap(kept_.begin(), kept_.end(), std::greater<>());
}

Duration LargestGaps::percentile_99() const {
  if (kept_max_ == 1) return largest_;
  if (count_ == 0) return Duration::zero();
  std::vector<Duration> sorted = kept_;
  const auto nth = sorted.begin() + static_cast<std::ptrdiff_t>(count_ / 100);
  std::nth_element(sorted.begin(), nth, sorted.end(), std::greater<>());
  return *nth;
}

void Simulation::State::add(const TrafficRequest& request) {
  const TimePoint last = coming.empty() ? now : coming.back().arrival;
  CHECK(request.arrival >= last, "a request arrives ", to_seconds(last - request.arrival), " s before the one added last");
  TrafficRequest bounded = request;
  bounded.prompt_tokens = std::max(request.prompt_tokens, 1);
  bounded.max_new_tokens = std::max(request.max_new_tokens, 1);
  bounded.output_tokens = std::clamp(request.output_tokens, 1, bounded.max_new_tokens);
  coming.push_back(bounded);
}

void Simulation::State::arrive(const TrafficRequest& request) {
  if (options.outstanding_max > 0 && outstanding >= options.outstanding_max) return reject(request);
  if (free_slots.empty()) {
    CHECK(running.size() <= slot_mask, "requests in flight: ", running.size());
    free_slots.push_back(static_cast<std::uint32_t>(running.size()));
    running.emplace_back();
  }
  const std::uint32_t slot = free_slots.back();
  const SequenceId id{next_id << slot_bits | slot};
  const policies::SequenceRequest entry{.id = id,
                                        .arrival = request.arrival,
                                        .prompt_tokens = request.prompt_tokens,
                                        .max_new_tokens = request.max_new_tokens,
                                        .ttft_target = request.ttft_target,
                                        .itl_target = request.itl_target};
  if (!group.add(entry)) return reject(request);
  free_slots.pop_back();
  ++next_id;
  ++outstanding;
  Running& entered = running[slot];
  entered.request = request;
  entered.place = cut.arrived({.arrival = request.arrival, .ttft_target = request.ttft_target, .itl_target = request.itl_target},
                              request.prompt_tokens);
  entered.ttft.reset();
  entered.sampled = 0;
  entered.live = true;
  entered.gaps.begin(request.output_tokens - 1);
}

void Simulation::State::reject(const TrafficRequest& request) {
  cut.rejected(1);
  SimulatedRequest result;
  result.request = request;
  result.rejected = true;
  keep_result(result);
}

bool Simulation::State::take_token(std::uint32_t slot) {
  Running& one = running[slot];
  RequestSoFar& so_far = cut.at(one.place);
  if (one.sampled++ == 0) {
    one.ttft = now - one.request.arrival;
    so_far.first_token(*one.ttft);
  } else {
    const Duration gap = now - one.last_token;
    so_far.gap(gap);
    one.gaps.add(gap);
  }
  one.last_token = now;
  return one.sampled >= one.request.output_tokens;
}

void Simulation::State::end(std::uint32_t slot) {
  Running& one = running[slot];
  SimulatedRequest result = result_of(one);
  result.ended = true;
  const bool ttft_missed = *result.ttft > one.request.ttft_target;
  const bool itl_missed = result.itl_p99 > one.request.itl_target;
  cut.ended(one.place, {.arrival = one.request.arrival,
                        .ttft = *result.ttft,
                        .itl_p99 = result.itl_p99,
                        .output_tokens = one.sampled,
                        .ttft_missed = ttft_missed,
                        .itl_missed = itl_missed,
                        .good = !ttft_missed && !itl_missed});
  keep_result(result);
  one.live = false;
  free_slots.push_back(slot);
  --outstanding;
}

SimulatedRequest Simulation::State::result_of(const Running& one) const {
  SimulatedRequest result;
  result.request = one.request;
  result.request.output_tokens = std::max(one.sampled, 1);
  result.request.ended = one.sampled >= one.request.output_tokens;
  result.ttft = one.ttft;
  result.itl_p99 = one.gaps.percentile_99();
  return result;
}

void Simulation::State::keep_result(const SimulatedRequest& result) {
  if (results.size() == results_max) results.pop_front();
  results.push_back(result);
}

std::vector<SimulatedRequest> Simulation::take_requests(bool unfinished) {
  std::vector<SimulatedRequest> taken(state_->results.begin(), state_->results.end());
  state_->results.clear();
  if (!unfinished) return taken;
  const std::size_t ended = taken.size();
  for (const State::Running& one : state_->running) {
    if (one.live) taken.push_back(state_->result_of(one));
  }
  std::stable_sort(
      taken.begin() + static_cast<std::ptrdiff_t>(ended), taken.end(),
      [](const SimulatedRequest& left, const SimulatedRequest& right) { return left.request.arrival < right.request.arrival; });
  return taken;
}

}  // namespace rubato::tuner
