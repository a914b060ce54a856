// SPDX-License-Identifier: Apache-2.0
// The OpenAI API over a real port: whole answers, refusals, models, CORS, keys, SLO headers. Streams have tests of their own.
#include "daemon/openai/api.h"

#include <gmock/gmock.h>

#include <algorithm>
#include <filesystem>

#include "tests/support/api_fixture.h"

namespace rubato {
namespace {

using openai::Json;
using test::Api;
using test::error_of;
using test::eventually;
using test::FakeServing;
using test::get_text;
using test::post_text;
using test::RawClient;

/// An API whose engine runs by itself.
struct RunningApi : Api {
  template <class... Arguments>
  explicit RunningApi(Arguments&&... arguments) : Api(std::forward<Arguments>(arguments)...) {
    serving().start_thread();
  }
};

Json ids(std::size_t count) {
  return Json(std::vector<int>(count, 65));
}

TEST(OpenAiApi, completion_has_openais_form) {
  RunningApi api;
  const auto reply = api.post("/v1/completions", {{"model", "tiny"}, {"prompt", "abc"}});
  ASSERT_EQ(reply.status, 200) << reply.body;
  EXPECT_EQ(reply.headers.at("content-type"), "application/json");
  const Json body = Json::parse(reply.body);
  EXPECT_TRUE(body["id"].get<std::string>().starts_with("cmpl-"));
  EXPECT_EQ(body["object"], "text_completion");
  EXPECT_EQ(body["created"], 1'800'000'000);
  EXPECT_EQ(body["model"], "tiny");
  EXPECT_EQ(body["choices"], Json::parse(R"([{"index":0,"text":"hello world","logprobs":null,"finish_reason":"stop"}])"));
  // The end token was generated too, and counts.
  EXPECT_EQ(
      body["usage"],
      Json::parse(R"({"prompt_tokens":3,"completion_tokens":12,"total_tokens":15,"prompt_tokens_details":{"cached_tokens":0}})"));
}

TEST(OpenAiApi, chat_has_openais_form) {
  RunningApi api;
  const auto reply =
      api.post("/v1/chat/completions", {{"messages", {{{"role", "user"}, {"content", "hi"}}}}, {"max_completion_tokens", 5}});
  ASSERT_EQ(reply.status, 200) << reply.body;
  const Json body = Json::parse(reply.body);
  EXPECT_TRUE(body["id"].get<std::string>().starts_with("chatcmpl-"));
  EXPECT_EQ(body["object"], "chat.completion");
  EXPECT_EQ(
      body["choices"],
      Json::parse(R"([{"index":0,"message":{"role":"assistant","content":"hello"},"logprobs":null,"finish_reason":"length"}])"));
  EXPECT_EQ(body["usage"]["completion_tokens"], 5);
  EXPECT_EQ(body["usage"]["prompt_tokens"], api.serving().requests().at(0).prompt.size());
}

TEST(OpenAiApi, default_answer_length_is_16_for_completions_and_the_rest_of_the_context_for_chat) {
  RunningApi api;
  api.post("/v1/completions", {{"prompt", ids(10)}});
  api.post("/v1/completions", {{"prompt", ids(505)}});
  api.post("/v1/chat/completions", {{"messages", {{{"role", "user"}, {"content", "hi"}}}}});
  const auto requests = api.serving().requests();
  EXPECT_EQ(requests.at(0).sampling.max_new_tokens, 16);
  EXPECT_EQ(requests.at(1).sampling.max_new_tokens, 7);
  EXPECT_EQ(requests.at(2).sampling.max_new_tokens, 512 - static_cast<int>(requests.at(2).prompt.size()));
}

TEST(OpenAiApi, prompt_at_the_limit_and_around_it) {
  RunningApi api(FakeServing::spelling(std::string(1000, 'x')));
  for (const std::size_t prompt : {509U, 510U, 511U, 512U, 513U, 514U}) {
    for (const std::size_t tokens : {1U, 2U, 3U, 512U}) {
      const auto reply = api.post("/v1/completions", {{"prompt", ids(prompt)}, {"max_tokens", tokens}});
      if (prompt + tokens <= 512) {
        ASSERT_EQ(reply.status, 200) << prompt << "+" << tokens;
        const Json usage = Json::parse(reply.body)["usage"];
        EXPECT_EQ(usage["prompt_tokens"], prompt);
        EXPECT_EQ(usage["completion_tokens"], tokens);
      } else {
        ASSERT_EQ(reply.status, 400) << prompt << "+" << tokens;
        const Json error = error_of(reply);
        EXPECT_EQ(error["param"], prompt >= 512 ? "prompt" : "max_tokens");
        EXPECT_NE(error["message"].get<std::string>().find("512"), std::string::npos) << "names the limit";
      }
    }
  }
  const auto chat = api.post("/v1/chat/completions", {{"messages", {{{"role", "user"}, {"content", std::string(600, 'x')}}}}});
  EXPECT_EQ(chat.status, 400);
  EXPECT_EQ(error_of(chat)["param"], "messages");
}

TEST(OpenAiApi, text_that_cannot_fit_is_refused_before_it_is_tokenised) {
  Api api;
  const std::string megabytes(8 << 20, 'a');
  const auto completion = api.post("/v1/completions", {{"prompt", megabytes}});
  EXPECT_EQ(completion.status, 400);
  EXPECT_THAT(completion.body, ::testing::HasSubstr("8388608 bytes of text cannot fit"));
  EXPECT_EQ(Json::parse(completion.body)["error"]["param"], "prompt");
  const auto chat = api.post("/v1/chat/completions", {{"messages", {{{"role", "user"}, {"content", megabytes}}}}});
  EXPECT_EQ(chat.status, 400);
  EXPECT_EQ(Json::parse(chat.body)["error"]["param"], "messages");
  // What might fit is tokenised and judged by its tokens.
  EXPECT_THAT(api.post("/v1/completions", {{"prompt", std::string(600, 'a')}}).body, ::testing::HasSubstr("512"));
}

TEST(OpenAiApi, chat_is_refused_where_the_template_is_of_an_unknown_form) {
  openai::ModelInfo model = test::byte_model();
  model.chat_form.reset();
  RunningApi api(FakeServing::spelling("hello"), openai::ApiOptions{}, http::ServerOptions{}, model);
  const auto chat = api.post("/v1/chat/completions", {{"messages", {{{"role", "user"}, {"content", "hi"}}}}});
  EXPECT_EQ(chat.status, 400);
  EXPECT_EQ(error_of(chat)["param"], "messages");
  EXPECT_THAT(chat.body, ::testing::HasSubstr("/v1/completions"));
  EXPECT_EQ(api.post("/v1/completions", {{"prompt", "hi"}}).status, 200);
}

TEST(OpenAiApi, refusals_name_the_parameter_and_nothing_is_submitted) {
  Api api;
  const auto refused = [&](const char* path, const std::string& body, int status, const Json& param) {
    const auto reply = api.post_raw(path, body);
    EXPECT_EQ(reply.status, status) << body;
    EXPECT_EQ(error_of(reply)["param"], param) << body;
  };
  refused("/v1/completions", R"({"prompt":""})", 400, "prompt");
  refused("/v1/completions", R"({"prompt":[]})", 400, "prompt");
  refused("/v1/completions", R"({"prompt":null})", 400, "prompt");
  refused("/v1/completions", R"({"prompt":[320]})", 400, "prompt");
  refused("/v1/completions", R"({"prompt":"a","n":0})", 400, "n");
  refused("/v1/completions", R"({"prompt":"a","n":0,"stream":true})", 400, "n");
  refused("/v1/completions", R"({"prompt":"a","min_tokens":17})", 400, "min_tokens");
  refused("/v1/completions", R"({"prompt":"a","model":"gpt-4"})", 404, "model");
  refused("/v1/completions", "\xff\xfe", 400, nullptr);
  refused("/v1/completions", R"({"prompt":"\ud83d"})", 400, nullptr);
  refused("/v1/chat/completions", R"({"messages":[]})", 400, "messages");
  refused("/v1/chat/completions", R"({"messages":[{"role":"user","content":null}]})", 400, "messages[0].content");
  refused("/v1/chat/completions", R"({"messages":[{"role":"user","content":"a"}],"tools":[{"type":"function"}]})", 400, "tools");
  EXPECT_TRUE(api.serving().requests().empty());
}

TEST(OpenAiApi, a_refusal_keeps_the_connection_usable) {
  RunningApi api;
  RawClient client(api.port());
  ASSERT_TRUE(client.send(post_text("/v1/completions", R"({"prompt":"a","n":1000,"stream":true})") +
                          post_text("/v1/completions", R"({"prompt":"a"})")));
  const auto refused = client.read_reply();
  EXPECT_EQ(refused.status, 400);
  EXPECT_EQ(refused.headers.at("content-type"), "application/json");
  EXPECT_EQ(client.read_reply().status, 200);
}

TEST(OpenAiApi, n_choices_come_complete_and_the_prompt_counts_once) {
  RunningApi api;
  const auto reply = api.post("/v1/completions", {{"prompt", "abc"}, {"n", 4}, {"seed", 7}});
  const Json body = Json::parse(reply.body);
  ASSERT_EQ(body["choices"].size(), 4U);
  for (int i = 0; i < 4; ++i) {
    EXPECT_EQ(body["choices"][static_cast<std::size_t>(i)]["index"], i);
    EXPECT_EQ(body["choices"][static_cast<std::size_t>(i)]["finish_reason"], "stop");
  }
  EXPECT_EQ(
      body["usage"],
      Json::parse(R"({"prompt_tokens":3,"completion_tokens":48,"total_tokens":51,"prompt_tokens_details":{"cached_tokens":0}})"));
}

TEST(OpenAiApi, prompts_of_an_array_are_sets_of_choices) {
  RunningApi api([](const engine::Request& request, std::int32_t index) -> std::optional<TokenId> {
    return index < 2 ? std::optional<TokenId>(request.prompt.front()) : std::nullopt;
  });
  const auto reply = api.post("/v1/completions", {{"prompt", {"a", "bc"}}, {"n", 2}});
  const Json body = Json::parse(reply.body);
  std::vector<std::string> texts;
  for (const Json& choice : body["choices"]) texts.push_back(choice["text"]);
  EXPECT_EQ(texts, (std::vector<std::string>{"aa", "aa", "bb", "bb"}));
  EXPECT_EQ(body["usage"]["prompt_tokens"], 3);
}

TEST(OpenAiApi, seeds_repeat_when_given_and_differ_between_choices_and_requests) {
  RunningApi api;
  for (int i = 0; i < 2; ++i) api.post("/v1/completions", {{"prompt", "a"}, {"n", 3}, {"seed", 7}});
  for (int i = 0; i < 2; ++i) api.post("/v1/completions", {{"prompt", "a"}});
  const auto requests = api.serving().requests();
  ASSERT_EQ(requests.size(), 8U);
  std::vector<std::uint64_t> seeds;
  for (const auto& request : requests) seeds.push_back(request.sampling.seed);
  EXPECT_EQ(seeds[0], 7U);
  EXPECT_TRUE(std::equal(seeds.begin(), seeds.begin() + 3, seeds.begin() + 3)) << "same request, same seeds";
  EXPECT_NE(seeds[0], seeds[1]);
  EXPECT_NE(seeds[1], seeds[2]);
  EXPECT_NE(seeds[6], seeds[7]);
}

TEST(OpenAiApi, parameters_reach_the_engine) {
  RunningApi api;
  api.post("/v1/completions", {{"prompt", ids(3)}, {"temperature", 0}, {"top_k", 4}, {"stop_token_ids", {9}}, {"logprobs", 2}});
  const auto request = api.serving().requests().at(0);
  EXPECT_EQ(request.prompt, (std::vector<TokenId>{65, 65, 65}));
  EXPECT_EQ(request.sampling.temperature, 0);
  EXPECT_EQ(request.sampling.top_k, 4);
  EXPECT_EQ(request.sampling.stop_token_ids, (std::vector<TokenId>{9}));
  EXPECT_EQ(request.sampling.top_logprobs, 2);
}

TEST(OpenAiApi, chat_end_tokens_end_a_chat_unless_ignored) {
  auto model = test::byte_model();
  model.chat_end_tokens = {300};
  RunningApi api(FakeServing::spelling("x"), openai::ApiOptions{}, http::ServerOptions{}, model);
  const Json messages = {{{"role", "user"}, {"content", "hi"}}};
  api.post("/v1/chat/completions", {{"messages", messages}});
  api.post("/v1/chat/completions", {{"messages", messages}, {"ignore_eos", true}, {"max_tokens", 2}});
  api.post("/v1/completions", {{"prompt", "hi"}});
  const auto requests = api.serving().requests();
  EXPECT_EQ(requests.at(0).sampling.stop_token_ids, (std::vector<TokenId>{300}));
  EXPECT_TRUE(requests.at(1).sampling.stop_token_ids.empty());
  EXPECT_TRUE(requests.at(2).sampling.stop_token_ids.empty());
}

TEST(OpenAiApi, logprobs_of_completions_and_chat) {
  RunningApi api(FakeServing::spelling("ab"));
  const Json completion = Json::parse(api.post("/v1/completions", {{"prompt", "p"}, {"logprobs", 2}}).body);
  EXPECT_EQ(completion["choices"][0]["logprobs"], Json::parse(R"({"tokens":["a","b"],"token_logprobs":[-0.5,-0.5],
      "top_logprobs":[{"a":-0.5,"b":-1.5},{"a":-0.5,"b":-1.5}],"text_offset":[0,1]})"));
  const Json chat =
      Json::parse(api.post("/v1/chat/completions",
                           {{"messages", {{{"role", "user"}, {"content", "hi"}}}}, {"logprobs", true}, {"top_logprobs", 1}})
                      .body);
  EXPECT_EQ(chat["choices"][0]["logprobs"], Json::parse(R"({"content":[
      {"token":"a","logprob":-0.5,"bytes":[97],"top_logprobs":[{"token":"a","logprob":-0.5,"bytes":[97]}]},
      {"token":"b","logprob":-0.5,"bytes":[98],"top_logprobs":[{"token":"a","logprob":-0.5,"bytes":[97]}]}]})"));
}

TEST(OpenAiApi, engine_failure_of_a_whole_answer_is_an_error_status) {
  Api api(FakeServing::spelling(std::string(100, 'x')));
  api.serving().fail_at(1, 5, Error{.code = ErrorCode::DeviceLost, .field = {}, .message = "the device broke"});
  api.serving().start_thread();
  const auto reply = api.post("/v1/completions", {{"prompt", "p"}, {"n", 3}, {"max_tokens", 100}});
  EXPECT_EQ(reply.status, 503);
  EXPECT_EQ(error_of(reply)["type"], "server_error");
  EXPECT_EQ(reply.headers.count("retry-after"), 1U);
  EXPECT_TRUE(eventually([&] { return api.serving().outstanding() == 0; })) << "siblings are cancelled";
  EXPECT_EQ(api.serving().cancelled(Outcome::Failed) + api.serving().ended_by_itself(), 3);
}

TEST(OpenAiApi, full_queue_is_429_and_draining_503_both_with_retry_after) {
  Api api;
  api.serving().set_capacity(3);
  const auto full = api.post("/v1/completions", {{"prompt", "p"}, {"n", 4}, {"stream", true}});
  EXPECT_EQ(full.status, 429);
  EXPECT_EQ(error_of(full)["type"], "rate_limit_error");
  EXPECT_EQ(full.headers.count("retry-after"), 1U);
  api.serving().begin_drain();
  const auto draining = api.post("/v1/completions", {{"prompt", "p"}});
  EXPECT_EQ(draining.status, 503);
  EXPECT_EQ(draining.headers.count("retry-after"), 1U);
}

TEST(OpenAiApi, models) {
  Api api;
  RawClient client(api.port());
  const auto get = [&](std::string_view path) {
    client.send(get_text(path));
    return client.read_reply();
  };
  const Json list = Json::parse(get("/v1/models").body);
  ASSERT_EQ(list["data"].size(), 2U);
  EXPECT_EQ(list["data"][0], Json::parse(R"({"id":"tiny","object":"model","created":1700000000,"owned_by":"rubato","root":"tiny",
      "max_model_len":512})"));
  EXPECT_EQ(Json::parse(get("/v1/models/org/alias").body)["id"], "org/alias");
  EXPECT_EQ(Json::parse(get("/v1/models/org%2Falias").body)["root"], "tiny");
  const auto missing = get("/v1/models/none");
  EXPECT_EQ(missing.status, 404);
  EXPECT_EQ(error_of(missing)["code"], "model_not_found");
  EXPECT_EQ(error_of(get("/v1/nothing"))["type"], "not_found_error");
  const auto wrong_method = get("/v1/completions");
  EXPECT_EQ(wrong_method.status, 405);
  EXPECT_EQ(wrong_method.headers.at("allow"), "OPTIONS, POST");
  error_of(wrong_method);
}

TEST(OpenAiApi, preflight_passes_without_a_key_and_everything_else_needs_it) {
  openai::ApiOptions options;
  options.api_keys = {"first", "secret"};
  RunningApi api(FakeServing::spelling("x"), options);
  RawClient client(api.port());
  ASSERT_TRUE(client.send(
      "OPTIONS /v1/chat/completions HTTP/1.1\r\nHost: t\r\nOrigin: http://a\r\nAccess-Control-Request-Method: POST\r\n"
      "Access-Control-Request-Headers: authorization, content-type, x-own\r\n\r\n"));
  const auto preflight = client.read_reply();
  EXPECT_EQ(preflight.status, 204);
  EXPECT_EQ(preflight.headers.at("access-control-allow-origin"), "*");
  EXPECT_NE(preflight.headers.at("access-control-allow-headers").find("authorization"), std::string::npos);
  EXPECT_NE(preflight.headers.at("access-control-allow-headers").find("x-own"), std::string::npos);
  EXPECT_NE(preflight.headers.at("access-control-allow-methods").find("POST"), std::string::npos);
  const Json body = {{"prompt", "p"}};
  for (const char* bad : {"", "Authorization: Bearer wrong\r\n", "Authorization: Bearer \r\n", "Authorization: secret\r\n",
                          "Authorization: Basic secret\r\n", "Authorization: Bearer secretx\r\n"}) {
    const auto reply = api.post("/v1/completions", body, bad);
    EXPECT_EQ(reply.status, 401) << bad;
    EXPECT_EQ(error_of(reply)["code"], "invalid_api_key");
  }
  EXPECT_EQ(api.post("/v1/completions", body, "Authorization: Bearer secret\r\n").status, 200);
  EXPECT_EQ(api.post("/v1/completions", body, "Authorization: bearer first\r\n").status, 200);
}

TEST(OpenAiApi, slo_headers_set_the_targets) {
  RunningApi api;
  api.serving().set_objectives({.ttft = std::chrono::milliseconds(700), .itl = std::chrono::milliseconds(70), .attainment = 99});
  const Json body = {{"prompt", "p"}};
  api.post("/v1/completions", body);
  api.post("/v1/completions", body, "x-slo-ttft-ms: 100\r\nX-SLO-TPOT-MS: 10\r\n");
  api.post("/v1/completions", body, "x-llm-d-slo-ttft-ms: 200\r\nx-slo-ttft-ms: 1\r\n");
  const auto requests = api.serving().requests();
  EXPECT_EQ(requests.at(0).ttft_target, std::chrono::milliseconds(700));
  EXPECT_EQ(requests.at(0).itl_target, std::chrono::milliseconds(70));
  EXPECT_EQ(requests.at(1).ttft_target, std::chrono::milliseconds(100));
  EXPECT_EQ(requests.at(1).itl_target, std::chrono::milliseconds(10));
  EXPECT_EQ(requests.at(2).ttft_target, std::chrono::milliseconds(200));
  for (const char* bad : {"0", "-1", "1.5", "10ms", "99999999999999999999", "3600001", "abc"}) {
    const auto reply = api.post("/v1/completions", body, std::string("x-slo-ttft-ms: ") + bad + "\r\n");
    EXPECT_EQ(reply.status, 400) << bad;
    EXPECT_EQ(error_of(reply)["param"], "x-slo-ttft-ms");
  }
}

TEST(OpenAiApi, request_id_is_echoed_or_made) {
  RunningApi api;
  const Json body = {{"prompt", "p"}};
  EXPECT_EQ(api.post("/v1/completions", body, "X-Request-Id: abc-1\r\n").headers.at("x-request-id"), "abc-1");
  const auto made = api.post("/v1/completions", body).headers.at("x-request-id");
  EXPECT_TRUE(made.starts_with("req-")) << made;
  EXPECT_NE(made, api.post("/v1/completions", body).headers.at("x-request-id"));
  EXPECT_TRUE(api.post("/v1/completions", body, std::string("X-Request-Id: ").append(200, 'x') + "\r\n")
                  .headers.at("x-request-id")
                  .starts_with("req-"));
}

TEST(OpenAiApi, client_gone_before_a_whole_answer_cancels_every_choice) {
  Api api;
  RawClient client(api.port());
  ASSERT_TRUE(client.send(post_text("/v1/completions", R"({"prompt":"p","n":3})")));
  ASSERT_TRUE(eventually([&] { return api.serving().outstanding() == 3; }));
  api.serving().step();
  client.close();
  EXPECT_TRUE(eventually([&] { return api.serving().outstanding() == 0; }));
  EXPECT_EQ(api.serving().cancelled(Outcome::Aborted), 3);
}

TEST(OpenAiApi, a_begin_token_written_out_in_the_prompt_is_not_doubled) {
  // The byte tokenizer has no begin token; the rule itself is checked where one exists.
  const std::filesystem::path folder = RUBATO_SOURCE_DIR "/../shared/data/models/stories260k";
  if (!std::filesystem::exists(folder / "tokenizer.json")) GTEST_SKIP() << "no " << folder;
  auto tokenizer = text::Tokenizer::load(folder);
  ASSERT_TRUE(tokenizer.has_value()) << tokenizer.error().message;
  ASSERT_TRUE((*tokenizer)->begin_token().has_value());
  FakeServing serving;
  serving.start_thread();
  auto model = test::byte_model();
  model.vocabulary = (*tokenizer)->vocabulary();
  openai::OpenAiApi api(serving, **tokenizer, model);
  http::Router router([](int status, std::string message) { return openai::error_response(status, std::move(message)); });
  api.add_routes(router);
  http::ServerOptions options;
  options.listen = "127.0.0.1:0";
  auto server = http::Server::start(
      options,
      [&](http::Request request, std::shared_ptr<http::Exchange> exchange) {
        router.handle(std::move(request), std::move(exchange));
      },
      [](int status, std::string message) { return openai::error_response(status, std::move(message)); });
  ASSERT_TRUE(server.has_value());
  RawClient client((*server)->port());
  for (const char* prompt :
       {R"({"prompt":"Once"})", R"({"prompt":"<s>Once"})", R"({"prompt":"Once","add_special_tokens":false})"}) {
    client.send(post_text("/v1/completions", prompt));
    ASSERT_EQ(client.read_reply().status, 200);
  }
  const auto requests = serving.requests();
  const auto begins = [&](std::size_t i) {
    return std::count(requests[i].prompt.begin(), requests[i].prompt.end(), *(*tokenizer)->begin_token());
  };
  EXPECT_EQ(begins(0), 1);
  EXPECT_EQ(begins(1), 1);
  EXPECT_EQ(begins(2), 0);
  serving.stop_thread();
  (*server)->stop();
}

}  // namespace
}  // namespace rubato
