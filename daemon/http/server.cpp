// SPDX-License-Identifier: Apache-2.0
// The listener: binds, accepts, counts connections, owns the threads. What happens on a connection is connection.cpp's business.
#include "daemon/http/server.h"

#include <netinet/tcp.h>

#include <boost/asio/bind_executor.hpp>
#include <boost/asio/executor_work_guard.hpp>
#include <boost/asio/ip/v6_only.hpp>
#include <boost/asio/post.hpp>
#include <boost/asio/steady_timer.hpp>
#include <boost/asio/strand.hpp>
#include <charconv>
#include <optional>
#include <thread>

#include "daemon/http/connection.h"

namespace rubato::http {
namespace {

namespace asio = boost::asio;
using asio::ip::tcp;

/// Connections beyond the cap that may still be told so; further ones are closed without a word.
constexpr std::size_t refusals_max = 64;
constexpr std::chrono::milliseconds accept_retry{100};

Result<tcp::endpoint> parse_listen(const std::string& listen) {
  const auto bad = [&](const std::string& why) {
    return unexpected(ErrorCode::InvalidArgument,
                      "listen address `" + listen + "`: " + why + "; allowed: HOST:PORT or [v6]:PORT");
  };
  const std::size_t colon = listen.rfind(':');
  if (colon == std::string::npos) return bad("no port");
  std::string host = listen.substr(0, colon);
  if (host.size() >= 2 && host.front() == '[' && host.back() == ']') {
    host = host.substr(1, host.size() - 2);
  } else if (host.find(':') != std::string::npos) {
    return bad("an IPv6 address needs brackets");
  }
  std::uint16_t port = 0;
  const char* const begin = listen.data() + colon + 1;
  const char* const end = listen.data() + listen.size();
  const auto [rest, failure] = std::from_chars(begin, end, port);
  if (failure != std::errc() || rest != end || begin == end) return bad("the port is not a number in 0..65535");
  if (host.empty()) host = "0.0.0.0";
  if (host == "localhost") host = "127.0.0.1";
  boost::system::error_code error;
  const auto address = asio::ip::make_address(host, error);
  if (error) return bad("the host is not an IP address");
  return tcp::endpoint(address, port);
}

/// A client whose machine vanished sends neither FIN nor RST; without probes a silent exchange would wait for it for hours.
void detect_dead_peers(tcp::socket& socket) {
  boost::system::error_code ignored;
  socket.set_option(asio::socket_base::keep_alive(true), ignored);
  const auto set = [&](int option, int value) {
    ::setsockopt(socket.native_handle(), IPPROTO_TCP, option, &value, sizeof value);
  };
  set(TCP_KEEPIDLE, 30);  // seconds of silence before the first probe
  set(TCP_KEEPINTVL, 10);
  set(TCP_KEEPCNT, 3);
}

class AsioServer final : public Server {
 public:
  explicit AsioServer(std::shared_ptr<Core> core)
      : core_(std::move(core)),
        work_(asio::make_work_guard(core_->io)),
        strand_(asio::make_strand(core_->io)),
        acceptor_(strand_),
        retry_timer_(strand_) {}
  ~AsioServer() override { AsioServer::stop(); }
  AsioServer(const AsioServer&) = delete;
  AsioServer& operator=(const AsioServer&) = delete;

  Result<void> open(const tcp::endpoint& endpoint) {
    boost::system::error_code error;
    acceptor_.open(endpoint.protocol(), error);
    if (!error) acceptor_.set_option(asio::socket_base::reuse_address(true), error);
    if (!error && endpoint.address().is_v6()) {
      boost::system::error_code ignored;  // a kernel without dual stack still serves v6
      acceptor_.set_option(asio::ip::v6_only(false), ignored);
    }
    if (!error) acceptor_.bind(endpoint, error);
    if (!error) acceptor_.listen(asio::socket_base::max_listen_connections, error);
    if (!error) port_ = acceptor_.local_endpoint(error).port();
    if (error) {
      return unexpected(ErrorCode::Unavailable, "listen address `" + core_->options.listen + "`: " + error.message());
    }
    return {};
  }

