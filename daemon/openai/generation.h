// SPDX-License-Identifier: Apache-2.0
// One request being generated: takes the token events of all its choices, turns them into text and stop decisions, and answers
// the exchange.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "daemon/http/server.h"
#include "daemon/openai/answer.h"
#include "daemon/openai/error_answer.h"
#include "daemon/serving.h"
#include "engine/text/stop_matcher.h"
#include "engine/text/tokenizer.h"

namespace rubato::openai {

struct GenerationOptions {
  AnswerHead head;
  std::vector<std::pair<std::string, std::string>> headers;  // of the answer
  std::vector<std::string> stops;
  std::int64_t prompt_tokens = 0;  // of all prompts, each counted once
  std::int32_t choices_per_prompt = 1;
  std::int32_t min_tokens = 0;  // stop strings are not looked for in the first so many tokens
  bool with_logprobs = false;
  bool stream = false;
  bool include_usage = false;
  std::chrono::milliseconds heartbeat{};  // zero: none
};

/// The lane's thread only queues events (deliver); everything else runs on the connection's strand: the handler, the work it
/// posts and the close callback. So text, JSON and stop strings never cost the lane anything, and choices need no lock.
///
/// Kept alive by its sinks: when the lane has let go of the last one and the answer is not complete, the exchange goes too, and
/// the server tells the client. The queue holds at most the tokens the request may generate; that bound is checked at submission.
class Generation : public std::enable_shared_from_this<Generation> {
 public:
  /// serving and tokenizer must outlive it.
  Generation(GenerationOptions options, Serving& serving, const text::Tokenizer& tokenizer,
             std::shared_ptr<http::Exchange> exchange);

  /// One more choice, before start(): the sink to submit it with.
  [[nodiscard]] std::shared_ptr<TokenSink> add_choice(SequenceId id);

  /// After the submission was accepted: begins the stream, and watches for the client going away.
  void start();

 private:
  class Sink;
  struct Choice {
    Choice(SequenceId sequence, const text::Tokenizer& tokenizer, const std::vector<std::string>& stops)
        : id(sequence), detokenizer(tokenizer), matcher(stops) {}
    SequenceId id;
    text::Detokenizer detokenizer;
    text::StopMatcher matcher;
    std::string text;                     // whole answers alone
    std::vector<engine::Sample> samples;  // for logprobs; of a stream: not sent yet
    std::int64_t text_offset = 0;
    std::int64_t tokens = 0;
    std::int32_t cached_tokens = 0;
    bool has_role = false;
    std::optional<std::string> finish_reason;
  };

  void deliver(std::int32_t choice, const engine::TokenEvent& event);  // lane thread
  // strand
  void drain();
  void take(std::int32_t index, engine::TokenEvent& event, std::string& out);
  void emit(std::int32_t index, const std::string& piece, std::string& out);
  void fail(const Error& error, std::string out);
  void complete(std::string out);
  void client_gone();
  void cancel_unfinished(Outcome reason);
  [[nodiscard]] OrderedJson logprobs_of(Choice& choice);

  const GenerationOptions options_;
  Serving& serving_;
  const text::Tokenizer& tokenizer_;
  const std::shared_ptr<http::Exchange> exchange_;
  std::vector<Choice> choices_;
  std::size_t finished_count_ = 0;
  bool over_ = false;  // answered, failed or abandoned

  std::mutex mutex_;
  std::vector<std::pair<std::int32_t, engine::TokenEvent>> queue_;  // guarded by mutex_
  bool drain_posted_ = false;                                       // guarded by mutex_
  std::atomic<bool> gone_ = false;
};

}  // namespace rubato::openai
