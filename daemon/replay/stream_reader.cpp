// SPDX-License-Identifier: Apache-2.0
#include "daemon/replay/stream_reader.h"

#include <nlohmann/json.hpp>

namespace rubato::replay {
namespace {

constexpr std::size_t line_bytes_max = 1 << 20;

/// Whether the event brings at least one token: text, or no end yet. (A last event may hold a finish_reason alone.)
bool brings_token(const nlohmann::json& choice) {
  const auto text = choice.find("text");
  if (text != choice.end() && text->is_string() && !text->get_ref<const std::string&>().empty()) return true;
  if (const auto delta = choice.find("delta"); delta != choice.end() && delta->is_object()) {
    const auto content = delta->find("content");
    return content != delta->end() && content->is_string() && !content->get_ref<const std::string&>().empty();
  }
  const auto reason = choice.find("finish_reason");
  return reason == choice.end() || reason->is_null();
}

}  // namespace

void StreamReader::feed(std::string_view bytes, Duration now) {
  while (!bytes.empty() && !done()) {
    const std::size_t end = bytes.find('\n');
    partial_ += bytes.substr(0, end);
    if (partial_.size() > line_bytes_max) {
      failure_ = "bad stream";
      return;
    }
    if (end == std::string_view::npos) return;
    bytes.remove_prefix(end + 1);
    if (partial_.ends_with('\r')) partial_.pop_back();
    line(partial_, now);
    partial_.clear();
  }
}

void StreamReader::line(std::string_view text, Duration now) {
  if (text.empty()) {  // an empty line ends an event
    if (!data_.empty()) event(data_, now);
    data_.clear();
    return;
  }
  if (!text.starts_with("data:")) return;  // a comment, or a field that is not needed
  text.remove_prefix(5);
  if (text.starts_with(' ')) text.remove_prefix(1);
  if (!data_.empty()) data_ += '\n';
  data_ += text;
  if (data_.size() > line_bytes_max) failure_ = "bad stream";
}

void StreamReader::event(std::string_view data, Duration now) {
  if (data == "[DONE]") {
    done_ = true;
    return;
  }
  const nlohmann::json json = nlohmann::json::parse(data, nullptr, false);
  if (!json.is_object()) {
    failure_ = "bad stream";
    return;
  }
  if (const auto error = json.find("error"); error != json.end() && !error->is_null()) {
    failure_ = "error in stream";
    return;
  }
  if (const auto usage = json.find("usage"); usage != json.end() && usage->is_object()) {
    const auto tokens = usage->find("completion_tokens");
    if (tokens != usage->end() && tokens->is_number_integer()) tokens_reported_ = tokens->get<std::int32_t>();
    const auto details = usage->find("prompt_tokens_details");
    if (details != usage->end() && details->is_object()) {
      const auto cached = details->find("cached_tokens");
      if (cached != details->end() && cached->is_number_integer()) cached_reported_ = cached->get<std::int32_t>();
    }
  }
  const auto choices = json.find("choices");
  if (choices == json.end() || !choices->is_array() || choices->empty() || !choices->front().is_object()) return;
  if (brings_token(choices->front())) token_times_.push_back(now);
}

void StreamReader::finish(Outcome& outcome) const {
  outcome.tokens = tokens_reported_ >= 0 ? tokens_reported_ : static_cast<std::int32_t>(token_times_.size());
  outcome.cached_tokens = cached_reported_;
  if (!token_times_.empty()) outcome.ttft = token_times_.front() - outcome.arrived;
  outcome.gaps.clear();
  for (std::size_t index = 1; index < token_times_.size(); ++index) {
    outcome.gaps.push_back(token_times_[index] - token_times_[index - 1]);
  }
  if (!failure_.empty()) {
    outcome.failure = failure_;
  } else if (!done_) {
    outcome.failure = "disconnected";
  } else if (token_times_.empty() || outcome.tokens < tokens_expected_) {
    outcome.failure = "too few tokens";
  }
}

}  // namespace rubato::replay
