// SPDX-License-Identifier: Apache-2.0
// The route table: matching, parameters, 404, 405 and OPTIONS. Also the text helpers of daemon/http/message.h.
#include "daemon/http/router.h"

#include <gtest/gtest.h>

#include "daemon/http/message.h"

namespace rubato::http {
namespace {

class RecordingExchange final : public Exchange {
 public:
  void respond(Response response) override { answer = std::move(response); }
  void begin_stream(Response) override {}
  bool write(std::string) override { return true; }
  void end_stream() override {}
  void abort_stream() override {}
  void on_close(std::function<void()>) override {}
  void post(std::function<void()>) override {}
  void set_heartbeat(std::string, std::chrono::milliseconds) override {}
  Response answer;
};

class RouterTest : public testing::Test {
 protected:
  RouterTest()
      : router_(
            [](int status, const std::string& message) {
              return Response{.status = status, .content_type = "application/json", .body = message, .headers = {}};
            },
            [](const Request&) {
              return std::vector<std::pair<std::string, std::string>>{{"X-Options", "yes"}};
            }) {
    add("GET", "/v1/models");
    add("GET", "/v1/models/{id...}");
    add("GET", "/engines/{name}");
    add("PATCH", "/engines/{name}");
    add("GET", "/engines/{name}/status");
    add("GET", "/");
  }
  void add(const std::string& method, const std::string& pattern) {
    router_.add(
        method, pattern,
        [route = method + " " + pattern](const Request&, const std::shared_ptr<Exchange>& exchange, const PathParameters& found) {
          std::string text = route;
          for (const auto& [name, value] : found) text += " " + name + "=" + value;
          exchange->respond({.status = 200, .content_type = "text/plain", .body = text, .headers = {}});
        });
  }
  Response ask(const std::string& method, const std::string& path) {
    auto exchange = std::make_shared<RecordingExchange>();
    router_.handle({.method = method, .path = path, .query = {}, .headers = {}, .body = {}, .peer = {}}, exchange);
    return exchange->answer;
  }
  static std::string header(const Response& response, const std::string& name) {
    for (const auto& [key, value] : response.headers) {
      if (key == name) return value;
    }
    return {};
  }
  Router router_;
};

TEST_F(RouterTest, literal_and_parameter_segments) {
  EXPECT_EQ(ask("GET", "/v1/models").body, "GET /v1/models");
  EXPECT_EQ(ask("GET", "/v1/models/org/name").body, "GET /v1/models/{id...} id=org/name");
  EXPECT_EQ(ask("GET", "/engines/chat").body, "GET /engines/{name} name=chat");
  EXPECT_EQ(ask("PATCH", "/engines/chat").body, "PATCH /engines/{name} name=chat");
  EXPECT_EQ(ask("GET", "/engines/chat/status").body, "GET /engines/{name}/status name=chat");
  EXPECT_EQ(ask("GET", "/").body, "GET /");
}

TEST_F(RouterTest, head_goes_to_the_get_row) {
  EXPECT_EQ(ask("HEAD", "/v1/models").body, "GET /v1/models");
}

TEST_F(RouterTest, unknown_paths_are_404) {
  for (const char* path :
       {"/v1", "/v1/models/", "/engines/", "/engines", "/engines/a/b", "/engines/chat/status/", "//", "/v1/modelsx"}) {
    EXPECT_EQ(ask("GET", path).status, 404) << path;
  }
}

TEST_F(RouterTest, other_methods_are_405_with_allow) {
  const Response response = ask("DELETE", "/engines/chat");
  EXPECT_EQ(response.status, 405);
  EXPECT_EQ(header(response, "Allow"), "GET, HEAD, OPTIONS, PATCH");
}

TEST_F(RouterTest, options_lists_the_methods) {
  const Response response = ask("OPTIONS", "/engines/chat");
  EXPECT_EQ(response.status, 204);
  EXPECT_EQ(header(response, "Allow"), "GET, HEAD, OPTIONS, PATCH");
  EXPECT_EQ(header(response, "X-Options"), "yes");
  EXPECT_EQ(ask("OPTIONS", "*").status, 204);
  EXPECT_EQ(ask("OPTIONS", "/nowhere").status, 404);
}

TEST(HttpMessage, targets) {
  EXPECT_EQ(parse_target("/a?b=c")->query.at("b"), "c");
  EXPECT_EQ(parse_target("http://host:80/a?b")->path, "/a");
  EXPECT_EQ(parse_target("http://host")->path, "/");
  EXPECT_EQ(parse_target("*")->path, "*");
  EXPECT_EQ(parse_target("/a?b=1&&c=%26")->query.at("c"), "&");
  for (const char* bad : {"a", "/%", "/%4", "/%g0", "/a%00", "/?x=%f", "host:80"})
    EXPECT_FALSE(parse_target(bad).has_value()) << bad;
}

TEST(HttpMessage, dates) {
  EXPECT_EQ(format_date(784111777), "Sun, 06 Nov 1994 08:49:37 GMT");
  EXPECT_EQ(format_date(0), "Thu, 01 Jan 1970 00:00:00 GMT");
}

TEST(HttpMessage, no_content_has_no_length) {
  const std::string head = format_head({.status = 204, .content_type = {}, .body = {}, .headers = {}}, {.date = "now"});
  EXPECT_EQ(head, "HTTP/1.1 204 No Content\r\nDate: now\r\nConnection: keep-alive\r\n\r\n");
}

}  // namespace
}  // namespace rubato::http
