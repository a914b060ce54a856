// SPDX-License-Identifier: Apache-2.0
// Files, directories and mounted ConfigMaps, with everything that can be wrong with them.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>

#include "manifests/content_hash.h"
#include "manifests/read_manifest.h"
#include "tests/manifests/manifest_text.h"

namespace rubato {
namespace {

namespace fs = std::filesystem;
using testing::HasSubstr;

class ReadDirectory : public testing::Test {
 protected:
  ReadDirectory() {
    std::string name = (fs::temp_directory_path() / "rubato-manifests-XXXXXX").string();
    root_ = mkdtemp(name.data());
  }
  ~ReadDirectory() override { fs::remove_all(root_); }

  void write(const std::string& name, const std::string& text) const {
    fs::create_directories((root_ / name).parent_path());
    std::ofstream(root_ / name, std::ios::binary) << text;
  }
  [[nodiscard]] std::string read(const std::string& name = "") const {
    const auto result = read_manifest(name.empty() ? root_ : root_ / name);
    return result ? "good: " + result->manifest.name : result.failure().text();
  }
  [[nodiscard]] std::string at(const std::string& name) const { return (root_ / name).string(); }

  /// As kubelet does it: a new directory, then one atomic rename of the `..data` link.
  void mount(const std::string& version, const std::string& text) const {
    write(".." + version + "/chat.yaml", text);
    fs::create_directory_symlink(".." + version, root_ / "..data_tmp");
    fs::rename(root_ / "..data_tmp", root_ / "..data");
    if (!fs::is_symlink(root_ / "chat.yaml")) fs::create_symlink("..data/chat.yaml", root_ / "chat.yaml");
  }
  static std::string named(const std::string& name) {
    std::string text = manifest_with("");
    return text.replace(text.find("chat"), 4, name);
  }

  fs::path root_;
};

TEST_F(ReadDirectory, a_file_is_read_and_its_hash_is_that_of_its_bytes) {
  write("chat.yaml", manifest_with(""));
  const auto result = read_manifest(root_ / "chat.yaml");
  ASSERT_TRUE(result) << result.failure().text();
  EXPECT_EQ(result->file, at("chat.yaml"));
  EXPECT_EQ(result->hash, content_hash(manifest_with("")));
}

TEST_F(ReadDirectory, only_yaml_files_of_a_directory_are_read_and_hold_one_engine_together) {
  write("chat.yml", manifest_with(""));
  write("README.md", "not: [yaml");
  write("..hidden.yaml", "not: [yaml");
  fs::create_directory(root_ / "sub.yaml");
  EXPECT_EQ(read(), "good: chat");
  write("second.yaml", manifest_with(""));
  EXPECT_EQ(read(), at("second.yaml") + ":1:1 kind: is a second Engine: the first stands in " + at("chat.yml") +
                        ":1, and exactly one is allowed\n");
}

TEST_F(ReadDirectory, errors_of_all_files_come_together) {
  write("a.yaml", manifest_with("  zzz: 1"));
  write("b.yaml", "kind: Thing\n");
  EXPECT_THAT(read(), HasSubstr(at("a.yaml") + ":6:3 spec.zzz: unknown field"));
  EXPECT_THAT(read(), HasSubstr(at("b.yaml") + ":1:7 kind: \"Thing\" is not one of Engine"));
}

TEST_F(ReadDirectory, what_cannot_be_read_is_said_with_its_reason) {
  EXPECT_EQ(read("missing.yaml"), at("missing.yaml") + ": cannot be read: No such file or directory\n");
  EXPECT_EQ(read(), root_.string() + ": holds no *.yaml or *.yml file\n");
  ASSERT_EQ(mkfifo(at("pipe.yaml").c_str(), 0600), 0);
  EXPECT_EQ(read("pipe.yaml"), at("pipe.yaml") + ": is not a regular file\n");
  fs::remove(root_ / "pipe.yaml");
  fs::create_symlink("nowhere", root_ / "dangling.yaml");
  EXPECT_THAT(read(), HasSubstr("dangling.yaml: cannot be read: "));
  fs::remove(root_ / "dangling.yaml");
  write("empty.yaml", "");
  EXPECT_THAT(read(), HasSubstr("empty.yaml: is empty"));
  write("empty.yaml", std::string(50U << 20U, ' '));
  EXPECT_THAT(read(), HasSubstr("empty.yaml: is larger than 1048576 bytes"));
  for (int i = 0; i < 65; ++i) write(std::to_string(i) + ".yaml", "");
  EXPECT_THAT(read(), HasSubstr("holds more than 64 *.yaml and *.yml files"));
}

TEST_F(ReadDirectory, a_file_without_permission_is_an_error) {
  if (geteuid() == 0) GTEST_SKIP() << "root may read any file";
  write("chat.yaml", manifest_with(""));
  fs::permissions(root_ / "chat.yaml", fs::perms::none);
  EXPECT_EQ(read("chat.yaml"), at("chat.yaml") + ": cannot be read: Permission denied\n");
}

TEST_F(ReadDirectory, a_mounted_config_map_is_followed_through_every_swap) {
  for (const std::string version : {"v1", "v2", "v3"}) {
    mount(version, named("chat-" + version));
    EXPECT_EQ(read(), "good: chat-" + version);
    EXPECT_EQ(read("chat.yaml"), "good: chat-" + version);
  }
  const auto result = read_manifest(root_);
  ASSERT_TRUE(result);
  EXPECT_EQ(result->file, at("chat.yaml"));  // the mounted name, not that of the version's directory
}

TEST_F(ReadDirectory, errors_in_a_mounted_config_map_name_the_mounted_file) {
  mount("v1", manifest_with("  zzz: 1"));
  EXPECT_THAT(read(), HasSubstr(at("chat.yaml") + ":6:3 spec.zzz: unknown field"));
}

TEST(ContentHash, agrees_with_the_published_examples) {
  EXPECT_EQ(content_hash(""), "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
  EXPECT_EQ(content_hash("abc"), "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
  EXPECT_EQ(content_hash("abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq"),
            "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1");
  EXPECT_EQ(content_hash(std::string(1'000'000, 'a')), "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0");
}

TEST(Examples, each_is_a_good_manifest) {
  int count = 0;
  for (const auto& entry : fs::directory_iterator(RUBATO_SOURCE_DIR "/manifests/examples")) {
    if (entry.is_directory()) continue;  // load/ holds profiles for rubato-replay
    const auto result = read_manifest(entry.path());
    EXPECT_TRUE(result) << result.failure().text();
    ++count;
  }
  EXPECT_GE(count, 3);
}

}  // namespace
}  // namespace rubato
