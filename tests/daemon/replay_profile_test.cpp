// SPDX-License-Identifier: Apache-2.0
// A profile that runs longer than its phases, and what the report says of phases and settings to people.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "daemon/replay/report.h"
#include "daemon/replay/workload.h"

namespace rubato::replay {
namespace {

using std::chrono::seconds;

const char* const two_phases = R"(phases:
  - {name: calm, seconds: 10, rate: 5, prompt: {fixed: 10}, output: {fixed: 5}}
  - {seconds: 5, rate: 20, prompt: {fixed: 20}, output: {fixed: 5}}
)";

TEST(ReplayProfile, phases_come_again_until_the_seconds_are_full) {
  WorkloadOptions options;
  options.seconds = seconds(40);
  const Result<Workload> workload = read_profile(two_phases, "p.yaml", options);
  ASSERT_TRUE(workload);
  std::vector<std::string> names;
  for (const Phase& phase : workload->phases) names.push_back(phase.name);
  EXPECT_THAT(names, ::testing::ElementsAre("calm", "phase 2", "calm 2", "phase 2 2", "calm 3"));
  EXPECT_EQ(workload->phases[4].start, seconds(30));
  EXPECT_GT(workload->arrivals.back().at, seconds(30));
}

TEST(ReplayProfile, without_seconds_each_phase_comes_once) {
  const Result<Workload> workload = read_profile(two_phases, "p.yaml", WorkloadOptions{});
  ASSERT_TRUE(workload);
  EXPECT_EQ(workload->phases.size(), 2U);
}

TEST(ReplayProfile, a_report_leaves_out_phases_that_never_began_and_names_settings_in_words) {
  WorkloadOptions options;
  options.seconds = seconds(1000);
  const Result<Workload> workload = read_profile(two_phases, "p.yaml", options);
  ASSERT_TRUE(workload);
  LoadRun run;
  run.elapsed = seconds(12);
  run.settings = {
      {seconds(0),
       R"({"number":1,"maxNumBatchedTokens":512,"maxNumSeqs":32,"deadlineMargin":20,"priorityPolicy":"DecodeFirst"})"},
      {seconds(4), R"({"number":2,"maxNumBatchedTokens":128,"maxNumSeqs":16,"deadlineMargin":10,"priorityPolicy":"Deadline"})"}};
  const Report report = summarize(*workload, run, Targets{});
  EXPECT_EQ(report.phases.size(), 2U);
  EXPECT_THAT(to_table(report), ::testing::HasSubstr("settings in calm: #1 DecodeFirst, budget 512, 32 sequences -> "
                                                     "#2 Deadline, budget 128, 16 sequences, margin 10 %"));
}

}  // namespace
}  // namespace rubato::replay
