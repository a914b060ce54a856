// SPDX-License-Identifier: Apache-2.0
// The three recorded formats, line by line.
#include <algorithm>
#include <charconv>
#include <chrono>
#include <cmath>
#include <map>
#include <nlohmann/json.hpp>
#include <random>
#include <string_view>

#include "daemon/replay/workload.h"

namespace rubato::replay {
namespace {

constexpr std::size_t rows_max = 10'000'000;

Unexpected bad_line(const std::string& name, std::size_t line, const std::string& what) {
  return unexpected(ErrorCode::InvalidArgument, name + ":" + std::to_string(line) + ": " + what);
}

std::vector<std::string_view> cells_of(std::string_view line) {
  if (line.ends_with('\r')) line.remove_suffix(1);
  std::vector<std::string_view> cells;
  for (std::size_t from = 0; from <= line.size();) {
    const std::size_t comma = std::min(line.find(',', from), line.size());
    cells.push_back(line.substr(from, comma - from));
    from = comma + 1;
  }
  return cells;
}

template <class Number>
std::optional<Number> number_of(std::string_view text) {
  Number value{};
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size()) return std::nullopt;
  return value;
}

std::optional<std::int32_t> length_of(std::string_view text) {
  const auto value = number_of<std::int32_t>(text);
  return value && *value >= 0 ? value : std::nullopt;
}

/// `2023-11-16 18:17:03.9799600`, with up to nine digits of fraction or none, in UTC.
std::optional<Duration> time_of(std::string_view text) {
  if (text.size() < 19 || text[4] != '-' || text[7] != '-' || (text[10] != ' ' && text[10] != 'T') || text[13] != ':' ||
      text[16] != ':') {
    return std::nullopt;
  }
  const auto part = [&](std::size_t at, std::size_t size) { return number_of<int>(text.substr(at, size)); };
  const auto year = part(0, 4), month = part(5, 2), day = part(8, 2), hour = part(11, 2), minute = part(14, 2),
             second = part(17, 2);
  if (!year || !month || !day || !hour || !minute || !second) return std::nullopt;
  const std::chrono::year_month_day date{std::chrono::year(*year), std::chrono::month(static_cast<unsigned>(*month)),
                                         std::chrono::day(static_cast<unsigned>(*day))};
  if (!date.ok() || *hour < 0 || *hour > 23 || *minute < 0 || *minute > 59 || *second < 0 || *second > 60) return std::nullopt;
  Duration time = std::chrono::sys_days(date).time_since_epoch() + std::chrono::hours(*hour) + std::chrono::minutes(*minute) +
                  std::chrono::seconds(*second);
  if (text.size() > 19) {
    std::string fraction(text.substr(20));
    if (text[19] != '.' || fraction.empty() || fraction.size() > 9) return std::nullopt;
    fraction.resize(9, '0');
    const auto nanoseconds = number_of<std::int64_t>(fraction);
    if (!nanoseconds || *nanoseconds < 0) return std::nullopt;
    time += std::chrono::nanoseconds(*nanoseconds);
  }
  return time;
}

/// Where each of the wanted columns stands in the header.
Result<std::vector<std::size_t>> columns_of(std::istream& in, const std::string& name, const std::vector<std::string>& wanted) {
  std::string header;
  std::getline(in, header);
  const std::vector<std::string_view> cells = cells_of(header);
  std::vector<std::size_t> columns;
  for (const std::string& column : wanted) {
    const auto found = std::ranges::find(cells, column);
    if (found == cells.end()) return bad_line(name, 1, "no column `" + column + "`");
    columns.push_back(static_cast<std::size_t>(found - cells.begin()));
  }
  return columns;
}

constexpr std::int32_t mooncake_block_tokens = 512;

/// Calls row(cells, line) for every line after the header that is not empty; row returns an error text or nothing.
template <class Row>
Result<void> for_each_row(std::istream& in, const std::string& name, std::size_t cells_min, Row row) {
  std::string line;
  std::size_t number = 1;
  while (std::getline(in, line)) {
    if (++number > rows_max) return bad_line(name, number, "more than ten million rows");
    if (line.empty() || line == "\r") continue;
    const std::vector<std::string_view> cells = cells_of(line);
    if (cells.size() < cells_min) return bad_line(name, number, "fewer cells than the header has");
    if (const std::string fault = row(cells); !fault.empty()) return bad_line(name, number, fault);
  }
  return {};
}

/// Times count from the earliest; one phase over all of it.
Workload from_zero(std::vector<Arrival> arrivals) {
  Workload workload;
  if (!arrivals.empty()) {
    const auto [first, last] = std::ranges::minmax(arrivals, {}, &Arrival::at);
    for (Arrival& arrival : arrivals) arrival.at -= first.at;
    workload.phases.push_back({"trace", Duration(0), std::max<Duration>(last.at - first.at, std::chrono::seconds(1))});
  }
  workload.arrivals = std::move(arrivals);
  return workload;
}

}  // namespace

