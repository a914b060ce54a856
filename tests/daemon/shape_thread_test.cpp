// SPDX-License-Identifier: Apache-2.0
// Shapes built beside a running lane, on the real threads: a build that a test holds open keeps no step waiting, and a set
// changes hands between two steps only. Order is asserted by counts and gates, never by time.
#include "daemon/shape_thread.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <set>

#include "daemon/lane_threads.h"
#include "engine/cpu/backend.h"
#include "engine/model/config.h"
#include "engine/model/weights.h"
#include "tests/support/raw_client.h"

namespace rubato {
namespace {

using namespace std::chrono_literals;
using policies::StepBuckets;
using test::eventually;

/// What the test and the backend on the lane's thread share.
struct Gate {
  std::mutex mutex;
  std::condition_variable_any changed;
  bool open = true;
  int building = 0;  // builds that wait at the gate
  bool failing = false;
  std::atomic<bool> in_step = false;
  std::atomic<int> steps = 0, swaps = 0, swaps_within_a_step = 0, builds = 0;

  void set_open(bool wanted) {
    const std::lock_guard lock(mutex);
    open = wanted;
    changed.notify_all();
  }
  bool wait_building() {
    std::unique_lock lock(mutex);
    return changed.wait_for(lock, 20s, [&] { return building > 0; });
  }
};

/// The CPU backend with a gate before each build.
class GatedBackend final : public engine::Backend {
 public:
  GatedBackend(std::unique_ptr<engine::Backend> inner, Gate& gate) : inner_(std::move(inner)), gate_(gate) {}

  Result<void> run(std::span<const engine::StepRow> rows, engine::StepResult& result) override {
    gate_.in_step = true;
    auto outcome = inner_->run(rows, result);
    gate_.in_step = false;
    ++gate_.steps;
    return outcome;
  }
  engine::ShapeLimits shape_limits() const override { return inner_->shape_limits(); }
  Result<std::unique_ptr<engine::StepShapes>> build_shapes(const StepBuckets& buckets, const std::stop_token& stop) override {
    ++gate_.builds;
    {
      std::unique_lock lock(gate_.mutex);
      ++gate_.building;
      gate_.changed.notify_all();
      gate_.changed.wait(lock, stop, [&] { return gate_.open; });
      --gate_.building;
      if (gate_.failing) return unexpected(ErrorCode::ResourceExhausted, "no memory for shapes");
    }
    return inner_->build_shapes(buckets, stop);
  }
  std::unique_ptr<engine::StepShapes> use_shapes(std::unique_ptr<engine::StepShapes> shapes) override {
    ++gate_.swaps;
    if (gate_.in_step) ++gate_.swaps_within_a_step;
    return inner_->use_shapes(std::move(shapes));
  }
  void capture_logits(bool on) override { inner_->capture_logits(on); }
  void released(std::span<const BlockId> blocks) override { inner_->released(blocks); }
  const engine::ModelConfig& config() const override { return inner_->config(); }
  std::string description() const override { return inner_->description(); }

 private:
  std::unique_ptr<engine::Backend> inner_;
  Gate& gate_;
};

class Recorder final : public Observer {
 public:
  void on_request(std::int32_t) override {}
  void on_arrival(const Arrival&) override {}
  void on_rejected(TimePoint, std::int32_t) override {}
  void on_token_gap(SequenceId, Duration) override {}
  void on_first_token(const Arrival&, Duration) override {}
  void on_request_end(const RequestRecord&) override {}
  void on_step(const engine::StepRecord& record, const policies::SchedulerCounts&) override {
    ++(record.bucket ? shaped : eager);
  }
  void on_settings(const Settings&, TimePoint) override {}
  void on_shapes_built(const engine::ShapeBuild& build) override { ++(build.outcome ? built : failed); }
  void on_shapes_taken(Duration) override { ++taken; }

