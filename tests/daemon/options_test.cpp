// SPDX-License-Identifier: Apache-2.0
#include "daemon/options.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace rubato {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

TEST(Options, defaults_bind_loopback_and_serve) {
  const auto options = parse_options({"--manifest", "chat.yaml"});
  ASSERT_TRUE(options);
  EXPECT_EQ(options->action, Action::Serve);
  EXPECT_EQ(options->listen, "127.0.0.1:8000");
  EXPECT_EQ(options->control_listen, "127.0.0.1:8080");
  EXPECT_EQ(options->log_format, LogFormat::Text);
}

TEST(Options, values_may_follow_or_be_joined) {
  const auto options = parse_options({"--manifest=a.yaml", "--state", "/var/lib/rubato", "--log-format=json", "--check"});
  ASSERT_TRUE(options);
  EXPECT_EQ(options->manifest, "a.yaml");
  EXPECT_EQ(options->state, "/var/lib/rubato");
  EXPECT_EQ(options->log_format, LogFormat::Json);
  EXPECT_EQ(options->action, Action::Check);
}

TEST(Options, every_mistake_names_the_flag) {
  const auto expect_error = [](const std::vector<std::string>& arguments, const std::string& flag, const std::string& part) {
    const auto options = parse_options(arguments);
    ASSERT_FALSE(options);
    EXPECT_EQ(options.error().field, flag);
    EXPECT_THAT(options.error().message, HasSubstr(part));
  };
  expect_error({}, "--manifest", "is needed");
  expect_error({"--manifest"}, "--manifest", "needs a value");
  expect_error({"--manifest="}, "--manifest", "needs a value");
  expect_error({"--manifets", "x"}, "--manifets", "not known");
  expect_error({"--check=yes", "--manifest", "x"}, "--check", "takes no value");
  expect_error({"--manifest", "x", "--drain-timeout", "30"}, "--drain-timeout", "30");
  expect_error({"--manifest", "x", "--log-format", "xml"}, "--log-format", "text, json");
}

TEST(Options, a_command_comes_first_and_takes_its_own_flags) {
  const auto explain = parse_options({"explain", "--state", "/s", "--since=1h", "--json"});
  ASSERT_TRUE(explain) << explain.error().message;
  EXPECT_EQ(explain->action, Action::Explain);
  EXPECT_EQ(explain->state, "/s");
  EXPECT_EQ(explain->since, std::chrono::hours(1));
  EXPECT_EQ(explain->output_format, OutputFormat::Json);
  EXPECT_FALSE(parse_options({"explain", "--state", "/s"})->since);

  const auto plan = parse_options({"plan", "--manifest", "m.yaml", "--trace=t.csv", "--format", "lengths", "--rate-scale", "2",
                                   "--length-scale=0.5", "--seconds", "60", "--calibration", "c.json", "--measure", "3s"});
  ASSERT_TRUE(plan) << plan.error().message;
  EXPECT_EQ(plan->action, Action::Plan);
  EXPECT_EQ(plan->workload.trace, "t.csv");
  EXPECT_EQ(plan->workload.format, replay::TraceFormat::Lengths);
  EXPECT_EQ(plan->workload.rate_scale, 2);
  EXPECT_EQ(plan->workload.length_scale, 0.5);
  EXPECT_EQ(plan->workload.seconds, std::chrono::seconds(60));
  EXPECT_EQ(plan->calibration, "c.json");
  EXPECT_EQ(plan->measure, std::chrono::seconds(3));

  const auto import = parse_options({"regimes", "import", "--state", "/s", "r.json", "--any-model"});
  ASSERT_TRUE(import) << import.error().message;
  EXPECT_EQ(import->action, Action::ImportRegimes);
  EXPECT_EQ(import->input, "r.json");
  EXPECT_EQ(import->model_keys, ModelKeys::Any);
  const auto exported = parse_options({"regimes", "export", "--state", "/s", "--output", "r.json"});
  ASSERT_TRUE(exported) << exported.error().message;
  EXPECT_EQ(exported->action, Action::ExportRegimes);
  EXPECT_EQ(exported->output, "r.json");
}

TEST(Options, every_mistake_in_a_command_names_the_flag) {
  const auto expect_error = [](const std::vector<std::string>& arguments, const std::string& flag, const std::string& part) {
    const auto options = parse_options(arguments);
    ASSERT_FALSE(options) << part;
    EXPECT_EQ(options.error().field, flag);
    EXPECT_THAT(options.error().message, HasSubstr(part));
  };
  expect_error({"explian"}, "explian", "explain, plan, regimes export, regimes import");
  expect_error({"regimes"}, "regimes", "is not a command");
  expect_error({"regimes", "--state", "/s"}, "regimes", "is not a command");
  expect_error({"explain"}, "--state", "is needed");
  expect_error({"explain", "--state", "/s", "--since", "1"}, "--since", "1");
  expect_error({"explain", "--state", "/s", "--since", "0s"}, "--since", "above zero");
  expect_error({"explain", "--state", "/s", "--listen", "x:1"}, "--listen", "is not for rubatod explain");
  expect_error({"explain", "--state", "/s", "extra"}, "extra", "not known");
  expect_error({"--manifest", "x", "--trace", "t"}, "--trace", "is not for rubatod;");
  expect_error({"plan", "--trace", "t"}, "--manifest", "is needed");
  expect_error({"plan", "--manifest", "m"}, "--trace", "is needed");
  expect_error({"plan", "--manifest", "m", "--trace", "t", "--rate-scale", "0"}, "--rate-scale", "1e-06..1e+06");
  expect_error({"plan", "--manifest", "m", "--trace", "t", "--format", "csv"}, "--format", "azure, mooncake, lengths, profile");
  expect_error({"plan", "--manifest", "m", "--trace", "t", "--measure", "1h"}, "--measure", "at most 10m");
  expect_error({"regimes", "export"}, "--state", "is needed");
  expect_error({"regimes", "import", "--state", "/s"}, "FILE", "is needed");
  expect_error({"regimes", "import", "--state", "/s", "a", "b"}, "b", "not known");
}

TEST(Options, each_command_has_a_help_of_its_own) {
  const auto help = parse_options({"plan", "--help"});
  ASSERT_TRUE(help);
  EXPECT_EQ(help->action, Action::ShowHelp);
  EXPECT_THAT(usage_text(help->command), AllOf(HasSubstr("--calibration"), HasSubstr("--trace"), Not(HasSubstr("--listen"))));
  EXPECT_THAT(usage_text(Command::Explain), AllOf(HasSubstr("--since"), Not(HasSubstr("--trace"))));
  EXPECT_THAT(usage_text(Command::RegimesImport), AllOf(HasSubstr("FILE"), HasSubstr("--any-model")));
  EXPECT_THAT(usage_text(), AllOf(HasSubstr("rubatod explain"), HasSubstr("rubatod regimes import"), Not(HasSubstr("--since"))));
}

TEST(Options, help_needs_no_manifest_and_lists_every_flag) {
  ASSERT_TRUE(parse_options({"--help"}));
  for (const char* flag : {"--manifest", "--listen", "--control-listen", "--state", "--log-format", "--drain-timeout", "--check",
                           "--schema", "--version"}) {
    EXPECT_THAT(usage_text(), HasSubstr(flag));
  }
}

}  // namespace
}  // namespace rubato
