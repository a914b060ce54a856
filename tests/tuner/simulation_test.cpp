// SPDX-License-Identifier: Apache-2.0
// A node under virtual time: exact times for loads that can be worked out by hand. What must hold for any load is in
// simulation_property_test.cpp.
#include "tuner/twin/simulation.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

#include "tests/tuner/simulated_load.h"

namespace rubato::tuner {
namespace {

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
  EXPECT_EQ(ended[0].request.output_tokens, 3);
  EXPECT_EQ(simulation.steps(), 3U);
  EXPECT_EQ(simulation.now(), at(1s));
  EXPECT_TRUE(simulation.group().idle());
}

TEST(Simulation, a_prompt_is_cut_into_chunks_beside_running_decodes) {
  const PlainCost cost;
  Simulation simulation(options_for(decodes_first(32)), cost);
  simulation.add(request(0ms, 16, 10));  // first token at 26 ms
  simulation.add(request(20ms, 40, 1));  // 31 tokens until 68 ms, 9 until 88 ms, each beside one decode
  simulation.run_until(at(1s));
  const std::vector<SimulatedRequest> ended = simulation.take_requests(false);
  ASSERT_EQ(ended.size(), 2U);
  EXPECT_EQ(ended[0].request.prompt_tokens, 40) << "in the order in which they ended";
  EXPECT_EQ(ended[0].ttft, 68ms);
  EXPECT_EQ(ended[0].itl_p99, 0ms);
  EXPECT_EQ(ended[1].ttft, 26ms);
  EXPECT_EQ(ended[1].itl_p99, 42ms) << "the longest of nine gaps";
  EXPECT_EQ(simulation.steps(), 10U);

  const Window window = simulation.close();
  EXPECT_EQ(window.arrivals, 2);
  EXPECT_EQ(window.judged, 2);
  EXPECT_EQ(window.good, 2);
  EXPECT_EQ(window.ttft_p50, 26ms);
  EXPECT_EQ(window.ttft_p99, 68ms);
  EXPECT_EQ(window.itl_p50, 42ms) << "one token has no gap";
  EXPECT_DOUBLE_EQ(window.prompt_tokens_mean, 28.0);
  EXPECT_DOUBLE_EQ(window.output_tokens_mean, 5.5);
}

TEST(Simulation, two_lanes_share_their_device_only_while_both_are_in_a_step) {
  const PlainCost cost;
  Simulation simulation(options_for(disaggregated(64), 1, 2), cost);
  std::vector<StepSample> samples;
  simulation.on_step = [&](const StepSample& sample) { samples.push_back(sample); };
  simulation.add(request(0ms, 40, 5));   // prefill alone until 50 ms, then four decodes
  simulation.add(request(50ms, 40, 1));  // beside them: 22 ms each until 138 ms; 12 % of the prefill is left, 6 ms alone
  simulation.run_until(at(1s));
  const std::vector<SimulatedRequest> ended = simulation.take_requests(false);
  ASSERT_EQ(ended.size(), 2U);
  EXPECT_EQ(ended[0].ttft, 50ms);
  EXPECT_EQ(ended[0].itl_p99, 22ms);
  EXPECT_EQ(ended[1].ttft, 94ms);
  ASSERT_EQ(samples.size(), 6U);
  EXPECT_EQ(samples[0].lane, 1);
  EXPECT_EQ(samples[0].share_percent, 100);
  EXPECT_EQ(samples[1].lane, 0);
  EXPECT_EQ(samples[1].share_percent, 50);
  EXPECT_EQ(samples[5].lane, 1);
  EXPECT_EQ(samples[5].share_percent, 50) << "for most of its time";
  EXPECT_EQ(samples[5].duration, 94ms);
}

TEST(Simulation, the_share_of_the_prefilling_lane_is_the_knob) {
  const PlainCost cost;
  KnobValues knobs = disaggregated(64);
  knobs.prefill_share = 80;
  Simulation simulation(options_for(knobs, 1, 2), cost);
  simulation.add(request(0ms, 40, 3));
  simulation.add(request(50ms, 40, 1));  // 50 ms of work at 80 %: 62.5 ms, while a decode of 11 ms at 20 % takes 55 ms
  simulation.run_until(at(1s));
  const std::vector<SimulatedRequest> ended = simulation.take_requests(false);
  ASSERT_EQ(ended.size(), 2U);
  EXPECT_EQ(ended[0].ttft, 62500us) << "beside two decodes throughout";
  // The second decode began at 105 ms and had 7.5 of its 55 ms when it became alone; the rest of its work takes a fifth.
  EXPECT_EQ(ended[1].itl_p99, 55ms);
  EXPECT_EQ(simulation.steps(), 4U);
}

TEST(Simulation, between_devices_blocks_take_their_time) {
  const PlainCost cost;
  SimulationOptions options = options_for(disaggregated(64), 2, 1);
  options.handoff_per_block = 2ms;
  Simulation simulation(options, cost);
  simulation.add(request(0ms, 40, 3));  // three blocks: 6 ms
  simulation.run_until(at(1s));
  const std::vector<SimulatedRequest> ended = simulation.take_requests(false);
  ASSERT_EQ(ended.size(), 1U);
  EXPECT_EQ(ended[0].ttft, 50ms);
  EXPECT_EQ(ended[0].itl_p99, 17ms);
  EXPECT_EQ(simulation.group().handoffs().copied, 1U);
  EXPECT_EQ(simulation.group().handoffs().blocks, 3U);
}

TEST(Simulation, steps_run_in_the_shapes_of_the_budget_of_the_moment) {
  const PlainCost cost;
  SimulationOptions options = options_for(decodes_first(64));
  options.shapes = true;
  Simulation simulation(options, cost);
  std::vector<StepSample> samples;
  simulation.on_step = [&](const StepSample& sample) { samples.push_back(sample); };
  simulation.add(request(0ms, 60, 2));
  simulation.add(request(500ms, 60, 1));
  simulation.run_until(at(500ms));
  simulation.apply(decodes_first(61));
  simulation.run_until(at(1s));
  ASSERT_EQ(samples.size(), 3U);
  EXPECT_EQ(samples[0].features.tokens, 60) << "without padding";
  EXPECT_EQ(samples[0].bucket, 64);
  EXPECT_EQ(samples[1].bucket, 8);
  EXPECT_EQ(samples[2].bucket, 61);
  EXPECT_EQ(samples[0].duration, 74ms) << "the device computes the padding, too";
}

TEST(Simulation, settings_are_current_from_the_next_step_on) {
  const PlainCost cost;
  Simulation simulation(options_for(decodes_first(32)), cost);
  std::vector<std::int32_t> tokens;
  simulation.on_step = [&](const StepSample& sample) { tokens.push_back(sample.features.tokens); };
  simulation.add(request(0ms, 192, 1));
  simulation.run_until(at(60ms));  // in the second step
  simulation.apply(decodes_first(128));
  EXPECT_EQ(simulation.knobs().max_num_batched_tokens, 128);
  simulation.run_until(at(1s));
  EXPECT_EQ(tokens, (std::vector<std::int32_t>{32, 32, 128}));
  EXPECT_EQ(simulation.close().settings_number, 2U);
}

TEST(Simulation, idle_time_costs_no_step) {
  const PlainCost cost;
  Simulation simulation(options_for(decodes_first(64)), cost);
  for (int day = 0; day < 100; ++day) simulation.add(request(day * 24h, 40, 2));
  simulation.run_until(at(101 * 24h));
  EXPECT_EQ(simulation.steps(), 200U);
  for (const SimulatedRequest& one : simulation.take_requests(false)) EXPECT_EQ(one.ttft, 50ms);
}

TEST(Simulation, what_happens_at_the_end_belongs_to_what_follows) {
  const PlainCost cost;
  Simulation simulation(options_for(decodes_first(64)), cost);
  simulation.add(request(0ms, 40, 1));
  simulation.run_until(at(50ms));
  EXPECT_EQ(simulation.steps(), 0U);
  simulation.add(request(50ms, 20, 1));
  simulation.run_until(at(50ms + 1ns));
  EXPECT_EQ(simulation.steps(), 1U);
  simulation.run_until(at(1s));
  EXPECT_EQ(simulation.take_requests(false).back().ttft, 30ms) << "it was in the step that began at 50 ms";
}

TEST(Simulation, the_door_rejects_more_than_may_be_outstanding) {
  const PlainCost cost;
  SimulationOptions options = options_for(decodes_first(64));
  options.outstanding_max = 2;
  Simulation simulation(options, cost);
  for (int i = 0; i < 4; ++i) simulation.add(request(i * 1ms, 40, 2));
  simulation.add(request(500ms, 40, 2));
  simulation.run_until(at(1s));
  const std::vector<SimulatedRequest> all = simulation.take_requests(false);
  ASSERT_EQ(all.size(), 5U);
  EXPECT_TRUE(all[0].rejected && all[1].rejected);
  EXPECT_EQ(all[0].request.arrival, at(2ms));
  EXPECT_TRUE(all[2].ended && all[3].ended && all[4].ended);
  EXPECT_FALSE(all[0].ttft.has_value());
  const Window window = simulation.close();
  EXPECT_EQ(window.rejected, 2);
  EXPECT_EQ(window.judged, 5);
  EXPECT_EQ(window.good, 3);
}

TEST(Simulation, a_request_that_no_pool_could_hold_is_rejected) {
  const PlainCost cost;
  Simulation simulation(options_for(decodes_first(64)), cost);
  simulation.add(request(0ms, 4096, 1));
  simulation.run_until(at(1s));
  EXPECT_TRUE(simulation.take_requests(false).at(0).rejected);
  EXPECT_EQ(simulation.steps(), 0U);
}

TEST(Simulation, a_sequence_ends_at_its_output_not_at_what_it_was_allowed) {
  const PlainCost cost;
  Simulation simulation(options_for(decodes_first(64)), cost);
  TrafficRequest one = request(0ms, 16, 4);
  one.max_new_tokens = 1000;
  simulation.add(one);
  one.arrival = at(1s);
  one.output_tokens = 2000;
  one.max_new_tokens = 3;
  simulation.add(one);
  simulation.run_until(at(2s));
  const std::vector<SimulatedRequest> ended = simulation.take_requests(false);
  ASSERT_EQ(ended.size(), 2U);
  EXPECT_EQ(ended[0].request.output_tokens, 4);
  EXPECT_EQ(ended[1].request.output_tokens, 3);
  EXPECT_EQ(simulation.steps(), 7U);
}

TEST(Simulation, the_p99_gap_is_the_nearest_rank_over_all_gaps) {
  for (const std::int32_t output : {2, 100, 101, 102, 250, 1000}) {
    const NoisyCost cost;
    Simulation simulation(options_for(decodes_first(64)), cost);
    std::vector<Duration> gaps;
    simulation.on_step = [&](const StepSample& sample) { gaps.push_back(sample.duration); };
    simulation.add(request(0ms, 40, output));
    simulation.run_until(at(60s));
    gaps.erase(gaps.begin());  // the first token has no gap
    std::sort(gaps.begin(), gaps.end());
    const std::size_t rank = (gaps.size() * 99 + 99) / 100;
    EXPECT_EQ(simulation.take_requests(false).at(0).itl_p99, gaps[rank - 1]) << output << " tokens";
  }
}

struct KnownCost final : StepCost {
  KnownCost() {
    for (std::int32_t i = 0; i < 200; ++i) {
      policies::StepFeatures features;
      features.add_chunk(7 * (i % 11), 1 + 13 * (i % 17));
      model.observe(features, 10ms + features.tokens * 1ms);
    }
  }
  [[nodiscard]] Duration duration(const SimulatedStep& step) const override { return 20ms + step.features->tokens * 2ms; }
  [[nodiscard]] const policies::StepTimeModel* step_time(LaneIndex lane) const override {
    return lane.value == 0 ? &model : nullptr;
  }
  policies::StepTimeModel model;
};

TEST(Simulation, schedulers_start_with_what_is_known_of_step_times_and_learn_where_they_may) {
  const KnownCost cost;
  SimulationOptions options = options_for(decodes_first(64), 1, 2);
  for (const bool learns : {false, true}) {
    options.learns = learns;
    Simulation simulation(options, cost);
    EXPECT_EQ(simulation.group().step_time(LaneIndex{0}).coefficients(), cost.model.coefficients());
    EXPECT_EQ(simulation.group().step_time(LaneIndex{1}).observation_count(), 0U) << "nothing is known of the second";
    for (const TrafficRequest& one : random_traffic(1, 20, 1)) simulation.add(one);
    simulation.run_until(at(100s));
    const policies::StepTimeModel& after = simulation.group().step_time(LaneIndex{0});
    EXPECT_EQ(after.coefficients() == cost.model.coefficients(), !learns);
    EXPECT_EQ(after.observation_count(), cost.model.observation_count() + (learns ? simulation.steps() : 0));
  }
}

TEST(Simulation, unfinished_requests_are_told_with_what_they_got) {
  const PlainCost cost;
  Simulation simulation(options_for(decodes_first(64)), cost);
  simulation.add(request(0ms, 40, 100));
  simulation.add(request(1ms, 60, 100));
  simulation.run_until(at(85ms));  // the first at 50, 61 ms beside a chunk that the budget cuts to 63 tokens
  EXPECT_TRUE(simulation.take_requests(false).empty());
  const std::vector<SimulatedRequest> all = simulation.take_requests(true);
  ASSERT_EQ(all.size(), 2U);
  EXPECT_FALSE(all[0].ended);
  EXPECT_EQ(all[0].ttft, 50ms);
  EXPECT_FALSE(all[0].request.ended);
  EXPECT_FALSE(all[1].ttft.has_value());
  const Window window = simulation.so_far();
  EXPECT_EQ(window.judged, 1) << "the other is not late yet";
  EXPECT_EQ(window.oldest_wait, 84ms);
}

}  // namespace
}  // namespace rubato::tuner
