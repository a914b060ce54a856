// SPDX-License-Identifier: Apache-2.0
#include "tuner/journal.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sqlite3.h>
#include <sys/wait.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "tuner/journal_rows.h"

namespace rubato::tuner {
namespace {

using ::testing::HasSubstr;

class JournalTest : public ::testing::Test {
 protected:
  void SetUp() override {
    folder_ = std::filesystem::temp_directory_path() / ("rubato_journal_" + std::to_string(getpid()) + "_" +
                                                        ::testing::UnitTest::GetInstance()->current_test_info()->name());
    std::filesystem::create_directories(folder_);
    path_ = (folder_ / "tuner.journal").string();
  }
  void TearDown() override { std::filesystem::remove_all(folder_); }

  static JournalTrial trial(std::int64_t number) {
    JournalTrial entry;
    entry.trial.number = number;
    entry.trial.knobs = {.max_num_batched_tokens = 300,
                         .max_num_seqs = 24,
                         .priority_policy = PriorityPolicy::ShortestFirst,
                         .mode = Mode::Disaggregated,
                         .prefill_share = 35,
                         .reservation = Reservation::Early,
                         .prefill_devices = 3};
    entry.bounds.prefill_devices.max = 3;
    entry.bounds.reservation = {Reservation::Early, {Reservation::Early}};
    entry.trial.outcome = "Incumbent";
    entry.trial.source = "Twin";
    entry.trial.expected = expected(0.875);
    entry.trial.ended = 1'800'000'000 + number;
    Window& w = entry.trial.window;
    w.begin = TimePoint(std::chrono::seconds(number));
    w.end = w.begin + std::chrono::seconds(15);
    w.arrivals = w.judged = 50;
    w.good = 45;
    w.ttft_p99 = std::chrono::milliseconds(730);
    w.prompt_tokens_mean = 612.25;
    entry.model_key = "llama/cpu";
    return entry;
  }
  static ExpectedOutcome expected(double attainment) {
    return {.attainment = attainment,
            .attainment_spread = 0.0625,
            .ttft_p50 = std::chrono::milliseconds(120),
            .ttft_p99 = std::chrono::milliseconds(640),
            .itl_p50 = std::chrono::milliseconds(21),
            .itl_p99 = std::chrono::milliseconds(44)};
  }
  static Decision decision(std::int64_t number, const std::optional<KnobValues>& apply = {}) {
    Decision result;
    result.apply = apply;
    result.trial_number = number;
    result.seen = trial(1).trial.window;
    result.expected = expected(0.5);
    return result;
  }
  static Regime regime(std::int64_t number) {
    return {
        .number = number,
        .load = {.features = {.rate = 1.0 / 3, .prompt = 9.1 + static_cast<double>(number), .output = 6.7}, .burstiness = 1.3},
        .best = trial(1).trial.knobs,
        .evidence = {.windows = 3,
                     .judged = 150,
                     .good = 149,
                     .ttft_misses = 1,
                     .ttft_excess = -0.7,
                     .itl_excess = 0.1,
                     .saturated = true},
        .objectives = {.ttft = std::chrono::milliseconds(321), .itl = std::chrono::milliseconds(12), .attainment = 97},
        .visits = 5,
        .last_seen = 1'800'000'000,
        .measured = 1'799'999'000};
  }
  static void expect_equal(const Regime& found, const Regime& wanted) {
    EXPECT_EQ(found.number, wanted.number);
    EXPECT_EQ(found.load, wanted.load);
    EXPECT_EQ(found.best, wanted.best);
    EXPECT_EQ(to_row(found.evidence), to_row(wanted.evidence));
    EXPECT_EQ(found.objectives, wanted.objectives);
    EXPECT_EQ(found.visits, wanted.visits);
    EXPECT_EQ(found.last_seen, wanted.last_seen);
    EXPECT_EQ(found.measured, wanted.measured);
  }
  /// Runs SQL on the file beside the journal, as damage or another program would.
  void alter(const std::string& sql) {
    sqlite3* database = nullptr;
    ASSERT_EQ(sqlite3_open(path_.c_str(), &database), SQLITE_OK);
    char* message = nullptr;
    EXPECT_EQ(sqlite3_exec(database, sql.c_str(), nullptr, nullptr, &message), SQLITE_OK) << (message ? message : "");
    sqlite3_free(message);
    sqlite3_close(database);
  }
  static std::size_t count(const Journal& journal) { return journal.trials("llama/cpu", {}, 1000).value().size(); }
  static std::unique_ptr<Journal> open(const std::string& path, const JournalOptions& options = {}) {
    auto journal = Journal::open(path, options);
    EXPECT_TRUE(journal) << (journal ? "" : journal.error().message);
    return journal ? std::move(journal).value() : nullptr;
  }
  void overwrite(std::streamoff offset, const std::string& bytes) {
    std::fstream file(path_, std::ios::in | std::ios::out | std::ios::binary);
    file.seekp(offset);
    file.write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
  }

  std::filesystem::path folder_;
  std::string path_;
};

TEST_F(JournalTest, what_was_recorded_reads_back_equal) {
  {
    const auto journal = open(path_);
    EXPECT_TRUE(journal->cold_start_reason().empty());
    EXPECT_TRUE(journal->record(trial(7)));
    const Decision decision{.phase = Phase::Searching,
                            .apply = trial(7).trial.knobs,
                            .trial = true,
                            .reason = "TrialStarted",
                            .message = "m",
                            .trial_number = 7,
                            .source = "Regime",
                            .seen = trial(7).trial.window,
                            .expected = expected(0.5),
                            .expected_incumbent = expected(0.25)};
    EXPECT_TRUE(journal->record(JournalDecision{3000, decision}));
    EXPECT_TRUE(journal->record(JournalDecision{4000, Decision{}}));
  }
  const auto journal = open(path_);
  const auto rows = journal->trials("llama/cpu", {}, 10).value();
  ASSERT_EQ(rows.size(), 1u);
  EXPECT_EQ(rows[0].trial.number, 7);
  EXPECT_EQ(rows[0].trial.knobs, trial(7).trial.knobs);
  EXPECT_EQ(rows[0].trial.outcome, "Incumbent");
  EXPECT_EQ(rows[0].trial.window.ttft_p99, std::chrono::milliseconds(730));
  EXPECT_EQ(rows[0].trial.window.prompt_tokens_mean, 612.25);
  EXPECT_EQ(rows[0].bounds, trial(7).bounds);
  EXPECT_EQ(rows[0].trial.source, "Twin");
  EXPECT_EQ(rows[0].trial.expected, expected(0.875));
  EXPECT_EQ(rows[0].trial.ended, 1'800'000'007);
  EXPECT_EQ(journal->last_trial_number(), 7);
  const auto decisions = journal->decisions({.count_max = 10}).value();
  ASSERT_EQ(decisions.size(), 2u);
  EXPECT_EQ(decisions[0].decision.apply, trial(7).trial.knobs);
  EXPECT_TRUE(decisions[0].decision.trial);
  EXPECT_EQ(decisions[0].decision.reason, "TrialStarted");
  EXPECT_EQ(decisions[0].time, 3000);
  EXPECT_EQ(decisions[0].decision.trial_number, 7);
  EXPECT_EQ(decisions[0].decision.source, "Regime");
  ASSERT_TRUE(decisions[0].decision.seen);
  EXPECT_EQ(to_row(*decisions[0].decision.seen), to_row(trial(7).trial.window));
  EXPECT_EQ(decisions[0].decision.expected, expected(0.5));
  EXPECT_EQ(decisions[0].decision.expected_incumbent, expected(0.25));
  EXPECT_FALSE(decisions[1].decision.apply);
  EXPECT_FALSE(decisions[1].decision.seen);
  EXPECT_FALSE(decisions[1].decision.expected);
}

TEST_F(JournalTest, decisions_since_a_time_are_asked_for_and_the_newest_win_over_a_bound) {
  const auto journal = open(path_);
  for (int i = 1; i <= 9; ++i) ASSERT_TRUE(journal->record(JournalDecision{1000 * i, decision(i)}));
  const auto since = journal->decisions({.since = 7000}).value();
  ASSERT_EQ(since.size(), 3u);
  EXPECT_EQ(since.front().decision.trial_number, 7);
  EXPECT_EQ(since.back().decision.trial_number, 9);
  const auto newest = journal->decisions({.since = 2000, .count_max = 2}).value();
  ASSERT_EQ(newest.size(), 2u);
  EXPECT_EQ(newest.front().decision.trial_number, 8);
}

TEST_F(JournalTest, regimes_read_back_equal_and_are_replaced_model_by_model) {
  {
    const auto journal = open(path_);
    ASSERT_TRUE(journal->keep_regimes("a", std::vector{regime(3), regime(1), regime(2)}));
    ASSERT_TRUE(journal->keep_regimes("b", std::vector{regime(4)}));
    ASSERT_TRUE(journal->keep_regimes("a", std::vector{regime(5), regime(1)}));
  }
  const auto journal = open(path_);
  const auto rows = journal->regimes("a").value();
  ASSERT_EQ(rows.size(), 2u);
  expect_equal(rows[0], regime(5));
  expect_equal(rows[1], regime(1));
  expect_equal(journal->regimes("b").value().at(0), regime(4));
  EXPECT_EQ(journal->regime_models().value(), (std::vector<std::string>{"a", "b"}));
  ASSERT_TRUE(journal->keep_regimes("a", {}));
  EXPECT_TRUE(journal->regimes("a").value().empty());
  EXPECT_EQ(journal->regime_models().value(), std::vector<std::string>{"b"});
}

TEST_F(JournalTest, regimes_that_cannot_be_kept_leave_those_on_file) {
  const auto journal = open(path_);
  ASSERT_TRUE(journal->keep_regimes("a", std::vector{regime(1), regime(2)}));
  alter("CREATE TRIGGER full BEFORE INSERT ON regimes WHEN NEW.number = 4 BEGIN SELECT raise(ABORT, 'no room'); END");
  const auto failed = journal->keep_regimes("a", std::vector{regime(3), regime(4)});
  ASSERT_FALSE(failed);
  EXPECT_THAT(failed.error().message, HasSubstr("no room"));
  EXPECT_EQ(journal->regimes("a").value().size(), 2u);
  EXPECT_TRUE(journal->keep_regimes("a", std::vector{regime(5)}));
}

TEST_F(JournalTest, regimes_are_bounded_and_those_kept_longest_ago_go_first) {
  const auto journal = open(path_, {.regimes_max = 3});
  ASSERT_TRUE(journal->keep_regimes("a", std::vector{regime(1), regime(2)}));
  ASSERT_TRUE(journal->keep_regimes("b", std::vector{regime(3), regime(4)}));
  EXPECT_EQ(journal->regimes("a").value().size(), 1u);
  EXPECT_EQ(journal->regimes("b").value().size(), 2u);
}

TEST_F(JournalTest, damaged_rows_are_skipped) {
  const auto journal = open(path_);
  ASSERT_TRUE(journal->keep_regimes("a", std::vector{regime(1), regime(2), regime(3), regime(4)}));
  for (int i = 1; i <= 3; ++i) {
    ASSERT_TRUE(journal->record(trial(i)));
    ASSERT_TRUE(journal->record(JournalDecision{i, decision(i, KnobValues{})}));
  }
  alter("UPDATE regimes SET load = '{\"rateLog2\":1e300}' WHERE number = 1");
  alter("UPDATE regimes SET evidence = replace(evidence, '\"good\":149', '\"good\":151') WHERE number = 2");
  alter("UPDATE regimes SET attainment_percent = 0 WHERE number = 3");
  alter("UPDATE trials SET knobs = 'x' WHERE number = 1; UPDATE trials SET expected = '{' WHERE number = 2");
  alter("UPDATE decisions SET phase = 77 WHERE time_milliseconds = 1");
  alter("UPDATE decisions SET expected = replace(expected, '0.5', '7.5') WHERE time_milliseconds = 2");
  const auto regimes = journal->regimes("a").value();
  ASSERT_EQ(regimes.size(), 1u);
  EXPECT_EQ(regimes[0].number, 4);
  const auto trials = journal->trials("llama/cpu", {}, 10).value();
  ASSERT_EQ(trials.size(), 2u);
  EXPECT_FALSE(trials[0].trial.expected);
  EXPECT_TRUE(trials[1].trial.expected);
  const auto decisions = journal->decisions({}).value();
  ASSERT_EQ(decisions.size(), 2u);
  EXPECT_FALSE(decisions[0].decision.expected);
  EXPECT_TRUE(decisions[0].decision.apply);
  EXPECT_TRUE(decisions[1].decision.expected);
}

TEST(JournalRows, of_before_there_were_reservation_and_prefill_devices_read_as_what_was_done_then) {
  const auto without = [](std::string row) {
    auto json = nlohmann::ordered_json::parse(row);
    EXPECT_EQ(json.erase("reservation"), 1u);
    EXPECT_EQ(json.erase("prefillDevices"), 1u);
    return json.dump();
  };
  EXPECT_EQ(knobs_from_row(without(to_row(KnobValues{.max_num_batched_tokens = 300}))),
            KnobValues{.max_num_batched_tokens = 300});
  EXPECT_EQ(bounds_from_row(without(to_row(KnobsSpec{}))), KnobsSpec{});
  EXPECT_FALSE(knobs_from_row(R"({"maxNumBatchedTokens":300})"));
  auto strange = nlohmann::ordered_json::parse(to_row(KnobValues{}));
  strange["reservation"] = 3;
  EXPECT_FALSE(knobs_from_row(strange.dump()));
}

TEST_F(JournalTest, other_models_and_objectives_stay_apart) {
  const auto journal = open(path_);
  ASSERT_TRUE(journal->record(trial(1)));
  EXPECT_TRUE(journal->trials("llama/cuda", {}, 10).value().empty());
  EXPECT_TRUE(journal->trials("llama/cpu", {.ttft = std::chrono::milliseconds(1)}, 10).value().empty());
  EXPECT_TRUE(journal->trials("llama/cpu", {.attainment = 98}, 10).value().empty());
  EXPECT_EQ(count(*journal), 1u);
}

TEST_F(JournalTest, records_survive_a_killed_process) {
  int ready[2];
  ASSERT_EQ(pipe(ready), 0);
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    auto journal = Journal::open(path_);
    for (int i = 1; i <= 40; ++i) {
      if (!journal || !journal.value()->record(trial(i))) _exit(1);
    }
    if (write(ready[1], "x", 1) != 1) _exit(1);
    for (int i = 41;; ++i) (void)journal.value()->record(trial(i));  // killed amid writes
  }
  close(ready[1]);
  char byte = 0;
  ASSERT_EQ(read(ready[0], &byte, 1), 1);
  kill(child, SIGKILL);
  int status = 0;
  waitpid(child, &status, 0);
  ASSERT_TRUE(WIFSIGNALED(status));
  close(ready[0]);
  const auto journal = open(path_);
  EXPECT_TRUE(journal->cold_start_reason().empty()) << journal->cold_start_reason();
  EXPECT_GE(count(*journal), 40u);
  EXPECT_TRUE(journal->record(trial(1000)));
}

TEST_F(JournalTest, rows_are_bounded_and_the_oldest_go_first) {
  const auto journal = open(path_, {.trials_max = 10, .decisions_max = 5});
  for (int i = 1; i <= 25; ++i) {
    ASSERT_TRUE(journal->record(trial(i)));
    ASSERT_TRUE(journal->record(JournalDecision{1000 * i, Decision{}}));
  }
  const auto rows = journal->trials("llama/cpu", {}, 1000).value();
  ASSERT_EQ(rows.size(), 10u);
  EXPECT_EQ(rows.front().trial.number, 16);
  EXPECT_EQ(rows.back().trial.number, 25);
  EXPECT_EQ(journal->decisions({.count_max = 1000}).value().size(), 5u);
  EXPECT_EQ(journal->trials("llama/cpu", {}, 3).value().front().trial.number, 23);
}

TEST_F(JournalTest, a_file_that_is_no_database_is_moved_aside) {
  std::ofstream(path_) << std::string(5000, 'x');
  const auto journal = open(path_);
  EXPECT_THAT(journal->cold_start_reason(), HasSubstr("moved to"));
  EXPECT_TRUE(std::filesystem::exists(path_ + ".damaged"));
  EXPECT_EQ(count(*journal), 0u);
  EXPECT_TRUE(journal->record(trial(1)));
}

TEST_F(JournalTest, a_truncated_file_is_moved_aside) {
  {
    const auto journal = open(path_);
    for (int i = 1; i <= 200; ++i) ASSERT_TRUE(journal->record(trial(i)));
  }
  std::filesystem::resize_file(path_, std::filesystem::file_size(path_) / 2);
  const auto journal = open(path_);
  EXPECT_FALSE(journal->cold_start_reason().empty());
  EXPECT_EQ(count(*journal), 0u);
}

TEST_F(JournalTest, damage_inside_the_file_is_noticed) {
  {
    const auto journal = open(path_);
    for (int i = 1; i <= 200; ++i) ASSERT_TRUE(journal->record(trial(i)));
  }
  for (std::streamoff page = 1; page < 12; ++page) overwrite(page * 4096, std::string(512, '\xff'));
  const auto journal = open(path_);
  EXPECT_FALSE(journal->cold_start_reason().empty());
  EXPECT_EQ(count(*journal), 0u);
}

TEST_F(JournalTest, an_empty_file_is_a_fresh_journal) {
  std::ofstream(path_).close();
  const auto journal = open(path_);
  EXPECT_TRUE(journal->cold_start_reason().empty());
  EXPECT_TRUE(journal->record(trial(1)));
}

TEST_F(JournalTest, a_newer_schema_is_moved_aside_and_named) {
  { ASSERT_TRUE(open(path_)->record(trial(1))); }
  overwrite(60, std::string("\0\0\0\x09", 4));  // user_version in the database header
  const auto journal = open(path_);
  EXPECT_THAT(journal->cold_start_reason(), HasSubstr("schema version is 9"));
  EXPECT_EQ(count(*journal), 0u);
}

// As the first release wrote it.
constexpr const char* schema_of_version_1 = R"sql(
CREATE TABLE trials(
  id INTEGER PRIMARY KEY, number INTEGER NOT NULL, model_key TEXT NOT NULL,
  ttft_nanoseconds INTEGER NOT NULL, itl_nanoseconds INTEGER NOT NULL, attainment_percent INTEGER NOT NULL,
  bounds TEXT NOT NULL, knobs TEXT NOT NULL, measured TEXT NOT NULL, outcome TEXT NOT NULL);
CREATE INDEX trials_by_key ON trials(model_key, ttft_nanoseconds, itl_nanoseconds, attainment_percent, id);
CREATE TABLE decisions(
  id INTEGER PRIMARY KEY, time_nanoseconds INTEGER NOT NULL, phase INTEGER NOT NULL, trial INTEGER NOT NULL,
  knobs TEXT, reason TEXT NOT NULL, message TEXT NOT NULL);
PRAGMA user_version=1; PRAGMA application_id=1381319252;
)sql";

class JournalOfVersion1 : public JournalTest {
 protected:
  void SetUp() override {
    JournalTest::SetUp();
    const JournalTrial old = trial(12);
    alter(std::string("PRAGMA journal_mode=WAL;") + schema_of_version_1 +
          "INSERT INTO trials(number, model_key, ttft_nanoseconds, itl_nanoseconds, attainment_percent, bounds, knobs, measured, "
          "outcome) VALUES(12, 'llama/cpu', 500000000, 50000000, 99, '" +
          to_row(old.bounds) + "', '" + to_row(old.trial.knobs) + "', '" + to_row(old.trial.window) +
          "', 'Worse');"
          "INSERT INTO decisions(time_nanoseconds, phase, trial, knobs, reason, message) VALUES(987654321987, 1, 1, '" +
          to_row(old.trial.knobs) + "', 'TrialStarted', 'm');");
  }
};

TEST_F(JournalOfVersion1, is_brought_up_to_date_in_place_and_keeps_its_trials) {
  for (int round = 0; round < 2; ++round) {
    const auto journal = open(path_);
    EXPECT_TRUE(journal->cold_start_reason().empty()) << journal->cold_start_reason();
    EXPECT_FALSE(std::filesystem::exists(path_ + ".damaged"));
    const auto rows = journal->trials("llama/cpu", {}, 10).value();
    ASSERT_GE(rows.size(), 1u);
    EXPECT_EQ(rows[0].trial.number, 12);
    EXPECT_EQ(rows[0].trial.knobs, trial(12).trial.knobs);
    EXPECT_EQ(rows[0].trial.outcome, "Worse");
    EXPECT_EQ(rows[0].trial.source, "");
    EXPECT_FALSE(rows[0].trial.expected);
    EXPECT_EQ(rows[0].trial.ended, 0);
    // When its decisions were made is not known: they answer no question about a time.
    EXPECT_EQ(journal->decisions({}).value().at(0).time, 0);
    EXPECT_EQ(journal->decisions({}).value().at(0).decision.reason, "TrialStarted");
    EXPECT_EQ(journal->decisions({.since = 1}).value().size(), static_cast<std::size_t>(round));
    ASSERT_TRUE(journal->record(trial(13 + round)));
    ASSERT_TRUE(journal->record(JournalDecision{5000, decision(14)}));
    ASSERT_TRUE(journal->keep_regimes("a", std::vector{regime(1)}));
  }
  const auto journal = open(path_);
  EXPECT_EQ(count(*journal), 3u);
  EXPECT_EQ(journal->decisions({.since = 1}).value().size(), 2u);
  EXPECT_EQ(journal->regimes("a").value().size(), 1u);
}

TEST_F(JournalOfVersion1, that_cannot_be_brought_up_to_date_stays_as_it_is) {
  {
    sqlite3* other = nullptr;
    ASSERT_EQ(sqlite3_open(path_.c_str(), &other), SQLITE_OK);
    ASSERT_EQ(sqlite3_exec(other, "BEGIN IMMEDIATE", nullptr, nullptr, nullptr), SQLITE_OK);
    const auto journal = Journal::open(path_);
    ASSERT_FALSE(journal);
    EXPECT_THAT(journal.error().message, HasSubstr("locked"));
    sqlite3_close(other);
  }
  EXPECT_FALSE(std::filesystem::exists(path_ + ".damaged"));
  EXPECT_EQ(count(*open(path_)), 1u);
}

TEST_F(JournalOfVersion1, is_not_touched_by_a_reader_and_named) {
  const auto journal = Journal::open_existing(path_);
  ASSERT_FALSE(journal);
  EXPECT_THAT(journal.error().message, HasSubstr("schema version is 1"));
  EXPECT_TRUE(open(path_)->cold_start_reason().empty());
}

TEST_F(JournalTest, a_reader_sees_what_a_writer_has_recorded_and_writes_nothing) {
  const auto writer = open(path_);
  ASSERT_TRUE(writer->record(trial(1)));
  ASSERT_TRUE(writer->keep_regimes("a", std::vector{regime(1)}));
  const auto reader = Journal::open_existing(path_);
  ASSERT_TRUE(reader) << reader.error().message;
  EXPECT_EQ(count(**reader), 1u);
  ASSERT_TRUE(writer->record(JournalDecision{1000, Decision{}}));
  EXPECT_EQ(reader.value()->decisions({}).value().size(), 1u);
  EXPECT_EQ(reader.value()->regimes("a").value().size(), 1u);
  EXPECT_FALSE(reader.value()->record(trial(2)));
  EXPECT_FALSE(reader.value()->record(JournalDecision{}));
  EXPECT_FALSE(reader.value()->keep_regimes("a", {}));
  EXPECT_TRUE(writer->record(trial(2)));
}

TEST_F(JournalTest, a_reader_needs_no_writer_and_no_right_to_write) {
  { ASSERT_TRUE(open(path_)->record(trial(1))); }
  std::filesystem::permissions(folder_, std::filesystem::perms::owner_read | std::filesystem::perms::owner_exec);
  const auto reader = Journal::open_existing(path_);
  std::filesystem::permissions(folder_, std::filesystem::perms::owner_all);
  ASSERT_TRUE(reader) << reader.error().message;
  EXPECT_EQ(count(**reader), 1u);
}

TEST_F(JournalTest, a_reader_creates_and_moves_nothing) {
  const auto absent = Journal::open_existing(path_);
  ASSERT_FALSE(absent);
  EXPECT_EQ(absent.error().code, ErrorCode::NotFound);
  EXPECT_FALSE(std::filesystem::exists(path_));
  EXPECT_FALSE(Journal::open_existing(folder_.string()));
  std::ofstream(path_) << std::string(5000, 'x');
  const auto damaged = Journal::open_existing(path_);
  ASSERT_FALSE(damaged);
  EXPECT_THAT(damaged.error().message, HasSubstr(path_));
  EXPECT_TRUE(std::filesystem::exists(path_));
  EXPECT_FALSE(std::filesystem::exists(path_ + ".damaged"));
}

TEST_F(JournalTest, a_place_that_cannot_be_written_is_an_error) {
  EXPECT_FALSE(Journal::open((folder_ / "absent" / "journal").string()));
  EXPECT_FALSE(Journal::open(folder_.string()));
}

}  // namespace
}  // namespace rubato::tuner
