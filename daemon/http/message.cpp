// SPDX-License-Identifier: Apache-2.0
// Request targets and answer heads as text.
#include "daemon/http/message.h"

#include <algorithm>
#include <array>
#include <cstdio>
#include <ctime>
#include <optional>

namespace rubato::http {
namespace {

std::optional<int> hex_digit(char c) {
  if (c >= '0' && c <= '9') return c - '0';
  if (c >= 'a' && c <= 'f') return c - 'a' + 10;
  if (c >= 'A' && c <= 'F') return c - 'A' + 10;
  return std::nullopt;
}

enum class Plus : std::uint8_t { Literal, Space };

std::optional<std::string> percent_decode(std::string_view text, Plus plus) {
  std::string out;
  out.reserve(text.size());
  for (std::size_t i = 0; i < text.size(); ++i) {
    if (text[i] == '+' && plus == Plus::Space) {
      out += ' ';
    } else if (text[i] != '%') {
      out += text[i];
    } else {
      if (i + 2 >= text.size()) return std::nullopt;
      const auto high = hex_digit(text[i + 1]);
      const auto low = hex_digit(text[i + 2]);
      if (!high || !low || (*high == 0 && *low == 0)) return std::nullopt;
      out += static_cast<char>(*high * 16 + *low);
      i += 2;
    }
  }
  return out;
}

/// What follows `scheme://authority` of an absolute-form target.
std::string_view strip_authority(std::string_view target) {
  for (const std::string_view scheme : {"http://", "https://"}) {
    if (target.size() > scheme.size() && equal_ignoring_case(target.substr(0, scheme.size()), scheme)) {
      const std::size_t end = target.find_first_of("/?", scheme.size());
      return end == std::string_view::npos ? std::string_view("/") : target.substr(end);
    }
  }
  return target;
}

void append_header(std::string& out, std::string_view name, std::string_view value) {
  out += name;
  out += ": ";
  for (const char c : value) out += (c == '\r' || c == '\n' || c == '\0') ? ' ' : c;
  out += "\r\n";
}

}  // namespace

bool equal_ignoring_case(std::string_view a, std::string_view b) {
  const auto lower = [](char c) { return (c >= 'A' && c <= 'Z') ? static_cast<char>(c + ('a' - 'A')) : c; };
  return std::equal(a.begin(), a.end(), b.begin(), b.end(), [&](char x, char y) { return lower(x) == lower(y); });
}

Result<Target> parse_target(std::string_view target) {
  Target out;
  if (target == "*") {
    out.path.push_back('*');
    return out;
  }
  const std::string_view local = strip_authority(target);
  const std::size_t question = local.find('?');
  auto path = percent_decode(local.substr(0, question), Plus::Literal);
  if (!path) return unexpected(ErrorCode::InvalidArgument, "request target: broken percent escape in the path");
  if (path->empty()) path->push_back('/');
  if (path->front() != '/') return unexpected(ErrorCode::InvalidArgument, "request target: must begin with /");
  out.path = std::move(*path);
  std::string_view query = question == std::string_view::npos ? std::string_view() : local.substr(question + 1);
  query = query.substr(0, query.find('#'));
  while (!query.empty()) {
    const std::string_view pair = query.substr(0, query.find('&'));
    query.remove_prefix(std::min(query.size(), pair.size() + 1));
    if (pair.empty()) continue;
    const std::size_t equals = pair.find('=');
    auto name = percent_decode(pair.substr(0, equals), Plus::Space);
    auto value = percent_decode(equals == std::string_view::npos ? std::string_view() : pair.substr(equals + 1), Plus::Space);
    if (!name || !value) return unexpected(ErrorCode::InvalidArgument, "request target: broken percent escape in the query");
    out.query.insert_or_assign(std::move(*name), std::move(*value));
  }
  return out;
}

std::string format_head(const Response& response, const HeadOptions& options) {
  std::string out;
  out.reserve(256);
  out += "HTTP/1.1 ";
  out += std::to_string(response.status);
  out += ' ';
  out += reason_phrase(response.status);
  out += "\r\n";
  append_header(out, "Date", options.date);
  if (!response.content_type.empty()) append_header(out, "Content-Type", response.content_type);
  for (const auto& [name, value] : response.headers) append_header(out, name, value);
  const bool has_no_body = response.status == 204 || response.status == 304;
  if (options.framing == Framing::Length && !has_no_body) {
    append_header(out, "Content-Length", std::to_string(response.body.size()));
  } else if (options.framing == Framing::Chunked) {
    append_header(out, "Transfer-Encoding", "chunked");
  }
  append_header(out, "Connection", options.persistence == Persistence::Close ? "close" : "keep-alive");
  out += "\r\n";
  return out;
}

void append_chunk(std::string& out, std::string_view piece) {
  CHECK(!piece.empty());
  std::array<char, 24> size{};
  const int length = std::snprintf(size.data(), size.size(), "%zx\r\n", piece.size());
  out.append(size.data(), static_cast<std::size_t>(length));
  out += piece;
  out += "\r\n";
}

std::string format_date(std::int64_t unix_seconds) {
  static constexpr std::array<const char*, 7> days = {"Sun", "Mon", "Tue", "Wed", "Thu", "Fri", "Sat"};
  static constexpr std::array<const char*, 12> months = {"Jan", "Feb", "Mar", "Apr", "May", "Jun",
                                                         "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"};
  const std::time_t time = static_cast<std::time_t>(unix_seconds);
  std::tm parts{};
  gmtime_r(&time, &parts);
  std::array<char, 64> text{};
  std::snprintf(text.data(), text.size(), "%s, %02d %s %04d %02d:%02d:%02d GMT", days[static_cast<std::size_t>(parts.tm_wday)],
                parts.tm_mday, months[static_cast<std::size_t>(parts.tm_mon)], parts.tm_year + 1900, parts.tm_hour, parts.tm_min,
                parts.tm_sec);
  return text.data();
}

std::string_view reason_phrase(int status) {
  static constexpr std::array<std::pair<int, std::string_view>, 31> phrases = {{
      {200, "OK"},
      {201, "Created"},
      {202, "Accepted"},
      {204, "No Content"},
      {301, "Moved Permanently"},
      {302, "Found"},
      {304, "Not Modified"},
      {307, "Temporary Redirect"},
      {400, "Bad Request"},
      {401, "Unauthorized"},
      {403, "Forbidden"},
      {404, "Not Found"},
      {405, "Method Not Allowed"},
      {406, "Not Acceptable"},
      {408, "Request Timeout"},
      {409, "Conflict"},
      {410, "Gone"},
      {411, "Length Required"},
      {412, "Precondition Failed"},
      {413, "Content Too Large"},
      {414, "URI Too Long"},
      {415, "Unsupported Media Type"},
      {417, "Expectation Failed"},
      {422, "Unprocessable Content"},
      {429, "Too Many Requests"},
      {431, "Request Header Fields Too Large"},
      {500, "Internal Server Error"},
      {501, "Not Implemented"},
      {503, "Service Unavailable"},
      {504, "Gateway Timeout"},
      {505, "HTTP Version Not Supported"},
  }};
  const auto found = std::find_if(phrases.begin(), phrases.end(), [&](const auto& entry) { return entry.first == status; });
  return found == phrases.end() ? "Status" : found->second;
}

}  // namespace rubato::http
