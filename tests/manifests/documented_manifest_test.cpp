// SPDX-License-Identifier: Apache-2.0
// The manifest that the documents show, whole: every field that users have been told of.
#include <gtest/gtest.h>

#include "manifests/read_manifest.h"

namespace rubato {
namespace {

TEST(DocumentedManifest, every_field_reads) {
  const auto result = parse_manifest(R"(apiVersion: rubato.dev/v1alpha1
kind: Engine
metadata: {name: chat}
spec:
  model:
    path: /models/llama            # a Hugging Face folder: config.json, *.safetensors, tokenizer.json
    dtype: BFloat16
  devices: [cpu]                   # cpu | cpu:0 | cuda:0 ...
  capacity: {maxModelLen: 4096, maxNumSeqs: 64, kvCacheMemory: 512Mi}
  lanes: {lockstep: None, maxHandoffs: 64, handoffLease: 10s}
  objectives: {ttft: 500ms, itl: 50ms, attainment: 99}
  knobs:                           # where each knob starts and may go
    maxNumBatchedTokens: {initial: 512, min: 64, max: 4096}
    priorityPolicy: {initial: Deadline, choices: [Deadline, DecodeFirst, PrefillFirst, ShortestFirst]}
    deadlineMargin: {initial: 20, min: 0, max: 50}
    maxNumSeqs: {initial: 64, min: 8, max: 64}
    mode: {initial: Chunked, choices: [Chunked, Disaggregated]}
    prefillShare: {initial: 50, min: 10, max: 90}
    reservation: {initial: LastChunk, choices: [LastChunk, PrefillComplete, Early]}
    prefillDevices: {initial: 1, min: 1, max: 1}
  tuning: {enabled: true, window: 15s}
  override: {maxNumBatchedTokens: 256, expiresAfter: 10m}
)",
                                     "chat.yaml");
  ASSERT_TRUE(result) << result.failure().text();
  const EngineSpec& spec = result->manifest.spec;
  EXPECT_EQ(spec.objectives.itl, std::chrono::milliseconds(50));
  EXPECT_EQ(spec.knobs.mode.choices.size(), 2U);
  ASSERT_TRUE(spec.override_);
  EXPECT_EQ(spec.override_->max_num_batched_tokens, 256);
  EXPECT_EQ(spec.override_->expires_after, std::chrono::minutes(10));
}

EngineSpec read_spec(const std::string& lines) {
  const auto result = parse_manifest(
      "apiVersion: rubato.dev/v1alpha1\nkind: Engine\nmetadata: {name: chat}\nspec:\n  model: {path: /m}\n" + lines, "chat.yaml");
  EXPECT_TRUE(result) << result.failure().text();
  return result ? result->manifest.spec : EngineSpec{};
}

TEST(DerivedDefaults, ends_that_are_left_out_fit_what_is_written) {
  const EngineSpec few = read_spec("  capacity: {maxNumSeqs: 4}\n");
  EXPECT_EQ(few.knobs.max_num_seqs, (IntegerKnob{.initial = 4, .min = 4, .max = 4}));
  EXPECT_EQ(few.knobs.max_num_batched_tokens, (IntegerKnob{.initial = 512, .min = 64, .max = 4096}));

  const EngineSpec many = read_spec("  capacity: {maxNumSeqs: 1000}\n");
  EXPECT_EQ(many.knobs.max_num_seqs, (IntegerKnob{.initial = 1000, .min = 8, .max = 1000}));
  EXPECT_EQ(many.knobs.max_num_batched_tokens.initial, 1016);

  const EngineSpec narrow = read_spec("  knobs: {maxNumBatchedTokens: {max: 256}, maxNumSeqs: {max: 32}}\n");
  EXPECT_EQ(narrow.knobs.max_num_batched_tokens, (IntegerKnob{.initial = 256, .min = 64, .max = 256}));
  EXPECT_EQ(narrow.knobs.max_num_seqs, (IntegerKnob{.initial = 32, .min = 8, .max = 32}));
}

TEST(DerivedDefaults, prefill_devices_may_be_all_but_one) {
  EXPECT_EQ(read_spec("").knobs.prefill_devices, (IntegerKnob{.initial = 1, .min = 1, .max = 1}));
  EXPECT_EQ(read_spec("  devices: [cpu:0, cpu:1]\n").knobs.prefill_devices.max, 1);
  EXPECT_EQ(read_spec("  devices: [cpu:0, cpu:1, cpu:2, cpu:3]\n").knobs.prefill_devices,
            (IntegerKnob{.initial = 1, .min = 1, .max = 3}));
  EXPECT_EQ(read_spec("  devices: [cpu:0, cpu:1, cpu:2, cpu:3]\n  knobs: {prefillDevices: {max: 2}}\n").knobs.prefill_devices.max,
            2);
}

TEST(DerivedDefaults, disaggregated_takes_no_memory_unasked_and_naming_it_anywhere_asks_for_it) {
  EXPECT_EQ(read_spec("").knobs.mode.choices, std::vector{Mode::Chunked});
  const ChoiceKnob<Mode> named = read_spec("  knobs: {mode: {initial: Disaggregated}}\n").knobs.mode;
  EXPECT_EQ(named.initial, Mode::Disaggregated);
  EXPECT_EQ(named.choices, (std::vector{Mode::Chunked, Mode::Disaggregated}));
  EXPECT_EQ(read_spec("  knobs: {mode: {choices: [Disaggregated, Chunked]}}\n").knobs.mode.initial, Mode::Chunked);
}

TEST(DerivedDefaults, what_is_written_stands_and_is_checked) {
  const auto result = parse_manifest(
      "apiVersion: rubato.dev/v1alpha1\nkind: Engine\nmetadata: {name: chat}\nspec:\n  model: {path: /m}\n"
      "  capacity: {maxNumSeqs: 8}\n  knobs: {maxNumSeqs: {max: 64}}\n",
      "chat.yaml");
  ASSERT_FALSE(result);
  EXPECT_EQ(result.failure().errors[0].field, "spec.knobs.maxNumSeqs.max");
}

TEST(DocumentedManifest, the_synthetic_form_reads) {
  const auto result = parse_manifest(R"(apiVersion: rubato.dev/v1alpha1
kind: Engine
metadata: {name: chat}
spec:
  model:
    synthetic: {architecture: Llama, hiddenSize: 512, layers: 8, heads: 8, kvHeads: 4, feedForward: 1408, vocabulary: 4096, seed: 1}
)",
                                     "chat.yaml");
  ASSERT_TRUE(result) << result.failure().text();
  EXPECT_EQ(result->manifest.spec.model.synthetic->feed_forward, 1408);
}

}  // namespace
}  // namespace rubato
