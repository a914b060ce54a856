// SPDX-License-Identifier: Apache-2.0
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "daemon/calibration_file.h"
#include "daemon/durable_write.h"
#include "daemon/regimes_command.h"
#include "tests/support/temporary_folder.h"

namespace rubato {
namespace {

using ::testing::HasSubstr;

constexpr std::int64_t now = 1'764'500'000;

/// A load of so many requests per second, served best with this budget.
tuner::Regime regime_of(double rate, std::int32_t budget) {
  tuner::Regime regime;
  regime.number = 1;
  regime.load.features = {.rate = std::log2(rate), .prompt = 9, .output = 7};
  regime.best.max_num_batched_tokens = budget;
  regime.evidence = {.windows = 4, .judged = 400, .good = 396};
  regime.visits = 3;
  regime.last_seen = now - 60;
  regime.measured = now - 60;
  return regime;
}

class RegimesCommandTest : public ::testing::Test {
 protected:
  [[nodiscard]] std::filesystem::path inbox() const { return folder_.path() / "regimes.import.json"; }
  static std::string text_of(const std::vector<tuner::Regime>& regimes, const std::string& key) {
    return tuner::regimes_to_json(regimes, key);
  }
  [[nodiscard]] std::unique_ptr<tuner::Journal> journal() const {
    auto opened = tuner::Journal::open((folder_.path() / "journal.sqlite").string());
    CHECK(opened.has_value(), opened.error().message);
    return *std::move(opened);
  }
  [[nodiscard]] Result<RegimesImport> import(const std::string& text, const Options& options = {}) const {
    return import_regimes(folder_.path(), text, options, now);
  }

  test::TemporaryFolder folder_;
};

TEST_F(RegimesCommandTest, what_one_node_exports_another_takes_at_its_start) {
  const std::vector<tuner::Regime> learnt{regime_of(2, 256), regime_of(16, 1024)};
  const auto imported = import(text_of(learnt, "model a"));
  ASSERT_TRUE(imported) << imported.error().message;
  EXPECT_EQ(imported->model_key, "model a");
  EXPECT_EQ(imported->read, 2U);
  const auto own = journal();
  ASSERT_EQ(own->regimes("model a")->size(), 0U) << "a running daemon's journal is left alone";

  const auto taken = take_imported_regimes(*own, "model a", folder_.path(), now);
  ASSERT_TRUE(taken) << taken.error().message;
  EXPECT_EQ(*taken, 2U);
  const auto regimes = own->regimes("model a");
  ASSERT_TRUE(regimes);
  ASSERT_EQ(regimes->size(), 2U);
  EXPECT_EQ(regimes->at(0).best.max_num_batched_tokens, 256);
  EXPECT_EQ(regimes->at(1).best.max_num_batched_tokens, 1024);
  EXPECT_FALSE(std::filesystem::exists(inbox()));
  EXPECT_EQ(*take_imported_regimes(*own, "model a", folder_.path(), now), 0U) << "once is enough";
}

TEST_F(RegimesCommandTest, taking_in_keeps_what_was_known) {
  const auto own = journal();
  ASSERT_TRUE(own->keep_regimes("model a", std::vector{regime_of(2, 256)}));
  ASSERT_TRUE(import(text_of({regime_of(64, 2048)}, "model a")));
  ASSERT_TRUE(import(text_of({regime_of(16, 1024)}, "model a"))) << "imports add up";
  ASSERT_TRUE(take_imported_regimes(*own, "model a", folder_.path(), now));
  EXPECT_EQ(own->regimes("model a")->size(), 3U);
}

TEST_F(RegimesCommandTest, export_shows_the_journal_and_what_waits) {
  const auto nothing = exported_regimes(folder_.path(), "", now);
  ASSERT_FALSE(nothing);
  EXPECT_EQ(nothing.error().code, ErrorCode::NotFound);
  const auto own = journal();
  ASSERT_TRUE(own->keep_regimes("model b", std::vector{regime_of(4, 64)}));
  ASSERT_TRUE(own->keep_regimes("model a", std::vector{regime_of(2, 256)}));
  ASSERT_TRUE(write_calibration(calibration_path(folder_.path()), {.model_key = "model a", .laws = {}}));
  ASSERT_TRUE(import(text_of({regime_of(64, 2048)}, "model a")));
  const auto exported = exported_regimes(folder_.path(), "", now);
  ASSERT_TRUE(exported) << exported.error().message;
  EXPECT_EQ(exported->model_key, "model a") << "the daemon's last one";
  EXPECT_EQ(exported->regimes.size(), 2U);
  EXPECT_EQ(exported->other_models, std::vector<std::string>{"model b"});
  EXPECT_EQ(exported_regimes(folder_.path(), "model b", now)->regimes.size(), 1U);
}

TEST_F(RegimesCommandTest, regimes_of_another_model_are_refused_unless_asked_for) {
  ASSERT_TRUE(write_calibration(calibration_path(folder_.path()), {.model_key = "model a", .laws = {}}));
  const std::string foreign = text_of({regime_of(2, 256)}, "model b");
  const auto refused = import(foreign);
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code, ErrorCode::Conflict);
  EXPECT_EQ(refused.error().field, "modelKey");
  EXPECT_THAT(refused.error().message, HasSubstr("'model b'"));
  EXPECT_THAT(refused.error().message, HasSubstr("'model a'"));
  EXPECT_FALSE(std::filesystem::exists(inbox()));

