// SPDX-License-Identifier: Apache-2.0
#include "tuner/journal.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
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
    Decision decision{
        .phase = Phase::Searching, .apply = trial(7).trial.knobs, .trial = true, .reason = "TrialStarted", .message = "m"};
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
  EXPECT_EQ(journal->last_trial_number(), 7);
  const auto decisions = journal->decisions(10).value();
  ASSERT_EQ(decisions.size(), 2u);
  EXPECT_EQ(decisions[0].decision.apply, trial(7).trial.knobs);
  EXPECT_TRUE(decisions[0].decision.trial);
  EXPECT_EQ(decisions[0].decision.reason, "TrialStarted");
  EXPECT_FALSE(decisions[1].decision.apply);
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
  EXPECT_EQ(journal->decisions(1000).value().size(), 5u);
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

TEST_F(JournalTest, a_place_that_cannot_be_written_is_an_error) {
  EXPECT_FALSE(Journal::open((folder_ / "absent" / "journal").string()));
  EXPECT_FALSE(Journal::open(folder_.string()));
}

}  // namespace
}  // namespace rubato::tuner
