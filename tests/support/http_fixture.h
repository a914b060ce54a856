// SPDX-License-Identifier: Apache-2.0
// A server whose exchanges a test can hold in its hands: `/echo` answers at once, every other path waits for the test to answer.
#pragma once

#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <utility>

#include "daemon/http/server.h"
#include "tests/support/raw_client.h"

namespace rubato::test {

inline http::Response plain_error(int status, const std::string& message) {
  return {.status = status, .content_type = "application/json", .body = "{\"error\":\"" + message + "\"}", .headers = {}};
}

class HeldServer {
 public:
  struct Held {
    http::Request request;
    std::shared_ptr<http::Exchange> exchange;
  };

  explicit HeldServer(http::ServerOptions options = {}) {
    options.listen = "127.0.0.1:0";
    if (options.threads == 1) options.threads = 2;
    auto started = http::Server::start(
        options, [this](http::Request request, std::shared_ptr<http::Exchange> exchange) { handle(request, exchange); },
        plain_error);
    CHECK(started.has_value(), started.error().message);
    server_ = std::move(*started);
  }
  ~HeldServer() {
    held_.clear();
    server_->stop();
  }

  [[nodiscard]] int port() const { return server_->port(); }
  http::Server& server() { return *server_; }

  /// The next request that is not for `/echo`; CHECKs after a minute without one.
  Held take() {
    std::unique_lock lock(mutex_);
    const bool came = arrived_.wait_for(lock, std::chrono::seconds(60), [this] { return !held_.empty(); });
    CHECK(came, "no request arrived");
    Held next = std::move(held_.front());
    held_.pop_front();
    return next;
  }
  [[nodiscard]] std::size_t held_count() {
    const std::lock_guard lock(mutex_);
    return held_.size();
  }

 private:
  void handle(http::Request& request, std::shared_ptr<http::Exchange>& exchange) {
    if (request.path == "/echo") {
      exchange->respond(
          {.status = 200, .content_type = "text/plain", .body = request.method + ":" + request.body, .headers = {}});
      return;
    }
    if (request.path == "/throw") throw std::runtime_error("handler fault");
    const std::lock_guard lock(mutex_);
    held_.push_back({.request = std::move(request), .exchange = std::move(exchange)});
    arrived_.notify_all();
  }

  std::mutex mutex_;
  std::condition_variable arrived_;
  std::deque<Held> held_;
  std::unique_ptr<http::Server> server_;
};

}  // namespace rubato::test
