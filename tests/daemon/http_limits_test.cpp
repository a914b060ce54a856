// SPDX-License-Identifier: Apache-2.0
// Bodies and headers at their limits, Expect: 100-continue, time-outs and the connection cap.
#include <thread>

#include "daemon/http/message.h"
#include "tests/support/http_fixture.h"

namespace rubato {
namespace {

using test::eventually;
using test::get_text;
using test::HeldServer;
using test::post_text;
using test::RawClient;
using namespace std::chrono_literals;

std::string with_framing(std::string_view body, bool chunked) {
  if (!chunked) return post_text("/echo", body);
  std::string out = "POST /echo HTTP/1.1\r\nHost: t\r\nTransfer-Encoding: chunked\r\n\r\n";
  for (std::size_t at = 0; at < body.size(); at += 100'000) http::append_chunk(out, body.substr(at, 100'000));
  return out + "0\r\n\r\n";
}

class HttpBody : public testing::TestWithParam<bool> {};

TEST_P(HttpBody, up_to_the_limit_is_accepted) {
  http::ServerOptions options;
  options.body_bytes_max = 9UL << 20;
  HeldServer server(options);
  RawClient client(server.port());
  for (const std::size_t size : {std::size_t{1'100'000}, options.body_bytes_max}) {
    const std::string body(size, 'b');
    std::thread sender([&] { EXPECT_TRUE(client.send(with_framing(body, GetParam()))); });
    const auto reply = client.read_reply();
    sender.join();
    EXPECT_EQ(reply.status, 200);
    EXPECT_EQ(reply.body.size(), size + 5);
  }
}

TEST_P(HttpBody, one_byte_more_is_413_and_nothing_of_it_is_taken_for_a_request) {
  http::ServerOptions options;
  options.body_bytes_max = 1'000'000;
  HeldServer server(options);
  RawClient client(server.port());
  std::string body;
  while (body.size() <= options.body_bytes_max) body += get_text("/smuggled");
  body.resize(options.body_bytes_max + 1);
  std::thread sender([&] { client.send(with_framing(body, GetParam()) + get_text("/smuggled")); });
  const auto reply = client.read_reply();
  EXPECT_EQ(reply.status, 413);
  EXPECT_TRUE(reply.complete);
  EXPECT_TRUE(reply.body.starts_with("{\"error\":")) << reply.body;
  EXPECT_EQ(reply.headers.at("connection"), "close");
  EXPECT_TRUE(client.read_to_end());
  sender.join();
  EXPECT_TRUE(client.buffer().empty());
  EXPECT_EQ(server.held_count(), 0U);
  RawClient next(server.port());
  ASSERT_TRUE(next.send(get_text("/echo")));
  EXPECT_EQ(next.read_reply().status, 200);
}

INSTANTIATE_TEST_SUITE_P(LengthAndChunked, HttpBody, testing::Bool());

TEST(HttpLimits, continue_is_sent_when_the_body_will_be_read) {
  HeldServer server;
  RawClient client(server.port());
  ASSERT_TRUE(client.send("POST /echo HTTP/1.1\r\nHost: t\r\nExpect: 100-continue\r\nContent-Length: 5\r\n\r\n"));
  EXPECT_EQ(client.read_reply().status, 100);
  ASSERT_TRUE(client.send("hello"));
  EXPECT_EQ(client.read_reply().body, "POST:hello");
  // A client that did not wait gets the answer alone.
  ASSERT_TRUE(client.send("POST /echo HTTP/1.1\r\nHost: t\r\nExpect: 100-continue\r\nContent-Length: 5\r\n\r\nhello"));
  EXPECT_EQ(client.read_reply().status, 200);
}

TEST(HttpLimits, refused_expectation_gets_413_without_continue) {
  http::ServerOptions options;
  options.body_bytes_max = 10;
  HeldServer server(options);
  RawClient client(server.port());
  ASSERT_TRUE(client.send("POST /echo HTTP/1.1\r\nHost: t\r\nExpect: 100-continue\r\nContent-Length: 11\r\n\r\n"));
  EXPECT_EQ(client.read_reply().status, 413);
  EXPECT_TRUE(client.read_to_end());
}

TEST(HttpLimits, long_header_is_431) {
  http::ServerOptions options;
  options.header_bytes_max = 2000;
  HeldServer server(options);
  RawClient fits(server.port());
  ASSERT_TRUE(fits.send(get_text("/echo", "X: " + std::string(1800, 'x') + "\r\n")));
  EXPECT_EQ(fits.read_reply().status, 200);
  RawClient exceeds(server.port());
  ASSERT_TRUE(exceeds.send(get_text("/echo", "X: " + std::string(2000, 'x') + "\r\n")));
  EXPECT_EQ(exceeds.read_reply().status, 431);
  EXPECT_TRUE(exceeds.read_to_end());
}

TEST(HttpLimits, endless_chunk_extension_is_refused) {
  HeldServer server;
  RawClient client(server.port());
  std::thread sender([&] {
    client.send("POST /echo HTTP/1.1\r\nHost: t\r\nTransfer-Encoding: chunked\r\n\r\n1;");
    client.send("x=" + std::string(1UL << 20, 'y'));
  });
  EXPECT_EQ(client.read_reply().status, 400);
  EXPECT_TRUE(client.read_to_end());
  sender.join();
}

TEST(HttpLimits, dripping_header_times_out) {
  http::ServerOptions options;
  options.header_timeout = 200ms;
  HeldServer server(options);
  RawClient client(server.port());
  client.set_deadline(10ms);
  const std::string header = get_text("/echo", "X-Drip: " + std::string(1000, 'x') + "\r\n");
  const auto begin = std::chrono::steady_clock::now();
  for (const char c : header) {
    if (!client.send(std::string_view(&c, 1))) break;
    client.read_some();  // paces the drip
    if (!client.buffer().empty() || std::chrono::steady_clock::now() - begin > 8s) break;
  }
  client.set_deadline(60s);
  EXPECT_EQ(client.read_reply().status, 408);
  EXPECT_TRUE(client.read_to_end());
}

TEST(HttpLimits, short_body_times_out_with_408_and_vanishes_on_fin) {
  http::ServerOptions options;
  options.body_timeout = 200ms;
  HeldServer server(options);
  RawClient waiting(server.port());
  ASSERT_TRUE(waiting.send("POST /echo HTTP/1.1\r\nHost: t\r\nContent-Length: 10\r\n\r\nshort"));
  EXPECT_EQ(waiting.read_reply().status, 408);
  EXPECT_TRUE(waiting.read_to_end());
  RawClient leaving(server.port());
  ASSERT_TRUE(leaving.send("POST /echo HTTP/1.1\r\nHost: t\r\nContent-Length: 10\r\n\r\nshort"));
  leaving.half_close();
  EXPECT_TRUE(leaving.read_to_end());
  EXPECT_EQ(server.held_count(), 0U);
}

TEST(HttpLimits, silent_connections_are_closed_without_an_answer) {
  http::ServerOptions options;
  options.header_timeout = 200ms;
  options.idle_timeout = 200ms;
  HeldServer server(options);
  RawClient fresh(server.port());
  EXPECT_TRUE(fresh.read_to_end());
  EXPECT_TRUE(fresh.buffer().empty());
  RawClient kept(server.port());
  ASSERT_TRUE(kept.send(get_text("/echo")));
  EXPECT_EQ(kept.read_reply().status, 200);
  EXPECT_TRUE(kept.read_to_end());
  EXPECT_TRUE(kept.buffer().empty());
}

TEST(HttpLimits, connections_beyond_the_cap_get_503) {
  http::ServerOptions options;
  options.connections_max = 3;
  HeldServer server(options);
  std::vector<RawClient> open;
  for (int i = 0; i < 3; ++i) {
    open.emplace_back(server.port());
    ASSERT_TRUE(open.back().send(get_text("/echo")));
    ASSERT_EQ(open.back().read_reply().status, 200);
  }
  {
    RawClient refused(server.port());
    const auto reply = refused.read_reply();
    EXPECT_EQ(reply.status, 503);
    EXPECT_TRUE(refused.read_to_end());
  }
  open.pop_back();
  EXPECT_TRUE(eventually([&] {
    RawClient next(server.port());
    next.send(get_text("/echo"));
    return next.read_reply().status == 200;
  }));
}

}  // namespace
}  // namespace rubato
