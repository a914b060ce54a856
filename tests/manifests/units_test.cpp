// SPDX-License-Identifier: Apache-2.0
// Durations and quantities: every spelling that the field has seen misread, and exact round trips.
#include "manifests/units.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <random>

#include "manifests/names.h"

namespace rubato {
namespace {

using std::chrono::nanoseconds;
using testing::HasSubstr;

struct DurationCase {
  std::string_view text;
  std::int64_t nanoseconds;
};

TEST(Units, durations_are_read_exactly) {
  for (const DurationCase& c : {
           DurationCase{"500ms", 500'000'000},
           DurationCase{"0.5s", 500'000'000},
           DurationCase{"1.5s", 1'500'000'000},
           DurationCase{"12500us", 12'500'000},
           DurationCase{"12.5ms", 12'500'000},
           DurationCase{"10m", 600'000'000'000},
           DurationCase{"1m", 60'000'000'000},
           DurationCase{"200us", 200'000},
           DurationCase{"1h30m", 5'400'000'000'000},
           DurationCase{"0s", 0},
           DurationCase{"1ns", 1},
           DurationCase{"1.0ns", 1},
           DurationCase{"0.001us", 1},
           DurationCase{".5s", 500'000'000},
           DurationCase{"1.s", 1'000'000'000},
           DurationCase{"1s500ms", 1'500'000'000},
           DurationCase{"0.0000000000025h", 9},
           DurationCase{"10000h", 36'000'000'000'000'000},
           DurationCase{"800ms", 800'000'000},
           DurationCase{"007s", 7'000'000'000},
       }) {
    const Result<Duration> parsed = parse_duration(c.text);
    ASSERT_TRUE(parsed.has_value()) << c.text << ": " << parsed.error().message;
    EXPECT_EQ(parsed->count(), c.nanoseconds) << c.text;
  }
}

struct RefusedCase {
  std::string_view text;
  std::string_view why;
};

TEST(Units, durations_that_could_mean_something_else_are_refused) {
  for (const RefusedCase& c : {
           RefusedCase{"500", "has no unit"},
           RefusedCase{"", "is empty"},
           RefusedCase{"1M", "unknown unit 'M'"},
           RefusedCase{"1 s", "unknown unit ' s'"},
           RefusedCase{"1d", "unknown unit 'd'"},
           RefusedCase{"-5ms", "sign"},
           RefusedCase{"+5ms", "sign"},
           RefusedCase{"inf", "must be a duration"},
           RefusedCase{"nan", "must be a duration"},
           RefusedCase{"fast", "must be a duration"},
           RefusedCase{"1h30", "has no unit"},
           RefusedCase{"1e3ms", "unknown unit 'e'"},
           RefusedCase{"0.5ns", "finer than 1ns"},
           RefusedCase{"0.0001us", "finer than 1ns"},
           RefusedCase{"10000h1ns", "longer than 10000h"},
           RefusedCase{"99999999999999999999h", "longer than 10000h"},
           RefusedCase{"9999h9999h", "longer than 10000h"},
           RefusedCase{"1.2.3s", "has no unit"},
           RefusedCase{".s", "must be a duration"},
           RefusedCase{"0.00000000000000000000001h", "finer than 1ns"},
           RefusedCase{"5ms ", "unknown unit 'ms '"},
           RefusedCase{"1MS", "unknown unit 'MS'"},
           RefusedCase{"0x10ms", "unknown unit 'x'"},
       }) {
    const Result<Duration> parsed = parse_duration(c.text);
    ASSERT_FALSE(parsed.has_value()) << c.text << " read as " << parsed->count() << " ns";
    EXPECT_EQ(parsed.error().code, ErrorCode::InvalidArgument);
    EXPECT_THAT(parsed.error().message, HasSubstr(std::string(c.why))) << c.text;
    EXPECT_THAT(parsed.error().message, HasSubstr("such as 500ms")) << c.text;
  }
  EXPECT_FALSE(parse_duration(std::string(10'000, '1') + "s").has_value());
  EXPECT_FALSE(parse_duration(std::string_view("1s\0", 3)).has_value());
}

TEST(Units, durations_print_largest_unit_first_without_zero_parts) {
  EXPECT_EQ(format_duration(nanoseconds(0)), "0s");
  EXPECT_EQ(format_duration(std::chrono::seconds(90)), "1m30s");
  EXPECT_EQ(format_duration(std::chrono::microseconds(12'500)), "12.5ms");
  EXPECT_EQ(format_duration(std::chrono::milliseconds(500)), "500ms");
  EXPECT_EQ(format_duration(std::chrono::milliseconds(1'500)), "1.5s");
  EXPECT_EQ(format_duration(std::chrono::hours(1)), "1h");
  EXPECT_EQ(format_duration(std::chrono::hours(1) + std::chrono::milliseconds(5)), "1h5ms");
  EXPECT_EQ(format_duration(nanoseconds(1)), "1ns");
  EXPECT_EQ(format_duration(nanoseconds(1'001)), "1.001us");
  EXPECT_EQ(format_duration(-std::chrono::milliseconds(5)), "-5ms");
  EXPECT_EQ(format_duration(nanoseconds::min()), "-2562047h47m16.854775808s");
}

TEST(Units, any_duration_in_range_reads_back_exactly) {
  std::mt19937_64 random(20240607);
  for (int i = 0; i < 20'000; ++i) {
    // Shifting spreads the samples over all magnitudes.
    const auto count = static_cast<std::int64_t>(random() % 36'000'000'000'000'001ULL) >> (random() % 56);
    const std::string text = format_duration(nanoseconds(count));
    const Result<Duration> parsed = parse_duration(text);
    ASSERT_TRUE(parsed.has_value()) << text << ": " << parsed.error().message;
    ASSERT_EQ(parsed->count(), count) << text;
  }
}

TEST(Units, quantities_are_read_exactly_and_binary_differs_from_decimal) {
  EXPECT_EQ(parse_quantity("4Gi").value(), 4LL << 30);
  EXPECT_EQ(parse_quantity("4G").value(), 4'000'000'000);
  EXPECT_EQ(parse_quantity("0.5Gi").value(), 512LL << 20);
  EXPECT_EQ(parse_quantity("4096Mi").value(), 4LL << 30);
  EXPECT_EQ(parse_quantity("512Mi").value(), 512LL << 20);
  EXPECT_EQ(parse_quantity("1K").value(), 1'000);
  EXPECT_EQ(parse_quantity("1k").value(), 1'000);
  EXPECT_EQ(parse_quantity("1Ti").value(), 1LL << 40);
  EXPECT_EQ(parse_quantity("1.5T").value(), 1'500'000'000'000);
  EXPECT_EQ(parse_quantity("536870912").value(), 536'870'912);
  EXPECT_EQ(parse_quantity("9223372036854775807").value(), INT64_MAX);
}

TEST(Units, quantities_that_could_mean_something_else_are_refused) {
  for (const RefusedCase& c : {
           RefusedCase{"4GB", "unknown unit 'GB'"},
           RefusedCase{"4gb", "unknown unit 'gb'"},
           RefusedCase{"4g", "unknown unit 'g'"},
           RefusedCase{"1e9", "unknown unit 'e9'"},
           RefusedCase{"90%", "unknown unit '%'"},
           RefusedCase{"500m", "unknown unit 'm'"},
           RefusedCase{"", "is empty"},
           RefusedCase{"-1Gi", "sign"},
           RefusedCase{"0.3", "whole number of bytes"},
           RefusedCase{"0.1Ki", "whole number of bytes"},
           RefusedCase{"9223372036854775808", "above"},
           RefusedCase{"8388608Ti", "above"},
           RefusedCase{"Gi", "must be a quantity"},
           RefusedCase{"1 Gi", "unknown unit"},
           RefusedCase{"inf", "must be a quantity"},
           RefusedCase{"0x10", "unknown unit 'x10'"},
       }) {
    const Result<std::int64_t> parsed = parse_quantity(c.text);
    ASSERT_FALSE(parsed.has_value()) << c.text << " read as " << parsed.value();
    EXPECT_THAT(parsed.error().message, HasSubstr(std::string(c.why))) << c.text;
    EXPECT_THAT(parsed.error().message, HasSubstr("such as 512Mi")) << c.text;
  }
}

TEST(Units, quantities_print_the_largest_binary_unit_that_divides) {
  EXPECT_EQ(format_quantity(0), "0");
  EXPECT_EQ(format_quantity(1'000), "1000");
  EXPECT_EQ(format_quantity(1'024), "1Ki");
  EXPECT_EQ(format_quantity(512LL << 20), "512Mi");
  EXPECT_EQ(format_quantity(2LL << 30), "2Gi");
  EXPECT_EQ(format_quantity(1536LL << 20), "1536Mi");
  EXPECT_EQ(format_quantity(4LL << 50), "4096Ti");
  for (const std::int64_t bytes : {1LL, 1'023LL, 1'000'000'007LL, 3LL << 39, INT64_MAX - 0LL}) {
    EXPECT_EQ(parse_quantity(format_quantity(bytes)).value(), bytes);
  }
}

template <class Enum>
void expect_names_are_distinct_and_read_back() {
  for (const auto& named : enum_names<Enum>) {
    EXPECT_EQ(from_string<Enum>(to_string(named.value)), named.value) << named.name;
    EXPECT_FALSE(named.help.empty());
  }
}

TEST(Names, every_value_reads_back_and_only_the_exact_spelling_does) {
  expect_names_are_distinct_and_read_back<PriorityPolicy>();
  expect_names_are_distinct_and_read_back<Mode>();
  expect_names_are_distinct_and_read_back<DataType>();
  expect_names_are_distinct_and_read_back<Architecture>();
  EXPECT_EQ(to_string(PriorityPolicy::ShortestFirst), "ShortestFirst");
  EXPECT_EQ(from_string<Mode>("chunked"), std::nullopt);
  EXPECT_EQ(from_string<DataType>("bfloat16"), std::nullopt);
  EXPECT_EQ(from_string<DataType>(""), std::nullopt);
  EXPECT_EQ(allowed_names<Mode>(), "Chunked, Disaggregated");
}

}  // namespace
}  // namespace rubato
