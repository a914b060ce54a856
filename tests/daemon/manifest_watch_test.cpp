// SPDX-License-Identifier: Apache-2.0
#include "daemon/control/manifest_watch.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/stat.h>
#include <unistd.h>

#include <fstream>

namespace rubato::control {
namespace {

namespace fs = std::filesystem;
using ::testing::HasSubstr;

class ManifestWatchTest : public ::testing::Test {
 protected:
  ManifestWatchTest() {
    std::string pattern = (fs::temp_directory_path() / "rubato-watch-XXXXXX").string();
    CHECK(mkdtemp(pattern.data()) != nullptr);
    directory_ = pattern;
    fs::permissions(directory_, fs::perms(0755));
  }
  ~ManifestWatchTest() override { fs::remove_all(directory_); }

  void write(const fs::path& path, const std::string& text) { std::ofstream(path, std::ios::binary) << text; }
  /// A valid manifest that differs from others in a label.
  static std::string manifest(const std::string& version) {
    return "apiVersion: rubato.dev/v1alpha1\nkind: Engine\nmetadata: {name: chat, labels: {version: \"" + version +
           "\"}}\nspec:\n  model: {path: /models/llama}\n";
  }

  /// What kubelet does when a ConfigMap changes: a new directory, a new link beside ..data, and one rename over it.
  void swap_data(const std::string& version, const std::string& text) {
    const fs::path fresh = directory_ / (".." + version);
    fs::create_directory(fresh);
    write(fresh / "chat.yaml", text);
    fs::create_directory_symlink(".." + version, directory_ / "..data_tmp");
    fs::rename(directory_ / "..data_tmp", directory_ / "..data");
    if (!fs::exists(fs::symlink_status(directory_ / "chat.yaml")))
      fs::create_symlink("..data/chat.yaml", directory_ / "chat.yaml");
    if (!current_.empty()) fs::remove_all(current_);
    current_ = fresh;
  }

  static bool readable(const ManifestWatch& watch) {
    pollfd entry{.fd = watch.descriptor().value(), .events = POLLIN, .revents = 0};
    return ::poll(&entry, 1, 0) == 1;
  }
  static std::string version_of(const std::optional<ManifestWatch::Outcome>& seen) {
    if (!seen) return "(unchanged)";
    if (!*seen) return "error: " + seen->failure().text();
    return seen->value().manifest.labels.at("version");
  }

