// SPDX-License-Identifier: Apache-2.0
// A Serving without an engine, for tests of the data port: tokens come from a script, one per sequence and step; steps are taken
// by the test or by a thread of its own. It counts what is outstanding and how everything ended.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "daemon/serving.h"

namespace rubato::test {

class FakeServing final : public Serving {
 public:
  /// The token of a request at an index, or none: its end token comes at this index.
  using Script = std::function<std::optional<TokenId>(const engine::Request& request, std::int32_t index)>;

  /// Token ids that spell text in a byte tokenizer; then the end token.
  static Script spelling(std::string text) {
    return [spelled = std::move(text)](const engine::Request&, std::int32_t index) -> std::optional<TokenId> {
      if (static_cast<std::size_t>(index) >= spelled.size()) return std::nullopt;
      return static_cast<unsigned char>(spelled[static_cast<std::size_t>(index)]);
    };
  }

  explicit FakeServing(Script script = spelling("hello world")) : script_(std::move(script)) {}
  ~FakeServing() override { stop_thread(); }

  /// Steps as fast as there is work, on a thread of its own.
  void start_thread() {
    thread_ = std::jthread([this](std::stop_token stop) {
      while (!stop.stop_requested()) {
        if (step()) continue;
        std::unique_lock lock(mutex_);
        work_.wait(lock, stop, [this] { return !active_.empty(); });
      }
    });
  }
  void stop_thread() {
    if (!thread_.joinable()) return;
    thread_.request_stop();
    thread_.join();
  }

  /// One token for every sequence. False when there is none.
  bool step() {
    std::vector<std::pair<engine::TokenEvent, std::shared_ptr<TokenSink>>> events;
    std::vector<Active> ended;  // sinks die outside the lock
    {
      const std::lock_guard lock(mutex_);
      if (active_.empty()) return false;
      for (auto entry = active_.begin(); entry != active_.end();) {
        Active& active = entry->second;
        events.emplace_back(next_event(active), active.submission.sink);
        if (events.back().first.finish) {
          ++ended_by_itself_;
          ended.push_back(std::move(active));
          entry = active_.erase(entry);
        } else {
          ++entry;
        }
      }
    }
    for (auto& [event, sink] : events) sink->on_token(event);
    return true;
  }
  /// Until nothing is outstanding.
  void run_to_end() {
    while (step()) {
    }
  }

  // What a test looks at.
  [[nodiscard]] std::size_t outstanding() const {
    const std::lock_guard lock(mutex_);
    return active_.size();
  }
  [[nodiscard]] int cancelled(Outcome reason) const {
    const std::lock_guard lock(mutex_);
    const auto found = cancelled_.find(reason);
    return found == cancelled_.end() ? 0 : found->second;
  }
  [[nodiscard]] int ended_by_itself() const {
    const std::lock_guard lock(mutex_);
    return ended_by_itself_;
  }
  /// Every request ever accepted, in order.
  [[nodiscard]] std::vector<engine::Request> requests() const {
    const std::lock_guard lock(mutex_);
    return requests_;
  }

  // What a test sets.
  /// The sequence that is the nth (0-based) accepted fails with error instead of its token at index.
  void fail_at(std::size_t nth, std::int32_t index, Error error) {
    const std::lock_guard lock(mutex_);
    failures_[nth] = {index, std::move(error)};
  }
  void set_capacity(std::size_t capacity) {
    const std::lock_guard lock(mutex_);
    capacity_ = capacity;
  }

  // Serving.
  SequenceId next_id() override { return SequenceId{next_id_.fetch_add(1)}; }
  Result<void> submit(std::vector<Submission> choices) override {
    const std::lock_guard lock(mutex_);
    if (draining_) return unexpected(ErrorCode::Unavailable, "draining");
    if (active_.size() + choices.size() > capacity_) return unexpected(ErrorCode::ResourceExhausted, "the waiting queue is full");
    for (Submission& choice : choices) {
      CHECK(choice.sink && !choice.request.prompt.empty());
      requests_.push_back(choice.request);
      const SequenceId id = choice.request.id;
      const std::size_t nth = requests_.size() - 1;
      CHECK(active_.emplace(id, Active{.submission = std::move(choice), .nth = nth, .index = 0}).second, "id given twice");
    }
    work_.notify_all();
    return {};
  }
  void cancel(SequenceId id, Outcome reason) override {
    std::optional<Active> ended;
    const std::lock_guard lock(mutex_);
    const auto found = active_.find(id);
    if (found == active_.end()) return;
    ended = std::move(found->second);
    active_.erase(found);
    ++cancelled_[reason];
  }
  std::uint64_t apply(const KnobValues& /*knobs*/) override { return 1; }
  std::shared_ptr<const ServingStatus> status() const override { return std::make_shared<ServingStatus>(); }
  void set_objectives(const ObjectivesSpec& objectives) override {
    const std::lock_guard lock(mutex_);
    objectives_ = objectives;
  }
  ObjectivesSpec objectives() const override {
    const std::lock_guard lock(mutex_);
    return objectives_;
  }
  TimePoint now() const override {
    return TimePoint(std::chrono::duration_cast<Duration>(std::chrono::steady_clock::now().time_since_epoch()));
  }
  void begin_drain() override {
    const std::lock_guard lock(mutex_);
    draining_ = true;
  }
  bool idle() const override { return outstanding() == 0; }

  static constexpr TokenId end_token = 2;

 private:
  struct Active {
    Submission submission;
    std::size_t nth = 0;
    std::int32_t index = 0;
  };
  struct Failure {
    std::int32_t index = 0;
    Error error;
  };

  engine::TokenEvent next_event(Active& active) {
    const engine::Request& request = active.submission.request;
    engine::TokenEvent event;
    event.id = request.id;
    event.index = active.index;
    event.time = now();
    if (const auto failure = failures_.find(active.nth); failure != failures_.end() && failure->second.index == active.index) {
      event.finish = engine::FinishReason::Failed;
      event.error = failure->second.error;
      return event;
    }
    const auto token = script_(request, active.index);
    const auto& stops = request.sampling.stop_token_ids;
    event.sample = engine::Sample{.token = token.value_or(end_token), .logprob = -0.5F, .top = {}};
    for (std::int32_t i = 0; i < request.sampling.top_logprobs; ++i)
      event.sample->top.push_back({'a' + i, -0.5F - static_cast<float>(i)});
    if ((!token && !request.sampling.ignore_eos) || std::find(stops.begin(), stops.end(), event.sample->token) != stops.end()) {
      event.finish = engine::FinishReason::Stop;
    } else if (active.index + 1 >= request.sampling.max_new_tokens) {
      event.finish = engine::FinishReason::Length;
    }
    ++active.index;
    return event;
  }

  const Script script_;
  std::atomic<std::uint64_t> next_id_ = 1;
  mutable std::mutex mutex_;
  std::condition_variable_any work_;
  std::map<SequenceId, Active> active_;
  std::map<std::size_t, Failure> failures_;
  std::map<Outcome, int> cancelled_;
  std::vector<engine::Request> requests_;
  ObjectivesSpec objectives_;
  std::size_t capacity_ = 100'000;
  int ended_by_itself_ = 0;
  bool draining_ = false;
  std::jthread thread_;
};

}  // namespace rubato::test
