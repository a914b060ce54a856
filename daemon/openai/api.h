// SPDX-License-Identifier: Apache-2.0
// The OpenAI API of the data port: completions, chat completions and models, as rows for a router. It checks, tokenises and
// submits; what happens to a submission is Serving's business.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "daemon/http/router.h"
#include "daemon/openai/request.h"
#include "daemon/serving.h"
#include "engine/text/chat_template.h"
#include "engine/text/tokenizer.h"

namespace rubato::openai {

struct ModelInfo {
  std::vector<std::string> names;  // at least one; the first is the model's own, the others are aliases
  std::int64_t created = 0;        // seconds since 1970
  std::int32_t max_model_len = 0;  // the effective limit of prompt and answer together
  std::int32_t vocabulary = 0;     // of the model, which may be more than the tokenizer's
  std::optional<text::ChatForm> chat_form = text::ChatForm::Plain;  // none: chat requests are refused
  std::vector<TokenId> chat_end_tokens;  // end a chat answer, beside the model's own end tokens (text::chat_end_tokens)
};

struct ApiOptions {
  std::vector<std::string> api_keys;                               // empty: open to all
  std::int32_t choices_max = 128;                                  // prompts times n of one request
  std::chrono::milliseconds heartbeat = std::chrono::seconds(15);  // comment on a silent stream; zero: none
  std::uint64_t entropy = 0;                // for ids and the seeds of requests without one; zero: from the system
  std::function<std::int64_t()> unix_time;  // for `created`; none: the system's clock
};

/// Thread-safe; its rows run on HTTP threads. Serving and tokenizer must outlive it, and it must outlive the server its rows are
/// given to.
class OpenAiApi {
 public:
  OpenAiApi(Serving& serving, const text::Tokenizer& tokenizer, ModelInfo model, ApiOptions options = {});

  /// The rows of the API. The router's error_response and options_headers should be openai::error_response and preflight_headers.
  void add_routes(http::Router& router);

 private:
  using ExchangePtr = std::shared_ptr<http::Exchange>;
  using Work = void (OpenAiApi::*)(const http::Request&, const ExchangePtr&, const http::PathParameters&);
  void add(http::Router& router, std::string_view method, std::string_view pattern, Work work);

  void complete(const http::Request& request, const ExchangePtr& exchange, const http::PathParameters&);
  void chat(const http::Request& request, const ExchangePtr& exchange, const http::PathParameters&);
  void list_models(const http::Request& request, const ExchangePtr& exchange, const http::PathParameters&);
  void get_model(const http::Request& request, const ExchangePtr& exchange, const http::PathParameters& parameters);

  /// arrival: when the request had been read, before it was parsed.
  Result<void> generate(const http::Request& request, TimePoint arrival, Result<GenerationRequest> parsed,
                        const ExchangePtr& exchange);
  [[nodiscard]] Result<void> check_text_bytes(const GenerationRequest& request) const;
  [[nodiscard]] Result<std::vector<std::vector<TokenId>>> prompts_of(const GenerationRequest& request) const;
  [[nodiscard]] Result<std::vector<TokenId>> encode(const std::string& prompt, const GenerationRequest& request) const;
  [[nodiscard]] Result<std::int32_t> answer_tokens_max(const GenerationRequest& request, std::size_t prompt_tokens) const;
  [[nodiscard]] bool is_allowed(const http::Request& request) const;
  [[nodiscard]] bool serves(const std::string& name) const;
  [[nodiscard]] std::uint64_t random();

  Serving& serving_;
  const text::Tokenizer& tokenizer_;
  const ModelInfo model_;
  const std::size_t text_bytes_max_;  // no longer text can fit the model
  ApiOptions options_;
  std::atomic<std::uint64_t> random_state_;
};

/// The answer to a CORS preflight, which comes without credentials.
[[nodiscard]] std::vector<std::pair<std::string, std::string>> preflight_headers(const http::Request& request);

/// Targets from x-llm-d-slo-ttft-ms and x-llm-d-slo-tpot-ms, else x-slo-ttft-ms and x-slo-tpot-ms, else the defaults.
/// InvalidArgument: not an integer of 1..3,600,000 milliseconds.
[[nodiscard]] Result<ObjectivesSpec> targets_of(const http::Request& request, const ObjectivesSpec& defaults);

/// The seed of one of a request's choices: the request's own for the first, unlike it for all others.
[[nodiscard]] std::uint64_t choice_seed(std::uint64_t seed, std::int32_t choice);

}  // namespace rubato::openai
