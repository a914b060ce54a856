// SPDX-License-Identifier: Apache-2.0
// Real kubectl releases as clients of the control port, over a real socket. Skipped visibly where there is no kubectl.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cstdio>
#include <filesystem>

#include "tests/daemon/control_fixture.h"

namespace rubato::control {
namespace {

namespace fs = std::filesystem;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

/// kubectl.1.29 to 1.33 beside the kubectl of the path; else that one alone.
std::vector<std::string> kubectl_releases() {
  std::vector<std::string> found;
  std::string path = std::getenv("PATH") != nullptr ? std::getenv("PATH") : "";
  for (std::size_t begin = 0; begin < path.size();) {
    const auto end = std::min(path.find(':', begin), path.size());
    std::error_code error;
    const fs::path program = fs::canonical(fs::path(path.substr(begin, end - begin)) / "kubectl", error);
    begin = end + 1;
    if (error) continue;
    for (const char* release : {"29", "30", "31", "32", "33"}) {
      const fs::path versioned = program.parent_path() / (std::string("kubectl.1.") + release);
      if (fs::exists(versioned, error)) found.push_back(versioned.string());
    }
    if (found.empty()) found.push_back(program.string());
    break;
  }
  return found;
}

struct Ran {
  int status = 0;
  std::string output;  // both streams
};

class KubectlTest : public ::testing::TestWithParam<std::string> {
 protected:
  KubectlTest() {
    std::string pattern = (fs::temp_directory_path() / "rubato-kubectl-XXXXXX").string();
    CHECK(mkdtemp(pattern.data()) != nullptr);
    cache_ = pattern;
    side_.start_serving();
    auto started = http::Server::start(
        {.listen = "127.0.0.1:0"},
        [this](http::Request request, std::shared_ptr<http::Exchange> exchange) {
          side_.router.handle(std::move(request), std::move(exchange));
        },
        ControlApi::error_response);
    CHECK(started.has_value(), started.error().message);
    server_ = *std::move(started);
  }
  ~KubectlTest() override {
    server_.reset();
    fs::remove_all(cache_);
  }

  Ran kubectl(const std::string& arguments) {
    const std::string command = "KUBECONFIG=/dev/null timeout 60 '" + GetParam() + "' --cache-dir='" + cache_ +
                                "' -s http://127.0.0.1:" + std::to_string(server_->port()) + " " + arguments + " 2>&1 </dev/null";
    Ran ran;
    FILE* pipe = popen(command.c_str(), "r");
    CHECK(pipe != nullptr);
    std::array<char, 4096> buffer;
    for (std::size_t count = 0; (count = fread(buffer.data(), 1, buffer.size(), pipe)) > 0;)
      ran.output.append(buffer.data(), count);
    ran.status = WEXITSTATUS(pclose(pipe));
    return ran;
  }

