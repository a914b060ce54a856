// SPDX-License-Identifier: Apache-2.0
#include "policies/step_time.h"

#include <gtest/gtest.h>

#include <cmath>
#include <random>

namespace rubato::policies {
namespace {

using Vector = StepTimeModel::Vector;

constexpr Vector machine{2e-3, 40e-6, 3e-9, 20e-6, 2e-7};

double seconds_of(const Vector& coefficients, const StepFeatures& features) {
  return coefficients[0] + coefficients[1] * features.tokens + coefficients[2] * features.attention +
         coefficients[3] * features.decode_rows + coefficients[4] * features.context;
}

// Steps as a lane makes them: decodes alone, chunks alone, both.
StepFeatures random_step(std::mt19937& random) {
  StepFeatures features;
  const auto kind = random() % 3;
  const auto decodes = kind == 0 ? 0 : random() % 64;
  for (std::uint64_t i = 0; i < decodes; ++i) features.add_decode(static_cast<std::int32_t>(1 + random() % 4096));
  if (kind != 1 || decodes == 0) {
    features.add_chunk(static_cast<std::int32_t>(random() % 4096), static_cast<std::int32_t>(1 + random() % 512));
  }
  return features;
}

StepFeatures decode_step(std::int32_t rows, std::int32_t context) {
  StepFeatures features;
  for (std::int32_t i = 0; i < rows; ++i) features.add_decode(context);
  return features;
}

StepFeatures chunk_step(std::int32_t begin, std::int32_t count) {
  StepFeatures features;
  features.add_chunk(begin, count);
  return features;
}

double worst_relative_error(const StepTimeModel& model, const Vector& truth, std::uint32_t seed) {
  std::mt19937 random(seed);
  double worst = 0;
  for (int i = 0; i < 300; ++i) {
    const StepFeatures features = random_step(random);
    const double expected = seconds_of(truth, features);
    worst = std::max(worst, std::abs(to_seconds(model.predict(features)) - expected) / expected);
  }
  return worst;
}

TEST(StepFeatures, sums_rows_and_takes_them_back) {
  StepFeatures features;
  features.add_decode(100);
  features.add_chunk(32, 16);
  EXPECT_EQ(features.tokens, 17);
  EXPECT_EQ(features.decode_rows, 1);
  EXPECT_EQ(features.prefill_rows, 1);
  EXPECT_DOUBLE_EQ(features.attention, 16.0 * 48.0);
  EXPECT_DOUBLE_EQ(features.context, 100.0);
  features.remove_chunk(32, 16);
  EXPECT_EQ(features.tokens, 1);
  EXPECT_EQ(features.prefill_rows, 0);
  EXPECT_DOUBLE_EQ(features.attention, 0.0);
}

TEST(StepTimeModel, guesses_pessimistically_per_token_before_it_has_seen_a_step) {
  const StepTimeModel model;
  EXPECT_EQ(model.observation_count(), 0u);
  EXPECT_GE(model.predict(chunk_step(0, 512)), std::chrono::milliseconds(400));
  EXPECT_EQ(model.predict(StepFeatures{}), Duration::zero());
}

TEST(StepTimeModel, recovers_the_coefficients_exactly_without_noise) {
  StepTimeModel model;
  std::mt19937 random(1);
  for (int i = 0; i < 500; ++i) {
    const StepFeatures features = random_step(random);
    model.observe(features, from_seconds(seconds_of(machine, features)));
  }
  for (std::size_t i = 0; i < machine.size(); ++i)
    EXPECT_NEAR(model.coefficients()[i] / machine[i], 1.0, 0.02) << "coefficient " << i;
}

TEST(StepTimeModel, recovers_the_coefficients_under_noise_and_outliers) {
  for (std::uint32_t seed = 1; seed <= 20; ++seed) {
    StepTimeModel model;
    std::mt19937 random(seed);
    std::normal_distribution<double> noise(1.0, 0.05);
    for (int i = 0; i < 3000; ++i) {
      const StepFeatures features = random_step(random);
      double seconds = seconds_of(machine, features) * std::max(noise(random), 0.5);
      if (random() % 100 == 0) seconds *= 10;
      model.observe(features, from_seconds(seconds));
    }
    EXPECT_LT(worst_relative_error(model, machine, seed + 100), 0.12) << "seed " << seed;
    // Those that dominate a step are known one by one, too.
    EXPECT_NEAR(model.coefficients()[1] / machine[1], 1.0, 0.15) << "seed " << seed;
    EXPECT_NEAR(model.coefficients()[2] / machine[2], 1.0, 0.30) << "seed " << seed;
  }
}

TEST(StepTimeModel, one_outlier_hardly_moves_it) {
  StepTimeModel model;
  for (int i = 0; i < 200; ++i) model.observe(decode_step(8, 500), std::chrono::milliseconds(10));
  model.observe(decode_step(8, 500), std::chrono::milliseconds(1000));
  EXPECT_LT(model.predict(decode_step(8, 500)), std::chrono::microseconds(10300));
}

TEST(StepTimeModel, follows_a_change_of_speed) {
  for (const double factor : {2.0, 0.5, 4.0}) {
    StepTimeModel model;
    std::mt19937 random(3);
    Vector changed = machine;
    for (double& value : changed) value *= factor;
    for (int i = 0; i < 2000; ++i) {
      const StepFeatures features = random_step(random);
      model.observe(features, from_seconds(seconds_of(machine, features)));
    }
    for (int i = 0; i < 400; ++i) {
      const StepFeatures features = random_step(random);
      model.observe(features, from_seconds(seconds_of(changed, features)));
    }
    EXPECT_LT(worst_relative_error(model, changed, 9), 0.15) << "factor " << factor;
  }
}

TEST(StepTimeModel, constant_input_does_not_wind_it_up) {
  StepTimeModel model;
  std::mt19937 random(4);
  for (int i = 0; i < 1000; ++i) {
    const StepFeatures features = random_step(random);
    model.observe(features, from_seconds(seconds_of(machine, features)));
  }
  // A night of the same decode step, with the noise of a clock.
  const StepFeatures same = decode_step(4, 300);
  std::normal_distribution<double> noise(1.0, 0.02);
  for (int i = 0; i < 200000; ++i) model.observe(same, from_seconds(seconds_of(machine, same) * noise(random)));
  EXPECT_NEAR(to_seconds(model.predict(same)) / seconds_of(machine, same), 1.0, 0.02);
  // What a prefill costs is not forgotten.
  const StepFeatures prefill = chunk_step(1024, 512);
  EXPECT_NEAR(to_seconds(model.predict(prefill)) / seconds_of(machine, prefill), 1.0, 0.10);
  // And one odd step after it is no explosion.
  model.observe(prefill, from_seconds(seconds_of(machine, prefill) * 1.5));
  EXPECT_NEAR(to_seconds(model.predict(same)) / seconds_of(machine, same), 1.0, 0.10);
}

TEST(StepTimeModel, coefficients_are_never_negative_and_predictions_never_fall_with_work) {
  for (std::uint32_t seed = 1; seed <= 10; ++seed) {
    StepTimeModel model;
    std::mt19937 random(seed);
    for (int i = 0; i < 400; ++i) {
      // Durations that have nothing to do with the work.
      model.observe(random_step(random), from_seconds(1e-4 * static_cast<double>(1 + random() % 1000)));
      for (const double value : model.coefficients()) ASSERT_GE(value, 0.0) << "seed " << seed;
      StepFeatures features = random_step(random);
      const Duration before = model.predict(features);
      features.add_decode(100);
      features.add_chunk(10, 5);
      ASSERT_GE(model.predict(features), before) << "seed " << seed;
    }
  }
}

// Clamping each negative coefficient by itself would predict decodes from the prefill slope: here 3 times too much.
TEST(StepTimeModel, best_non_negative_coefficients_still_fit_decode_steps) {
  StepTimeModel model;
  std::mt19937 random(5);
  const auto truth = [](const StepFeatures& features) {
    return 1e-3 + 1e-4 * (features.tokens - features.decode_rows) + 3e-5 * features.decode_rows;
  };
  for (int i = 0; i < 2000; ++i) {
    const StepFeatures features = i % 4 == 0 ? chunk_step(0, static_cast<std::int32_t>(1 + random() % 256))
                                             : decode_step(static_cast<std::int32_t>(16 + random() % 48), 100);
    model.observe(features, from_seconds(truth(features)));
  }
  // A non-negative model cannot have decodes cheaper than their tokens; on what it sees most it must be right on average all the
  // same.
  double sum = 0;
  for (std::int32_t rows = 16; rows < 64; ++rows)
    sum += to_seconds(model.predict(decode_step(rows, 100))) / truth(decode_step(rows, 100));
  EXPECT_NEAR(sum / 48, 1.0, 0.35);
}

TEST(StepTimeModel, ignores_durations_that_cannot_be) {
  StepTimeModel model;
  model.observe(chunk_step(0, 100), Duration::zero());
  model.observe(chunk_step(0, 100), std::chrono::milliseconds(-5));
  model.observe(StepFeatures{}, std::chrono::milliseconds(5));
  EXPECT_EQ(model.observation_count(), 0u);
}

TEST(StepTimeModel, starts_from_coefficients_exactly_and_gives_them_back) {
  const StepTimeModel model = StepTimeModel::from_coefficients(machine, std::chrono::microseconds(300));
  EXPECT_EQ(model.coefficients(), machine);
  EXPECT_NEAR(to_seconds(model.spread()), 300e-6, 1e-8);
  EXPECT_GT(model.observation_count(), 0u);
  const StepTimeModel again = StepTimeModel::from_coefficients(model.coefficients(), model.spread());
  EXPECT_EQ(again.coefficients(), machine);
  EXPECT_NEAR(to_seconds(model.predict(chunk_step(100, 400))), seconds_of(machine, chunk_step(100, 400)), 1e-9);
}

TEST(StepTimeModel, goes_on_learning_from_given_coefficients) {
  for (const double factor : {0.5, 1.0, 1.3, 3.0}) {
    StepTimeModel model = StepTimeModel::from_coefficients(machine, std::chrono::microseconds(300));
    Vector truth = machine;
    for (double& value : truth) value *= factor;
    std::mt19937 random(8);
    for (int i = 0; i < 100; ++i) {
      const StepFeatures features = random_step(random);
      model.observe(features, from_seconds(seconds_of(truth, features)));
    }
    EXPECT_LT(worst_relative_error(model, truth, 10), 0.15) << "factor " << factor;
  }
}

// It is neither as sure as a model with a long life of its own, nor as unsure as one without any.
TEST(StepTimeModel, believes_given_coefficients_moderately) {
  StepTimeModel model = StepTimeModel::from_coefficients(machine, std::chrono::microseconds(300));
  const StepFeatures features = decode_step(32, 1000);
  const double before = to_seconds(model.predict(features));
  model.observe(features, from_seconds(before * 1.1));
  const double moved = to_seconds(model.predict(features)) / before - 1.0;
  EXPECT_GT(moved, 0.001);
  EXPECT_LT(moved, 0.05);
}

TEST(StepTimeModel, coefficients_that_are_all_zero_say_nothing) {
  const StepTimeModel model = StepTimeModel::from_coefficients({}, Duration::zero());
  EXPECT_EQ(model.observation_count(), 0u);
  EXPECT_EQ(model.coefficients(), StepTimeModel().coefficients());
}

TEST(StepTimeModel, largest_chunk_is_the_largest_that_fits) {
  StepTimeModel model;
  std::mt19937 random(6);
  for (int i = 0; i < 500; ++i) {
    const StepFeatures features = random_step(random);
    model.observe(features, from_seconds(seconds_of(machine, features)));
  }
  for (int i = 0; i < 200; ++i) {
    const StepFeatures step = decode_step(static_cast<std::int32_t>(random() % 32), 1000);
    const auto begin = static_cast<std::int32_t>(random() % 4096);
    const Duration limit = std::chrono::microseconds(random() % 40000);
    const std::int32_t chunk = model.largest_chunk(step, begin, 512, limit);
    const auto with = [&](std::int32_t count) {
      StepFeatures features = step;
      features.add_chunk(begin, count);
      return model.predict(features);
    };
    ASSERT_GE(chunk, 0);
    ASSERT_LE(chunk, 512);
    EXPECT_TRUE(chunk == 0 || with(chunk) <= limit);
    EXPECT_TRUE(chunk == 512 || with(chunk + 1) > limit);
  }
  EXPECT_EQ(model.largest_chunk({}, 0, 0, std::chrono::seconds(1)), 0);
}

TEST(StepTimeModel, spread_shows_the_noise) {
  StepTimeModel quiet;
  StepTimeModel loud;
  std::mt19937 random(7);
  std::normal_distribution<double> noise(0.0, 0.10);
  for (int i = 0; i < 2000; ++i) {
    quiet.observe(decode_step(8, 100), std::chrono::milliseconds(10));
    loud.observe(decode_step(8, 100), from_seconds(0.010 * (1 + noise(random))));
  }
  EXPECT_LT(quiet.spread(), std::chrono::microseconds(50));
  EXPECT_GT(loud.spread(), std::chrono::microseconds(500));
  EXPECT_LT(loud.spread(), std::chrono::microseconds(2000));
}

TEST(StepTimeModel, overrun_counts_steps_with_prefills_that_took_longer_than_predicted) {
  const auto after = [](double chunk_factor) {
    StepTimeModel model = StepTimeModel::from_coefficients(machine, std::chrono::microseconds(100));
    std::mt19937 random(12);
    std::normal_distribution<double> noise(1.0, 0.04);
    for (int i = 0; i < 1000; ++i) {
      const bool chunk = i % 10 == 0;
      const StepFeatures features = chunk ? chunk_step(0, 2000) : decode_step(8, 100);
      // Chunks that no model of these features can tell from a slow clock: every other one is off.
      const double factor = chunk && i % 20 == 0 ? chunk_factor : 1.0;
      model.observe(features, from_seconds(seconds_of(machine, features) * factor * noise(random)));
    }
    return model.relative_overrun();
  };
  EXPECT_GT(after(1.0), 0.02);
  EXPECT_LT(after(1.0), 0.06);
  EXPECT_GT(after(1.3), 0.08);
  // Decodes that scatter have no say.
  StepTimeModel model = StepTimeModel::from_coefficients(machine, std::chrono::microseconds(100));
  const double before = model.relative_overrun();
  for (int i = 0; i < 100; ++i)
    model.observe(decode_step(8, 100), from_seconds(seconds_of(machine, decode_step(8, 100)) * (i % 2 == 0 ? 2 : 1)));
  EXPECT_EQ(model.relative_overrun(), before);
}

}  // namespace
}  // namespace rubato::policies
