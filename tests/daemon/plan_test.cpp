// SPDX-License-Identifier: Apache-2.0
#include "daemon/plan.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <set>

#include "daemon/lane_threads.h"
#include "daemon/step_measurement.h"
#include "manifests/layers.h"

namespace rubato {
namespace {

using namespace std::chrono_literals;
using ::testing::AllOf;
using ::testing::HasSubstr;

/// 2 ms and 20 us a token: what a small GPU might do.
tuner::StepLaws made_up_laws() {
  tuner::StepLaws laws;
  for (int i = 0; i < 600; ++i) {
    policies::StepFeatures features;
    for (int row = 0; row < i % 17; ++row) features.add_decode(200 + 10 * (i % 7));
    if (i % 3 != 0) features.add_chunk(0, 1 + (i * 37) % 500);
    if (features.tokens == 0) features.add_decode(100);
    laws.observe({.features = features, .duration = 2ms + features.tokens * 20us});
  }
  return laws;
}

PlanQuestion question_of(std::int32_t requests, Duration gap, std::int32_t prompt, std::int32_t output) {
  PlanQuestion question;
  question.limits.each = {.max_model_len = 2048, .max_num_seqs = 32, .max_waiting = 256, .block_count = 2048};
  question.shapes = false;
  question.space.knobs.max_num_seqs = {.initial = 32, .min = 8, .max = 32};
  question.space.base = initial_knobs(question.space.knobs);
  question.space.base.max_num_batched_tokens = 64;
  question.objectives = {.ttft = 500ms, .itl = 30ms, .attainment = 95};
  question.laws = made_up_laws();
  question.workload.phases = {{.name = "trace", .start = 0s, .length = requests * gap}};
  for (std::int32_t i = 0; i < requests; ++i)
    question.workload.arrivals.push_back({.at = i * gap, .prompt_tokens = prompt, .output_tokens = output});
  return question;
}

const auto quietly = [](const std::string&) {};

TEST(Plan, traffic_is_the_trace_closer_together_less_what_the_prefix_cache_has) {
  PlanQuestion question = question_of(4, 1s, 100, 10);
  question.workload.phases = {{.name = "a", .start = 0s, .length = 2s}, {.name = "b", .start = 2s, .length = 3s}};
  question.workload.arrivals[2].phase = question.workload.arrivals[3].phase = 1;
  question.workload.arrivals[1].shared_tokens = 64;
  question.workload.arrivals[2].shared_tokens = 100;
  question.limits.each.prefix_caching.enabled = true;
  const auto phases = traffic_of(question, 2);
  ASSERT_EQ(phases.size(), 2U);
  EXPECT_EQ(phases[0].begin, TimePoint(0s));
  EXPECT_EQ(phases[0].end, TimePoint(1s));
  EXPECT_EQ(phases[1].end, TimePoint(2500ms));
  EXPECT_DOUBLE_EQ(phases[1].weight / phases[0].weight, 1.5);
  ASSERT_EQ(phases[0].requests.size(), 2U);
  EXPECT_EQ(phases[0].requests[1].arrival, TimePoint(500ms));
  EXPECT_EQ(phases[0].requests[1].prompt_tokens, 36);
  EXPECT_EQ(phases[1].requests[0].prompt_tokens, 1) << "the last token is computed in any case";
  EXPECT_EQ(phases[1].requests[0].itl_target, question.objectives.itl);
  EXPECT_TRUE(phases[1].requests[0].ended);
  question.limits.each.prefix_caching.enabled = false;
  EXPECT_EQ(traffic_of(question, 2)[0].requests[1].prompt_tokens, 100);
}

TEST(Plan, attainment_falls_with_load_and_the_limit_lies_where_it_crosses_the_objective) {
  // About 50 ms of work for each request with the initial budget, 30 with a large one: 25 a second are too many or not.
  PlanQuestion question = question_of(200, 40ms, 900, 20);
  question.future_length = 8s;
  question.futures = 2;
  const auto plan = make_plan(question, quietly);
  ASSERT_TRUE(plan) << plan.error().message;
  ASSERT_EQ(plan->loads.size(), plan_scales().size());
  EXPECT_EQ(plan->requests, 200);
  EXPECT_GT(plan->candidates, 1);
  EXPECT_GE(plan->loads.front().chosen.attainment, 0.95);
  EXPECT_GT(plan->loads.front().chosen.attainment, plan->loads.back().chosen.attainment);
  for (const PlannedLoad& load : plan->loads) {
    EXPECT_NEAR(load.rate, 25 * load.scale, 3 * load.scale) << load.scale;
    if (load.scale == 1) {
      EXPECT_GE(load.chosen.attainment + 1e-9, load.initial.attainment) << "never worse than what was there";
    }
  }
  ASSERT_TRUE(plan->holds_to);
  for (const PlannedLoad& load : plan->loads) {
    if (load.scale <= *plan->holds_to) {
      EXPECT_GE(load.chosen.attainment, 0.95) << load.scale;
    }
  }
  EXPECT_FALSE(plan->holds_further);
}

TEST(Plan, what_the_twin_cannot_answer_is_said) {
  PlanQuestion few = question_of(5, 100ms, 50, 5);
  auto plan = make_plan(few, quietly);
  ASSERT_FALSE(plan);
  EXPECT_THAT(plan.error().message, AllOf(HasSubstr("at least 20 requests"), HasSubstr("there are 5")));
  PlanQuestion unknown = question_of(100, 100ms, 50, 5);
  unknown.laws = {};
  EXPECT_FALSE(make_plan(unknown, quietly));
}

TEST(Plan, a_report_names_settings_loads_and_limit) {
  LoadPlan plan{.chosen = {.max_num_batched_tokens = 256}, .initial = {.max_num_batched_tokens = 512}, .candidates = 40};
  plan.requests = 100;
  plan.prompt_tokens = 1000;
  plan.shared_tokens = 250;
  plan.steps = 1234;
  plan.step_error = 0.042;
  tuner::Forecast forecast;
  forecast.attainment = 0.975;
  forecast.attainment_spread = 0.01;
  forecast.latency = {12ms, 345ms, 6ms, 78ms};
  plan.loads = {{.scale = 1, .rate = 8, .chosen = forecast, .initial = {}}};
  plan.holds_to = 1.25;
  const ObjectivesSpec objectives{.ttft = 500ms, .itl = 50ms, .attainment = 95};
  const std::string text = plan_text(plan, objectives, "measured");
  EXPECT_THAT(text, AllOf(HasSubstr("measured; 1234 steps, off by 4.2 %"), HasSubstr("25.0 % of the prompt tokens"),
                          HasSubstr("chosen      budget 256"), HasSubstr("initial     budget 512"),
                          HasSubstr("95 % of requests good up to 1.25 times the trace's rate, about 10 requests/s"),
                          HasSubstr("97.5 +-1.0      12ms     345ms       6ms      78ms")));
  const auto json = plan_json(plan, objectives, "measured");
  EXPECT_EQ(json["chosen"]["maxNumBatchedTokens"], 256);
  EXPECT_EQ(json["loads"][0]["chosen"]["ttftP99"], "345ms");
  EXPECT_EQ(json["highestLoad"]["scale"], "1.25");
  plan.holds_to.reset();
  EXPECT_THAT(plan_text(plan, objectives, ""), HasSubstr("at none of the loads"));
  EXPECT_FALSE(plan_json(plan, objectives, "")["highestLoad"]["found"].get<bool>());
}

TEST(StepMeasurement, learns_from_every_kind_of_step_and_in_shapes) {
  EngineSpec spec;
  spec.model.synthetic =
      SyntheticModel{.hidden_size = 32, .layers = 1, .heads = 2, .kv_heads = 1, .feed_forward = 64, .vocabulary = 64};
  spec.capacity = {.max_model_len = 256, .max_num_seqs = 8, .max_waiting = 16, .kv_cache_memory = 4 << 20, .cpu_threads = 1};
  spec.knobs.max_num_batched_tokens = {.initial = 64, .min = 32, .max = 256};
  spec.knobs.max_num_seqs = {.initial = 8, .min = 1, .max = 8};
  auto model = load_model(spec, {});
  ASSERT_TRUE(model) << model.error().message;
  const auto laws = measure_steps(*model, spec.knobs, {.length = 300ms, .seed = 3, .now = steady_now});
  ASSERT_TRUE(laws) << laws.error().message;
  EXPECT_GE(laws->observation_count(), 2 * tuner::StepLaws::law_observations_min);
  const auto found = laws->find(0, 100);
  ASSERT_NE(found.law, nullptr);
  EXPECT_TRUE(found.seen);
  policies::StepFeatures small, large;
  small.add_decode(32);
  large.add_chunk(0, 200);
  EXPECT_GT(found.law->mean(large, std::nullopt), 2 * found.law->mean(small, std::nullopt)) << "work costs time";
}

}  // namespace
}  // namespace rubato