  rubato::testing::ControlSide side_;
  std::string cache_;
  std::unique_ptr<http::Server> server_;
};

GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(KubectlTest);
INSTANTIATE_TEST_SUITE_P(Releases, KubectlTest, ::testing::ValuesIn(kubectl_releases()), [](const auto& release) {
  std::string name = fs::path(release.param).filename().string();
  std::replace_if(
      name.begin(), name.end(), [](unsigned char c) { return std::isalnum(c) == 0; }, '_');
  return name;
});

TEST(Kubectl, is_there_to_be_tested_with) {
  if (kubectl_releases().empty()) GTEST_SKIP() << "no kubectl in the path";
}

TEST_P(KubectlTest, lists_gets_patches_and_describes_the_engine) {
  const Ran list = kubectl("get engines");
  EXPECT_EQ(list.status, 0) << list.output;
  EXPECT_THAT(list.output,
              AllOf(HasSubstr("NAME"), HasSubstr("BUDGET"), HasSubstr("ATTAINMENT"), HasSubstr("READY"), HasSubstr("chat")));
  EXPECT_THAT(kubectl("get engine chat -o wide").output, HasSubstr("BACKEND"));
  EXPECT_EQ(kubectl("get engine chat -o 'jsonpath={.status.settings.maxNumBatchedTokens}'").output, "512");

  const Ran patched =
      kubectl(R"(patch engine chat --type=merge -p '{"spec":{"override":{"maxNumBatchedTokens":256,"expiresAfter":"10m"}}}')");
  EXPECT_EQ(patched.status, 0) << patched.output;
  EXPECT_THAT(patched.output, HasSubstr("engine.rubato.dev/chat patched"));
  EXPECT_EQ(
      kubectl("get engine chat -o 'jsonpath={.status.settings.maxNumBatchedTokens} {.status.layers.maxNumBatchedTokens}'").output,
      "256 Override");
  EXPECT_EQ(side_.serving.applied.size(), 1U);

  const Ran described = kubectl("describe engine chat");
  EXPECT_EQ(described.status, 0) << described.output;
  EXPECT_THAT(described.output, AllOf(HasSubstr("Overridden"), HasSubstr("SettingsChanged")));
  EXPECT_THAT(kubectl("get events").output, AllOf(HasSubstr("SettingsChanged"), HasSubstr("engine/chat")));
  EXPECT_THAT(kubectl("label engine chat tier=gold").output, HasSubstr("labeled"));
  EXPECT_THAT(kubectl("get eng -l tier=gold -o name").output, HasSubstr("engine.rubato.dev/chat"));
  EXPECT_THAT(kubectl("api-resources").output, HasSubstr("rubato.dev/v1alpha1"));
  EXPECT_EQ(kubectl("get --raw /readyz").output, "ok");
}

TEST_P(KubectlTest, lists_and_gets_trials_and_changes_none) {
  tuner::Trial trial{.number = 17, .knobs = {.max_num_batched_tokens = 256}, .window = {}, .outcome = "Incumbent"};
  trial.source = "Twin";
  trial.expected = tuner::ExpectedOutcome{.attainment = 0.985, .attainment_spread = 0.012};
  trial.window.judged = trial.window.good = 160;
  trial.ended = std::chrono::duration_cast<std::chrono::seconds>(side_.now.time_since_epoch()).count();
  side_.reconciler.report({.status = {}, .trials = {trial}, .window = {}});
  const Ran list = kubectl("get trials");
  EXPECT_EQ(list.status, 0) << list.output;
  for (const char* column :
       {"NAME", "NUMBER", "OUTCOME", "SOURCE", "BUDGET", "SEQS", "POLICY", "EXPECTED", "MEASURED", "JUDGED", "AGE"}) {
    EXPECT_THAT(list.output, HasSubstr(column));
  }
  EXPECT_THAT(list.output, AllOf(HasSubstr("chat-17"), HasSubstr("98.5% +-1.2"), HasSubstr("100.0%")));
  EXPECT_EQ(kubectl("get trial chat-17 -o 'jsonpath={.status.outcome}'").output, "Incumbent");
  EXPECT_THAT(kubectl("get trial chat-18").output, HasSubstr("trials.rubato.dev \"chat-18\" not found"));
  EXPECT_NE(kubectl("delete trial chat-17").status, 0);
}

TEST_P(KubectlTest, shows_errors_in_its_own_words) {
  const Ran missing = kubectl("get engine nosuch");
  EXPECT_EQ(missing.status, 1);
  EXPECT_THAT(missing.output, HasSubstr("Error from server (NotFound): engines.rubato.dev \"nosuch\" not found"));
  const Ran invalid = kubectl(R"(patch engine chat --type=merge -p '{"spec":{"objectives":{"itl":"fast","ttft":"slow"}}}')");
  EXPECT_EQ(invalid.status, 1);
  EXPECT_THAT(invalid.output,
              AllOf(HasSubstr("* spec.objectives.itl: Invalid value: \"fast\""), HasSubstr("* spec.objectives.ttft")));
  EXPECT_THAT(kubectl(R"(patch engine chat --type=merge -p '{"spec":{"objectives":{"tttft":"1s"}}}')").output,
              HasSubstr("Warning: unknown field \"spec.objectives.tttft\""));
  EXPECT_THAT(kubectl(R"(patch engine chat -p '{"spec":{}}')").output,
              HasSubstr("is not supported by rubato.dev/v1alpha1, Kind=Engine"));
  EXPECT_THAT(kubectl(R"(patch engine chat --type=merge -p '{"metadata":{"resourceVersion":"1"}}')").output,
              HasSubstr("(Conflict)"));
}

}  // namespace
}  // namespace rubato::control
