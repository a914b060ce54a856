// SPDX-License-Identifier: Apache-2.0
// The reader on what people really write: scalars that mean something else, keys twice or misspelt, all errors at once.
#include "manifests/read_manifest.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "manifests/names.h"
#include "manifests/node.h"
#include "tests/manifests/manifest_text.h"

namespace rubato {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using testing::Not;
using testing::StartsWith;

TEST(ReadManifest, the_smallest_manifest_gives_the_defaults) {
  const auto result = parse_manifest(manifest_with(""), "chat.yaml");
  ASSERT_TRUE(result) << result.failure().text();
  EngineSpec expected;
  expected.model.path = "/models/llama";
  EXPECT_EQ(result->manifest.name, "chat");
  EXPECT_EQ(result->manifest.spec, expected);
  EXPECT_EQ(result->file, "chat.yaml");
  EXPECT_EQ(result->hash.size(), 64U);
}

TEST(ReadManifest, every_field_is_read_into_its_own_member) {
  const auto result = parse_manifest(R"(apiVersion: rubato.dev/v1alpha1
kind: Engine
metadata: {name: a.b, labels: {tier: chat, example.com/x: ""}, annotations: {note: "two words"}}
spec:
  model:
    synthetic: {architecture: Llama, hiddenSize: 512, layers: 8, heads: 8, kvHeads: 4, headSize: 32, feedForward: 1408,
                vocabulary: 4096, tiedEmbeddings: false, seed: 9007199254740992}
    servedName: small
    dtype: BFloat16
  devices: [cuda:3, "cuda:1", cuda:0]
  capacity: {maxModelLen: 1024, maxNumSeqs: 16, maxWaiting: 7, kvCacheMemory: 0.5Gi, cpuThreads: 3}
  lanes: {lockstep: Aligned, maxHandoffs: 65, handoffLease: 11s}
  prefixCaching: {enabled: false, snapshotTokens: 4096}
  exactness: Verify
  objectives: {ttft: 1h, itl: 12500us, attainment: 95}
  knobs:
    maxNumBatchedTokens: {initial: 300, min: 40, max: 3000}
    priorityPolicy: {initial: ShortestFirst, choices: [ShortestFirst, DecodeFirst]}
    deadlineMargin: {initial: 21, min: 1, max: 51}
    maxNumSeqs: {initial: 12, min: 2, max: 16}
    mode: {initial: Disaggregated, choices: [Disaggregated, Chunked]}
    prefillShare: {initial: 51, min: 11, max: 91}
    reservation: {initial: Early, choices: [Early, PrefillComplete]}
    prefillDevices: {initial: 2, min: 1, max: 2}
  tuning: {enabled: false, window: 1m, minRequests: 33, settle: 0s, dwell: 1h30m, riskBudget: 3, falseAlarmsPerDay: 4,
           twin: {enabled: false, corePercent: 25}}
  override: {maxNumBatchedTokens: 256, priorityPolicy: DecodeFirst, deadlineMargin: 30, maxNumSeqs: 8, mode: Chunked, prefillShare: 40,
             reservation: PrefillComplete, prefillDevices: 1, expiresAfter: 10m}
)",
                                     "all.yaml");
  ASSERT_TRUE(result) << result.failure().text();
  using namespace std::chrono_literals;
  EngineManifest expected;
  expected.name = "a.b";
  expected.labels = {{"tier", "chat"}, {"example.com/x", ""}};
  expected.annotations = {{"note", "two words"}};
  expected.spec.model = {.path = "",
                         .synthetic = SyntheticModel{.architecture = Architecture::Llama,
                                                     .hidden_size = 512,
                                                     .layers = 8,
                                                     .heads = 8,
                                                     .kv_heads = 4,
                                                     .head_size = 32,
                                                     .feed_forward = 1408,
                                                     .vocabulary = 4096,
                                                     .tied_embeddings = false,
                                                     .seed = 9007199254740992},
                         .served_name = "small",
                         .dtype = DataType::BFloat16};
  expected.spec.devices = {"cuda:3", "cuda:1", "cuda:0"};
  expected.spec.capacity = {
      .max_model_len = 1024, .max_num_seqs = 16, .max_waiting = 7, .kv_cache_memory = 512LL << 20, .cpu_threads = 3};
  expected.spec.lanes = {.lockstep = Lockstep::Aligned, .max_handoffs = 65, .handoff_lease = 11s};
  expected.spec.prefix_caching = {.enabled = false, .snapshot_tokens = 4096};
  expected.spec.exactness = Exactness::Verify;
  expected.spec.objectives = {.ttft = 1h, .itl = 12500us, .attainment = 95};
  expected.spec.knobs.max_num_batched_tokens = {.initial = 300, .min = 40, .max = 3000};
  expected.spec.knobs.priority_policy = {.initial = PriorityPolicy::ShortestFirst,
                                         .choices = {PriorityPolicy::ShortestFirst, PriorityPolicy::DecodeFirst}};
  expected.spec.knobs.deadline_margin = {.initial = 21, .min = 1, .max = 51};
  expected.spec.knobs.max_num_seqs = {.initial = 12, .min = 2, .max = 16};
  expected.spec.knobs.prefill_share = {.initial = 51, .min = 11, .max = 91};
  expected.spec.knobs.mode = {.initial = Mode::Disaggregated, .choices = {Mode::Disaggregated, Mode::Chunked}};
  expected.spec.knobs.reservation = {.initial = Reservation::Early,
                                     .choices = {Reservation::Early, Reservation::PrefillComplete}};
  expected.spec.knobs.prefill_devices = {.initial = 2, .min = 1, .max = 2};
  expected.spec.tuning = {.enabled = false,
                          .window = 1min,
                          .min_requests = 33,
                          .settle = 0s,
                          .dwell = 90min,
                          .risk_budget = 3,
                          .false_alarms_per_day = 4,
                          .twin = {.enabled = false, .core_percent = 25}};
  expected.spec.override_ = OverrideSpec{.max_num_batched_tokens = 256,
                                         .priority_policy = PriorityPolicy::DecodeFirst,
                                         .deadline_margin = 30,
                                         .max_num_seqs = 8,
                                         .mode = Mode::Chunked,
                                         .prefill_share = 40,
                                         .reservation = Reservation::PrefillComplete,
                                         .prefill_devices = 1,
                                         .expires_after = 10min};
  EXPECT_EQ(result->manifest, expected);
}

