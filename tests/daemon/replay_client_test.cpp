// SPDX-License-Identifier: Apache-2.0
// The client against a small server on a real socket: whole and cut streams, refusals, hangs, disconnects, and arrivals that wait
// for nobody.
#include <arpa/inet.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <condition_variable>
#include <functional>
#include <map>
#include <mutex>
#include <nlohmann/json.hpp>
#include <set>
#include <sstream>
#include <thread>

#include "daemon/replay/replay.h"

namespace rubato::replay {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using testing::HasSubstr;

/// Accepts on loopback and hands every connection, with its request's head and body, to a handler on a thread of its own.
class TinyServer {
 public:
  struct Request {
    std::string head;
    std::string body;
  };
  using Handler = std::function<void(int socket, const Request&)>;

  explicit TinyServer(Handler handler) : handler_(std::move(handler)), listener_(::socket(AF_INET, SOCK_STREAM, 0)) {
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t size = sizeof address;
    EXPECT_EQ(::bind(listener_, reinterpret_cast<sockaddr*>(&address), size), 0);
    EXPECT_EQ(::listen(listener_, 128), 0);
    ::getsockname(listener_, reinterpret_cast<sockaddr*>(&address), &size);
    port_ = ntohs(address.sin_port);
    acceptor_ = std::jthread([this] { accept_all(); });
  }
  ~TinyServer() {
    ::shutdown(listener_, SHUT_RDWR);
    acceptor_.join();
    ::close(listener_);
    {
      const std::scoped_lock lock(mutex_);
      for (const int socket : open_) ::shutdown(socket, SHUT_RDWR);
    }
    connections_.clear();
  }
  TinyServer(const TinyServer&) = delete;
  TinyServer& operator=(const TinyServer&) = delete;

  [[nodiscard]] std::string url() const { return "http://127.0.0.1:" + std::to_string(port_); }

  static void write(int socket, std::string_view bytes) {
    while (!bytes.empty()) {
      const ssize_t sent = ::send(socket, bytes.data(), bytes.size(), MSG_NOSIGNAL);
      if (sent <= 0) return;
      bytes.remove_prefix(static_cast<std::size_t>(sent));
    }
  }
  /// Waits until the client closes its side.
  static void wait_for_close(int socket) {
    char byte = 0;
    while (::recv(socket, &byte, 1, 0) > 0) {
    }
  }

