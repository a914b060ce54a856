// SPDX-License-Identifier: Apache-2.0
// Rules between fields, each broken alone.
#include "manifests/checks.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>

#include "manifests/decode.h"
#include "manifests/device_name.h"
#include "manifests/json.h"

namespace rubato {
namespace {

EngineSpec good_spec() {
  EngineSpec spec;
  spec.model.path = "/models/llama";
  return spec;
}

EngineSpec synthetic_spec() {
  EngineSpec spec;
  spec.model.synthetic =
      SyntheticModel{.hidden_size = 64, .layers = 2, .heads = 8, .kv_heads = 4, .feed_forward = 128, .vocabulary = 300};
  return spec;
}

EngineSpec hybrid_spec() {
  EngineSpec spec = synthetic_spec();
  spec.model.synthetic->architecture = Architecture::Hybrid;
  spec.model.synthetic->layers = 4;
  return spec;
}

EngineSpec mamba2_spec() {
  EngineSpec spec;
  spec.model.synthetic = SyntheticModel{.architecture = Architecture::Mamba2, .hidden_size = 64, .layers = 2, .vocabulary = 300};
  return spec;
}

struct BrokenCase {
  std::string field;
  std::string says;
  std::function<void(EngineSpec&)> breaks;
};

TEST(Checks, good_specs_pass) {
  EXPECT_TRUE(check_spec(good_spec()).empty());
  EXPECT_TRUE(check_spec(synthetic_spec()).empty());
  EXPECT_TRUE(check_spec(hybrid_spec()).empty());
  EXPECT_TRUE(check_spec(mamba2_spec()).empty());
}

TEST(Checks, each_broken_rule_is_one_error_at_its_field) {
  const std::vector<BrokenCase> cases{
      {"spec.model", "is required: exactly one of path and synthetic", [](EngineSpec& s) { s.model = {}; }},
      {"spec.model", "path and synthetic must not both be set",
       [](EngineSpec& s) { s.model.synthetic = synthetic_spec().model.synthetic; }},
      {"spec.model.synthetic.kvHeads", "3 must divide heads (8)",
       [](EngineSpec& s) { s = synthetic_spec(), s.model.synthetic->kv_heads = 3; }},
      {"spec.model.synthetic.heads", "8 must divide hiddenSize (60)",
       [](EngineSpec& s) { s = synthetic_spec(), s.model.synthetic->hidden_size = 60; }},
      {"spec.model.synthetic.heads", "hiddenSize / heads is 9",
       [](EngineSpec& s) { s = synthetic_spec(), s.model.synthetic->hidden_size = 72; }},
      {"spec.model.synthetic.headSize", "7 must be even",
       [](EngineSpec& s) { s = synthetic_spec(), s.model.synthetic->head_size = 7; }},
      {"spec.model.synthetic.heads", "is required: by architecture Llama",
       [](EngineSpec& s) { s = synthetic_spec(), s.model.synthetic->heads = 0; }},
      {"spec.model.synthetic.kvHeads", "is required: by architecture Hybrid",
       [](EngineSpec& s) { s = hybrid_spec(), s.model.synthetic->kv_heads = 0; }},
      {"spec.model.synthetic.feedForward", "is required: by architecture Hybrid",
       [](EngineSpec& s) { s = hybrid_spec(), s.model.synthetic->feed_forward = 0; }},
      {"spec.model.synthetic.kvHeads", "3 must divide heads (8)",
       [](EngineSpec& s) { s = hybrid_spec(), s.model.synthetic->kv_heads = 3; }},
      {"spec.model.synthetic.feedForward", "128 must be left out: architecture Mamba2",
       [](EngineSpec& s) { s = mamba2_spec(), s.model.synthetic->feed_forward = 128; }},
      {"spec.model.synthetic.attentionEvery", "2 must be left out: architecture Mamba2",
       [](EngineSpec& s) { s = mamba2_spec(), s.model.synthetic->attention_every = 2; }},
      {"spec.model.synthetic.attentionEvery", "4 must be 2..3 (layers)",
       [](EngineSpec& s) { s = hybrid_spec(), s.model.synthetic->layers = 3; }},
      {"spec.model.synthetic.attentionEvery", "1 must be 2..4 (layers)",
       [](EngineSpec& s) { s = hybrid_spec(), s.model.synthetic->attention_every = 1; }},
      {"spec.model.synthetic.mambaHeadSize", "48 must divide 2 * hiddenSize (128) unless mambaHeads is given",
       [](EngineSpec& s) { s = mamba2_spec(), s.model.synthetic->mamba_head_size = 48; }},
      {"spec.model.synthetic.mambaGroups", "3 must divide the number of heads (2)",
       [](EngineSpec& s) { s = mamba2_spec(), s.model.synthetic->mamba_groups = 3; }},
      {"spec.model.synthetic.mambaGroups", "3 must divide the number of heads (4)",
       [](EngineSpec& s) { s = hybrid_spec(), s.model.synthetic->mamba_groups = 3, s.model.synthetic->mamba_heads = 4; }},
      {"spec.devices[0]", "\"gpu\" must be cpu, cpu:<index> or cuda:<index>, index 0..999",
       [](EngineSpec& s) { s.devices = {"gpu"}; }},
      {"spec.devices[1]", "\"cuda:01\" must be",
       [](EngineSpec& s) {
         s.devices = {"cuda:0", "cuda:01"};
       }},
      {"spec.devices[0]", "\"cuda\" must be", [](EngineSpec& s) { s.devices = {"cuda"}; }},
      {"spec.devices[1]", "\"cpu:0\" is in the list twice",
       [](EngineSpec& s) {
         s.devices = {"cpu", "cpu:0"};
       }},
      {"spec.devices[0]", "\"cpu:1000\" must be", [](EngineSpec& s) { s.devices = {"cpu:1000"}; }},
      {"spec.devices[0]", "\"cpu:\" must be", [](EngineSpec& s) { s.devices = {"cpu:"}; }},
      {"spec.devices[2]",
       "\"cuda:0\" must be of one family with \"cpu:1\" (spec.devices[0]): an engine runs on CPU devices or on CUDA devices, not "
       "on both",
       [](EngineSpec& s) {
         s.devices = {"cpu:1", "cpu", "cuda:0"};
       }},
      {"spec.devices[1]", "\"cpu:0\" must be of one family with \"cuda:0\" (spec.devices[0])",
       [](EngineSpec& s) {
         s.devices = {"cuda:0", "cpu:0"};
       }},
      {"spec.knobs.prefillDevices.max", "2 must not be above 1: spec.devices has one device",
       [](EngineSpec& s) { s.knobs.prefill_devices.max = 2; }},
      {"spec.knobs.prefillDevices.max", "3 must not be above 2: of 3 devices one must be left to decode",
       [](EngineSpec& s) {
         s.devices = {"cpu:0", "cpu:1", "cpu:2"}, s.knobs.prefill_devices.max = 3;
       }},
      {"spec.override.prefillDevices", "2 is outside spec.knobs.prefillDevices, 1..1",
       [](EngineSpec& s) { s.override_ = OverrideSpec{.prefill_devices = 2}; }},
      {"spec.knobs.reservation.initial", "\"Early\" must be one of the knob's choices",
       [](EngineSpec& s) {
         s.knobs.reservation = {Reservation::Early, {Reservation::LastChunk}};
       }},
      {"spec.override.reservation", "\"Early\" is not one of LastChunk",
       [](EngineSpec& s) {
         s.knobs.reservation.choices = {Reservation::LastChunk};
         s.override_ = OverrideSpec{.reservation = Reservation::Early};
       }},
      {"spec.knobs.deadlineMargin.min", "30 must not be above max (20)",
       [](EngineSpec& s) {
         s.knobs.deadline_margin = {20, 30, 20};
       }},
      {"spec.knobs.deadlineMargin.initial", "5 must not be below min (10)",
       [](EngineSpec& s) {
         s.knobs.deadline_margin = {5, 10, 20};
       }},
      {"spec.knobs.deadlineMargin.initial", "25 must not be above max (20)",
       [](EngineSpec& s) {
         s.knobs.deadline_margin = {25, 10, 20};
       }},
      {"spec.knobs.priorityPolicy.initial", "\"Deadline\" must be one of the knob's choices",
       [](EngineSpec& s) { s.knobs.priority_policy.choices = {PriorityPolicy::DecodeFirst}; }},
      {"spec.knobs.mode.initial", "\"Disaggregated\" must be one of the knob's choices",
       [](EngineSpec& s) { s.knobs.mode.initial = Mode::Disaggregated; }},
      {"spec.override.mode", "\"Disaggregated\" is not one of Chunked",
       [](EngineSpec& s) { s.override_ = OverrideSpec{.mode = Mode::Disaggregated}; }},
      {"spec.knobs.maxNumBatchedTokens.initial", "79 must be at least maxNumSeqs.initial (64) + one prefill quantum (16) = 80",
       [](EngineSpec& s) { s.knobs.max_num_batched_tokens.initial = 79; }},
      {"spec.knobs.maxNumBatchedTokens.min", "23 must be at least maxNumSeqs.min (8) + one prefill quantum (16) = 24",
       [](EngineSpec& s) { s.knobs.max_num_batched_tokens.min = 23; }},
      {"spec.knobs.maxNumBatchedTokens.max", "79 must be at least maxNumSeqs.max (64) + one prefill quantum (16) = 80",
       [](EngineSpec& s) {
         s.knobs.max_num_batched_tokens = {79, 64, 79}, s.knobs.max_num_seqs.initial = 63;
       }},
      {"spec.knobs.maxNumSeqs.max", "64 must not be above spec.capacity.maxNumSeqs (63)",
       [](EngineSpec& s) { s.capacity.max_num_seqs = 63; }},
      {"spec.override.maxNumBatchedTokens", "63 is outside spec.knobs.maxNumBatchedTokens, 64..4096",
       [](EngineSpec& s) { s.override_ = OverrideSpec{.max_num_batched_tokens = 63}; }},
      {"spec.override.priorityPolicy", "\"Deadline\" is not one of DecodeFirst",
       [](EngineSpec& s) {
         s.knobs.priority_policy = {PriorityPolicy::DecodeFirst, {PriorityPolicy::DecodeFirst}};
         s.override_ = OverrideSpec{.priority_policy = PriorityPolicy::Deadline};
       }},
      {"spec.override.maxNumBatchedTokens",
       "64 must be at least maxNumSeqs (64) + one prefill quantum (16) = 80, because both are pinned",
       [](EngineSpec& s) { s.override_ = OverrideSpec{.max_num_batched_tokens = 64, .max_num_seqs = 64}; }},
  };
  for (const BrokenCase& c : cases) {
    EngineSpec spec = good_spec();
    c.breaks(spec);
    const FieldErrors errors = check_spec(spec);
    ASSERT_EQ(errors.size(), 1U) << c.field << " " << c.says;
    EXPECT_EQ(errors[0].field, c.field);
    EXPECT_THAT(describe(errors[0]), testing::HasSubstr(c.says));
  }
}

TEST(Checks, mode_disaggregated_may_start_and_be_pinned_where_it_is_a_choice) {
  EngineSpec spec = good_spec();
  spec.knobs.mode = {Mode::Disaggregated, {Mode::Chunked, Mode::Disaggregated}};
  spec.override_ = OverrideSpec{.mode = Mode::Disaggregated, .prefill_share = 30, .reservation = Reservation::Early};
  EXPECT_TRUE(check_spec(spec).empty());
}

TEST(Checks, several_devices_of_one_family_leave_one_to_decode) {
  for (const char* family : {"cpu:", "cuda:"}) {
    EngineSpec spec = good_spec();
    spec.devices.clear();
    for (const char* index : {"999", "0", "7", "10"}) spec.devices.push_back(std::string(family) + index);
    spec.knobs.prefill_devices = {.initial = 2, .min = 1, .max = 3};
    spec.override_ = OverrideSpec{.prefill_devices = 3};
    EXPECT_TRUE(check_spec(spec).empty()) << family;
  }
}

TEST(Checks, a_wrong_device_is_one_error_and_sets_no_family) {
  EngineSpec spec = good_spec();
  spec.devices = {"gpu", "cuda:0", "cuda:1"};
  const FieldErrors errors = check_spec(spec);
  ASSERT_EQ(errors.size(), 1U);
  EXPECT_EQ(errors[0].field, "spec.devices[0]");
}

TEST(DeviceName, cpu_is_cpu_0_and_nothing_else_has_two_names) {
  EXPECT_EQ(parse_device("cpu"), (DeviceName{DeviceFamily::Cpu, 0}));
  EXPECT_EQ(parse_device("cpu:0"), parse_device("cpu"));
  EXPECT_EQ(parse_device("cpu:12"), (DeviceName{DeviceFamily::Cpu, 12}));
  EXPECT_EQ(parse_device("cuda:999"), (DeviceName{DeviceFamily::Cuda, 999}));
  for (const char* other :
       {"", ":", "cuda", "cuda:", "cpu:00", "cpu:01", "cpu:-1", "cpu:+1", "cpu:1000", "cpu:1 ", "CPU:1", "cpus:1"})
    EXPECT_EQ(parse_device(other), std::nullopt) << other;
}

}  // namespace
}  // namespace rubato
