// SPDX-License-Identifier: Apache-2.0
// From token events to answers.
#include "daemon/openai/generation.h"

namespace rubato::openai {

class Generation::Sink final : public TokenSink {
 public:
  Sink(std::shared_ptr<Generation> generation, std::int32_t choice) : generation_(std::move(generation)), choice_(choice) {}
  void on_token(const engine::TokenEvent& event) override { generation_->deliver(choice_, event); }

 private:
  const std::shared_ptr<Generation> generation_;
  const std::int32_t choice_;
};

Generation::Generation(GenerationOptions options, Serving& serving, const text::Tokenizer& tokenizer,
                       std::shared_ptr<http::Exchange> exchange)
    : options_(std::move(options)), serving_(serving), tokenizer_(tokenizer), exchange_(std::move(exchange)) {}

std::shared_ptr<TokenSink> Generation::add_choice(SequenceId id) {
  choices_.emplace_back(id, tokenizer_, options_.stops);
  return std::make_shared<Sink>(shared_from_this(), static_cast<std::int32_t>(choices_.size()) - 1);
}

void Generation::start() {
  if (options_.stream) {
    http::Response head{.status = 200, .content_type = "text/event-stream", .body = {}, .headers = options_.headers};
    head.headers.emplace_back("Cache-Control", "no-cache");
    head.headers.emplace_back("X-Accel-Buffering", "no");
    exchange_->begin_stream(std::move(head));
    if (options_.heartbeat.count() > 0) exchange_->set_heartbeat(": keep-alive\n\n", options_.heartbeat);
  }
  exchange_->on_close([self = weak_from_this()] {
    if (const auto generation = self.lock()) generation->client_gone();
  });
}

void Generation::deliver(std::int32_t choice, const engine::TokenEvent& event) {
  if (gone_) return;
  const std::lock_guard lock(mutex_);
  queue_.emplace_back(choice, event);
  if (drain_posted_) return;
  drain_posted_ = true;
  exchange_->post([self = shared_from_this()] { self->drain(); });
}

void Generation::drain() {
  std::vector<std::pair<std::int32_t, engine::TokenEvent>> events;
  {
    const std::lock_guard lock(mutex_);
    events.swap(queue_);
    drain_posted_ = false;
  }
  std::string out;  // all events of this turn leave in one write
  for (auto& [index, event] : events) {
    if (over_) return;
    if (event.finish == engine::FinishReason::Failed) return fail(event.error, std::move(out));
    take(index, event, out);
  }
  if (over_) return;
  if (finished_count_ == choices_.size()) return complete(std::move(out));
  if (!out.empty()) exchange_->write(std::move(out));
}

void Generation::take(std::int32_t index, engine::TokenEvent& event, std::string& out) {
  Choice& choice = choices_[static_cast<std::size_t>(index)];
  if (choice.finish_reason) return;  // tokens that were on their way when a stop string matched
  std::string piece;
  const auto show = [&](const std::string& text) {
    piece += choice.tokens > options_.min_tokens ? choice.matcher.push(text) : text;
  };
  if (event.sample) {
    ++choice.tokens;
    choice.cached_tokens = event.cached_tokens;
    if (event.finish != engine::FinishReason::Stop) {  // an end token is counted but not shown
      show(choice.detokenizer.push(event.sample->token));
      if (options_.with_logprobs) choice.samples.push_back(std::move(*event.sample));
    }
  }
  if (event.finish && !choice.matcher.matched()) {
    show(choice.detokenizer.finish());
    if (!choice.matcher.matched()) piece += choice.matcher.finish();
  }
  if (choice.matcher.matched()) {
    choice.finish_reason = "stop";
    if (!event.finish) serving_.cancel(choice.id, Outcome::Stop);
  } else if (event.finish) {
    choice.finish_reason = event.finish == engine::FinishReason::Length ? "length" : "stop";
  }
  if (choice.finish_reason) ++finished_count_;
  emit(index, piece, out);
}

OrderedJson Generation::logprobs_of(Choice& choice) {
  if (choice.samples.empty()) return {};
  OrderedJson json = logprobs_json(options_.head.endpoint, tokenizer_, choice.samples, choice.text_offset);
  choice.samples.clear();
  return json;
}

void Generation::emit(std::int32_t index, const std::string& piece, std::string& out) {
  Choice& choice = choices_[static_cast<std::size_t>(index)];
  if (!options_.stream) {
    choice.text += piece;
    return;
  }
  const bool is_chat = options_.head.endpoint == Endpoint::Chat;
  const auto send = [&](std::string_view text, Role role, OrderedJson logprobs, std::optional<std::string> finish_reason) {
    out += delta_event(
        options_.head,
        {.index = index, .text = text, .role = role, .logprobs = std::move(logprobs), .finish_reason = std::move(finish_reason)},
        options_.include_usage ? UsageMember::Null : UsageMember::None);
  };
  // Logprobs travel with the text that their tokens made certain; those of tokens whose text a stop string swallowed, with the
  // finish.
  if (!is_chat) {
    if (!piece.empty() || choice.finish_reason) send(piece, Role::None, logprobs_of(choice), choice.finish_reason);
    return;
  }
  if (!std::exchange(choice.has_role, true)) send({}, Role::Assistant, {}, std::nullopt);
  if (!piece.empty()) send(piece, Role::None, logprobs_of(choice), std::nullopt);
  if (choice.finish_reason) send({}, Role::None, logprobs_of(choice), choice.finish_reason);
}

void Generation::complete(std::string out) {
  over_ = true;
  Usage usage{.prompt_tokens = options_.prompt_tokens, .completion_tokens = 0};
  for (std::size_t i = 0; i < choices_.size(); ++i) {
    usage.completion_tokens += choices_[i].tokens;
    // As the prompt counts once, so does what of it was there: the others of its choices may find what this one has computed.
    if (i % static_cast<std::size_t>(options_.choices_per_prompt) == 0) usage.cached_tokens += choices_[i].cached_tokens;
  }
  if (options_.stream) {
    if (options_.include_usage) out += usage_event(options_.head, usage);
    out += done_event;
    exchange_->write(std::move(out));
    exchange_->end_stream();
    return;
  }
  std::vector<OrderedJson> choices;
  for (std::size_t i = 0; i < choices_.size(); ++i) {
    choices.push_back(choice_json(options_.head.endpoint, static_cast<std::int32_t>(i), choices_[i].text,
                                  *choices_[i].finish_reason, logprobs_of(choices_[i])));
  }
  exchange_->respond({.status = 200,
                      .content_type = "application/json",
                      .body = dump(answer_json(options_.head, std::move(choices), usage)),
                      .headers = options_.headers});
}

void Generation::fail(const Error& error, std::string out) {
  over_ = true;
  gone_ = true;
  cancel_unfinished(Outcome::Failed);
  if (options_.stream) {
    exchange_->write(out + event_of(error_json(error)));
    exchange_->abort_stream();
    return;
  }
  http::Response response = error_response(error);
  response.headers.insert(response.headers.end(), options_.headers.begin(), options_.headers.end());
  exchange_->respond(std::move(response));
}

void Generation::client_gone() {
  over_ = true;
  gone_ = true;
  cancel_unfinished(Outcome::Aborted);
}

void Generation::cancel_unfinished(Outcome reason) {
  for (const Choice& choice : choices_) {
    if (!choice.finish_reason) serving_.cancel(choice.id, reason);
  }
}

}  // namespace rubato::openai
