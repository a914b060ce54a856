// SPDX-License-Identifier: Apache-2.0
// The writing half of a connection: the calls of an Exchange, which queue text from any thread, and the pump that writes it on
// the strand.
#include <boost/asio/buffer.hpp>
#include <boost/asio/post.hpp>
#include <exception>
#include <utility>

#include "daemon/http/connection.h"

namespace rubato::http {
namespace {

namespace asio = boost::asio;
using std::chrono::steady_clock;

constexpr std::size_t kept_buffer_bytes = 8UL << 10;

std::int64_t unix_seconds() {
  return std::chrono::duration_cast<std::chrono::seconds>(std::chrono::system_clock::now().time_since_epoch()).count();
}

}  // namespace

void Connection::write_next() {
  if (phase_ == Phase::Closed) return;
  bool finished = false;
  {
    const std::lock_guard lock(mutex_);
    written_.clear();
    written_offset_ = 0;
    written_.swap(queued_);
    in_flight_ = written_.size();
    if (written_.empty()) {
      writer_active_ = false;
      finished = phase_ == Phase::Answering && answer_ == Answer::Ended;
    }
  }
  if (!written_.empty()) {
    write_rest();
  } else if (finished) {
    finish_exchange();
  }
}

void Connection::write_rest() {
  arm(write_timer_, write_generation_, core_->options.write_timeout, &Connection::on_write_timeout);
  socket_.async_write_some(
      asio::buffer(written_) + written_offset_,
      [self = shared_from_this()](const boost::system::error_code& error, std::size_t size) { self->on_written(error, size); });
}

void Connection::on_written(const boost::system::error_code& error, std::size_t size) {
  disarm(write_timer_, write_generation_);
  if (phase_ == Phase::Closed) return;
  if (error) return shut(Farewell::Orderly);
  written_offset_ += size;
  if (written_offset_ < written_.size()) return write_rest();
  write_next();
}

void Connection::finish_exchange() {
  heartbeat_timer_.cancel();
  bool keep = false;
  {
    const std::lock_guard lock(mutex_);
    keep = persistence_ == Persistence::KeepAlive;
    // A burst must not pin its buffers to an idle connection.
    if (written_.capacity() > kept_buffer_bytes) std::string().swap(written_);
    if (queued_.capacity() > kept_buffer_bytes) std::string().swap(queued_);
  }
  if (!keep) return linger();
  enter(Phase::Idle);
  arm(read_timer_, read_generation_, core_->options.idle_timeout, &Connection::on_read_timeout);
  advance();
  if (input_ended_ && phase_ != Phase::Answering) shut(Farewell::Orderly);
}

void Connection::beat(std::uint64_t number, const std::string& piece, std::chrono::milliseconds silence) {
  steady_clock::time_point due;
  {
    const std::lock_guard lock(mutex_);
    if (!current(number) || answer_ != Answer::Streaming) return;
    due = last_output_ + silence;
  }
  const auto now = steady_clock::now();
  if (now >= due) {
    if (!write(number, piece)) return;
    due = now + silence;
  }
  heartbeat_timer_.expires_at(due);
  heartbeat_timer_.async_wait([self = shared_from_this(), number, piece, silence](const boost::system::error_code& error) {
    if (!error) self->beat(number, piece, silence);
  });
}

void Connection::append_head(const Response& response, Framing framing) {
  const std::string date = format_date(unix_seconds());
  queued_ += format_head(response, {.framing = framing, .persistence = persistence_, .date = date});
}

void Connection::wake_writer() {
  if (writer_active_ || closed_) return;
  writer_active_ = true;
  asio::post(socket_.get_executor(), [self = shared_from_this()] { self->write_next(); });
}

void Connection::respond(std::uint64_t number, Response response) {
  std::function<void()> released;  // destroyed after the lock: it may own an exchange
  const std::lock_guard lock(mutex_);
  if (!current(number)) return;
  CHECK(answer_ == Answer::Awaited, "respond() after begin_stream()");
  answer_ = Answer::Ended;
  released.swap(close_callback_);
  append_head(response, Framing::Length);
  if (!without_body_) queued_ += response.body;
  wake_writer();
}

void Connection::begin_stream(std::uint64_t number, const Response& head) {
  const std::lock_guard lock(mutex_);
  if (!current(number)) return;
  CHECK(answer_ == Answer::Awaited, "begin_stream() twice");
  answer_ = Answer::Streaming;
  framing_ = is_http10_ ? Framing::Close : Framing::Chunked;
  if (framing_ == Framing::Close) persistence_ = Persistence::Close;
  append_head(head, framing_);
  last_output_ = steady_clock::now();
  wake_writer();
}

bool Connection::write(std::uint64_t number, const std::string& piece) {
  const std::lock_guard lock(mutex_);
  if (!current(number) || overflowed_) return false;
  CHECK(answer_ == Answer::Streaming, "write() before begin_stream()");
  if (without_body_ || piece.empty()) return true;
  if (queued_.size() + in_flight_ + piece.size() > core_->options.buffered_bytes_max) {
    overflowed_ = true;
    asio::post(socket_.get_executor(), [self = shared_from_this()] { self->shut(Farewell::Reset); });
    return false;
  }
  if (framing_ == Framing::Chunked) {
    append_chunk(queued_, piece);
  } else {
    queued_ += piece;
  }
  last_output_ = steady_clock::now();
  wake_writer();
  return true;
}

void Connection::end_stream(std::uint64_t number) {
  std::function<void()> released;
  const std::lock_guard lock(mutex_);
  if (!current(number) || overflowed_) return;
  CHECK(answer_ == Answer::Streaming, "end_stream() before begin_stream()");
  answer_ = Answer::Ended;
  released.swap(close_callback_);
  if (framing_ == Framing::Chunked && !without_body_) queued_ += last_chunk;
  wake_writer();
}

void Connection::abort_stream(std::uint64_t number) {
  std::function<void()> released;
  const std::lock_guard lock(mutex_);
  if (!current(number) || overflowed_) return;
  CHECK(answer_ == Answer::Streaming, "abort_stream() before begin_stream()");
  answer_ = Answer::Ended;
  released.swap(close_callback_);
  persistence_ = Persistence::Close;
  wake_writer();
}

void Connection::on_close(std::uint64_t number, std::function<void()> callback) {
  {
    const std::lock_guard lock(mutex_);
    if (number != number_ || answer_ == Answer::Ended) return;
    if (!closed_) {
      close_callback_.swap(callback);
      return;
    }
  }
  callback();
}

void Connection::post(std::uint64_t number, std::function<void()> work) {
  const std::lock_guard lock(mutex_);
  if (closed_) return;
  asio::post(socket_.get_executor(), [self = shared_from_this(), number, run = std::move(work)] {
    if (self->phase_ == Phase::Closed) return;
    try {
      run();
    } catch (const std::exception&) {
      self->abandon(number);
    }
  });
}

void Connection::set_heartbeat(std::uint64_t number, std::string piece, std::chrono::milliseconds silence) {
  post(number, [this, number, text = std::move(piece), silence] { beat(number, text, silence); });
}

void Connection::abandon(std::uint64_t number) {
  bool unanswered = false;
  {
    const std::lock_guard lock(mutex_);
    if (!current(number)) return;
    unanswered = answer_ == Answer::Awaited;
  }
  if (unanswered) {
    respond(number, core_->error_response(500, "the request was dropped by a fault of the server"));
  } else {
    abort_stream(number);
  }
}

}  // namespace rubato::http
