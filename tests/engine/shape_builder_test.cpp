// SPDX-License-Identifier: Apache-2.0
// When sets of shapes are built and how they change hands, under virtual time; and the two sides on two real threads.
#include "engine/shape_builder.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <random>
#include <set>
#include <thread>

#include "engine/cpu/backend.h"
#include "tests/engine/backend_harness.h"

namespace rubato::engine {
namespace {

using namespace std::chrono_literals;
using policies::StepBuckets;

/// Remembers every set it made: how many live, and whether one died while the lane was at work.
class ShapedBackend final : public Backend {
 public:
  class Shapes final : public StepShapes {
   public:
    Shapes(ShapedBackend& home, StepBuckets buckets) : home_(home), buckets_(std::move(buckets)) {
      ++home_.living;
      home_.living_max = std::max(home_.living_max, home_.living);
    }
    ~Shapes() override {
      --home_.living;
      if (home_.lane_is_at_work) ++home_.died_on_the_lane;
    }
    [[nodiscard]] const StepBuckets& buckets() const override { return buckets_; }
    [[nodiscard]] std::int64_t bytes() const override { return 100 * static_cast<std::int64_t>(buckets_.tokens.size()); }

   private:
    ShapedBackend& home_;
    const StepBuckets buckets_;
  };

  [[nodiscard]] Result<void> run(std::span<const StepRow>, StepResult&) override { return {}; }
  [[nodiscard]] ShapeLimits shape_limits() const override { return limits; }
  [[nodiscard]] Result<std::unique_ptr<StepShapes>> build_shapes(const StepBuckets& buckets,
                                                                 const std::stop_token& stop) override {
    ++builds;
    if (stop.stop_requested()) return unexpected(ErrorCode::Cancelled, "stopped");
    if (failing) return unexpected(ErrorCode::ResourceExhausted, "no memory for graphs");
    return std::unique_ptr<StepShapes>(std::make_unique<Shapes>(*this, buckets));
  }
  [[nodiscard]] std::unique_ptr<StepShapes> use_shapes(std::unique_ptr<StepShapes> shapes) override {
    std::swap(in_use, shapes);
    return shapes;
  }
  void capture_logits(bool) override {}
  void released(std::span<const BlockId>) override {}
  [[nodiscard]] const ModelConfig& config() const override { return config_; }
  [[nodiscard]] std::string description() const override { return "shaped"; }

  ShapeLimits limits{.count_max = 16, .tokens_max = 2048, .token_tile = 16, .eager_tokens = 64, .per_share = true};
  int builds = 0;
  int living = 0;
  int living_max = 0;
  int died_on_the_lane = 0;
  bool failing = false;
  bool lane_is_at_work = false;
  std::unique_ptr<StepShapes> in_use;

 private:
  ModelConfig config_;
};

class ShapeBuilderTest : public testing::Test {
 protected:
  ~ShapeBuilderTest() override {
    builder.reset();
    backend.in_use.reset();
    EXPECT_EQ(backend.living, 0);
    EXPECT_EQ(backend.died_on_the_lane, 0);
    EXPECT_LE(backend.living_max, 2);
  }

  std::optional<ShapeBuild> look(Duration pass = 100ms) {
    now += pass;
    return builder->look(target, stop.get_token(), [this] {
      const TimePoint read = now;
      if (backend.builds > builds_timed) {  // the second reading of a look that builds
        builds_timed = backend.builds;
        now += build_time;
        return now;
      }
      return read;
    });
  }
  bool take() {
    backend.lane_is_at_work = true;
    const bool taken = builder->take();
    backend.lane_is_at_work = false;
    return taken;
  }
  void observe(std::int32_t tokens, int count = 1) {
    for (int i = 0; i < count; ++i) builder->observe(tokens);
  }
  /// Looks for so long, each time after so many steps of the load, and takes what is offered.
  template <class Load>
  void live(Duration duration, int steps_per_look, Load&& load) {
    for (const TimePoint end = now + duration; now < end;) {
      for (int i = 0; i < steps_per_look; ++i) observe(load());
      take();
      look();
    }
  }

