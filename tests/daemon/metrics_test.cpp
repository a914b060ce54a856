// SPDX-License-Identifier: Apache-2.0
#include "daemon/metrics/metrics.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <regex>
#include <set>
#include <sstream>
#include <thread>

#include "daemon/metrics/process.h"
#include "tests/daemon/control_golden.h"

namespace rubato {
namespace {

using namespace std::chrono_literals;
using ::testing::HasSubstr;
using ::testing::Not;

class MetricsTest : public ::testing::Test {
 protected:
  MetricsOptions options_{.model_name = "chat",
                          .version = "0.1.0",
                          .backend = "cpu test",
                          .objectives = {.ttft = 450ms, .itl = 35ms, .attainment = 99},
                          .max_model_len = 4096,
                          .kv_block_count = 1234,
                          .devices = {"cpu"},
                          .lanes_per_device = 2};
  Metrics metrics_{options_};
  TimePoint now_{1000s};

  std::string text() {
    now_ += 1s;  // past the lifetime of the rendering before
    return *metrics_.render(now_);
  }

  /// The value of the series written exactly so, or an empty text.
  std::string value(const std::string& series) {
    std::istringstream lines(text());
    for (std::string line; std::getline(lines, line);) {
      if (line.starts_with(series + " ")) return line.substr(series.size() + 1);
    }
    return "";
  }

  RequestRecord finished(Outcome outcome = Outcome::Stop) {
    return {.id = SequenceId{1},
            .arrival = TimePoint(10s),
            .scheduled = TimePoint(11s),
            .first_token = TimePoint(13s),
            .end = TimePoint(17s),
            .prompt_tokens = 100,
            .output_tokens = 5,
            .max_new_tokens = 16,
            .ttft_target = 5s,
            .itl_target = 2s,
            .itl_p99 = 1s,
            .itl_mean = 1s,
            .ttft_missed = false,
            .itl_missed = false,
            .outcome = outcome,
            .verdict = Verdict::Good};
  }

