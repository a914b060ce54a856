// SPDX-License-Identifier: Apache-2.0
// A real model through the whole daemon: stories260k in F32 and BF16 gives the golden answers over HTTP, streamed and not, and
// whatever the budget is.
#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "tests/e2e/daemon_process.h"
#include "tests/e2e/stream_client.h"

namespace rubato::test {
namespace {

using nlohmann::json;

const std::filesystem::path models = std::filesystem::path(RUBATO_SOURCE_DIR) / "../shared/data/models";

class GoldenModel : public ::testing::TestWithParam<const char*> {
 protected:
  void SetUp() override {
    folder_ = models / GetParam();
    if (!std::filesystem::exists(folder_)) GTEST_SKIP() << folder_ << " is not here";
    golden_ = json::parse(std::ifstream(folder_ / "golden.json"));
  }

  std::filesystem::path write_manifest(const TemporaryFolder& folder, int budget) const {
    return folder.write("engine.yaml",
                        "apiVersion: rubato.dev/v1alpha1\nkind: Engine\nmetadata: {name: stories}\nspec:\n  model: {path: " +
                            std::filesystem::canonical(folder_).string() +
                            "}\n  capacity: {maxModelLen: 512, maxNumSeqs: 8, kvCacheMemory: 64Mi}\n"
                            "  knobs:\n    maxNumSeqs: {initial: 8, min: 1, max: 8}\n"
                            "    maxNumBatchedTokens: {initial: " +
                            std::to_string(budget) + ", min: 24, max: 512}\n  tuning: {enabled: false}\n");
  }

  static json request(const json& sample) {
    const auto count = sample["output_token_ids"].size();
    return json{{"model", "stories"},
                {"prompt", sample["prompt_token_ids"]},
                {"max_tokens", count},
                {"temperature", 0},
                {"ignore_eos", true}};
  }

  std::filesystem::path folder_;
  json golden_;
};

TEST_P(GoldenModel, answers_are_the_golden_ones_streamed_and_not) {
  for (const int budget : {512, 24}) {
    const TemporaryFolder folder;
    DaemonProcess daemon({"--manifest", write_manifest(folder, budget).string()});
    ASSERT_TRUE(daemon.wait_ready(std::chrono::seconds(60))) << daemon.log();
    const json& samples = golden_["prompts"];
    ASSERT_EQ(samples.size(), 5U);
    for (const json& sample : samples) {
      json body = request(sample);
      const RawReply reply = daemon.data("POST", "/v1/completions", body.dump());
      ASSERT_EQ(reply.status, 200) << reply.body;
      const json answer = json::parse(reply.body);
      EXPECT_EQ(answer["choices"][0]["text"], sample["output_text"]) << "budget " << budget;
      EXPECT_EQ(answer["choices"][0]["finish_reason"], "length");
      EXPECT_EQ(answer["usage"]["prompt_tokens"], sample["prompt_token_ids"].size());
      EXPECT_EQ(answer["usage"]["completion_tokens"], sample["output_token_ids"].size());

      body["stream"] = true;
      const StreamedReply streamed = stream_completion(daemon.data_port(), body);
      EXPECT_TRUE(streamed.done);
      EXPECT_EQ(streamed.choices.at(0).text, sample["output_text"]);
    }
    daemon.signal(SIGTERM);
    EXPECT_EQ(daemon.wait_exit(std::chrono::seconds(20)), 0) << daemon.log();
  }
}

TEST_P(GoldenModel, logprobs_are_the_golden_ones) {
  const TemporaryFolder folder;
  DaemonProcess daemon({"--manifest", write_manifest(folder, 64).string()});
  ASSERT_TRUE(daemon.wait_ready(std::chrono::seconds(60))) << daemon.log();
  const json& samples = golden_["prompts"];
  const double tolerance = std::string(GetParam()) == "stories260k" ? 1e-3 : 5e-2;
  for (const json& sample : samples) {
    json body = request(sample);
    body["logprobs"] = 1;
    const json answer = json::parse(daemon.data("POST", "/v1/completions", body.dump()).body);
    const json& logprobs = answer["choices"][0]["logprobs"]["token_logprobs"];
    ASSERT_EQ(logprobs.size(), sample["output_logprobs"].size());
    for (std::size_t i = 0; i < logprobs.size(); ++i) {
      EXPECT_NEAR(logprobs[i].get<double>(), sample["output_logprobs"][i].get<double>(), tolerance) << "token " << i;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Stories, GoldenModel, ::testing::Values("stories260k", "stories260k-bf16"),
                         [](const auto& parameter) { return std::string(parameter.param) == "stories260k" ? "F32" : "BF16"; });

}  // namespace
}  // namespace rubato::test
