// SPDX-License-Identifier: Apache-2.0
// Request bodies as pure parsing: what is read, what is refused, and that every refusal names its parameter.
#include "daemon/openai/request.h"

#include <gtest/gtest.h>

#include "daemon/openai/json_body.h"

namespace rubato::openai {
namespace {

constexpr RequestLimits limits{.vocabulary = 320, .choices_max = 128};

Result<GenerationRequest> completion(std::string_view members) {
  return parse_completion_request(
      std::string("{\"prompt\":\"p\"") + std::string(members.empty() ? "" : ",") + std::string(members) + "}", limits);
}
Result<GenerationRequest> chat(std::string_view members) {
  return parse_chat_request(
      R"({"messages":[{"role":"user","content":"hi"}])" + std::string(members.empty() ? "" : ",") + std::string(members) + "}",
      limits);
}

/// The parameter an error names; "(accepted)" if there is none.
std::string refused(const Result<GenerationRequest>& result) {
  if (result) return "(accepted)";
  EXPECT_EQ(result.error().code, ErrorCode::InvalidArgument);
  EXPECT_FALSE(result.error().message.empty());
  // Whatever was in the body, the error must be JSON text.
  EXPECT_FALSE(Json::parse(dump(Json(result.error().message)), nullptr, false).is_discarded());
  return result.error().field;
}

TEST(OpenAiRequest, defaults) {
  const auto request = completion("");
  ASSERT_TRUE(request.has_value());
  EXPECT_EQ(request->choices_per_prompt, 1);
  EXPECT_EQ(request->max_tokens, std::nullopt);
  EXPECT_EQ(request->seed, std::nullopt);
  EXPECT_EQ(request->sampling.temperature, 1.0);
  EXPECT_EQ(request->sampling.top_logprobs, -1);
  EXPECT_FALSE(request->stream);
  EXPECT_TRUE(request->add_special_tokens);
}

TEST(OpenAiRequest, every_parameter_is_read) {
  const auto request = completion(
      R"("model":"m","n":3,"best_of":3,"max_tokens":7,"temperature":0.5,"top_p":0.25,"top_k":5,"min_p":0.125,"seed":-1,
         "presence_penalty":-2,"frequency_penalty":2,"repetition_penalty":1.5,"logit_bias":{"5":-100,"319":1.5},"stop":["a","b"],
         "stop_token_ids":[1,2],"ignore_eos":true,"min_tokens":2,"logprobs":4,"add_special_tokens":false,"stream":true,
         "stream_options":{"include_usage":true},"echo":false,"user":"u","metadata":{"a":[1]},"response_format":{"type":"text"})");
  ASSERT_TRUE(request.has_value()) << request.error().message;
  EXPECT_EQ(request->model, "m");
  EXPECT_EQ(request->choices_per_prompt, 3);
  EXPECT_EQ(request->max_tokens, 7);
  EXPECT_EQ(request->seed, UINT64_MAX);
  const auto& sampling = request->sampling;
  EXPECT_EQ(sampling.temperature, 0.5);
  EXPECT_EQ(sampling.top_p, 0.25);
  EXPECT_EQ(sampling.top_k, 5);
  EXPECT_EQ(sampling.min_p, 0.125);
  EXPECT_EQ(sampling.presence_penalty, -2);
  EXPECT_EQ(sampling.frequency_penalty, 2);
  EXPECT_EQ(sampling.repetition_penalty, 1.5);
  ASSERT_EQ(sampling.logit_bias.size(), 2U);
  EXPECT_EQ(sampling.stop_token_ids, (std::vector<TokenId>{1, 2}));
  EXPECT_TRUE(sampling.ignore_eos);
  EXPECT_EQ(sampling.min_new_tokens, 2);
  EXPECT_EQ(sampling.top_logprobs, 4);
  EXPECT_EQ(request->stops, (std::vector<std::string>{"a", "b"}));
  EXPECT_TRUE(request->stream);
  EXPECT_TRUE(request->include_usage);
  EXPECT_FALSE(request->add_special_tokens);
}

TEST(OpenAiRequest, values_out_of_range_or_of_the_wrong_type_name_their_parameter) {
  const std::vector<std::pair<std::string, std::vector<std::string>>> cases = {
      {"n", {"0", "-1", "129", "1000", "1.5", "\"1\"", "true", "[]", "99999999999999999999", "1e400"}},
      {"max_tokens", {"0", "-1", "2147483648", "18446744073709551615", "1.0", "\"5\"", "{}"}},
      {"temperature", {"-0.1", "2.1", "\"1\"", "true"}},
      {"top_p", {"0", "-1", "1.01", "\"x\""}},
      {"top_k", {"-2", "1.5", "4294967296"}},
      {"min_p", {"-0.1", "1.1"}},
      {"presence_penalty", {"-2.1", "2.1"}},
      {"frequency_penalty", {"-2.1", "\"a\""}},
      {"repetition_penalty", {"0", "-1", "101"}},
      {"seed", {"1.5", "\"1\"", "true"}},
      {"stop",
       {"\"\"", "[\"\"]", "[1]", "5", "{}",
        "[\"a\",\"b\",\"c\",\"d\",\"e\",\"f\",\"g\",\"h\",\"i\",\"j\",\"k\",\"l\",\"m\",\"n\",\"o\",\"p\",\"q\"]"}},
      {"stop_token_ids", {"[-1]", "[320]", "[1.5]", "5", "[\"a\"]"}},
      {"logit_bias", {"{\"320\":1}", "{\"-1\":1}", "{\"a\":1}", "{\"\":1}", "{\"1\":101}", "{\"1\":\"x\"}", "[]"}},
      {"min_tokens", {"-1", "\"a\""}},
      {"ignore_eos", {"1", "\"true\""}},
      {"stream", {"1", "\"true\""}},
      {"stream_options", {"[]", "{\"include_usage\":true}"}},  // the latter: without stream
      {"logprobs", {"-1", "21", "true", "1.5"}},
      {"echo", {"true"}},
      {"suffix", {"\"x\""}},
      {"best_of", {"2"}},
      {"response_format", {"{\"type\":\"json_object\"}"}},
      {"use_beam_search", {"true"}},
      {"guided_json", {"{}"}},
      {"no_such_parameter", {"1", "\"\"", "false"}},
      {"model", {"5", "[]"}},
      {"add_special_tokens", {"1"}},
      {"cache_salt", {"5", "[]", '"' + std::string(1025, 'a') + '"'}},
  };
  for (const auto& [name, values] : cases) {
    for (const std::string& value : values) {
      const std::string field = refused(completion("\"" + name + "\":" + value));
      // A number beyond double is no JSON value at all; that is found before there is a parameter.
      if (value == "1e400") {
        EXPECT_EQ(field, "");
      } else {
        EXPECT_EQ(field, name) << value;
      }
    }
    EXPECT_EQ(refused(completion("\"" + name + "\":null")), "(accepted)") << name << ": null counts as absent";
  }
}

TEST(OpenAiRequest, limits_are_accepted) {
  for (const char* members :
       {R"("n":128)", R"("max_tokens":2147483647)", R"("temperature":0)", R"("temperature":2)", R"("top_p":1)", R"("top_k":-1)",
        R"("top_k":0)", R"("logprobs":0)", R"("logprobs":20)", R"("seed":18446744073709551615)", R"("seed":-9223372036854775808)",
        R"("stop":[])", R"("stop_token_ids":[0,319])", R"("logit_bias":{})", R"("stream":true,"stream_options":{})",
        R"("max_completion_tokens":5,"max_tokens":5)"}) {
    EXPECT_EQ(refused(completion(members)), "(accepted)") << members;
  }
  EXPECT_EQ(refused(completion(R"("cache_salt":")" + std::string(1024, 'a') + "\"")), "(accepted)");
}

TEST(OpenAiRequest, contradictions_are_refused) {
  EXPECT_EQ(refused(completion(R"("max_completion_tokens":5,"max_tokens":6)")), "max_completion_tokens");
  EXPECT_EQ(refused(completion(R"("min_tokens":5,"max_tokens":4)")), "min_tokens");
  EXPECT_EQ(refused(completion(R"("stream":true,"stream_options":{"include_usage":1})")), "stream_options.include_usage");
  EXPECT_EQ(refused(completion(R"("stream":true,"stream_options":{"other":1})")), "stream_options.other");
  EXPECT_EQ(refused(chat(R"("top_logprobs":5)")), "top_logprobs");
}

TEST(OpenAiRequest, prompt_forms) {
  const auto parse = [](const std::string& prompt) { return parse_completion_request("{\"prompt\":" + prompt + "}", limits); };
  EXPECT_EQ(std::get<std::string>(parse("\" \"")->prompts.at(0)), " ");
  EXPECT_EQ(parse(R"(["a","b"])")->prompts.size(), 2U);
  EXPECT_EQ(std::get<std::vector<TokenId>>(parse("[1,2,319]")->prompts.at(0)), (std::vector<TokenId>{1, 2, 319}));
  EXPECT_EQ(std::get<std::vector<TokenId>>(parse("[[1],[2,3]]")->prompts.at(1)), (std::vector<TokenId>{2, 3}));
  for (const char* bad : {"\"\"", "[\"\"]", "[]", "[[]]", "null", "5", "{}", "[1,\"a\"]", "[\"a\",1]", "[[1],[]]", "[[1],2]",
                          "[-1]", "[320]", "[1000000]", "[1.5]", "[99999999999999999999]", "[null]", "[[\"a\"]]", "true"}) {
    EXPECT_EQ(refused(parse(bad)), "prompt") << bad;
  }
  EXPECT_EQ(refused(parse_completion_request("{}", limits)), "prompt");
  EXPECT_EQ(refused(parse_completion_request(R"({"prompt":["a","b"],"n":65})", limits)), "n");
}

TEST(OpenAiRequest, messages) {
  const auto parse = [](const std::string& messages) { return parse_chat_request("{\"messages\":" + messages + "}", limits); };
  const auto parts = parse(
      R"([{"role":"system","content":""},{"role":"user","content":[{"type":"text","text":"a"},{"type":"text","text":"b"}],"name":"x"},
               {"role":"assistant","content":"c","tool_calls":[],"refusal":null}])");
  ASSERT_TRUE(parts.has_value()) << parts.error().message;
  EXPECT_EQ(parts->messages.at(0).content, "");
  EXPECT_EQ(parts->messages.at(1).content, "a\nb");
  const std::vector<std::pair<std::string, std::string>> cases = {
      {"[]", "messages"},
      {"null", "messages"},
      {"\"hi\"", "messages"},
      {"[5]", "messages[0]"},
      {"[{\"content\":\"x\"}]", "messages[0].role"},
      {"[{\"role\":5,\"content\":\"x\"}]", "messages[0].role"},
      {"[{\"role\":\"tool\",\"content\":\"x\"}]", "messages[0].role"},
      {"[{\"role\":\"user\"}]", "messages[0].content"},
      {"[{\"role\":\"user\",\"content\":null}]", "messages[0].content"},
      {"[{\"role\":\"user\",\"content\":5}]", "messages[0].content"},
      {"[{\"role\":\"user\",\"content\":\"x\"},{\"role\":\"user\",\"content\":[5]}]", "messages[1].content[0]"},
      {"[{\"role\":\"user\",\"content\":[{\"type\":\"image_url\"}]}]", "messages[0].content[0].type"},
      {"[{\"role\":\"user\",\"content\":[{\"type\":\"text\"}]}]", "messages[0].content[0].text"},
      {"[{\"role\":\"assistant\",\"content\":\"x\",\"tool_calls\":[1]}]", "messages[0].tool_calls"},
      {"[{\"role\":\"user\",\"content\":\"x\",\"odd\":1}]", "messages[0].odd"},
  };
  for (const auto& [messages, field] : cases) EXPECT_EQ(refused(parse(messages)), field) << messages;
  EXPECT_EQ(refused(parse_chat_request("{}", limits)), "messages");
}