  engine::StepRecord step(std::int32_t tokens, std::int32_t decode_rows, std::int32_t prefill_rows) {
    engine::StepRecord record;
    record.features = {.tokens = tokens, .decode_rows = decode_rows, .prefill_rows = prefill_rows};
    record.begin = TimePoint(1s);
    record.end = TimePoint(1s + 20ms);
    record.planning = 30us;
    record.predicted = 15ms;
    record.sampled = decode_rows;
    return record;
  }
};

/// `name{label names} type`, sorted: everything a dashboard relies on, and no value.
std::string shape_of(const std::string& text) {
  std::map<std::string, std::string> types;
  std::set<std::string> shapes;
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) {
    std::smatch match;
    if (std::regex_match(line, match, std::regex("# TYPE (\\S+) (\\S+)"))) types[match[1]] = match[2];
    if (line.empty() || line[0] == '#') continue;
    const auto name_end = line.find_first_of("{ ");
    const std::string name = line.substr(0, name_end);
    std::string labels;
    if (line[name_end] == '{') {
      const std::string inside = line.substr(name_end + 1, line.rfind('}') - name_end - 1);
      const std::regex label("([a-z_]+)=\"((?:[^\"\\\\]|\\\\.)*)\"");
      for (std::sregex_iterator at(inside.begin(), inside.end(), label), end; at != end; ++at) {
        const std::string key = (*at)[1];
        const bool value_varies = key == "le" || key == "version" || key == "backend";
        labels += (labels.empty() ? "" : ",") + key + (value_varies ? "" : "=" + (*at)[2].str());
      }
    }
    std::string family = name;
    for (const char* suffix : {"_bucket", "_sum", "_count"}) {
      if (!types.contains(family) && family.ends_with(suffix))
        family = family.substr(0, family.size() - std::string(suffix).size());
    }
    shapes.insert(name + "{" + labels + "} " + types[family]);
  }
  std::string all;
  for (const auto& shape : shapes) all += shape + "\n";
  return all;
}

TEST_F(MetricsTest, names_types_and_labels_match_the_snapshot) {
  metrics_.on_settings({.number = 1, .knobs = {}}, now_);
  testing::expect_golden("metrics_series.txt", shape_of(text()));
}

TEST_F(MetricsTest, every_name_of_the_endpoint_picker_and_of_vllm_dashboards_is_there_from_the_start) {
  const std::string all = text();
  for (const char* name : {"vllm:num_requests_running",
                           "vllm:num_requests_waiting",
                           "vllm:kv_cache_usage_perc",
                           "vllm:cache_config_info",
                           "vllm:prompt_tokens_total",
                           "vllm:generation_tokens_total",
                           "vllm:request_success_total",
                           "vllm:num_preemptions_total",
                           "vllm:time_to_first_token_seconds_bucket",
                           "vllm:inter_token_latency_seconds_bucket",
                           "vllm:request_time_per_output_token_seconds_bucket",
                           "vllm:e2e_request_latency_seconds_bucket",
                           "vllm:request_queue_time_seconds_bucket",
                           "vllm:request_prefill_time_seconds_bucket",
                           "vllm:request_decode_time_seconds_bucket",
                           "vllm:request_inference_time_seconds_bucket",
                           "vllm:request_prompt_tokens_bucket",
                           "vllm:request_generation_tokens_bucket",
                           "vllm:request_max_num_generation_tokens_bucket",
                           "vllm:request_params_n_bucket",
                           "vllm:request_params_max_tokens_bucket",
                           "vllm:iteration_tokens_total_bucket"}) {
    EXPECT_THAT(all, HasSubstr("\n" + std::string(name) + "{")) << name;
  }
  EXPECT_THAT(all, HasSubstr("vllm:cache_config_info{block_size=\"16\",enable_prefix_caching=\"False\",engine=\"0\",model_name="
                             "\"chat\",num_gpu_blocks=\"1234\"} 1"));
}

TEST_F(MetricsTest, no_family_appears_twice_and_each_has_a_help_text) {
  std::set<std::string> typed, helped;
  std::istringstream lines(text());
  for (std::string line; std::getline(lines, line);) {
    if (line.starts_with("# TYPE ")) {
      EXPECT_TRUE(typed.insert(line.substr(7, line.find(' ', 7) - 7)).second) << line;
    }
    if (line.starts_with("# HELP ")) {
      helped.insert(line.substr(7, line.find(' ', 7) - 7));
      EXPECT_GT(line.size(), line.find(' ', 7) + 5) << line;
    }
  }
  EXPECT_EQ(typed, helped);
  EXPECT_GT(typed.size(), 50U);
}

TEST_F(MetricsTest, own_counters_end_in_total_and_gauges_do_not) {
  std::istringstream lines(text());
  for (std::string line; std::getline(lines, line);) {
    std::smatch match;
    if (!std::regex_match(line, match, std::regex("# TYPE ((?:rubato|process)_\\S+) (\\S+)"))) continue;
    EXPECT_EQ(match[2] == "counter", match[1].str().ends_with("_total")) << line;
    EXPECT_EQ(match[1].str().find("_milli"), std::string::npos) << "base units only: " << line;
  }
}

TEST_F(MetricsTest, objectives_of_the_start_are_inclusive_bucket_edges) {
  metrics_.on_first_token(Arrival{.id = {1}, .time = {}, .prompt_tokens = 100}, 450ms);
  metrics_.on_first_token(Arrival{.id = {2}, .time = {}, .prompt_tokens = 100}, 450ms + 1ns);
  metrics_.on_token_gap({1}, 35ms);
  metrics_.on_token_gap({1}, 36ms);
  EXPECT_EQ(value("rubato_time_to_first_token_seconds_bucket{le=\"0.45\"}"), "1");
  EXPECT_EQ(value("rubato_time_to_first_token_seconds_count"), "2");
  EXPECT_EQ(value("rubato_inter_token_latency_seconds_bucket{le=\"0.035\"}"), "1");
}

TEST_F(MetricsTest, a_reload_of_the_objectives_changes_the_gauge_but_no_edge) {
  const std::string before = shape_of(text());
  std::set<std::string> edges_before, edges_after;
  const auto edges = [](const std::string& all) {
    std::set<std::string> found;
    const std::regex edge("(\\S+_bucket\\{\\S*le=\"[^\"]+\"\\})");
    for (std::sregex_iterator at(all.begin(), all.end(), edge), end; at != end; ++at) found.insert((*at)[1]);
    return found;
  };
  edges_before = edges(text());
  metrics_.on_first_token(Arrival{.id = {1}, .time = {}, .prompt_tokens = 100}, 450ms);
  metrics_.set_objectives({.ttft = 333ms, .itl = 7ms, .attainment = 95});
  metrics_.on_manifest_reload({});
  edges_after = edges(text());
  EXPECT_EQ(edges_before, edges_after);
  EXPECT_EQ(value("rubato_objective_seconds{objective=\"ttft\"}"), "0.333");
  EXPECT_EQ(value("rubato_objective_attainment_ratio"), "0.95");
  EXPECT_EQ(value("rubato_time_to_first_token_seconds_count"), "1") << "counters survive a reload";
  EXPECT_EQ(before, shape_of(text()));
}

TEST_F(MetricsTest, own_edges_reach_from_below_a_millisecond_to_beyond_two_minutes) {
  metrics_.on_token_gap({1}, 400us);
  metrics_.on_first_token(Arrival{.id = {1}, .time = {}, .prompt_tokens = 100}, 90s);
  EXPECT_EQ(value("rubato_inter_token_latency_seconds_bucket{le=\"0.0005\"}"), "1");
  EXPECT_EQ(value("rubato_inter_token_latency_seconds_bucket{le=\"120\"}"), "1");
  EXPECT_EQ(value("rubato_time_to_first_token_seconds_bucket{le=\"80\"}"), "0");
  EXPECT_EQ(value("rubato_time_to_first_token_seconds_bucket{le=\"160\"}"), "1");
}

TEST_F(MetricsTest, times_of_a_finished_request_are_split_at_schedule_and_first_token) {
  metrics_.on_request_end(finished());
  const std::string labels = "{engine=\"0\",model_name=\"chat\"}";
  EXPECT_EQ(value("vllm:request_queue_time_seconds_sum" + labels), "1");
  EXPECT_EQ(value("vllm:request_prefill_time_seconds_sum" + labels), "2");
  EXPECT_EQ(value("vllm:request_decode_time_seconds_sum" + labels), "4");
  EXPECT_EQ(value("vllm:request_inference_time_seconds_sum" + labels), "6");
  EXPECT_EQ(value("vllm:e2e_request_latency_seconds_sum" + labels), "7");
  EXPECT_EQ(value("vllm:request_time_per_output_token_seconds_sum" + labels), "1");
  EXPECT_EQ(value("vllm:request_prompt_tokens_sum" + labels), "100");
  EXPECT_EQ(value("vllm:request_generation_tokens_sum" + labels), "5");
}

TEST_F(MetricsTest, a_single_token_answer_adds_no_time_per_output_token) {
  RequestRecord record = finished(Outcome::Length);
  record.output_tokens = 1;
  metrics_.on_request_end(record);
  EXPECT_EQ(value("vllm:request_time_per_output_token_seconds_count{engine=\"0\",model_name=\"chat\"}"), "0");
}

TEST_F(MetricsTest, slo_counters_follow_the_verdict_and_the_part_that_missed) {
  metrics_.on_request_end(finished());
  RequestRecord late = finished();
  late.ttft_missed = true;
  late.verdict = Verdict::Bad;
  metrics_.on_request_end(late);
  RequestRecord jerky = finished(Outcome::Length);
  jerky.itl_missed = true;
  jerky.verdict = Verdict::Bad;
  metrics_.on_request_end(jerky);
  const auto slo = [&](const char* objective, const char* result) {
    return value("rubato_slo_requests_total{objective=\"" + std::string(objective) + "\",result=\"" + result + "\"}");
  };
  EXPECT_EQ(slo("both", "good"), "1");
  EXPECT_EQ(slo("both", "bad"), "2");
  EXPECT_EQ(slo("ttft", "good"), "2");
  EXPECT_EQ(slo("ttft", "bad"), "1");
  EXPECT_EQ(slo("itl", "good"), "2");
  EXPECT_EQ(slo("itl", "bad"), "1");
}

TEST_F(MetricsTest, an_aborted_request_that_missed_nothing_is_not_judged_and_has_its_own_counter) {
  RequestRecord aborted = finished(Outcome::Aborted);
  aborted.verdict = Verdict::Unjudged;
  aborted.first_token.reset();
  metrics_.on_request_end(aborted);
  EXPECT_EQ(value("rubato_slo_requests_total{objective=\"both\",result=\"good\"}"), "0");
  EXPECT_EQ(value("rubato_slo_requests_total{objective=\"both\",result=\"bad\"}"), "0");
  EXPECT_EQ(value("rubato_slo_requests_total{objective=\"ttft\",result=\"good\"}"), "0");
  EXPECT_EQ(value("rubato_slo_requests_total{objective=\"itl\",result=\"good\"}"), "0");
  EXPECT_EQ(value("rubato_requests_total{outcome=\"aborted\"}"), "1");
  EXPECT_EQ(value("vllm:request_success_total{engine=\"0\",finished_reason=\"abort\",model_name=\"chat\"}"), "1");
  EXPECT_EQ(value("vllm:e2e_request_latency_seconds_count{engine=\"0\",model_name=\"chat\"}"), "0");
}

TEST_F(MetricsTest, refused_and_failed_requests_count_against_the_objective) {
  metrics_.on_rejected(now_, 1);
  RequestRecord failed = finished(Outcome::Failed);
  failed.first_token.reset();
  failed.verdict = Verdict::Bad;
  metrics_.on_request_end(failed);
  EXPECT_EQ(value("rubato_slo_requests_total{objective=\"both\",result=\"bad\"}"), "2");
  EXPECT_EQ(value("rubato_slo_requests_total{objective=\"ttft\",result=\"bad\"}"), "2");
  EXPECT_EQ(value("rubato_slo_requests_total{objective=\"itl\",result=\"bad\"}"), "1");
  EXPECT_EQ(value("rubato_requests_rejected_total"), "1");
}

TEST_F(MetricsTest, steps_are_split_by_kind_and_tokens_by_phase) {
  const policies::SchedulerCounts counts{.waiting = 2, .running = 5, .prefilling = 1, .free_blocks = 25, .block_count = 100};
  metrics_.on_step(step(4, 4, 0), counts);
  metrics_.on_step(step(100, 0, 2), counts);
  metrics_.on_step(step(68, 4, 1), counts);
  EXPECT_EQ(value("rubato_steps_total{kind=\"decode\"}"), "1");
  EXPECT_EQ(value("rubato_steps_total{kind=\"prefill\"}"), "1");
  EXPECT_EQ(value("rubato_steps_total{kind=\"mixed\"}"), "1");
  EXPECT_EQ(value("vllm:prompt_tokens_total{engine=\"0\",model_name=\"chat\"}"), "0") << "a step may recompute";
  metrics_.on_first_token(Arrival{.id = {1}, .time = {}, .prompt_tokens = 164}, 1ms);
  EXPECT_EQ(value("vllm:prompt_tokens_total{engine=\"0\",model_name=\"chat\"}"), "164");
  EXPECT_EQ(value("vllm:generation_tokens_total{engine=\"0\",model_name=\"chat\"}"), "8");
  EXPECT_EQ(value("vllm:kv_cache_usage_perc{engine=\"0\",model_name=\"chat\"}"), "0.75");
  EXPECT_NEAR(std::stod(value("rubato_step_prediction_error_ratio_sum")), 3 * 0.25, 1e-9);
}

TEST_F(MetricsTest, the_prefix_cache_and_state_slots_are_shown_and_the_fullest_memory_is_the_usage) {
  metrics_.on_step(step(4, 4, 0), {.running = 3,
                                   .free_blocks = 75,
                                   .block_count = 100,
                                   .states_running = 3,
                                   .states_snapshot = 2,
                                   .state_count = 6,
                                   .cached_blocks = 40,
                                   .prefix_queries = 500,
                                   .prefix_hits = 320,
                                   .evicted_blocks = 7,
                                   .evicted_snapshots = 1});
  const std::string labels = "{engine=\"0\",model_name=\"chat\"}";
  EXPECT_EQ(value("vllm:kv_cache_usage_perc" + labels), "0.5") << "three of six slots, a quarter of the blocks";
  EXPECT_EQ(value("vllm:prefix_cache_queries_total" + labels), "500");
  EXPECT_EQ(value("vllm:prefix_cache_hits_total" + labels), "320");
  EXPECT_EQ(value("rubato_kv_blocks_cached"), "40");
  EXPECT_EQ(value("rubato_state_slots{use=\"running\"}"), "3");
  EXPECT_EQ(value("rubato_state_slots{use=\"snapshot\"}"), "2");
  EXPECT_EQ(value("rubato_state_slots{use=\"free\"}"), "1");
  EXPECT_EQ(value("rubato_prefix_cache_evictions_total{kind=\"block\"}"), "7");
  EXPECT_EQ(value("rubato_prefix_cache_evictions_total{kind=\"snapshot\"}"), "1");
}

TEST_F(MetricsTest, steps_are_counted_by_shape_and_rebuilds_by_result) {
  engine::StepRecord in_shape = step(100, 0, 2);
  in_shape.bucket = 112;
  in_shape.padding_tokens = 12;
  metrics_.on_step(in_shape, {});
  metrics_.on_step(in_shape, {});
  metrics_.on_step(step(300, 0, 2), {});
  EXPECT_EQ(value("rubato_shape_steps_total{kind=\"shape\"}"), "2");
  EXPECT_EQ(value("rubato_shape_steps_total{kind=\"eager\"}"), "1");
  EXPECT_EQ(value("rubato_shape_padding_tokens_total"), "24");
  metrics_.on_shapes_built({.outcome = {}, .duration = 20ms, .buckets = 7, .bytes = 4096});
  metrics_.on_shapes_built({.outcome = unexpected(ErrorCode::ResourceExhausted, "no memory"), .duration = 5ms});
  metrics_.on_shapes_taken(2us);
  EXPECT_EQ(value("rubato_shape_rebuilds_total{result=\"ok\"}"), "1");
  EXPECT_EQ(value("rubato_shape_rebuilds_total{result=\"failed\"}"), "1");
  EXPECT_EQ(value("rubato_shape_build_seconds_count"), "2");
  EXPECT_EQ(value("rubato_shape_build_seconds_bucket{le=\"0.01\"}"), "1");
  EXPECT_EQ(value("rubato_shape_swap_seconds_bucket{le=\"1e-05\"}"), "1");
  EXPECT_EQ(value("rubato_shapes"), "0") << "built is not yet in use";

  auto status = std::make_shared<ServingStatus>();
  status->lanes.emplace_back().shapes = std::make_shared<const engine::ShapeStatus>(engine::ShapeStatus{
      .buckets = {.tokens = {8, 64}, .decode_max = 8}, .bytes = 4096, .built = 1, .failed = 1, .last_error = ""});
  metrics_.set_sources({.serving = [&] { return status; }, .connections = {}});
  EXPECT_EQ(value("rubato_shapes"), "2");
  EXPECT_EQ(value("rubato_shape_bytes"), "4096");
}

TEST_F(MetricsTest, gauges_show_what_serving_says_now_even_without_a_further_step) {
  auto status = std::make_shared<ServingStatus>();
  status->counts = {.waiting = 0, .running = 0, .prefilling = 0, .free_blocks = 100, .block_count = 100};
  metrics_.set_sources({.serving = [&] { return status; }, .connections = {{"data", [] { return 7; }}}});
  metrics_.on_step(step(4, 4, 0), {.waiting = 3, .running = 5, .free_blocks = 25, .block_count = 100});
  EXPECT_EQ(value("vllm:num_requests_running{engine=\"0\",model_name=\"chat\"}"), "0");
  EXPECT_EQ(value("vllm:num_requests_waiting{engine=\"0\",model_name=\"chat\"}"), "0");
  EXPECT_EQ(value("vllm:kv_cache_usage_perc{engine=\"0\",model_name=\"chat\"}"), "0");
  EXPECT_EQ(value("rubato_http_connections{port=\"data\"}"), "7");
}

TEST_F(MetricsTest, new_settings_show_at_once_although_renderings_are_reused) {
  metrics_.on_settings({.number = 1, .knobs = {}}, now_);
  const auto first = metrics_.render(now_);
  metrics_.on_token_gap({1}, 1ms);
  EXPECT_EQ(first, metrics_.render(now_ + 49ms)) << "a second scraper gets the same text";
  metrics_.on_settings({.number = 2, .knobs = {.max_num_batched_tokens = 256, .priority_policy = PriorityPolicy::PrefillFirst}},
                       now_);
  const std::string second = *metrics_.render(now_ + 49ms);
  EXPECT_THAT(second, HasSubstr("rubato_settings_number 2\n"));
  EXPECT_THAT(second, HasSubstr("rubato_knob{knob=\"maxNumBatchedTokens\"} 256\n"));
  EXPECT_THAT(second, HasSubstr("rubato_knob_info{mode=\"Chunked\",policy=\"PrefillFirst\",reservation=\"LastChunk\"} 1\n"));
  EXPECT_THAT(second, Not(HasSubstr("policy=\"Deadline\""))) << "the choice before is gone";
  EXPECT_NE(*first, *metrics_.render(now_ + 100ms));
}

TEST_F(MetricsTest, totals_of_the_tuner_never_fall) {
  tuner::TunerStatus status;
  status.searches_total = 3;
  status.rollbacks_total = 1;
  metrics_.on_tuner(status);
  status.searches_total = 1;
  status.rollbacks_total = 0;
  metrics_.on_tuner(status);
  metrics_.on_trial("Worse");
  metrics_.on_settings_change(SettingsSource::Tuner);
  EXPECT_EQ(value("rubato_searches_total"), "3");
  EXPECT_EQ(value("rubato_rollbacks_total"), "1");
  EXPECT_EQ(value("rubato_trials_total{outcome=\"Worse\"}"), "1");
  EXPECT_EQ(value("rubato_settings_changes_total{source=\"tuner\"}"), "1");
}

TEST_F(MetricsTest, the_twin_shows_its_errors_its_work_and_whether_it_is_trusted) {
  tuner::TwinStatus twin;
  twin.state = tuner::TwinState::Trusted;
  twin.step_error = 0.04;
  twin.correction.error = {0.01, 0.02, 0.03, 0.25};
  twin.simulations_total = 12;
  twin.aborted_total = 3;
  twin.simulated_total = 90s;
  metrics_.on_twin(twin, 1500ms, 7);
  EXPECT_EQ(value("rubato_twin_trusted"), "1");
  EXPECT_EQ(value("rubato_twin_step_error_ratio"), "0.04");
  EXPECT_EQ(value("rubato_twin_prediction_error_ratio{latency=\"ttft\",quantile=\"0.5\"}"), "0.01");
  EXPECT_EQ(value("rubato_twin_prediction_error_ratio{latency=\"ttft\",quantile=\"0.99\"}"), "0.02");
  EXPECT_EQ(value("rubato_twin_prediction_error_ratio{latency=\"itl\",quantile=\"0.5\"}"), "0.03");
  EXPECT_EQ(value("rubato_twin_prediction_error_ratio{latency=\"itl\",quantile=\"0.99\"}"), "0.25");
  EXPECT_EQ(value("rubato_twin_simulations_total"), "12");
  EXPECT_EQ(value("rubato_twin_aborted_total"), "3");
  EXPECT_EQ(value("rubato_twin_simulated_seconds_total"), "90");
  EXPECT_EQ(value("rubato_twin_cpu_seconds_total"), "1.5");
  EXPECT_EQ(value("rubato_twin_feed_dropped_total"), "7");
  twin.state = tuner::TwinState::Distrusted;
  metrics_.on_twin(twin, 1400ms, 7);
  EXPECT_EQ(value("rubato_twin_trusted"), "0");
  EXPECT_EQ(value("rubato_twin_cpu_seconds_total"), "1.5") << "totals never fall";

  tuner::TunerStatus tuner;
  tuner.alarms_total = 4;
  tuner.early_rollbacks_total = 2;
  tuner.risk_used = 0.05;
  metrics_.on_tuner(tuner);
  EXPECT_EQ(value("rubato_load_alarms_total"), "4");
  EXPECT_EQ(value("rubato_early_rollbacks_total"), "2");
  EXPECT_EQ(value("rubato_tuning_risk_ratio"), "0.05");
}

TEST_F(MetricsTest, a_refused_manifest_raises_the_gauge_until_the_next_good_one) {
  EXPECT_EQ(value("rubato_manifest_reload_failed"), "0");
  metrics_.on_manifest_reload(unexpected(ErrorCode::InvalidArgument, "bad"));
  EXPECT_EQ(value("rubato_manifest_reload_failed"), "1");
  metrics_.on_manifest_reload({});
  EXPECT_EQ(value("rubato_manifest_reload_failed"), "0");
  EXPECT_EQ(value("rubato_manifest_reloads_total{result=\"failure\"}"), "1");
}

TEST_F(MetricsTest, label_values_of_any_model_name_are_escaped) {
  MetricsOptions odd = options_;
  odd.model_name = "a\"b\\c\nd";
  Metrics metrics(odd);
  EXPECT_THAT(*metrics.render(now_), HasSubstr("model_name=\"a\\\"b\\\\c\\nd\""));
}

TEST_F(MetricsTest, booking_and_rendering_at_once_lose_nothing) {
  constexpr int tokens = 20000;
  std::jthread lane([&] {
    for (int index = 0; index < tokens; ++index) metrics_.on_token_gap({1}, 1ms);
    metrics_.on_settings({.number = 2, .knobs = {}}, now_);
  });
  for (int scrape = 0; scrape < 20; ++scrape) EXPECT_FALSE(metrics_.render(TimePoint(std::chrono::seconds(scrape)))->empty());
  lane.join();
  EXPECT_EQ(value("rubato_inter_token_latency_seconds_count"), std::to_string(tokens));
}

TEST(ProcessUsage, reads_this_process) {
  const ProcessUsage usage = read_process_usage();
  EXPECT_GT(usage.resident_bytes, 1 << 20);
  EXPECT_GE(usage.virtual_bytes, usage.resident_bytes);
  EXPECT_GE(usage.open_descriptors, 3);
  EXPECT_GE(usage.threads, 1);
  EXPECT_GT(usage.start_time_seconds, 1.6e9);
  EXPECT_GE(usage.descriptors_max, usage.open_descriptors);
}

}  // namespace
}  // namespace rubato
