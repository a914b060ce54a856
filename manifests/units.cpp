// SPDX-License-Identifier: Apache-2.0
// Exact reading and writing of durations and quantities: whole numbers throughout, no floating point, nothing rounded and
// nothing saturated.
#include "manifests/units.h"

#include <array>
#include <numeric>
#include <optional>

namespace rubato {
namespace {

constexpr std::size_t text_length_max = 64;
constexpr std::size_t fraction_digits_max = 18;  // 10^18 is the last power of ten in 64 bits
constexpr std::string_view duration_rule = "must be a duration such as 500ms, 1.5s or 1h30m (units ns, us, ms, s, m, h)";
constexpr std::string_view quantity_rule =
    "must be a quantity such as 512Mi, 2Gi or 2G (units K, M, G, T, Ki, Mi, Gi, Ti or none)";

struct Unit {
  std::string_view name;
  std::int64_t size;
};

// Largest first, as format_duration prints them.
constexpr std::array duration_units{
    Unit{"h", 3'600'000'000'000}, Unit{"m", 60'000'000'000}, Unit{"s", 1'000'000'000},
    Unit{"ms", 1'000'000},        Unit{"us", 1'000},         Unit{"ns", 1},
};
constexpr std::int64_t duration_max = 10'000 * duration_units[0].size;

constexpr std::array quantity_units{
    Unit{"", 1},           Unit{"K", 1'000},         Unit{"k", 1'000},
    Unit{"M", 1'000'000},  Unit{"G", 1'000'000'000}, Unit{"T", 1'000'000'000'000},
    Unit{"Ki", 1LL << 10}, Unit{"Mi", 1LL << 20},    Unit{"Gi", 1LL << 30},
    Unit{"Ti", 1LL << 40},
};

bool is_digit(char c) {
  return c >= '0' && c <= '9';
}

template <class Units>
std::optional<std::int64_t> unit_size(const Units& units, std::string_view name) {
  for (const Unit& unit : units) {
    if (unit.name == name) return unit.size;
  }
  return std::nullopt;
}

/// Reads `whole[.fraction]` from the front of text and removes it.
struct Decimal {
  std::string_view whole;
  std::string_view fraction;  // without trailing zeros
};

std::optional<Decimal> take_decimal(std::string_view& text) {
  std::size_t end = 0;
  while (end < text.size() && is_digit(text[end])) ++end;
  Decimal decimal{.whole = text.substr(0, end), .fraction = {}};
  text.remove_prefix(end);
  if (!text.empty() && text.front() == '.') {
    end = 1;
    while (end < text.size() && is_digit(text[end])) ++end;
    decimal.fraction = text.substr(1, end - 1);
    text.remove_prefix(end);
  }
  if (decimal.whole.empty() && decimal.fraction.empty()) return std::nullopt;
  while (!decimal.fraction.empty() && decimal.fraction.back() == '0') decimal.fraction.remove_suffix(1);
  return decimal;
}

enum class Misfit { TooLarge, NotWhole };

/// decimal * unit, if that is a whole number of at most `max`.
std::variant<std::int64_t, Misfit> multiply(const Decimal& decimal, std::int64_t unit, std::int64_t max) {
  std::int64_t whole = 0;
  for (const char c : decimal.whole) {
    const std::int64_t digit = c - '0';
    if (whole > (max - digit) / 10) return Misfit::TooLarge;
    whole = whole * 10 + digit;
  }
  if (whole > max / unit) return Misfit::TooLarge;
  whole *= unit;
  if (decimal.fraction.size() > fraction_digits_max) return Misfit::NotWhole;
  std::int64_t numerator = 0;
  std::int64_t denominator = 1;
  for (const char c : decimal.fraction) {
    numerator = numerator * 10 + (c - '0');
    denominator *= 10;
  }
  // unit and denominator are reduced first, so that nothing overflows: numerator < denominator keeps the product below unit.
  const std::int64_t divisor = std::gcd(unit, denominator);
  denominator /= divisor;
  if (numerator % denominator != 0) return Misfit::NotWhole;
  const std::int64_t part = numerator / denominator * (unit / divisor);
  if (part > max - whole) return Misfit::TooLarge;
  return whole + part;
}

Unexpected refuse(std::string_view rule, std::string_view why) {
  std::string message(rule);
  if (!why.empty()) message.append(": ").append(why);
  return unexpected(ErrorCode::InvalidArgument, std::move(message));
}

/// "1.5" and the like: at most three digits, trailing zeros dropped.
std::string with_fraction(std::int64_t value, std::int64_t unit) {
  std::string text = std::to_string(value / unit);
  std::int64_t rest = value % unit;
  if (rest == 0) return text;
  text += '.';
  for (std::int64_t place = unit / 10; rest != 0; place /= 10) {
    text += static_cast<char>('0' + rest / place);
    rest %= place;
  }
  return text;
}

}  // namespace

Result<Duration> parse_duration(std::string_view text) {
  if (text.empty()) return refuse(duration_rule, "it is empty");
  if (text.size() > text_length_max) return refuse(duration_rule, "it is too long");
  if (text.front() == '-' || text.front() == '+') return refuse(duration_rule, "a sign is not allowed");
  std::int64_t total = 0;
  while (!text.empty()) {
    const std::optional<Decimal> decimal = take_decimal(text);
    if (!decimal) return refuse(duration_rule, "");
    std::size_t end = 0;
    while (end < text.size() && !is_digit(text[end]) && text[end] != '.') ++end;
    const std::string_view name = text.substr(0, end);
    text.remove_prefix(end);
    if (name.empty()) return refuse(duration_rule, "it has no unit");
    const std::optional<std::int64_t> unit = unit_size(duration_units, name);
    if (!unit) return refuse(duration_rule, "unknown unit '" + std::string(name) + "'");
    const auto part = multiply(*decimal, *unit, duration_max - total);
    if (const Misfit* misfit = std::get_if<Misfit>(&part)) {
      return *misfit == Misfit::TooLarge ? refuse(duration_rule, "it is longer than 10000h")
                                         : refuse(duration_rule, "it is finer than 1ns");
    }
    total += std::get<std::int64_t>(part);
  }
  return Duration(total);
}

std::string format_duration(Duration duration) {
  std::int64_t rest = duration.count();
  if (rest == 0) return "0s";
  std::string text;
  if (rest < 0) {  // only differences are negative; they are printed, never read
    if (duration == Duration::min()) return "-2562047h47m16.854775808s";
    return std::string("-").append(format_duration(-duration));
  }
  for (const Unit& unit : duration_units) {
    if (rest < unit.size) continue;
    if (unit.size >= duration_units[1].size) {  // hours and minutes have no decimal fraction
      text += std::to_string(rest / unit.size).append(unit.name);
      rest %= unit.size;
    } else {
      // From seconds down there is one part, so that 12500us reads 12.5ms; below a second the unit is the largest that fits.
      return text + with_fraction(rest, unit.size).append(unit.name);
    }
    if (rest == 0) return text;
  }
  return text;
}

Result<std::int64_t> parse_quantity(std::string_view text) {
  if (text.empty()) return refuse(quantity_rule, "it is empty");
  if (text.size() > text_length_max) return refuse(quantity_rule, "it is too long");
  if (text.front() == '-' || text.front() == '+') return refuse(quantity_rule, "a sign is not allowed");
  const std::optional<Decimal> decimal = take_decimal(text);
  if (!decimal) return refuse(quantity_rule, "");
  const std::optional<std::int64_t> unit = unit_size(quantity_units, text);
  if (!unit) return refuse(quantity_rule, "unknown unit '" + std::string(text) + "'");
  const auto bytes = multiply(*decimal, *unit, INT64_MAX);
  if (const Misfit* misfit = std::get_if<Misfit>(&bytes)) {
    return *misfit == Misfit::TooLarge ? refuse(quantity_rule, "it is above 9223372036854775807 bytes")
                                       : refuse(quantity_rule, "it is not a whole number of bytes");
  }
  return std::get<std::int64_t>(bytes);
}

std::string format_quantity(std::int64_t bytes) {
  std::string_view name;
  std::int64_t size = 1;
  for (const Unit& unit : quantity_units) {
    if (unit.name.ends_with('i') && bytes != 0 && bytes % unit.size == 0) {
      name = unit.name;
      size = unit.size;
    }
  }
  return std::to_string(bytes / size).append(name);
}

}  // namespace rubato
