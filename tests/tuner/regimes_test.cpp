// SPDX-License-Identifier: Apache-2.0
#include "tuner/regimes.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <nlohmann/json.hpp>
#include <set>

namespace rubato::tuner {
namespace {

using ::testing::HasSubstr;
using ::testing::StartsWith;

constexpr std::int64_t day = 24 * 3600;
constexpr std::int64_t now = 1'800'000'000;
constexpr ObjectivesSpec objectives{
    .ttft = std::chrono::milliseconds(500), .itl = std::chrono::milliseconds(50), .attainment = 95};
constexpr KnobValues first{.max_num_batched_tokens = 256, .max_num_seqs = 32};
constexpr KnobValues second{
    .max_num_batched_tokens = 2048, .max_num_seqs = 64, .priority_policy = PriorityPolicy::ShortestFirst, .deadline_margin = 35};

RegimeLoad load(double rate, double prompt = 600, double output = 120, double burstiness = 1) {
  return {{std::log2(rate), std::log2(prompt), std::log2(output)}, burstiness};
}

Evidence evidence(std::int32_t judged, double attainment) {
  const auto good = static_cast<std::int32_t>(std::lround(judged * attainment));
  return {.windows = std::max(1, judged / 60), .judged = judged, .good = good, .ttft_misses = judged - good};
}

TEST(RegimeMemory, a_load_met_before_is_recognised_within_its_distance_alone) {
  RegimeMemory memory;
  EXPECT_EQ(memory.recognise(load(4), objectives, now), nullptr);
  memory.learn(load(4), first, evidence(100, 0.97), objectives, now);
  memory.learn(load(16), second, evidence(100, 0.96), objectives, now);
  ASSERT_NE(memory.recognise(load(4.5), objectives, now), nullptr);
  EXPECT_EQ(memory.recognise(load(4.5), objectives, now)->best, first);
  EXPECT_EQ(memory.recognise(load(14), objectives, now)->best, second);
  EXPECT_EQ(memory.recognise(load(8), objectives, now), nullptr);        // an octave from both
  EXPECT_EQ(memory.recognise(load(4, 1200), objectives, now), nullptr);  // longer prompts
  EXPECT_EQ(memory.recognise(load(4, 600, 240), objectives, now), nullptr);
  EXPECT_NE(memory.recognise(load(4, 600, 120, 2), objectives, now), nullptr);  // an octave of burstiness is half of one
  EXPECT_EQ(memory.recognise(load(4, 600, 120, 3), objectives, now), nullptr);
  ObjectivesSpec others = objectives;
  others.itl *= 2;
  EXPECT_EQ(memory.recognise(load(4), others, now), nullptr);
}

TEST(RegimeMemory, thin_or_old_evidence_is_no_reason_to_reuse_settings) {
  RegimeMemory memory;
  memory.learn(load(4), first, evidence(19, 1.0), objectives, now);
  EXPECT_EQ(memory.recognise(load(4), objectives, now), nullptr);
  memory.learn(load(4), first, evidence(31, 1.0), objectives, now);
  EXPECT_NE(memory.recognise(load(4), objectives, now), nullptr);
  EXPECT_NE(memory.recognise(load(4), objectives, now + 14 * day), nullptr);  // 25 left
  EXPECT_EQ(memory.recognise(load(4), objectives, now + 28 * day), nullptr);
}

TEST(RegimeMemory, evidence_of_the_same_settings_adds_up_to_a_bound_and_newer_weighs_more) {
  RegimeMemory memory;
  for (int i = 0; i < 200; ++i) memory.learn(load(4), first, evidence(100, 1.0), objectives, now + i);
  EXPECT_EQ(memory.regimes()[0].evidence.judged, RegimeMemory::evidence_judged_max);
  EXPECT_EQ(memory.regimes()[0].visits, 200);
  for (int i = 0; i < 40; ++i) memory.learn(load(4), first, evidence(100, 0.0), objectives, now + 200 + i);
  // 4000 bad ones after 20000 good ones: with a bound they are more than half of what is remembered.
  EXPECT_LT(memory.regimes()[0].evidence.attainment(), 0.5);
  memory.learn(load(4), first, evidence(100, 1.0), objectives, now + 140 * day);
  EXPECT_NEAR(memory.regimes()[0].evidence.judged, 100 + 4, 1);
}

TEST(RegimeMemory, better_settings_replace_worse_ones_and_not_the_other_way_round) {
  RegimeMemory memory;
  memory.learn(load(4), first, evidence(200, 0.7), objectives, now);
  memory.learn(load(4), second, evidence(100, 0.97), objectives, now + 60);
  EXPECT_EQ(memory.regimes()[0].best, second);
  EXPECT_EQ(memory.regimes()[0].evidence.judged, 100);
  const Regime& kept = memory.learn(load(4), first, evidence(300, 0.6), objectives, now + 120);
  EXPECT_EQ(kept.best, second);
  EXPECT_EQ(kept.evidence.judged, 100);
  EXPECT_EQ(kept.measured, now + 60);
  EXPECT_EQ(kept.visits, 3);
  EXPECT_EQ(kept.last_seen, now + 120);
}

TEST(RegimeMemory, luck_of_a_few_requests_replaces_nothing) {
  RegimeMemory memory;
  memory.learn(load(4), first, evidence(400, 0.9), objectives, now);
  memory.learn(load(4), second, evidence(15, 1.0), objectives, now);
  EXPECT_EQ(memory.regimes()[0].best, first);
  memory.learn(load(4), second, evidence(60, 0.92), objectives, now);  // within what chance explains
  EXPECT_EQ(memory.regimes()[0].best, first);
}

TEST(RegimeMemory, what_is_too_old_to_be_known_gives_way) {
  RegimeMemory memory;
  memory.learn(load(4), first, evidence(200, 0.99), objectives, now);
  // Visits under other settings do not keep old evidence young.
  for (int i = 1; i <= 70; ++i) memory.learn(load(4), second, evidence(60, 0.7), objectives, now + i * day);
  EXPECT_EQ(memory.regimes()[0].best, second);
}

TEST(RegimeMemory, a_regime_follows_its_load_and_joins_one_it_has_come_to) {
  RegimeMemory memory;
  memory.learn(load(4), first, evidence(200, 0.9), objectives, now);
  memory.learn(load(8.5), second, evidence(200, 0.99), objectives, now);
  ASSERT_EQ(memory.regimes().size(), 2u);
  for (const double rate : {5.5, 6.6, 7.2}) {
    EXPECT_EQ(memory.regimes().size(), 2u);
    for (int i = 0; i < 60; ++i) memory.learn(load(rate), first, evidence(60, 0.9), objectives, now);
  }
  ASSERT_EQ(memory.regimes().size(), 1u);
  EXPECT_EQ(memory.regimes()[0].best, second);  // the better of both
  EXPECT_NEAR(std::exp2(memory.regimes()[0].load.features.rate), 7.3, 0.3);
}

TEST(RegimeMemory, is_bounded_and_the_oldest_and_thinnest_go_first) {
  RegimeMemory memory({.count_max = 3});
  memory.learn(load(1), first, evidence(500, 0.9), objectives, now);
  memory.learn(load(4), first, evidence(25, 0.9), objectives, now);
  memory.learn(load(16), first, evidence(400, 0.9), objectives, now - 60 * day);
  memory.learn(load(64), first, evidence(21, 0.9), objectives, now);
  ASSERT_EQ(memory.regimes().size(), 3u);
  EXPECT_EQ(memory.recognise(load(16), objectives, now - 60 * day), nullptr);  // old
  memory.learn(load(256), first, evidence(300, 0.9), objectives, now);
  ASSERT_EQ(memory.regimes().size(), 3u);
  EXPECT_EQ(memory.recognise(load(64), objectives, now), nullptr);  // thin
  EXPECT_NE(memory.recognise(load(1), objectives, now), nullptr);
  std::set<std::int64_t> numbers;
  for (const Regime& regime : memory.regimes()) numbers.insert(regime.number);
  EXPECT_EQ(numbers.size(), 3u);
  EXPECT_EQ(*numbers.rbegin(), 5);
}

TEST(RegimeMemory, loaded_rows_are_bounded_and_numbered_once) {
  std::vector<Regime> rows;
  for (int i = 0; i < 5; ++i) {
    rows.push_back({.number = i < 2 ? 7 : 0,
                    .load = load(std::exp2(2 * i)),
                    .best = first,
                    .evidence = evidence(100, 0.9),
                    .objectives = objectives,
                    .visits = 1,
                    .last_seen = now - i * day,
                    .measured = now});
  }
  RegimeMemory memory({.count_max = 4});
  memory.load(rows);
  ASSERT_EQ(memory.regimes().size(), 4u);
  EXPECT_EQ(memory.recognise(load(256), objectives, now), nullptr);
  std::set<std::int64_t> numbers;
  for (const Regime& regime : memory.regimes()) numbers.insert(regime.number);
  EXPECT_EQ(numbers, (std::set<std::int64_t>{7, 8, 9, 10}));
  EXPECT_EQ(memory.learn(load(5000), first, evidence(1, 1), objectives, now).number, 11);
}

class RegimeFile : public ::testing::Test {
 protected:
  void SetUp() override {
    memory_.learn(load(4, 612.25, 118, 1.5), first, evidence(200, 0.97), objectives, now);
    memory_.learn(load(31.7), {.mode = Mode::Disaggregated, .prefill_share = 35, .prefill_devices = 2}, evidence(2000, 0.5),
                  {.ttft = std::chrono::microseconds(1'500'000), .itl = std::chrono::microseconds(12'500), .attainment = 90},
                  now + 9);
    memory_.learn(load(0.05, 9000), second, evidence(30, 1), objectives, now + 10);
    text_ = regimes_to_json(memory_.regimes(), "llama/cpu");
  }
  /// The file with one place changed, or removed where there is no value.
  std::string edited(const std::string& pointer, const nlohmann::ordered_json& value) const {
    auto json = nlohmann::ordered_json::parse(text_);
    const nlohmann::ordered_json::json_pointer place(pointer);
    if (value.is_discarded()) {
      json.at(place.parent_pointer()).erase(place.back());
    } else {
      json[place] = value;
    }
    return json.dump();
  }
  static Error error_of(const std::string& text) {
    const auto read = regimes_from_json(text);
    EXPECT_FALSE(read) << text;
    return read ? Error{} : read.error();
  }

  RegimeMemory memory_;
  std::string text_;
};

const nlohmann::ordered_json removed(nlohmann::ordered_json::value_t::discarded);

TEST_F(RegimeFile, reads_back_what_was_written) {
  const auto read = regimes_from_json(text_);
  ASSERT_TRUE(read) << read.error().message;
  EXPECT_EQ(read->model_key, "llama/cpu");
  ASSERT_EQ(read->regimes.size(), 3u);
  for (std::size_t i = 0; i < 3; ++i) {
    const Regime& wanted = memory_.regimes()[i];
    const Regime& found = read->regimes[i];
    EXPECT_LT(regime_distance(found.load, wanted.load), 1e-7);
    EXPECT_EQ(found.best, wanted.best);
    EXPECT_EQ(found.evidence.judged, wanted.evidence.judged);
    EXPECT_EQ(found.evidence.good, wanted.evidence.good);
    EXPECT_EQ(found.evidence.ttft_misses, wanted.evidence.ttft_misses);
    EXPECT_EQ(found.evidence.windows, wanted.evidence.windows);
    EXPECT_EQ(found.objectives, wanted.objectives);
    EXPECT_EQ(found.visits, wanted.visits);
    EXPECT_EQ(found.last_seen, wanted.last_seen);
    EXPECT_EQ(found.measured, wanted.measured);
  }
  EXPECT_EQ(regimes_to_json(read->regimes, read->model_key), text_);
}

TEST_F(RegimeFile, is_written_for_people) {
  EXPECT_THAT(text_, StartsWith("{\n  \"apiVersion\": \"rubato.dev/v1alpha1\",\n  \"kind\": \"RegimeList\""));
  EXPECT_THAT(text_, HasSubstr("\"ratePerSecond\": 4.0,"));
  EXPECT_THAT(text_, HasSubstr("\"promptTokens\": 612.25,"));
  EXPECT_THAT(text_, HasSubstr("\"priorityPolicy\": \"ShortestFirst\""));
  EXPECT_THAT(text_, HasSubstr("\"ttft\": \"1.5s\""));
}

TEST_F(RegimeFile, an_edited_file_names_the_field_and_what_is_allowed) {
  const struct {
    const char* pointer;
    nlohmann::ordered_json value;
    const char* field;
    const char* message;
  } cases[] = {
      {"/kind", "Engine", "kind", "\"Engine\" must be RegimeList"},
      {"/apiVersion", removed, "apiVersion", "is missing"},
      {"/modelKey", "", "modelKey", "must not be empty"},
      {"/items", "x", "items", "must be a list"},
      {"/item", 1, "item", "no such field"},
      {"/items/1", 5, "items[1]", "5 must be an object"},
      {"/items/2/load/ratePerSecond", -1, "items[2].load.ratePerSecond", "-1 must be a number in 0.001.."},
      {"/items/2/load/ratePerSecond", "4", "items[2].load.ratePerSecond", "\"4\" must be a number"},
      {"/items/0/load/promptTokens", removed, "items[0].load.promptTokens", "is missing"},
      {"/items/1/load", removed, "items[1].load", "is missing"},
      {"/items/0/load/burst", 1, "items[0].load.burst", "no such field; there are burstiness,"},
      {"/items/1/settings/maxNumBatchedTokens", 0, "items[1].settings.maxNumBatchedTokens", "0 is outside 1..65536"},
      {"/items/1/settings/maxNumBatchedTokens", 70, "items[1].settings.maxNumBatchedTokens", "at least maxNumSeqs + 16"},
      {"/items/1/settings/priorityPolicy", "Fifo", "items[1].settings.priorityPolicy", "DecodeFirst"},
      {"/items/1/settings/priorityPolicy", nullptr, "items[1].settings.priorityPolicy", "must be set"},
      {"/items/1/settings/mode", removed, "items[1].settings.mode", "is missing"},
      {"/items/1/settings/expiresAfter", "1h", "items[1].settings.expiresAfter", "no such field"},
      {"/items/2/evidence/goodRequests", 31, "items[2].evidence.goodRequests", "31 must be a whole number in 0..30"},
      {"/items/2/evidence/judgedRequests", 5e9, "items[2].evidence.judgedRequests", "must be a whole number"},
      {"/items/2/evidence/saturated", 0, "items[2].evidence.saturated", "0 must be true or false"},
      {"/items/0/objectives/ttft", 500, "items[0].objectives.ttft", "500 must be a duration in 1ms..1h"},
      {"/items/0/objectives/itl", "11m", "items[0].objectives.itl", "\"11m\" must be a duration in 100us..10m"},
      {"/items/0/objectives/attainment", 101, "items[0].objectives.attainment", "101 must be a whole number in 1..100"},
      {"/items/0/visits", 0, "items[0].visits", "0 must be a whole number in 1.."},
      {"/items/0/lastSeenUnixSeconds", 1.5, "items[0].lastSeenUnixSeconds", "1.5 must be a whole number"},
      {"/items/0/lastSeenUnixSeconds", 18446744073709551615u, "items[0].lastSeenUnixSeconds", "must be a whole number"},
  };
  for (const auto& one : cases) {
    const Error error = error_of(edited(one.pointer, one.value));
    EXPECT_EQ(error.code, ErrorCode::InvalidArgument);
    EXPECT_EQ(error.field, one.field) << error.message;
    EXPECT_THAT(error.message, StartsWith(std::string(one.field) + ": "));
    EXPECT_THAT(error.message, HasSubstr(one.message));
  }
}

TEST_F(RegimeFile, a_cut_or_foreign_file_is_refused_wherever_it_is_cut) {
  for (std::size_t length = 0; length + 2 < text_.size(); length += 41) {
    EXPECT_FALSE(regimes_from_json(text_.substr(0, length))) << length;
  }
  EXPECT_THAT(error_of("[1]").message, HasSubstr("a list must be an object"));
  EXPECT_THAT(error_of("null").message, HasSubstr("null must be an object"));
  auto many = nlohmann::ordered_json::parse(text_);
  for (std::size_t i = 0; i < regimes_import_max; ++i) many["items"].push_back(many["items"][0]);
  EXPECT_EQ(error_of(many.dump()).field, "items");
}

TEST_F(RegimeFile, two_regimes_close_together_become_one_on_import) {
  auto json = nlohmann::ordered_json::parse(text_);
  json["items"].push_back(json["items"][0]);
  json["items"][3]["load"]["ratePerSecond"] = 4.4;
  json["items"][3]["settings"]["maxNumBatchedTokens"] = 1024;
  json["items"][3]["evidence"] = json["items"][1]["evidence"];  // ten times the requests, but half of them bad
  const auto read = regimes_from_json(json.dump());
  ASSERT_TRUE(read);
  RegimeMemory other;
  other.merge(read->regimes, now + 60);
  ASSERT_EQ(other.regimes().size(), 3u);
  EXPECT_EQ(other.regimes()[0].best, first);
}

TEST_F(RegimeFile, importing_it_twice_changes_nothing) {
  const auto read = regimes_from_json(text_);
  ASSERT_TRUE(read);
  RegimeMemory other;
  other.learn(load(4.2, 600, 120, 1.4), second, evidence(100, 0.4), objectives, now);
  other.merge(read->regimes, now + 60);
  ASSERT_EQ(other.regimes().size(), 3u);
  EXPECT_EQ(other.regimes()[0].best, first);  // the other node knew better
  const std::string once = regimes_to_json(other.regimes(), "m");
  other.merge(read->regimes, now + 60);
  EXPECT_EQ(regimes_to_json(other.regimes(), "m"), once);
}

TEST(RegimeMerge, news_from_a_clock_that_is_ahead_last_no_longer) {
  RegimeMemory ahead;
  ahead.learn(load(4), first, evidence(100, 0.9), objectives, now + 1000 * day);
  RegimeMemory memory;
  memory.merge(ahead.regimes(), now);
  EXPECT_EQ(memory.regimes()[0].last_seen, now);
  EXPECT_EQ(memory.recognise(load(4), objectives, now + 60 * day), nullptr);
}

}  // namespace
}  // namespace rubato::tuner