struct ScalarCase {
  std::string_view written;
  std::string_view says;
};

TEST(ReadManifest, only_true_and_false_are_booleans) {
  EXPECT_EQ(errors_of(manifest_with("  tuning: {enabled: true}")), "good");
  EXPECT_EQ(errors_of(manifest_with("  tuning: {enabled: false}")), "good");
  for (const char* written :
       {"yes", "no", "on", "off", "y", "n", "True", "TRUE", "False", "\"true\"", "'false'", "1", "0", "~", "null", ""}) {
    const std::string errors = errors_of(manifest_with("  tuning:\n    enabled: " + std::string(written)));
    EXPECT_THAT(errors, AllOf(StartsWith("chat.yaml:7:"), HasSubstr("spec.tuning.enabled: "), HasSubstr("must be true or false")))
        << written;
  }
}

TEST(ReadManifest, a_number_is_plain_decimal_digits_or_an_error) {
  EXPECT_EQ(errors_of(manifest_with("  capacity: {maxWaiting: 256}")), "good");
  for (const ScalarCase& c : {
           ScalarCase{"0256", "0256 must be a whole number"},
           ScalarCase{"0o400", "0o400 must be a whole number"},
           ScalarCase{"0x100", "0x100 must be a whole number"},
           ScalarCase{"0b1", "0b1 must be a whole number"},
           ScalarCase{"1_024", "1_024 must be a whole number"},
           ScalarCase{"1e3", "1e3 must be a whole number"},
           ScalarCase{"1e+06", "1e+06 must be a whole number"},
           ScalarCase{"1024.0", "1024.0 must be a whole number"},
           ScalarCase{"+5", "+5 must be a whole number"},
           ScalarCase{"\"1024\"", "\"1024\" must be a whole number"},
           ScalarCase{"-1", "-1 is outside 1..1048576"},
           ScalarCase{"0", "0 is outside 1..1048576"},
           ScalarCase{"99999999999", "99999999999 is outside"},
           ScalarCase{"4294967295", "4294967295 is outside"},
           ScalarCase{"99999999999999999999999999", "is outside"},
           ScalarCase{".inf", ".inf must be a whole number"},
           ScalarCase{"-.inf", "must be a whole number"},
           ScalarCase{".nan", ".nan must be a whole number"},
           ScalarCase{"NaN", "NaN must be a whole number"},
           ScalarCase{"~", "an empty value must be a whole number"},
           ScalarCase{"", "an empty value must be a whole number"},
           ScalarCase{"many", "\"many\" must be a whole number"},
           ScalarCase{"[1]", "a list must be a whole number"},
           ScalarCase{"{a: 1}", "a mapping must be a whole number"},
           ScalarCase{"true", "true must be a whole number"},
           ScalarCase{"512Mi", "must be a whole number"},
           ScalarCase{"1,000", "must be a whole number"},
           ScalarCase{"12:30", "must be a whole number"},
       }) {
    const std::string errors = errors_of(manifest_with("  capacity:\n    maxWaiting: " + std::string(c.written)));
    EXPECT_THAT(errors, AllOf(StartsWith("chat.yaml:7:"), HasSubstr("spec.capacity.maxWaiting: "), HasSubstr(std::string(c.says)),
                              HasSubstr("1..1048576")))
        << c.written;
  }
}

