// SPDX-License-Identifier: Apache-2.0
// Prefix caching on the real daemon, for models with attention, with recurrent layers, and with both: what clients get is the
// same with it and without, in both modes, while usage and metrics say what was spared. And the exactness checker as users run
// it.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <cstdio>
#include <filesystem>
#include <future>
#include <map>
#include <nlohmann/json.hpp>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "tests/e2e/daemon_process.h"
#include "tests/e2e/stream_client.h"

namespace rubato::test {
namespace {

using nlohmann::json;

const std::filesystem::path models = std::filesystem::path(RUBATO_SOURCE_DIR) / "../shared/data/models";

const std::map<std::string, std::string> synthetic{
    {"llama", "{architecture: Llama, hiddenSize: 64, layers: 3, heads: 4, kvHeads: 2, feedForward: 128, vocabulary: 300}"},
    {"mamba2",
     "{architecture: Mamba2, hiddenSize: 64, layers: 3, mambaHeads: 4, mambaHeadSize: 32, stateSize: 32, vocabulary: 300}"},
    {"hybrid",
     "{architecture: Hybrid, hiddenSize: 64, layers: 4, heads: 4, kvHeads: 2, feedForward: 128, attentionEvery: 2, mambaHeads: "
     "4, "
     "mambaHeadSize: 32, stateSize: 32, vocabulary: 300}"}};

struct Settings {
  bool caching = true;
  std::string exactness = "Trust";
};

std::string manifest_of(const std::string& model, const Settings& settings) {
  return "apiVersion: rubato.dev/v1alpha1\nkind: Engine\nmetadata: {name: small}\nspec:\n  model: {synthetic: " +
         synthetic.at(model) +
         ", dtype: BFloat16}\n  capacity: {maxModelLen: 512, maxNumSeqs: 16, kvCacheMemory: 16Mi}\n  prefixCaching: {enabled: " +
         (settings.caching ? "true" : "false") + ", snapshotTokens: 64}\n  exactness: " + settings.exactness +
         "\n  knobs:\n    maxNumSeqs: {initial: 16, min: 1, max: 16}\n    maxNumBatchedTokens: {initial: 64, min: 32, max: 512}\n"
         "    mode: {initial: Chunked, choices: [Chunked, Disaggregated]}\n  tuning: {enabled: false}\n";
}

/// Conversations: a few system prompts, each continued by several users, each in two turns.
std::vector<std::vector<int>> prompts() {
  std::mt19937 random(7);
  const auto draw = [&](int count) {
    std::vector<int> tokens;
    for (int i = 0; i < count; ++i) tokens.push_back(static_cast<int>(3 + random() % 290));
    return tokens;
  };
  std::vector<std::vector<int>> all;
  for (const int system_tokens : {150, 83, 32}) {
    const std::vector<int> system = draw(system_tokens);
    for (int user = 0; user < 6; ++user) {
      std::vector<int> prompt = system;
      for (int turn = 0; turn < 2; ++turn) {
        const std::vector<int> words = draw(20 + user * 7);
        prompt.insert(prompt.end(), words.begin(), words.end());
        all.push_back(prompt);
      }
    }
  }
  return all;
}

struct Answers {
  std::vector<std::string> texts;
  std::int64_t cached_tokens = 0;
  std::int64_t prompt_tokens = 0;
};

/// All prompts, eight at a time, while the budget and the mode change between the waves.
Answers ask(DaemonProcess& daemon) {
  Answers answers;
  const std::vector<std::vector<int>> all = prompts();
  constexpr std::size_t wave = 8;
  for (std::size_t begin = 0; begin < all.size(); begin += wave) {
    const bool apart = begin / wave % 2 == 1;
    const json patch{
        {"spec",
         {{"override", {{"mode", apart ? "Disaggregated" : "Chunked"}, {"maxNumBatchedTokens", begin % 3 == 0 ? 48 : 300}}}}}};
    EXPECT_EQ(daemon.control("PATCH", "/apis/rubato.dev/v1alpha1/engines/small", patch.dump()).status, 200);
    std::vector<std::future<StreamedReply>> replies;
    for (std::size_t i = begin; i < std::min(begin + wave, all.size()); ++i) {
      const json body{
          {"model", "small"}, {"prompt", all[i]},   {"max_tokens", 24}, {"ignore_eos", true},
          {"seed", i},        {"temperature", 0.8}, {"stream", true},   {"stream_options", {{"include_usage", true}}}};
      replies.push_back(std::async(std::launch::async, [&daemon, body] { return stream_completion(daemon.data_port(), body); }));
    }
    for (auto& reply : replies) {
      const StreamedReply got = reply.get();
      EXPECT_TRUE(got.done) << got.error;
      if (!got.done) return answers;
      answers.texts.push_back(got.choices.at(0).text);
      answers.prompt_tokens += got.usage["prompt_tokens"].get<int>();
      answers.cached_tokens += got.usage["prompt_tokens_details"]["cached_tokens"].get<int>();
    }
  }
  return answers;
}

class PrefixCache : public ::testing::TestWithParam<const char*> {};

TEST_P(PrefixCache, changes_what_is_computed_and_no_answer) {
  std::array<Answers, 2> answers;
  for (const bool caching : {false, true}) {
    const TemporaryFolder folder;
    DaemonProcess daemon({"--manifest", folder.write("engine.yaml", manifest_of(GetParam(), {.caching = caching})).string()});
    ASSERT_TRUE(daemon.wait_ready(std::chrono::seconds(60))) << daemon.log();
    answers[caching ? 1 : 0] = ask(daemon);
    const Answers& got = answers[caching ? 1 : 0];
    const json status = daemon.engine("small")["status"];
    EXPECT_EQ(status.contains("prefixCache"), caching) << status.dump();
    const std::string labels = "{engine=\"0\",model_name=\"small\"}";
    EXPECT_EQ(daemon.metric("vllm:prefix_cache_hits_total" + labels) > 0, caching);
    if (caching) {
      EXPECT_GE(daemon.metric("vllm:prefix_cache_hits_total" + labels), static_cast<double>(got.cached_tokens));
      EXPECT_GE(daemon.metric("vllm:prefix_cache_queries_total" + labels), static_cast<double>(got.prompt_tokens));
    }
    daemon.signal(SIGTERM);
    EXPECT_EQ(daemon.wait_exit(std::chrono::seconds(20)), 0) << daemon.log();
  }
  EXPECT_EQ(answers[0].texts, answers[1].texts);
  EXPECT_EQ(answers[0].cached_tokens, 0);
  // The second turn of each conversation begins with the first, most first ones with a system prompt that was there already.
  EXPECT_GT(answers[1].cached_tokens, answers[1].prompt_tokens / 4);
}

INSTANTIATE_TEST_SUITE_P(Models, PrefixCache, ::testing::Values("llama", "mamba2", "hybrid"),
                         [](const auto& model) { return std::string(model.param); });

TEST(PrefixCacheSalt, requests_with_different_salts_share_nothing) {
  const TemporaryFolder folder;
  DaemonProcess daemon({"--manifest", folder.write("engine.yaml", manifest_of("hybrid", {})).string()});
  ASSERT_TRUE(daemon.wait_ready(std::chrono::seconds(60))) << daemon.log();
  const std::vector<int> prompt = prompts().front();
  const auto cached = [&](const std::string& salt) {
    json body{{"model", "small"}, {"prompt", prompt}, {"max_tokens", 4}};
    if (!salt.empty()) body["cache_salt"] = salt;
    const RawReply reply = daemon.data("POST", "/v1/completions", body.dump());
    EXPECT_EQ(reply.status, 200) << reply.body;
    return json::parse(reply.body)["usage"]["prompt_tokens_details"]["cached_tokens"].get<int>();
  };
  EXPECT_EQ(cached("red"), 0);
  EXPECT_GT(cached("red"), 0);
  EXPECT_EQ(cached("blue"), 0);
  EXPECT_EQ(cached(""), 0);
  EXPECT_GT(cached(""), 0);
}

TEST(Exactness, a_manifest_can_ask_for_the_check_at_start) {
  const TemporaryFolder folder;
  DaemonProcess daemon({"--manifest", folder.write("engine.yaml", manifest_of("hybrid", {.exactness = "Verify"})).string()});
  ASSERT_TRUE(daemon.wait_ready(std::chrono::seconds(120))) << daemon.log();
  EXPECT_THAT(daemon.log(), testing::HasSubstr("exactness verified: PASS: the same bits in "));
}

/// What a command prints to stdout, and its exit status.
std::pair<std::string, int> run(const std::string& command) {
  std::string text;
  FILE* pipe = ::popen((command + " 2>/dev/null").c_str(), "r");
  CHECK(pipe != nullptr);
  std::array<char, 4096> buffer{};
  while (const std::size_t count = std::fread(buffer.data(), 1, buffer.size(), pipe)) text.append(buffer.data(), count);
  return {text, WEXITSTATUS(::pclose(pipe))};
}

TEST(Exactness, the_checker_runs_on_a_model_folder_and_on_a_manifest) {
  for (const char* name : {"stories260k", "stories260k-bf16"}) {
    if (!std::filesystem::exists(models / name)) GTEST_SKIP() << models / name << " is not here";
    const auto [text, status] = run(RUBATOD " --check-exactness --model " + (models / name).string());
    EXPECT_EQ(status, 0) << text;
    EXPECT_THAT(text, testing::StartsWith("PASS: the same bits in ")) << name;
  }
  const TemporaryFolder folder;
  const std::string manifest = folder.write("engine.yaml", manifest_of("mamba2", {})).string();
  const auto [text, status] = run(RUBATOD " --check-exactness --manifest " + manifest);
  EXPECT_EQ(status, 0) << text;
  EXPECT_THAT(text, testing::StartsWith("PASS: the same bits in "));
  EXPECT_EQ(run(RUBATOD " --check-exactness --model /nowhere").second, 1);
  EXPECT_EQ(run(RUBATOD " --check-exactness").second, 2);
  EXPECT_EQ(run(RUBATOD " --model /nowhere --manifest " + manifest).second, 2);
}

}  // namespace
}  // namespace rubato::test
