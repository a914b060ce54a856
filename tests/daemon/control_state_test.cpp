// SPDX-License-Identifier: Apache-2.0
#include "daemon/control/control_state.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>

#include "daemon/control/conditions.h"
#include "daemon/control/events.h"
#include "daemon/control/health.h"
#include "daemon/control/selector.h"
#include "daemon/control/state_file.h"

namespace rubato::control {
namespace {

using namespace std::chrono_literals;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr WallTime start{std::chrono::sys_days(std::chrono::year(2026) / 11 / 30)};

ReadManifest manifest_of(const std::string& spec_lines) {
  const auto read = parse_manifest(
      "apiVersion: rubato.dev/v1alpha1\nkind: Engine\nmetadata: {name: chat, labels: {team: a}}\nspec:\n  model: {path: /m}\n" +
          spec_lines,
      "chat.yaml");
  CHECK(read.has_value(), read.failure().text());
  return *read;
}

SavedState fresh() {
  SavedState state;
  state.uid = "uid-1";
  state.created = start;
  return state;
}

class ControlStateTest : public ::testing::Test {
 protected:
  ControlState state_{manifest_of(""), fresh(), start};

  PatchResult patch(const char* body, WallTime now = start) {
    auto outcome = state_.patch({.body = Json::parse(body)}, "7", now);
    if (auto* error = std::get_if<StatusError>(&outcome)) {
      ADD_FAILURE() << error->message;
      return {};
    }
    return std::get<PatchResult>(outcome);
  }
  StatusError refused(const char* body, FieldValidation validation = FieldValidation::Warn) {
    const SavedState before = state_.saved();
    auto outcome = state_.patch({.body = Json::parse(body), .validation = validation}, "7", start);
    EXPECT_EQ(before, state_.saved()) << "a refused patch changes nothing";
    if (auto* error = std::get_if<StatusError>(&outcome)) return *error;
    ADD_FAILURE() << body << " was taken";
    return {};
  }
  std::int32_t budget() const { return state_.effective().values.max_num_batched_tokens; }
};

TEST_F(ControlStateTest, an_override_wins_at_once_and_its_removal_falls_back_to_the_layer_below) {
  EXPECT_EQ(budget(), 512);
  patch(R"({"spec":{"knobs":{"maxNumBatchedTokens":{"initial":1024}}}})");
  EXPECT_EQ(budget(), 1024);
  EXPECT_EQ(state_.effective().origin("maxNumBatchedTokens"), Layer::Api);
  patch(R"({"spec":{"override":{"maxNumBatchedTokens":256}}})");
  EXPECT_EQ(budget(), 256);
  EXPECT_EQ(state_.effective().origin("maxNumBatchedTokens"), Layer::Override);
  patch(R"({"spec":{"override":null}})");
  EXPECT_EQ(budget(), 1024);
  patch(R"({"spec":{"knobs":null}})");
  EXPECT_EQ(budget(), 512);
  EXPECT_EQ(state_.effective().origin("maxNumBatchedTokens"), Layer::File);
}

TEST_F(ControlStateTest, generation_counts_changes_of_the_spec_and_nothing_else) {
  EXPECT_EQ(state_.saved().generation, 1);
  EXPECT_THAT(patch(R"({"spec":{"objectives":{"ttft":"300ms"}}})").fields, ElementsAre("spec.objectives.ttft"));
  EXPECT_EQ(state_.saved().generation, 2);
  patch(R"({"spec":{"objectives":{"ttft":"0.3s"}}})");
  patch(R"({"metadata":{"labels":{"tier":"gold"}}})");
  patch(R"({"status":{"settings":{"number":9}}})");
  EXPECT_EQ(state_.saved().generation, 2);
}

TEST_F(ControlStateTest, an_override_expires_counted_from_when_it_was_set) {
  patch(R"({"spec":{"override":{"maxNumBatchedTokens":256,"expiresAfter":"10m"}}})", start + 1min);
  EXPECT_EQ(state_.override_expires(), start + 11min);
  EXPECT_FALSE(state_.expire(start + 11min - 1ms));
  EXPECT_EQ(budget(), 256);
  EXPECT_TRUE(state_.expire(start + 11min));
  EXPECT_EQ(budget(), 512);
  EXPECT_FALSE(state_.spec().override_);
  EXPECT_FALSE(state_.override_expires());
  EXPECT_FALSE(state_.expire(start + 12min));
}

TEST_F(ControlStateTest, writing_an_override_again_starts_its_time_anew_and_other_patches_do_not) {
  patch(R"({"spec":{"override":{"maxNumBatchedTokens":256,"expiresAfter":"10m"}}})", start);
  patch(R"({"spec":{"objectives":{"itl":"40ms"}}})", start + 5min);
  EXPECT_EQ(state_.override_expires(), start + 10min);
  patch(R"({"spec":{"override":{"maxNumBatchedTokens":128}}})", start + 6min);
  EXPECT_EQ(state_.override_expires(), start + 16min);
}

TEST_F(ControlStateTest, an_override_of_the_file_expires_and_neither_a_reload_nor_a_restart_revives_it) {
  const auto with_pin = manifest_of("  override: {maxNumBatchedTokens: 256, expiresAfter: 10m}\n");
  ASSERT_TRUE(state_.reload(with_pin, start));
  EXPECT_EQ(budget(), 256);
  EXPECT_TRUE(state_.expire(start + 10min));
  EXPECT_EQ(budget(), 512);
  ASSERT_TRUE(state_.reload(with_pin, start + 11min));
  EXPECT_EQ(budget(), 512);
  const ControlState restarted(with_pin, state_.saved(), start + 12min);
  EXPECT_EQ(restarted.effective().values.max_num_batched_tokens, 512);
  ASSERT_TRUE(state_.reload(manifest_of("  override: {maxNumBatchedTokens: 128, expiresAfter: 10m}\n"), start + 13min));
  EXPECT_EQ(budget(), 128) << "a new one counts anew";
  EXPECT_EQ(state_.override_expires(), start + 23min);
}

TEST_F(ControlStateTest, a_proposal_moves_free_knobs_and_pins_stay) {
  patch(R"({"spec":{"override":{"maxNumBatchedTokens":256}}})");
  KnobValues wanted = state_.effective().values;
  wanted.max_num_batched_tokens = 900;
  wanted.priority_policy = PriorityPolicy::DecodeFirst;
  const std::uint64_t revision = state_.tuning_input().revision;
  ASSERT_TRUE(state_.propose(wanted, start));
  EXPECT_EQ(budget(), 256);
  EXPECT_EQ(state_.effective().values.priority_policy, PriorityPolicy::DecodeFirst);
  EXPECT_EQ(state_.effective().origin("priorityPolicy"), Layer::Tuner);
  EXPECT_EQ(state_.tuning_input().revision, revision) << "its own proposal is no news to the loop";
  EXPECT_FALSE(state_.tuning_input().space.max_num_batched_tokens_free);
  EXPECT_TRUE(state_.tuning_input().space.priority_policy_free);
}

TEST_F(ControlStateTest, a_proposal_outside_the_space_is_refused_whole) {
  KnobValues wanted = state_.effective().values;
  wanted.max_num_batched_tokens = 1 << 20;
  wanted.priority_policy = PriorityPolicy::DecodeFirst;
  const auto refusal = state_.propose(wanted, start);
  ASSERT_FALSE(refusal);
  EXPECT_EQ(refusal.error().code, ErrorCode::InvalidArgument);
  EXPECT_EQ(state_.effective().values.priority_policy, PriorityPolicy::Deadline);
}

TEST_F(ControlStateTest, turning_tuning_off_returns_to_where_the_knobs_start) {
  KnobValues wanted = state_.effective().values;
  wanted.max_num_batched_tokens = 1024;
  ASSERT_TRUE(state_.propose(wanted, start));
  patch(R"({"spec":{"tuning":{"enabled":false}}})");
  EXPECT_EQ(budget(), 512);
  EXPECT_EQ(state_.propose(wanted, start).error().code, ErrorCode::Unavailable);
  patch(R"({"spec":{"tuning":{"enabled":true}}})");
  EXPECT_EQ(budget(), 512) << "an old proposal does not come back";
}

TEST_F(ControlStateTest, moving_where_a_knob_starts_beats_an_older_proposal) {
  KnobValues wanted = state_.effective().values;
  wanted.max_num_batched_tokens = 1024;
  wanted.deadline_margin = 30;
  ASSERT_TRUE(state_.propose(wanted, start));
  const std::uint64_t revision = state_.tuning_input().revision;
  patch(R"({"spec":{"knobs":{"maxNumBatchedTokens":{"initial":700}}}})");
  EXPECT_EQ(budget(), 700);
  EXPECT_EQ(state_.effective().values.deadline_margin, 30);
  EXPECT_GT(state_.tuning_input().revision, revision);
}

TEST_F(ControlStateTest, with_every_knob_pinned_tuning_is_off) {
  patch(R"({"spec":{"override":{"maxNumBatchedTokens":256,"maxNumSeqs":32,"priorityPolicy":"Deadline","deadlineMargin":20}}})");
  EXPECT_FALSE(state_.tuning_input().tuning.enabled);
}

TEST_F(ControlStateTest, errors_name_every_field_and_nothing_is_stored) {
  const StatusError error =
      refused(R"({"spec":{"objectives":{"ttft":"fast","attainment":101},"override":{"priorityPolicy":"Fifo"}}})");
  EXPECT_EQ(error.code, 422);
  EXPECT_EQ(error.reason, "Invalid");
  ASSERT_EQ(error.causes.size(), 3U);
  EXPECT_THAT(error.message, ::testing::StartsWith("Engine.rubato.dev \"chat\" is invalid: ["));
  EXPECT_EQ(error.causes[2].reason, "FieldValueNotSupported");
}

TEST_F(ControlStateTest, fields_fixed_at_start_may_be_repeated_but_not_changed) {
  patch(R"({"spec":{"model":{"path":"/m"},"capacity":{"maxNumSeqs":64}}})");
  EXPECT_EQ(state_.saved().generation, 1);
  const StatusError error = refused(R"({"spec":{"model":{"path":"/other"}}})");
  EXPECT_EQ(error.code, 422);
  EXPECT_EQ(error.causes.at(0).reason, "FieldValueForbidden");
  EXPECT_EQ(error.causes.at(0).field, "spec.model.path");
}

TEST_F(ControlStateTest, unknown_fields_follow_field_validation) {
  const char* body = R"({"spec":{"objectives":{"tttft":"1s","itl":"45ms"}},"specs":{}})";
  EXPECT_EQ(refused(body, FieldValidation::Strict).message,
            "Engine in version \"v1alpha1\" cannot be handled as a Engine: strict decoding error: unknown field \"specs\", "
            "unknown field "
            "\"spec.objectives.tttft\"");
  const PatchResult warned = patch(body);
  EXPECT_THAT(warned.warnings, ElementsAre("unknown field \"specs\"", "unknown field \"spec.objectives.tttft\""));
  EXPECT_EQ(state_.spec().objectives.itl, 45ms) << "the known part is taken";
  EXPECT_FALSE(state_.saved().api["objectives"].contains("tttft"));
}

TEST_F(ControlStateTest, a_stale_version_another_name_kind_or_group_are_refused) {
  EXPECT_EQ(refused(R"({"metadata":{"resourceVersion":"6"},"spec":{}})").code, 409);
  EXPECT_EQ(refused(R"({"metadata":{"uid":"uid-0"}})").code, 409);
  EXPECT_EQ(refused(R"({"metadata":{"name":"other"}})").message,
            "the name of the object (other) does not match the name on the URL (chat)");
  EXPECT_EQ(refused(R"({"apiVersion":"v1"})").message,
            "the API version in the data (v1) does not match the expected API version (rubato.dev/v1alpha1)");
  EXPECT_EQ(refused(R"({"kind":"Pod"})").code, 400);
  EXPECT_EQ(refused("[]").code, 400);
  EXPECT_EQ(refused("null").code, 400);
  patch(R"({"metadata":{"resourceVersion":"7"},"spec":{"objectives":{"itl":"45ms"}}})");
}

TEST_F(ControlStateTest, labels_and_annotations_are_merged_over_those_of_the_file) {
  patch(R"({"metadata":{"labels":{"tier":"gold","team":"b"},"annotations":{"note":"x"}}})");
  EXPECT_EQ(state_.labels(), Json::parse(R"({"team":"b","tier":"gold"})"));
  patch(R"({"metadata":{"labels":{"team":null},"annotations":null}})");
  EXPECT_EQ(state_.labels(), Json::parse(R"({"team":"a","tier":"gold"})"));
  EXPECT_TRUE(state_.annotations().empty());
  EXPECT_EQ(refused(R"({"metadata":{"labels":{"a b":"c"}}})").code, 422);
  EXPECT_EQ(refused(R"({"metadata":{"labels":{"a":1}}})").code, 422);
  EXPECT_EQ(refused(R"({"metadata":{"annotations":[]}})").code, 422);
}

TEST_F(ControlStateTest, a_reload_names_what_needs_a_restart_and_applies_the_rest) {
  ASSERT_TRUE(state_.reload(manifest_of("  capacity: {maxModelLen: 2048}\n  objectives: {ttft: 200ms}\n"
                                        "  knobs: {maxNumBatchedTokens: {initial: 6000, min: 5000, max: 8192}}\n"),
                            start));
  EXPECT_THAT(state_.restart_required(), ElementsAre("spec.capacity.maxModelLen", "spec.knobs.maxNumBatchedTokens.max"));
  EXPECT_EQ(state_.spec().capacity.max_model_len, 2048) << "the object shows what is wanted";
  EXPECT_EQ(state_.running_spec().capacity.max_model_len, 4096);
  EXPECT_EQ(state_.running_spec().objectives.ttft, 200ms);
  EXPECT_EQ(budget(), 4096) << "within what start-up took memory for";
  ASSERT_TRUE(state_.reload(manifest_of(""), start));
  EXPECT_TRUE(state_.restart_required().empty());
}

TEST_F(ControlStateTest, a_reload_under_another_name_or_against_the_api_layer_is_refused_whole) {
  patch(R"({"spec":{"override":{"maxNumBatchedTokens":256}}})");
  const SavedState before = state_.saved();
  const auto refusal = state_.reload(manifest_of("  knobs: {maxNumBatchedTokens: {initial: 512, min: 300, max: 4096}}\n"), start);
  ASSERT_FALSE(refusal);
  EXPECT_THAT(refusal.error().message, HasSubstr("what was set over the API: spec.override.maxNumBatchedTokens"));
  ReadManifest renamed = manifest_of("");
  renamed.manifest.name = "other";
  EXPECT_FALSE(state_.reload(renamed, start));
  EXPECT_EQ(state_.saved(), before);
  EXPECT_EQ(budget(), 256);
}

TEST_F(ControlStateTest, a_saved_layer_that_no_longer_fits_is_dropped_at_start) {
  patch(R"({"spec":{"override":{"maxNumBatchedTokens":256}}})");
  const ControlState next(manifest_of("  knobs: {maxNumBatchedTokens: {initial: 512, min: 300, max: 4096}}\n"), state_.saved(),
                          start);
  EXPECT_EQ(next.effective().values.max_num_batched_tokens, 512);
  EXPECT_THAT(next.dropped(), HasSubstr("spec.override.maxNumBatchedTokens"));
}

// ---- the state file ----

class StateFileTest : public ::testing::Test {
 protected:
  StateFileTest() {
    std::string pattern = (std::filesystem::temp_directory_path() / "rubato-state-XXXXXX").string();
    CHECK(mkdtemp(pattern.data()) != nullptr);
    directory_ = pattern;
  }
  ~StateFileTest() override { std::filesystem::remove_all(directory_); }
  std::filesystem::path directory_;
};

TEST_F(StateFileTest, what_was_saved_is_loaded_again) {
  SavedState state = fresh();
  state.generation = 4;
  state.api = Json::parse(R"({"override":{"maxNumBatchedTokens":256}})");
  state.api_override_set = start + 1234ms;
  state.labels = Json::parse(R"({"tier":"gold"})");
  state.file_override.emplace();
  state.file_override->max_num_batched_tokens = 128;
  state.file_override->expires_after = 10min;
  StateFile file(directory_ / "made" / "here", "chat");
  EXPECT_FALSE(file.load().state);
  ASSERT_TRUE(file.save(state));
  ASSERT_TRUE(file.save(state));
  EXPECT_EQ(StateFile(directory_ / "made" / "here", "chat").load().state, state);
}

TEST_F(StateFileTest, a_damaged_file_is_moved_aside_and_said) {
  for (
      const char* text :
      {"", "{", "[]", R"({"format":2})", R"({"format":1,"uid":5})",
       R"({"format":1,"uid":"u","created":0,"generation":1,"spec":[],"overrideSet":0,"labels":{},"annotations":{},"fileOverrideSet":0})"}) {
    std::ofstream(directory_ / "chat.state.json") << text;
    StateFile file(directory_, "chat");
    const LoadedState loaded = file.load();
    EXPECT_FALSE(loaded.state) << text;
    EXPECT_THAT(loaded.problem, HasSubstr("chat.state.json.damaged")) << text;
    EXPECT_TRUE(std::filesystem::exists(directory_ / "chat.state.json.damaged"));
    EXPECT_TRUE(file.load().problem.empty()) << "the second look finds none";
  }
}

TEST_F(StateFileTest, a_directory_that_cannot_be_written_is_an_error_with_its_name) {
  std::ofstream(directory_ / "file") << "x";
  StateFile file(directory_ / "file", "chat");
  EXPECT_THAT(file.save(fresh()).error().message, HasSubstr("file/chat.state.json"));
  EXPECT_TRUE(StateFile("", "chat").save(fresh())) << "without a directory nothing is kept";
}

// ---- conditions, events, health, selectors ----

tuner::Window window_of(std::int32_t judged, std::int32_t good) {
  tuner::Window window;
  window.judged = judged;
  window.good = good;
  return window;
}

const Condition& find(const std::vector<Condition>& conditions, const std::string& type) {
  return *std::find_if(conditions.begin(), conditions.end(), [&](const Condition& one) { return one.type == type; });
}

TEST(Conditions, all_are_there_at_first_sight_with_a_reason) {
  const auto conditions = compute_conditions({.generation = 3}, {}, start);
  ASSERT_EQ(conditions.size(), 6U);
  for (const auto& condition : conditions) {
    EXPECT_FALSE(condition.reason.empty()) << condition.type;
    EXPECT_EQ(condition.observed_generation, 3);
  }
  EXPECT_EQ(find(conditions, "Ready").reason, "Loading");
  EXPECT_EQ(find(conditions, "ObjectivesMet").status, ConditionStatus::Unknown);
}

TEST(Conditions, the_time_of_transition_moves_only_with_the_status) {
  ConditionInputs inputs{.serving = {.loaded = true}, .objectives = {.attainment = 99}};
  inputs.window = window_of(1000, 990);
  const auto first = compute_conditions(inputs, {}, start);
  EXPECT_EQ(find(first, "ObjectivesMet").status, ConditionStatus::True);
  inputs.window->good = 995;
  const auto second = compute_conditions(inputs, first, start + 10s);
  EXPECT_NE(find(second, "ObjectivesMet").message, find(first, "ObjectivesMet").message);
  EXPECT_EQ(find(second, "ObjectivesMet").last_transition, start);
  inputs.window->good = 989;
  const auto third = compute_conditions(inputs, second, start + 20s);
  EXPECT_EQ(find(third, "ObjectivesMet").status, ConditionStatus::False);
  EXPECT_THAT(find(third, "ObjectivesMet").message, HasSubstr("98.9% of 1000"));
  EXPECT_EQ(find(third, "ObjectivesMet").last_transition, start + 20s);
  EXPECT_EQ(find(third, "Ready").last_transition, start);
}

TEST(Conditions, readiness_does_not_depend_on_the_objectives) {
  ConditionInputs inputs{.serving = {.loaded = true}};
  inputs.window = window_of(100, 0);
  EXPECT_EQ(find(compute_conditions(inputs, {}, start), "Ready").status, ConditionStatus::True);
  inputs.serving.draining = true;
  EXPECT_EQ(find(compute_conditions(inputs, {}, start), "Ready").reason, "Draining");
  inputs.serving.failure = Error{.code = ErrorCode::DeviceLost, .field = {}, .message = "sticky"};
  EXPECT_EQ(find(compute_conditions(inputs, {}, start), "Ready").reason, "DeviceLost");
}

TEST(Conditions, only_a_twin_that_is_known_to_be_wrong_is_not_trusted) {
  const auto twin_trusted = [](const ConditionInputs& inputs) {
    const Condition found = find(compute_conditions(inputs, {}, start), "TwinTrusted");
    return std::tuple(found.status, found.reason);
  };
  ConditionInputs inputs;
  EXPECT_EQ(twin_trusted(inputs), std::tuple(ConditionStatus::Unknown, "Disabled")) << "nothing is tuned";
  inputs.tuning_enabled = true;
  EXPECT_EQ(twin_trusted(inputs), std::tuple(ConditionStatus::Unknown, "Starting"));
  inputs.twin.emplace().state = tuner::TwinState::Off;
  EXPECT_EQ(twin_trusted(inputs), std::tuple(ConditionStatus::Unknown, "Disabled"));
  inputs.twin->state = tuner::TwinState::Learning;
  EXPECT_EQ(twin_trusted(inputs), std::tuple(ConditionStatus::Unknown, "Learning"));
  inputs.twin->state = tuner::TwinState::Trusted;
  EXPECT_EQ(twin_trusted(inputs), std::tuple(ConditionStatus::True, "TwinAgrees"));
  inputs.twin->state = tuner::TwinState::Distrusted;
  inputs.twin->message = "TTFT p99 was 900 ms, not 300 ms";
  EXPECT_EQ(twin_trusted(inputs), std::tuple(ConditionStatus::False, "TwinDisagrees"));
  EXPECT_EQ(find(compute_conditions(inputs, {}, start), "TwinTrusted").message, inputs.twin->message);
}

TEST(Events, repeats_are_counted_and_the_log_is_bounded) {
  EventLog log;
  log.add(EventType::Warning, "Refused", "bad", start);
  log.add(EventType::Normal, "Other", "x", start + 1s);
  log.add(EventType::Warning, "Refused", "bad", start + 2s);
  ASSERT_EQ(log.events().size(), 2U);
  EXPECT_EQ(log.events().back().count, 2);
  EXPECT_EQ(log.events().back().first, start);
  EXPECT_EQ(log.events().back().last, start + 2s);
  for (int index = 0; index < 1000; ++index)
    log.add(EventType::Normal, "Many", std::to_string(index) + std::string(2000, 'x'), start);
  EXPECT_EQ(log.events().size(), EventLog::events_max);
  EXPECT_EQ(log.events().back().message.size(), EventLog::message_bytes_max);
}

TEST(Events, a_long_message_is_not_cut_inside_a_character) {
  EventLog log;
  log.add(EventType::Normal, "Long", std::string(1023, 'x') + "\xC3\xA9", start);
  EXPECT_EQ(log.events().back().message, std::string(1023, 'x'));
}

TEST(StallDetector, counts_from_the_first_look_that_saw_work) {
  StallDetector detector;
  TimePoint now{};
  EXPECT_FALSE(detector.look(5, false, now));
  now += 1h;
  EXPECT_FALSE(detector.look(5, true, now)) << "an idle hour is no stall";
  now += StallDetector::stalled_after;
  EXPECT_FALSE(detector.look(5, true, now));
  EXPECT_TRUE(detector.look(5, true, now + 1s));
  EXPECT_FALSE(detector.look(6, true, now + 1s)) << "a step ended";
}

TEST(WallTime, times_and_ages_read_as_kubernetes_shows_them) {
  EXPECT_EQ(format_time(start + 3723s), "2026-11-30T01:02:03Z");
  EXPECT_EQ(parse_time("2026-11-30T01:02:03Z"), start + 3723s);
  for (const char* bad : {"", "2026-11-30", "2026-13-30T01:02:03Z", "2026-11-30T25:02:03Z", "2026-11-30T01:02:03Zx"}) {
    EXPECT_FALSE(parse_time(bad)) << bad;
  }
  EXPECT_EQ(format_age(-5s), "0s");
  EXPECT_EQ(format_age(119s), "119s");
  EXPECT_EQ(format_age(200s), "3m20s");
  EXPECT_EQ(format_age(5h + 3min), "5h3m");
  EXPECT_EQ(format_age(24h * 20), "20d");
}

TEST(Selector, equality_forms_match_and_others_are_refused) {
  const auto holds = [](const char* text) {
    const auto selector = parse_selector(text);
    CHECK(selector.has_value(), text);
    return matches(*selector,
                   [](const std::string& key) { return key == "app" ? std::optional<std::string>("chat") : std::nullopt; });
  };
  EXPECT_TRUE(holds(""));
  EXPECT_TRUE(holds("app=chat"));
  EXPECT_TRUE(holds("app==chat, tier!=gold"));
  EXPECT_TRUE(holds("app,!tier"));
  EXPECT_FALSE(holds("app!=chat"));
  EXPECT_FALSE(holds("tier"));
  EXPECT_FALSE(parse_selector("app in (a,b)"));
  EXPECT_FALSE(parse_selector("=x"));
}

}  // namespace
}  // namespace rubato::control