TEST(ReadManifest, a_duration_needs_a_unit_and_is_never_rounded_or_saturated) {
  for (const char* good : {"500ms", "0.5s", "1m", "1h", "\"500ms\"", "12500us", "1m30s"}) {
    EXPECT_EQ(errors_of(manifest_with("  objectives: {ttft: " + std::string(good) + "}")), "good") << good;
  }
  for (const ScalarCase& c : {
           ScalarCase{"500", "500 must be a duration such as 500ms"},
           ScalarCase{"\"500\"", "it has no unit"},
           ScalarCase{"1M", "unknown unit 'M'"},
           ScalarCase{"\"1 s\"", "unknown unit ' s'"},
           ScalarCase{"1d", "unknown unit 'd'"},
           ScalarCase{"-5ms", "a sign is not allowed"},
           ScalarCase{"inf", "must be a duration"},
           ScalarCase{".inf", "must be a duration"},
           ScalarCase{"", "an empty value must be a duration"},
           ScalarCase{"\"\"", "it is empty"},
           ScalarCase{"200us", "200us\" is outside 1ms..1h"},
           ScalarCase{"1h30m", "\"1h30m\" is outside 1ms..1h"},
           ScalarCase{"0s", "\"0s\" is outside"},
           ScalarCase{"0", "must be a duration"},
           ScalarCase{"1e3ms", "unknown unit 'e'"},
           ScalarCase{"0.5", "must be a duration"},
           ScalarCase{"[500ms]", "a list must be a duration"},
       }) {
    const std::string errors = errors_of(manifest_with("  objectives:\n    ttft: " + std::string(c.written)));
    EXPECT_THAT(errors, AllOf(StartsWith("chat.yaml:7:"), HasSubstr("spec.objectives.ttft: "), HasSubstr(std::string(c.says))))
        << c.written;
  }
}

