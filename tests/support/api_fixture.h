// SPDX-License-Identifier: Apache-2.0
// The OpenAI API on a real port over a FakeServing and a byte tokenizer, with the answers of streams taken apart.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "daemon/openai/api.h"
#include "daemon/openai/error_answer.h"
#include "tests/support/fake_serving.h"
#include "tests/support/raw_client.h"

namespace rubato::test {

using openai::Json;

inline openai::ModelInfo byte_model() {
  return {.names = {"tiny", "org/alias"},
          .created = 1'700'000'000,
          .max_model_len = 512,
          .vocabulary = 320,
          .chat_form = text::ChatForm::Plain,
          .chat_end_tokens = {}};
}

class Api {
 public:
  explicit Api(FakeServing::Script script = FakeServing::spelling("hello world"), openai::ApiOptions options = {},
               http::ServerOptions server_options = {}, openai::ModelInfo model = byte_model())
      : serving_(std::move(script)),
        tokenizer_(text::Tokenizer::make_bytes(320)),
        api_(serving_, *tokenizer_, std::move(model), with_defaults(std::move(options))),
        router_([](int status, std::string message) { return openai::error_response(status, std::move(message)); },
                openai::preflight_headers) {
    api_.add_routes(router_);
    server_options.listen = "127.0.0.1:0";
    if (server_options.threads < 2) server_options.threads = 2;
    auto started = http::Server::start(
        server_options,
        [this](http::Request request, std::shared_ptr<http::Exchange> exchange) {
          router_.handle(std::move(request), std::move(exchange));
        },
        [](int status, std::string message) { return openai::error_response(status, std::move(message)); });
    CHECK(started.has_value(), started.error().message);
    server_ = std::move(*started);
  }
  ~Api() {
    serving_.stop_thread();
    server_->stop();
  }

  FakeServing& serving() { return serving_; }
  http::Server& server() { return *server_; }
  [[nodiscard]] int port() const { return server_->port(); }

  /// One request on a connection of its own, answered to its end.
  RawReply post(std::string_view path, const Json& body, std::string_view headers = {}) {
    return post_raw(path, body.dump(), headers);
  }
  RawReply post_raw(std::string_view path, std::string_view body, std::string_view headers = {}) {
    RawClient client(port());
    client.send(post_text(path, body, headers));
    return client.read_reply();
  }

 private:
  static openai::ApiOptions with_defaults(openai::ApiOptions options) {
    if (options.entropy == 0) options.entropy = 42;
    if (!options.unix_time) options.unix_time = [] { return std::int64_t{1'800'000'000}; };
    return options;
  }

  FakeServing serving_;
  std::unique_ptr<text::Tokenizer> tokenizer_;
  openai::OpenAiApi api_;
  http::Router router_;
  std::unique_ptr<http::Server> server_;
};

/// A stream taken apart. Every check that holds for all streams is made here.
struct SseAnswer {
  std::vector<Json> events;  // in order, without [DONE]
  bool done = false;         // [DONE] came, and came last
  std::map<int, std::string> texts;
  std::map<int, std::vector<std::string>> finishes;
  std::map<int, int> roles;

  explicit SseAnswer(const std::string& body) {
    std::size_t at = 0;
    while (at < body.size()) {
      const std::size_t end = body.find("\n\n", at);
      EXPECT_NE(end, std::string::npos) << "event without its blank line: " << body.substr(at);
      if (end == std::string::npos) break;
      take(body.substr(at, end - at));
      at = end + 2;
    }
  }

 private:
  void take(const std::string& event) {
    if (event.starts_with(":")) return;
    EXPECT_TRUE(event.starts_with("data: ")) << event;
    EXPECT_FALSE(done) << "after [DONE]: " << event;
    if (event == "data: [DONE]") {
      done = true;
      return;
    }
    Json json = Json::parse(event.substr(6), nullptr, false);
    EXPECT_FALSE(json.is_discarded()) << event;
    for (const Json& choice : json.value("choices", Json::array())) {
      const int index = choice["index"];
      EXPECT_TRUE(finishes[index].empty()) << "after its finish: " << event;
      if (choice.contains("text")) texts[index] += choice["text"].get<std::string>();
      if (choice.contains("delta")) {
        texts[index] += choice["delta"].value("content", "");
        if (choice["delta"].contains("role")) ++roles[index];
        EXPECT_EQ(roles[index], 1) << "the role comes once, first: " << event;
      }
      if (!choice["finish_reason"].is_null()) finishes[index].push_back(choice["finish_reason"]);
    }
    events.push_back(std::move(json));
  }
};

/// An OpenAI-shaped error, or what is wrong with it.
inline Json error_of(const RawReply& reply) {
  EXPECT_TRUE(reply.complete);
  EXPECT_EQ(reply.headers.count("access-control-allow-origin"), 1U);
  const Json body = Json::parse(reply.body, nullptr, false);
  EXPECT_TRUE(body.is_object() && body.contains("error") && body["error"].contains("message") && body["error"].contains("type") &&
              body["error"].contains("param") && body["error"].contains("code"))
      << reply.body;
  return body.is_object() ? body.value("error", Json::object()) : Json::object();
}

}  // namespace rubato::test
