// SPDX-License-Identifier: Apache-2.0
// Rules between fields, each broken alone.
#include "manifests/checks.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>

#include "manifests/decode.h"
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

struct BrokenCase {
  std::string field;
  std::string says;
  std::function<void(EngineSpec&)> breaks;
};

TEST(Checks, good_specs_pass) {
  EXPECT_TRUE(check_spec(good_spec()).empty());
  EXPECT_TRUE(check_spec(synthetic_spec()).empty());
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
      {"spec.devices[0]", "\"gpu\" must be cpu, cpu:0 or cuda:<index>", [](EngineSpec& s) { s.devices = {"gpu"}; }},
      {"spec.devices[1]", "\"cuda:01\" must be",
       [](EngineSpec& s) {
         s.devices = {"cuda:0", "cuda:01"};
       }},
      {"spec.devices[0]", "\"cuda\" must be", [](EngineSpec& s) { s.devices = {"cuda"}; }},
      {"spec.devices[1]", "\"cpu:0\" is in the list twice",
       [](EngineSpec& s) {
         s.devices = {"cpu", "cpu:0"};
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
      {"spec.knobs.mode.initial", "\"Disaggregated\" is not available: this engine runs mode Chunked only",
       [](EngineSpec& s) {
         s.knobs.mode = {Mode::Disaggregated, {Mode::Chunked, Mode::Disaggregated}};
       }},
      {"spec.override.mode", "\"Disaggregated\" is not available: this engine runs mode Chunked only",
       [](EngineSpec& s) {
         s.knobs.mode.choices = {Mode::Chunked, Mode::Disaggregated};
         s.override_ = OverrideSpec{.mode = Mode::Disaggregated};
       }},
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

TEST(Checks, memory_must_hold_one_request_of_the_longest_length_in_whole_blocks) {
  EngineSpec spec = good_spec();
  spec.capacity.max_model_len = 33;  // three blocks of 16
  spec.capacity.kv_cache_memory = 48 * 100;
  EXPECT_TRUE(check_kv_memory(spec, 100).empty());
  spec.capacity.kv_cache_memory = 48 * 100 - 1;
  const FieldErrors errors = check_kv_memory(spec, 100);
  ASSERT_EQ(errors.size(), 1U);
  EXPECT_EQ(errors[0].field, "spec.capacity.kvCacheMemory");
  EXPECT_EQ(describe(errors[0]),
            "4799 must hold at least one request of maxModelLen (33) tokens; at 100 bytes per token it holds 32: raise it to "
            "4800 or lower maxModelLen");
}

}  // namespace
}  // namespace rubato