  std::atomic<int> shaped = 0, eager = 0, built = 0, failed = 0, taken = 0;
};

class Sink final : public TokenSink {
 public:
  void on_token(const engine::TokenEvent& event) override {
    const std::lock_guard lock(mutex_);
    if (event.sample) tokens_.push_back(event.sample->token);
    if (event.finish) finish_ = event.finish;
    changed_.notify_all();
  }
  /// All tokens of a stream that ended as it should; else none.
  std::vector<TokenId> wait() {
    std::unique_lock lock(mutex_);
    if (!changed_.wait_for(lock, 60s, [&] { return finish_.has_value(); })) return {};
    return finish_ == engine::FinishReason::Length ? tokens_ : std::vector<TokenId>{};
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<TokenId> tokens_;
  std::optional<engine::FinishReason> finish_;
};

class ShapeThreadTest : public ::testing::Test {
 protected:
  ~ShapeThreadTest() override {
    gate.set_open(true);
    serving.reset();
    EXPECT_EQ(gate.swaps_within_a_step, 0);
  }

  void start() {
    const SyntheticModel model{.hidden_size = 32, .layers = 2, .heads = 4, .kv_heads = 2, .feed_forward = 64, .vocabulary = 64};
    const engine::ModelConfig config = engine::synthetic_model_config(model).value();
    const auto weights = engine::make_synthetic_weights(config, 1, DataType::Float32);
    auto cpu = engine::make_cpu_backend(
        config, *weights, {.block_count = 128, .max_tokens_per_step = 256, .max_rows = 8, .max_model_len = 512, .threads = 2});
    CHECK(cpu.has_value(), cpu.error().message);
    LaneThreadsOptions options;
    options.limits = {.each = {.max_model_len = 512, .max_num_seqs = 8, .max_waiting = 8, .block_count = 128}};
    options.initial = knobs(64);
    options.observers = {&recorder};
    options.backend_description = "test";
    options.shapes.target_pause = Duration(0);
    options.shapes.build_share = 1;
    options.shapes.retry_pause = Duration(0);
    options.shapes.excess_hold = 1h;  // so that only settings move shapes here
    std::vector<std::unique_ptr<engine::Backend>> backends;
    backends.push_back(std::make_unique<GatedBackend>(std::move(*cpu), gate));
    serving = start_lane_threads(std::move(backends), options);
  }

  static KnobValues knobs(std::int32_t budget) { return KnobValues{.max_num_batched_tokens = budget, .max_num_seqs = 8}; }

  std::shared_ptr<Sink> submit(std::int32_t tokens, std::int32_t prompt_tokens = 50, TokenId salt = 1) {
    auto sink = std::make_shared<Sink>();
    std::vector<Submission> choices(1);
    engine::Request& request = choices[0].request;
    request.id = serving->next_id();
    for (std::int32_t i = 0; i < prompt_tokens; ++i) request.prompt.push_back((i * 7 + salt * 5) % 63 + 1);
    request.sampling.temperature = 0;
    request.sampling.max_new_tokens = tokens;
    request.sampling.ignore_eos = true;
    request.arrival = serving->now();
    request.ttft_target = 10s;
    request.itl_target = 10s;
    choices[0].sink = sink;
    EXPECT_TRUE(serving->submit(std::move(choices)));
    return sink;
  }

  /// Of the set in use; 0 while there is none.
  std::int32_t largest_bucket() {
    const auto shapes = serving->status()->lanes.front().shapes;
    return shapes->buckets.tokens.empty() ? 0 : shapes->buckets.tokens.back();
  }

