// SPDX-License-Identifier: Apache-2.0
// Streams and disconnects: what the client sees piece by piece, and how soon a client that left is noticed.
#include <algorithm>
#include <array>
#include <atomic>
#include <future>
#include <thread>

#include "tests/support/http_fixture.h"

namespace rubato {
namespace {

using test::eventually;
using test::get_text;
using test::HeldServer;
using test::numbered;
using test::post_text;
using test::RawClient;
using namespace std::chrono_literals;

/// Begins a stream for client and hands over its exchange.
std::shared_ptr<http::Exchange> begin(HeldServer& server, RawClient& client) {
  EXPECT_TRUE(client.send(get_text("/stream")));
  auto exchange = server.take().exchange;
  exchange->begin_stream({.status = 200, .content_type = "text/event-stream", .body = {}, .headers = {}});
  EXPECT_EQ(client.read_head().headers.at("transfer-encoding"), "chunked");
  return exchange;
}

TEST(HttpStream, pieces_arrive_as_they_are_written) {
  HeldServer server;
  RawClient client(server.port());
  auto exchange = begin(server, client);
  for (std::size_t i = 0; i < 20; ++i) {
    ASSERT_TRUE(exchange->write(numbered("piece ", i)));
    ASSERT_EQ(client.read_chunk(), numbered("piece ", i));
  }
  exchange->end_stream();
  EXPECT_EQ(client.read_chunk(), "");
  ASSERT_TRUE(client.send(get_text("/echo")));
  EXPECT_EQ(client.read_reply().body, "GET:");
}

TEST(HttpStream, aborted_stream_has_no_last_chunk_and_keeps_what_was_written) {
  HeldServer server;
  RawClient client(server.port());
  auto exchange = begin(server, client);
  exchange->write("error event");
  exchange->abort_stream();
  EXPECT_EQ(client.read_chunk(), "error event");
  EXPECT_EQ(client.read_chunk(), std::nullopt);
  EXPECT_TRUE(client.ended());
}

TEST(HttpStream, dropped_stream_is_cut) {
  HeldServer server;
  RawClient client(server.port());
  begin(server, client);
  EXPECT_EQ(client.read_chunk(), std::nullopt);
  EXPECT_TRUE(client.ended());
}

TEST(HttpStream, many_threads_write_without_mixing_pieces) {
  HeldServer server;
  RawClient client(server.port());
  auto exchange = begin(server, client);
  std::vector<std::thread> writers;
  for (int t = 0; t < 4; ++t) {
    writers.emplace_back([&, t] {
      for (std::size_t i = 0; i < 500; ++i) EXPECT_TRUE(exchange->write(numbered(std::string(1, static_cast<char>('a' + t)), i)));
    });
  }
  for (auto& writer : writers) writer.join();
  exchange->end_stream();
  std::array<int, 4> next{};
  while (auto chunk = client.read_chunk()) {
    if (chunk->empty()) break;
    const auto t = static_cast<std::size_t>(chunk->front() - 'a');
    ASSERT_EQ(std::stoi(chunk->substr(1)), next.at(t)++);
  }
  EXPECT_EQ(next, (std::array<int, 4>{500, 500, 500, 500}));
}

enum class Leave { Fin, Reset, HalfClose };

class HttpDisconnect : public testing::TestWithParam<Leave> {};

TEST_P(HttpDisconnect, is_noticed_while_nothing_is_written) {
  HeldServer server;
  for (const bool streaming : {false, true}) {
    RawClient client(server.port());
    ASSERT_TRUE(client.send(post_text("/wait", "body")));
    auto held = server.take();
    std::promise<void> gone;
    held.exchange->on_close([&] { gone.set_value(); });
    if (streaming) held.exchange->begin_stream({});
    switch (GetParam()) {
      case Leave::Fin:
        client.close();
        break;
      case Leave::Reset:
        client.reset();
        break;
      case Leave::HalfClose:
        client.half_close();
        break;  // documented: counts as gone
    }
    ASSERT_EQ(gone.get_future().wait_for(60s), std::future_status::ready);
    EXPECT_FALSE(streaming && held.exchange->write("x"));
    EXPECT_TRUE(eventually([&] { return server.server().open_connections() == 0; }));
    int late = 0;
    held.exchange->on_close([&] { ++late; });
    EXPECT_EQ(late, 1) << "a callback set after the close runs at once";
  }
}

INSTANTIATE_TEST_SUITE_P(Leaving, HttpDisconnect, testing::Values(Leave::Fin, Leave::Reset, Leave::HalfClose));

TEST(HttpStream, disconnect_is_noticed_behind_pipelined_bytes) {
  HeldServer server;
  RawClient client(server.port());
  ASSERT_TRUE(client.send(get_text("/wait") + get_text("/never")));
  auto held = server.take();
  std::promise<void> gone;
  held.exchange->on_close([&] { gone.set_value(); });
  client.close();
  ASSERT_EQ(gone.get_future().wait_for(60s), std::future_status::ready);
  EXPECT_EQ(server.held_count(), 0U) << "a request of a client that left must not start";
}

TEST(HttpStream, what_was_answered_before_the_fin_is_delivered) {
  HeldServer server;
  RawClient client(server.port());
  ASSERT_TRUE(client.send(post_text("/echo", "a") + post_text("/echo", "b")));
  client.half_close();
  EXPECT_EQ(client.read_reply().body, "POST:a");
  EXPECT_EQ(client.read_reply().body, "POST:b");
  EXPECT_TRUE(client.read_to_end());
}

TEST(HttpStream, close_callback_does_not_run_after_a_complete_answer) {
  HeldServer server;
  std::atomic<int> closed = 0;
  {
    RawClient client(server.port());
    ASSERT_TRUE(client.send(get_text("/x")));
    auto held = server.take();
    held.exchange->on_close([&] { ++closed; });
    held.exchange->respond({});
    EXPECT_EQ(client.read_reply().status, 200);
  }
  EXPECT_TRUE(eventually([&] { return server.server().open_connections() == 0; }));
  EXPECT_EQ(closed, 0);
}

TEST(HttpStream, slow_reader_is_bounded_and_closed) {
  http::ServerOptions options;
  options.buffered_bytes_max = 64UL << 10;
  HeldServer server(options);
  RawClient client(server.port(), 4096);
  auto exchange = begin(server, client);
  std::promise<void> gone;
  exchange->on_close([&] { gone.set_value(); });
  const std::string piece(1000, 'x');
  // The kernel's own buffers are finite: writing must fail long before a gigabyte.
  std::size_t written = 0;
  while (written < (1UL << 30) && exchange->write(piece)) written += piece.size();
  EXPECT_LT(written, 1UL << 30);
  ASSERT_EQ(gone.get_future().wait_for(60s), std::future_status::ready);
  EXPECT_FALSE(exchange->write(piece));
  EXPECT_TRUE(eventually([&] { return server.server().open_connections() == 0; }));
}

TEST(HttpStream, stalled_write_times_out) {
  http::ServerOptions options;
  options.write_timeout = 200ms;
  options.buffered_bytes_max = 64UL << 20;
  HeldServer server(options);
  RawClient client(server.port(), 4096);
  auto exchange = begin(server, client);
  std::promise<void> gone;
  exchange->on_close([&] { gone.set_value(); });
  EXPECT_TRUE(exchange->write(std::string(32UL << 20, 'x')));
  ASSERT_EQ(gone.get_future().wait_for(60s), std::future_status::ready);
}

TEST(HttpStream, no_read_deadline_cuts_a_silent_stream) {
  http::ServerOptions options;
  options.header_timeout = 200ms;
  options.body_timeout = 200ms;
  options.idle_timeout = 200ms;
  options.write_timeout = 200ms;
  HeldServer server(options);
  RawClient client(server.port());
  ASSERT_TRUE(client.send(get_text("/echo")));  // arms and disarms every timer once before
  EXPECT_EQ(client.read_reply().status, 200);
  auto exchange = begin(server, client);
  std::atomic<bool> closed = false;
  exchange->on_close([&] { closed = true; });
  client.set_deadline(500ms);  // longer than every timeout; nothing may arrive, nothing may end
  EXPECT_FALSE(client.read_some());
  EXPECT_FALSE(client.ended());
  EXPECT_FALSE(closed);
  EXPECT_TRUE(exchange->write("still here"));
  EXPECT_EQ(client.read_chunk(), "still here");
  exchange->end_stream();
}

TEST(HttpStream, heartbeat_only_when_silent) {
  HeldServer server;
  RawClient client(server.port());
  auto exchange = begin(server, client);
  exchange->set_heartbeat(": keep-alive\n\n", 20ms);
  EXPECT_EQ(client.read_chunk(), ": keep-alive\n\n");
  EXPECT_EQ(client.read_chunk(), ": keep-alive\n\n");
  exchange->end_stream();
  std::optional<std::string> chunk;
  while ((chunk = client.read_chunk()) && !chunk->empty()) EXPECT_EQ(*chunk, ": keep-alive\n\n");
  EXPECT_EQ(chunk, "");
  client.set_deadline(60ms);
  EXPECT_FALSE(client.read_some()) << "nothing after the end: " << client.buffer();
}

TEST(HttpStream, posted_work_runs_in_order_and_not_after_the_close) {
  HeldServer server({.listen = {}, .threads = 4});
  RawClient client(server.port());
  ASSERT_TRUE(client.send(get_text("/x")));
  auto held = server.take();
  std::vector<int> order;  // touched by posted work alone: TSan sees any overlap
  std::promise<void> done;
  for (int i = 0; i < 1000; ++i) held.exchange->post([&order, i] { order.push_back(i); });
  held.exchange->post([&] { done.set_value(); });
  ASSERT_EQ(done.get_future().wait_for(60s), std::future_status::ready);
  ASSERT_EQ(order.size(), 1000U);
  EXPECT_TRUE(std::is_sorted(order.begin(), order.end()));
  client.close();
  EXPECT_TRUE(eventually([&] { return server.server().open_connections() == 0; }));
  held.exchange->post([] { FAIL() << "ran after the close"; });
}

TEST(HttpStream, two_hundred_streams_with_racing_writers_and_leavers) {
  HeldServer server({.listen = {}, .threads = 4});
  std::vector<RawClient> clients;
  std::vector<std::shared_ptr<http::Exchange>> exchanges;
  std::atomic<int> closed = 0;
  for (int i = 0; i < 200; ++i) {
    clients.emplace_back(server.port());
    ASSERT_TRUE(clients.back().send(get_text("/s")));
  }
  for (int i = 0; i < 200; ++i) {
    exchanges.push_back(server.take().exchange);
    exchanges.back()->begin_stream({});
    exchanges.back()->on_close([&] { ++closed; });
  }
  std::thread engine([&] {
    for (std::size_t token = 0; token < 50; ++token) {
      for (auto& exchange : exchanges) exchange->write(numbered("data: token ", token) + "\n\n");
    }
  });
  for (std::size_t i = 0; i < clients.size(); i += 2) (i % 4 == 0) ? clients[i].close() : clients[i].reset();
  engine.join();
  EXPECT_TRUE(eventually([&] { return closed == 100; }));
  for (auto& exchange : exchanges) exchange->end_stream();
  for (std::size_t i = 1; i < clients.size(); i += 2) {
    const auto reply = clients[i].read_reply();
    EXPECT_TRUE(reply.complete) << i;
    EXPECT_TRUE(reply.body.ends_with("token 49\n\n")) << i;
  }
  EXPECT_EQ(closed, 100);
}

}  // namespace
}  // namespace rubato