  fs::path directory_;
  fs::path current_;
};

TEST_F(ManifestWatchTest, first_look_gives_the_manifest_and_the_second_nothing) {
  write(directory_ / "chat.yaml", manifest("1"));
  ManifestWatch watch(directory_ / "chat.yaml", "");
  const auto first = watch.poll_once();
  ASSERT_EQ(version_of(first), "1");
  EXPECT_FALSE(watch.poll_once());
  ManifestWatch started(directory_ / "chat.yaml", first->value().hash);
  EXPECT_FALSE(started.poll_once()) << "what was read at start is no change";
}

TEST_F(ManifestWatchTest, each_of_fifty_swaps_of_the_data_link_is_seen_and_wakes_the_descriptor) {
  for (const auto& [kind, path] : {std::pair("directory", directory_), std::pair("file", directory_ / "chat.yaml")}) {
    swap_data(std::string(kind) + "0", manifest("0"));
    ManifestWatch watch(path, "");
    ASSERT_EQ(version_of(watch.poll_once()), "0");
    for (int version = 1; version <= 50; ++version) {
      ASSERT_FALSE(readable(watch)) << kind << version;
      const bool valid = version % 5 != 0;
      swap_data(kind + std::to_string(version), valid ? manifest(std::to_string(version)) : "kind: [" + std::to_string(version));
      ASSERT_TRUE(readable(watch)) << kind << version;
      if (valid) {
        ASSERT_EQ(version_of(watch.poll_once()), std::to_string(version));
      } else {
        ASSERT_THAT(version_of(watch.poll_once()), HasSubstr("error: ")) << kind << version;
      }
      ASSERT_FALSE(watch.poll_once()) << kind << version;
    }
  }
}

TEST_F(ManifestWatchTest, a_swap_to_the_same_text_is_no_change) {
  swap_data("v1", manifest("1"));
  ManifestWatch watch(directory_, "");
  ASSERT_TRUE(watch.poll_once());
  swap_data("v2", manifest("1"));
  EXPECT_FALSE(watch.poll_once());
}

TEST_F(ManifestWatchTest, a_missing_file_is_one_error_and_its_return_a_change) {
  ManifestWatch watch(directory_ / "chat.yaml", "");
  EXPECT_THAT(version_of(watch.poll_once()), HasSubstr("No such file"));
  EXPECT_FALSE(watch.poll_once()) << "the same error again is nothing new";
  write(directory_ / "chat.yaml", manifest("1"));
  EXPECT_TRUE(readable(watch));
  EXPECT_EQ(version_of(watch.poll_once()), "1");
  fs::remove(directory_ / "chat.yaml");
  EXPECT_THAT(version_of(watch.poll_once()), HasSubstr("error: "));
  write(directory_ / "chat.yaml", manifest("1"));
  EXPECT_EQ(version_of(watch.poll_once()), "1") << "the good manifest is reported again after an error";
}

TEST_F(ManifestWatchTest, every_kind_of_bad_file_is_an_error_and_the_next_good_one_a_change) {
  ManifestWatch watch(directory_ / "chat.yaml", "");
  const auto expect_error = [&](const std::string& text, const std::string& part) {
    write(directory_ / "chat.yaml", text);
    EXPECT_THAT(version_of(watch.poll_once()), ::testing::AllOf(HasSubstr("error: "), HasSubstr(part)));
    write(directory_ / "chat.yaml", manifest("good"));
    EXPECT_EQ(version_of(watch.poll_once()), "good");
  };
  expect_error("", "is empty");
  expect_error("kind: [", "chat.yaml:");
  expect_error(manifest("x") + "  objectives: {ttft: 500ms, itl: 5}\n", "spec.objectives.itl");
  fs::resize_file(directory_ / "chat.yaml", 50'000'000);
  EXPECT_THAT(version_of(watch.poll_once()), HasSubstr("is larger than"));
}

TEST_F(ManifestWatchTest, an_unreadable_file_is_an_error_and_readable_again_a_change) {
  write(directory_ / "chat.yaml", manifest("1"));
  ManifestWatch watch(directory_ / "chat.yaml", "");
  ASSERT_EQ(version_of(watch.poll_once()), "1");
  fs::permissions(directory_ / "chat.yaml", fs::perms::none);
  const uid_t user = geteuid();
  if (user == 0) {
    ASSERT_EQ(seteuid(65534), 0);  // root may read anything
  }
  const std::string refused = version_of(watch.poll_once());
  if (user == 0) {
    ASSERT_EQ(seteuid(0), 0);
  }
  EXPECT_THAT(refused, HasSubstr("Permission denied"));
  fs::permissions(directory_ / "chat.yaml", fs::perms(0644));
  EXPECT_TRUE(readable(watch));
  EXPECT_EQ(version_of(watch.poll_once()), "1");
}

TEST_F(ManifestWatchTest, a_named_pipe_and_a_dangling_link_are_errors_and_do_not_block) {
  ASSERT_EQ(mkfifo((directory_ / "pipe.yaml").c_str(), 0600), 0);
  ManifestWatch pipe(directory_ / "pipe.yaml", "");
  EXPECT_THAT(version_of(pipe.poll_once()), HasSubstr("is not a regular file"));
  fs::create_symlink("nowhere", directory_ / "link.yaml");
  ManifestWatch link(directory_ / "link.yaml", "");
  EXPECT_THAT(version_of(link.poll_once()), HasSubstr("No such file"));
}

TEST_F(ManifestWatchTest, an_editor_that_replaces_the_file_and_one_that_writes_in_place_both_wake_the_descriptor) {
  write(directory_ / "chat.yaml", manifest("1"));
  ManifestWatch watch(directory_ / "chat.yaml", "");
  ASSERT_TRUE(watch.poll_once());
  write(directory_ / "chat.yaml~", manifest("2"));
  fs::rename(directory_ / "chat.yaml~", directory_ / "chat.yaml");
  EXPECT_TRUE(readable(watch));
  EXPECT_EQ(version_of(watch.poll_once()), "2");
  write(directory_ / "chat.yaml", manifest("3"));
  EXPECT_TRUE(readable(watch));
  EXPECT_EQ(version_of(watch.poll_once()), "3");
}

TEST_F(ManifestWatchTest, a_directory_that_is_removed_and_made_again_is_watched_again) {
  const fs::path inner = directory_ / "mount";
  fs::create_directory(inner);
  write(inner / "chat.yaml", manifest("1"));
  ManifestWatch watch(inner, "");
  ASSERT_TRUE(watch.poll_once());
  fs::remove_all(inner);
  EXPECT_THAT(version_of(watch.poll_once()), HasSubstr("error: "));
  fs::create_directory(inner);
  write(inner / "chat.yaml", manifest("2"));
  EXPECT_EQ(version_of(watch.poll_once()), "2") << "the timer finds it";
  write(inner / "chat.yaml", manifest("3"));
  EXPECT_TRUE(readable(watch)) << "and the watch is armed again";
}

}  // namespace
}  // namespace rubato::control