  Options any;
  any.model_keys = ModelKeys::Any;
  const auto taken = import(foreign, any);
  ASSERT_TRUE(taken) << taken.error().message;
  EXPECT_EQ(taken->model_key, "model a") << "from now on they are this folder's";
  const auto own = journal();
  EXPECT_EQ(*take_imported_regimes(*own, "model a", folder_.path(), now), 1U);
}

TEST_F(RegimesCommandTest, a_folder_without_a_model_yet_takes_what_fits_at_the_start) {
  ASSERT_TRUE(import(text_of({regime_of(2, 256)}, "model b")));
  const auto own = journal();
  const auto other = take_imported_regimes(*own, "model a", folder_.path(), now);
  ASSERT_FALSE(other);
  EXPECT_EQ(other.error().code, ErrorCode::Conflict);
  EXPECT_TRUE(std::filesystem::exists(inbox())) << "nothing is lost";
  EXPECT_FALSE(import(text_of({regime_of(2, 256)}, "model c"))) << "one model at a time";
  EXPECT_EQ(*take_imported_regimes(*own, "model b", folder_.path(), now), 1U);

  Options any;
  any.model_keys = ModelKeys::Any;
  const test::TemporaryFolder fresh;
  ASSERT_TRUE(import_regimes(fresh.path(), text_of({regime_of(2, 256)}, "model b"), any, now));
  EXPECT_EQ(*take_imported_regimes(*own, "model a", fresh.path(), now), 1U);
}

TEST_F(RegimesCommandTest, faults_are_told_by_their_field_and_change_nothing) {
  nlohmann::json json = nlohmann::json::parse(text_of({regime_of(2, 256), regime_of(16, 1024)}, "model a"));
  json["items"][1]["visits"] = "many";
  const auto fault = import(json.dump());
  ASSERT_FALSE(fault);
  EXPECT_EQ(fault.error().code, ErrorCode::InvalidArgument);
  EXPECT_EQ(fault.error().field, "items[1].visits");
  EXPECT_FALSE(import("no JSON"));
  EXPECT_FALSE(std::filesystem::exists(inbox()));
  EXPECT_FALSE(import_regimes(folder_.path() / "absent", text_of({}, "model a"), {}, now));
}

TEST(CalibrationFile, comes_back_as_it_was_written_and_names_what_is_wrong) {
  const test::TemporaryFolder folder;
  const auto path = calibration_path(folder.path());
  Calibration calibration{.model_key = "model \"a\"", .laws = {}};
  for (int i = 1; i <= 300; ++i) {
    policies::StepFeatures features;
    features.add_chunk(0, 8 * (i % 40 + 1));
    calibration.laws.observe({.features = features, .duration = std::chrono::microseconds(100 + 80 * (i % 40 + 1))});
  }
  ASSERT_TRUE(write_calibration(path, calibration));
  const auto read = read_calibration(path);
  ASSERT_TRUE(read) << read.error().message;
  EXPECT_EQ(read->model_key, calibration.model_key);
  EXPECT_EQ(read->laws.observation_count(), 300U);
  EXPECT_EQ(calibration_to_json(*read), calibration_to_json(calibration));

  const auto expect_fault = [&](const std::string& text, const std::string& field) {
    const auto fault = read_calibration(folder.write("bad.json", text));
    ASSERT_FALSE(fault) << text;
    EXPECT_EQ(fault.error().field, field) << fault.error().message;
    EXPECT_THAT(fault.error().message, HasSubstr("bad.json"));
  };
  nlohmann::json json = nlohmann::json::parse(calibration_to_json(calibration));
  expect_fault("{", "");
  const auto without = [&](const char* name) {
    nlohmann::json less = json;
    less.erase(name);
    return less.dump();
  };
  for (const char* name : {"apiVersion", "kind", "modelKey", "laws"}) expect_fault(without(name), name);
  json["kind"] = "Regimes";
  expect_fault(json.dump(), "kind");
  EXPECT_FALSE(read_calibration(folder.path() / "absent.json"));
}

TEST(DurableWrite, replaces_a_file_whole_and_leaves_it_where_it_cannot) {
  const test::TemporaryFolder folder;
  const auto path = folder.path() / "file";
  ASSERT_TRUE(write_durably(path, "one"));
  ASSERT_TRUE(write_durably(path, "two"));
  EXPECT_EQ(*read_whole(path, 100), "two");
  EXPECT_FALSE(read_whole(path, 2)) << "larger than what may be read";
  std::filesystem::create_directory(path.string() + ".new");
  EXPECT_FALSE(write_durably(path, "three"));
  EXPECT_EQ(*read_whole(path, 100), "two");
}

}  // namespace
}  // namespace rubato
