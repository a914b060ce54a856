// SPDX-License-Identifier: Apache-2.0
#include "daemon/options.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace rubato {
namespace {

using ::testing::HasSubstr;

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

TEST(Options, help_needs_no_manifest_and_lists_every_flag) {
  ASSERT_TRUE(parse_options({"--help"}));
  for (const char* flag :
       {"--manifest", "--listen", "--control-listen", "--state", "--log-format", "--drain-timeout", "--check", "--schema", "--version"}) {
    EXPECT_THAT(usage_text(), HasSubstr(flag));
  }
}

}  // namespace
}  // namespace rubato