 private:
  void accept_all() {
    while (true) {
      const int socket = ::accept(listener_, nullptr, nullptr);
      if (socket < 0) return;
      const int on = 1;
      ::setsockopt(socket, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
      const std::scoped_lock lock(mutex_);
      open_.insert(socket);
      connections_.emplace_back([this, socket] {
        handler_(socket, read(socket));
        const std::scoped_lock closing(mutex_);
        open_.erase(socket);
        ::close(socket);
      });
    }
  }
  static Request read(int socket) {
    std::string bytes;
    std::array<char, 4096> chunk{};
    while (true) {
      const std::size_t end = bytes.find("\r\n\r\n");
      if (end != std::string::npos) {
        const std::size_t field = bytes.find("Content-Length: ");
        const std::size_t length = field < end ? std::stoul(bytes.substr(field + 16)) : 0;
        if (bytes.size() >= end + 4 + length) return {bytes.substr(0, end), bytes.substr(end + 4, length)};
      }
      const ssize_t got = ::recv(socket, chunk.data(), chunk.size(), 0);
      if (got <= 0) return {};
      bytes.append(chunk.data(), static_cast<std::size_t>(got));
    }
  }

  Handler handler_;
  int listener_;
  int port_ = 0;
  std::mutex mutex_;
  std::set<int> open_;
  std::vector<std::jthread> connections_;
  std::jthread acceptor_;
};

const std::string stream_head = "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n";

std::string chunk(const std::string& data) {
  std::ostringstream text;
  text << std::hex << data.size() << "\r\n" << data << "\r\n";
  return text.str();
}
std::string token(const std::string& text) {
  return chunk("data: {\"choices\":[{\"index\":0,\"text\":\"" + text + "\",\"finish_reason\":null}]}\n\n");
}

/// As many tokens as were asked for, one event each.
std::string answer_to(const TinyServer::Request& request) {
  const auto body = nlohmann::json::parse(request.body);
  std::string stream = stream_head;
  const int count = body.at("max_tokens").get<int>();
  for (int index = 0; index < count; ++index) stream += token("t");
  stream += chunk("data: {\"choices\":[],\"usage\":{\"completion_tokens\":" + std::to_string(count) + "}}\n\n");
  return stream + chunk("data: [DONE]\n\n") + "0\r\n\r\n";
}

void refuse(int socket, const std::string& status) {
  TinyServer::write(socket, "HTTP/1.1 " + status + "\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}");
}

Workload requests(int count, Duration gap = milliseconds(1)) {
  Workload workload;
  workload.phases.push_back({"all", Duration(0), std::max<Duration>(count * gap, milliseconds(1))});
  for (int index = 0; index < count; ++index) workload.arrivals.push_back({index * gap, 5 + index, 3, 0});
  return workload;
}

ClientOptions options_for(const TinyServer& server) {
  ClientOptions options;
  options.url = server.url();
  options.model = "m";
  options.timeout = seconds(20);
  return options;
}

LoadRun run_or_fail(const Workload& workload, const ClientOptions& options) {
  Result<LoadRun> run = run_load(workload, options, {}, {});
  EXPECT_TRUE(run.has_value()) << (run ? "" : run.error().message);
  return run ? *std::move(run) : LoadRun{};
}

std::map<std::string, int> kinds_of(const LoadRun& run) {
  std::map<std::string, int> kinds;
  for (const Outcome& outcome : run.outcomes) ++kinds[outcome.failure];
  return kinds;
}

TEST(ReplayClient, every_request_asks_for_a_stream_of_exactly_its_tokens) {
  std::mutex mutex;
  std::vector<nlohmann::json> bodies;
  TinyServer server([&](int socket, const TinyServer::Request& request) {
    {
      const std::scoped_lock lock(mutex);
      EXPECT_THAT(request.head, testing::StartsWith("POST /v1/completions HTTP/1.1"));
      bodies.push_back(nlohmann::json::parse(request.body));
    }
    TinyServer::write(socket, answer_to(request));
  });
  const LoadRun run = run_or_fail(requests(20), options_for(server));
  EXPECT_EQ(kinds_of(run), (std::map<std::string, int>{{"", 20}}));
  for (const Outcome& outcome : run.outcomes) {
    EXPECT_EQ(outcome.tokens, 3);
    EXPECT_GT(outcome.ttft, Duration(0));
  }
  std::set<std::size_t> lengths;
  for (const auto& body : bodies) {
    EXPECT_EQ(body.at("model"), "m");
    EXPECT_EQ(body.at("stream"), true);
    EXPECT_EQ(body.at("ignore_eos"), true);
    EXPECT_EQ(body.at("max_tokens"), 3);
    EXPECT_EQ(body.at("stream_options").at("include_usage"), true);
    lengths.insert(body.at("prompt").size());
    for (const auto& id : body.at("prompt")) EXPECT_TRUE(id.get<int>() >= 3 && id.get<int>() < 256);
  }
  EXPECT_EQ(lengths.size(), 20u);
}

TEST(ReplayClient, prompts_of_equal_blocks_begin_with_equal_tokens) {
  std::mutex mutex;
  std::vector<std::vector<int>> prompts;
  TinyServer server([&](int socket, const TinyServer::Request& request) {
    {
      const std::scoped_lock lock(mutex);
      prompts.push_back(nlohmann::json::parse(request.body).at("prompt").get<std::vector<int>>());
    }
    TinyServer::write(socket, answer_to(request));
  });
  Workload workload = requests(3);
  workload.block_tokens = 4;
  const std::vector<std::vector<std::uint64_t>> blocks{{7, 8}, {7, 9}, {6, 8}};
  for (std::size_t i = 0; i < blocks.size(); ++i) {
    workload.arrivals[i].prompt_tokens = 10;  // two blocks, and two tokens of nobody else's
    workload.arrivals[i].blocks = blocks[i];
  }
  EXPECT_EQ(kinds_of(run_or_fail(std::move(workload), options_for(server))), (std::map<std::string, int>{{"", 3}}));
  ASSERT_EQ(prompts.size(), 3U);
  const auto part = [&](std::size_t prompt, std::ptrdiff_t begin, std::ptrdiff_t end) {
    return std::vector<int>(prompts[prompt].begin() + begin, prompts[prompt].begin() + end);
  };
  // Two of three share their first block, two their second one, no two their ends.
  std::set<std::vector<int>> first, second, rest;
  for (std::size_t i = 0; i < prompts.size(); ++i) {
    first.insert(part(i, 0, 4));
    second.insert(part(i, 4, 8));
    rest.insert(part(i, 8, 10));
  }
  EXPECT_EQ(first.size(), 2U);
  EXPECT_EQ(second.size(), 2U);
  EXPECT_EQ(rest.size(), 3U);
}

TEST(ReplayClient, events_cut_over_segments_are_put_together) {
  TinyServer server([](int socket, const TinyServer::Request& request) {
    const std::string answer = answer_to(request);
    for (std::size_t at = 0; at < answer.size(); at += 7) TinyServer::write(socket, std::string_view(answer).substr(at, 7));
  });
  EXPECT_EQ(kinds_of(run_or_fail(requests(5), options_for(server))), (std::map<std::string, int>{{"", 5}}));
}

TEST(ReplayClient, failures_are_told_apart) {
  std::atomic<int> count = 0;
  TinyServer server([&](int socket, const TinyServer::Request& request) {
    switch (count++ % 7) {
      case 0:
        return refuse(socket, "429 Too Many Requests");
      case 1:
        return refuse(socket, "500 Internal Server Error");
      case 2:
        return TinyServer::write(socket, stream_head + token("a"));  // and gone
      case 3:
        return;
      case 4:
        return TinyServer::write(socket, stream_head + token("a") + chunk("data: [DONE]\n\n") + "0\r\n\r\n");
      case 5:
        return TinyServer::write(socket, stream_head + chunk("data: {\"error\":{\"message\":\"x\"}}\n\n") + "0\r\n\r\n");
      default:
        return TinyServer::write(socket, answer_to(request));
    }
  });
  const auto kinds = kinds_of(run_or_fail(requests(7), options_for(server)));
  EXPECT_EQ(kinds,
            (std::map<std::string, int>{
                {"http 429", 1}, {"http 500", 1}, {"disconnected", 2}, {"too few tokens", 1}, {"error in stream", 1}, {"", 1}}));
}

TEST(ReplayClient, a_server_that_hangs_fails_by_timeout_and_holds_no_other_arrival_back) {
  std::atomic<int> begun = 0;
  TinyServer server([&](int socket, const TinyServer::Request&) {
    if (begun++ % 2 == 0) TinyServer::write(socket, stream_head + token("a"));  // half of them begin
    TinyServer::wait_for_close(socket);
  });
  ClientOptions options = options_for(server);
  options.timeout = milliseconds(300);
  const LoadRun run = run_or_fail(requests(10), options);
  EXPECT_EQ(kinds_of(run), (std::map<std::string, int>{{"timeout", 10}}));
  EXPECT_EQ(begun, 10);
}

TEST(ReplayClient, arrivals_do_not_wait_for_answers) {
  // No request is answered before all have arrived: a client that waited for one would never finish.
  constexpr int count = 30;
  std::mutex mutex;
  std::condition_variable arrived;
  int waiting = 0;
  TinyServer server([&](int socket, const TinyServer::Request& request) {
    std::unique_lock lock(mutex);
    ++waiting;
    arrived.notify_all();
    arrived.wait_for(lock, seconds(15), [&] { return waiting == count; });
    lock.unlock();
    TinyServer::write(socket, answer_to(request));
  });
  EXPECT_EQ(kinds_of(run_or_fail(requests(count), options_for(server))), (std::map<std::string, int>{{"", count}}));
}

TEST(ReplayClient, arrivals_beyond_the_bound_fail_at_once) {
  TinyServer server([](int socket, const TinyServer::Request&) { TinyServer::wait_for_close(socket); });
  ClientOptions options = options_for(server);
  options.max_in_flight = 4;
  options.timeout = milliseconds(400);
  EXPECT_EQ(kinds_of(run_or_fail(requests(10), options)), (std::map<std::string, int>{{"timeout", 4}, {"in-flight limit", 6}}));
}

TEST(ReplayClient, model_name_and_settings_are_asked_for) {
  std::mutex mutex;
  std::string model;
  TinyServer server([&](int socket, const TinyServer::Request& request) {
    const auto reply = [&](const std::string& json) {
      TinyServer::write(socket, "HTTP/1.1 200 OK\r\nContent-Length: " + std::to_string(json.size()) + "\r\n\r\n" + json);
    };
    if (request.head.starts_with("GET /v1/models ")) return reply(R"({"data":[{"id":"found"}]})");
    if (request.head.starts_with("GET /apis/rubato.dev/v1alpha1/engines ")) {
      return reply(R"({"items":[{"status":{"settings":{"maxNumBatchedTokens":256}}}]})");
    }
    {
      const std::scoped_lock lock(mutex);
      model = nlohmann::json::parse(request.body).at("model").get<std::string>();
    }
    TinyServer::write(socket, answer_to(request));
  });
  ClientOptions options = options_for(server);
  options.model.clear();
  options.control = server.url();
  const LoadRun run = run_or_fail(requests(3, milliseconds(200)), options);
  EXPECT_EQ(kinds_of(run), (std::map<std::string, int>{{"", 3}}));
  EXPECT_EQ(model, "found");
  ASSERT_EQ(run.settings.size(), 1u);
  EXPECT_EQ(run.settings[0].settings, R"({"maxNumBatchedTokens":256})");
}

TEST(ReplayClient, a_stop_ends_the_run_and_leaves_requests_in_flight_out) {
  std::stop_source stop;
  std::atomic<int> count = 0;
  TinyServer server([&](int socket, const TinyServer::Request& request) {
    if (++count == 1) return TinyServer::write(socket, answer_to(request));
    if (count == 4) stop.request_stop();
    TinyServer::wait_for_close(socket);
  });
  const Result<LoadRun> run = run_load(requests(1000, milliseconds(20)), options_for(server), {}, stop.get_token());
  ASSERT_TRUE(run) << run.error().message;
  EXPECT_EQ(kinds_of(*run), (std::map<std::string, int>{{"", 1}}));
  EXPECT_LT(run->elapsed, seconds(15));
}

TEST(ReplayClient, unusable_addresses_are_refused) {
  for (const char* url : {"127.0.0.1:8000", "https://x", "http://", "http://x:0", "http://x:99999", "http://[::1:80"}) {
    ClientOptions options;
    options.url = url;
    const auto run = run_load(requests(1), options, {}, {});
    ASSERT_FALSE(run) << url;
    EXPECT_EQ(run.error().field, "--url");
  }
  std::string closed;
  {
    const TinyServer server([](int, const TinyServer::Request&) {});
    closed = server.url();
  }
  ClientOptions options;
  options.url = closed;
  const auto run = run_load(requests(1), options, {}, {});
  ASSERT_FALSE(run);
  EXPECT_THAT(run.error().message, HasSubstr("does not answer"));
  options.model = "m";
  EXPECT_EQ(kinds_of(run_or_fail(requests(1), options)), (std::map<std::string, int>{{"connect", 1}}))
      << "named, the run goes on and counts failures";
}

}  // namespace
}  // namespace rubato::replay
