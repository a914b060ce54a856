// SPDX-License-Identifier: Apache-2.0
#include "daemon/control/wall_time.h"

#include <array>
#include <cstdio>

namespace rubato::control {

std::string format_time(WallTime time) {
  const auto day = std::chrono::floor<std::chrono::days>(time);
  const std::chrono::year_month_day date(day);
  const std::chrono::hh_mm_ss clock(std::chrono::floor<std::chrono::seconds>(time - day));
  std::array<char, 64> text{};
  std::snprintf(text.data(), text.size(), "%04d-%02u-%02uT%02d:%02d:%02dZ", static_cast<int>(date.year()),
                static_cast<unsigned>(date.month()), static_cast<unsigned>(date.day()), static_cast<int>(clock.hours().count()),
                static_cast<int>(clock.minutes().count()), static_cast<int>(clock.seconds().count()));
  return text.data();
}

std::optional<WallTime> parse_time(std::string_view text) {
  int year = 0, hour = 0, minute = 0, second = 0;
  unsigned month = 0, day = 0;
  const std::string terminated(text);
  if (std::sscanf(terminated.c_str(), "%4d-%2u-%2uT%2d:%2d:%2dZ", &year, &month, &day, &hour, &minute, &second) != 6)
    return std::nullopt;
  const std::chrono::year_month_day date{std::chrono::year(year), std::chrono::month(month), std::chrono::day(day)};
  if (!date.ok()) return std::nullopt;
  const WallTime time =
      std::chrono::sys_days(date) + std::chrono::hours(hour) + std::chrono::minutes(minute) + std::chrono::seconds(second);
  if (format_time(time) != text) return std::nullopt;  // 25:61:00, blanks, anything behind the Z
  return time;
}

std::string format_age(std::chrono::milliseconds age) {
  const auto seconds = std::max<std::int64_t>(0, std::chrono::duration_cast<std::chrono::seconds>(age).count());
  const auto minutes = seconds / 60, hours = minutes / 60, days = hours / 24;
  const auto with_rest = [](std::int64_t large, const char* large_unit, std::int64_t small, const char* small_unit) {
    return std::to_string(large) + large_unit + (small > 0 ? std::to_string(small) + small_unit : "");
  };
  if (seconds < 120) return std::to_string(seconds) + "s";
  if (minutes < 10) return with_rest(minutes, "m", seconds % 60, "s");
  if (minutes < 180) return std::to_string(minutes) + "m";
  if (hours < 8) return with_rest(hours, "h", minutes % 60, "m");
  if (hours < 48) return std::to_string(hours) + "h";
  if (days < 8) return with_rest(days, "d", hours % 24, "h");
  return std::to_string(days) + "d";
}

}  // namespace rubato::control
