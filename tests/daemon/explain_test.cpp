// SPDX-License-Identifier: Apache-2.0
#include "daemon/explain.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/support/temporary_folder.h"

namespace rubato {
namespace {

using namespace std::chrono_literals;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;
using tuner::JournalDecision;
using tuner::JournalTrial;

tuner::Window window_of(std::int32_t judged, std::int32_t good) {
  tuner::Window window;
  window.begin = TimePoint(0s);
  window.end = TimePoint(15s);
  window.arrivals = judged;
  window.judged = judged;
  window.good = good;
  window.ttft_p50 = 120ms;
  window.ttft_p99 = 610ms;
  window.itl_p50 = 21ms;
  window.itl_p99 = 55ms;
  window.prompt_tokens_mean = 512;
  window.output_tokens_mean = 128;
  return window;
}

tuner::ExpectedOutcome expected_of(double attainment, double spread) {
  return {.attainment = attainment,
          .attainment_spread = spread,
          .ttft_p50 = 100ms,
          .ttft_p99 = 450ms,
          .itl_p50 = 20ms,
          .itl_p99 = 44ms};
}

JournalDecision started(std::int64_t number) {
  tuner::Decision decision{.phase = tuner::Phase::Searching,
                           .apply = KnobValues{.max_num_batched_tokens = 256},
                           .trial = true,
                           .reason = "TrialStarted",
                           .message = "the objectives are missed"};
  decision.trial_number = number;
  decision.source = "Twin";
  decision.seen = window_of(150, 120);
  decision.expected = expected_of(0.975, 0.012);
  decision.expected_incumbent = expected_of(0.81, 0.02);
  return {.time = 1'764'500'000'000, .decision = decision};
}

JournalDecision ended(std::int64_t number) {
  tuner::Decision decision{
      .phase = tuner::Phase::Searching, .apply = {}, .trial = false, .reason = "TrialAdopted", .message = "met"};
  decision.trial_number = number;
  decision.seen = window_of(160, 158);
  return {.time = 1'764'500'020'000, .decision = decision};
}

JournalTrial finished(std::int64_t number) {
  JournalTrial entry{.trial = {.number = number,
                               .knobs = {.max_num_batched_tokens = 256},
                               .window = window_of(160, 158),
                               .outcome = "Incumbent"},
                     .model_key = "model",
                     .objectives = {},
                     .bounds = {}};
  entry.trial.expected = expected_of(0.975, 0.012);
  entry.trial.ended = 1'764'500'020;
  return entry;
}

std::string text_of(const std::vector<ExplainedDecision>& decisions) {
  return explanation_text(decisions, [](std::int64_t time) { return "at " + std::to_string(time); });
}

TEST(Explain, a_block_tells_what_was_seen_expected_done_and_what_came_of_it) {
  const std::vector<JournalDecision> decisions{started(17)};
  const std::vector<tuner::Trial> trials{finished(16).trial, finished(17).trial};
  const std::string text = text_of(join_trials(decisions, trials));
  EXPECT_EQ(text,
            "at 1764500000000  TrialStarted  (Searching, trial 17, proposed by Twin)\n"
            "  seen      10 requests/s of 512 + 128 tokens, 15 s\n"
            "            80 % of 150 requests good; TTFT p50 120 ms p99 610 ms, ITL p50 21 ms p99 55 ms\n"
            "  expected  97.5 % +-1.2; TTFT p50 100 ms p99 450 ms, ITL p50 20 ms p99 44 ms\n"
            "  instead   81 % +-2; TTFT p50 100 ms p99 450 ms, ITL p50 20 ms p99 44 ms of what was current\n"
            "  done      tried budget 256, 64 sequences, Deadline with 20 % margin\n"
            "  because   the objectives are missed\n"
            "  outcome   Incumbent: 98.8 % of 160 requests good; TTFT p50 120 ms p99 610 ms, ITL p50 21 ms p99 55 ms; "
            "1.3 points from what was expected\n");
}

TEST(Explain, a_trial_is_joined_by_its_number_and_by_nothing_else) {
  const std::vector<JournalDecision> decisions{started(17), ended(17), started(18), ended(0)};
  const std::vector<tuner::Trial> trials{finished(17).trial, finished(0).trial};
  const auto joined = join_trials(decisions, trials);
  ASSERT_EQ(joined.size(), 4U);
  EXPECT_EQ(joined[0].trial->number, 17);
  EXPECT_EQ(joined[1].trial->number, 17);
  EXPECT_FALSE(joined[2].trial) << "it still runs";
  EXPECT_FALSE(joined[3].trial) << "no trial has the number zero";
  const std::string text = text_of(joined);
  EXPECT_THAT(text, AllOf(HasSubstr("ended     trial 17: Incumbent"), HasSubstr("outcome   not on record")));
}

TEST(Explain, what_is_not_known_is_left_out) {
  const std::string text =
      text_of({{.time = 0,
                .decision = {.phase = tuner::Phase::NoData, .apply = {}, .reason = "TooFewRequests", .message = "3 requests"}}});
  EXPECT_EQ(text, "time not known  TooFewRequests  (NoData)\n  done      changed nothing\n  because   3 requests\n");
  const auto json =
      explanation_json(std::vector<ExplainedDecision>{{.decision = {.apply = {}, .reason = "TooFewRequests", .message = {}}}});
  for (const char* absent : {"time", "settings", "seen", "expected", "expectedOfIncumbent", "outcome", "source", "trialNumber"})
    EXPECT_FALSE(json["items"][0].contains(absent)) << absent;
}

TEST(Explain, json_carries_the_same_figures) {
  const std::vector<JournalDecision> decisions{started(17)};
  const std::vector<tuner::Trial> trials{finished(17).trial};
  const auto json = explanation_json(join_trials(decisions, trials));
  EXPECT_EQ(json["kind"], "DecisionList");
  const auto& item = json["items"][0];
  EXPECT_EQ(item["time"], "2025-11-30T10:53:20Z");
  EXPECT_EQ(item["reason"], "TrialStarted");
  EXPECT_EQ(item["settings"]["maxNumBatchedTokens"], 256);
  EXPECT_EQ(item["seen"]["attainment"], "80.0");
  EXPECT_EQ(item["expected"]["attainment"], "97.5");
  EXPECT_EQ(item["expected"]["attainmentSpread"], "1.2");
  EXPECT_EQ(item["expectedOfIncumbent"]["attainment"], "81.0");
  EXPECT_EQ(item["outcome"]["outcome"], "Incumbent");
  EXPECT_EQ(item["outcome"]["measured"]["judged"], 160);
  EXPECT_EQ(item["outcome"]["ended"], "2025-11-30T10:53:40Z");
}

TEST(Explain, reads_a_journal_while_another_holds_it_and_says_where_there_is_none) {
  const rubato::test::TemporaryFolder folder;
  const auto missing = read_decisions(folder.path().string(), 0);
  ASSERT_FALSE(missing);
  EXPECT_EQ(missing.error().code, ErrorCode::NotFound);

  const auto writer = tuner::Journal::open((folder.path() / "journal.sqlite").string());
  ASSERT_TRUE(writer) << writer.error().message;
  const auto empty = read_decisions(folder.path().string(), 0);
  ASSERT_TRUE(empty) << empty.error().message;
  EXPECT_TRUE(empty->empty());

  ASSERT_TRUE((*writer)->record(started(17)));
  ASSERT_TRUE((*writer)->record(finished(17)));
  ASSERT_TRUE((*writer)->record(ended(17)));
  const auto all = read_decisions(folder.path().string(), 0);
  ASSERT_TRUE(all) << all.error().message;
  ASSERT_EQ(all->size(), 2U);
  EXPECT_EQ(all->front().decision.reason, "TrialStarted") << "the newest is last";
  ASSERT_TRUE(all->front().trial);
  EXPECT_EQ(all->front().trial->outcome, "Incumbent");
  EXPECT_EQ(all->front().trial->window.good, 158);
  const auto late = read_decisions(folder.path().string(), started(17).time + 1);
  ASSERT_TRUE(late);
  ASSERT_EQ(late->size(), 1U);
  EXPECT_EQ(late->front().decision.reason, "TrialAdopted");
}

}  // namespace
}  // namespace rubato
