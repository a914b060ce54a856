// SPDX-License-Identifier: Apache-2.0
// The offline commands on what a real daemon has left behind: the journal explains, its calibration plans, its regimes travel.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <cstdio>
#include <filesystem>
#include <future>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "tests/e2e/daemon_process.h"

namespace rubato::test {
namespace {

using nlohmann::json;
using ::testing::HasSubstr;

// Targets that nothing meets, so that there is something to decide.
const std::string manifest =
    "apiVersion: rubato.dev/v1alpha1\nkind: Engine\nmetadata: {name: small}\nspec:\n"
    "  model: {synthetic: {hiddenSize: 256, layers: 4, heads: 4, kvHeads: 2, feedForward: 512, vocabulary: 300}}\n"
    "  capacity: {maxModelLen: 256, maxNumSeqs: 8, kvCacheMemory: 8Mi, cpuThreads: 1}\n"
    "  objectives: {ttft: 1ms, itl: 100us, attainment: 99}\n"
    "  knobs:\n    maxNumSeqs: {initial: 8, min: 1, max: 8}\n    maxNumBatchedTokens: {initial: 64, min: 32, max: 256}\n"
    "  tuning: {window: 500ms, minRequests: 5, settle: 50ms, dwell: 1s}\n";

const std::string profile = "phases:\n- {name: steady, seconds: 20, rate: 10, prompt: {fixed: 40}, output: {fixed: 8}}\n";

struct Ran {
  int status = 0;
  std::string output;  // stdout
};

Ran run(const std::string& arguments) {
  Ran ran;
  FILE* pipe = ::popen((std::string(RUBATOD) + " " + arguments).c_str(), "r");
  CHECK(pipe != nullptr);
  std::array<char, 4096> buffer{};
  while (const std::size_t count = std::fread(buffer.data(), 1, buffer.size(), pipe)) ran.output.append(buffer.data(), count);
  ran.status = WEXITSTATUS(::pclose(pipe));
  return ran;
}

/// Short requests, four at a time, until the tuner has decided something, within bounds.
void load_until_decided(DaemonProcess& daemon) {
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(4);
  const json body{{"model", "small"}, {"prompt", std::vector<int>(40, 7)}, {"max_tokens", 8}, {"ignore_eos", true}};
  while (std::chrono::steady_clock::now() < deadline) {
    std::vector<std::future<int>> replies;
    for (int i = 0; i < 4; ++i) {
      replies.push_back(
          std::async(std::launch::async, [&] { return daemon.data("POST", "/v1/completions", body.dump()).status; }));
    }
    for (auto& reply : replies) ASSERT_EQ(reply.get(), 200);
    if (daemon.metric("rubato_searches_total").value_or(0) > 0) return;
  }
}

TEST(ExplainAndPlan, work_on_what_a_daemon_has_left) {
  const TemporaryFolder folder;
  const std::string file = folder.write("engine.yaml", manifest).string();
  const std::string trace = folder.write("steady.yaml", profile).string();
  const std::string state = (folder.path() / "state").string();
  std::filesystem::create_directory(state);
  {
    DaemonProcess daemon({"--manifest", file, "--state", state});
    ASSERT_TRUE(daemon.wait_ready(std::chrono::seconds(30))) << daemon.log();
    load_until_decided(daemon);
    const json running = json::parse(run("explain --json --state " + state).output, nullptr, false);
    ASSERT_TRUE(running.is_object()) << "a journal can be read while it is written";
    ASSERT_FALSE(running["items"].empty()) << daemon.log();
    EXPECT_TRUE(running["items"].back().contains("message"));
    const RawReply trials = daemon.control("GET", "/apis/rubato.dev/v1alpha1/trials");
    EXPECT_EQ(trials.status, 200);
    EXPECT_EQ(json::parse(trials.body)["kind"], "TrialList");
    daemon.signal(SIGTERM);
    EXPECT_EQ(daemon.wait_exit(std::chrono::seconds(20)), 0) << daemon.log();
  }
  const Ran text = run("explain --since 1h --state " + state);
  EXPECT_EQ(text.status, 0);
  EXPECT_THAT(text.output, HasSubstr("  because   "));

  const Ran planned =
      run("plan --json --manifest " + file + " --trace " + trace + " --calibration " + state + "/calibration.json");
  ASSERT_EQ(planned.status, 0);
  const json plan = json::parse(planned.output, nullptr, false);
  ASSERT_TRUE(plan.is_object()) << planned.output;
  EXPECT_EQ(plan["loads"].size(), 7U);
  EXPECT_THAT(plan["stepTimes"]["source"].get<std::string>(), HasSubstr("synthetic/"));
  EXPECT_FALSE(plan["highestLoad"]["found"].get<bool>()) << "a step alone takes longer than 100 us";

  const Ran exported = run("regimes export --state " + state);
  EXPECT_EQ(exported.status, 0);
  const std::string regimes = folder.write("regimes.json", exported.output).string();
  const Ran imported = run("regimes import --state " + state + " " + regimes);
  EXPECT_EQ(imported.status, 0);
  EXPECT_THAT(imported.output, HasSubstr("when the daemon next starts"));
}

TEST(ExplainAndPlan, say_what_they_lack) {
  const TemporaryFolder folder;
  EXPECT_EQ(run("explain").status, 2);
  EXPECT_EQ(run("explain --state " + folder.path().string()).status, 1);
  EXPECT_EQ(run("plan --manifest x").status, 2);
  EXPECT_EQ(run("regimes export --state " + folder.path().string()).status, 1);
  EXPECT_EQ(run("explain --help").status, 0);
}

}  // namespace
}  // namespace rubato::test
