// SPDX-License-Identifier: Apache-2.0
// The HTTP server as the rest of the daemon sees it: no Asio or Beast type appears here. One port per Server; handlers run on its
// threads, must not block, and answer through an Exchange whenever they are ready, from any thread.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "manifests/result.h"

namespace rubato::http {

struct Request {
  std::string method;                                       // upper case
  std::string path;                                         // percent-decoded, without the query
  std::map<std::string, std::string, std::less<>> query;    // percent-decoded; the last of equal keys wins
  std::map<std::string, std::string, std::less<>> headers;  // names in lower case; equal names joined with ", "
  std::string body;
  std::string peer;  // address:port

  /// Empty when absent. name in lower case.
  [[nodiscard]] std::string_view header(std::string_view name) const;
};

struct Response {
  int status = 200;
  std::string content_type = "application/json";
  std::string body;
  std::vector<std::pair<std::string, std::string>> headers;
};

/// One request being answered. All calls are thread-safe and never block; writes to the socket happen in call order on the
/// connection's own strand, one at a time, several queued pieces together. An exchange that is dropped unanswered is answered
/// 500, a dropped stream is cut.
class Exchange {
 public:
  virtual ~Exchange() = default;
  /// The whole answer. At most one of respond() and begin_stream(), once.
  virtual void respond(Response response) = 0;
  /// Starts a chunked answer (head.body is ignored).
  virtual void begin_stream(Response head) = 0;
  /// Queues a piece. False when the client is gone or reads so slowly that its bounded buffer is full: the connection is then
  /// closed and the close callback runs.
  virtual bool write(std::string piece) = 0;
  /// Ends a chunked answer properly.
  virtual void end_stream() = 0;
  /// Cuts a chunked answer short: the connection closes without the final chunk, so that the client cannot take it for complete.
  virtual void abort_stream() = 0;
  /// Runs once, on an HTTP thread, when the client goes away before the answer is complete, at any time after the request was
  /// read (also while nothing is being written). A client that closes its sending side counts as gone. Runs at once if that has
  /// already happened.
  virtual void on_close(std::function<void()> callback) = 0;
  /// Runs work on the connection's strand, on an HTTP thread: never at the same time as another work or the handler of this
  /// connection, in call order. Dropped once the connection has closed (on_close tells).
  virtual void post(std::function<void()> work) = 0;
  /// From now on writes piece whenever a begun stream has been silent for that long, so that proxies do not cut it.
  virtual void set_heartbeat(std::string piece, std::chrono::milliseconds silence) = 0;
};

using Handler = std::function<void(Request request, std::shared_ptr<Exchange> exchange)>;

struct ServerOptions {
  std::string listen;  // HOST:PORT, [v6]:PORT; port 0 takes a free one
  int threads = 1;
  std::size_t body_bytes_max = 32UL << 20;
  std::size_t header_bytes_max = 32UL << 10;
  std::size_t buffered_bytes_max = 1UL << 20;                           // per streaming connection
  int connections_max = 4096;                                           // further ones are answered 503 and closed
  std::chrono::milliseconds header_timeout = std::chrono::seconds(15);  // whole header
  std::chrono::milliseconds body_timeout = std::chrono::seconds(60);    // whole body
  std::chrono::milliseconds idle_timeout = std::chrono::seconds(120);   // between requests of a kept connection
  std::chrono::milliseconds write_timeout = std::chrono::seconds(60);   // one stalled write
};

/// Owns its threads. Protocol errors (bad framing, over-long headers or bodies, time-outs) are answered by the server itself
/// through error_response, so that each port keeps its own error form.
class Server {
 public:
  /// Binds and starts. Error: the address cannot be parsed or bound (named).
  [[nodiscard]] static Result<std::unique_ptr<Server>> start(
      const ServerOptions& options, Handler handler, std::function<Response(int status, std::string message)> error_response);
  virtual ~Server() = default;  // stops
  [[nodiscard]] virtual int port() const = 0;
  [[nodiscard]] virtual int open_connections() const = 0;
  /// Requests whose answers have not been written to the end yet.
  [[nodiscard]] virtual int open_exchanges() const = 0;
  /// Stops accepting; open exchanges go on. Idempotent.
  virtual void stop_accepting() = 0;
  /// Closes everything and joins the threads. Idempotent.
  virtual void stop() = 0;
};

}  // namespace rubato::http
