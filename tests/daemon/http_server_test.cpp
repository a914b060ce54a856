// SPDX-License-Identifier: Apache-2.0
// The HTTP server over raw sockets: framing, keep-alive, pipelining, methods, start and stop.
#include "daemon/http/server.h"

#include <atomic>
#include <thread>

#include "daemon/http/message.h"
#include "tests/support/http_fixture.h"

namespace rubato {
namespace {

using test::eventually;
using test::get_text;
using test::HeldServer;
using test::numbered;
using test::post_text;
using test::RawClient;

std::string chunked_post(std::string_view body, std::size_t chunk) {
  std::string out = "POST /echo HTTP/1.1\r\nHost: t\r\nTransfer-Encoding: chunked\r\n\r\n";
  for (std::size_t at = 0; at < body.size(); at += chunk) http::append_chunk(out, body.substr(at, chunk));
  return out + "0\r\n\r\n";
}

TEST(HttpServer, kept_connection_serves_many_requests) {
  HeldServer server;
  RawClient client(server.port());
  for (std::size_t i = 0; i < 50; ++i) {
    ASSERT_TRUE(client.send(post_text("/echo", std::to_string(i))));
    const auto reply = client.read_reply();
    ASSERT_EQ(reply.status, 200);
    ASSERT_EQ(reply.body, numbered("POST:", i));
  }
  EXPECT_EQ(server.server().open_connections(), 1);
}

TEST(HttpServer, an_exchange_is_open_until_its_answer_is_written) {
  HeldServer server;
  EXPECT_EQ(server.server().open_exchanges(), 0);
  RawClient client(server.port());
  ASSERT_TRUE(client.send(get_text("/slow")));
  auto held = server.take();
  EXPECT_EQ(server.server().open_exchanges(), 1);
  held.exchange->respond({.status = 200, .content_type = "text/plain", .body = "done", .headers = {}});
  EXPECT_EQ(client.read_reply().body, "done");
  EXPECT_TRUE(test::eventually([&] { return server.server().open_exchanges() == 0; }));

  ASSERT_TRUE(client.send(get_text("/slow")));
  held = server.take();
  EXPECT_EQ(server.server().open_exchanges(), 1);
  client.close();
  EXPECT_TRUE(test::eventually([&] { return server.server().open_exchanges() == 0; }));
}

TEST(HttpServer, pipelined_requests_are_answered_in_order) {
  HeldServer server;
  RawClient client(server.port());
  ASSERT_TRUE(client.send(get_text("/slow") + post_text("/echo", "second") + chunked_post("third", 2)));
  auto held = server.take();
  held.exchange->respond({.status = 201, .content_type = "text/plain", .body = "first", .headers = {}});
  EXPECT_EQ(client.read_reply().body, "first");
  EXPECT_EQ(client.read_reply().body, "POST:second");
  EXPECT_EQ(client.read_reply().body, "POST:third");
}

TEST(HttpServer, pipelined_request_waits_for_the_stream_before_it) {
  HeldServer server;
  RawClient client(server.port());
  ASSERT_TRUE(client.send(get_text("/stream") + get_text("/next")));
  auto first = server.take();
  first.exchange->begin_stream({});
  EXPECT_TRUE(first.exchange->write("a"));
  EXPECT_EQ(client.read_head().status, 200);
  EXPECT_EQ(client.read_chunk(), "a");
  EXPECT_EQ(server.held_count(), 0U);
  EXPECT_TRUE(first.exchange->write("b"));
  first.exchange->end_stream();
  auto second = server.take();
  second.exchange->respond({.status = 200, .content_type = "text/plain", .body = "next", .headers = {}});
  EXPECT_EQ(client.read_chunk(), "b");
  EXPECT_EQ(client.read_chunk(), "");
  EXPECT_EQ(client.read_reply().body, "next");
}

TEST(HttpServer, thousand_pipelined_requests_beyond_the_read_ahead_bound) {
  HeldServer server;
  RawClient client(server.port());
  std::string burst;
  for (std::size_t i = 0; i < 1000; ++i) burst += post_text("/echo", std::string(300, 'x') + std::to_string(i));
  std::thread sender([&] { EXPECT_TRUE(client.send(burst)); });
  for (std::size_t i = 0; i < 1000; ++i) {
    const auto reply = client.read_reply();
    EXPECT_TRUE(reply.body.ends_with(numbered("x", i))) << i;
    if (HasFailure()) break;
  }
  sender.join();
}

TEST(HttpServer, byte_by_byte_requests_and_reads) {
  HeldServer server;
  RawClient client(server.port());
  client.set_read_size(1);
  ASSERT_TRUE(client.send_bytewise(post_text("/echo", "length")));
  EXPECT_EQ(client.read_reply().body, "POST:length");
  ASSERT_TRUE(client.send_bytewise(chunked_post("chunked", 3)));
  EXPECT_EQ(client.read_reply().body, "POST:chunked");
}

TEST(HttpServer, request_parts_are_decoded) {
  HeldServer server;
  RawClient client(server.port());
  ASSERT_TRUE(client.send("GET /a%20b/c%2Fd?x=1&y=a+b%21&x=2&flag HTTP/1.1\r\nHost: t\r\nX-Two: a\r\nx-two: b\r\n\r\n"));
  auto held = server.take();
  EXPECT_EQ(held.request.method, "GET");
  EXPECT_EQ(held.request.path, "/a b/c/d");
  EXPECT_EQ(held.request.query.at("x"), "2");
  EXPECT_EQ(held.request.query.at("y"), "a b!");
  EXPECT_EQ(held.request.query.at("flag"), "");
  EXPECT_EQ(held.request.header("x-two"), "a, b");
  EXPECT_EQ(held.request.header("absent"), "");
  EXPECT_TRUE(held.request.peer.starts_with("127.0.0.1:"));
}

TEST(HttpServer, head_has_the_length_but_no_body) {
  HeldServer server;
  RawClient client(server.port());
  ASSERT_TRUE(client.send("HEAD /echo HTTP/1.1\r\nHost: t\r\n\r\n" + get_text("/echo")));
  const auto head = client.read_reply(true);
  EXPECT_EQ(head.headers.at("content-length"), "5");
  EXPECT_EQ(client.read_reply().body, "GET:");
}

TEST(HttpServer, http10_closes_unless_asked_to_keep) {
  HeldServer server;
  RawClient closing(server.port());
  ASSERT_TRUE(closing.send("GET /echo HTTP/1.0\r\n\r\n"));
  EXPECT_EQ(closing.read_reply().headers.at("connection"), "close");
  EXPECT_TRUE(closing.read_to_end());
  RawClient keeping(server.port());
  ASSERT_TRUE(keeping.send("GET /echo HTTP/1.0\r\nConnection: keep-alive\r\n\r\n"));
  EXPECT_EQ(keeping.read_reply().headers.at("connection"), "keep-alive");
  ASSERT_TRUE(keeping.send("GET /echo HTTP/1.0\r\n\r\n"));
  EXPECT_EQ(keeping.read_reply().body, "GET:");
}

TEST(HttpServer, http10_stream_ends_with_the_connection) {
  HeldServer server;
  RawClient client(server.port());
  ASSERT_TRUE(client.send("GET /stream HTTP/1.0\r\nConnection: keep-alive\r\n\r\n"));
  auto held = server.take();
  held.exchange->begin_stream({.status = 200, .content_type = "text/event-stream", .body = {}, .headers = {}});
  held.exchange->write("one ");
  held.exchange->write("two");
  held.exchange->end_stream();
  const auto reply = client.read_reply();
  EXPECT_FALSE(reply.headers.contains("transfer-encoding"));
  EXPECT_TRUE(reply.complete);
  EXPECT_EQ(reply.body, "one two");
}

TEST(HttpServer, connection_close_is_honoured) {
  HeldServer server;
  RawClient client(server.port());
  ASSERT_TRUE(client.send(get_text("/echo", "Connection: close\r\n")));
  EXPECT_EQ(client.read_reply().headers.at("connection"), "close");
  EXPECT_TRUE(client.read_to_end());
  client.close();
  EXPECT_TRUE(eventually([&] { return server.server().open_connections() == 0; }));
}

TEST(HttpServer, malformed_requests_get_an_error_in_the_ports_form_and_a_closed_connection) {
  HeldServer server;
  const std::vector<std::pair<std::string, int>> cases = {
      {"nonsense\r\n\r\n", 400},
      {"GET / HTTP/1.1\r\n\r\n", 400},                        // no Host
      {"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n", 400},  // two
      {"GET nopath HTTP/1.1\r\nHost: t\r\n\r\n", 400},
      {"GET /%zz HTTP/1.1\r\nHost: t\r\n\r\n", 400},
      {"GET /%00 HTTP/1.1\r\nHost: t\r\n\r\n", 400},
      {"GET / HTTP/3.7\r\nHost: t\r\n\r\n", 505},
      {"POST / HTTP/1.1\r\nHost: t\r\nContent-Length: -1\r\n\r\n", 400},
      {"POST / HTTP/1.1\r\nHost: t\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nab", 400},
      {"POST / HTTP/1.1\r\nHost: t\r\nContent-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 400},
      {"POST / HTTP/1.1\r\nHost: t\r\nTransfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n", 501},
      {"POST / HTTP/1.1\r\nHost: t\r\nTransfer-Encoding: chunked\r\n\r\nxyz\r\n", 400},
      {"POST / HTTP/1.1\r\nHost: t\r\nExpect: tea\r\nContent-Length: 1\r\n\r\n", 417},
  };
  for (const auto& [text, status] : cases) {
    RawClient client(server.port());
    ASSERT_TRUE(client.send(text));
    const auto reply = client.read_reply();
    EXPECT_EQ(reply.status, status) << text;
    EXPECT_TRUE(reply.complete) << text;
    EXPECT_TRUE(reply.body.starts_with("{\"error\":")) << text;
    EXPECT_TRUE(client.read_to_end()) << text;
  }
  EXPECT_EQ(server.held_count(), 0U);
}

TEST(HttpServer, throwing_handler_answers_500_and_the_server_goes_on) {
  HeldServer server;
  RawClient client(server.port());
  ASSERT_TRUE(client.send(get_text("/throw") + get_text("/echo")));
  EXPECT_EQ(client.read_reply().status, 500);
  EXPECT_EQ(client.read_reply().body, "GET:");
}

TEST(HttpServer, dropped_exchange_answers_500) {
  HeldServer server;
  RawClient client(server.port());
  ASSERT_TRUE(client.send(get_text("/dropped")));
  server.take();
  EXPECT_EQ(client.read_reply().status, 500);
}

TEST(HttpServer, second_answer_to_one_exchange_is_ignored) {
  HeldServer server;
  RawClient client(server.port());
  ASSERT_TRUE(client.send(get_text("/once")));
  auto held = server.take();
  held.exchange->respond({.status = 200, .content_type = "text/plain", .body = "one", .headers = {}});
  held.exchange->respond({.status = 200, .content_type = "text/plain", .body = "two", .headers = {}});
  EXPECT_EQ(client.read_reply().body, "one");
  ASSERT_TRUE(client.send(get_text("/echo")));
  EXPECT_EQ(client.read_reply().body, "GET:");
  EXPECT_FALSE(held.exchange->write("late"));
}

TEST(HttpServer, header_values_cannot_forge_headers) {
  HeldServer server;
  RawClient client(server.port());
  ASSERT_TRUE(client.send(get_text("/x")));
  server.take().exchange->respond(
      {.status = 200, .content_type = "text/plain", .body = "b", .headers = {{"X-Id", "a\r\nEvil: 1\r\n\r\nbody"}}});
  const auto reply = client.read_reply();
  EXPECT_FALSE(reply.headers.contains("evil"));
  EXPECT_EQ(reply.body, "b");
}

TEST(HttpServer, stop_accepting_lets_open_exchanges_finish) {
  HeldServer server;
  RawClient client(server.port());
  ASSERT_TRUE(client.send(get_text("/slow")));
  auto held = server.take();
  server.server().stop_accepting();
  server.server().stop_accepting();
  EXPECT_TRUE(eventually([&] { return !RawClient(server.port()).connected(); }));
  held.exchange->respond({.status = 200, .content_type = "text/plain", .body = "done", .headers = {}});
  EXPECT_EQ(client.read_reply().body, "done");
  // A kept connection is told to go away with its next answer.
  ASSERT_TRUE(client.send(get_text("/echo")));
  EXPECT_EQ(client.read_reply().headers.at("connection"), "close");
}

TEST(HttpServer, stop_closes_everything_and_late_calls_are_harmless) {
  std::atomic<int> closed = 0;
  std::shared_ptr<http::Exchange> late;
  {
    HeldServer server;
    RawClient client(server.port());
    RawClient idle(server.port());
    ASSERT_TRUE(client.send(get_text("/slow")));
    late = server.take().exchange;
    late->begin_stream({});
    late->on_close([&] { ++closed; });
    server.server().stop();
    server.server().stop();
    EXPECT_EQ(closed, 1);
    EXPECT_EQ(server.server().open_connections(), 0);
    EXPECT_TRUE(client.read_to_end());
    EXPECT_TRUE(idle.read_to_end());
  }
  EXPECT_FALSE(late->write("x"));
  late->end_stream();
  late->post([&] { ++closed; });
  late->on_close([&] { closed += 10; });
  EXPECT_EQ(closed, 11);
}

TEST(HttpServer, listen_errors_name_the_address) {
  HeldServer server;
  const std::string taken = numbered("127.0.0.1:", static_cast<std::size_t>(server.port()));
  for (const std::string& listen : {taken, std::string("nonsense"), std::string("127.0.0.1:70000"), std::string("1.2.3:80"),
                                    std::string("::1:80"), std::string("127.0.0.1:")}) {
    http::ServerOptions options;
    options.listen = listen;
    const auto started = http::Server::start(options, nullptr, test::plain_error);
    ASSERT_FALSE(started.has_value()) << listen;
    EXPECT_NE(started.error().message.find(listen), std::string::npos) << started.error().message;
  }
}

TEST(HttpServer, many_clients_at_once) {
  HeldServer server({.listen = {}, .threads = 4});
  std::vector<std::thread> threads;
  std::atomic<int> good = 0;
  for (int t = 0; t < 8; ++t) {
    threads.emplace_back([&, t] {
      for (int connection = 0; connection < 10; ++connection) {
        RawClient client(server.port());
        for (int i = 0; i < 10; ++i) {
          const std::string body = std::to_string(t) + "/" + std::to_string(i);
          if (client.send(post_text("/echo", body)) && client.read_reply().body == "POST:" + body) ++good;
        }
      }
    });
  }
  for (auto& thread : threads) thread.join();
  EXPECT_EQ(good, 800);
  EXPECT_TRUE(eventually([&] { return server.server().open_connections() == 0; }));
}

}  // namespace
}  // namespace rubato
