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
  static std::string text_of(const std::optional<Result<ManifestText>>& seen) {
    if (!seen) return "(unchanged)";
    if (!*seen) return "error: " + seen->error().message;
    return (*seen)->files.at(0).text;
  }

  fs::path directory_;
  fs::path current_;
};

TEST_F(ManifestWatchTest, first_look_gives_the_text_and_the_second_nothing) {
  write(directory_ / "chat.yaml", "abc");
  ManifestWatch watch(directory_ / "chat.yaml");
  const auto first = watch.poll_once();
  ASSERT_EQ(text_of(first), "abc");
  EXPECT_EQ((*first)->hash, "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad") << "as sha256sum prints it";
  EXPECT_FALSE(watch.poll_once());
}

TEST_F(ManifestWatchTest, each_of_fifty_swaps_of_the_data_link_is_seen_and_wakes_the_descriptor) {
  swap_data("v0", "text 0");
  for (const bool as_directory : {false, true}) {
    ManifestWatch watch(as_directory ? directory_ : directory_ / "chat.yaml");
    ASSERT_TRUE(watch.poll_once());
    for (int version = 1; version <= 50; ++version) {
      EXPECT_FALSE(readable(watch));
      const std::string name = std::to_string(as_directory) + "-" + std::to_string(version);
      swap_data("v" + name, "text " + name);
      EXPECT_TRUE(readable(watch)) << version;
      EXPECT_EQ(text_of(watch.poll_once()), "text " + name);
      EXPECT_FALSE(watch.poll_once());
    }
  }
}

TEST_F(ManifestWatchTest, a_swap_to_the_same_text_is_no_change) {
  swap_data("v1", "same");
  ManifestWatch watch(directory_);
  ASSERT_TRUE(watch.poll_once());
  swap_data("v2", "same");
  EXPECT_FALSE(watch.poll_once());
}

TEST_F(ManifestWatchTest, a_missing_file_is_one_error_and_its_return_a_change) {
  ManifestWatch watch(directory_ / "chat.yaml");
  EXPECT_THAT(text_of(watch.poll_once()), HasSubstr("chat.yaml: cannot be opened: No such file"));
  EXPECT_FALSE(watch.poll_once()) << "the same error again is nothing new";
  write(directory_ / "chat.yaml", "back");
  EXPECT_TRUE(readable(watch));
  EXPECT_EQ(text_of(watch.poll_once()), "back");
  fs::remove(directory_ / "chat.yaml");
  EXPECT_THAT(text_of(watch.poll_once()), HasSubstr("error: "));
  write(directory_ / "chat.yaml", "back");
  EXPECT_EQ(text_of(watch.poll_once()), "back") << "the good text is reported again after an error";
}

TEST_F(ManifestWatchTest, fifty_megabytes_are_refused_without_being_read) {
  write(directory_ / "chat.yaml", "");
  fs::resize_file(directory_ / "chat.yaml", 50'000'000);
  ManifestWatch watch(directory_ / "chat.yaml");
  EXPECT_THAT(text_of(watch.poll_once()), HasSubstr("is 50000000 bytes; a manifest may have at most 1048576"));
}

TEST_F(ManifestWatchTest, an_empty_file_is_a_text_for_the_reader_to_refuse) {
  write(directory_ / "chat.yaml", "");
  ManifestWatch watch(directory_ / "chat.yaml");
  EXPECT_EQ(text_of(watch.poll_once()), "");
}

TEST_F(ManifestWatchTest, an_unreadable_file_is_an_error_and_readable_again_a_change) {
  write(directory_ / "chat.yaml", "text");
  ManifestWatch watch(directory_ / "chat.yaml");
  ASSERT_EQ(text_of(watch.poll_once()), "text");
  fs::permissions(directory_ / "chat.yaml", fs::perms::none);
  const uid_t user = geteuid();
  if (user == 0) {
    ASSERT_EQ(seteuid(65534), 0);  // root may read anything
  }
  const std::string refused = text_of(watch.poll_once());
  if (user == 0) {
    ASSERT_EQ(seteuid(0), 0);
  }
  EXPECT_THAT(refused, HasSubstr("cannot be opened: Permission denied"));
  fs::permissions(directory_ / "chat.yaml", fs::perms(0644));
  EXPECT_TRUE(readable(watch));
  EXPECT_EQ(text_of(watch.poll_once()), "text");
}

