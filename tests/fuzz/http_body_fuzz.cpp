// SPDX-License-Identifier: Apache-2.0
// Fuzz entry: request bodies of both generation endpoints from arbitrary bytes. What is accepted must keep its promises; what is
// refused must come with an error that is itself valid JSON.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string_view>
#include <variant>

#include "daemon/http/message.h"
#include "daemon/openai/error_answer.h"
#include "daemon/openai/request.h"

namespace {

using rubato::openai::GenerationRequest;

void check(const rubato::Result<GenerationRequest>& result, const rubato::openai::RequestLimits& limits) {
  if (!result) {
    const auto response = rubato::openai::error_response(result.error());
    if (response.status != 400) std::abort();
    if (rubato::openai::Json::parse(response.body, nullptr, false).is_discarded()) std::abort();
    return;
  }
  if (result->choices_per_prompt < 1 || result->choices_per_prompt > limits.choices_max) std::abort();
  if (!(result->sampling.temperature >= 0) || !(result->sampling.top_p > 0)) std::abort();
  for (const auto& stop : result->stops) {
    if (stop.empty()) std::abort();
  }
  for (const auto& prompt : result->prompts) {
    const auto* ids = std::get_if<std::vector<rubato::TokenId>>(&prompt);
    if (ids == nullptr) continue;
    if (ids->empty()) std::abort();
    for (const auto id : *ids) {
      if (id < 0 || id >= limits.vocabulary) std::abort();
    }
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::string_view body(reinterpret_cast<const char*>(data), size);
  const rubato::openai::RequestLimits limits{.vocabulary = 320, .choices_max = 128};
  check(rubato::openai::parse_completion_request(body, limits), limits);
  check(rubato::openai::parse_chat_request(body, limits), limits);
  (void)rubato::http::parse_target(body);
  return 0;
}
