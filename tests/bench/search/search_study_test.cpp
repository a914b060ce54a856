// SPDX-License-Identifier: Apache-2.0
// What the study of the search rests on: its truths cost what they say, its loads are what they are called, and its measures are
// right where they can be worked out by hand.
#include <gtest/gtest.h>

#include "tests/bench/search/table.h"

namespace rubato::study {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

double seconds_of(TruthKind kind, const policies::StepFeatures& features, std::optional<std::int32_t> bucket = {},
                  TimePoint begin = {}) {
  return to_seconds(Truth(kind).duration({.lane = {}, .features = &features, .bucket = bucket, .begin = begin, .draw = 0.5}));
}

TEST(SearchStudy, a_step_costs_the_roofline_and_its_shape) {
  policies::StepFeatures decode;
  decode.add_decode(1000);
  EXPECT_NEAR(seconds_of(TruthKind::Nominal, decode), 1.2e-3 + 4.3e-3 + 36e-6 + 4e-6, 1e-8);
  policies::StepFeatures prefill;
  prefill.add_chunk(0, 1000);
  EXPECT_NEAR(seconds_of(TruthKind::Nominal, prefill, 1024), 1.2e-3 + 1024 * 26e-6 + 1e6 * 1.2e-9, 1e-8);
}

TEST(SearchStudy, every_truth_differs_from_the_nominal_one_as_it_says) {
  policies::StepFeatures step;
  step.add_chunk(0, 1000);
  const double nominal = seconds_of(TruthKind::Nominal, step, 1024);
  EXPECT_NEAR(seconds_of(TruthKind::Faster, step, 1024), 0.7 * nominal, 1e-8);
  EXPECT_NEAR(seconds_of(TruthKind::Slower, step, 1024), 1.3 * nominal, 1e-8);
  EXPECT_NEAR(seconds_of(TruthKind::NoAttention, step, 1024), nominal - 1.2e-3, 1e-8);
  EXPECT_NEAR(seconds_of(TruthKind::Overhead, step, 1024), nominal + 2e-3, 1e-8);
  EXPECT_NEAR(seconds_of(TruthKind::Quirk, step, 1024), 1.6 * nominal, 1e-8);
  EXPECT_NEAR(seconds_of(TruthKind::Quirk, step, 1280), seconds_of(TruthKind::Nominal, step, 1280), 1e-8);
  EXPECT_NEAR(seconds_of(TruthKind::Drift, step, 1024, TimePoint{} + seconds(3600)), 1.2 * nominal, 1e-6);
  EXPECT_NEAR(seconds_of(TruthKind::Drift, step, 1024, TimePoint{} + seconds(7199)), nominal, 1e-4);
}

TEST(SearchStudy, normal_quantiles_are_those_of_the_tables) {
  EXPECT_NEAR(normal_quantile(0.5), 0, 1e-3);
  EXPECT_NEAR(normal_quantile(0.975), 1.96, 1e-3);
  EXPECT_NEAR(normal_quantile(0.01), -2.326, 1e-3);
}

TEST(SearchStudy, traffic_comes_at_its_rate_in_order_and_the_same_for_the_same_seed) {
  const Traces traces;
  for (const Workload& workload : all_workloads()) {
    SCOPED_TRACE(workload.name);
    const auto traffic = make_traffic(traces, workload, 10, TimePoint{} + seconds(5), seconds(200), 3);
    EXPECT_NEAR(static_cast<double>(traffic.size()), 2000, 150);
    EXPECT_GE(traffic.front().arrival, TimePoint{} + seconds(5));
    EXPECT_LT(traffic.back().arrival, TimePoint{} + seconds(205));
    for (std::size_t i = 1; i < traffic.size(); ++i) ASSERT_LT(traffic[i - 1].arrival, traffic[i].arrival);
    EXPECT_EQ(traffic, make_traffic(traces, workload, 10, TimePoint{} + seconds(5), seconds(200), 3));
    EXPECT_NE(traffic, make_traffic(traces, workload, 10, TimePoint{} + seconds(5), seconds(200), 4));
  }
}

TEST(SearchStudy, a_node_with_room_serves_all_and_an_overloaded_one_does_not) {
  const Traces traces;
  const Truth truth(TruthKind::Nominal);
  const Workload& retrieval = *workload_named("retrieval");
  const SteadyOptions options{.warm = seconds(5), .measured = seconds(20), .after = seconds(5)};
  KnobValues knobs = default_settings();
  knobs.max_num_batched_tokens = 1024;
  const auto light = make_traffic(traces, retrieval, 1, TimePoint{}, seconds(30), 1);
  EXPECT_GT(steady_share(light, truth, knobs, options).share, 0.9);
  const auto heavy = make_traffic(traces, retrieval, 40, TimePoint{}, seconds(30), 1);
  EXPECT_LT(steady_share(heavy, truth, knobs, options).share, 0.3);
}

TEST(SearchStudy, a_share_below_the_floor_is_cut_short_and_stays_an_upper_bound) {
  const Traces traces;
  const Truth truth(TruthKind::Nominal);
  const auto heavy = make_traffic(traces, *workload_named("retrieval"), 14, TimePoint{}, seconds(40), 1);
  SteadyOptions options{.warm = seconds(5), .measured = seconds(25), .after = seconds(10)};
  const SteadyShare whole = steady_share(heavy, truth, default_settings(), options);
  options.floor = 0.95;
  const SteadyShare cut = steady_share(heavy, truth, default_settings(), options);
  EXPECT_TRUE(whole.exact);
  EXPECT_FALSE(cut.exact);
  EXPECT_LT(cut.share, 0.95);
  EXPECT_GE(cut.share, whole.share);
}

TEST(SearchStudy, a_plan_is_followed_and_every_request_of_the_horizon_is_judged_once) {
  const Traces traces;
  const Truth truth(TruthKind::Nominal);
  const auto traffic = make_traffic(traces, *workload_named("retrieval"), 2, TimePoint{}, seconds(80), 1);
  KnobValues other = default_settings();
  other.max_num_batched_tokens = 512;
  const auto controller = follow({{.at = TimePoint{} + seconds(30), .knobs = other}});
  const NodeRun run = run_node(traffic, truth, *controller,
                               {.initial = default_settings(), .seed = 1, .horizon = seconds(60), .slot = seconds(20)});
  ASSERT_EQ(run.changes.size(), 2U);
  EXPECT_EQ(run.changes[1].at, TimePoint{} + seconds(30));
  EXPECT_EQ(run.changes[1].knobs, other);
  std::int64_t expected = 0;
  for (const tuner::TrafficRequest& one : traffic) expected += one.arrival < TimePoint{} + seconds(60) ? 1 : 0;
  EXPECT_EQ(run.requests(), expected);
  EXPECT_EQ(run.slots.size(), 3U);
}

TEST(SearchStudy, additive_increase_halves_after_wide_gaps_alone) {
  const auto controller = aimd({.objectives = {.ttft = seconds(1), .itl = milliseconds(40)}});
  tuner::Window window;
  window.itl_p99 = milliseconds(41);
  EXPECT_EQ(controller->on_window(window)->knobs.max_num_batched_tokens, 1024);
  window.itl_p99 = milliseconds(40);
  EXPECT_EQ(controller->on_window(window)->knobs.max_num_batched_tokens, 1280);
}

TEST(SearchStudy, records_survive_json_and_never_is_not_a_number_of_windows) {
  Record record;
  record.workload = "chat";
  record.truth = "nominal";
  record.space = "full";
  record.row = "ours";
  record.seed = 3;
  record.lost = 1.5;
  const auto read = records_from_json(to_json({record}, Clocked::No).dump());
  ASSERT_TRUE(read) << read.error().message;
  EXPECT_FALSE(read->front().windows);
  EXPECT_EQ(read->front().lost, 1.5);
  EXPECT_NE(to_markdown(*read).find("| ours | never | never | 1.50 |"), std::string::npos);
  EXPECT_FALSE(records_from_json("[{}]"));
}

TEST(SearchStudy, quantiles_are_by_nearest_rank) {
  EXPECT_EQ(quantile({4, 1, 3, 2}, 0.5), 2);
  EXPECT_EQ(quantile({4, 1, 3, 2}, 0.9), 4);
}

}  // namespace
}  // namespace rubato::study
