// SPDX-License-Identifier: Apache-2.0
#include "daemon/control/figures.h"

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "manifests/units.h"

namespace rubato::control {
namespace {

Duration to_three_digits(Duration duration) {
  std::int64_t unit = 1;
  while (duration.count() / unit >= 1000) unit *= 10;
  return Duration((duration.count() + unit / 2) / unit * unit);
}

}  // namespace

std::string rounded(Duration duration) {
  return format_duration(to_three_digits(duration));
}

std::string seconds(Duration duration) {
  constexpr std::int64_t second = 1'000'000'000;
  const std::int64_t count = to_three_digits(std::max(duration, Duration::zero())).count();
  std::string fraction = std::to_string(second + count % second).substr(1);
  fraction.erase(fraction.find_last_not_of('0') + 1);
  return std::to_string(count / second) + (fraction.empty() ? "" : "." + fraction);
}

std::string decimal(double value) {
  if (!std::isfinite(value)) return "0";
  const auto tenths = static_cast<std::int64_t>(std::floor(value * 10 + 1e-6));
  return std::to_string(tenths / 10) + "." + std::to_string(tenths % 10);
}

}  // namespace rubato::control
