// SPDX-License-Identifier: Apache-2.0
// Member order as OpenAI writes it, so that an answer reads alike.
#include "daemon/openai/answer.h"

#include <algorithm>
#include <utility>

namespace rubato::openai {
namespace {

/// JSON has no infinity; the floor is the one other servers use.
double finite(float logprob) {
  return std::max(static_cast<double>(logprob), -9999.0);
}

std::int64_t characters(std::string_view text) {
  return std::count_if(text.begin(), text.end(), [](char c) { return (static_cast<unsigned char>(c) & 0xC0U) != 0x80U; });
}

OrderedJson chat_logprob(const text::Tokenizer& tokenizer, TokenId token, float logprob) {
  OrderedJson out;
  out["token"] = tokenizer.token_text(token);
  out["logprob"] = finite(logprob);
  OrderedJson bytes = OrderedJson::array();
  for (const char c : tokenizer.token_bytes(token)) bytes.push_back(static_cast<unsigned char>(c));
  out["bytes"] = std::move(bytes);
  return out;
}

OrderedJson chat_logprobs(const text::Tokenizer& tokenizer, std::span<const engine::Sample> tokens) {
  OrderedJson content = OrderedJson::array();
  for (const engine::Sample& sample : tokens) {
    OrderedJson one = chat_logprob(tokenizer, sample.token, sample.logprob);
    one["top_logprobs"] = OrderedJson::array();
    for (const engine::TokenLogprob& top : sample.top)
      one["top_logprobs"].push_back(chat_logprob(tokenizer, top.token, top.logprob));
    content.push_back(std::move(one));
  }
  OrderedJson out;
  out["content"] = std::move(content);
  return out;
}

OrderedJson envelope(const AnswerHead& head, const char* object) {
  OrderedJson out;
  out["id"] = head.id;
  out["object"] = object;
  out["created"] = head.created;
  out["model"] = head.model;
  return out;
}

const char* stream_object(Endpoint endpoint) {
  return endpoint == Endpoint::Chat ? "chat.completion.chunk" : "text_completion";
}

OrderedJson usage_json(const Usage& usage) {
  OrderedJson out;
  out["prompt_tokens"] = usage.prompt_tokens;
  out["completion_tokens"] = usage.completion_tokens;
  out["total_tokens"] = usage.prompt_tokens + usage.completion_tokens;
  out["prompt_tokens_details"] = OrderedJson{{"cached_tokens", usage.cached_tokens}};
  return out;
}

}  // namespace

OrderedJson logprobs_json(Endpoint endpoint, const text::Tokenizer& tokenizer, std::span<const engine::Sample> tokens,
                          std::int64_t& text_offset) {
  if (endpoint == Endpoint::Chat) return chat_logprobs(tokenizer, tokens);
  OrderedJson out;
  out["tokens"] = OrderedJson::array();
  out["token_logprobs"] = OrderedJson::array();
  out["top_logprobs"] = OrderedJson::array();
  out["text_offset"] = OrderedJson::array();
  for (const engine::Sample& sample : tokens) {
    const std::string text = tokenizer.token_text(sample.token);
    OrderedJson top = OrderedJson::object();
    for (const engine::TokenLogprob& one : sample.top) top[tokenizer.token_text(one.token)] = finite(one.logprob);
    out["tokens"].push_back(text);
    out["token_logprobs"].push_back(finite(sample.logprob));
    out["top_logprobs"].push_back(std::move(top));
    out["text_offset"].push_back(text_offset);
    text_offset += characters(text);
  }
  return out;
}

OrderedJson choice_json(Endpoint endpoint, std::int32_t index, const std::string& text, const std::string& finish_reason,
                        OrderedJson logprobs) {
  OrderedJson out;
  out["index"] = index;
  if (endpoint == Endpoint::Chat) {
    out["message"]["role"] = "assistant";
    out["message"]["content"] = text;
  } else {
    out["text"] = text;
  }
  out["logprobs"] = std::move(logprobs);
  out["finish_reason"] = finish_reason;
  return out;
}

OrderedJson answer_json(const AnswerHead& head, std::vector<OrderedJson> choices, const Usage& usage) {
  OrderedJson out = envelope(head, head.endpoint == Endpoint::Chat ? "chat.completion" : "text_completion");
  out["choices"] = std::move(choices);
  out["usage"] = usage_json(usage);
  return out;
}

std::string delta_event(const AnswerHead& head, Delta delta, UsageMember usage) {
  OrderedJson choice;
  choice["index"] = delta.index;
  if (head.endpoint == Endpoint::Chat) {
    choice["delta"] = OrderedJson::object();
    if (delta.role == Role::Assistant) choice["delta"]["role"] = "assistant";
    if (delta.role == Role::Assistant || !delta.text.empty()) choice["delta"]["content"] = std::string(delta.text);
  } else {
    choice["text"] = std::string(delta.text);
  }
  choice["logprobs"] = std::move(delta.logprobs);
  choice["finish_reason"] = delta.finish_reason ? OrderedJson(*delta.finish_reason) : OrderedJson();
  OrderedJson out = envelope(head, stream_object(head.endpoint));
  out["choices"] = OrderedJson::array({std::move(choice)});
  if (usage == UsageMember::Null) out["usage"] = OrderedJson();
  return event_of(out);
}

std::string usage_event(const AnswerHead& head, const Usage& usage) {
  OrderedJson out = envelope(head, stream_object(head.endpoint));
  out["choices"] = OrderedJson::array();
  out["usage"] = usage_json(usage);
  return event_of(out);
}

std::string event_of(const OrderedJson& json) {
  return "data: " + dump(json) + "\n\n";
}

}  // namespace rubato::openai
