// SPDX-License-Identifier: Apache-2.0
// Costs of steps and loads that the tests of the simulation run.
#pragma once

#include <cmath>
#include <cstdint>
#include <vector>

#include "tuner/twin/counter_draw.h"
#include "tuner/twin/simulation.h"

namespace rubato::tuner {

using namespace std::chrono_literals;

inline TimePoint at(Duration since_start) {
  return TimePoint(since_start);
}

/// 10 ms and 1 ms per token that the device computes, at the whole device; in proportion longer at a share of it.
struct PlainCost final : StepCost {
  [[nodiscard]] Duration duration(const SimulatedStep& step) const override {
    return Duration(10ms + step.bucket.value_or(step.features->tokens) * 1ms) * 100 / step.share_percent;
  }
};

/// Of all features, with noise.
struct NoisyCost final : StepCost {
  [[nodiscard]] Duration duration(const SimulatedStep& step) const override {
    const policies::StepFeatures& features = *step.features;
    const double seconds = 0.004 + 40e-6 * features.tokens + 1e-8 * features.attention + 1e-7 * features.context;
    return from_seconds(seconds * (0.7 + 0.6 * step.draw) * 100.0 / step.share_percent);
  }
};

inline KnobValues decodes_first(std::int32_t budget) {
  return {.max_num_batched_tokens = budget, .max_num_seqs = 16, .priority_policy = PriorityPolicy::DecodeFirst};
}

inline KnobValues disaggregated(std::int32_t budget) {
  KnobValues knobs = decodes_first(budget);
  knobs.mode = Mode::Disaggregated;
  return knobs;
}

inline SimulationOptions options_for(const KnobValues& knobs, std::int32_t devices = 1, std::int32_t lanes_per_device = 1) {
  return {.limits = {.each = {.max_model_len = 4096, .max_num_seqs = 16, .max_waiting = 512, .block_count = 512},
                     .devices = devices,
                     .lanes_per_device = lanes_per_device},
          .initial = knobs};
}

inline TrafficRequest request(Duration arrival, std::int32_t prompt, std::int32_t output) {
  return {.arrival = at(arrival),
          .prompt_tokens = prompt,
          .output_tokens = output,
          .max_new_tokens = output,
          .ttft_target = 1s,
          .itl_target = 100ms};
}

/// Poisson arrivals, prompts of 1 to 300 tokens, outputs of 1 to 80.
inline std::vector<TrafficRequest> random_traffic(std::uint64_t seed, std::int32_t count, double rate) {
  std::vector<TrafficRequest> requests;
  double time = 0;
  for (std::int32_t i = 0; i < count; ++i) {
    const auto number = static_cast<std::uint64_t>(i);
    time -= std::log(counter_draw(seed, 1, number)) / rate;
    requests.push_back(request(from_seconds(time), 1 + static_cast<std::int32_t>(300 * counter_draw(seed, 2, number)),
                               1 + static_cast<std::int32_t>(80 * counter_draw(seed, 3, number))));
    requests.back().max_new_tokens = 100;
  }
  return requests;
}

}  // namespace rubato::tuner