  void run() {
    asio::post(strand_, [this] { accept(); });
    const int count = core_->options.threads > 0 ? core_->options.threads : 1;
    for (int i = 0; i < count; ++i) threads_.emplace_back([core = core_] { core->io.run(); });
  }

  int port() const override { return port_; }

  int open_connections() const override {
    const std::lock_guard lock(core_->mutex);
    return static_cast<int>(core_->connections.size());
  }

  int open_exchanges() const override { return core_->exchanges.load(); }

  void stop_accepting() override {
    {
      const std::lock_guard lock(core_->mutex);
      if (!core_->accepting) return;
      core_->accepting = false;
    }
    asio::post(strand_, [this] { close_acceptor(); });
  }

  void stop() override {
    stop_accepting();
    std::vector<std::shared_ptr<Connection>> open;
    {
      const std::lock_guard lock(core_->mutex);
      if (core_->stopping) return;
      core_->stopping = true;
      for (const auto& [key, connection] : core_->connections) {
        if (auto alive = connection.lock()) open.push_back(std::move(alive));
      }
    }
    for (const auto& connection : open) connection->close();
    open.clear();
    work_.reset();
    for (auto& thread : threads_) thread.join();
    // Whatever the handler captured must not outlive the server just because an exchange does.
    core_->handler = nullptr;
  }

 private:
  void accept() {
    if (!acceptor_.is_open()) return;
    acceptor_.async_accept(asio::make_strand(core_->io), [this](const boost::system::error_code& error, tcp::socket socket) {
      if (!acceptor_.is_open()) return;
      if (error) {
        // Out of descriptors or the like: connections wait in the backlog until some close.
        retry_timer_.expires_after(accept_retry);
        retry_timer_.async_wait([this](const boost::system::error_code& cancelled) {
          if (!cancelled) accept();
        });
        return;
      }
      take(std::move(socket));
      accept();
    });
  }

  void take(tcp::socket socket) {
    boost::system::error_code ignored;
    socket.set_option(tcp::no_delay(true), ignored);
    detect_dead_peers(socket);
    auto connection = std::make_shared<Connection>(core_, std::move(socket));
    std::size_t count = 0;
    {
      const std::lock_guard lock(core_->mutex);
      count = core_->connections.size() + 1;
      const auto connections_max = static_cast<std::size_t>(core_->options.connections_max);
      if (core_->stopping || count > connections_max + refusals_max) count = 0;
      if (count != 0) core_->connections.emplace(connection.get(), connection);
    }
    if (count == 0) return;
    if (count > static_cast<std::size_t>(core_->options.connections_max)) {
      connection->start_refusing(503, "too many connections: " + std::to_string(core_->options.connections_max) + " are open");
    } else {
      connection->start();
    }
  }

  void close_acceptor() {
    boost::system::error_code ignored;
    acceptor_.close(ignored);
    retry_timer_.cancel();
  }

  const std::shared_ptr<Core> core_;
  asio::executor_work_guard<asio::io_context::executor_type> work_;
  asio::strand<asio::io_context::executor_type> strand_;
  tcp::acceptor acceptor_;
  asio::steady_timer retry_timer_;
  std::vector<std::thread> threads_;
  int port_ = 0;
};

}  // namespace

std::string_view Request::header(std::string_view name) const {
  const auto found = headers.find(name);
  return found == headers.end() ? std::string_view() : std::string_view(found->second);
}

Result<std::unique_ptr<Server>> Server::start(const ServerOptions& options, Handler handler,
                                              std::function<Response(int status, std::string message)> error_response) {
  auto endpoint = parse_listen(options.listen);
  if (!endpoint) return Unexpected(std::move(endpoint).error());
  auto core = std::make_shared<Core>();
  core->options = options;
  core->handler = std::move(handler);
  core->error_response = std::move(error_response);
  auto server = std::make_unique<AsioServer>(std::move(core));
  if (auto opened = server->open(*endpoint); !opened) return Unexpected(std::move(opened).error());
  server->run();
  return std::unique_ptr<Server>(std::move(server));
}

}  // namespace rubato::http
