// SPDX-License-Identifier: Apache-2.0
// The devices that spec.devices names, as family and index: `cpu` and `cpu:0` are one device.
#pragma once

#include <compare>
#include <cstdint>
#include <optional>
#include <string_view>

namespace rubato {

enum class DeviceFamily : std::uint8_t { Cpu, Cuda };

struct DeviceName {
  DeviceFamily family = DeviceFamily::Cpu;
  std::int32_t index = 0;

  friend auto operator<=>(const DeviceName&, const DeviceName&) = default;
};

/// cpu, cpu:<index> or cuda:<index>, index 0..999 without leading zeros; nothing else.
[[nodiscard]] std::optional<DeviceName> parse_device(std::string_view text);

}  // namespace rubato
