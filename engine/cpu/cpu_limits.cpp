// SPDX-License-Identifier: Apache-2.0
// Reading the CPU limits of the process. A process that runs more compute threads than its quota is throttled to a crawl, without
// a word.
#include "engine/cpu/cpu_limits.h"

#include <sched.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <fstream>
#include <sstream>
#include <string>
#include <thread>

#include "engine/cpu/backend.h"

namespace rubato::engine::cpu {
namespace {

std::optional<std::int64_t> take_number(std::string_view& text) {
  while (!text.empty() && (text.front() == ' ' || text.front() == '\t')) text.remove_prefix(1);
  std::int64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc()) return std::nullopt;
  text.remove_prefix(static_cast<std::size_t>(end - text.data()));
  return value;
}

Quota ratio(std::optional<std::int64_t> quota, std::optional<std::int64_t> period) {
  if (!quota || !period || *quota <= 0 || *period <= 0) return std::nullopt;
  return static_cast<double>(*quota) / static_cast<double>(*period);
}

std::string read_text(const std::filesystem::path& file) {
  std::ifstream in(file);
  std::stringstream text;
  if (in) text << in.rdbuf();
  return std::move(text).str();
}

Quota tighter(Quota a, Quota b) {
  if (!a) return b;
  if (!b) return a;
  return std::min(*a, *b);
}

/// Calls read(folder) for base/path and each folder above it down to base, and keeps the tightest.
template <class Read>
Quota tightest_upwards(const std::filesystem::path& base, std::string_view path, Read&& read) {
  Quota found = read(base);
  std::filesystem::path folder = base;
  for (const auto& part : std::filesystem::path(path).relative_path()) {
    if (part == "..") break;  // outside of this namespace's view
    folder /= part;
    found = tighter(found, read(folder));
  }
  return found;
}

/// The path of the line for which matches(controllers) holds; lines are `number:controllers:path`.
template <class Matches>
std::string_view path_of_line(std::string_view text, Matches&& matches) {
  while (!text.empty()) {
    const std::string_view line = text.substr(0, text.find('\n'));
    text.remove_prefix(std::min(text.size(), line.size() + 1));
    const std::size_t first = line.find(':');
    if (first == std::string_view::npos) continue;
    const std::size_t second = line.find(':', first + 1);
    if (second == std::string_view::npos) continue;
    if (matches(line.substr(first + 1, second - first - 1))) return line.substr(second + 1);
  }
  return {};
}

}  // namespace

Quota parse_cpu_max(std::string_view text) {
  const std::optional<std::int64_t> quota = take_number(text);
  return ratio(quota, take_number(text));
}

Quota parse_cfs(std::string_view quota, std::string_view period) {
  return ratio(take_number(quota), take_number(period));
}

std::string_view cgroup_v2_path(std::string_view proc_self_cgroup) {
  return path_of_line(proc_self_cgroup, [](std::string_view controllers) { return controllers.empty(); });
}

std::string_view cgroup_v1_cpu_path(std::string_view proc_self_cgroup) {
  return path_of_line(proc_self_cgroup, [](std::string_view controllers) {
    while (!controllers.empty()) {
      const std::string_view one = controllers.substr(0, controllers.find(','));
      if (one == "cpu") return true;
      controllers.remove_prefix(std::min(controllers.size(), one.size() + 1));
    }
    return false;
  });
}

Quota read_quota(const std::filesystem::path& root) {
  const std::string cgroups = read_text(root / "proc/self/cgroup");
  const std::filesystem::path mount = root / "sys/fs/cgroup";
  const Quota version2 = tightest_upwards(mount, cgroup_v2_path(cgroups), [](const std::filesystem::path& folder) {
    return parse_cpu_max(read_text(folder / "cpu.max"));
  });
  Quota found = version2;
  for (const char* controller : {"cpu", "cpu,cpuacct"}) {
    found =
        tighter(found, tightest_upwards(mount / controller, cgroup_v1_cpu_path(cgroups), [](const std::filesystem::path& folder) {
                  return parse_cfs(read_text(folder / "cpu.cfs_quota_us"), read_text(folder / "cpu.cfs_period_us"));
                }));
  }
  return found;
}

std::int32_t threads_for(std::int32_t affinity, Quota quota) {
  double threads = affinity;
  if (quota) threads = std::min(threads, std::floor(*quota));
  return static_cast<std::int32_t>(std::max(threads, 1.0));
}

}  // namespace rubato::engine::cpu

namespace rubato::engine {

std::int32_t default_cpu_threads() {
  auto affinity = static_cast<std::int32_t>(std::max(1U, std::thread::hardware_concurrency()));
#if defined(__linux__)
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof set, &set) == 0) affinity = CPU_COUNT(&set);
#endif
  return cpu::threads_for(affinity, cpu::read_quota("/"));
}

}  // namespace rubato::engine