  ShapedBackend backend;
  ShapeTarget target{.budget = 512, .max_num_seqs = 32};
  ShapeBuilderOptions options;
  std::unique_ptr<ShapeBuilder> builder = std::make_unique<ShapeBuilder>(backend, options);
  TimePoint now{100s};
  Duration build_time = 3ms;
  int builds_timed = 0;
  std::stop_source stop;
};

TEST_F(ShapeBuilderTest, the_first_look_builds_and_the_lane_takes_it_when_it_likes) {
  EXPECT_FALSE(builder->offered());
  const auto built = look();
  ASSERT_TRUE(built);
  EXPECT_TRUE(built->outcome);
  EXPECT_EQ(built->duration, 3ms);
  EXPECT_EQ(built->bytes, 100 * built->buckets);
  EXPECT_TRUE(builder->offered());
  EXPECT_FALSE(look());
  EXPECT_TRUE(builder->status().buckets.tokens.empty());  // the lane still runs without
  EXPECT_EQ(backend.in_use, nullptr);

  EXPECT_TRUE(take());
  EXPECT_FALSE(take());
  ASSERT_NE(backend.in_use, nullptr);
  EXPECT_FALSE(look());
  EXPECT_EQ(builder->status().buckets, backend.in_use->buckets());
  EXPECT_EQ(builder->status().bytes, backend.in_use->bytes());
  EXPECT_EQ(builder->status().built, 1U);
  EXPECT_EQ(backend.in_use->buckets().tokens.back(), 512);
  EXPECT_EQ(backend.in_use->buckets().decode_max, 32);
}

TEST_F(ShapeBuilderTest, a_moved_budget_gets_a_set_and_the_old_one_dies_on_the_builders_side) {
  look();
  take();
  target.budget = 2048;
  const auto built = look(1s);
  ASSERT_TRUE(built);
  EXPECT_EQ(backend.in_use->buckets().tokens.back(), 512);  // the lane goes on with the old one
  EXPECT_EQ(backend.living, 2);
  EXPECT_TRUE(take());
  EXPECT_EQ(backend.in_use->buckets().tokens.back(), 2048);
  EXPECT_EQ(backend.living, 2);
  look();
  EXPECT_EQ(backend.living, 1);
  target.max_num_seqs = 8;
  EXPECT_TRUE(look(1s));
}

TEST_F(ShapeBuilderTest, a_moved_share_gets_a_set_of_its_own_even_of_the_same_buckets) {
  look();
  take();
  const policies::StepBuckets buckets = backend.in_use->buckets();
  target.given_percent = 67;
  ASSERT_TRUE(look(1s));
  EXPECT_TRUE(take());
  EXPECT_EQ(backend.in_use->buckets(), buckets);
  EXPECT_FALSE(look(1s)) << "the share has a set";
  // A share that is left again before its set was taken: the set on offer fits it no more.
  target.given_percent = 33;
  ASSERT_TRUE(look(1s));
  target.given_percent = 67;
  EXPECT_TRUE(look(1s));
  EXPECT_TRUE(take());
  EXPECT_FALSE(look(1s));
}

TEST_F(ShapeBuilderTest, where_shapes_fit_any_share_a_moved_one_builds_nothing) {
  backend.limits.per_share = false;
  builder = std::make_unique<ShapeBuilder>(backend, options);
  ASSERT_TRUE(look());
  take();
  target.given_percent = 67;
  EXPECT_FALSE(look(1s));
}

TEST_F(ShapeBuilderTest, a_newer_target_replaces_a_set_that_was_never_taken) {
  look();
  target.budget = 64;
  EXPECT_TRUE(look(1s));
  EXPECT_EQ(backend.living, 1);
  target.budget = 1024;
  EXPECT_TRUE(look(1s));
  EXPECT_EQ(backend.living, 1);
  EXPECT_TRUE(take());
  EXPECT_EQ(backend.in_use->buckets().tokens.back(), 1024);
  EXPECT_FALSE(take());
}

TEST_F(ShapeBuilderTest, of_many_targets_only_the_newest_is_built_and_building_stays_a_small_share) {
  look();
  build_time = 200ms;
  const TimePoint begin = now;
  std::mt19937_64 random(1);
  while (now - begin < 60s) {
    target.budget = 64 + static_cast<std::int32_t>(random() % 1900);
    take();
    look(10ms);
  }
  // After 200 ms of building come at least 800 ms without.
  EXPECT_LE(backend.builds, 62);
  EXPECT_GE(backend.builds, 50);
  live(2s, 0, [] { return 1; });
  EXPECT_EQ(backend.in_use->buckets().tokens.back(), target.budget);
}

TEST_F(ShapeBuilderTest, a_target_that_would_get_the_same_buckets_builds_nothing) {
  look();
  take();
  target.budget = 100000;  // above what the backend can: clamped
  EXPECT_TRUE(look(1s));
  take();
  target.budget = 200000;
  EXPECT_FALSE(look(1s));
  EXPECT_EQ(backend.builds, 2);
}

TEST_F(ShapeBuilderTest, a_steady_load_settles_on_one_set) {
  std::mt19937_64 random(3);
  const auto load = [&] { return static_cast<std::int32_t>(random() % 3 == 0 ? 300 + random() % 40 : 20 + random() % 8); };
  live(60s, 5, load);
  const int settled = backend.builds;
  EXPECT_LE(settled, 3);
  live(600s, 5, load);
  EXPECT_EQ(backend.builds, settled);
}

TEST_F(ShapeBuilderTest, a_load_that_has_moved_for_good_gets_a_set_of_its_own) {
  live(60s, 5, [] { return 200; });
  const int before = backend.builds;
  live(120s, 5, [] { return 460; });
  EXPECT_GT(backend.builds, before);
  EXPECT_LE(backend.builds, before + 2);
  EXPECT_THAT(backend.in_use->buckets().tokens, testing::Contains(464));
}

TEST_F(ShapeBuilderTest, a_load_that_swings_causes_no_storm) {
  std::mt19937_64 random(4);
  int look_number = 0;
  live(600s, 5, [&] { return ++look_number / 150 % 2 == 0 ? 180 : 430; });
  EXPECT_LE(backend.builds, 600 / 30 + 2);
}

TEST_F(ShapeBuilderTest, few_steps_prove_nothing_and_none_weigh_nothing) {
  look();
  take();
  observe(345, options.evidence_steps - 1);
  live(100s, 0, [] { return 1; });
  EXPECT_EQ(backend.builds, 1);
}

TEST_F(ShapeBuilderTest, a_failed_build_keeps_the_old_set_is_counted_and_tried_again_later) {
  look();
  take();
  look();
  backend.failing = true;
  target.budget = 2048;
  const auto failed = look(1s);
  ASSERT_TRUE(failed);
  EXPECT_FALSE(failed->outcome);
  EXPECT_FALSE(builder->offered());
  EXPECT_EQ(backend.in_use->buckets().tokens.back(), 512);
  EXPECT_EQ(builder->status().failed, 1U);
  EXPECT_EQ(builder->status().last_error, "no memory for graphs");
  for (int i = 0; i < 90; ++i) EXPECT_FALSE(look());  // 9 s
  EXPECT_TRUE(look(2s));
  EXPECT_EQ(builder->status().failed, 2U);
  backend.failing = false;
  const auto built = look(11s);
  ASSERT_TRUE(built);
  EXPECT_TRUE(built->outcome);
  EXPECT_EQ(builder->status().last_error, "");
  EXPECT_TRUE(take());
}

TEST_F(ShapeBuilderTest, a_failed_build_after_a_withdrawn_offer_leaves_the_lane_with_what_it_has_and_is_made_good) {
  look();
  take();
  look();
  target.budget = 2048;
  EXPECT_TRUE(look(1s));  // offered, not taken
  backend.failing = true;
  target.budget = 64;
  EXPECT_TRUE(look(1s));
  EXPECT_FALSE(take());
  target.budget = 2048;
  backend.failing = false;
  EXPECT_TRUE(look(11s));
  EXPECT_TRUE(take());
  EXPECT_EQ(backend.in_use->buckets().tokens.back(), 2048);
}

TEST_F(ShapeBuilderTest, a_build_that_was_stopped_is_no_failure) {
  stop.request_stop();
  EXPECT_FALSE(look());
  EXPECT_EQ(backend.builds, 1);
  EXPECT_EQ(builder->status().failed, 0U);
  EXPECT_FALSE(builder->offered());
}

TEST_F(ShapeBuilderTest, a_backend_without_shapes_is_left_alone) {
  backend.limits = {};
  builder = std::make_unique<ShapeBuilder>(backend, options);
  live(10s, 1000, [] { return 5; });
  EXPECT_EQ(backend.builds, 0);
}

TEST_F(ShapeBuilderTest, a_builder_that_falls_behind_forgets_steps_but_never_stops_the_lane) {
  look();
  observe(400, 100000);
  take();
  live(120s, 0, [] { return 1; });
  EXPECT_GE(backend.builds, 1);
}

// The two sides on two threads, over the real CPU backend: whatever set a step meets, and whenever it changes, its logits are the
// same bits, and nothing races (ThreadSanitizer reads along).
TEST(ShapeBuilderThreads, steps_keep_their_bits_while_another_thread_builds_without_pause) {
  const ModelConfig config = named_configs()[0].config;
  const auto weights = make_synthetic_weights(config, 1, DataType::Float32);
  const std::vector<Sequence> sequences = draw_sequences({90, 40, 30}, config.vocabulary, 40, 1);
  const auto backend_of = [&] {
    return make_cpu_backend(
               config, *weights,
               {.block_count = 40, .max_tokens_per_step = 256, .max_rows = 8, .max_model_len = 128, .threads = 2, .poison = true})
        .value();
  };
  const std::vector<std::vector<Part>> steps{
      {{0, 0, 90}}, {{1, 0, 40}, {0, 89, 1}}, {{2, 0, 7}, {1, 39, 1}}, {{2, 7, 23}}, {{0, 89, 1}, {1, 39, 1}, {2, 29, 1}}};
  Runner expected(backend_of(), sequences);
  std::vector<Logits> logits;
  for (const auto& parts : steps) logits.push_back(expected.step(parts));

  Runner runner(backend_of(), sequences);
  ShapeBuilderOptions options;
  options.target_pause = Duration(0);
  options.build_share = 1;
  ShapeBuilder builder(runner.backend(), options);
  std::atomic<bool> enough = false;
  std::jthread building([&](const std::stop_token& stop) {
    TimePoint now{};
    for (std::int32_t i = 0; !stop.stop_requested(); ++i) {
      const ShapeTarget target{.budget = 10 + i * 37 % 240, .max_num_seqs = 1 + i % 8};
      (void)builder.look(target, stop, [&] { return now += std::chrono::milliseconds(1); });
      if (builder.status().built >= 200) enough = true;
    }
  });
  int taken = 0;
  std::set<std::optional<std::int32_t>> buckets;
  for (int round = 0; round < 100000 && !(enough && taken >= 50); ++round) {
    const std::size_t i = static_cast<std::size_t>(round) % steps.size();
    taken += builder.take() ? 1 : 0;
    ASSERT_TRUE(same_bits(runner.step(steps[i]), logits[i])) << "round " << round;
    buckets.insert(runner.result().bucket);
    EXPECT_EQ(runner.result().padding_tokens, 0);
    builder.observe(static_cast<std::int32_t>(steps[i].size()));
  }
  building.request_stop();
  building.join();
  EXPECT_GE(taken, 50);
  EXPECT_GE(buckets.size(), 4U);
  EXPECT_TRUE(buckets.contains(std::nullopt));
}

}  // namespace
}  // namespace rubato::engine