TEST(OpenAiRequest, chat_parameters) {
  EXPECT_EQ(chat(R"("logprobs":true)")->sampling.top_logprobs, 0);
  EXPECT_EQ(chat(R"("logprobs":true,"top_logprobs":7)")->sampling.top_logprobs, 7);
  EXPECT_EQ(chat(R"("logprobs":false,"top_logprobs":0)")->sampling.top_logprobs, -1);
  EXPECT_EQ(chat(R"("tools":[],"tool_choice":"none")")->messages.size(), 1U);
  for (const char* name : {"tools", "functions", "tool_choice", "modalities", "reasoning_effort", "prediction", "prompt"}) {
    EXPECT_EQ(refused(chat(std::string("\"") + name + "\":\"required\"")), name);
  }
}

TEST(OpenAiRequest, hostile_json_is_refused_and_never_throws) {
  const auto error = [](const std::string& body) {
    const auto result = parse_completion_request(body, limits);
    EXPECT_FALSE(result.has_value()) << body.substr(0, 80);
    return result ? std::string() : result.error().message;
  };
  for (const std::string& body :
       {std::string(), std::string(" \n"), std::string("{"), std::string("[]"), std::string("5"), std::string("null"),
        std::string("{\"prompt\":\"\xff\"}"), std::string("{\"prompt\":\"\xed\xa0\xbd\"}"), std::string(R"({"prompt":"\ud83d"})"),
        std::string(R"({"prompt":"\ude00\ud83d"})"), std::string("{\"prompt\":\"a\nb\"}"), std::string("{\"prompt\":\"p\"} x"),
        std::string("{'prompt':1}"), std::string("{\"prompt\":NaN}"), std::string("\0{}", 3), std::string("{\"\xff\":1}")}) {
    error(body);
  }
  EXPECT_NE(error(std::string(100'000, '[')).find("deeper"), std::string::npos);
  std::string objects;
  for (int i = 0; i < 1000; ++i) objects += "{\"a\":";
  EXPECT_NE(error(objects).find("deeper"), std::string::npos);
  EXPECT_NE(error(R"({"prompt":"a","prompt":"b"})").find("twice"), std::string::npos);
  EXPECT_EQ(refused(parse_completion_request(R"({"prompt":"a","n":1,"n":2})", limits)), "n");
  EXPECT_EQ(refused(completion(R"("stream":true,"stream_options":{"include_usage":true,"include_usage":false})")),
            "include_usage");
}

TEST(OpenAiRequest, errors_that_echo_a_value_stay_short_and_valid) {
  std::string emoji;
  for (int i = 0; i < 500; ++i) emoji += "\xF0\x9F\x98\x80";
  const auto result = completion("\"seed\":\"x" + emoji + "\"");
  ASSERT_FALSE(result.has_value());
  EXPECT_LT(result.error().message.size(), 300U);
  EXPECT_FALSE(Json::parse(dump(Json(result.error().message)), nullptr, false).is_discarded());
}

}  // namespace
}  // namespace rubato::openai
