// SPDX-License-Identifier: Apache-2.0
// One accepted socket: reads requests one after another, hands each to the handler, writes the answers in order. Private to
// daemon/http; the listener that makes connections is server.cpp.
#pragma once

#include <atomic>
#include <boost/asio/io_context.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/steady_timer.hpp>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "daemon/http/message.h"
#include "daemon/http/server.h"

namespace rubato::http {

class Connection;

/// What all connections of one port share. It outlives the Server while a handler still holds an Exchange.
struct Core {
  boost::asio::io_context io;
  ServerOptions options;
  Handler handler;
  std::function<Response(int status, std::string message)> error_response;

  std::mutex mutex;
  std::unordered_map<Connection*, std::weak_ptr<Connection>> connections;  // guarded by mutex
  bool accepting = true;                                                   // guarded by mutex
  bool stopping = false;                                                   // guarded by mutex
  std::atomic<int> exchanges{0};                                           // connections in Phase::Answering
};

/// Everything with "strand" below runs on the connection's own strand; the rest may be called from any thread.
///
/// A read is pending whenever there is room, also while an answer is being made, so that a client that goes away is noticed at
/// once. A client that closes its sending side (FIN) counts as gone: what has been answered by then is still delivered, what has
/// not is abandoned. (A half-closing reader cannot be told from one that left, and guessing wrong would run abandoned generations
/// to their end.) Only a client that has pipelined more than `pipelined_bytes_max` ahead is not watched until the answer in
/// progress has been written.
///
/// Between calls: at most one read and one write are pending; the write pump is active exactly while queued_ or written_ is not
/// empty or a write is pending; timers are armed only for the phase that owns them, so none can cut a later one.
class Connection : public std::enable_shared_from_this<Connection> {
 public:
  Connection(std::shared_ptr<Core> core, boost::asio::ip::tcp::socket socket);
  ~Connection();

  void start();
  /// Answers with status, then closes.
  void start_refusing(int status, std::string message);
  void close();

  // The calls of an Exchange. number says which exchange: calls for one that is over are ignored.
  void respond(std::uint64_t number, Response response);
  void begin_stream(std::uint64_t number, const Response& head);
  bool write(std::uint64_t number, const std::string& piece);
  void end_stream(std::uint64_t number);
  void abort_stream(std::uint64_t number);
  void on_close(std::uint64_t number, std::function<void()> callback);
  void post(std::uint64_t number, std::function<void()> work);
  void set_heartbeat(std::uint64_t number, std::string piece, std::chrono::milliseconds silence);
  /// The handler let go of its exchange: an answer that is not complete never will be.
  void abandon(std::uint64_t number);

  static constexpr std::size_t pipelined_bytes_max = 64UL << 10;

 private:
  enum class Phase : std::uint8_t { Idle, Header, Body, Answering, Lingering, Closed };
  void enter(Phase next);  // strand
  enum class Answer : std::uint8_t { Awaited, Streaming, Ended };
  struct Parser;  // Beast's, kept out of this header

  // strand: reading
  void read_more();
  void on_read(const boost::system::error_code& error, std::size_t size);
  void on_end_of_input();
  void advance();
  bool parse_some();
  bool check_header();
  void dispatch();
  void refuse(int status, std::string message);
  void on_read_timeout();
  // strand: writing
  void write_next();
  void write_rest();
  void on_written(const boost::system::error_code& error, std::size_t size);
  void finish_exchange();
  void linger();
  // strand: both
  enum class Farewell : std::uint8_t { Orderly, Reset };
  void shut(Farewell farewell);
  void arm(boost::asio::steady_timer& timer, std::uint64_t& generation, std::chrono::steady_clock::duration timeout,
           void (Connection::*action)());
  static void disarm(boost::asio::steady_timer& timer, std::uint64_t& generation);
  void on_write_timeout() { shut(Farewell::Reset); }
  void beat(std::uint64_t number, const std::string& piece, std::chrono::milliseconds silence);

  // mutex_ held
  [[nodiscard]] bool current(std::uint64_t number) const { return !closed_ && number == number_ && answer_ != Answer::Ended; }
  void append_head(const Response& response, Framing framing);
  void wake_writer();

  const std::shared_ptr<Core> core_;  // first: the io_context outlives the socket and the timers

  // strand
  boost::asio::ip::tcp::socket socket_;
  boost::asio::steady_timer read_timer_;
  boost::asio::steady_timer write_timer_;
  boost::asio::steady_timer heartbeat_timer_;
  std::uint64_t read_generation_ = 0;
  std::uint64_t write_generation_ = 0;
  std::string peer_;
  Phase phase_ = Phase::Idle;  // changed by enter() alone
  bool reading_ = false;
  bool input_ended_ = false;
  std::vector<char> chunk_;  // where the pending read goes
  std::string input_;        // read but not parsed
  std::unique_ptr<Parser> parser_;
  std::string written_;  // being written
  std::size_t written_offset_ = 0;

  // any thread
  std::mutex mutex_;
  bool closed_ = false;
  bool writer_active_ = false;
  std::string queued_;         // to be written after written_
  std::size_t in_flight_ = 0;  // size of written_
  std::uint64_t number_ = 0;   // of the exchange in progress
  Answer answer_ = Answer::Ended;
  Framing framing_ = Framing::Length;
  Persistence persistence_ = Persistence::KeepAlive;
  bool overflowed_ = false;    // the client reads too slowly: closing
  bool without_body_ = false;  // HEAD
  bool is_http10_ = false;
  std::function<void()> close_callback_;
  std::chrono::steady_clock::time_point last_output_;
};

}  // namespace rubato::http
