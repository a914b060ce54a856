// SPDX-License-Identifier: Apache-2.0
// A node under virtual time: exact times for loads that can be worked out by hand, and what must hold for any load.
#include "tuner/twin/simulation.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "tuner/twin/counter_draw.h"

namespace rubato::tuner {
namespace {

using namespace std::chrono_literals;

TimePoint at(Duration since_start) {
  return TimePoint(since_start);
}

/// 10 ms and 1 ms per token at the whole device; in proportion longer at a share of it.
struct PlainCost final : StepCost {
  [[nodiscard]] Duration duration(const SimulatedStep& step) const override {
    return (10ms + step.features->tokens * 1ms) * 100 / step.share_percent;
  }
};

/// The same with noise.
struct NoisyCost final : StepCost {
  [[nodiscard]] Duration duration(const SimulatedStep& step) const override {
    return from_seconds((0.004 + 20e-6 * step.features->tokens + 1e-9 * step.features->attention) * (0.7 + 0.6 * step.draw) *
                        100.0 / step.share_percent);
  }
};

SimulationOptions options_for(const KnobValues& knobs, std::int32_t devices = 1, std::int32_t lanes_per_device = 1) {
  return {.limits = {.each = {.max_model_len = 4096, .max_num_seqs = 16, .max_waiting = 256, .block_count = 4096},
                     .devices = devices,
                     .lanes_per_device = lanes_per_device},
          .initial = knobs};
}

TrafficRequest request(Duration arrival, std::int32_t prompt, std::int32_t output) {
  return {.arrival = at(arrival),
          .prompt_tokens = prompt,
          .output_tokens = output,
          .max_new_tokens = output,
          .ttft_target = 1s,
          .itl_target = 100ms};
}

TEST(Simulation, one_request_takes_the_time_of_its_steps) {
  const PlainCost cost;
  Simulation simulation(options_for({.max_num_batched_tokens = 64, .max_num_seqs = 16}), cost);
  simulation.add(request(5ms, 40, 3));
  EXPECT_TRUE(simulation.run_until(at(1s)));
  const std::vector<SimulatedRequest> ended = simulation.take_requests(false);
  ASSERT_EQ(ended.size(), 1U);
  EXPECT_TRUE(ended[0].ended);
  EXPECT_EQ(ended[0].ttft, 50ms);
  EXPECT_EQ(ended[0].itl_p99, 11ms);
  EXPECT_EQ(simulation.steps(), 3U);
  EXPECT_EQ(simulation.now(), at(1s));
  EXPECT_TRUE(simulation.group().idle());
}

}  // namespace
}  // namespace rubato::tuner
