// SPDX-License-Identifier: Apache-2.0
// The reading half of a connection, and its end. Beast parses requests here and nowhere else; answers are
// connection_answer.cpp's.
#include "daemon/http/connection.h"

#include <boost/asio/buffer.hpp>
#include <boost/asio/post.hpp>
#include <boost/asio/socket_base.hpp>
#include <boost/beast/core/string.hpp>
#include <boost/beast/http/parser.hpp>
#include <boost/beast/http/string_body.hpp>
#include <exception>
#include <utility>

namespace rubato::http {
namespace {

namespace asio = boost::asio;
namespace beast_http = boost::beast::http;

constexpr std::size_t read_bytes = 8UL << 10;
constexpr std::size_t read_bytes_body = 64UL << 10;
constexpr std::chrono::seconds linger_timeout{2};
/// Unparsed input that makes no progress, beyond the header limit: only an endless chunk extension gets there.
constexpr std::size_t stuck_input_bytes_max = 16UL << 10;

std::string address_text(const asio::ip::tcp::socket& socket) {
  boost::system::error_code ignored;
  const auto endpoint = socket.remote_endpoint(ignored);
  if (ignored) return {};
  const std::string address = endpoint.address().to_string(ignored);
  return (endpoint.address().is_v6() ? "[" + address + "]" : address) + ":" + std::to_string(endpoint.port());
}

/// The handler's view of one exchange. Letting go of the last reference without an answer is a fault that the client gets to see.
class ConnectionExchange final : public Exchange {
 public:
  ConnectionExchange(std::shared_ptr<Connection> connection, std::uint64_t number)
      : connection_(std::move(connection)), number_(number) {}
  ~ConnectionExchange() override { connection_->abandon(number_); }
  ConnectionExchange(const ConnectionExchange&) = delete;
  ConnectionExchange& operator=(const ConnectionExchange&) = delete;

  void respond(Response response) override { connection_->respond(number_, std::move(response)); }
  void begin_stream(Response head) override { connection_->begin_stream(number_, head); }
  bool write(std::string piece) override { return connection_->write(number_, piece); }
  void end_stream() override { connection_->end_stream(number_); }
  void abort_stream() override { connection_->abort_stream(number_); }
  void on_close(std::function<void()> callback) override { connection_->on_close(number_, std::move(callback)); }
  void post(std::function<void()> work) override { connection_->post(number_, std::move(work)); }
  void set_heartbeat(std::string piece, std::chrono::milliseconds silence) override {
    connection_->set_heartbeat(number_, std::move(piece), silence);
  }

