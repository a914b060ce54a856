// SPDX-License-Identifier: Apache-2.0
// Threads by affinity and cgroup quota, for the ways containers state them.
#include "engine/cpu/cpu_limits.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <string>

#include "engine/cpu/backend.h"

namespace rubato::engine::cpu {
namespace {

TEST(CpuLimits, cpu_max_is_quota_over_period) {
  EXPECT_EQ(parse_cpu_max("150000 100000\n"), 1.5);
  EXPECT_EQ(parse_cpu_max("50000 100000"), 0.5);
  EXPECT_EQ(parse_cpu_max("max 100000\n"), std::nullopt);
}

TEST(CpuLimits, nonsense_means_no_quota) {
  for (const char* text : {"", "\n", "abc", "100000", "-1 100000", "0 100000", "100000 0", "99999999999999999999 1"}) {
    EXPECT_EQ(parse_cpu_max(text), std::nullopt) << text;
  }
}

TEST(CpuLimits, version_1_quota_of_minus_one_is_unlimited) {
  EXPECT_EQ(parse_cfs("-1\n", "100000\n"), std::nullopt);
  EXPECT_EQ(parse_cfs("250000\n", "100000\n"), 2.5);
  EXPECT_EQ(parse_cfs("", ""), std::nullopt);
}

TEST(CpuLimits, threads_are_the_floor_of_the_tighter_limit_and_at_least_one) {
  EXPECT_EQ(threads_for(64, 2.0), 2);
  EXPECT_EQ(threads_for(64, 2.9), 2);
  EXPECT_EQ(threads_for(64, 0.5), 1);
  EXPECT_EQ(threads_for(2, 8.0), 2);
  EXPECT_EQ(threads_for(2, std::nullopt), 2);
  EXPECT_EQ(threads_for(0, std::nullopt), 1);
}

TEST(CpuLimits, cgroup_paths_come_from_the_right_line) {
  constexpr std::string_view both = "12:cpuset:/a\n4:cpu,cpuacct:/docker/1\n0::/user.slice\n";
  EXPECT_EQ(cgroup_v1_cpu_path(both), "/docker/1");
  EXPECT_EQ(cgroup_v2_path(both), "/user.slice");
  EXPECT_EQ(cgroup_v1_cpu_path("3:cpuset:/a\n0::/b"), "");
  EXPECT_EQ(cgroup_v2_path("broken\n1:cpu:/x\n"), "");
}

class FakeRoot {
 public:
  explicit FakeRoot(const std::string& name)
      : path_(std::filesystem::path(testing::TempDir()) /
              (name + std::to_string(::testing::UnitTest::GetInstance()->random_seed()))) {
    std::filesystem::remove_all(path_);
  }
  ~FakeRoot() { std::filesystem::remove_all(path_); }
  void write(const std::string& file, const std::string& text) const {
    std::filesystem::create_directories((path_ / file).parent_path());
    std::ofstream(path_ / file) << text;
  }
  [[nodiscard]] const std::filesystem::path& path() const { return path_; }

 private:
  std::filesystem::path path_;
};

TEST(CpuLimits, the_tightest_quota_on_the_way_to_the_root_counts) {
  const FakeRoot root("cgroup_v2");
  root.write("proc/self/cgroup", "0::/pods/one\n");
  root.write("sys/fs/cgroup/pods/cpu.max", "200000 100000\n");
  root.write("sys/fs/cgroup/pods/one/cpu.max", "max 100000\n");
  EXPECT_EQ(read_quota(root.path()), 2.0);
}

TEST(CpuLimits, inside_a_container_the_quota_stands_at_the_mount_itself) {
  const FakeRoot root("cgroup_container");
  root.write("proc/self/cgroup", "0::/\n");
  root.write("sys/fs/cgroup/cpu.max", "300000 100000\n");
  EXPECT_EQ(read_quota(root.path()), 3.0);
}

TEST(CpuLimits, version_1_is_read_beside_version_2) {
  const FakeRoot root("cgroup_v1");
  root.write("proc/self/cgroup", "4:cpu,cpuacct:/docker/1\n");
  root.write("sys/fs/cgroup/cpu/docker/1/cpu.cfs_quota_us", "150000\n");
  root.write("sys/fs/cgroup/cpu/docker/1/cpu.cfs_period_us", "100000\n");
  EXPECT_EQ(read_quota(root.path()), 1.5);
}

TEST(CpuLimits, no_cgroup_files_mean_no_quota) {
  EXPECT_EQ(read_quota("/nonexistent"), std::nullopt);
}

TEST(CpuLimits, this_machine_gets_at_least_one_thread) {
  EXPECT_GE(default_cpu_threads(), 1);
}

}  // namespace
}  // namespace rubato::engine::cpu
