// SPDX-License-Identifier: Apache-2.0
// One seeded life of several lanes over fake backends: steps of different lanes are open at once and run at any moment in
// between, modes and roles change, copies fail, come late or stop half way, clients leave. With a prefix cache or without, with
// attention, recurrent layers or both, every stream must equal what the model says of its prompt alone.
#pragma once

#include <gtest/gtest.h>

#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "engine/lanes.h"
#include "tests/support/fake_backend.h"
#include "tests/support/lane_client.h"
#include "tests/support/random_clients.h"

namespace rubato::test {

class LanesProperty : RandomClients {
 public:
  explicit LanesProperty(std::uint32_t seed)
      : RandomClients(seed), layers_(static_cast<FakeLayers>(seed % 5 % 3)), caching_(seed % 5 < 3) {
    limits_.devices = static_cast<std::int32_t>(seed % 4) + 1;
    limits_.lanes_per_device = limits_.devices == 1 ? 2 : 1;
    limits_.each = {.max_model_len = length_max,
                    .max_num_seqs = 12,
                    .max_waiting = 32,
                    .block_count = block_count,
                    .state_count = layers_ == FakeLayers::Attention ? 0
                                   : seed % 3 == 0                  ? between(1, 6)
                                                                    : between(12, 24),
                    .blocks_hold_keys = layers_ != FakeLayers::Recurrent,
                    .prefix_caching = {.enabled = caching_, .snapshot_tokens = 16 << seed % 3},
                    .token_tile = 1,
                    .growth_reserve_tokens = static_cast<std::int32_t>(seed % 3) * 8};
    limits_.max_handoffs = seed % 2 == 0 ? 2 : 16;
    limits_.handoff_lease = std::chrono::milliseconds(50);
    limits_.lockstep = static_cast<Lockstep>(seed / 4 % 3);
    for (std::int32_t device = 0; device < limits_.devices; ++device)
      backends_.push_back(std::make_unique<FakeBackend>(
          FakeBackend::Options{.block_count = block_count, .state_count = limits_.each.state_count, .layers = layers_}));
    std::vector<engine::Backend*> lanes;
    for (const auto& backend : backends_) lanes.push_back(backend.get());
    if (limits_.lanes_per_device == 2) {
      sibling_ = backends_.front()->make_sibling().value();
      lanes.push_back(sibling_.get());
    }
    lanes_ =
        std::make_unique<engine::Lanes>(std::move(lanes), engine::LanesOptions{.limits = limits_, .initial = next_settings()});
    client_ = std::make_unique<LaneClient>(*lanes_);
    open_.resize(static_cast<std::size_t>(lanes_->lane_count()));
  }

  void run(int event_count) {
    for (int event = 0; event < event_count; ++event) {
      if (chance(12)) arrive();
      if (chance(3)) cancel_one(*client_, 30);
      if (chance(2)) lanes_->apply(next_settings(), client_->now());
      if (chance(5)) lanes_->expire(client_->now());
      turn();
      if (event % 32 == 0) lanes_->check_integrity();
      if (testing::Test::HasFailure()) return;
    }
    drain();
    finish();
  }

  [[nodiscard]] const policies::HandoffCounts& handoffs() const { return lanes_->group().handoffs(); }
  [[nodiscard]] policies::SchedulerCounts totals() const { return lanes_->group().totals(); }
  [[nodiscard]] std::int64_t copied_states() const {
    std::int64_t copied = 0;
    for (const auto& backend : backends_) copied += backend->copied_states;
    return copied;
  }

 private:
  static constexpr std::int32_t block_count = 40;
  static constexpr std::int32_t length_max = 256;

  struct OpenStep {
    bool open = false;
    bool ran = false;
    std::optional<std::uint64_t> asked_at{};  // changes() when it last asked for a step in vain
  };

  // One lane or the copier does the next thing it can.
  void turn() {
    const std::int32_t who = between(0, lanes_->lane_count());
    if (who == lanes_->lane_count()) {
      copy();
      return;
    }
    const LaneIndex lane{who};
    OpenStep& step = open_[static_cast<std::size_t>(who)];
    if (!step.open) {
      const std::uint64_t changes = lanes_->group().changes();
      const bool asked_in_vain = step.asked_at == changes;
      step.open = client_->begin(lane);
      step.ran = false;
      // Copies are tried again after a time, whatever else happens; nothing else comes of itself.
      if (limits_.devices == 1) {
        EXPECT_FALSE(asked_in_vain && step.open) << "nothing had changed";
      }
      if (step.open) {
        step.asked_at.reset();
      } else {
        step.asked_at = lanes_->group().changes() == changes ? std::optional(changes) : std::nullopt;
      }
    } else if (!step.ran) {
      client_->advance();
      lanes_->run_step(lane, client_->now());
      step.ran = true;
    } else {
      client_->advance();
      client_->end(lane);
      step.open = false;
    }
  }

