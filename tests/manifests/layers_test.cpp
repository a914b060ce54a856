// SPDX-License-Identifier: Apache-2.0
// File, API, override and tuner: who wins, what falls back, what may not change, and that no layering can contradict itself.
#include "manifests/layers.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <random>

#include "manifests/checks.h"
#include "manifests/json.h"

namespace rubato {
namespace {

using namespace std::chrono_literals;
using Json = nlohmann::ordered_json;
using testing::ElementsAre;

EngineSpec file_spec() {
  EngineSpec spec;
  spec.model.path = "/models/llama";
  return spec;
}

Decoded<PatchedLayer> patch(const ApiLayer& layer, const char* text) {
  return patch_api_layer(file_spec(), layer, Json::parse(text));
}

TEST(Layers, without_more_every_knob_starts_where_the_file_says) {
  const EffectiveKnobs knobs = effective_knobs({.file = file_spec()}, 0s);
  EXPECT_EQ(knobs.values, KnobValues());
  EXPECT_EQ(knobs.origins.size(), 8U);
  EXPECT_EQ(to_string(knobs.origin("mode")), "file");
  EXPECT_TRUE(knobs.clamped.empty());
}

TEST(Layers, a_patch_lies_over_the_file_and_null_falls_back_to_it) {
  const auto first = patch(ApiLayer::object(), R"({"objectives":{"ttft":"300ms"},"knobs":{"deadlineMargin":{"initial":30}}})");
  ASSERT_TRUE(first.ok());
  EXPECT_EQ(first.value.spec.objectives.ttft, 300ms);
  EXPECT_EQ(first.value.spec.objectives.itl, 50ms);
  Layers layers{.file = file_spec(), .api = first.value.layer};
  EXPECT_EQ(effective_knobs(layers, 0s).values.deadline_margin, 30);
  EXPECT_EQ(effective_knobs(layers, 0s).origin("deadlineMargin"), Layer::Api);
  EXPECT_EQ(effective_knobs(layers, 0s).origin("maxNumSeqs"), Layer::File);
  const auto second = patch(first.value.layer, R"({"objectives":{"ttft":null},"knobs":null})");
  ASSERT_TRUE(second.ok());
  EXPECT_EQ(second.value.layer, ApiLayer::object());
  EXPECT_EQ(second.value.spec, file_spec());
}

TEST(Layers, an_override_wins_at_once_and_falls_back_when_removed) {
  const auto set = patch(ApiLayer::object(), R"({"override":{"maxNumBatchedTokens":256,"priorityPolicy":"DecodeFirst"}})");
  ASSERT_TRUE(set.ok());
  Layers layers{.file = file_spec(), .api = set.value.layer};
  layers.tuned = KnobValues{.max_num_batched_tokens = 1024, .deadline_margin = 40};
  EffectiveKnobs knobs = effective_knobs(layers, 0s);
  EXPECT_EQ(knobs.values.max_num_batched_tokens, 256);
  EXPECT_EQ(knobs.values.priority_policy, PriorityPolicy::DecodeFirst);
  EXPECT_EQ(knobs.values.deadline_margin, 40);
  EXPECT_TRUE(knobs.pinned("maxNumBatchedTokens"));
  EXPECT_EQ(knobs.origin("deadlineMargin"), Layer::Tuner);
  const auto removed = patch(set.value.layer, R"({"override":null})");
  ASSERT_TRUE(removed.ok());
  layers.api = removed.value.layer;
  knobs = effective_knobs(layers, 0s);
  EXPECT_EQ(knobs.values.max_num_batched_tokens, 1024);
  EXPECT_EQ(knobs.origin("maxNumBatchedTokens"), Layer::Tuner);
}

TEST(Layers, the_override_of_the_api_lies_over_that_of_the_file_and_each_expires_by_itself) {
  Layers layers{.file = file_spec()};
  layers.file.override_ = OverrideSpec{.max_num_batched_tokens = 200, .deadline_margin = 10, .expires_after = 60s};
  layers.api = Json::parse(R"({"override":{"maxNumBatchedTokens":300,"expiresAfter":"10s"}})");
  layers.file_set_at = 100s;
  layers.api_override_set_at = 130s;
  const auto budget = [&](Duration now) { return effective_knobs(layers, now).values.max_num_batched_tokens; };
  EXPECT_EQ(budget(131s), 300);
  EXPECT_EQ(budget(140s - 1ns), 300);
  EXPECT_EQ(budget(140s), 200);
  EXPECT_EQ(effective_knobs(layers, 140s).origin("deadlineMargin"), Layer::Override);
  EXPECT_EQ(budget(160s), 512);
  EXPECT_EQ(effective_knobs(layers, 160s).origin("deadlineMargin"), Layer::File);
  EXPECT_EQ(override_expiry(*layers.file.override_, 100s), 160s);
  EXPECT_EQ(override_expiry(OverrideSpec(), 100s), std::nullopt);
  EXPECT_FALSE(override_expired(OverrideSpec(), 0s, 1000h));
}

TEST(Layers, a_tuner_that_is_switched_off_has_no_say) {
  Layers layers{.file = file_spec()};
  layers.file.tuning.enabled = false;
  layers.tuned = KnobValues{.max_num_batched_tokens = 1024};
  EXPECT_EQ(effective_knobs(layers, 0s).values, KnobValues());
  EXPECT_EQ(effective_knobs(layers, 0s).origin("maxNumBatchedTokens"), Layer::File);
}

TEST(Layers, restart_fields_are_forbidden_by_name_unless_nothing_changes) {
  const auto same =
      patch(ApiLayer::object(), R"({"model":{"path":"/models/llama"},"capacity":{"kvCacheMemory":"0.5Gi"},"devices":["cpu"]})");
  ASSERT_TRUE(same.ok());
  EXPECT_EQ(same.value.layer, ApiLayer::object());
  const auto fields = [](const Decoded<PatchedLayer>& patched) {
    std::vector<std::string> names;
    for (const FieldError& error : patched.errors) names.push_back(error.field + " " + status_cause(error).reason);
    return names;
  };
  EXPECT_THAT(
      fields(patch(ApiLayer::object(), R"({"model":{"path":"/other"},"capacity":{"maxModelLen":1},"objectives":{"ttft":"1s"}})")),
      ElementsAre("spec.model.path FieldValueForbidden", "spec.capacity.maxModelLen FieldValueForbidden"));
  EXPECT_THAT(fields(patch(ApiLayer::object(), R"({"model":null})")), ElementsAre("spec.model FieldValueForbidden"));
  EXPECT_THAT(fields(patch(ApiLayer::object(), R"({"capacity":{"maxModelLen":null}})")),
              ElementsAre("spec.capacity.maxModelLen FieldValueForbidden"));
  EXPECT_TRUE(patch(ApiLayer::object(), R"({"model":{"dtype":null,"synthetic":null}})").ok());
  EXPECT_THAT(fields(patch(ApiLayer::object(), R"({"knobs":{"maxNumBatchedTokens":{"max":8192}}})")),
              ElementsAre("spec.knobs.maxNumBatchedTokens.max FieldValueForbidden"));
  EXPECT_THAT(fields(patch(ApiLayer::object(),
                           R"({"knobs":{"mode":{"choices":["Chunked","Disaggregated"]}},"lanes":{"lockstep":"EveryStep"}})")),
              ElementsAre("spec.lanes.lockstep FieldValueForbidden", "spec.knobs.mode.choices FieldValueForbidden"));
}

TEST(Layers, mode_reservation_and_prefill_devices_move_over_the_api_and_an_override_wins) {
  EngineSpec file = file_spec();
  file.devices = {"cpu:0", "cpu:1", "cpu:2"};
  file.knobs.mode.choices = {Mode::Chunked, Mode::Disaggregated};
  file.knobs.prefill_devices.max = 2;
  const auto moved = patch_api_layer(
      file, ApiLayer::object(),
      Json::parse(
          R"({"knobs":{"mode":{"initial":"Disaggregated"},"reservation":{"initial":"Early"},"prefillDevices":{"initial":2}}})"));
  ASSERT_TRUE(moved.ok()) << describe(moved.errors.at(0));
  Layers layers{.file = file, .api = moved.value.layer};
  EffectiveKnobs knobs = effective_knobs(layers, 0s);
  EXPECT_EQ(knobs.values.mode, Mode::Disaggregated);
  EXPECT_EQ(knobs.values.reservation, Reservation::Early);
  EXPECT_EQ(knobs.values.prefill_devices, 2);
  EXPECT_EQ(knobs.origin("reservation"), Layer::Api);

  const auto pinned = patch_api_layer(file, moved.value.layer,
                                      Json::parse(R"({"override":{"reservation":"PrefillComplete","prefillDevices":1}})"));
  ASSERT_TRUE(pinned.ok()) << describe(pinned.errors.at(0));
  layers.api = pinned.value.layer;
  knobs = effective_knobs(layers, 0s);
  EXPECT_EQ(knobs.values.mode, Mode::Disaggregated);
  EXPECT_EQ(knobs.values.reservation, Reservation::PrefillComplete);
  EXPECT_EQ(knobs.values.prefill_devices, 1);
  EXPECT_TRUE(knobs.pinned("reservation"));
  EXPECT_TRUE(knobs.pinned("prefillDevices"));
}

TEST(Layers, a_bad_patch_is_refused_whole_with_all_its_errors) {
  const auto bad = patch(ApiLayer::object(),
                         R"({"override":{"maxNumBatchedTokens":1,"maxNumSeqs":"8","mod":"Chunked"},"objectives":{"ttft":5}})");
  ASSERT_EQ(bad.errors.size(), 3U);
  EXPECT_EQ(bad.errors[0].field, "spec.objectives.ttft");
  EXPECT_EQ(bad.errors[1].field, "spec.override.maxNumSeqs");
  EXPECT_EQ(bad.errors[2].field, "spec.override.maxNumBatchedTokens");
  ASSERT_EQ(bad.unknown.size(), 1U);
  EXPECT_EQ(bad.unknown[0].field, "spec.override.mod");
  EXPECT_FALSE(patch(ApiLayer::object(), "[1]").ok());
  EXPECT_TRUE(patch(ApiLayer::object(), "null").ok());
}

TEST(Layers, unknown_fields_and_empty_groups_are_never_stored) {
  const auto patched = patch(ApiLayer::object(), R"({"zzz":1,"override":{},"tuning":{"x":{"y":1},"window":"20s"}})");
  ASSERT_TRUE(patched.ok());
  EXPECT_EQ(patched.unknown.size(), 2U);
  EXPECT_EQ(patched.value.layer.dump(), R"({"tuning":{"window":"20s"}})");
  EXPECT_EQ(patched.value.spec.override_, std::nullopt);
}

TEST(Layers, a_layer_that_no_longer_fits_a_new_file_says_so_and_is_left_out) {
  const auto patched = patch(ApiLayer::object(), R"({"override":{"maxNumSeqs":60}})");
  ASSERT_TRUE(patched.ok());
  EngineSpec file = file_spec();
  file.knobs.max_num_seqs = {32, 8, 32};
  EXPECT_FALSE(apply_api_layer(file, patched.value.layer).ok());
  EXPECT_EQ(effective_knobs({.file = file, .api = patched.value.layer}, 0s).values.max_num_seqs, 32);
}

TEST(Layers, values_outside_the_bounds_are_clamped_visibly) {
  Layers layers{.file = file_spec()};
  layers.tuned = KnobValues{.max_num_batched_tokens = 1 << 20, .mode = Mode::Disaggregated};
  const EffectiveKnobs knobs = effective_knobs(layers, 0s);
  EXPECT_EQ(knobs.values.max_num_batched_tokens, 4096);
  EXPECT_EQ(knobs.values.mode, Mode::Chunked);
  EXPECT_THAT(knobs.clamped, ElementsAre(testing::StartsWith("maxNumBatchedTokens: 1048576 became 4096"),
                                         testing::StartsWith("mode: Disaggregated became Chunked")));
}

TEST(Layers, of_a_contradicting_budget_and_sequence_count_the_pinned_one_stands) {
  Layers layers{.file = file_spec()};
  layers.tuned = KnobValues{.max_num_batched_tokens = 64, .max_num_seqs = 64};
  EXPECT_EQ(effective_knobs(layers, 0s).values.max_num_batched_tokens, 80);
  layers.api = Json::parse(R"({"override":{"maxNumBatchedTokens":64}})");
  EXPECT_EQ(effective_knobs(layers, 0s).values.max_num_batched_tokens, 64);
  EXPECT_EQ(effective_knobs(layers, 0s).values.max_num_seqs, 48);
  layers.api = Json::parse(R"({"override":{"maxNumSeqs":60}})");
  EXPECT_EQ(effective_knobs(layers, 0s).values.max_num_batched_tokens, 76);
  EXPECT_EQ(effective_knobs(layers, 0s).values.max_num_seqs, 60);
}

TEST(Layers, whatever_passes_the_checks_ends_in_runnable_values_within_bounds) {
  const std::uint64_t seed = 77;
  std::mt19937_64 random(seed);
  const auto pick = [&](int low, int high) {
    return low + static_cast<int>(random() % static_cast<std::uint64_t>(high - low + 1));
  };
  int accepted = 0;
  for (int i = 0; i < 200'000; ++i) {
    EngineSpec spec = file_spec();
    IntegerKnob& budget = spec.knobs.max_num_batched_tokens;
    IntegerKnob& seqs = spec.knobs.max_num_seqs;
    budget = {pick(1, 120), pick(1, 60), pick(60, 120)};
    seqs = {pick(1, 64), pick(1, 30), pick(30, 64)};
    OverrideSpec pins;
    if (pick(0, 1) == 1) pins.max_num_batched_tokens = pick(1, 120);
    if (pick(0, 1) == 1) pins.max_num_seqs = pick(1, 64);
    spec.override_ = pins;
    if (!check_spec(spec).empty()) continue;
    ++accepted;
    const KnobValues wanted{.max_num_batched_tokens = pick(-5, 200), .max_num_seqs = pick(-5, 100)};
    const KnobValues values = fit_knobs(wanted, spec.knobs, pins);
    ASSERT_GE(values.max_num_batched_tokens, values.max_num_seqs + min_prefill_quantum) << "seed " << seed << " step " << i;
    ASSERT_GE(values.max_num_batched_tokens, budget.min) << "seed " << seed << " step " << i;
    ASSERT_LE(values.max_num_batched_tokens, budget.max) << "seed " << seed << " step " << i;
    ASSERT_GE(values.max_num_seqs, seqs.min) << "seed " << seed << " step " << i;
    ASSERT_LE(values.max_num_seqs, seqs.max) << "seed " << seed << " step " << i;
    ASSERT_EQ(values.max_num_batched_tokens, pins.max_num_batched_tokens.value_or(values.max_num_batched_tokens));
    ASSERT_EQ(values.max_num_seqs, pins.max_num_seqs.value_or(values.max_num_seqs));
    ASSERT_EQ(fit_knobs(values, spec.knobs, pins), values);
  }
  EXPECT_GT(accepted, 1'000);
}

}  // namespace
}  // namespace rubato
