// SPDX-License-Identifier: Apache-2.0
// HTTP/1.1 text without sockets: request targets taken apart, answer heads and chunks put together. Private to daemon/http.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>

#include "daemon/http/server.h"
#include "manifests/result.h"

namespace rubato::http {

struct Target {
  std::string path;  // percent-decoded; "*" only for `OPTIONS *`
  std::map<std::string, std::string, std::less<>> query;
};

/// Takes apart an origin-form or absolute-form target. InvalidArgument: neither form, a broken percent escape, or an escaped NUL.
[[nodiscard]] Result<Target> parse_target(std::string_view target);

/// How the body of an answer is delimited on the wire.
enum class Framing : std::uint8_t {
  Length,   // Content-Length
  Chunked,  // HTTP/1.1 streams
  Close,    // HTTP/1.0 streams: the body ends with the connection
};
enum class Persistence : std::uint8_t { KeepAlive, Close };

struct HeadOptions {
  Framing framing = Framing::Length;
  Persistence persistence = Persistence::KeepAlive;
  std::string_view date;  // IMF-fixdate
};

/// Status line and header block. Line breaks inside header values become spaces, so that no value can forge a header.
[[nodiscard]] std::string format_head(const Response& response, const HeadOptions& options);

/// One chunk of a chunked body. piece must not be empty: an empty chunk is the end.
void append_chunk(std::string& out, std::string_view piece);
inline constexpr std::string_view last_chunk = "0\r\n\r\n";

/// `Sun, 06 Nov 1994 08:49:37 GMT`.
[[nodiscard]] std::string format_date(std::int64_t unix_seconds);

[[nodiscard]] std::string_view reason_phrase(int status);

/// Whether two ASCII strings are equal but for the case of letters.
[[nodiscard]] bool equal_ignoring_case(std::string_view a, std::string_view b);

}  // namespace rubato::http
