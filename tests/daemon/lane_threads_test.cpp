// SPDX-License-Identifier: Apache-2.0
// The door and the thread behind it, over a real (tiny) CPU engine: nothing is lost, refused requests never enter, and the last
// word always comes.
#include "daemon/lane_threads.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <condition_variable>
#include <mutex>
#include <optional>
#include <vector>

#include "engine/cpu/backend.h"
#include "engine/model/config.h"
#include "engine/model/weights.h"
#include "tests/support/fake_backend.h"
#include "tests/support/raw_client.h"

namespace rubato {
namespace {

using namespace std::chrono_literals;
using test::eventually;

class Collector final : public TokenSink {
 public:
  void on_token(const engine::TokenEvent& event) override {
    const std::lock_guard lock(mutex_);
    if (event.sample) tokens_.push_back(event.sample->token);
    if (event.finish) finish_ = event.finish;
    error_ = event.error;
    changed_.notify_all();
  }
  bool wait_finish() {
    std::unique_lock lock(mutex_);
    return changed_.wait_for(lock, 20s, [&] { return finish_.has_value(); });
  }
  bool wait_tokens(std::size_t count) {
    std::unique_lock lock(mutex_);
    return changed_.wait_for(lock, 20s, [&] { return tokens_.size() >= count; });
  }
  std::vector<TokenId> tokens() {
    const std::lock_guard lock(mutex_);
    return tokens_;
  }
  std::optional<engine::FinishReason> finish() {
    const std::lock_guard lock(mutex_);
    return finish_;
  }
  Error error() {
    const std::lock_guard lock(mutex_);
    return error_;
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<TokenId> tokens_;
  std::optional<engine::FinishReason> finish_;
  Error error_;
};

class Recorder final : public Observer {
 public:
  void on_request(std::int32_t choices) override { choices_let_in += choices; }
  void on_arrival(const Arrival&) override { ++arrivals; }
  void on_rejected(TimePoint, std::int32_t choices) override { rejected += choices; }
  void on_token_gap(SequenceId, Duration) override { ++gaps; }
  void on_first_token(const Arrival&, Duration ttft) override {
    ++first_tokens;
    if (ttft <= Duration::zero()) ++negative_ttft;
  }
  void on_request_end(const RequestRecord& record) override {
    const std::lock_guard lock(mutex);
    records.push_back(record);
  }
  void on_step(const engine::StepRecord& record, const policies::SchedulerCounts&) override {
    last_settings = record.settings_number;
  }
  void on_settings(const Settings& settings, TimePoint) override { announced_settings = settings.number; }

  std::atomic<int> choices_let_in = 0, arrivals = 0, rejected = 0, gaps = 0, first_tokens = 0, negative_ttft = 0;
  std::atomic<std::uint64_t> last_settings = 0, announced_settings = 0;
  std::mutex mutex;
  std::vector<RequestRecord> records;
};

class LaneThreadsTest : public ::testing::Test {
 protected:
  LaneThreadsTest() {
    const SyntheticModel model{.hidden_size = 32, .layers = 2, .heads = 4, .kv_heads = 2, .feed_forward = 64, .vocabulary = 64};
    const engine::ModelConfig config = engine::synthetic_model_config(model).value();
    const auto weights = engine::make_synthetic_weights(config, 1, DataType::Float32);
    const engine::BackendOptions options{.block_count = 64, .max_tokens_per_step = 64, .max_rows = 4, .max_model_len = 512};
    auto backend = engine::make_cpu_backend(config, *weights, options);
    CHECK(backend.has_value(), backend.error().message);
    LaneThreadsOptions thread_options;
    thread_options.limits = {.each = {.max_model_len = 512, .max_num_seqs = 4, .max_waiting = 2, .block_count = 64}};
    thread_options.initial = KnobValues{.max_num_batched_tokens = 64, .max_num_seqs = 4};
    thread_options.objectives = ObjectivesSpec{};
    thread_options.observers = {&recorder};
    thread_options.backend_description = "test";
    std::vector<std::unique_ptr<engine::Backend>> backends;
    backends.push_back(std::move(*backend));
    serving = start_lane_threads(std::move(backends), thread_options);
  }

