// SPDX-License-Identifier: Apache-2.0
// What the twin has learnt of step times outlives the process, for the same engine alone, and a damaged file costs no more than
// what was in it.
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <string>

#include "daemon/calibration_file.h"
#include "tests/daemon/tuning_fixture.h"

namespace rubato {
namespace {

using namespace std::chrono_literals;

class NothingToDo final : public control::TuningTarget {
 public:
  control::TuningInput tuning_input() override {
    control::TuningInput input;
    input.revision = 1;
    return input;
  }
  Result<std::uint64_t> propose(const KnobValues&, const std::string&, const std::string&) override { return std::uint64_t{1}; }
  void report(const control::TuningReport&) override {}
};

class TuningCalibration : public ::testing::Test {
 protected:
  TuningCalibration() {
    std::filesystem::create_directories(folder);
    side.calibration = calibration_path(folder);
  }
  ~TuningCalibration() override { std::filesystem::remove_all(folder); }

  TuningLoop start() { return TuningLoop(target, side.windows, side.feed, nullptr, side.options(), side.now); }
  void tick(TuningLoop& loop, Duration later) {
    side.now += later;
    loop.tick(side.now);
  }
  /// Of the file; 0: there is none that can be read.
  std::uint64_t steps_kept() {
    const Result<Calibration> kept = read_calibration(side.calibration);
    return kept ? kept->laws.observation_count() : 0;
  }

  const std::filesystem::path folder =
      std::filesystem::temp_directory_path() / ("rubato-calibration-" + std::to_string(::getpid()));
  testing::TuningSide side;
  NothingToDo target;
};

TEST_F(TuningCalibration, what_was_learnt_goes_on_after_a_restart_of_the_same_engine) {
  {
    TuningLoop loop = start();
    side.steps(300);
    loop.stop(side.now);
  }
  ASSERT_EQ(steps_kept(), 300U);
  {
    TuningLoop loop = start();
    side.steps(10);
    loop.stop(side.now);
  }
  EXPECT_EQ(steps_kept(), 310U);
}

TEST_F(TuningCalibration, another_engine_starts_anew_and_leaves_the_file_until_it_knows_better) {
  {
    TuningLoop loop = start();
    side.steps(300);
    loop.stop(side.now);
  }
  side.model_key = "another model";
  TuningLoop loop = start();
  side.steps(10);
  loop.stop(side.now);
  EXPECT_EQ(read_calibration(side.calibration)->model_key, "test");
  side.steps(240);
  loop.stop(side.now);
  EXPECT_EQ(read_calibration(side.calibration)->model_key, "another model");
  EXPECT_EQ(steps_kept(), 250U);
}

TEST_F(TuningCalibration, a_damaged_file_is_no_more_than_a_cold_start) {
  std::ofstream(side.calibration) << R"({"apiVersion":"rubato.dev/v1alpha1","kind":"Calibration","modelKey":"test","laws":{"la)";
  TuningLoop loop = start();
  side.steps(300);
  loop.stop(side.now);
  EXPECT_EQ(steps_kept(), 300U);
}

TEST_F(TuningCalibration, it_is_written_about_once_a_minute_and_not_without_news) {
  TuningLoop loop = start();
  side.steps(300);
  tick(loop, 30s);
  EXPECT_FALSE(std::filesystem::exists(side.calibration));
  tick(loop, 31s);
  EXPECT_EQ(steps_kept(), 300U);
  side.steps(10);
  tick(loop, 30s);
  EXPECT_EQ(steps_kept(), 300U);
  tick(loop, 31s);
  EXPECT_EQ(steps_kept(), 310U);
  std::filesystem::remove(side.calibration);
  tick(loop, 61s);
  EXPECT_FALSE(std::filesystem::exists(side.calibration)) << "nothing was learnt since";
}

TEST_F(TuningCalibration, a_folder_that_is_gone_costs_nothing_but_the_file) {
  TuningLoop loop = start();
  side.steps(300);
  std::filesystem::remove_all(folder);
  loop.stop(side.now);
  std::filesystem::create_directories(folder);
  side.steps(1);
  loop.stop(side.now);
  EXPECT_EQ(steps_kept(), 301U);
}

}  // namespace
}  // namespace rubato