  Gate gate;
  Recorder recorder;
  std::unique_ptr<OwnedServing> serving;
};

TEST_F(ShapeThreadTest, no_step_waits_for_a_build) {
  gate.set_open(false);
  start();
  ASSERT_TRUE(gate.wait_building());
  const auto first = submit(200)->wait();  // a whole generation while the first build stands at the gate
  ASSERT_EQ(first.size(), 200U);
  EXPECT_GE(recorder.eager, 200);
  EXPECT_EQ(recorder.shaped, 0);
  EXPECT_EQ(recorder.built, 0);
  EXPECT_EQ(gate.builds, 1);

  gate.set_open(true);
  ASSERT_TRUE(eventually([&] { return largest_bucket() > 0; }));
  EXPECT_EQ(largest_bucket(), 64);
  EXPECT_EQ(submit(200)->wait(), first);
  EXPECT_GE(recorder.shaped, 199);  // all but the prompt's 50 tokens, which a bucket of 64 would pad too much

  gate.set_open(false);  // now with a set in use: it goes on to be used while the next one is built
  serving->apply(knobs(256));
  ASSERT_TRUE(gate.wait_building());
  const int shaped_before = recorder.shaped;
  EXPECT_EQ(submit(200)->wait(), first);
  EXPECT_GE(recorder.shaped, shaped_before + 199);
  EXPECT_EQ(largest_bucket(), 64);
  EXPECT_EQ(recorder.built, 1);
  gate.set_open(true);
  EXPECT_TRUE(eventually([&] { return largest_bucket() == 256; }));
  EXPECT_EQ(recorder.built, 2);
  EXPECT_EQ(recorder.taken, 2);
}

TEST_F(ShapeThreadTest, twenty_changes_of_budget_under_load_rebuild_each_time_and_change_no_token) {
  start();
  std::vector<std::vector<TokenId>> alone;
  for (TokenId stream = 0; stream < 6; ++stream) alone.push_back(submit(400, 20 + 9 * stream, stream)->wait());
  const int built_before = recorder.built;
  std::vector<std::shared_ptr<Sink>> sinks;
  for (TokenId stream = 0; stream < 6; ++stream) sinks.push_back(submit(400, 20 + 9 * stream, stream));
  for (int change = 0; change < 20; ++change) {
    const std::int32_t budget = change % 3 == 0 ? 32 + change : (change % 3 == 1 ? 256 - change : 100 + change);
    serving->apply(knobs(budget));
    EXPECT_TRUE(eventually([&] { return largest_bucket() == budget; })) << change;
  }
  for (std::size_t stream = 0; stream < sinks.size(); ++stream) EXPECT_EQ(sinks[stream]->wait(), alone[stream]) << stream;
  EXPECT_GE(recorder.built, built_before + 20);
  EXPECT_GE(recorder.taken, 20);
  EXPECT_EQ(recorder.failed, 0);
  EXPECT_EQ(recorder.taken, gate.swaps);
}

TEST_F(ShapeThreadTest, a_failed_build_leaves_serving_as_it_was_and_shows_in_the_status) {
  start();
  ASSERT_TRUE(eventually([&] { return largest_bucket() > 0; }));
  const auto expected = submit(100)->wait();
  {
    const std::lock_guard lock(gate.mutex);
    gate.failing = true;
  }
  serving->apply(knobs(256));
  ASSERT_TRUE(eventually([&] { return serving->status()->lanes.front().shapes->failed > 0; }));
  EXPECT_EQ(serving->status()->lanes.front().shapes->last_error, "no memory for shapes");
  EXPECT_EQ(largest_bucket(), 64);
  EXPECT_EQ(submit(100)->wait(), expected);
  EXPECT_FALSE(serving->status()->failure);
  {
    const std::lock_guard lock(gate.mutex);
    gate.failing = false;
  }
  EXPECT_TRUE(eventually([&] { return largest_bucket() == 256; }));
  EXPECT_EQ(serving->status()->lanes.front().shapes->last_error, "");
}

TEST_F(ShapeThreadTest, stopping_ends_a_build_that_is_under_way) {
  gate.set_open(false);
  start();
  ASSERT_TRUE(gate.wait_building());
  serving->stop();
  EXPECT_EQ(recorder.built, 0);
  EXPECT_EQ(recorder.failed, 0);
  EXPECT_EQ(largest_bucket(), 0);
}

}  // namespace
}  // namespace rubato