 private:
  const std::shared_ptr<Connection> connection_;
  const std::uint64_t number_;
};

}  // namespace

struct Connection::Parser {
  beast_http::request_parser<beast_http::string_body> beast;
};

Connection::Connection(std::shared_ptr<Core> core, asio::ip::tcp::socket socket)
    : core_(std::move(core)),
      socket_(std::move(socket)),
      read_timer_(socket_.get_executor()),
      write_timer_(socket_.get_executor()),
      heartbeat_timer_(socket_.get_executor()) {}

Connection::~Connection() {
  enter(Phase::Closed);
  const std::lock_guard lock(core_->mutex);
  core_->connections.erase(this);
}

void Connection::enter(Phase next) {
  const int before = phase_ == Phase::Answering ? 1 : 0;
  const int after = next == Phase::Answering ? 1 : 0;
  if (before != after) core_->exchanges += after - before;
  phase_ = next;
}

void Connection::start() {
  asio::post(socket_.get_executor(), [self = shared_from_this()] {
    if (self->phase_ == Phase::Closed) return;
    self->peer_ = address_text(self->socket_);
    self->arm(self->read_timer_, self->read_generation_, self->core_->options.header_timeout, &Connection::on_read_timeout);
    self->read_more();
  });
}

void Connection::start_refusing(int status, std::string message) {
  asio::post(socket_.get_executor(),
             [self = shared_from_this(), status, text = std::move(message)] { self->refuse(status, text); });
}

void Connection::close() {
  asio::post(socket_.get_executor(), [self = shared_from_this()] { self->shut(Farewell::Orderly); });
}

void Connection::read_more() {
  if (reading_ || input_ended_ || phase_ == Phase::Closed) return;
  if (phase_ == Phase::Answering && input_.size() >= pipelined_bytes_max) return;
  reading_ = true;
  const std::size_t size = phase_ == Phase::Body ? read_bytes_body : read_bytes;
  if (chunk_.size() != size) chunk_ = std::vector<char>(size);
  socket_.async_read_some(asio::buffer(chunk_), [self = shared_from_this()](const boost::system::error_code& error,
                                                                            std::size_t bytes) { self->on_read(error, bytes); });
}

void Connection::on_read(const boost::system::error_code& error, std::size_t size) {
  reading_ = false;
  if (phase_ == Phase::Closed) return;
  if (error == asio::error::eof) return on_end_of_input();
  if (error) return shut(Farewell::Orderly);
  if (phase_ != Phase::Lingering) input_.append(chunk_.data(), size);
  advance();
}

void Connection::on_end_of_input() {
  input_ended_ = true;
  if (phase_ == Phase::Answering) {
    const std::lock_guard lock(mutex_);
    if (answer_ == Answer::Ended) return;  // the writer finishes the exchange
  }
  shut(Farewell::Orderly);
}

void Connection::advance() {
  while (!input_.empty() && (phase_ == Phase::Idle || phase_ == Phase::Header || phase_ == Phase::Body)) {
    if (!parse_some()) break;
  }
  read_more();
}

/// False when more input is needed.
bool Connection::parse_some() {
  if (phase_ == Phase::Idle) {
    // A stray line end after the previous body is allowed (RFC 9112 2.2).
    const std::size_t begin = input_.find_first_not_of("\r\n");
    input_.erase(0, begin);
    if (input_.empty()) return false;
    enter(Phase::Header);
    parser_ = std::make_unique<Parser>();
    parser_->beast.eager(true);
    parser_->beast.header_limit(static_cast<std::uint32_t>(core_->options.header_bytes_max));
    parser_->beast.body_limit(core_->options.body_bytes_max);
    arm(read_timer_, read_generation_, core_->options.header_timeout, &Connection::on_read_timeout);
  }
  boost::system::error_code error;
  const std::size_t used = parser_->beast.put(asio::buffer(input_), error);
  input_.erase(0, used);
  if (error == beast_http::error::need_more) error = {};
  if (error == beast_http::error::header_limit) {
    refuse(431, "request header: larger than " + std::to_string(core_->options.header_bytes_max) + " bytes");
  } else if (error == beast_http::error::body_limit) {
    refuse(413, "request body: larger than " + std::to_string(core_->options.body_bytes_max) + " bytes");
  } else if (error == beast_http::error::bad_version) {
    refuse(505, "request line: only HTTP/1.0 and HTTP/1.1 are served");
  } else if (error) {
    refuse(400, "not a valid HTTP request: " + error.message());
  } else if (used == 0 && input_.size() > core_->options.header_bytes_max + stuck_input_bytes_max) {
    refuse(400, "not a valid HTTP request: endless chunk header");
  }
  if (error || phase_ == Phase::Answering) return false;
  if (phase_ == Phase::Header && parser_->beast.is_header_done()) {
    enter(Phase::Body);
    if (!check_header()) return false;
    arm(read_timer_, read_generation_, core_->options.body_timeout, &Connection::on_read_timeout);
  }
  if (parser_->beast.is_done()) {
    dispatch();
    return false;
  }
  return used > 0;
}

/// What Beast leaves to us. False when the request was refused.
bool Connection::check_header() {
  const auto& message = parser_->beast.get();
  const auto refused = [this](int status, std::string text) {
    refuse(status, std::move(text));
    return false;
  };
  if (message.version() != 10 && message.version() != 11) {
    return refused(505, "request line: only HTTP/1.0 and HTTP/1.1 are served");
  }
  if (message.version() == 11 && message.count(beast_http::field::host) != 1) {
    return refused(400, "request header: HTTP/1.1 needs exactly one Host");
  }
  if (message.count(beast_http::field::content_length) > 1) return refused(400, "request header: more than one Content-Length");
  if (const auto coding = message.find(beast_http::field::transfer_encoding); coding != message.end()) {
    if (message.version() != 11 || message.count(beast_http::field::content_length) != 0 ||
        message.count(beast_http::field::transfer_encoding) != 1) {
      return refused(400, "request header: Transfer-Encoding contradicts the other headers");
    }
    if (!boost::beast::iequals(coding->value(), "chunked")) {
      return refused(501, "request header: the only Transfer-Encoding served is chunked");
    }
  }
  if (const auto expect = message.find(beast_http::field::expect); expect != message.end() && message.version() == 11) {
    if (!boost::beast::iequals(expect->value(), "100-continue")) {
      return refused(417, "request header: the only expectation served is 100-continue");
    }
    if (!parser_->beast.is_done() && input_.empty() && message.body().empty()) {
      const std::lock_guard lock(mutex_);
      queued_ += "HTTP/1.1 100 Continue\r\n\r\n";
      wake_writer();
    }
  }
  return true;
}

void Connection::dispatch() {
  disarm(read_timer_, read_generation_);
  const bool keep_alive = parser_->beast.keep_alive();
  auto message = parser_->beast.release();
  parser_.reset();
  auto target = parse_target({message.target().data(), message.target().size()});
  if (!target) return refuse(400, target.error().message);

  Request request;
  request.method = std::string(message.method_string());
  request.path = std::move(target->path);
  request.query = std::move(target->query);
  request.peer = peer_;
  for (const auto& field : message) {
    std::string name(field.name_string());
    for (char& c : name) c = (c >= 'A' && c <= 'Z') ? static_cast<char>(c + ('a' - 'A')) : c;
    const std::string value(field.value());
    const auto [slot, inserted] = request.headers.try_emplace(std::move(name), value);
    if (!inserted) slot->second += ", " + value;
  }
  request.body = std::move(message.body());

  bool accepting = true;
  {
    const std::lock_guard lock(core_->mutex);
    accepting = core_->accepting;
  }
  enter(Phase::Answering);
  std::shared_ptr<Exchange> exchange;
  {
    const std::lock_guard lock(mutex_);
    ++number_;
    answer_ = Answer::Awaited;
    persistence_ = keep_alive && accepting ? Persistence::KeepAlive : Persistence::Close;
    without_body_ = request.method == "HEAD";
    is_http10_ = message.version() == 10;
    exchange = std::make_shared<ConnectionExchange>(shared_from_this(), number_);
  }
  try {
    core_->handler(std::move(request), exchange);
  } catch (const std::exception&) {
    exchange.reset();  // answers 500 unless someone else still holds it
  }
  exchange.reset();
  if (input_ended_) {
    std::unique_lock lock(mutex_);
    const bool answered = answer_ == Answer::Ended;
    lock.unlock();
    if (!answered) shut(Farewell::Orderly);
  }
}

void Connection::refuse(int status, std::string message) {
  if (phase_ == Phase::Closed) return;
  disarm(read_timer_, read_generation_);
  Response response = core_->error_response(status, std::move(message));
  enter(Phase::Answering);
  parser_.reset();
  const std::lock_guard lock(mutex_);
  ++number_;
  answer_ = Answer::Ended;
  persistence_ = Persistence::Close;
  without_body_ = false;
  append_head(response, Framing::Length);
  queued_ += response.body;
  wake_writer();
}

void Connection::on_read_timeout() {
  switch (phase_) {
    case Phase::Header:
      return refuse(408, "request header: not complete in time");
    case Phase::Body:
      return refuse(408, "request body: not complete in time");
    case Phase::Idle:
    case Phase::Lingering:
      return shut(Farewell::Orderly);
    case Phase::Answering:
    case Phase::Closed:
      return;
  }
}

/// Closes our side and reads on for a moment: closing with unread input would send a reset, which may destroy the answer on its
/// way.
void Connection::linger() {
  if (input_ended_) return shut(Farewell::Orderly);
  enter(Phase::Lingering);
  input_.clear();
  boost::system::error_code ignored;
  socket_.shutdown(asio::ip::tcp::socket::shutdown_send, ignored);
  arm(read_timer_, read_generation_, linger_timeout, &Connection::on_read_timeout);
  read_more();
}

void Connection::shut(Farewell farewell) {
  if (phase_ == Phase::Closed) return;
  enter(Phase::Closed);
  std::function<void()> callback;
  {
    const std::lock_guard lock(mutex_);
    closed_ = true;
    callback.swap(close_callback_);
    queued_.clear();
  }
  disarm(read_timer_, read_generation_);
  disarm(write_timer_, write_generation_);
  heartbeat_timer_.cancel();
  boost::system::error_code ignored;
  if (farewell == Farewell::Reset) socket_.set_option(asio::socket_base::linger(true, 0), ignored);
  socket_.close(ignored);
  {
    const std::lock_guard lock(core_->mutex);
    core_->connections.erase(this);
  }
  if (callback) callback();
}

void Connection::arm(asio::steady_timer& timer, std::uint64_t& generation, std::chrono::steady_clock::duration timeout,
                     void (Connection::*action)()) {
  timer.expires_after(timeout);
  timer.async_wait(
      [self = shared_from_this(), &generation, armed = ++generation, action](const boost::system::error_code& error) {
        if (!error && armed == generation) (self.get()->*action)();
      });
}

void Connection::disarm(asio::steady_timer& timer, std::uint64_t& generation) {
  ++generation;  // also defeats an expiry that is already queued
  timer.cancel();
}

}  // namespace rubato::http
