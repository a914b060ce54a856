// SPDX-License-Identifier: Apache-2.0
#include "manifests/device_name.h"

#include <algorithm>

namespace rubato {
namespace {

std::optional<std::int32_t> parse_index(std::string_view text) {
  constexpr std::size_t digits_max = 3;
  const bool is_number = !text.empty() && text.size() <= digits_max &&
                         std::all_of(text.begin(), text.end(), [](char c) { return c >= '0' && c <= '9'; });
  if (!is_number || (text.size() > 1 && text.front() == '0')) return std::nullopt;
  std::int32_t index = 0;
  for (const char c : text) index = index * 10 + (c - '0');
  return index;
}

}  // namespace

std::optional<DeviceName> parse_device(std::string_view text) {
  if (text == "cpu") return DeviceName{};
  const std::size_t colon = text.find(':');
  if (colon == std::string_view::npos) return std::nullopt;
  const std::string_view family = text.substr(0, colon);
  const std::optional<std::int32_t> index = parse_index(text.substr(colon + 1));
  if (!index || (family != "cpu" && family != "cuda")) return std::nullopt;
  return DeviceName{.family = family == "cpu" ? DeviceFamily::Cpu : DeviceFamily::Cuda, .index = *index};
}

}  // namespace rubato
