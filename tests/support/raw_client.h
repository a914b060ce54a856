// SPDX-License-Identifier: Apache-2.0
// A client for tests of the HTTP server: a plain blocking socket, so that every byte, half-close and reset is in the test's
// hands. Reads end with a deadline instead of hanging the test.
#pragma once

#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cctype>
#include <chrono>
#include <cstdlib>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

namespace rubato::test {

struct RawReply {
  int status = 0;
  std::map<std::string, std::string> headers;  // names in lower case
  std::string body;                            // chunks joined
  bool complete = false;                       // false: the connection ended (or nothing came) before the end of the body
};

class RawClient {
 public:
  explicit RawClient(int port, int receive_buffer_bytes = 0) : socket_(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
    if (receive_buffer_bytes > 0) {
      ::setsockopt(socket_, SOL_SOCKET, SO_RCVBUF, &receive_buffer_bytes, sizeof receive_buffer_bytes);
    }
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_port = htons(static_cast<std::uint16_t>(port));
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    connected_ = ::connect(socket_, reinterpret_cast<sockaddr*>(&address), sizeof address) == 0;
    const int on = 1;
    ::setsockopt(socket_, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
  }
  ~RawClient() { close(); }
  RawClient(RawClient&& other) noexcept
      : socket_(std::exchange(other.socket_, -1)), connected_(other.connected_), buffer_(std::move(other.buffer_)) {}
  RawClient& operator=(RawClient&&) = delete;

  [[nodiscard]] bool connected() const { return connected_; }

  /// False once the peer has closed.
  bool send(std::string_view bytes) {
    while (!bytes.empty()) {
      const ssize_t sent = ::send(socket_, bytes.data(), bytes.size(), MSG_NOSIGNAL);
      if (sent <= 0) return false;
      bytes.remove_prefix(static_cast<std::size_t>(sent));
    }
    return true;
  }
  bool send_bytewise(std::string_view bytes) {
    for (const char c : bytes) {
      if (!send(std::string_view(&c, 1))) return false;
    }
    return true;
  }

  /// FIN, while still reading.
  void half_close() { ::shutdown(socket_, SHUT_WR); }
  /// RST instead of FIN.
  void reset() {
    const linger now{.l_onoff = 1, .l_linger = 0};
    ::setsockopt(socket_, SOL_SOCKET, SO_LINGER, &now, sizeof now);
    close();
  }
  void close() {
    if (socket_ >= 0) ::close(std::exchange(socket_, -1));
  }

  /// Reads at most this many bytes per call of recv.
  void set_read_size(std::size_t size) { read_size_ = size; }
  void set_deadline(std::chrono::milliseconds deadline) { deadline_ = deadline; }

  /// One more piece of input. False at the end of the connection or the deadline; ended() tells which.
  bool read_some() {
    pollfd ready{.fd = socket_, .events = POLLIN, .revents = 0};
    if (::poll(&ready, 1, static_cast<int>(deadline_.count())) <= 0) return false;
    std::string piece(read_size_, '\0');
    const ssize_t got = ::recv(socket_, piece.data(), piece.size(), 0);
    if (got <= 0) {
      ended_ = true;
      return false;
    }
    buffer_.append(piece, 0, static_cast<std::size_t>(got));
    return true;
  }
  [[nodiscard]] bool ended() const { return ended_; }
  /// Reads until the peer closes (true) or the deadline passes (false).
  bool read_to_end() {
    while (read_some()) {
    }
    return ended_;
  }
  /// Input not yet taken by read_reply() and take_until().
  [[nodiscard]] const std::string& buffer() const { return buffer_; }

  /// Everything up to and including mark; nullopt when the connection ends first.
  std::optional<std::string> take_until(std::string_view mark) {
    std::size_t at = 0;
    while ((at = buffer_.find(mark)) == std::string::npos) {
      if (!read_some()) return std::nullopt;
    }
    std::string out = buffer_.substr(0, at + mark.size());
    buffer_.erase(0, out.size());
    return out;
  }

  /// The head of the next answer alone.
  RawReply read_head() {
    RawReply reply;
    const auto head = take_until("\r\n\r\n");
    if (!head) return reply;
    reply.status = head->size() > 12 ? std::atoi(head->c_str() + 9) : 0;
    std::size_t line = head->find("\r\n") + 2;
    while (line < head->size()) {
      const std::size_t end = head->find("\r\n", line);
      const std::size_t colon = head->find(": ", line);
      if (end == line || colon > end) break;
      std::string name = head->substr(line, colon - line);
      for (char& c : name) c = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
      reply.headers[name] = head->substr(colon + 2, end - colon - 2);
      line = end + 2;
    }
    return reply;
  }

  RawReply read_reply(bool to_head_request = false) {
    RawReply reply = read_head();
    if (reply.status == 0) return reply;
    if (to_head_request || reply.status == 204 || reply.status == 304 || reply.status == 100) {
      reply.complete = true;
    } else if (reply.headers.contains("content-length")) {
      const std::size_t size = std::strtoul(reply.headers["content-length"].c_str(), nullptr, 10);
      while (buffer_.size() < size && read_some()) {
      }
      reply.complete = buffer_.size() >= size;
      reply.body = buffer_.substr(0, size);
      buffer_.erase(0, reply.body.size());
    } else if (reply.headers.contains("transfer-encoding")) {
      while (auto chunk = read_chunk()) {
        if (chunk->empty()) {
          reply.complete = true;
          break;
        }
        reply.body += *chunk;
      }
    } else {
      reply.complete = read_to_end();
      reply.body = std::exchange(buffer_, {});
    }
    return reply;
  }

  /// The next chunk of a chunked body; empty at its end, nullopt when the connection ends first.
  std::optional<std::string> read_chunk() {
    const auto size_line = take_until("\r\n");
    if (!size_line) return std::nullopt;
    const std::size_t size = std::strtoul(size_line->c_str(), nullptr, 16);
    while (buffer_.size() < size + 2) {
      if (!read_some()) return std::nullopt;
    }
    std::string chunk = buffer_.substr(0, size);
    buffer_.erase(0, size + 2);
    return chunk;
  }

 private:
  int socket_;
  bool connected_ = false;
  bool ended_ = false;
  std::size_t read_size_ = 64UL << 10;
  std::chrono::milliseconds deadline_{60'000};
  std::string buffer_;
};

/// word followed by number. (GCC 12 warns about `"x" + std::to_string(n)` without cause.)
inline std::string numbered(std::string_view word, std::size_t number) {
  std::string out(word);
  out += std::to_string(number);
  return out;
}

/// `POST path` with a JSON body and a Content-Length.
inline std::string post_text(std::string_view path, std::string_view body, std::string_view more_headers = {}) {
  std::string out = "POST " + std::string(path) + " HTTP/1.1\r\nHost: test\r\nContent-Type: application/json\r\n";
  out += more_headers;
  out += "Content-Length: " + std::to_string(body.size()) + "\r\n\r\n";
  out += body;
  return out;
}

inline std::string get_text(std::string_view path, std::string_view more_headers = {}) {
  return "GET " + std::string(path) + " HTTP/1.1\r\nHost: test\r\n" + std::string(more_headers) + "\r\n";
}

/// Waits for a condition that another thread will make true; false after a minute. Polls: nothing depends on how fast.
template <class Condition>
bool eventually(Condition&& condition) {
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(60);
  while (!condition()) {
    if (std::chrono::steady_clock::now() > deadline) return false;
    ::poll(nullptr, 0, 1);
  }
  return true;
}

}  // namespace rubato::test
