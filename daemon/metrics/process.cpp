// SPDX-License-Identifier: Apache-2.0
// Reads /proc/self; a file that is missing or odd leaves zeros, because a scrape must not fail over a detail.
#include "daemon/metrics/process.h"

#include <sys/resource.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <string>
#include <system_error>

namespace rubato {
namespace {

double boot_time_seconds() {
  std::ifstream file("/proc/stat");
  std::string key;
  while (file >> key) {
    if (key == "btime") {
      double seconds = 0;
      file >> seconds;
      return seconds;
    }
    file.ignore(1 << 16, '\n');
  }
  return 0;
}

std::int64_t count_open_descriptors() {
  std::error_code error;
  std::int64_t count = -1;  // the listing holds a descriptor of its own
  for (std::filesystem::directory_iterator entry("/proc/self/fd", error), end; !error && entry != end; entry.increment(error)) {
    ++count;
  }
  return count < 0 ? 0 : count;
}

}  // namespace

ProcessUsage read_process_usage() {
  ProcessUsage usage;
  // Fields of /proc/self/stat after the parenthesised name, which may itself hold spaces: state is field 3.
  std::ifstream file("/proc/self/stat");
  const std::string line((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  const auto name_end = line.rfind(')');
  if (name_end != std::string::npos) {
    constexpr int field_user_ticks = 14, field_system_ticks = 15, field_threads = 20, field_start_ticks = 22,
                  field_virtual_bytes = 23, field_resident_pages = 24;
    const auto ticks_per_second = static_cast<double>(sysconf(_SC_CLK_TCK));
    std::size_t position = name_end + 1;
    for (int field = 3; field <= field_resident_pages; ++field) {
      const auto begin = line.find_first_not_of(' ', position);
      if (begin == std::string::npos) break;
      position = line.find(' ', begin);
      const std::string text = line.substr(begin, position == std::string::npos ? position : position - begin);
      const double value = field == 3 ? 0 : std::strtod(text.c_str(), nullptr);
      if (field == field_user_ticks || field == field_system_ticks) usage.cpu_seconds += value / ticks_per_second;
      if (field == field_threads) usage.threads = static_cast<std::int64_t>(value);
      if (field == field_start_ticks) usage.start_time_seconds = boot_time_seconds() + value / ticks_per_second;
      if (field == field_virtual_bytes) usage.virtual_bytes = static_cast<std::int64_t>(value);
      if (field == field_resident_pages) usage.resident_bytes = static_cast<std::int64_t>(value) * sysconf(_SC_PAGESIZE);
      if (position == std::string::npos) break;
    }
  }
  usage.open_descriptors = count_open_descriptors();
  rlimit limit{};
  if (getrlimit(RLIMIT_NOFILE, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY) {
    usage.descriptors_max = static_cast<std::int64_t>(limit.rlim_cur);
  }
  return usage;
}

}  // namespace rubato
