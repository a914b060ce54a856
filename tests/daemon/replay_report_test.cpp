// SPDX-License-Identifier: Apache-2.0
// Streams cut anywhere, and the figures made of known outcomes.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "daemon/replay/report.h"

namespace rubato::replay {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using testing::HasSubstr;

std::string token_event(const std::string& text, const std::string& reason = "null") {
  return "data: {\"choices\":[{\"index\":0,\"text\":\"" + text + "\",\"finish_reason\":" + reason + "}]}\n\n";
}
const std::string usage_event =
    "data: {\"choices\":[],\"usage\":{\"prompt_tokens\":4,\"completion_tokens\":3,\"total_tokens\":7,"
    "\"prompt_tokens_details\":{\"cached_tokens\":2}}}\n\n";
const std::string done_event = "data: [DONE]\n\n";

Outcome finished(const StreamReader& reader, Duration arrived = {}) {
  Outcome outcome;
  outcome.arrived = arrived;
  reader.finish(outcome);
  return outcome;
}

TEST(ReplayStream, first_token_and_gaps_are_measured) {
  StreamReader reader(3);
  reader.feed(token_event("a"), milliseconds(110));
  reader.feed(token_event("b"), milliseconds(130));
  reader.feed(token_event("c", "\"length\""), milliseconds(180));
  reader.feed(usage_event + done_event, milliseconds(181));
  const Outcome outcome = finished(reader, milliseconds(10));
  EXPECT_EQ(outcome.failure, "");
  EXPECT_EQ(outcome.ttft, milliseconds(100));
  EXPECT_EQ(outcome.gaps, (std::vector<Duration>{milliseconds(20), milliseconds(50)}));
  EXPECT_EQ(outcome.tokens, 3);
  EXPECT_EQ(outcome.cached_tokens, 2);
}

TEST(ReplayStream, any_cut_of_the_bytes_gives_the_same) {
  const std::string stream = ": hello\r\n" + token_event("a") + "event: x\n" + token_event("b") + token_event("", "\"length\"") +
                             usage_event + done_event;
  for (std::size_t cut = 1; cut < 40; ++cut) {
    StreamReader reader(3);
    for (std::size_t at = 0; at < stream.size(); at += cut)
      reader.feed(stream.substr(at, cut), milliseconds(static_cast<int>(at)));
    const Outcome outcome = finished(reader);
    EXPECT_EQ(outcome.failure, "") << cut;
    EXPECT_EQ(outcome.gaps.size(), 1u) << "the event with the finish_reason alone is no token";
    EXPECT_EQ(outcome.tokens, 3) << "usage counts, where an event held two tokens";
    EXPECT_TRUE(reader.done());
  }
}

TEST(ReplayStream, failures_have_their_kind) {
  const auto failure = [](const std::string& bytes, std::int32_t expected = 1) {
    StreamReader reader(expected);
    reader.feed(bytes, milliseconds(1));
    return finished(reader).failure;
  };
  EXPECT_EQ(failure(token_event("a")), "disconnected");
  EXPECT_EQ(failure(token_event("a") + done_event, 2), "too few tokens");
  EXPECT_EQ(failure(done_event), "too few tokens");
  EXPECT_EQ(failure("data: {broken\n\n"), "bad stream");
  EXPECT_EQ(failure("data: {\"error\":{\"message\":\"device lost\"}}\n\n"), "error in stream");
  EXPECT_EQ(failure(std::string(2 << 20, 'x')), "bad stream");
  EXPECT_EQ(failure(token_event("a") + done_event), "");
}

TEST(ReplayReport, percentiles_are_nearest_ranks) {
  std::vector<Duration> hundred;
  for (int value = 100; value >= 1; --value) hundred.push_back(milliseconds(value));
  EXPECT_EQ(nearest_rank(hundred, 50), milliseconds(50));
  EXPECT_EQ(nearest_rank(hundred, 90), milliseconds(90));
  EXPECT_EQ(nearest_rank(hundred, 99), milliseconds(99));
  EXPECT_EQ(nearest_rank(hundred, 100), milliseconds(100));
  EXPECT_EQ(nearest_rank({milliseconds(3), milliseconds(1), milliseconds(2)}, 99), milliseconds(3));
  EXPECT_EQ(nearest_rank({milliseconds(7)}, 50), milliseconds(7));
  EXPECT_EQ(nearest_rank({}, 50), std::nullopt);
}

Outcome complete(std::uint32_t phase, Duration arrived, Duration ttft, std::vector<Duration> gaps) {
  Outcome outcome;
  outcome.phase = phase;
  outcome.arrived = arrived;
  outcome.ttft = ttft;
  outcome.tokens = static_cast<std::int32_t>(gaps.size()) + 1;
  outcome.gaps = std::move(gaps);
  outcome.prompt_tokens = 10;
  return outcome;
}
Outcome failed(std::uint32_t phase, Duration arrived, const std::string& kind) {
  Outcome outcome;
  outcome.phase = phase;
  outcome.arrived = arrived;
  outcome.failure = kind;
  return outcome;
}

Workload two_phases() {
  return {.phases = {{"calm", seconds(0), seconds(10)}, {"rush", seconds(10), seconds(10)}}, .arrivals = {}};
}

TEST(ReplayReport, failures_and_misses_count_against_attainment_and_goodput) {
  LoadRun run;
  run.elapsed = seconds(25);
  run.outcomes = {complete(0, seconds(1), milliseconds(400), {milliseconds(50), milliseconds(40)}),
                  complete(0, seconds(2), milliseconds(501), {milliseconds(1)}),  // late first token
                  complete(0, seconds(3), milliseconds(10), {milliseconds(51)}),  // one long gap
                  complete(0, seconds(4), milliseconds(500), {}),                 // one token has no gap to miss
                  failed(0, seconds(5), "http 429"),
                  failed(1, seconds(11), "timeout"),
                  failed(1, seconds(12), "timeout")};
  const Report report = summarize(two_phases(), run, {});
  const PhaseFigures& calm = report.phases[0];
  EXPECT_EQ(calm.requests, 5);
  EXPECT_EQ(calm.good, 2);
  EXPECT_DOUBLE_EQ(calm.attainment(), 40);
  EXPECT_DOUBLE_EQ(calm.goodput(), 0.2);
  EXPECT_EQ(calm.failures, (std::map<std::string, std::int64_t>{{"http 429", 1}}));
  EXPECT_EQ(calm.output_tokens, 3 + 2 + 2 + 1);
  EXPECT_EQ(calm.prompt_tokens, 40);
  EXPECT_EQ(calm.ttft_p50, milliseconds(400));
  EXPECT_EQ(calm.gap_p99, milliseconds(51));
  EXPECT_EQ(calm.tpot_p99, milliseconds(51));
  EXPECT_EQ(report.phases[1].attainment(), 0);
  EXPECT_EQ(report.phases[1].ttft_p50, std::nullopt);
  EXPECT_EQ(report.overall.requests, 7);
  EXPECT_EQ(report.overall.failures.at("timeout"), 2);
  EXPECT_DOUBLE_EQ(report.overall.goodput(), 2.0 / 25);
  const std::string table = to_table(report);
  EXPECT_THAT(table, HasSubstr("calm"));
  EXPECT_THAT(table, HasSubstr("40.0%"));
  EXPECT_THAT(table, HasSubstr("missed"));
  EXPECT_THAT(table, HasSubstr("failed: timeout 2"));
  const auto json = to_json(report);
  EXPECT_EQ(json.at("phases").at(0).at("ttftMs").at("p50"), 400.0);
  EXPECT_EQ(json.at("phases").at(1).at("ttftMs").at("p50"), nullptr);
  EXPECT_EQ(json.at("overall").at("failures").at("http 429"), 1);
}

TEST(ReplayReport, the_prefix_cache_is_held_against_what_the_trace_allows) {
  LoadRun run;
  run.elapsed = seconds(20);
  for (const std::int32_t cached : {4, 0, 6}) {
    Outcome outcome = complete(0, seconds(1), milliseconds(1), {milliseconds(1)});
    outcome.shared_tokens = 5;
    outcome.cached_tokens = cached;
    run.outcomes.push_back(outcome);
  }
  const Report report = summarize(two_phases(), run, {});
  EXPECT_THAT(to_table(report),
              HasSubstr("prompt tokens from the prefix cache: 33.3%; the most that this trace allows: 50.0%\n"));
  EXPECT_EQ(to_json(report).at("overall").at("cachedTokens"), 10);
  EXPECT_EQ(to_json(report).at("overall").at("sharedTokens"), 15);
}

TEST(ReplayReport, tokens_that_came_in_one_event_share_its_gap_in_tpot) {
  Outcome outcome = complete(0, seconds(1), milliseconds(1), {milliseconds(30), milliseconds(30)});
  outcome.tokens = 7;  // three events for seven tokens
  LoadRun run;
  run.elapsed = seconds(20);
  run.outcomes = {outcome};
  EXPECT_EQ(summarize(two_phases(), run, {}).overall.tpot_p50, milliseconds(10));
}

TEST(ReplayReport, attainment_is_compared_before_and_after_a_change_of_settings) {
  LoadRun run;
  run.elapsed = seconds(20);
  run.settings = {{seconds(0), R"({"maxNumBatchedTokens":512})"},
                  {seconds(14), R"({"maxNumBatchedTokens":256})"},
                  {seconds(16), R"({"maxNumBatchedTokens":128})"}};
  run.outcomes = {failed(1, seconds(12), "timeout"), complete(1, seconds(15), milliseconds(1), {}),
                  complete(1, seconds(17), milliseconds(1), {}), complete(1, seconds(18), milliseconds(900), {})};
  const Report report = summarize(two_phases(), run, {});
  const PhaseFigures& rush = report.phases[1];
  EXPECT_EQ(rush.settings_at_start, run.settings[0].settings);
  EXPECT_EQ(rush.settings_at_end, run.settings[2].settings);
  EXPECT_EQ(rush.requests_before, 1);
  EXPECT_EQ(rush.good_before, 0);
  EXPECT_EQ(rush.requests_after, 2);
  EXPECT_EQ(rush.good_after, 1);
  EXPECT_EQ(report.phases[0].settings_at_end, run.settings[0].settings);
  EXPECT_THAT(to_table(report), HasSubstr("before the first change 0.0% of 1, after the last 50.0% of 2"));
  EXPECT_EQ(to_json(report).at("phases").at(1).at("settingsAtEnd").at("maxNumBatchedTokens"), 128);
}

// 40 requests, one every quarter second: bad until 4 s of the phase, one in ten bad after that.
TEST(ReplayReport, a_phase_has_recovered_from_when_its_other_requests_met_the_target) {
  LoadRun run;
  run.elapsed = seconds(20);
  for (int i = 0; i < 40; ++i) {
    const Duration arrived = seconds(10) + milliseconds(250) * i;
    const bool bad = i < 16 || i % 10 == 5;
    run.outcomes.push_back(complete(1, arrived, bad ? seconds(9) : milliseconds(1), {}));
  }
  const Report report = summarize(two_phases(), run, {.attainment = 90});
  ASSERT_TRUE(report.phases[1].recovered);
  EXPECT_EQ(*report.phases[1].recovered, seconds(4));
  EXPECT_EQ(report.phases[0].recovered, std::nullopt) << "it had no request";
  EXPECT_EQ(summarize(two_phases(), run, {.attainment = 100}).phases[1].recovered, std::nullopt);
  EXPECT_THAT(to_table(report), HasSubstr("calm never  rush 4"));
  EXPECT_EQ(to_json(report).at("phases").at(1).at("recoveredAfterSeconds"), 4.0);
}

TEST(ReplayReport, a_run_cut_short_has_the_length_that_it_had) {
  LoadRun run;
  run.elapsed = seconds(4);
  const Report report = summarize(two_phases(), run, {});
  EXPECT_EQ(report.phases[0].length, seconds(4));
  EXPECT_EQ(report.phases.size(), 1U);
  EXPECT_EQ(report.overall.length, seconds(4));
}

}  // namespace
}  // namespace rubato::replay
