// SPDX-License-Identifier: Apache-2.0
// How many CPUs this process may use: its affinity mask and its cgroup's quota (versions 1 and 2). The parsers work on text, so
// that every container setting can be tested without a container.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string_view>

namespace rubato::engine::cpu {

/// CPUs' worth of quota, such as 1.5; none when unlimited or unreadable.
using Quota = std::optional<double>;

/// cpu.max of cgroup version 2: `max 100000`, `150000 100000`.
[[nodiscard]] Quota parse_cpu_max(std::string_view text);
/// cpu.cfs_quota_us and cpu.cfs_period_us of version 1; a quota of -1 is unlimited.
[[nodiscard]] Quota parse_cfs(std::string_view quota, std::string_view period);

/// This process's cgroup path out of /proc/self/cgroup: the v1 `cpu` controller's, or version 2's; empty when absent.
[[nodiscard]] std::string_view cgroup_v2_path(std::string_view proc_self_cgroup);
[[nodiscard]] std::string_view cgroup_v1_cpu_path(std::string_view proc_self_cgroup);

/// The tightest quota between the process's cgroup and the root. root stands for `/` in tests.
[[nodiscard]] Quota read_quota(const std::filesystem::path& root);

/// min(affinity, floor(quota)), at least 1.
[[nodiscard]] std::int32_t threads_for(std::int32_t affinity, Quota quota);

}  // namespace rubato::engine::cpu
