// SPDX-License-Identifier: Apache-2.0
// Routes, admission and the way of a request to Serving.
#include "daemon/openai/api.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <cstdio>
#include <random>
#include <utility>

#include "daemon/openai/answer.h"
#include "daemon/openai/error_answer.h"
#include "daemon/openai/generation.h"

namespace rubato::openai {
namespace {

// Every byte of a text belongs to some token, but a normalizer may make several bytes of a text into one: composed characters
// take up to a third of their parts.
constexpr std::size_t normalizer_shrinks_at_most = 4;

std::size_t longest_text(const text::Tokenizer& tokenizer, std::int32_t max_model_len) {
  std::size_t longest_token = 1;
  for (TokenId id = 0; id < tokenizer.vocabulary(); ++id)
    longest_token = std::max(longest_token, tokenizer.token_bytes(id).size());
  return static_cast<std::size_t>(max_model_len) * longest_token * normalizer_shrinks_at_most;
}

constexpr std::int32_t completion_tokens_default = 16;  // OpenAI's
constexpr std::int64_t target_ms_max = 3'600'000;
constexpr std::size_t request_id_bytes_max = 128;

/// One output of splitmix64 (public domain, S. Vigna): a bijection that scatters close inputs.
std::uint64_t scatter(std::uint64_t x) {
  x += 0x9e3779b97f4a7c15ULL;
  x = (x ^ (x >> 30U)) * 0xbf58476d1ce4e5b9ULL;
  x = (x ^ (x >> 27U)) * 0x94d049bb133111ebULL;
  return x ^ (x >> 31U);
}

std::string hex(std::uint64_t value) {
  std::array<char, 17> text{};
  std::snprintf(text.data(), text.size(), "%016llx", static_cast<unsigned long long>(value));
  return text.data();
}

/// The client's own id where it is fit for a header and a log line.
std::string request_id_of(const http::Request& request, std::uint64_t fallback) {
  const std::string_view given = request.header("x-request-id");
  const bool fits = !given.empty() && given.size() <= request_id_bytes_max &&
                    std::all_of(given.begin(), given.end(), [](char c) { return c > ' ' && c < 0x7f; });
  return fits ? std::string(given) : "req-" + hex(fallback);
}

/// Takes the same time wherever the first difference is.
bool equal_in_constant_time(std::string_view a, std::string_view b) {
  unsigned difference = a.size() == b.size() ? 0 : 1;
  for (std::size_t i = 0; i < a.size(); ++i) {
    difference |= static_cast<unsigned char>(a[i]) ^ static_cast<unsigned>(i < b.size() ? static_cast<unsigned char>(b[i]) : 0U);
  }
  return difference == 0;
}

Result<Duration> target_of(const http::Request& request, const std::array<const char*, 2>& names, Duration otherwise) {
  for (const char* name : names) {
    const std::string_view text = request.header(name);
    if (text.empty()) continue;
    std::int64_t milliseconds = 0;
    const auto [rest, failure] = std::from_chars(text.data(), text.data() + text.size(), milliseconds);
    if (failure != std::errc() || rest != text.data() + text.size() || milliseconds < 1 || milliseconds > target_ms_max) {
      return unexpected(ErrorCode::InvalidArgument, name,
                        std::string(name) + ": must be an integer of 1.." + std::to_string(target_ms_max) +
                            " milliseconds, found `" + std::string(text) + "`");
    }
    return std::chrono::duration_cast<Duration>(std::chrono::milliseconds(milliseconds));
  }
  return otherwise;
}

OrderedJson model_json(const std::string& name, const ModelInfo& model) {
  OrderedJson out;
  out["id"] = name;
  out["object"] = "model";
  out["created"] = model.created;
  out["owned_by"] = "rubato";
  out["root"] = model.names.front();
  out["max_model_len"] = model.max_model_len;
  return out;
}

http::Response ok(const OrderedJson& json) {
  return {.status = 200, .content_type = "application/json", .body = dump(json), .headers = cors_headers()};
}

}  // namespace

std::uint64_t choice_seed(std::uint64_t seed, std::int32_t choice) {
  return choice == 0 ? seed : scatter(seed + scatter(static_cast<std::uint64_t>(choice)));
}

Result<ObjectivesSpec> targets_of(const http::Request& request, const ObjectivesSpec& defaults) {
  ObjectivesSpec out = defaults;
  auto ttft = target_of(request, {"x-llm-d-slo-ttft-ms", "x-slo-ttft-ms"}, defaults.ttft);
  if (!ttft) return Unexpected(std::move(ttft).error());
  auto itl = target_of(request, {"x-llm-d-slo-tpot-ms", "x-slo-tpot-ms"}, defaults.itl);
  if (!itl) return Unexpected(std::move(itl).error());
  out.ttft = *ttft;
  out.itl = *itl;
  return out;
}

std::vector<std::pair<std::string, std::string>> preflight_headers(const http::Request& request) {
  auto headers = cors_headers();
  std::string allowed =
      "Authorization, Content-Type, X-Request-Id, X-SLO-TTFT-ms, X-SLO-TPOT-ms, X-LLM-D-SLO-TTFT-ms, X-LLM-D-SLO-TPOT-ms";
  const std::string_view asked = request.header("access-control-request-headers");
  const bool fits = asked.size() <= 1024 && std::all_of(asked.begin(), asked.end(), [](char c) {
                      return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '-' || c == '_' ||
                             c == ',' || c == ' ';
                    });
  if (fits && !asked.empty()) (allowed += ", ") += asked;
  headers.emplace_back("Access-Control-Allow-Methods", "GET, POST, OPTIONS");
  headers.emplace_back("Access-Control-Allow-Headers", std::move(allowed));
  headers.emplace_back("Access-Control-Max-Age", "86400");
  return headers;
}

OpenAiApi::OpenAiApi(Serving& serving, const text::Tokenizer& tokenizer, ModelInfo model, ApiOptions options)
    : serving_(serving),
      tokenizer_(tokenizer),
      model_(std::move(model)),
      text_bytes_max_(longest_text(tokenizer, model_.max_model_len)),
      options_(std::move(options)) {
  CHECK(!model_.names.empty());
  CHECK(model_.vocabulary > 0 && model_.max_model_len > 1, model_.vocabulary, " ", model_.max_model_len);
  if (options_.entropy == 0) {
    std::random_device device;
    options_.entropy = (static_cast<std::uint64_t>(device()) << 32U) | device();
  }
  random_state_ = options_.entropy;
  if (!options_.unix_time) {
    options_.unix_time = [] {
      return std::chrono::duration_cast<std::chrono::seconds>(std::chrono::system_clock::now().time_since_epoch()).count();
    };
  }
}

void OpenAiApi::add_routes(http::Router& router) {
  add(router, "POST", "/v1/completions", &OpenAiApi::complete);
  add(router, "POST", "/v1/chat/completions", &OpenAiApi::chat);
  add(router, "GET", "/v1/models", &OpenAiApi::list_models);
  add(router, "GET", "/v1/models/{id...}", &OpenAiApi::get_model);
}

void OpenAiApi::add(http::Router& router, std::string_view method, std::string_view pattern, Work work) {
  router.add(method, pattern,
             [this, work](const http::Request& request, const ExchangePtr& exchange, const http::PathParameters& parameters) {
               if (!is_allowed(request)) {
                 exchange->respond(error_response(401, "a valid API key is needed: Authorization: Bearer KEY"));
                 return;
               }
               (this->*work)(request, exchange, parameters);
             });
}

bool OpenAiApi::is_allowed(const http::Request& request) const {
  if (options_.api_keys.empty()) return true;
  constexpr std::string_view scheme = "bearer ";
  const std::string_view given = request.header("authorization");
  if (given.size() <= scheme.size()) return false;
  for (std::size_t i = 0; i < scheme.size(); ++i) {
    const char lower = given[i] >= 'A' && given[i] <= 'Z' ? static_cast<char>(given[i] + ('a' - 'A')) : given[i];
    if (lower != scheme[i]) return false;
  }
  bool found = false;
  for (const std::string& key : options_.api_keys) found |= equal_in_constant_time(given.substr(scheme.size()), key);
  return found;
}

bool OpenAiApi::serves(const std::string& name) const {
  return std::find(model_.names.begin(), model_.names.end(), name) != model_.names.end();
}

std::uint64_t OpenAiApi::random() {
  return scatter(random_state_.fetch_add(0x9e3779b97f4a7c15ULL));
}

void OpenAiApi::list_models(const http::Request& /*request*/, const ExchangePtr& exchange, const http::PathParameters& /*none*/) {
  OrderedJson out;
  out["object"] = "list";
  out["data"] = OrderedJson::array();
  for (const std::string& name : model_.names) out["data"].push_back(model_json(name, model_));
  exchange->respond(ok(out));
}

void OpenAiApi::get_model(const http::Request& /*request*/, const ExchangePtr& exchange, const http::PathParameters& parameters) {
  const std::string& name = parameters.at("id");
  if (serves(name)) return exchange->respond(ok(model_json(name, model_)));
  exchange->respond(
      error_response(Error{.code = ErrorCode::NotFound, .field = "model", .message = "model: `" + name + "` is not served"}));
}

void OpenAiApi::complete(const http::Request& request, const ExchangePtr& exchange, const http::PathParameters& /*none*/) {
  const RequestLimits limits{.vocabulary = model_.vocabulary, .choices_max = options_.choices_max};
  const TimePoint arrival = serving_.now();
  const auto done = generate(request, arrival, parse_completion_request(request.body, limits), exchange);
  if (!done) exchange->respond(error_response(done.error()));
}

void OpenAiApi::chat(const http::Request& request, const ExchangePtr& exchange, const http::PathParameters& /*none*/) {
  const RequestLimits limits{.vocabulary = model_.vocabulary, .choices_max = options_.choices_max};
  const TimePoint arrival = serving_.now();
  const auto done = generate(request, arrival, parse_chat_request(request.body, limits), exchange);
  if (!done) exchange->respond(error_response(done.error()));
}

/// Raw prompts follow the tokenizer's own file: control tokens written out in the text are control tokens, and its begin token is
/// added once.
Result<std::vector<TokenId>> OpenAiApi::encode(const std::string& prompt, const GenerationRequest& request) const {
  const auto begin = request.add_special_tokens ? text::BeginToken::AsConfigured : text::BeginToken::None;
  auto tokens = tokenizer_.encode(prompt, text::SpecialTokens::Parse, begin);
  if (!tokens) {
    return unexpected(tokens.error().code, "prompt", "prompt: " + tokens.error().message);
  }
  if (request.add_special_tokens && tokens->size() >= 2 && tokenizer_.begin_token() &&
      (*tokens)[0] == *tokenizer_.begin_token() && (*tokens)[1] == (*tokens)[0]) {
    tokens->erase(tokens->begin());  // the text brought its own
  }
  if (tokens->empty()) return unexpected(ErrorCode::InvalidArgument, "prompt", "prompt: has no tokens");
  return tokens;
}

Result<std::vector<std::vector<TokenId>>> OpenAiApi::prompts_of(const GenerationRequest& request) const {
  std::vector<std::vector<TokenId>> out;
  if (request.endpoint == Endpoint::Chat) {
    if (!model_.chat_form) {
      return unexpected(
          ErrorCode::InvalidArgument, "messages",
          "messages: the chat template of this model is of a form that the server does not know; send the formatted "
          "prompt to /v1/completions");
    }
    auto tokens = text::render_chat(tokenizer_, *model_.chat_form, request.messages);
    if (!tokens) return Unexpected(std::move(tokens).error());
    out.push_back(std::move(*tokens));
    return out;
  }
  for (const Prompt& prompt : request.prompts) {
    if (const auto* ids = std::get_if<std::vector<TokenId>>(&prompt)) {
      out.push_back(*ids);
    } else {
      auto tokens = encode(std::get<std::string>(prompt), request);
      if (!tokens) return Unexpected(std::move(tokens).error());
      out.push_back(std::move(*tokens));
    }
  }
  return out;
}

/// What the client named must fit exactly; the default takes what is left.
Result<std::int32_t> OpenAiApi::answer_tokens_max(const GenerationRequest& request, std::size_t prompt_tokens) const {
  const bool is_chat = request.endpoint == Endpoint::Chat;
  const auto limit = static_cast<std::int64_t>(model_.max_model_len);
  const std::int64_t left = limit - static_cast<std::int64_t>(prompt_tokens);
  if (left < 1) {
    const std::string field = is_chat ? "messages" : "prompt";
    return unexpected(ErrorCode::InvalidArgument, field,
                      field + ": " + std::to_string(prompt_tokens) +
                          " tokens leave no room for an answer; prompt and answer together may have " + std::to_string(limit));
  }
  if (!request.max_tokens) {
    return static_cast<std::int32_t>(is_chat ? left : std::min<std::int64_t>(left, completion_tokens_default));
  }
  if (*request.max_tokens > left) {
    return unexpected(ErrorCode::InvalidArgument, "max_tokens",
                      "max_tokens: " + std::to_string(*request.max_tokens) + " is more than the " + std::to_string(left) +
                          " left after " + std::to_string(prompt_tokens) +
                          " prompt tokens; prompt and answer together may have " + std::to_string(limit));
  }
  return *request.max_tokens;
}

// Before tokenising, which takes time in proportion to the text: megabytes that cannot fit must not hold an HTTP thread.
Result<void> OpenAiApi::check_text_bytes(const GenerationRequest& request) const {
  const auto check = [this](std::size_t bytes, const char* field) -> Result<void> {
    if (bytes <= text_bytes_max_) return {};
    return unexpected(ErrorCode::InvalidArgument, field,
                      std::string(field) + ": " + std::to_string(bytes) + " bytes of text cannot fit this server's limit of " +
                          std::to_string(model_.max_model_len) + " tokens, prompt and output together");
  };
  std::size_t chat_bytes = 0;
  for (const text::ChatMessage& message : request.messages) chat_bytes += message.content.size();
  if (auto fits = check(chat_bytes, "messages"); !fits) return fits;
  for (const Prompt& prompt : request.prompts) {
    const auto* text = std::get_if<std::string>(&prompt);
    if (text == nullptr) continue;
    if (auto fits = check(text->size(), "prompt"); !fits) return fits;
  }
  return {};
}

Result<void> OpenAiApi::generate(const http::Request& request, TimePoint arrival, Result<GenerationRequest> parsed,
                                 const ExchangePtr& exchange) {
  if (!parsed) return Unexpected(std::move(parsed).error());
  GenerationRequest& wanted = *parsed;
  if (!wanted.model.empty() && !serves(wanted.model)) {
    return unexpected(ErrorCode::NotFound, "model",
                      "model: `" + wanted.model + "` is not served; allowed: " + model_.names.front());
  }
  const auto targets = targets_of(request, serving_.objectives());
  if (!targets) return Unexpected(targets.error());
  if (auto fits = check_text_bytes(wanted); !fits) return fits;
  auto prompts = prompts_of(wanted);
  if (!prompts) return Unexpected(std::move(prompts).error());
  if (wanted.endpoint == Endpoint::Chat && !wanted.sampling.ignore_eos) {
    auto& ends = wanted.sampling.stop_token_ids;
    ends.insert(ends.end(), model_.chat_end_tokens.begin(), model_.chat_end_tokens.end());
  }

  const bool is_chat = wanted.endpoint == Endpoint::Chat;
  GenerationOptions options;
  options.head = {.endpoint = wanted.endpoint,
                  .id = (is_chat ? "chatcmpl-" : "cmpl-") + hex(random()) + hex(random()),
                  .created = options_.unix_time(),
                  .model = wanted.model.empty() ? model_.names.front() : wanted.model};
  options.headers = cors_headers();
  options.headers.emplace_back("X-Request-Id", request_id_of(request, random()));
  options.stops = wanted.stops;
  options.min_tokens = wanted.sampling.min_new_tokens;
  options.with_logprobs = wanted.sampling.top_logprobs >= 0;
  options.stream = wanted.stream;
  options.include_usage = wanted.include_usage;
  options.heartbeat = options_.heartbeat;
  options.choices_per_prompt = wanted.choices_per_prompt;
  for (const auto& prompt : *prompts) options.prompt_tokens += static_cast<std::int64_t>(prompt.size());

  auto generation = std::make_shared<Generation>(std::move(options), serving_, tokenizer_, exchange);
  std::vector<Submission> submissions;
  for (const auto& prompt : *prompts) {
    const auto max_new_tokens = answer_tokens_max(wanted, prompt.size());
    if (!max_new_tokens) return Unexpected(max_new_tokens.error());
    if (wanted.sampling.min_new_tokens > *max_new_tokens) {
      return unexpected(ErrorCode::InvalidArgument, "min_tokens",
                        "min_tokens: must not be above the " + std::to_string(*max_new_tokens) + " tokens the answer may have");
    }
    const std::uint64_t seed = wanted.seed ? *wanted.seed : random();
    for (std::int32_t i = 0; i < wanted.choices_per_prompt; ++i) {
      engine::Request one{.id = serving_.next_id(),
                          .prompt = prompt,
                          .sampling = wanted.sampling,
                          .arrival = arrival,
                          .ttft_target = targets->ttft,
                          .itl_target = targets->itl,
                          .cache_salt = wanted.cache_salt};
      one.sampling.seed = choice_seed(seed, i);
      one.sampling.max_new_tokens = *max_new_tokens;
      const SequenceId id = one.id;
      submissions.push_back({.request = std::move(one), .sink = generation->add_choice(id)});
    }
  }
  auto submitted = serving_.submit(std::move(submissions));
  if (!submitted) return Unexpected(std::move(submitted).error());
  generation->start();
  return {};
}

}  // namespace rubato::openai