TEST_F(ManifestWatchTest, a_named_pipe_and_a_dangling_link_are_errors_and_do_not_block) {
  ASSERT_EQ(mkfifo((directory_ / "pipe.yaml").c_str(), 0600), 0);
  ManifestWatch pipe(directory_ / "pipe.yaml");
  EXPECT_THAT(text_of(pipe.poll_once()), HasSubstr("is not a regular file"));
  fs::create_symlink("nowhere", directory_ / "link.yaml");
  ManifestWatch link(directory_ / "link.yaml");
  EXPECT_THAT(text_of(link.poll_once()), HasSubstr("No such file"));
}

TEST_F(ManifestWatchTest, a_directory_gives_its_manifests_in_order_and_skips_hidden_and_other_files) {
  write(directory_ / "b.yml", "b");
  write(directory_ / "a.yaml", "a");
  write(directory_ / ".a.yaml.swp", "x");
  write(directory_ / ".hidden.yaml", "x");
  write(directory_ / "notes.txt", "x");
  const auto manifest = ManifestWatch::read(directory_);
  ASSERT_TRUE(manifest) << manifest.error().message;
  ASSERT_EQ(manifest->files.size(), 2U);
  EXPECT_EQ(manifest->files[0].text, "a");
  EXPECT_EQ(manifest->files[1].text, "b");
  fs::rename(directory_ / "b.yml", directory_ / "c.yml");
  EXPECT_NE(ManifestWatch::read(directory_)->hash, manifest->hash) << "names count";
}

TEST_F(ManifestWatchTest, an_empty_or_overfull_directory_is_an_error) {
  EXPECT_THAT(ManifestWatch::read(directory_).error().message, HasSubstr("holds no *.yaml"));
  for (int index = 0; index < 65; ++index) write(directory_ / (std::to_string(index) + ".yaml"), "x");
  EXPECT_THAT(ManifestWatch::read(directory_).error().message, HasSubstr("more than 64"));
}

TEST_F(ManifestWatchTest, an_editor_that_replaces_the_file_and_one_that_writes_in_place_both_wake_the_descriptor) {
  write(directory_ / "chat.yaml", "1");
  ManifestWatch watch(directory_ / "chat.yaml");
  ASSERT_TRUE(watch.poll_once());
  write(directory_ / "chat.yaml~", "2");
  fs::rename(directory_ / "chat.yaml~", directory_ / "chat.yaml");
  EXPECT_TRUE(readable(watch));
  EXPECT_EQ(text_of(watch.poll_once()), "2");
  write(directory_ / "chat.yaml", "3");
  EXPECT_TRUE(readable(watch));
  EXPECT_EQ(text_of(watch.poll_once()), "3");
}

TEST_F(ManifestWatchTest, a_directory_that_is_removed_and_made_again_is_watched_again) {
  const fs::path inner = directory_ / "mount";
  fs::create_directory(inner);
  write(inner / "chat.yaml", "1");
  ManifestWatch watch(inner);
  ASSERT_TRUE(watch.poll_once());
  fs::remove_all(inner);
  EXPECT_THAT(text_of(watch.poll_once()), HasSubstr("error: "));
  fs::create_directory(inner);
  write(inner / "chat.yaml", "2");
  EXPECT_EQ(text_of(watch.poll_once()), "2") << "the timer finds it";
  write(inner / "chat.yaml", "3");
  EXPECT_TRUE(readable(watch)) << "and the watch is armed again";
}

}  // namespace
}  // namespace rubato::control