TEST(ReadManifest, a_quantity_is_exact_and_binary_differs_from_decimal) {
  const auto memory = [](std::string_view written) -> std::int64_t {
    const auto result = parse_manifest(manifest_with("  capacity: {kvCacheMemory: " + std::string(written) + "}"), "chat.yaml");
    return result ? result->manifest.spec.capacity.kv_cache_memory : -1;
  };
  EXPECT_EQ(memory("4Gi"), 4LL << 30);
  EXPECT_EQ(memory("4G"), 4'000'000'000);
  EXPECT_EQ(memory("0.5Gi"), 512LL << 20);
  EXPECT_EQ(memory("4096Mi"), 4LL << 30);
  EXPECT_EQ(memory("\"4Gi\""), 4LL << 30);
  EXPECT_EQ(memory("536870912"), 512LL << 20);
  for (const ScalarCase& c : {ScalarCase{"4GB", "unknown unit 'GB'"}, ScalarCase{"4gb", "unknown unit 'gb'"},
                              ScalarCase{"1e9", "unknown unit 'e9'"}, ScalarCase{"90%", "unknown unit '%'"},
                              ScalarCase{"1", "is outside 1Ki..64Ti"}, ScalarCase{"", "an empty value must be a quantity"},
                              ScalarCase{"1_000_000", "unknown unit"}, ScalarCase{"-4Gi", "a sign is not allowed"}}) {
    const std::string errors = errors_of(manifest_with("  capacity:\n    kvCacheMemory: " + std::string(c.written)));
    EXPECT_THAT(errors,
                AllOf(StartsWith("chat.yaml:7:"), HasSubstr("spec.capacity.kvCacheMemory: "), HasSubstr(std::string(c.says))))
        << c.written;
  }
}

TEST(ReadManifest, text_that_other_readers_take_for_something_else_must_be_quoted) {
  EXPECT_EQ(errors_of(manifest_with("  devices: [cpu]").replace(0, 0, "# hello\n")), "good");
  for (const char* written : {"123", "yes", "1e3", "true", "0x10"}) {
    const std::string text =
        "apiVersion: rubato.dev/v1alpha1\nkind: Engine\nmetadata: {name: chat}\nspec:\n  model: {path: /m, servedName: " +
        std::string(written) + "}\n";
    EXPECT_THAT(errors_of(text), HasSubstr("spec.model.servedName: " + std::string(written) + " must be text: put it in quotes"));
    std::string labels = text;
    labels.replace(labels.find("{name: chat}"), 12, "{name: chat, labels: {tier: " + std::string(written) + "}}");
    EXPECT_THAT(errors_of(labels),
                HasSubstr("metadata.labels.tier: " + std::string(written) + " must be text: put it in quotes"));
  }
}

TEST(ReadManifest, misspelt_values_and_keys_come_with_a_suggestion_and_what_is_allowed) {
  EXPECT_EQ(errors_of(manifest_with("  knobs: {priorityPolicy: {initial: Dedline}}")),
            "chat.yaml:6:37 spec.knobs.priorityPolicy.initial: \"Dedline\" is not one of Deadline, DecodeFirst, PrefillFirst, "
            "ShortestFirst; "
            "did you mean Deadline?\n");
  EXPECT_THAT(errors_of(manifest_with("  knobs: {priorityPolicy: {initial: deadline}}")), HasSubstr("did you mean Deadline?"));
  EXPECT_THAT(errors_of(manifest_with("  knobs: {priorityPolicy: {initial: Xyzzy}}")), Not(HasSubstr("did you mean")));
  EXPECT_EQ(errors_of(manifest_with("  objectives: {tttft: 500ms}")),
            "chat.yaml:6:16 spec.objectives.tttft: unknown field; did you mean ttft? Allowed: ttft, itl, attainment\n");
  EXPECT_THAT(errors_of(manifest_with("  knobs:\n    max_num_batched_tokens: {}")),
              HasSubstr("chat.yaml:7:5 spec.knobs.max_num_batched_tokens: unknown field; did you mean maxNumBatchedTokens?"));
  EXPECT_THAT(errors_of(manifest_with("  zzz: 1")),
              AllOf(HasSubstr("spec.zzz: unknown field; allowed: model, "), Not(HasSubstr("did you"))));
  EXPECT_THAT(errors_of("apiversion: rubato.dev/v1alpha1\nkind: Engine\n"), HasSubstr("apiVersion: is required"));
  EXPECT_THAT(
      errors_of("apiVersion: rubato.dev/v1\nkind: Engine\n"),
      HasSubstr(
          "chat.yaml:1:13 apiVersion: \"rubato.dev/v1\" is not one of rubato.dev/v1alpha1; did you mean rubato.dev/v1alpha1?"));
}

TEST(ReadManifest, a_range_error_says_what_was_found_and_what_is_allowed) {
  EXPECT_EQ(errors_of(manifest_with("  knobs:\n    maxNumBatchedTokens:\n      initial: 512\n      min: 0")),
            "chat.yaml:9:12 spec.knobs.maxNumBatchedTokens.min: 0 is outside 1..65536\n");
}

TEST(ReadManifest, snapshots_lie_at_the_ends_of_blocks) {
  EXPECT_EQ(errors_of(manifest_with("  prefixCaching: {snapshotTokens: 16}")), "good");
  EXPECT_EQ(errors_of(manifest_with("  prefixCaching: {snapshotTokens: 100}")),
            "chat.yaml:6:35 spec.prefixCaching.snapshotTokens: 100 must be a multiple of 16\n");
  EXPECT_EQ(errors_of(manifest_with("  prefixCaching: {snapshotTokens: 15}")),
            "chat.yaml:6:35 spec.prefixCaching.snapshotTokens: 15 is outside 16..1048576\n");
  EXPECT_EQ(errors_of(manifest_with("  exactness: yes")), "chat.yaml:6:14 spec.exactness: yes must be one of Trust, Verify\n");
}

TEST(ReadManifest, lanes_are_within_their_ranges) {
  EXPECT_EQ(errors_of(manifest_with("  lanes: {lockstep: None, maxHandoffs: 4096, handoffLease: 100ms}")), "good");
  EXPECT_EQ(errors_of(manifest_with("  lanes: {lockstep: EveryStep, maxHandoffs: 1, handoffLease: 10m}")), "good");
  EXPECT_EQ(errors_of(manifest_with("  lanes: {maxHandoffs: 0}")),
            "chat.yaml:6:24 spec.lanes.maxHandoffs: 0 is outside 1..4096\n");
  EXPECT_EQ(errors_of(manifest_with("  lanes: {maxHandoffs: 4097}")),
            "chat.yaml:6:24 spec.lanes.maxHandoffs: 4097 is outside 1..4096\n");
  EXPECT_EQ(errors_of(manifest_with("  lanes: {handoffLease: 99ms}")),
            "chat.yaml:6:25 spec.lanes.handoffLease: \"99ms\" is outside 100ms..10m\n");
  EXPECT_EQ(errors_of(manifest_with("  lanes: {handoffLease: 601s}")),
            "chat.yaml:6:25 spec.lanes.handoffLease: \"601s\" is outside 100ms..10m\n");
  EXPECT_EQ(errors_of(manifest_with("  lanes: {lockstep: Alligned}")),
            "chat.yaml:6:21 spec.lanes.lockstep: \"Alligned\" is not one of None, EveryStep, Aligned; did you mean Aligned?\n");
  EXPECT_EQ(errors_of(manifest_with("  lanes: {lockstep: On}")),
            "chat.yaml:6:21 spec.lanes.lockstep: On must be one of None, EveryStep, Aligned\n");
}

TEST(ReadManifest, every_name_is_text_to_every_reader_of_yaml) {
  const auto expect_text = [](const auto& names) {
    for (const auto& named : names) EXPECT_EQ(kind_of_plain(named.name), Node::Kind::String) << named.name;
  };
  expect_text(enum_names<PriorityPolicy>);
  expect_text(enum_names<Mode>);
  expect_text(enum_names<Reservation>);
  expect_text(enum_names<Lockstep>);
  expect_text(enum_names<DataType>);
  expect_text(enum_names<Architecture>);
}

TEST(ReadManifest, duplicate_keys_are_errors_at_every_level) {
  EXPECT_EQ(errors_of(manifest_with("  objectives: {ttft: 1s, itl: 50ms, ttft: 2s}")),
            "chat.yaml:6:37 spec.objectives.ttft: is given twice: first in line 6\n");
  EXPECT_THAT(errors_of(manifest_with("") + "spec: {}\n"), HasSubstr("chat.yaml:7:1 spec: is given twice: first in line 4"));
  EXPECT_THAT(errors_of(manifest_with("  nothing: {a: 1, \"a\": 2}")), HasSubstr("spec.nothing.a: is given twice"));
}

TEST(ReadManifest, merge_keys_anchors_aliases_tags_and_odd_keys_are_refused_loudly) {
  EXPECT_THAT(errors_of(manifest_with("  objectives: &base {ttft: 1s}")), HasSubstr("spec.objectives: has an anchor"));
  EXPECT_THAT(errors_of("base: &base {ttft: 1s}\n" + manifest_with("  objectives: {<<: *base}")),
              AllOf(HasSubstr("spec.objectives.<<: merge keys are not supported"), HasSubstr("base: has an anchor")));
  EXPECT_THAT(errors_of(manifest_with("  objectives: {<<: {ttft: 1s}}")), HasSubstr("merge keys are not supported"));
  EXPECT_THAT(errors_of(manifest_with("  capacity: {maxWaiting: &n 5, maxNumSeqs: *n}")),
              AllOf(HasSubstr("spec.capacity.maxNumSeqs: is an alias"), HasSubstr("spec.capacity.maxWaiting: has an anchor")));
  EXPECT_THAT(errors_of(manifest_with("  devices: &d [*d]")), HasSubstr("spec.devices"));  // recursive
  EXPECT_THAT(errors_of(manifest_with("  capacity: {maxWaiting: !!int \"5\"}")), HasSubstr("spec.capacity.maxWaiting: tag "));
  EXPECT_THAT(errors_of(manifest_with("  capacity: {1: 5}")), HasSubstr("spec.capacity: 1 cannot be a key: keys are text"));
  EXPECT_THAT(errors_of(manifest_with("  capacity: {[a]: 5}")), HasSubstr("a list cannot be a key"));
  EXPECT_THAT(errors_of(manifest_with("  capacity: {? : 5}")), HasSubstr("an empty value cannot be a key"));
}

TEST(ReadManifest, an_alias_bomb_is_refused_without_being_expanded) {
  std::string text = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n";
  for (int i = 1; i < 12; ++i) {
    const std::string before = "*a" + std::to_string(i - 1);
    text += "a" + std::to_string(i) + ": &a" + std::to_string(i) + " [" + before;
    for (int j = 0; j < 8; ++j) text.append(", ").append(before);
    text += "]\n";
  }
  EXPECT_THAT(errors_of(text + manifest_with("")), HasSubstr("anchors and aliases are not supported"));
}

TEST(ReadManifest, empty_files_other_roots_and_other_kinds_are_refused) {
  for (const char* nothing : {"", "\n\n", "# only a comment\n", "---\n", "---\n---\n", "~\n", "\xEF\xBB\xBF"}) {
    EXPECT_EQ(errors_of(nothing), "chat.yaml: is empty: a manifest has apiVersion, kind, metadata and spec\n") << nothing;
  }
  EXPECT_THAT(errors_of("- apiVersion: rubato.dev/v1alpha1\n"), HasSubstr("chat.yaml:1:1: a list must be a mapping"));
  EXPECT_THAT(errors_of("hello\n"), HasSubstr("chat.yaml:1:1: \"hello\" must be a mapping"));
  EXPECT_THAT(errors_of("apiVersion: v1\nkind: ConfigMap\nmetadata: {name: x}\n"),
              HasSubstr("chat.yaml:2:7 kind: \"ConfigMap\" is not one of Engine"));
  EXPECT_THAT(errors_of("kind: Engine\napiVersion: rubato.dev/v1alpha1\n"),
              AllOf(HasSubstr("metadata.name: is required"), HasSubstr("spec: is required")));
  EXPECT_THAT(errors_of("apiVersion: rubato.dev/v1alpha1\nkind: Engine\nmetadata: {name: chat}\nspec: {}\n"),
              HasSubstr("chat.yaml:4:7 spec.model: is required"));
}

TEST(ReadManifest, exactly_one_engine_stands_in_a_file) {
  EXPECT_THAT(errors_of(manifest_with("") + "---\n" + manifest_with("")),
              HasSubstr("chat.yaml:8:1 kind: is a second Engine: the first stands in chat.yaml:1"));
  EXPECT_THAT(errors_of(manifest_with("") + "---\napiVersion: v1\nkind: Secret\n"), HasSubstr("\"Secret\" is not one of Engine"));
  EXPECT_EQ(errors_of("---\n" + manifest_with("") + "---\n"), "good");
  EXPECT_EQ(errors_of(manifest_with("") + "...\n"), "good");
}

TEST(ReadManifest, byte_order_mark_and_crlf_change_nothing) {
  const std::string text = manifest_with("  objectives: {ttft: 1s, itl: 5}");
  std::string crlf;
  for (const char c : text) crlf += c == '\n' ? std::string("\r\n") : std::string(1, c);
  const std::string expected = errors_of(text);
  EXPECT_THAT(expected, StartsWith("chat.yaml:6:31 spec.objectives.itl: "));
  EXPECT_EQ(errors_of(crlf), expected);
  EXPECT_EQ(errors_of("\xEF\xBB\xBF" + text), expected);
  std::string good_crlf = "\xEF\xBB\xBF";
  for (const char c : manifest_with("  tuning:\n    enabled: false"))
    good_crlf += c == '\n' ? std::string("\r\n") : std::string(1, c);
  EXPECT_EQ(errors_of(good_crlf), "good");
}

TEST(ReadManifest, tabs_control_characters_and_broken_utf8_are_errors_with_a_place) {
  EXPECT_THAT(errors_of(manifest_with("\tobjectives: {ttft: 1s}")), StartsWith("chat.yaml:6:"));
  EXPECT_THAT(errors_of(manifest_with("  devices: [\"c\x01pu\"]")), HasSubstr("chat.yaml:6:15: holds a control character here"));
  EXPECT_THAT(errors_of(std::string("kind: En\0gine\n", 14)), HasSubstr("chat.yaml:1:9: holds a control character here"));
  EXPECT_THAT(errors_of("a: b\r c: d\n"), HasSubstr("control character"));
  for (const char* bad : {"\xFF", "\xC0\x80", "\xED\xA0\x80", "\xF4\x90\x80\x80", "\xE2\x82", "\xC3", "\x80"}) {
    EXPECT_THAT(errors_of("a: b\nc: " + std::string(bad)), HasSubstr("chat.yaml:2:4: is not UTF-8 here"));
  }
  EXPECT_THAT(errors_of("\xFF\xFE"
                        "k\0i\0"),
              HasSubstr("is not UTF-8"));  // UTF-16
  EXPECT_EQ(errors_of("# \xC3\xA4\xE2\x82\xAC\xF0\x9F\x98\x80\n" + manifest_with("")), "good");
}

TEST(ReadManifest, broken_yaml_is_an_error_with_its_place) {
  EXPECT_THAT(errors_of(manifest_with("  objectives: {ttft: 1s")), AllOf(StartsWith("chat.yaml:"), HasSubstr("is not YAML: ")));
  EXPECT_THAT(errors_of(manifest_with("   bad indent: 1")), AllOf(StartsWith("chat.yaml:6:"), HasSubstr("is not YAML: ")));
  EXPECT_THAT(errors_of("a: *unknown\n"), HasSubstr("is not YAML: "));
}

TEST(ReadManifest, all_errors_come_together_in_order_of_place) {
  const std::string errors = errors_of(R"(apiVersion: rubato.dev/v1alpha1
kind: Engine
metadata: {name: Bad_Name}
spec:
  model: {pth: /models/llama}
  capacity: {maxNumSeqs: 0, kvCacheMemory: 4GB}
  objectives: {ttft: 500, itl: 50ms, itl: 60ms}
  knobs:
    maxNumSeqs: {initial: 64, min: 70, max: 64}
    mode: {initial: Chunkd}
  tuning: {enabled: yes}
)");
  std::vector<std::string> lines;
  for (std::size_t at = 0; at < errors.size(); at = errors.find('\n', at) + 1)
    lines.push_back(errors.substr(at, errors.find('\n', at) - at));
  EXPECT_THAT(
      lines,
      testing::ElementsAre(
          StartsWith("chat.yaml:3:18 metadata.name: \"Bad_Name\": a lowercase RFC 1123 subdomain"),
          StartsWith("chat.yaml:5:10 spec.model: is required: exactly one of path and synthetic"),
          StartsWith("chat.yaml:5:11 spec.model.pth: unknown field; did you mean path?"),
          StartsWith("chat.yaml:6:26 spec.capacity.maxNumSeqs: 0 is outside 1..4096"),
          StartsWith("chat.yaml:6:44 spec.capacity.kvCacheMemory: \"4GB\" must be a quantity"),
          StartsWith("chat.yaml:7:22 spec.objectives.ttft: 500 must be a duration"),
          StartsWith("chat.yaml:7:38 spec.objectives.itl: is given twice"),
          StartsWith("chat.yaml:9:36 spec.knobs.maxNumSeqs.min: 70 must not be above max (64)"),
          StartsWith(
              "chat.yaml:10:21 spec.knobs.mode.initial: \"Chunkd\" is not one of Chunked, Disaggregated; did you mean Chunked?"),
          StartsWith("chat.yaml:11:21 spec.tuning.enabled: yes must be true or false")))
      << errors;
}

TEST(ReadManifest, what_the_server_writes_may_not_be_set_in_a_file) {
  EXPECT_THAT(errors_of(manifest_with("") + "status: {}\n"), HasSubstr("chat.yaml:7:1 status: is written by the engine"));
  std::string text = manifest_with("");
  text.replace(text.find("{name: chat}"), 12, "{name: chat, uid: abc}");
  EXPECT_THAT(errors_of(text), HasSubstr("metadata.uid: unknown field; allowed: name, labels, annotations"));
}

TEST(ReadManifest, size_depth_and_count_are_bounded) {
  EXPECT_THAT(errors_of(manifest_with("") + std::string(manifest_size_max, '#')), HasSubstr("is larger than 1048576 bytes"));
  EXPECT_EQ(errors_of(manifest_with("") + "#" + std::string(manifest_size_max - 1000, 'x')), "good");
  EXPECT_THAT(errors_of("a: " + std::string(1000, '[')), HasSubstr("is nested deeper than 32 levels"));
  EXPECT_THAT(errors_of(std::string(20'000, '[')), HasSubstr("is nested deeper than 32 levels"));
  EXPECT_THAT(errors_of(std::string(20'000, '{')), HasSubstr("is nested deeper than 32 levels"));
  std::string many = "a: [";
  for (int i = 0; i < 100'000; ++i) many += "1,";
  EXPECT_THAT(errors_of(many + "1]\n"), HasSubstr("holds more than 20000 values"));
  std::string documents;
  for (int i = 0; i < 100; ++i) documents += "---\na: 1\n";
  EXPECT_THAT(errors_of(documents), HasSubstr("holds more than 16 documents"));
  std::string wrong = "apiVersion: rubato.dev/v1alpha1\nkind: Engine\nmetadata: {name: chat}\nspec:\n  model: {path: /m}\n";
  for (int i = 0; i < 1000; ++i) wrong += "  x" + std::to_string(i) + ": 1\n";
  const auto result = parse_manifest(wrong, "chat.yaml");
  ASSERT_FALSE(result);
  EXPECT_EQ(result.failure().errors.size(), 101U);
  EXPECT_THAT(result.failure().text(), HasSubstr("chat.yaml: has 900 more errors"));
}

TEST(ReadManifest, hostile_text_cannot_forge_lines_of_the_report) {
  const std::string errors = errors_of(manifest_with("  devices: [\"x\\nchat.yaml:1:1 all is well\"]"));
  EXPECT_EQ(std::count(errors.begin(), errors.end(), '\n'), 1) << errors;
  const std::string key = errors_of(manifest_with("  ? \"x\\ny\"\n  : 1"));
  EXPECT_EQ(std::count(key.begin(), key.end(), '\n'), 1) << key;
}

}  // namespace
}  // namespace rubato
