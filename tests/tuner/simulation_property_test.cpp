// SPDX-License-Identifier: Apache-2.0
// What holds of a simulation whatever the load: the same seed gives the same bits however time is cut, every request ends, and
// the steps are those that the lane group plans for whoever calls it.
#include <gtest/gtest.h>

#include <deque>
#include <map>
#include <string>
#include <vector>

#include "tests/tuner/simulated_load.h"
#include "tuner/twin/simulation.h"

namespace rubato::tuner {
namespace {

void expect_same(const Window& left, const Window& right, const std::string& where) {
  EXPECT_EQ(left.begin, right.begin) << where;
  EXPECT_EQ(left.end, right.end) << where;
  EXPECT_EQ(left.settings_number, right.settings_number) << where;
  EXPECT_EQ(left.arrivals, right.arrivals) << where;
  EXPECT_EQ(left.judged, right.judged) << where;
  EXPECT_EQ(left.good, right.good) << where;
  EXPECT_EQ(left.rejected, right.rejected) << where;
  EXPECT_EQ(left.ttft_misses, right.ttft_misses) << where;
  EXPECT_EQ(left.itl_misses, right.itl_misses) << where;
  EXPECT_EQ(left.ttft_p50, right.ttft_p50) << where;
  EXPECT_EQ(left.ttft_p99, right.ttft_p99) << where;
  EXPECT_EQ(left.itl_p50, right.itl_p50) << where;
  EXPECT_EQ(left.itl_p99, right.itl_p99) << where;
  EXPECT_EQ(left.prompt_tokens_mean, right.prompt_tokens_mean) << where;
  EXPECT_EQ(left.output_tokens_mean, right.output_tokens_mean) << where;
  EXPECT_EQ(left.arrival_interval_cv, right.arrival_interval_cv) << where;
  EXPECT_EQ(left.oldest_wait, right.oldest_wait) << where;
  EXPECT_EQ(left.waiting_begin, right.waiting_begin) << where;
  EXPECT_EQ(left.waiting_end, right.waiting_end) << where;
}

struct NodeShape {
  const char* name;
  Mode mode;
  std::int32_t devices;
  std::int32_t lanes_per_device;
};

constexpr NodeShape node_shapes[] = {{"one lane", Mode::Chunked, 1, 1},
                                     {"two lanes, chunked", Mode::Chunked, 1, 2},
                                     {"two lanes", Mode::Disaggregated, 1, 2},
                                     {"three devices, chunked", Mode::Chunked, 3, 1},
                                     {"three devices", Mode::Disaggregated, 3, 1}};

SimulationOptions options_of(const NodeShape& shape, std::uint64_t seed, PriorityPolicy policy) {
  KnobValues knobs = decodes_first(128);
  knobs.mode = shape.mode;
  knobs.priority_policy = policy;
  SimulationOptions options = options_for(knobs, shape.devices, shape.lanes_per_device);
  options.limits.each.block_count = 64;  // few enough to preempt
  options.limits.each.max_model_len = 512;
  options.limits.each.growth_reserve_tokens = 0;
  options.handoff_per_block = 50us;
  options.outstanding_max = 80;
  options.shapes = seed % 2 == 0;
  options.seed = seed;
  return options;
}

struct Seen {
  std::vector<Window> windows;
  std::vector<StepSample> steps;
};

/// Six windows of a second; in the middle of the third the settings change. Each window is run in pieces whose ends are drawn;
/// seed 0: at once.
Seen run(const SimulationOptions& options, const std::vector<TrafficRequest>& traffic, std::uint64_t pieces_seed) {
  const NoisyCost cost;
  Simulation simulation(options, cost);
  Seen seen;
  simulation.on_step = [&](const StepSample& sample) { seen.steps.push_back(sample); };
  if (pieces_seed == 0) {
    for (const TrafficRequest& one : traffic) simulation.add(one);
  }
  auto next = traffic.begin();
  std::uint64_t draws = 0;
  const auto run_to = [&](TimePoint until) {
    while (simulation.now() < until) {
      Duration piece = until - simulation.now();
      if (pieces_seed != 0) piece = std::min(piece, from_seconds(0.05 * counter_draw(pieces_seed, 0, ++draws)) + Duration(1));
      const TimePoint end = simulation.now() + piece;
      // Those to come are added just before they do.
      for (; pieces_seed != 0 && next != traffic.end() && next->arrival < end; ++next) simulation.add(*next);
      EXPECT_TRUE(simulation.run_until(end));
    }
  };
  simulation.open(TimePoint{});
  for (int second = 0; second < 6; ++second) {
    run_to(at(second * 1s + 500ms));
    if (second == 2) {
      KnobValues knobs = options.initial;
      knobs.max_num_batched_tokens = 64;
      knobs.prefill_share = 70;
      simulation.apply(knobs);
    }
    seen.windows.push_back(simulation.so_far());
    run_to(at(second * 1s + 1s));
    seen.windows.push_back(simulation.close());
  }
  return seen;
}

void expect_same(const Seen& left, const Seen& right, const std::string& where) {
  ASSERT_EQ(left.windows.size(), right.windows.size()) << where;
  for (std::size_t i = 0; i < left.windows.size(); ++i)
    expect_same(left.windows[i], right.windows[i], where + " window " + std::to_string(i));
  ASSERT_EQ(left.steps.size(), right.steps.size()) << where;
  for (std::size_t i = 0; i < left.steps.size(); ++i) {
    EXPECT_EQ(left.steps[i].lane, right.steps[i].lane) << where << " step " << i;
    EXPECT_EQ(left.steps[i].duration, right.steps[i].duration) << where << " step " << i;
    EXPECT_EQ(left.steps[i].share_percent, right.steps[i].share_percent) << where << " step " << i;
  }
}

TEST(SimulationProperty, the_same_seed_gives_the_same_bits_however_time_is_cut) {
  for (const NodeShape& shape : node_shapes) {
    for (const std::uint64_t seed : {1, 2}) {
      const std::string where = std::string(shape.name) + ", seed " + std::to_string(seed);
      const SimulationOptions options = options_of(shape, seed, PriorityPolicy::Deadline);
      const std::vector<TrafficRequest> traffic = random_traffic(seed, 200, 35);
      const Seen once = run(options, traffic, 0);
      expect_same(once, run(options, traffic, 0), where + ", again");
      expect_same(once, run(options, traffic, 77 + seed), where + ", in pieces");
      EXPECT_GT(once.windows.back().judged, 0) << where;
      SimulationOptions other = options;
      other.seed += 10;
      EXPECT_NE(once.steps[5].duration, run(other, traffic, 0).steps[5].duration) << where;
      if (HasFailure()) return;
    }
  }
}

TEST(SimulationProperty, every_request_ends_once_under_every_policy_and_mode) {
  std::uint64_t preemptions = 0;
  for (const NodeShape& shape : node_shapes) {
    for (const PriorityPolicy policy :
         {PriorityPolicy::Deadline, PriorityPolicy::DecodeFirst, PriorityPolicy::PrefillFirst, PriorityPolicy::ShortestFirst}) {
      const std::string where = std::string(shape.name) + ", policy " + std::to_string(static_cast<int>(policy));
      const NoisyCost cost;
      Simulation simulation(options_of(shape, 3, policy), cost);
      const std::vector<TrafficRequest> traffic = random_traffic(3, 200, 40);
      for (const TrafficRequest& one : traffic) simulation.add(one);
      simulation.run_until(at(300s));
      const std::vector<SimulatedRequest> all = simulation.take_requests(true);
      std::map<TimePoint, int> times;
      for (const SimulatedRequest& one : all) {
        ++times[one.request.arrival];
        EXPECT_TRUE(one.ended != one.rejected) << where;
      }
      EXPECT_EQ(all.size(), traffic.size()) << where;
      EXPECT_EQ(times.size(), traffic.size()) << where;
      EXPECT_TRUE(simulation.group().idle()) << where;
      EXPECT_EQ(simulation.group().copies_open(), 0) << where;
      EXPECT_EQ(simulation.waiting(), 0) << where;
      simulation.group().check_integrity();
      const Window window = simulation.close();
      EXPECT_EQ(window.arrivals, 200) << where;
      EXPECT_EQ(window.judged, 200) << where;
      preemptions += simulation.group().totals().preemptions;
    }
  }
  EXPECT_GT(preemptions, 100U) << "the pools are meant to be tight";
}

/// The steps that a lane group plans for the same arrivals when it is called directly.
std::vector<StepSample> steps_of_group(const SimulationOptions& options, std::deque<TrafficRequest> traffic) {
  policies::LaneGroup group(options.limits, {.number = 1, .knobs = options.initial});
  const NoisyCost cost;
  const LaneIndex lane{0};
  std::map<SequenceId, std::int32_t> left;
  std::vector<StepSample> steps;
  TimePoint now;
  std::uint64_t ids = 0;
  while (!traffic.empty() || !group.idle()) {
    if (group.idle()) now = std::max(now, traffic.front().arrival);
    for (; !traffic.empty() && traffic.front().arrival <= now; traffic.pop_front()) {
      const TrafficRequest& one = traffic.front();
      const SequenceId id{++ids};
      EXPECT_TRUE(group.add({.id = id,
                             .arrival = one.arrival,
                             .prompt_tokens = one.prompt_tokens,
                             .max_new_tokens = one.max_new_tokens,
                             .ttft_target = one.ttft_target,
                             .itl_target = one.itl_target}));
      left[id] = one.output_tokens;
    }
    const policies::StepPlan& plan = group.plan(lane, now);
    const double draw = counter_draw(options.seed, 0, plan.step_number);
    const Duration duration = cost.duration({.lane = lane, .features = &plan.features, .begin = now, .draw = draw});
    now += duration;
    std::vector<policies::RowOutcome> outcomes;
    for (const policies::PlannedRow& row : plan.rows) {
      if (row.samples) outcomes.push_back({.id = row.id, .finished = --left[row.id] == 0});
    }
    steps.push_back({.features = plan.features, .duration = duration});
    group.complete(lane, outcomes, now, duration);
  }
  return steps;
}

TEST(SimulationProperty, its_steps_are_those_of_the_lane_group_called_directly) {
  for (const PriorityPolicy policy : {PriorityPolicy::Deadline, PriorityPolicy::ShortestFirst}) {
    SimulationOptions options = options_of(node_shapes[0], 5, policy);
    options.outstanding_max = 0;
    const std::vector<TrafficRequest> traffic = random_traffic(5, 300, 20);
    const NoisyCost cost;
    Simulation simulation(options, cost);
    std::vector<StepSample> steps;
    simulation.on_step = [&](const StepSample& sample) { steps.push_back(sample); };
    for (const TrafficRequest& one : traffic) simulation.add(one);
    simulation.run_until(at(300s));
    const std::vector<StepSample> wanted = steps_of_group(options, {traffic.begin(), traffic.end()});
    ASSERT_GT(wanted.size(), 500U);
    ASSERT_EQ(steps.size(), wanted.size());
    for (std::size_t i = 0; i < steps.size(); ++i) {
      EXPECT_EQ(steps[i].features.tokens, wanted[i].features.tokens) << "step " << i;
      EXPECT_EQ(steps[i].features.decode_rows, wanted[i].features.decode_rows) << "step " << i;
      EXPECT_EQ(steps[i].features.attention, wanted[i].features.attention) << "step " << i;
      EXPECT_EQ(steps[i].duration, wanted[i].duration) << "step " << i;
      if (HasFailure()) return;
    }
  }
}

TEST(SimulationProperty, a_run_that_is_ended_early_can_go_on_as_if_it_had_not_been) {
  const SimulationOptions options = options_of(node_shapes[2], 4, PriorityPolicy::Deadline);
  const std::vector<TrafficRequest> traffic = random_traffic(4, 300, 30);
  const NoisyCost cost;
  Simulation whole(options, cost);
  Simulation interrupted(options, cost);
  for (const TrafficRequest& one : traffic) {
    whole.add(one);
    interrupted.add(one);
  }
  EXPECT_TRUE(whole.run_until(at(8s)));
  std::int32_t asked = 0;
  EXPECT_FALSE(interrupted.run_until(at(8s), [&] { return ++asked < 3; }));
  EXPECT_EQ(asked, 3);
  EXPECT_GE(interrupted.steps(), 3 * 64U);
  EXPECT_LE(interrupted.steps(), 3 * 66U);
  EXPECT_LT(interrupted.now(), at(8s));
  EXPECT_TRUE(interrupted.run_until(at(8s), [] { return true; }));
  expect_same(whole.close(), interrupted.close(), "");
  EXPECT_EQ(whole.steps(), interrupted.steps());
}

/// Notes what it is asked.
struct NotingCost final : StepCost {
  [[nodiscard]] Duration duration(const SimulatedStep& step) const override {
    draws.push_back(step.draw);
    return 5ms + step.features->tokens * 10us;
  }
  mutable std::vector<double> draws;
};

TEST(SimulationProperty, draws_depend_on_seed_lane_and_step_alone) {
  const auto draws_of = [](std::uint64_t seed, std::int32_t budget) {
    const NotingCost cost;
    SimulationOptions options = options_for(decodes_first(budget));
    options.seed = seed;
    Simulation simulation(options, cost);
    for (const TrafficRequest& one : random_traffic(1, 100, 20)) simulation.add(one);
    simulation.run_until(at(100s));
    return cost.draws;
  };
  std::vector<double> wide = draws_of(1, 512);
  std::vector<double> narrow = draws_of(1, 32);
  ASSERT_LT(wide.size(), narrow.size());
  narrow.resize(wide.size());
  EXPECT_EQ(wide, narrow) << "the same luck under other settings";
  const std::vector<double> other = draws_of(2, 512);
  EXPECT_NE(wide, other);
  double sum = 0;
  for (const double draw : wide) {
    EXPECT_GT(draw, 0.0);
    EXPECT_LT(draw, 1.0);
    sum += draw;
  }
  EXPECT_NEAR(sum / static_cast<double>(wide.size()), 0.5, 0.05);
}

}  // namespace
}  // namespace rubato::tuner