  void copy() {
    if (!job_) {
      job_ = lanes_->next_copy(client_->now());
      outcome_.reset();
      return;
    }
    if (!outcome_) {
      if (fail_copies_ && chance(20)) {
        outcome_ = unexpected(ErrorCode::DeviceLost, "the fake link broke");
      } else {
        outcome_ = job_->run();
      }
      return;
    }
    if (fail_copies_ && chance(10)) client_->advance(2 * limits_.handoff_lease);  // the answer comes late
    if (fail_copies_ && chance(30)) lanes_->expire(client_->now());
    lanes_->copied(*job_, *outcome_, client_->now());
    job_.reset();
  }

  Settings next_settings() {
    const std::int32_t seqs = between(1, 12);
    return {.number = ++settings_number_,
            .knobs = {.max_num_batched_tokens = seqs + min_prefill_quantum + between(0, 60),
                      .max_num_seqs = seqs,
                      .priority_policy = random_policy(),
                      .mode = chance(70) ? Mode::Disaggregated : Mode::Chunked,
                      .reservation = static_cast<Reservation>(random_() % 3),
                      .prefill_devices = between(1, 3)}};
  }

  void arrive() {
    std::vector<TokenId> prompt = caching_ ? prompt_with_shared_start() : random_prompt();
    engine::SamplingParameters sampling;
    sampling.temperature = chance(50) ? 0 : 0.8;
    sampling.seed = random_();
    sampling.max_new_tokens = chance(10) ? 1 : between(1, 60);
    sampling.ignore_eos = chance(50);
    add(*client_, std::move(prompt), std::move(sampling));
  }

  void drain() {
    fail_copies_ = false;
    int turns = 0;
    const auto busy = [&] {
      for (const OpenStep& step : open_) {
        if (step.open) return true;
      }
      return job_.has_value() || !lanes_->group().idle() || lanes_->group().copies_open() > 0;
    };
    for (; busy() && turns < 400000; ++turns) {
      turn();
      if (turns % 64 == 0) {
        client_->advance(std::chrono::milliseconds(20));
        lanes_->expire(client_->now());
      }
    }
    EXPECT_FALSE(busy()) << "the lanes do not come to rest";
  }

  void finish() {
    lanes_->check_integrity();
    const policies::SchedulerCounts totals = lanes_->group().totals();
    EXPECT_EQ(totals.free_blocks, totals.block_count);
    std::int32_t live_blocks = 0;
    std::int32_t live_states = 0;
    for (const auto& backend : backends_) {
      EXPECT_EQ(backend->poison_reads, 0);
      live_blocks += backend->live_blocks();
      live_states += backend->live_states();
    }
    const std::int32_t kept = layers_ == FakeLayers::Recurrent ? 0 : totals.cached_blocks;
    EXPECT_EQ(live_blocks, kept) << "what is cached lives, all else is dead";
    EXPECT_EQ(live_states, totals.states_snapshot);
    EXPECT_EQ(totals.states_running, 0);
    if (!caching_) {
      EXPECT_EQ(live_blocks + live_states, 0);
      EXPECT_EQ(totals.prefix_hits + totals.prefix_queries, 0U);
    }
    if (sibling_) {
      EXPECT_EQ(dynamic_cast<FakeBackend&>(*sibling_).poison_reads, 0);
    }
    check_streams(*client_);
  }

  const FakeLayers layers_;
  const bool caching_;
  policies::LaneGroupLimits limits_;
  std::vector<std::unique_ptr<FakeBackend>> backends_;
  std::unique_ptr<engine::Backend> sibling_;
  std::unique_ptr<engine::Lanes> lanes_;
  std::unique_ptr<LaneClient> client_;
  std::vector<OpenStep> open_;
  std::optional<engine::CopyJob> job_;
  std::optional<Result<void>> outcome_;
  bool fail_copies_ = true;
  std::uint64_t settings_number_ = 0;
};

}  // namespace rubato::test
