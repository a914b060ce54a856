// SPDX-License-Identifier: Apache-2.0
// The one file of the replay client that knows Asio and Beast: a coroutine per request on one thread, each with its own
// connection.
#include "daemon/replay/client.h"

#include <algorithm>
#include <boost/asio/awaitable.hpp>
#include <boost/asio/co_spawn.hpp>
#include <boost/asio/detached.hpp>
#include <boost/asio/io_context.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/post.hpp>
#include <boost/asio/redirect_error.hpp>
#include <boost/asio/steady_timer.hpp>
#include <boost/asio/use_awaitable.hpp>
#include <boost/beast/core/flat_buffer.hpp>
#include <boost/beast/core/tcp_stream.hpp>
#include <boost/beast/http.hpp>
#include <charconv>
#include <chrono>
#include <nlohmann/json.hpp>
#include <random>
#include <utility>

namespace rubato::replay {
namespace {

namespace asio = boost::asio;
namespace beast = boost::beast;
namespace http = boost::beast::http;
using asio::ip::tcp;
using Clock = std::chrono::steady_clock;
using asio::redirect_error;
using asio::use_awaitable;

constexpr std::size_t body_bytes_max = 4 << 20;  // of an answer that is not streamed
constexpr Duration control_timeout = std::chrono::seconds(2);

struct Target {
  std::string host;
  std::string port;
  std::string prefix;
};

Result<Target> parse_url(const std::string& flag, const std::string& url) {
  constexpr std::string_view scheme = "http://";
  const auto bad = [&](const char* why) {
    return unexpected(ErrorCode::InvalidArgument, flag, flag + " " + url + ": " + why + "; allowed: http://HOST[:PORT][/PREFIX]");
  };
  if (!url.starts_with(scheme)) return bad("not an http:// address");
  const std::string rest = url.substr(scheme.size());
  const std::size_t slash = std::min(rest.find('/'), rest.size());
  std::string host = rest.substr(0, slash);
  Target target{.host = host, .port = "80", .prefix = rest.substr(slash)};
  while (target.prefix.ends_with('/')) target.prefix.pop_back();
  if (host.starts_with('[')) {
    const std::size_t close = host.find(']');
    if (close == std::string::npos) return bad("`[` without `]`");
    target.host = host.substr(1, close - 1);
    host.erase(0, close);
  }
  if (const std::size_t colon = host.rfind(':'); colon != std::string::npos) {
    target.port = host.substr(colon + 1);
    if (!rest.starts_with('[')) target.host = host.substr(0, colon);
    std::uint16_t port = 0;
    const auto [end, error] = std::from_chars(target.port.data(), target.port.data() + target.port.size(), port);
    if (error != std::errc() || end != target.port.data() + target.port.size() || port == 0)
      return bad("the port is not in 1..65535");
  }
  if (target.host.empty()) return bad("no host");
  return target;
}

http::request<http::string_body> make_request(http::verb verb, const Target& target, const std::string& path, std::string body) {
  http::request<http::string_body> request(verb, target.prefix + path, 11);
  const bool v6 = target.host.find(':') != std::string::npos;
  request.set(http::field::host, (v6 ? "[" : "") + target.host + (v6 ? "]:" : ":") + target.port);
  request.set(http::field::user_agent, "rubato-replay");
  request.set(http::field::connection, "close");
  if (verb == http::verb::post) {
    request.set(http::field::content_type, "application/json");
    request.set(http::field::accept, "text/event-stream");
    request.body() = std::move(body);
  }
  request.prepare_payload();
  return request;
}

/// The kind of failure that a broken connection is.
std::string failure_of(const boost::system::error_code& error, const char* otherwise) {
  return error == beast::error::timeout ? "timeout" : otherwise;
}

class Load {
 public:
  Load(const Workload& workload, const ClientOptions& options, const std::function<void(const Progress&)>& progress)
      : workload_(workload), options_(options), progress_(progress), timer_(io_), ticker_(io_), poller_(io_) {}

  Result<LoadRun> run(const Target& target, const std::optional<Target>& control, const std::stop_token& stop) {
    target_ = target;
    if (auto ready = prepare(); !ready) return Unexpected(std::move(ready).error());
    io_.restart();
    start_ = Clock::now();
    asio::co_spawn(io_, send_all(), asio::detached);
    asio::co_spawn(io_, tick(), asio::detached);
    if (control) asio::co_spawn(io_, watch(*control), asio::detached);
    {
      const std::stop_callback stopper(stop, [this] { asio::post(io_, [this] { io_.stop(); }); });
      io_.run();
    }
    run_.elapsed = now();
    return std::move(run_);
  }

 private:
  using Stream = beast::tcp_stream;

  [[nodiscard]] Duration now() const { return Clock::now() - start_; }

