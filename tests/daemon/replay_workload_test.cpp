// SPDX-License-Identifier: Apache-2.0
// Workloads of the replay client: recorded formats, drawn profiles, scaling, clipping, and faulty files.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <sstream>

#include "daemon/replay/options.h"
#include "daemon/replay/workload.h"
#include "tests/support/temporary_folder.h"

namespace rubato::replay {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using testing::HasSubstr;

Result<Workload> azure(const std::string& rows) {
  std::istringstream in("TIMESTAMP,ContextTokens,GeneratedTokens\r\n" + rows);
  return read_azure(in, "t.csv");
}

TEST(ReplayWorkload, azure_times_count_from_the_first_request) {
  const auto workload = azure("2023-11-16 23:59:59.9799600,374,44\r\n2023-11-17 00:00:01.0,396,109\n\n");
  ASSERT_TRUE(workload);
  ASSERT_EQ(workload->arrivals.size(), 2u);
  EXPECT_EQ(workload->arrivals[0].at, Duration(0));
  EXPECT_EQ(workload->arrivals[1].at, Duration(1'020'040'000));
  EXPECT_EQ(workload->arrivals[1].prompt_tokens, 396);
  EXPECT_EQ(workload->arrivals[1].output_tokens, 109);
}

TEST(ReplayWorkload, faulty_rows_are_named_with_their_line) {
  EXPECT_THAT(azure("2023-11-16 18:17:03,1,2\nyesterday,1,2\n").error().message, HasSubstr("t.csv:3: TIMESTAMP"));
  EXPECT_THAT(azure("2023-02-30 18:17:03,1,2\n").error().message, HasSubstr("t.csv:2: TIMESTAMP"));
  EXPECT_THAT(azure("2023-11-16 18:17:03,-1,2\n").error().message, HasSubstr("t.csv:2: a token count"));
  EXPECT_THAT(azure("2023-11-16 18:17:03,1\n").error().message, HasSubstr("t.csv:2: fewer cells"));
  std::istringstream no_column("a,b\n1,2\n");
  EXPECT_THAT(read_azure(no_column, "t.csv").error().message, HasSubstr("no column `TIMESTAMP`"));
  std::istringstream bad_json("{\"timestamp\": 0, \"input_length\": 5, \"output_length\": 6}\n[1]\n");
  EXPECT_THAT(read_mooncake(bad_json, "m.jsonl").error().message, HasSubstr("m.jsonl:2: not a JSON object"));
  std::istringstream bad_length("{\"timestamp\": 0, \"input_length\": 1e99, \"output_length\": 6}\n");
  EXPECT_THAT(read_mooncake(bad_length, "m.jsonl").error().message, HasSubstr("m.jsonl:1: timestamp, input_length"));
}

TEST(ReplayWorkload, mooncake_times_are_milliseconds) {
  std::istringstream in(
      "{\"timestamp\": 40, \"input_length\": 5, \"output_length\": 6, \"hash_ids\": [1]}\n"
      "{\"timestamp\": 3040, \"input_length\": 7, \"output_length\": 8}\n");
  const auto workload = read_mooncake(in, "m");
  ASSERT_TRUE(workload);
  EXPECT_EQ(workload->arrivals[1].at, seconds(3));
  EXPECT_EQ(workload->arrivals[1].prompt_tokens, 7);
}

TEST(ReplayWorkload, what_prompts_share_is_counted_in_full_blocks_from_their_begin) {
  std::istringstream in(
      "{\"timestamp\": 0, \"input_length\": 1600, \"output_length\": 6, \"hash_ids\": [1, 2, 3, 4]}\n"
      "{\"timestamp\": 1, \"input_length\": 1600, \"output_length\": 6, \"hash_ids\": [1, 2, 5, 4]}\n"
      "{\"timestamp\": 2, \"input_length\": 2048, \"output_length\": 6, \"hash_ids\": [1, 2, 3, 4]}\n");
  const auto parsed = read_mooncake(in, "m");
  ASSERT_TRUE(parsed);
  EXPECT_EQ(parsed->block_tokens, 512);
  const test::TemporaryFolder folder;
  const auto path = folder.path() / "m.jsonl";
  std::ofstream(path) << in.str();
  const auto workload =
      read_workload({.trace = path, .format = {}, .length_scale = 1.0 / 32, .seconds = {}, .max_model_len = {}});
  ASSERT_TRUE(workload) << workload.error().message;
  EXPECT_EQ(workload->block_tokens, 16);
  std::vector<std::int32_t> shared;
  for (const Arrival& arrival : workload->arrivals) shared.push_back(arrival.shared_tokens);
  EXPECT_EQ(shared, (std::vector<std::int32_t>{0, 32, 48}));  // the fourth block of the first is not full
  std::istringstream bad("{\"timestamp\": 0, \"input_length\": 5, \"output_length\": 6, \"hash_ids\": [\"a\"]}\n");
  EXPECT_THAT(read_mooncake(bad, "m.jsonl").error().message, HasSubstr("m.jsonl:1: hash_ids must be whole numbers"));
}

TEST(ReplayWorkload, lengths_arrive_as_a_poisson_stream_of_the_given_rate) {
  std::string csv = "num_prefill_tokens,num_decode_tokens,num_total_tokens,pd_ratio\n";
  for (int row = 1; row <= 50; ++row) csv += std::to_string(row) + ",7," + std::to_string(row + 7) + ",0.5\n";
  const WorkloadOptions options{
      .trace = {}, .format = {}, .rate_scale = 2, .rate = 10, .seconds = seconds(200), .max_model_len = {}, .seed = 4};
  std::istringstream in(csv), again(csv);
  const auto workload = read_lengths(in, "l", options);
  ASSERT_TRUE(workload);
  EXPECT_NEAR(static_cast<double>(workload->arrivals.size()), 4000, 5 * std::sqrt(4000));
  // Poisson: as much variance as mean in the counts per second.
  std::vector<double> counts(200, 0);
  for (const Arrival& arrival : workload->arrivals) counts[static_cast<std::size_t>(arrival.at / seconds(1))] += 1;
  double variance = 0;
  for (const double count : counts) variance += (count - 20) * (count - 20) / 200;
  EXPECT_NEAR(variance / 20, 1, 0.4);
  EXPECT_EQ(read_lengths(again, "l", options)->arrivals[17].at, workload->arrivals[17].at) << "one seed is one workload";
}

const char* const demo = R"(phases:
  - {name: a, seconds: 100, rate: 20, prompt: {lognormal: {p50: 120, p90: 300}}, output: {fixed: 5}}
  - {name: b, seconds: 50, rate: 4, prompt: {uniform: [10, 20]}, output: {lognormal: {p50: 40, p90: 80}, max: 60}}
)";

TEST(ReplayWorkload, profile_draws_each_phase_from_its_own_distributions) {
  const auto workload = read_profile(demo, "p.yaml", {});
  ASSERT_TRUE(workload) << workload.error().message;
  ASSERT_EQ(workload->phases.size(), 2u);
  EXPECT_EQ(workload->phases[1].start, seconds(100));
  EXPECT_EQ(workload->phases[1].length, seconds(50));
  std::vector<std::int32_t> prompts;
  std::size_t second_phase = 0;
  for (const Arrival& arrival : workload->arrivals) {
    if (arrival.phase == 0) {
      EXPECT_LT(arrival.at, seconds(100));
      EXPECT_EQ(arrival.output_tokens, 5);
      prompts.push_back(arrival.prompt_tokens);
    } else {
      ++second_phase;
      EXPECT_GE(arrival.at, seconds(100));
      EXPECT_LT(arrival.at, seconds(150));
      EXPECT_TRUE(arrival.prompt_tokens >= 10 && arrival.prompt_tokens <= 20);
      EXPECT_LE(arrival.output_tokens, 60);
    }
  }
  EXPECT_NEAR(static_cast<double>(prompts.size()), 2000, 5 * std::sqrt(2000));
  EXPECT_NEAR(static_cast<double>(second_phase), 200, 5 * std::sqrt(200));
  std::ranges::sort(prompts);
  EXPECT_NEAR(prompts[prompts.size() / 2], 120, 15);
  EXPECT_NEAR(prompts[prompts.size() * 9 / 10], 300, 45);
}

TEST(ReplayWorkload, profile_faults_are_named_with_line_and_column) {
  const auto error = [](const std::string& yaml) { return read_profile(yaml, "p.yaml", {}).error().message; };
  EXPECT_THAT(error("phases:\n  - {seconds: 1, rte: 2, prompt: 1, output: 1}\n"), HasSubstr("p.yaml:2:18: unknown key `rte`"));
  EXPECT_THAT(error("phases:\n  - {seconds: 1, prompt: 1, output: 1}\n"), HasSubstr("key `rate` is missing"));
  EXPECT_THAT(error("phases:\n  - {seconds: 1, rate: -2, prompt: 1, output: 1}\n"), HasSubstr("rate must be a number in"));
  EXPECT_THAT(error("phases:\n  - {seconds: 1, rate: 2, prompt: {fixed: 1, uniform: [1, 2]}, output: 1}\n"),
              HasSubstr("exactly one of"));
  EXPECT_THAT(error("phases:\n  - {seconds: 1, rate: 2, prompt: {uniform: [5, 2]}, output: 1}\n"), HasSubstr("high must be"));
  EXPECT_THAT(error("phases:\n  - {seconds: 1, seconds: 1, rate: 2, prompt: 1, output: 1}\n"), HasSubstr("stands twice"));
  EXPECT_THAT(error("phases: []\n"), HasSubstr("1 to 1000"));
  EXPECT_THAT(error("phases: [\n"), HasSubstr("p.yaml:"));
  EXPECT_THAT(error(""), HasSubstr("expected a mapping"));
}

class ReplayFile : public testing::Test {
 protected:
  ~ReplayFile() override { std::filesystem::remove(path_); }
  std::string write(const std::string& extension, const std::string& text) {
    path_ = std::filesystem::temp_directory_path() / ("rubato-replay-" + std::to_string(::getpid()) + extension);
    std::ofstream(path_) << text;
    return path_.string();
  }
  std::filesystem::path path_;
};

TEST_F(ReplayFile, rate_and_length_scales_and_the_models_limit_shape_a_recorded_trace) {
  const std::string path = write(".csv",
                                 "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:00:00,1000,100\n2023-11-16 "
                                 "18:00:10,100,1000\n2023-11-16 18:00:20,1,1\n");
  WorkloadOptions options{.trace = path, .format = {}, .rate_scale = 2, .length_scale = 0.5, .seconds = {}, .max_model_len = 400};
  const auto workload = read_workload(options);
  ASSERT_TRUE(workload) << workload.error().message;
  const auto& arrivals = workload->arrivals;
  ASSERT_EQ(arrivals.size(), 3u);
  EXPECT_EQ(arrivals[1].at, seconds(5));
  EXPECT_EQ(arrivals[0].prompt_tokens, 350) << "the prompt gives way to a short output";
  EXPECT_EQ(arrivals[0].output_tokens, 50);
  EXPECT_EQ(arrivals[1].prompt_tokens, 50) << "an output longer than the rest gives way to a short prompt";
  EXPECT_EQ(arrivals[1].output_tokens, 350);
  EXPECT_EQ(arrivals[2].prompt_tokens, 1) << "nothing becomes empty";
  EXPECT_EQ(workload->clipped, 2);
  options.seconds = seconds(5);
  EXPECT_EQ(read_workload(options)->arrivals.size(), 1u);
  EXPECT_EQ(read_workload(options)->phases[0].length, seconds(5));
}

TEST_F(ReplayFile, unusable_files_are_refused) {
  EXPECT_THAT(read_workload({.trace = "/nonexistent", .format = {}, .seconds = {}, .max_model_len = {}}).error().message,
              HasSubstr("/nonexistent"));
  EXPECT_THAT(
      read_workload({.trace = write(".txt", "hello\n"), .format = {}, .seconds = {}, .max_model_len = {}}).error().message,
      HasSubstr("not recognised"));
  EXPECT_THAT(
      read_workload(
          {.trace = write(".csv", "TIMESTAMP,ContextTokens,GeneratedTokens\n"), .format = {}, .seconds = {}, .max_model_len = {}})
          .error()
          .message,
      HasSubstr("no request in it"));
}

TEST(ReplayWorkload, public_traces_read_in_full) {
  const std::filesystem::path folder = std::filesystem::path(RUBATO_SOURCE_DIR) / "../shared/data/traces";
  if (!std::filesystem::exists(folder)) GTEST_SKIP() << "no " << folder;
  const auto count = [&](const char* file) {
    const auto workload = read_workload({.trace = folder / file, .format = {}, .rate = 100, .seconds = {}, .max_model_len = {}});
    EXPECT_TRUE(workload) << (workload ? "" : workload.error().message);
    return workload ? workload->arrivals.size() : 0;
  };
  EXPECT_EQ(count("azure_2023_code.csv"), 8819u);
  EXPECT_EQ(count("azure_2023_conv.csv"), 19366u);
  EXPECT_EQ(count("mooncake_conversation.jsonl"), 12031u);
  EXPECT_EQ(count("sharegpt_8k_filtered_stats_llama2_tokenizer.csv"), 30731u);
}

TEST(ReplayWorkload, every_example_profile_reads) {
  int count = 0;
  for (const auto& entry :
       std::filesystem::directory_iterator(std::filesystem::path(RUBATO_SOURCE_DIR) / "manifests/examples/load")) {
    const auto workload =
        read_workload({.trace = entry.path(), .format = TraceFormat::Profile, .seconds = {}, .max_model_len = {}});
    EXPECT_TRUE(workload) << (workload ? "" : workload.error().message);
    ++count;
  }
  EXPECT_GT(count, 0);
}

TEST(ReplayOptions, flags_are_read_in_both_spellings) {
  const auto options =
      parse_options({"--url", "http://h:1", "--trace=t.yaml", "--rate-scale=2.5", "--ttft", "1.5s", "--itl=20ms", "--seconds",
                     "30", "--max-model-len", "512", "--max-in-flight", "7", "--seed", "9", "--format", "profile"});
  ASSERT_TRUE(options) << options.error().message;
  EXPECT_EQ(options->client.url, "http://h:1");
  EXPECT_EQ(options->workload.trace, "t.yaml");
  EXPECT_EQ(options->workload.rate_scale, 2.5);
  EXPECT_EQ(options->targets.ttft, milliseconds(1500));
  EXPECT_EQ(options->targets.itl, milliseconds(20));
  EXPECT_EQ(options->workload.seconds, seconds(30));
  EXPECT_EQ(options->workload.max_model_len, 512);
  EXPECT_EQ(options->client.max_in_flight, 7);
  EXPECT_EQ(options->workload.seed, 9u);
  EXPECT_EQ(options->client.seed, 9u);
  EXPECT_EQ(options->workload.format, TraceFormat::Profile);
}

TEST(ReplayOptions, unusable_command_lines_name_the_flag) {
  const auto error = [](const std::vector<std::string>& arguments) { return parse_options(arguments).error().message; };
  EXPECT_THAT(error({}), HasSubstr("--url: is needed"));
  EXPECT_THAT(error({"--url", "u"}), HasSubstr("--trace: is needed"));
  EXPECT_THAT(error({"--ulr", "u"}), HasSubstr("--ulr: not a flag"));
  EXPECT_THAT(error({"--url"}), HasSubstr("needs a value"));
  EXPECT_THAT(error({"--rate-scale", "0"}), HasSubstr("--rate-scale: `0` is not a number in"));
  EXPECT_THAT(error({"--rate-scale", "nan"}), HasSubstr("--rate-scale"));
  EXPECT_THAT(error({"--ttft", "500"}), HasSubstr("--ttft"));
  EXPECT_THAT(error({"--format", "csv"}), HasSubstr("azure, mooncake, lengths, profile"));
  EXPECT_TRUE(parse_options({"--help"})->help);
  EXPECT_THAT(usage_text(), HasSubstr("--max-in-flight N"));
}

}  // namespace
}  // namespace rubato::replay
