// SPDX-License-Identifier: Apache-2.0
// Streams of the OpenAI API: events, stop strings and UTF-8 over token cuts, terminal states, many clients, clients that leave.
#include <algorithm>
#include <thread>

#include "tests/support/api_fixture.h"

namespace rubato {
namespace {

using openai::Json;
using test::Api;
using test::eventually;
using test::FakeServing;
using test::numbered;
using test::post_text;
using test::RawClient;
using test::RawReply;
using test::SseAnswer;

constexpr const char* completions = "/v1/completions";
constexpr const char* chats = "/v1/chat/completions";

Json chat_body(Json more) {
  more["messages"] = {{{"role", "user"}, {"content", "hi"}}};
  return more;
}
Json streaming(Json body) {
  body["stream"] = true;
  return body;
}

/// Streamed and whole text of one request must be the same bytes; returns the whole text and its finish reason.
std::pair<std::string, std::string> both_ways(const FakeServing::Script& script, Json body, const char* path = completions) {
  Api api(script);
  api.serving().start_thread();
  if (!body.contains("max_tokens")) body["max_tokens"] = 200;
  if (path == completions) body["prompt"] = "p";
  if (path == chats) body = chat_body(body);
  const RawReply whole_reply = api.post(path, body);
  EXPECT_EQ(whole_reply.status, 200) << whole_reply.body;
  const Json whole = Json::parse(whole_reply.body);
  const RawReply reply = api.post(path, streaming(body));
  EXPECT_TRUE(reply.complete);
  const SseAnswer stream(reply.body);
  EXPECT_TRUE(stream.done);
  const Json& choice = whole["choices"][0];
  const std::string text = path == chats ? choice["message"]["content"] : choice["text"];
  EXPECT_EQ(stream.texts.at(0), text);
  EXPECT_EQ(stream.finishes.at(0), (std::vector<std::string>{choice["finish_reason"]}));
  EXPECT_EQ(api.serving().outstanding(), 0U);
  return {text, choice["finish_reason"]};
}

/// Byte tokens of text, then it goes on with dots for ever.
FakeServing::Script endless(const std::string& text) {
  return [text](const engine::Request&, std::int32_t index) -> std::optional<TokenId> {
    return static_cast<std::size_t>(index) < text.size() ? static_cast<unsigned char>(text[static_cast<std::size_t>(index)])
                                                         : '.';
  };
}

TEST(SseStream, completion_events_have_openais_form) {
  Api api(FakeServing::spelling("ab"));
  api.serving().start_thread();
  const auto reply = api.post(completions, streaming({{"prompt", "p"}}));
  EXPECT_EQ(reply.headers.at("content-type"), "text/event-stream");
  EXPECT_EQ(reply.headers.at("cache-control"), "no-cache");
  const SseAnswer stream(reply.body);
  ASSERT_EQ(stream.events.size(), 3U);
  EXPECT_EQ(stream.events[0]["object"], "text_completion");
  EXPECT_EQ(stream.events[0]["choices"], Json::parse(R"([{"index":0,"text":"a","logprobs":null,"finish_reason":null}])"));
  EXPECT_EQ(stream.events[2]["choices"], Json::parse(R"([{"index":0,"text":"","logprobs":null,"finish_reason":"stop"}])"));
  EXPECT_EQ(stream.events[0]["id"], stream.events[2]["id"]);
  EXPECT_TRUE(stream.done);
}

TEST(SseStream, first_chat_delta_has_the_role_and_comes_with_the_first_token) {
  Api api(FakeServing::spelling("ab"));
  RawClient client(api.port());
  ASSERT_TRUE(client.send(post_text(chats, streaming(chat_body({})).dump())));
  EXPECT_EQ(client.read_head().status, 200) << "the head is there before any token";
  EXPECT_TRUE(client.buffer().empty());
  ASSERT_TRUE(eventually([&] { return api.serving().outstanding() == 1; }));
  api.serving().run_to_end();
  std::string body;
  while (auto chunk = client.read_chunk()) {
    if (chunk->empty()) break;
    body += *chunk;
  }
  const SseAnswer stream(body);
  ASSERT_EQ(stream.events.size(), 4U);
  EXPECT_EQ(stream.events[0]["object"], "chat.completion.chunk");
  EXPECT_EQ(stream.events[0]["choices"][0]["delta"], Json::parse(R"({"role":"assistant","content":""})"));
  EXPECT_EQ(stream.events[1]["choices"][0]["delta"], Json::parse(R"({"content":"a"})"));
  EXPECT_EQ(stream.events[3]["choices"][0]["delta"], Json::object());
  EXPECT_EQ(stream.events[3]["choices"][0]["finish_reason"], "stop");
}

TEST(SseStream, usage_only_when_asked_and_right_before_done) {
  Api api(FakeServing::spelling("ab"));
  api.serving().start_thread();
  for (const Json& options : {Json(), Json::object(), Json{{"include_usage", false}}, Json{{"include_usage", true}}}) {
    const bool wanted = options.is_object() && options.value("include_usage", false);
    for (const char* path : {completions, chats}) {
      Json body = streaming({{"stream_options", options}, {"n", 2}});
      if (path == completions) body["prompt"] = "abc";
      const SseAnswer stream(api.post(path, path == chats ? chat_body(body) : body).body);
      EXPECT_TRUE(stream.done);
      int with_usage = 0;
      for (const Json& event : stream.events) {
        EXPECT_EQ(event.contains("usage"), wanted);
        if (!event.contains("usage") || event["usage"].is_null()) continue;
        ++with_usage;
        EXPECT_EQ(&event, &stream.events.back());
        EXPECT_EQ(event["choices"], Json::array());
        EXPECT_EQ(event["usage"]["completion_tokens"], 6);
        if (path == completions) {
          EXPECT_EQ(event["usage"]["prompt_tokens"], 3) << "once for both choices";
        }
      }
      EXPECT_EQ(with_usage, wanted ? 1 : 0);
    }
  }
}

TEST(SseStream, stop_strings_across_tokens) {
  using Expected = std::pair<std::string, std::string>;
  const auto alphabet = FakeServing::spelling("ABCDEFGHIJ");
  EXPECT_EQ(both_ways(alphabet, {{"stop", {"DEFGHIJ"}}}), (Expected{"ABC", "stop"}));
  EXPECT_EQ(both_ways(alphabet, {{"stop", {"FGX", "FG"}}}), (Expected{"ABCDE", "stop"}));
  EXPECT_EQ(both_ways(alphabet, {{"stop", "A"}}), (Expected{"", "stop"}));
  // A prefix is pending when the answer ends: it was no match, so it is text.
  EXPECT_EQ(both_ways(alphabet, {{"stop", {"IJK"}}}), (Expected{"ABCDEFGHIJ", "stop"}));
  EXPECT_EQ(both_ways(alphabet, {{"stop", {"EFGH"}}, {"max_tokens", 6}}), (Expected{"ABCDEF", "length"}));
  // Only in the prompt: no match.
  EXPECT_EQ(both_ways(alphabet, {{"stop", {"p"}}}), (Expected{"ABCDEFGHIJ", "stop"}));
  EXPECT_EQ(both_ways(alphabet, {{"stop", {"1", "2", "3", "4", "CD"}}}, chats), (Expected{"AB", "stop"}));
  EXPECT_EQ(both_ways(FakeServing::spelling("x\xF0\x9F\x98\x80y"), {{"stop", {"\xF0\x9F\x98\x80"}}}), (Expected{"x", "stop"}));
  // Not looked for within the first min_tokens.
  EXPECT_EQ(both_ways(FakeServing::spelling("ABAB"), {{"stop", "B"}, {"min_tokens", 2}}), (Expected{"ABA", "stop"}));
}

TEST(SseStream, matched_stop_string_ends_the_sequence_in_the_engine) {
  Api api(endless("say STOP"));
  api.serving().start_thread();
  const auto reply = api.post(completions, streaming({{"prompt", "p"}, {"stop", "STOP"}, {"max_tokens", 400}}));
  const SseAnswer stream(reply.body);
  EXPECT_EQ(stream.texts.at(0), "say ");
  EXPECT_TRUE(stream.done);
  EXPECT_TRUE(eventually([&] { return api.serving().outstanding() == 0; }));
  EXPECT_EQ(api.serving().cancelled(Outcome::Stop) + api.serving().ended_by_itself(), 1);
  EXPECT_EQ(api.serving().cancelled(Outcome::Aborted), 0);
}

TEST(SseStream, characters_cut_across_tokens) {
  using Expected = std::pair<std::string, std::string>;
  const std::string hangul = "\xED\x95\x9C";
  const std::string emoji = "\xF0\x9F\x98\x80";
  EXPECT_EQ(both_ways(FakeServing::spelling(hangul + emoji + " x"), Json::object()), (Expected{hangul + emoji + " x", "stop"}));
  EXPECT_EQ(both_ways(FakeServing::spelling(hangul + emoji + " x"), Json::object(), chats),
            (Expected{hangul + emoji + " x", "stop"}));
  // Cut after two bytes by max_tokens: one replacement mark, the same both ways.
  EXPECT_EQ(both_ways(FakeServing::spelling("a" + hangul), {{"max_tokens", 3}}), (Expected{"a\xEF\xBF\xBD", "length"}));
  const auto [garbage, finish] = both_ways(FakeServing::spelling(std::string(20, '\x80')), Json::object());
  EXPECT_EQ(finish, "stop");
  EXPECT_NE(garbage.find("\xEF\xBF\xBD"), std::string::npos);
}

TEST(SseStream, tokens_without_text_are_no_fault) {
  // Ids past the byte range decode to text of their own or to nothing; the padded end of the vocabulary must never fail a
  // request.
  const auto [text, finish] = both_ways(
      [](const engine::Request&, std::int32_t index) -> std::optional<TokenId> {
        return index < 3 ? std::optional<TokenId>(319) : std::nullopt;
      },
      Json::object());
  EXPECT_EQ(finish, "stop");
}

TEST(SseStream, each_choice_finishes_once_whatever_the_others_do) {
  // Choice k spells its own text; the first ends by a stop string, the others by themselves or by length.
  const std::vector<std::string> texts = {"one END more", "second choice", "three", "the fourth is the longest of them all"};
  Api api([&](const engine::Request& request, std::int32_t index) -> std::optional<TokenId> {
    const std::string& text = texts[(request.id.value - 1) % 4];
    return static_cast<std::size_t>(index) < text.size() ? std::optional<TokenId>(text[static_cast<std::size_t>(index)])
                                                         : std::nullopt;
  });
  api.serving().start_thread();
  const Json body = {{"prompt", "p"}, {"n", 4}, {"stop", "END"}, {"max_tokens", 20}, {"seed", 7}, {"temperature", 1.2}};
  const SseAnswer stream(api.post(completions, streaming(body)).body);
  const Json whole = Json::parse(api.post(completions, body).body);
  const std::vector<std::pair<std::string, std::string>> expected = {
      {"one ", "stop"}, {"second choice", "stop"}, {"three", "stop"}, {"the fourth is the lo", "length"}};
  for (int i = 0; i < 4; ++i) {
    EXPECT_EQ(stream.texts.at(i), expected[static_cast<std::size_t>(i)].first);
    EXPECT_EQ(stream.finishes.at(i), (std::vector<std::string>{expected[static_cast<std::size_t>(i)].second}));
    EXPECT_EQ(whole["choices"][static_cast<std::size_t>(i)]["text"], expected[static_cast<std::size_t>(i)].first);
  }
  EXPECT_TRUE(stream.done);
}

TEST(SseStream, fault_in_the_middle_gives_one_error_event_and_a_closed_connection) {
  Api api(endless("text"));
  api.serving().fail_at(0, 5, Error{.code = ErrorCode::Internal, .field = {}, .message = "logits are not finite \xff"});
  RawClient client(api.port());
  ASSERT_TRUE(client.send(post_text(completions, streaming({{"prompt", "p"}, {"n", 2}, {"max_tokens", 50}}).dump())));
  ASSERT_TRUE(eventually([&] { return api.serving().outstanding() == 2; }));
  while (api.serving().step()) {
  }
  const auto reply = client.read_reply();
  EXPECT_EQ(reply.status, 200);
  EXPECT_FALSE(reply.complete) << "no final chunk: it must not look like success";
  EXPECT_TRUE(client.ended());
  const SseAnswer stream(reply.body);
  EXPECT_FALSE(stream.done);
  int errors = 0;
  for (const Json& event : stream.events) errors += event.contains("error") ? 1 : 0;
  EXPECT_EQ(errors, 1);
  EXPECT_EQ(stream.events.back()["error"]["type"], "server_error");
  EXPECT_TRUE(eventually([&] { return api.serving().outstanding() == 0; }));
}

TEST(SseStream, logprobs_of_a_stream_cover_every_token_once) {
  for (const char* path : {completions, chats}) {
    Api api(
        FakeServing::spelling("ab\xED\x95\x9C"
                              "c"));
    api.serving().start_thread();
    Json body = streaming(Json::object());
    if (path == completions) {
      body["prompt"] = "p";
      body["logprobs"] = 0;
    } else {
      body["logprobs"] = true;
      body = chat_body(body);
    }
    const SseAnswer stream(api.post(path, body).body);
    std::size_t tokens = 0;
    for (const Json& event : stream.events) {
      const Json& logprobs = event["choices"][0]["logprobs"];
      if (!logprobs.is_null()) tokens += logprobs[path == chats ? "content" : "tokens"].size();
    }
    EXPECT_EQ(tokens, 6U) << path;
  }
}

TEST(SseStream, heartbeats_fill_the_silence_before_the_first_token) {
  openai::ApiOptions options;
  options.heartbeat = std::chrono::milliseconds(20);
  Api api(FakeServing::spelling("a"), options);
  RawClient client(api.port());
  ASSERT_TRUE(client.send(post_text(completions, streaming({{"prompt", "p"}}).dump())));
  EXPECT_EQ(client.read_head().status, 200);
  EXPECT_EQ(client.read_chunk(), ": keep-alive\n\n");
  EXPECT_EQ(client.read_chunk(), ": keep-alive\n\n");
  api.serving().run_to_end();
  std::string body;
  while (auto chunk = client.read_chunk()) {
    if (chunk->empty()) break;
    body += *chunk;
  }
  EXPECT_EQ(SseAnswer(body).texts.at(0), "a");
}

TEST(SseStream, byte_by_byte_reader_gets_the_same_stream) {
  Api api(FakeServing::spelling("hello \xF0\x9F\x98\x80 world"));
  api.serving().start_thread();
  RawClient client(api.port());
  client.set_read_size(1);
  ASSERT_TRUE(client.send_bytewise(post_text(completions, streaming({{"prompt", "p"}, {"max_tokens", 100}}).dump())));
  const auto reply = client.read_reply();
  EXPECT_TRUE(reply.complete);
  EXPECT_EQ(SseAnswer(reply.body).texts.at(0), "hello \xF0\x9F\x98\x80 world");
}

TEST(SseStream, pipelined_streams_come_one_after_another) {
  Api api(FakeServing::spelling("abc"));
  api.serving().start_thread();
  RawClient client(api.port());
  const std::string one = post_text(completions, streaming({{"prompt", "p"}}).dump());
  ASSERT_TRUE(client.send(one + one + post_text(completions, Json{{"prompt", "p"}}.dump())));
  for (int i = 0; i < 2; ++i) {
    const SseAnswer stream(client.read_reply().body);
    EXPECT_TRUE(stream.done);
    EXPECT_EQ(stream.texts.at(0), "abc");
  }
  EXPECT_EQ(Json::parse(client.read_reply().body)["choices"][0]["text"], "abc");
}

TEST(SseStream, fifty_clients_at_once_each_get_their_own_text) {
  const auto text_of = [](std::size_t seed) { return numbered("text of client ", seed) + std::string(seed % 40, '!'); };
  Api api(
      [&](const engine::Request& request, std::int32_t index) -> std::optional<TokenId> {
        const std::string text = text_of(request.sampling.seed);
        return static_cast<std::size_t>(index) < text.size() ? std::optional<TokenId>(text[static_cast<std::size_t>(index)])
                                                             : std::nullopt;
      },
      {}, {.listen = {}, .threads = 4});
  api.serving().start_thread();
  std::vector<std::jthread> clients;
  for (std::size_t c = 0; c < 50; ++c) {
    clients.emplace_back([&, c] {
      RawClient client(api.port());
      for (std::size_t i = 0; i < 4; ++i) {
        const Json body = streaming({{"prompt", "p"}, {"seed", c + i}, {"max_tokens", 100}});
        EXPECT_TRUE(client.send(post_text(
            i % 2 == 0 ? completions : chats, i % 2 == 0 ? body.dump() : [&] {
              Json chat = chat_body(body);
              chat.erase("prompt");
              return chat.dump();
            }())));
        const auto reply = client.read_reply();
        EXPECT_TRUE(reply.complete);
        const SseAnswer stream(reply.body);
        EXPECT_TRUE(stream.done);
        EXPECT_EQ(stream.texts.at(0), text_of(c + i));
      }
    });
  }
  clients.clear();
  EXPECT_EQ(api.serving().outstanding(), 0U);
  EXPECT_EQ(api.serving().ended_by_itself(), 200);
}

TEST(SseStream, five_hundred_abandoned_streams_leave_nothing_behind) {
  Api api(endless("abandoned"), {}, {.listen = {}, .threads = 2});
  const Json body = streaming({{"prompt", std::vector<int>(64, 65)}, {"max_tokens", 400}});
  // Nothing runs to its end by itself: every sequence must be cancelled.
  for (int i = 0; i < 500; ++i) {
    RawClient client(api.port());
    ASSERT_TRUE(client.send(post_text(completions, body.dump())));
    ASSERT_TRUE(eventually([&] { return api.serving().outstanding() > 0; }));
    ASSERT_EQ(client.read_head().status, 200);
    for (int token = 0; token < 3; ++token) {
      api.serving().step();
      ASSERT_TRUE(client.read_chunk().has_value());
    }
    switch (i % 3) {
      case 0:
        client.close();
        break;
      case 1:
        client.reset();
        break;
      case 2:
        client.half_close();
        break;
    }
    ASSERT_TRUE(eventually([&] { return api.serving().outstanding() == 0; })) << "stream " << i;
  }
  EXPECT_EQ(api.serving().cancelled(Outcome::Aborted), 500);
  EXPECT_TRUE(eventually([&] { return api.server().open_connections() == 0; }));
  api.serving().start_thread();
  const auto after = api.post(completions, {{"prompt", "p"}});
  EXPECT_EQ(after.status, 200);
}

TEST(SseStream, slow_reader_is_cut_and_its_sequence_cancelled) {
  http::ServerOptions server_options;
  server_options.buffered_bytes_max = 64UL << 10;
  auto model = test::byte_model();
  model.max_model_len = 1 << 20;
  Api api(endless(""), {}, server_options, model);
  RawClient client(api.port(), 4096);
  ASSERT_TRUE(client.send(post_text(completions, streaming({{"prompt", "p"}, {"max_tokens", 1'000'000}}).dump())));
  ASSERT_TRUE(eventually([&] { return api.serving().outstanding() == 1; }));
  api.serving().start_thread();
  EXPECT_TRUE(eventually([&] { return api.serving().outstanding() == 0; }));
  EXPECT_EQ(api.serving().cancelled(Outcome::Aborted), 1);
  EXPECT_TRUE(eventually([&] { return api.server().open_connections() == 0; }));
}

TEST(SseStream, half_of_the_clients_leaving_disturbs_no_other) {
  Api api(endless("steady"), {}, {.listen = {}, .threads = 4});
  const std::string request = post_text(completions, streaming({{"prompt", "p"}, {"n", 2}, {"max_tokens", 200}}).dump());
  std::vector<RawClient> clients;
  for (int i = 0; i < 40; ++i) {
    clients.emplace_back(api.port());
    ASSERT_TRUE(clients.back().send(request));
  }
  ASSERT_TRUE(eventually([&] { return api.serving().outstanding() == 80; }));
  api.serving().start_thread();
  for (std::size_t i = 0; i < clients.size(); i += 2) (i % 4 == 0) ? clients[i].close() : clients[i].reset();
  for (std::size_t i = 1; i < clients.size(); i += 2) {
    const auto reply = clients[i].read_reply();
    EXPECT_TRUE(reply.complete);
    const SseAnswer stream(reply.body);
    EXPECT_TRUE(stream.done);
    EXPECT_EQ(stream.texts.at(0), std::string("steady").append(194, '.'));
    EXPECT_EQ(stream.texts.at(1), stream.texts.at(0));
  }
  EXPECT_TRUE(eventually([&] { return api.serving().outstanding() == 0; }));
}

TEST(SseStream, stopping_the_server_cancels_what_runs) {
  Api api(endless("x"));
  RawClient client(api.port());
  ASSERT_TRUE(client.send(post_text(completions, streaming({{"prompt", "p"}, {"max_tokens", 100}}).dump())));
  EXPECT_EQ(client.read_head().status, 200);
  api.server().stop();
  EXPECT_EQ(api.serving().outstanding(), 0U);
  EXPECT_EQ(api.serving().cancelled(Outcome::Aborted), 1);
  EXPECT_TRUE(client.read_to_end());
}

}  // namespace
}  // namespace rubato