  /// Resolves the host once and asks for the model's name where none was given.
  Result<void> prepare() {
    boost::system::error_code error;
    endpoints_ = tcp::resolver(io_).resolve(target_.host, target_.port, error);
    if (error) return unexpected(ErrorCode::InvalidArgument, "--url", "--url " + options_.url + ": " + error.message());
    model_ = options_.model;
    if (!model_.empty()) return {};
    std::optional<std::string> body;
    asio::co_spawn(io_, get(target_, "/v1/models", options_.timeout),
                   [&](const std::exception_ptr&, std::optional<std::string> answer) { body = std::move(answer); });
    io_.run();
    const nlohmann::json models = nlohmann::json::parse(body.value_or(""), nullptr, false);
    const auto path = nlohmann::json::json_pointer("/data/0/id");
    if (!models.is_object() || !models.contains(path) || !models.at(path).is_string()) {
      return unexpected(ErrorCode::Unavailable, "--url",
                        "--url " + options_.url + ": /v1/models gave no model name" +
                            (body ? "" : ": the server does not answer") + "; is it up? --model names one");
    }
    model_ = models.at(path).get<std::string>();
    return {};
  }

  /// The body of a 200 answer.
  asio::awaitable<std::optional<std::string>> get(Target target, std::string path, Duration timeout) {
    boost::system::error_code error;
    tcp::resolver resolver(io_);
    const auto endpoints = co_await resolver.async_resolve(target.host, target.port, redirect_error(use_awaitable, error));
    if (error) co_return std::nullopt;
    Stream stream(io_);
    stream.expires_after(timeout);
    co_await stream.async_connect(endpoints, redirect_error(use_awaitable, error));
    if (error) co_return std::nullopt;
    auto request = make_request(http::verb::get, target, path, {});
    co_await http::async_write(stream, request, redirect_error(use_awaitable, error));
    if (error) co_return std::nullopt;
    beast::flat_buffer buffer;
    http::response_parser<http::string_body> parser;
    parser.body_limit(body_bytes_max);
    co_await http::async_read(stream, buffer, parser, redirect_error(use_awaitable, error));
    if (error || parser.get().result() != http::status::ok) co_return std::nullopt;
    co_return parser.get().body();
  }

  asio::awaitable<void> send_all() {
    std::mt19937_64 random(options_.seed);
    for (const Arrival& arrival : workload_.arrivals) {
      boost::system::error_code error;
      timer_.expires_at(start_ + arrival.at);
      co_await timer_.async_wait(redirect_error(use_awaitable, error));
      ++sent_;
      phase_ = arrival.phase;
      Outcome outcome;
      outcome.phase = arrival.phase;
      outcome.arrived = arrival.at;
      outcome.lag = now() - arrival.at;
      if (in_flight_ >= static_cast<std::size_t>(options_.max_in_flight)) {
        outcome.failure = "in-flight limit";
        end(std::move(outcome));
        continue;
      }
      ++in_flight_;
      asio::co_spawn(io_, send(std::move(outcome), arrival, body_of(arrival, random)), asio::detached);
    }
    all_sent_ = true;
    if (in_flight_ == 0) finish();
  }

  std::string body_of(const Arrival& arrival, std::mt19937_64& random) const {
    nlohmann::json prompt = nlohmann::json::array();
    const auto vocabulary = static_cast<std::uint64_t>(options_.vocabulary);
    // Ids 0 to 2 are control tokens in many vocabularies.
    const std::uint64_t first = vocabulary > 8 ? 3 : 0;
    // A block's tokens follow from what it is called, so that equal blocks are equal and a seed is still one workload.
    std::optional<std::mt19937_64> block_random;
    for (std::int32_t index = 0; index < arrival.prompt_tokens; ++index) {
      if (workload_.block_tokens > 0 && index % workload_.block_tokens == 0) {
        const auto block = static_cast<std::size_t>(index / workload_.block_tokens);
        block_random.reset();
        if (block < arrival.blocks.size()) block_random.emplace(options_.seed ^ (arrival.blocks[block] * 0x9E3779B97F4A7C15U));
      }
      prompt.push_back(first + (block_random ? *block_random : random)() % (vocabulary - first));
    }
    return nlohmann::json{{"model", model_},
                          {"prompt", std::move(prompt)},
                          {"max_tokens", arrival.output_tokens},
                          {"ignore_eos", true},
                          {"stream", true},
                          {"stream_options", {{"include_usage", true}}},
                          {"temperature", 0}}
        .dump();
  }

  asio::awaitable<void> send(Outcome outcome, Arrival arrival, std::string body) {
    outcome.prompt_tokens = arrival.prompt_tokens;
    outcome.shared_tokens = arrival.shared_tokens;
    StreamReader reader(arrival.output_tokens);
    const std::string failure = co_await exchange(arrival, std::move(body), reader);
    reader.finish(outcome);
    if (!failure.empty()) outcome.failure = failure;
    --in_flight_;
    end(std::move(outcome));
    if (all_sent_ && in_flight_ == 0) finish();
  }

