// SPDX-License-Identifier: Apache-2.0
// Objects of the API: canonical out, checked in, faults worded as Kubernetes words them; and the schema as a snapshot.
#include "manifests/json.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <fstream>
#include <sstream>

#include "manifests/fields.h"
#include "manifests/read_manifest.h"
#include "manifests/schema.h"
#include "tests/manifests/manifest_text.h"

namespace rubato {
namespace {

using Json = nlohmann::ordered_json;

Json object_with(const char* spec) {
  Json object{{"apiVersion", "rubato.dev/v1alpha1"}, {"kind", "Engine"}, {"metadata", {{"name", "chat"}, {"uid", "1-2"}}}};
  object["spec"] = Json::parse(spec);
  object["status"] = {{"anything", true}};
  return object;
}

TEST(Json, the_spec_shows_every_default_in_canonical_form_and_reads_back_equal) {
  const auto read = parse_manifest(
      manifest_with("  objectives: {ttft: 0.5s, itl: 12500us}\n  override: {mode: Chunked, expiresAfter: 600s}"), "a");
  ASSERT_TRUE(read) << read.failure().text();
  const Json json = to_json(read->manifest);
  EXPECT_EQ(json["spec"]["objectives"].dump(), R"({"ttft":"500ms","itl":"12.5ms","attainment":99})");
  EXPECT_EQ(json["spec"]["override"].dump(), R"({"mode":"Chunked","expiresAfter":"10m"})");
  EXPECT_EQ(json["spec"]["model"].dump(), R"({"path":"/models/llama"})");
  EXPECT_EQ(json["spec"]["capacity"]["kvCacheMemory"], "512Mi");
  EXPECT_EQ(json["spec"]["knobs"]["maxNumBatchedTokens"].dump(), R"({"initial":512,"min":64,"max":4096})");
  const Decoded<EngineManifest> again = manifest_from_json(json);
  ASSERT_TRUE(again.ok());
  EXPECT_EQ(again.value, read->manifest);
}

TEST(Json, yaml_and_json_of_the_same_manifest_decode_alike) {
  for (const char* example : {"minimal", "llama3-8b", "qwen2-0.5b-synthetic", "hybrid-synthetic"}) {
    const auto read = read_manifest(std::string(RUBATO_SOURCE_DIR "/manifests/examples/") + example + ".yaml");
    ASSERT_TRUE(read) << read.failure().text();
    EXPECT_EQ(manifest_from_json(Json::parse(to_json(read->manifest).dump())).value, read->manifest);
  }
}

TEST(Json, knob_values_are_shown_by_their_manifest_names) {
  EXPECT_EQ(to_json(KnobValues()).dump(), R"({"maxNumBatchedTokens":512,"priorityPolicy":"Deadline","deadlineMargin":20,)"
                                          R"("maxNumSeqs":64,"mode":"Chunked","prefillShare":50,"reservation":"LastChunk",)"
                                          R"("prefillDevices":1})");
}

TEST(Json, what_the_server_writes_is_ignored_and_null_counts_as_left_out) {
  const Decoded<EngineManifest> decoded =
      manifest_from_json(object_with(R"({"model":{"path":"/m","dtype":null},"tuning":null})"));
  ASSERT_TRUE(decoded.ok()) << describe(decoded.errors.at(0));
  EXPECT_TRUE(decoded.unknown.empty());
  EXPECT_EQ(decoded.value.spec.tuning, TuningSpec());
}

TEST(Json, unknown_fields_stand_apart_because_the_caller_decides_on_them) {
  const Decoded<EngineManifest> decoded =
      manifest_from_json(object_with(R"({"model":{"path":"/m"},"objectives":{"tttft":"1s","ttft":"1s"}})"));
  EXPECT_TRUE(decoded.ok());
  ASSERT_EQ(decoded.unknown.size(), 1U);
  EXPECT_EQ(status_cause(decoded.unknown[0]).message, "unknown field \"spec.objectives.tttft\"");
  EXPECT_EQ(decoded.value.spec.objectives.ttft, std::chrono::seconds(1));
}

struct CauseCase {
  const char* spec;
  StatusCause cause;
};

TEST(Json, causes_are_worded_as_kubernetes_words_them) {
  const std::vector<CauseCase> cases{
      {R"({"model":{"path":"/m"},"objectives":{"ttft":500}})",
       {"FieldValueTypeInvalid", R"(Invalid value: "integer": spec.objectives.ttft in body must be of type string: "integer")",
        "spec.objectives.ttft"}},
      {R"({"model":{"path":"/m"},"objectives":{"attainment":99.5}})",
       {"FieldValueTypeInvalid",
        R"(Invalid value: "number": spec.objectives.attainment in body must be of type integer: "number")",
        "spec.objectives.attainment"}},
      {R"({"model":{"path":"/m"},"objectives":{"attainment":101}})",
       {"FieldValueInvalid", "Invalid value: 101: is outside 1..100", "spec.objectives.attainment"}},
      {R"({"model":{"path":"/m"},"objectives":{"itl":"fast"}})",
       {"FieldValueInvalid",
        R"(Invalid value: "fast": must be a duration such as 500ms, 1.5s or 1h30m (units ns, us, ms, s, m, h))",
        "spec.objectives.itl"}},
      {R"({"model":{"path":"/m"},"knobs":{"priorityPolicy":{"choices":["Foo","Deadline"]}}})",
       {"FieldValueNotSupported",
        R"(Unsupported value: "Foo": supported values: "Deadline", "DecodeFirst", "PrefillFirst", "ShortestFirst")",
        "spec.knobs.priorityPolicy.choices[0]"}},
      {R"({"model":{"path":"/m"},"knobs":{"priorityPolicy":{"choices":["Deadline","Deadline"]}}})",
       {"FieldValueDuplicate", R"(Duplicate value: "Deadline")", "spec.knobs.priorityPolicy.choices[1]"}},
      {R"({"model":{"synthetic":{"hiddenSize":64,"heads":4,"kvHeads":4,"feedForward":8,"vocabulary":99}}})",
       {"FieldValueRequired", "Required value", "spec.model.synthetic.layers"}},
      {R"({"model":{"path":"/m"},"tuning":[]})",
       {"FieldValueTypeInvalid", R"(Invalid value: "array": spec.tuning in body must be of type object: "array")",
        "spec.tuning"}},
      {R"({"model":{"path":"/m"},"capacity":{"maxWaiting":18446744073709551615}})",
       {"FieldValueInvalid", "Invalid value: 18446744073709551615: is outside 1..1048576", "spec.capacity.maxWaiting"}},
  };
  for (const CauseCase& c : cases) {
    const Decoded<EngineManifest> decoded = manifest_from_json(object_with(c.spec));
    ASSERT_EQ(decoded.errors.size(), 1U) << c.spec;
    const StatusCause cause = status_cause(decoded.errors[0]);
    EXPECT_EQ(cause.reason, c.cause.reason);
    EXPECT_EQ(cause.message, c.cause.message);
    EXPECT_EQ(cause.field, c.cause.field);
  }
}

TEST(Json, a_bad_name_gets_the_words_of_the_real_server) {
  Json object = object_with(R"({"model":{"path":"/m"}})");
  object["metadata"]["name"] = "Bad_Name";
  const Decoded<EngineManifest> decoded = manifest_from_json(object);
  ASSERT_EQ(decoded.errors.size(), 1U);
  EXPECT_EQ(
      status_cause(decoded.errors[0]).message,
      R"(Invalid value: "Bad_Name": a lowercase RFC 1123 subdomain must consist of lower case alphanumeric characters, '-' or '.', and )"
      R"(must start and end with an alphanumeric character (e.g. 'example.com', regex used for validation is )"
      R"('[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*'))");
}

TEST(Json, deep_nesting_is_refused_before_anything_recurses_into_it) {
  Json deep = 1;
  for (int i = 0; i < 500; ++i) deep = Json{{"a", std::move(deep)}};
  const Decoded<EngineSpec> decoded = spec_from_json(Json{{"model", {{"path", "/m"}}}, {"tuning", std::move(deep)}});
  ASSERT_FALSE(decoded.ok());
  EXPECT_THAT(describe(decoded.errors[0]), testing::HasSubstr("is nested deeper than 32 levels"));
}

TEST(Schema, matches_the_snapshot) {
  const std::string path = RUBATO_SOURCE_DIR "/tests/golden/engine_schema.json";
  const std::string schema = engine_schema().dump(2) + "\n";
  if (std::getenv("UPDATE_GOLDENS") != nullptr) std::ofstream(path) << schema;
  std::ostringstream golden;
  golden << std::ifstream(path).rdbuf();
  EXPECT_EQ(schema, golden.str()) << "run with UPDATE_GOLDENS=1 if the change is wanted";
}

/// Walks the schema of a group along with an object and reports what the schema does not know.
void expect_known(const Json& schema, const Json& value, const std::string& path) {
  if (!value.is_object()) return;
  ASSERT_TRUE(schema.contains("properties")) << path;
  for (const auto& [key, inner] : value.items()) {
    ASSERT_TRUE(schema["properties"].contains(key)) << path << "." << key;
    const Json& line = schema["properties"][key];
    EXPECT_FALSE(line["description"].get<std::string>().empty()) << path << "." << key;
    if (line.contains("default")) {
      EXPECT_EQ(line["default"], inner) << path << "." << key;
    }
    expect_known(line, inner, path + "." + key);
  }
}

TEST(Schema, knows_every_field_that_the_writer_writes_with_its_default) {
  EngineSpec spec;
  spec.override_ = OverrideSpec{};
  expect_known(engine_spec_schema(), to_json(spec), "spec");
}

TEST(Fields, the_list_names_every_leaf_once_and_says_what_needs_a_restart) {
  std::map<std::string, Change> fields;
  for (const FieldInfo& field : all_fields()) {
    EXPECT_TRUE(fields.emplace(field.path, field.change).second) << field.path;
    EXPECT_FALSE(field.help.empty()) << field.path;
  }
  EXPECT_EQ(fields.at("spec.model.synthetic.seed"), Change::Restart);
  EXPECT_EQ(fields.at("spec.devices"), Change::Restart);
  EXPECT_EQ(fields.at("spec.knobs.maxNumBatchedTokens.max"), Change::Restart);
  EXPECT_EQ(fields.at("spec.knobs.maxNumBatchedTokens.min"), Change::Live);
  EXPECT_EQ(fields.at("spec.knobs.maxNumSeqs.max"), Change::Live);
  EXPECT_EQ(fields.at("spec.override.expiresAfter"), Change::Live);
  EXPECT_EQ(fields.at("spec.knobs.mode.choices"), Change::Restart);
  EXPECT_EQ(fields.at("spec.knobs.mode.initial"), Change::Live);
  EXPECT_EQ(fields.at("spec.knobs.reservation.choices"), Change::Live);
  EXPECT_EQ(fields.at("spec.knobs.prefillDevices.max"), Change::Live);
  EXPECT_EQ(fields.at("spec.lanes.lockstep"), Change::Restart);
  EXPECT_EQ(fields.at("spec.lanes.maxHandoffs"), Change::Restart);
  EXPECT_EQ(fields.at("spec.lanes.handoffLease"), Change::Restart);
  EXPECT_EQ(fields.at("spec.prefixCaching.enabled"), Change::Restart);
  EXPECT_EQ(fields.at("spec.exactness"), Change::Restart);
  EXPECT_EQ(fields.size(), 73U);
}

TEST(Fields, a_diff_names_exactly_the_leaves_that_differ) {
  EngineSpec before;
  before.model.path = "/a";
  EngineSpec after = before;
  EXPECT_TRUE(changed_fields(before, after).empty());
  after.model.path = "/b";
  after.objectives.attainment = 90;
  after.knobs.max_num_batched_tokens.max = 8192;
  after.override_ = OverrideSpec{.max_num_seqs = 8};
  EXPECT_THAT(changed_fields(before, after),
              testing::ElementsAre(FieldChange{"spec.model.path", Change::Restart},
                                   FieldChange{"spec.objectives.attainment", Change::Live},
                                   FieldChange{"spec.knobs.maxNumBatchedTokens.max", Change::Restart},
                                   FieldChange{"spec.override", Change::Live}));
  EXPECT_THAT(restart_fields(changed_fields(before, after)),
              testing::ElementsAre("spec.model.path", "spec.knobs.maxNumBatchedTokens.max"));
}

}  // namespace
}  // namespace rubato