  Submission submission(std::shared_ptr<Collector> sink, std::int32_t tokens, std::vector<TokenId> prompt = {1, 2, 3}) {
    Submission made;
    made.request.id = serving->next_id();
    made.request.prompt = std::move(prompt);
    made.request.sampling.temperature = 0;
    made.request.sampling.max_new_tokens = tokens;
    made.request.sampling.ignore_eos = true;
    made.request.arrival = serving->now();
    made.request.ttft_target = 10s;
    made.request.itl_target = 10s;
    made.sink = std::move(sink);
    return made;
  }

  Result<void> submit(Submission one) {
    std::vector<Submission> choices;
    choices.push_back(std::move(one));
    return serving->submit(std::move(choices));
  }

  Recorder recorder;
  std::unique_ptr<OwnedServing> serving;
};

TEST_F(LaneThreadsTest, a_request_gets_all_its_tokens_and_one_record) {
  const auto sink = std::make_shared<Collector>();
  ASSERT_TRUE(submit(submission(sink, 9)));
  ASSERT_TRUE(sink->wait_finish());
  EXPECT_EQ(sink->tokens().size(), 9U);
  EXPECT_EQ(sink->finish(), engine::FinishReason::Length);
  EXPECT_TRUE(eventually([&] { return serving->idle(); }));
  EXPECT_EQ(recorder.arrivals, 1);
  EXPECT_EQ(recorder.first_tokens, 1);
  EXPECT_EQ(recorder.negative_ttft, 0);
  EXPECT_EQ(recorder.gaps, 8);
  ASSERT_EQ(recorder.records.size(), 1U);
  EXPECT_EQ(recorder.records[0].output_tokens, 9);
  EXPECT_EQ(recorder.records[0].verdict, Verdict::Good);
  EXPECT_TRUE(eventually([&] { return serving->status()->counts.free_blocks == 64; }));
}

TEST_F(LaneThreadsTest, what_cannot_fit_is_refused_with_the_limit) {
  const auto refused = [&](Submission one) {
    const Result<void> result = submit(std::move(one));
    CHECK(!result.has_value());
    return result.error();
  };
  const auto sink = std::make_shared<Collector>();
  EXPECT_EQ(refused(submission(sink, 4, {})).field, "prompt");
  EXPECT_EQ(refused(submission(sink, 4, {64})).field, "prompt");
  EXPECT_EQ(refused(submission(sink, 4, {-1})).field, "prompt");
  EXPECT_EQ(refused(submission(sink, 1, std::vector<TokenId>(512, 1))).field, "prompt");
  const Error too_long = refused(submission(sink, 510));
  EXPECT_EQ(too_long.field, "max_tokens");
  EXPECT_EQ(too_long.code, ErrorCode::InvalidArgument);
  EXPECT_THAT(too_long.message, ::testing::HasSubstr("512"));
  EXPECT_TRUE(serving->idle());
}

TEST_F(LaneThreadsTest, all_choices_of_a_request_enter_or_none) {
  std::vector<std::shared_ptr<Collector>> sinks;
  for (int i = 0; i < 4; ++i) {
    sinks.push_back(std::make_shared<Collector>());
    ASSERT_TRUE(submit(submission(sinks.back(), 400)));
  }
  std::vector<Submission> three;
  for (int i = 0; i < 3; ++i) three.push_back(submission(std::make_shared<Collector>(), 4));
  const Result<void> refused = serving->submit(std::move(three));
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code, ErrorCode::ResourceExhausted);
  EXPECT_EQ(recorder.rejected, 3);
  for (const auto& sink : sinks) ASSERT_TRUE(sink->wait_finish());
  EXPECT_EQ(recorder.arrivals, 4);
  EXPECT_EQ(recorder.choices_let_in, 4);
}

TEST_F(LaneThreadsTest, a_cancel_ends_silently_once_and_frees_everything) {
  const auto sink = std::make_shared<Collector>();
  Submission one = submission(sink, 500);
  const SequenceId id = one.request.id;
  ASSERT_TRUE(submit(std::move(one)));
  ASSERT_TRUE(sink->wait_tokens(1));
  serving->cancel(id, Outcome::Aborted);
  serving->cancel(id, Outcome::Aborted);
  serving->cancel(SequenceId{999999}, Outcome::Aborted);
  EXPECT_TRUE(eventually([&] { return serving->idle() && serving->status()->counts.free_blocks == 64; }));
  EXPECT_FALSE(sink->finish().has_value());
  const std::lock_guard lock(recorder.mutex);
  ASSERT_EQ(recorder.records.size(), 1U);
  EXPECT_EQ(recorder.records[0].outcome, Outcome::Aborted);
}

TEST_F(LaneThreadsTest, settings_are_current_from_the_next_step) {
  const std::uint64_t number = serving->apply(KnobValues{.max_num_batched_tokens = 32, .max_num_seqs = 2});
  EXPECT_EQ(number, 2U);
  const auto sink = std::make_shared<Collector>();
  ASSERT_TRUE(submit(submission(sink, 3)));
  ASSERT_TRUE(sink->wait_finish());
  EXPECT_EQ(recorder.announced_settings, number);
  EXPECT_EQ(recorder.last_settings, number);
  EXPECT_TRUE(eventually([&] { return serving->status()->settings.knobs.max_num_batched_tokens == 32; }));
}

TEST_F(LaneThreadsTest, draining_refuses_new_work_and_finishes_old) {
  const auto running = std::make_shared<Collector>();
  ASSERT_TRUE(submit(submission(running, 200)));
  serving->begin_drain();
  const Result<void> refused = submit(submission(std::make_shared<Collector>(), 2));
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code, ErrorCode::Unavailable);
  ASSERT_TRUE(running->wait_finish());
  EXPECT_EQ(running->finish(), engine::FinishReason::Length);
  EXPECT_EQ(running->tokens().size(), 200U);
}

TEST_F(LaneThreadsTest, stopping_gives_everybody_left_a_last_word) {
  std::vector<std::shared_ptr<Collector>> sinks;
  for (int i = 0; i < 6; ++i) {
    sinks.push_back(std::make_shared<Collector>());
    ASSERT_TRUE(submit(submission(sinks.back(), 500)));
  }
  serving->stop();
  serving->stop();
  EXPECT_TRUE(serving->idle());
  EXPECT_TRUE(serving->status()->draining);
  for (const auto& sink : sinks) {
    ASSERT_TRUE(sink->wait_finish());
    if (sink->finish() == engine::FinishReason::Failed) {
      EXPECT_EQ(sink->error().code, ErrorCode::Unavailable);
    }
  }
  // Also those that the lane had not taken yet are on the books: each arrived and each ended.
  EXPECT_EQ(recorder.arrivals, 6);
  EXPECT_EQ(recorder.records.size(), 6U);
}

// ---- several lanes

enum class Fault { None, Error, Exception };

/// A decode lane and a prefill lane, on one fake device or on two; the prefill lane breaks in its third step.
std::unique_ptr<OwnedServing> start_two_lanes(std::int32_t devices, Fault fault, Observer& observer) {
  test::FakeBackend::Options prefill{.block_count = 64};
  if (fault == Fault::Error) prefill.fails_at_run = 3;
  if (fault == Fault::Exception) prefill.throws_at_run = 3;
  auto decode = std::make_unique<test::FakeBackend>(test::FakeBackend::Options{.block_count = 64});
  std::vector<std::unique_ptr<engine::Backend>> backends;
  if (devices == 1) {
    auto sibling = std::make_unique<test::FakeBackend>(prefill, decode->cells());
    backends.push_back(std::move(decode));
    backends.push_back(std::move(sibling));
  } else {
    backends.push_back(std::make_unique<test::FakeBackend>(prefill));
    backends.push_back(std::move(decode));
  }
  LaneThreadsOptions options;
  options.limits = {.each = {.max_model_len = 512, .max_num_seqs = 8, .max_waiting = 32, .block_count = 64},
                    .devices = devices,
                    .lanes_per_device = devices == 1 ? 2 : 1};
  options.initial = KnobValues{.max_num_batched_tokens = 32, .max_num_seqs = 8, .mode = Mode::Disaggregated};
  options.observers = {&observer};
  return start_lane_threads(std::move(backends), options);
}

Result<void> submit_to(Serving& serving, const std::shared_ptr<Collector>& sink, std::int32_t prompt_tokens,
                       std::int32_t tokens) {
  std::vector<Submission> choices(1);
  engine::Request& request = choices[0].request;
  request.id = serving.next_id();
  for (std::int32_t i = 0; i < prompt_tokens; ++i) request.prompt.push_back((i * 7 + 5) % 90 + 3);
  request.sampling.temperature = 0;
  request.sampling.max_new_tokens = tokens;
  request.sampling.ignore_eos = true;
  request.arrival = serving.now();
  request.ttft_target = request.itl_target = 10s;
  choices[0].sink = sink;
  return serving.submit(std::move(choices));
}

TEST(SeveralLanes, requests_go_through_prefill_and_decode_lane_and_their_time_to_first_token_is_recorded_once) {
  for (const std::int32_t devices : {1, 2}) {
    Recorder recorder;
    const auto serving = start_two_lanes(devices, Fault::None, recorder);
    std::vector<std::shared_ptr<Collector>> sinks;
    for (int i = 0; i < 12; ++i) {
      sinks.push_back(std::make_shared<Collector>());
      ASSERT_TRUE(submit_to(*serving, sinks.back(), 20 + 9 * i, 40));
    }
    for (const auto& sink : sinks) {
      ASSERT_TRUE(sink->wait_finish());
      EXPECT_EQ(sink->tokens().size(), 40U);
    }
    EXPECT_TRUE(eventually([&] { return serving->idle() && serving->status()->counts.free_blocks == 64 * devices; }));
    const std::lock_guard lock(recorder.mutex);
    EXPECT_EQ(recorder.first_tokens, 12);
    EXPECT_EQ(recorder.gaps, 12 * 39);
    EXPECT_EQ(recorder.records.size(), 12U);
    const policies::HandoffCounts handoffs = serving->status()->handoffs;
    EXPECT_EQ(devices == 1 ? handoffs.moved : handoffs.copied, 12U);
  }
}

TEST(SeveralLanes, a_prefill_lane_that_breaks_or_throws_ends_every_request_with_an_error_and_readiness_says_so) {
  for (const Fault fault : {Fault::Error, Fault::Exception}) {
    for (const std::int32_t devices : {1, 2}) {
      Recorder recorder;
      const auto serving = start_two_lanes(devices, fault, recorder);
      const auto decoding = std::make_shared<Collector>();
      ASSERT_TRUE(submit_to(*serving, decoding, 10, 400));  // one step of the prefill lane
      ASSERT_TRUE(decoding->wait_tokens(2));
      std::vector<std::shared_ptr<Collector>> sinks{decoding};
      for (int i = 0; i < 4; ++i) {
        sinks.push_back(std::make_shared<Collector>());
        const Result<void> let_in = submit_to(*serving, sinks.back(), 100, 5);
        if (!let_in) {
          EXPECT_EQ(let_in.error().code, ErrorCode::DeviceLost);
          sinks.pop_back();
        }
      }
      for (const auto& sink : sinks) {
        ASSERT_TRUE(sink->wait_finish());
        if (sink == decoding && sink->finish() == engine::FinishReason::Length) continue;  // it was quicker
        EXPECT_EQ(sink->finish(), engine::FinishReason::Failed);
        EXPECT_THAT(sink->error().message, ::testing::HasSubstr("the fake device"));
      }
      ASSERT_TRUE(eventually([&] { return serving->status()->failure.has_value(); }));
      EXPECT_TRUE(serving->status()->draining);
      EXPECT_TRUE(eventually([&] { return serving->idle(); }));
      const Result<void> refused = submit_to(*serving, std::make_shared<Collector>(), 5, 5);
      ASSERT_FALSE(refused);
      EXPECT_EQ(refused.error().code, ErrorCode::DeviceLost);
      serving->stop();
    }
  }
}

TEST(SeveralLanes, modes_switch_back_and_forth_under_load_without_a_lost_token) {
  Recorder recorder;
  const auto serving = start_two_lanes(1, Fault::None, recorder);
  std::vector<std::shared_ptr<Collector>> sinks;
  for (int i = 0; i < 24; ++i) {
    sinks.push_back(std::make_shared<Collector>());
    ASSERT_TRUE(submit_to(*serving, sinks.back(), 20 + 5 * i, 200));
  }
  KnobValues knobs{.max_num_batched_tokens = 32, .max_num_seqs = 8};
  for (int i = 0; i < 200; ++i) {
    knobs.mode = i % 2 == 0 ? Mode::Chunked : Mode::Disaggregated;
    const std::uint64_t number = serving->apply(knobs);
    EXPECT_TRUE(eventually([&] { return serving->status()->settings.number >= number; }));
  }
  for (const auto& sink : sinks) {
    ASSERT_TRUE(sink->wait_finish());
    EXPECT_EQ(sink->tokens().size(), 200U);
  }
  EXPECT_TRUE(eventually([&] { return serving->idle() && serving->status()->counts.free_blocks == 64; }));
  EXPECT_GE(serving->status()->handoffs.switches, 200U);
}

}  // namespace
}  // namespace rubato