  /// Connects, sends, reads to the end. Returns the kind of failure of the connection or the reply's status; empty when the
  /// stream ended.
  asio::awaitable<std::string> exchange(const Arrival& arrival, std::string body, StreamReader& reader) {
    boost::system::error_code error;
    Stream stream(io_);
    stream.expires_at(start_ + arrival.at + options_.timeout);
    co_await stream.async_connect(endpoints_, redirect_error(use_awaitable, error));
    if (error) co_return failure_of(error, "connect");
    stream.socket().set_option(tcp::no_delay(true), error);
    auto request = make_request(http::verb::post, target_, "/v1/completions", std::move(body));
    co_await http::async_write(stream, request, redirect_error(use_awaitable, error));
    if (error && error != asio::error::broken_pipe && error != asio::error::connection_reset)
      co_return failure_of(error, "disconnected");
    // A server that refuses early may close before it has read the body; its answer may still be there.
    beast::flat_buffer buffer;
    http::response_parser<http::buffer_body> parser;
    parser.body_limit(boost::none);
    co_await http::async_read_header(stream, buffer, parser, redirect_error(use_awaitable, error));
    if (error) co_return failure_of(error, "disconnected");
    if (parser.get().result() != http::status::ok) co_return "http " + std::to_string(parser.get().result_int());
    std::array<char, 16 * 1024> chunk{};
    while (!parser.is_done() && !reader.done()) {
      parser.get().body().data = chunk.data();
      parser.get().body().size = chunk.size();
      co_await http::async_read_some(stream, buffer, parser, redirect_error(use_awaitable, error));
      if (error == http::error::need_buffer) error = {};
      reader.feed({chunk.data(), chunk.size() - parser.get().body().size}, now());
      if (error) co_return reader.done() ? std::string() : failure_of(error, "disconnected");
    }
    co_return std::string();
  }

  void end(Outcome outcome) {
    outcome.ended = now();
    if (!outcome.complete()) ++failed_;
    run_.outcomes.push_back(std::move(outcome));
  }

  void finish() {
    finished_ = true;
    ticker_.cancel();
    poller_.cancel();
  }

  asio::awaitable<void> tick() {
    for (int second = 1; !finished_; ++second) {
      boost::system::error_code error;
      ticker_.expires_at(start_ + std::chrono::seconds(second));
      co_await ticker_.async_wait(redirect_error(use_awaitable, error));
      if (progress_) {
        progress_({.elapsed = now(),
                   .sent = sent_,
                   .in_flight = in_flight_,
                   .ended = run_.outcomes.size(),
                   .failed = failed_,
                   .phase = phase_,
                   .outcomes = run_.outcomes,
                   .settings = run_.settings});
      }
    }
  }

  /// Asks the control port for the engine's effective settings, once a second.
  asio::awaitable<void> watch(Target control) {
    for (int second = 0; !finished_; ++second) {
      const std::optional<std::string> body = co_await get(control, "/apis/rubato.dev/v1alpha1/engines", control_timeout);
      const nlohmann::json engines = nlohmann::json::parse(body.value_or(""), nullptr, false);
      const auto path = nlohmann::json::json_pointer("/items/0/status/settings");
      if (engines.is_object() && engines.contains(path)) {
        std::string settings = engines.at(path).dump();
        if (run_.settings.empty() || run_.settings.back().settings != settings)
          run_.settings.push_back({now(), std::move(settings)});
      }
      if (finished_) break;
      boost::system::error_code error;
      poller_.expires_after(std::chrono::seconds(1));
      co_await poller_.async_wait(redirect_error(use_awaitable, error));
    }
  }

  const Workload& workload_;
  const ClientOptions& options_;
  const std::function<void(const Progress&)>& progress_;
  LoadRun run_;
  Target target_;
  std::string model_;
  std::size_t sent_ = 0;
  std::size_t in_flight_ = 0;
  std::size_t failed_ = 0;
  std::uint32_t phase_ = 0;
  bool all_sent_ = false;
  bool finished_ = false;
  Clock::time_point start_;
  // Last: coroutines that a stop leaves behind are destroyed with it, while everything above still exists.
  asio::io_context io_{1};
  tcp::resolver::results_type endpoints_;
  asio::steady_timer timer_;
  asio::steady_timer ticker_;
  asio::steady_timer poller_;
};

}  // namespace

Result<LoadRun> run_load(const Workload& workload, const ClientOptions& options,
                         const std::function<void(const Progress&)>& progress, std::stop_token stop) {
  const Result<Target> target = parse_url("--url", options.url);
  if (!target) return Unexpected(target.error());
  std::optional<Target> control;
  if (!options.control.empty()) {
    Result<Target> parsed = parse_url("--control", options.control);
    if (!parsed) return Unexpected(std::move(parsed).error());
    control = *std::move(parsed);
  }
  try {
    return Load(workload, options, progress).run(*target, control, stop);
  } catch (const std::exception& error) {
    return unexpected(ErrorCode::Internal, std::string("replay stopped: ") + error.what());
  }
}

}  // namespace rubato::replay
