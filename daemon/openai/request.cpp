// SPDX-License-Identifier: Apache-2.0
// The parameters of the two generation endpoints. Those with one meaning on both are read by read_shared().
#include "daemon/openai/request.h"

#include <charconv>
#include <cmath>
#include <limits>
#include <utility>

#include "daemon/openai/field_reader.h"

namespace rubato::openai {
namespace {

constexpr std::int32_t int32_max = std::numeric_limits<std::int32_t>::max();
constexpr double above_zero = std::numeric_limits<double>::min();

template <class T>
void assign(T& target, const std::optional<T>& value) {
  if (value) target = *value;
}

std::optional<TokenId> token_id(const Json& value, std::int32_t vocabulary) {
  if (!value.is_number_integer()) return std::nullopt;
  if (value.is_number_unsigned() && value.get<std::uint64_t>() > INT32_MAX) return std::nullopt;
  const auto id = value.get<std::int64_t>();
  if (id < 0 || id >= vocabulary) return std::nullopt;
  return static_cast<TokenId>(id);
}

std::string token_range(std::int32_t vocabulary) {
  return "token ids must be integers in 0.." + std::to_string(vocabulary - 1);
}

void read_stops(FieldReader& reader, GenerationRequest& out) {
  const Json* value = reader.find("stop");
  if (value == nullptr) return;
  const auto add = [&](const Json& stop) {
    if (!stop.is_string()) return reader.fail("stop", "must be a string or an array of strings, found " + shown(stop));
    if (stop.get_ref<const std::string&>().empty()) return reader.fail("stop", "a stop string must not be empty");
    if (stop.get_ref<const std::string&>().size() > stop_bytes_max) {
      return reader.fail("stop", "a stop string must not be longer than " + std::to_string(stop_bytes_max) + " bytes");
    }
    out.stops.push_back(stop.get<std::string>());
  };
  if (!value->is_array()) return add(*value);
  if (value->size() > stops_max) {
    return reader.fail("stop", "at most " + std::to_string(stops_max) + " stop strings, found " + std::to_string(value->size()));
  }
  for (const Json& stop : *value) add(stop);
}

void read_stop_token_ids(FieldReader& reader, const RequestLimits& limits, GenerationRequest& out) {
  const Json* value = reader.find("stop_token_ids");
  if (value == nullptr) return;
  if (!value->is_array() || value->size() > stop_token_ids_max) {
    return reader.fail("stop_token_ids", "must be an array of at most " + std::to_string(stop_token_ids_max) + " token ids");
  }
  for (const Json& one : *value) {
    const auto id = token_id(one, limits.vocabulary);
    if (!id) return reader.fail("stop_token_ids", token_range(limits.vocabulary) + ", found " + shown(one));
    out.sampling.stop_token_ids.push_back(*id);
  }
}

void read_logit_bias(FieldReader& reader, const RequestLimits& limits, GenerationRequest& out) {
  const Json* value = reader.find("logit_bias");
  if (value == nullptr) return;
  if (!value->is_object() || value->size() > logit_bias_max) {
    return reader.fail("logit_bias",
                       "must be an object of at most " + std::to_string(logit_bias_max) + " token ids with their bias");
  }
  for (const auto& [key, bias] : value->items()) {
    TokenId id = 0;
    const auto [rest, failure] = std::from_chars(key.data(), key.data() + key.size(), id);
    if (failure != std::errc() || rest != key.data() + key.size() || id < 0 || id >= limits.vocabulary) {
      return reader.fail("logit_bias", token_range(limits.vocabulary) + ", found the key " + shown(Json(key)));
    }
    const double amount = bias.is_number() ? bias.get<double>() : NAN;
    if (!(amount >= -100 && amount <= 100)) {
      return reader.fail("logit_bias", "a bias must be a number in -100..100, found " + shown(bias));
    }
    out.sampling.logit_bias.emplace_back(id, static_cast<float>(amount));
  }
}

void read_seed(FieldReader& reader, GenerationRequest& out) {
  const Json* value = reader.find("seed");
  if (value == nullptr) return;
  if (!value->is_number_integer()) return reader.fail("seed", "must be a 64-bit integer, found " + shown(*value));
  out.seed = value->is_number_unsigned() ? value->get<std::uint64_t>() : static_cast<std::uint64_t>(value->get<std::int64_t>());
}

void read_stream(FieldReader& reader, GenerationRequest& out) {
  assign(out.stream, reader.flag("stream"));
  const Json* options = reader.find("stream_options");
  if (options == nullptr) return;
  if (!options->is_object()) return reader.fail("stream_options", "must be an object, found " + shown(*options));
  if (!out.stream) return reader.fail("stream_options", "is only allowed with \"stream\": true");
  FieldReader inner(*options, "stream_options");
  assign(out.include_usage, inner.flag("include_usage"));
  inner.ignore({"include_obfuscation"});
  inner.refuse_unknown();
  reader.adopt(inner.error());
}

void read_sampling(FieldReader& reader, const RequestLimits& limits, GenerationRequest& out) {
  auto& sampling = out.sampling;
  assign(sampling.temperature, reader.number("temperature", {0, 2}));
  assign(sampling.top_p, reader.number("top_p", {above_zero, 1}));
  assign(sampling.min_p, reader.number("min_p", {0, 1}));
  assign(sampling.top_k, reader.integer("top_k", {-1, int32_max}));
  if (sampling.top_k < 0) sampling.top_k = 0;  // both mean off
  assign(sampling.presence_penalty, reader.number("presence_penalty", {-2, 2}));
  assign(sampling.frequency_penalty, reader.number("frequency_penalty", {-2, 2}));
  assign(sampling.repetition_penalty, reader.number("repetition_penalty", {above_zero, 100}));
  assign(sampling.min_new_tokens, reader.integer("min_tokens", {0, int32_max}));
  assign(sampling.ignore_eos, reader.flag("ignore_eos"));
  read_logit_bias(reader, limits, out);
  read_seed(reader, out);
  read_stops(reader, out);
  read_stop_token_ids(reader, limits, out);
}

/// What both endpoints share, read after the endpoint's own parameters; ends with the check for unknown ones.
void read_shared(FieldReader& reader, const RequestLimits& limits, GenerationRequest& out) {
  assign(out.model, reader.text("model"));
  assign(out.choices_per_prompt, reader.integer("n", {1, limits.choices_max}));
  out.max_tokens = reader.integer("max_tokens", {1, int32_max});
  if (const auto newer = reader.integer("max_completion_tokens", {1, int32_max})) {
    if (out.max_tokens && *out.max_tokens != *newer) reader.fail("max_completion_tokens", "contradicts max_tokens");
    out.max_tokens = newer;
  }
  read_sampling(reader, limits, out);
  read_stream(reader, out);
  assign(out.cache_salt, reader.text("cache_salt"));
  if (out.cache_salt.size() > cache_salt_bytes_max)
    reader.fail("cache_salt", "must not be longer than " + std::to_string(cache_salt_bytes_max) + " bytes");
  if (out.max_tokens && out.sampling.min_new_tokens > *out.max_tokens) {
    reader.fail("min_tokens", "must not be above max_tokens, " + std::to_string(*out.max_tokens));
  }
  // Bookkeeping of the caller and of hosted services: no value of these can change what is generated here.
  reader.ignore({"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
                 "request_id", "parallel_tool_calls"});
  reader.only_neutral("best_of", {Json(out.choices_per_prompt)});
  reader.only_neutral("use_beam_search", {Json(false)});
  reader.only_neutral("length_penalty", {Json(1.0)});
  reader.only_neutral("include_stop_str_in_output", {Json(false)});
  reader.only_neutral("skip_special_tokens", {Json(true)});
  reader.only_neutral("spaces_between_special_tokens", {Json(true), Json(false)});
  reader.only_neutral("response_format", {Json{{"type", "text"}}});
  reader.refuse_unknown();
}

void read_prompt_tokens(FieldReader& reader, const Json& ids, const RequestLimits& limits, GenerationRequest& out) {
  std::vector<TokenId> tokens;
  tokens.reserve(ids.size());
  for (const Json& one : ids) {
    const auto id = token_id(one, limits.vocabulary);
    if (!id) return reader.fail("prompt", token_range(limits.vocabulary) + ", found " + shown(one));
    tokens.push_back(*id);
  }
  if (tokens.empty()) return reader.fail("prompt", "must not be empty");
  out.prompts.emplace_back(std::move(tokens));
}

void read_prompt_text(FieldReader& reader, const Json& text, GenerationRequest& out) {
  if (text.get_ref<const std::string&>().empty()) return reader.fail("prompt", "must not be empty");
  out.prompts.emplace_back(text.get<std::string>());
}

void read_prompt(FieldReader& reader, const RequestLimits& limits, GenerationRequest& out) {
  const Json* prompt = reader.find("prompt");
  if (prompt == nullptr) return reader.fail("prompt", "is required");
  if (prompt->is_string()) return read_prompt_text(reader, *prompt, out);
  if (!prompt->is_array()) {
    return reader.fail("prompt",
                       "must be a string, an array of strings, of token ids or of token id arrays, found " + shown(*prompt));
  }
  if (prompt->empty()) return reader.fail("prompt", "must not be empty");
  if (prompt->front().is_number()) return read_prompt_tokens(reader, *prompt, limits, out);
  if (prompt->size() > static_cast<std::size_t>(limits.choices_max)) {
    return reader.fail("prompt",
                       "at most " + std::to_string(limits.choices_max) + " prompts, found " + std::to_string(prompt->size()));
  }
  const bool is_text = prompt->front().is_string();
  for (const Json& one : *prompt) {
    if (is_text ? !one.is_string() : !one.is_array()) {
      return reader.fail("prompt",
                         "an array must hold strings, token ids or token id arrays, all of one kind; found " + shown(one));
    }
    is_text ? read_prompt_text(reader, one, out) : read_prompt_tokens(reader, one, limits, out);
  }
}

Result<std::string> read_content(const Json& content, const std::string& path) {
  if (content.is_string()) return content.get<std::string>();
  if (!content.is_array()) {
    return unexpected(ErrorCode::InvalidArgument, path,
                      path + ": must be a string or an array of text parts, found " + shown(content));
  }
  std::string joined;
  for (std::size_t i = 0; i < content.size(); ++i) {
    const std::string part_path = path + "[" + std::to_string(i) + "]";
    if (!content[i].is_object()) {
      return unexpected(ErrorCode::InvalidArgument, part_path, part_path + ": must be an object, found " + shown(content[i]));
    }
    FieldReader part(content[i], part_path);
    const auto type = part.text("type");
    if (!part.error() && type != "text") part.fail("type", "must be \"text\": this model reads text alone");
    const auto text = part.text("text");
    if (!text) part.fail("text", "is required");
    part.refuse_unknown();
    if (part.error()) return Unexpected(*part.error());
    if (i > 0) joined += '\n';
    joined += *text;
  }
  return joined;
}

Result<text::ChatMessage> read_message(const Json& message, const std::string& path) {
  if (!message.is_object()) {
    return unexpected(ErrorCode::InvalidArgument, path, path + ": must be an object, found " + shown(message));
  }
  FieldReader reader(message, path);
  text::ChatMessage out;
  if (const auto role = reader.text("role")) {
    out.role = *role;
    if (out.role != "system" && out.role != "user" && out.role != "assistant" && out.role != "developer") {
      reader.fail("role", "must be system, developer, user or assistant, found " + shown(message["role"]));
    }
  } else {
    reader.fail("role", "is required");
  }
  if (const Json* content = reader.find("content")) {
    auto text = read_content(*content, reader.path_of("content"));
    if (!text) return Unexpected(std::move(text).error());
    out.content = std::move(*text);
  } else {
    reader.fail("content", "is required");
  }
  reader.ignore({"name"});
  reader.only_neutral("tool_calls", {Json::array()});
  reader.only_neutral("annotations", {Json::array()});
  reader.refuse_unknown();
  if (reader.error()) return Unexpected(*reader.error());
  return out;
}

void read_messages(FieldReader& reader, GenerationRequest& out) {
  const Json* messages = reader.find("messages");
  if (messages == nullptr) return reader.fail("messages", "is required");
  if (!messages->is_array()) return reader.fail("messages", "must be an array, found " + shown(*messages));
  if (messages->empty()) return reader.fail("messages", "must not be empty");
  for (std::size_t i = 0; i < messages->size(); ++i) {
    const std::string name = "messages[" + std::to_string(i) + "]";
    auto message = read_message((*messages)[i], name);
    if (!message) return reader.adopt(message.error());
    out.messages.push_back(std::move(*message));
  }
}

Result<GenerationRequest> finish(const FieldReader& reader, GenerationRequest request, const RequestLimits& limits) {
  if (reader.error()) return Unexpected(*reader.error());
  const std::size_t prompts = request.endpoint == Endpoint::Chat ? 1 : request.prompts.size();
  if (prompts * static_cast<std::size_t>(request.choices_per_prompt) > static_cast<std::size_t>(limits.choices_max)) {
    return unexpected(ErrorCode::InvalidArgument, "n",
                      "n: " + std::to_string(prompts) + " prompts times n " + std::to_string(request.choices_per_prompt) +
                          " is more than the " + std::to_string(limits.choices_max) + " choices allowed");
  }
  return request;
}

}  // namespace

Result<GenerationRequest> parse_completion_request(std::string_view body, const RequestLimits& limits) {
  auto json = parse_body(body);
  if (!json) return Unexpected(std::move(json).error());
  GenerationRequest out;
  out.endpoint = Endpoint::Completions;
  FieldReader reader(*json, {});
  read_prompt(reader, limits, out);
  assign(out.add_special_tokens, reader.flag("add_special_tokens"));
  if (const auto count = reader.integer("logprobs", {0, top_logprobs_max})) out.sampling.top_logprobs = *count;
  reader.only_neutral("echo", {Json(false)});
  reader.only_neutral("suffix", {Json("")});
  read_shared(reader, limits, out);
  return finish(reader, std::move(out), limits);
}

Result<GenerationRequest> parse_chat_request(std::string_view body, const RequestLimits& limits) {
  auto json = parse_body(body);
  if (!json) return Unexpected(std::move(json).error());
  GenerationRequest out;
  out.endpoint = Endpoint::Chat;
  FieldReader reader(*json, {});
  read_messages(reader, out);
  const bool with_logprobs = reader.flag("logprobs").value_or(false);
  if (with_logprobs) out.sampling.top_logprobs = 0;
  if (const auto count = reader.integer("top_logprobs", {0, top_logprobs_max})) {
    if (!with_logprobs && *count > 0) reader.fail("top_logprobs", "is only allowed with \"logprobs\": true");
    if (with_logprobs) out.sampling.top_logprobs = *count;
  }
  // The chat form adds every control token itself.
  reader.only_neutral("add_special_tokens", {Json(false)});
  reader.only_neutral("add_generation_prompt", {Json(true)});
  reader.only_neutral("continue_final_message", {Json(false)});
  reader.only_neutral("echo", {Json(false)});
  reader.only_neutral("tools", {Json::array()});
  reader.only_neutral("tool_choice", {Json("none"), Json("auto")});
  reader.only_neutral("functions", {Json::array()});
  reader.only_neutral("function_call", {Json("none"), Json("auto")});
  reader.only_neutral("modalities", {Json::array({"text"})});
  read_shared(reader, limits, out);
  return finish(reader, std::move(out), limits);
}

}  // namespace rubato::openai