Result<Workload> read_azure(std::istream& in, const std::string& name) {
  const auto columns = columns_of(in, name, {"TIMESTAMP", "ContextTokens", "GeneratedTokens"});
  if (!columns) return Unexpected(columns.error());
  std::vector<Arrival> arrivals;
  const auto read = for_each_row(in, name, std::ranges::max(*columns) + 1, [&](const auto& cells) -> std::string {
    const auto time = time_of(cells[(*columns)[0]]);
    const auto prompt = length_of(cells[(*columns)[1]]);
    const auto output = length_of(cells[(*columns)[2]]);
    if (!time) return "TIMESTAMP is not YYYY-MM-DD HH:MM:SS.fff";
    if (!prompt || !output) return "a token count is not a whole number >= 0";
    arrivals.push_back({.at = *time, .prompt_tokens = *prompt, .output_tokens = *output});
    return {};
  });
  if (!read) return Unexpected(read.error());
  return from_zero(std::move(arrivals));
}

Result<Workload> read_mooncake(std::istream& in, const std::string& name) {
  std::vector<Arrival> arrivals;
  std::string line;
  for (std::size_t number = 1; std::getline(in, line); ++number) {
    if (number > rows_max) return bad_line(name, number, "more than ten million rows");
    if (line.empty()) continue;
    const nlohmann::json row = nlohmann::json::parse(line, nullptr, false);
    if (!row.is_object()) return bad_line(name, number, "not a JSON object");
    const auto whole = [&](const char* key) -> std::optional<std::int64_t> {
      const auto found = row.find(key);
      if (found == row.end() || !found->is_number_integer()) return std::nullopt;
      const auto value = found->template get<std::int64_t>();
      return value >= 0 && value < (1LL << 40) ? std::optional(value) : std::nullopt;
    };
    const auto time = whole("timestamp"), prompt = whole("input_length"), output = whole("output_length");
    constexpr std::int64_t length_max = 1 << 30;
    if (!time || !prompt || !output || *prompt > length_max || *output > length_max) {
      return bad_line(name, number, "timestamp, input_length and output_length must be whole numbers >= 0");
    }
    Arrival arrival{.at = std::chrono::milliseconds(*time),
                    .prompt_tokens = static_cast<std::int32_t>(*prompt),
                    .output_tokens = static_cast<std::int32_t>(*output)};
    if (const auto ids = row.find("hash_ids"); ids != row.end()) {
      const auto is_id = [](const nlohmann::json& id) { return id.is_number_unsigned(); };
      if (!ids->is_array() || !std::all_of(ids->begin(), ids->end(), is_id))
        return bad_line(name, number, "hash_ids must be whole numbers >= 0");
      arrival.blocks = ids->get<std::vector<std::uint64_t>>();
    }
    arrivals.push_back(std::move(arrival));
  }
  Workload workload = from_zero(std::move(arrivals));
  const auto has_blocks = [](const Arrival& arrival) { return !arrival.blocks.empty(); };
  if (std::any_of(workload.arrivals.begin(), workload.arrivals.end(), has_blocks)) workload.block_tokens = mooncake_block_tokens;
  return workload;
}

Result<Workload> read_lengths(std::istream& in, const std::string& name, const WorkloadOptions& options) {
  const auto columns = columns_of(in, name, {"num_prefill_tokens", "num_decode_tokens"});
  if (!columns) return Unexpected(columns.error());
  std::vector<Arrival> rows;
  const auto read = for_each_row(in, name, std::ranges::max(*columns) + 1, [&](const auto& cells) -> std::string {
    const auto prompt = length_of(cells[(*columns)[0]]);
    const auto output = length_of(cells[(*columns)[1]]);
    if (!prompt || !output) return "a token count is not a whole number >= 0";
    rows.push_back({.at = {}, .prompt_tokens = *prompt, .output_tokens = *output});
    return {};
  });
  if (!read) return Unexpected(read.error());
  if (rows.empty()) return Workload{};

  // Poisson arrivals; rows in random order, again from the beginning when all are used.
  std::mt19937_64 random(options.seed);
  std::ranges::shuffle(rows, random);
  std::exponential_distribution<double> gap(options.rate * options.rate_scale);
  std::vector<Arrival> arrivals;
  double at = 0;
  while (arrivals.size() < rows_max && (options.seconds || arrivals.size() < rows.size())) {
    at += gap(random);
    const auto time = std::chrono::duration_cast<Duration>(std::chrono::duration<double>(at));
    if (options.seconds && time >= *options.seconds) break;
    arrivals.push_back(rows[arrivals.size() % rows.size()]);
    arrivals.back().at = time;
  }
  Workload workload;
  const Duration span = options.seconds ? *options.seconds : arrivals.back().at;
  workload.phases.push_back({"lengths", Duration(0), std::max<Duration>(span, std::chrono::seconds(1))});
  workload.arrivals = std::move(arrivals);
  return workload;
}

}  // namespace rubato::replay
