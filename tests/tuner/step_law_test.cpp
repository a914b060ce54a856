// SPDX-License-Identifier: Apache-2.0
#include "tuner/twin/step_law.h"

#include <cmath>
#include <random>
#include <string>

#include <gtest/gtest.h>

namespace rubato::tuner {
namespace {

using policies::StepFeatures;

/// A made-up device whose true step times are known.
struct Device {
  double base = 0.002;
  double per_token = 25e-6;
  double per_pair = 0.4e-9;
  double per_row = 10e-6;
  double per_context = 20e-9;
  double speed = 1;
  double scatter = 0.05;
  double outlier_share = 0.01;
  std::int32_t tile = 1;  // eager steps are computed in whole tiles
  std::int32_t quirk_bucket = 0;
  double quirk = 1;

  [[nodiscard]] double seconds(const StepFeatures& step, std::optional<std::int32_t> bucket) const {
    const std::int32_t tokens = bucket.value_or((step.tokens + tile - 1) / tile * tile);
    const double all =
        base + per_token * tokens + per_pair * step.attention + per_row * step.decode_rows + per_context * step.context;
    return all / speed * (bucket && *bucket == quirk_bucket ? quirk : 1.0);
  }
};

/// Steps of a mixed load: decodes with contexts that vary, and most of the time a chunk.
class Steps {
 public:
  explicit Steps(std::uint64_t seed) : random_(seed) {}

  StepFeatures next() {
    StepFeatures step;
    const int decodes = std::uniform_int_distribution<int>(1, 48)(random_);
    for (int i = 0; i < decodes; ++i) step.add_decode(std::uniform_int_distribution<int>(100, 3000)(random_));
    if (uniform() < 0.7) {
      step.add_chunk(std::uniform_int_distribution<int>(0, 6)(random_) * 256,
                     std::uniform_int_distribution<int>(16, 460)(random_));
    }
    return step;
  }
  Duration time(const Device& device, const StepFeatures& step, std::optional<std::int32_t> bucket) {
    const double noise = std::exp(device.scatter * normal_(random_)) * (uniform() < device.outlier_share ? 10.0 : 1.0);
    return from_seconds(device.seconds(step, bucket) * noise);
  }
  double uniform() { return std::uniform_real_distribution<double>(0, 1)(random_); }

 private:
  std::mt19937_64 random_;
  std::normal_distribution<double> normal_;
};

std::int32_t bucket_of(const StepFeatures& step) {
  for (const std::int32_t bucket : {8, 16, 32, 64, 128, 256, 384, 512}) {
    if (step.tokens <= bucket) return bucket;
  }
  return 512;
}

enum class Kind { Eager, InBuckets };

std::optional<std::int32_t> bucket_in(Kind kind, const StepFeatures& step) {
  return kind == Kind::InBuckets ? std::optional(bucket_of(step)) : std::nullopt;
}

void teach(StepLaw& law, const Device& device, Steps& steps, int count, Kind kind) {
  for (int i = 0; i < count; ++i) {
    const StepFeatures step = steps.next();
    const auto bucket = bucket_in(kind, step);
    law.observe(step, bucket, steps.time(device, step, bucket));
  }
}

/// Mean absolute relative error of mean() against the truth without noise, over steps of the same load.
double error_of(const StepLaw& law, const Device& device, Steps& steps, Kind kind, std::int32_t only_bucket = 0) {
  double sum = 0;
  int count = 0;
  while (count < 300) {
    const StepFeatures step = steps.next();
    const auto bucket = bucket_in(kind, step);
    if (only_bucket != 0 && bucket != only_bucket) continue;
    const double truth = device.seconds(step, bucket);
    sum += std::abs(to_seconds(law.mean(step, bucket)) / truth - 1.0);
    ++count;
  }
  return sum / count;
}

TEST(StepLaw, converges_within_300_steps_despite_scatter_and_outliers) {
  for (std::uint64_t seed = 1; seed <= 10; ++seed) {
    for (const Kind kind : {Kind::Eager, Kind::InBuckets}) {
      Steps steps(seed);
      StepLaw law;
      teach(law, {}, steps, 300, kind);
      EXPECT_LT(error_of(law, {}, steps, kind), 0.05) << "seed " << seed << " kind " << static_cast<int>(kind);
      EXPECT_GT(law.relative_error(), 0.02);
      EXPECT_LT(law.relative_error(), 0.15) << "seed " << seed;
      EXPECT_NEAR(law.spread(), 0.055, 0.025) << "seed " << seed;
      EXPECT_EQ(law.observation_count(), 300u);
    }
  }
}

TEST(StepLaw, padding_is_paid_for) {
  Steps steps(1);
  StepLaw law;
  teach(law, {}, steps, 1000, Kind::InBuckets);
  StepFeatures step;
  step.add_chunk(0, 130);
  EXPECT_GT(to_seconds(law.mean(step, 256)), 1.3 * to_seconds(law.mean(step, 130)));
}

TEST(StepLaw, change_of_speed_is_followed_within_100_steps) {
  for (std::uint64_t seed = 1; seed <= 5; ++seed) {
    for (const double speed : {1.3, 0.7}) {
      Steps steps(seed);
      StepLaw law;
      teach(law, {}, steps, 1500, Kind::InBuckets);
      const Device changed{.speed = speed};
      EXPECT_GT(error_of(law, changed, steps, Kind::InBuckets), 0.2);
      teach(law, changed, steps, 100, Kind::InBuckets);
      EXPECT_LT(error_of(law, changed, steps, Kind::InBuckets), 0.12) << "seed " << seed << " speed " << speed;
    }
  }
}

TEST(StepLaw, one_odd_bucket_is_learnt_without_spoiling_the_others) {
  for (std::uint64_t seed = 1; seed <= 5; ++seed) {
    Steps steps(seed);
    StepLaw law;
    const Device device{.quirk_bucket = 256, .quirk = 1.6};
    teach(law, device, steps, 2000, Kind::InBuckets);
    EXPECT_LT(error_of(law, device, steps, Kind::InBuckets, 256), 0.06) << "seed " << seed;
    for (const std::int32_t bucket : {64, 128, 384, 512}) {
      EXPECT_LT(error_of(law, device, steps, Kind::InBuckets, bucket), 0.06) << "seed " << seed << " bucket " << bucket;
    }
  }
}

TEST(StepLaw, tiles_of_eager_steps_are_learnt) {
  const Device device{.tile = 128};
  for (std::uint64_t seed = 1; seed <= 5; ++seed) {
    Steps steps(seed);
    StepLaw law;
    teach(law, device, steps, 3000, Kind::Eager);
    EXPECT_LT(error_of(law, device, steps, Kind::Eager), 0.075) << "seed " << seed;
    policies::StepTimeModel plain;
    for (int i = 0; i < 3000; ++i) {
      const StepFeatures step = steps.next();
      plain.observe(step, steps.time(device, step, std::nullopt));
    }
    double plain_error = 0;
    for (int i = 0; i < 300; ++i) {
      const StepFeatures step = steps.next();
      plain_error += std::abs(to_seconds(plain.predict(step)) / device.seconds(step, std::nullopt) - 1.0) / 300;
    }
    EXPECT_LT(error_of(law, device, steps, Kind::Eager), 0.8 * plain_error) << "seed " << seed;
  }
}

TEST(StepLaw, quantiles_cover_their_share_of_steps) {
  for (std::uint64_t seed = 1; seed <= 5; ++seed) {
    Steps steps(seed);
    StepLaw law;
    teach(law, {}, steps, 1500, Kind::InBuckets);
    int below_half = 0;
    int below_90 = 0;
    int below_tail = 0;
    constexpr int count = 4000;
    for (int i = 0; i < count; ++i) {
      const StepFeatures step = steps.next();
      const auto bucket = bucket_in(Kind::InBuckets, step);
      const Duration time = steps.time({}, step, bucket);
      below_half += time <= law.quantile(step, bucket, 0.5) ? 1 : 0;
      below_90 += time <= law.quantile(step, bucket, 0.9) ? 1 : 0;
      below_tail += time <= law.quantile(step, bucket, 0.997) ? 1 : 0;
    }
    EXPECT_NEAR(below_half, 0.5 * count, 0.13 * count) << "seed " << seed;
    EXPECT_GE(below_90, 0.85 * count) << "seed " << seed;
    EXPECT_LE(below_90, 0.95 * count) << "seed " << seed;
    EXPECT_GE(below_tail, 0.988 * count) << "seed " << seed;
    // One step in a hundred takes ten times as long: a request of a hundred tokens meets one.
    StepFeatures step;
    step.add_decode(1000);
    EXPECT_GT(to_seconds(law.quantile(step, 8, 0.998)), 5 * to_seconds(law.mean(step, 8))) << "seed " << seed;
    for (double at = 0.01; at < 1.0; at += 0.01) {
      ASSERT_LE(law.quantile(step, 8, at - 0.01), law.quantile(step, 8, at)) << at;
    }
  }
}

TEST(StepLaw, impossible_steps_are_ignored_and_buckets_are_bounded) {
  StepLaw law;
  StepFeatures step;
  step.add_decode(10);
  law.observe(step, 8, Duration::zero());
  law.observe(StepFeatures{}, 8, from_seconds(1));
  EXPECT_EQ(law.observation_count(), 0u);
  Steps steps(1);
  for (int i = 0; i < 2000; ++i) law.observe(step, 8 + i, from_seconds(0.01));
  const auto json = law.to_json();
  std::size_t buckets = 0;
  for (std::size_t at = json.find("logFactor"); at != std::string::npos; at = json.find("logFactor", at + 1)) ++buckets;
  EXPECT_EQ(buckets, StepLaw::buckets_max);
}

TEST(StepLaw, reads_back_from_json_with_the_same_predictions) {
  Steps steps(3);
  StepLaw law;
  teach(law, {.quirk_bucket = 128, .quirk = 1.4}, steps, 1000, Kind::InBuckets);
  teach(law, {}, steps, 200, Kind::Eager);
  const Result<StepLaw> again = StepLaw::from_json(law.to_json());
  ASSERT_TRUE(again) << again.error().message;
  for (int i = 0; i < 200; ++i) {
    const StepFeatures step = steps.next();
    const auto bucket = bucket_in(i % 2 == 0 ? Kind::Eager : Kind::InBuckets, step);
    const double at = steps.uniform();
    EXPECT_NEAR(to_seconds(again->mean(step, bucket)) / to_seconds(law.mean(step, bucket)), 1.0, 1e-9);
    EXPECT_NEAR(to_seconds(again->quantile(step, bucket, at)) / to_seconds(law.quantile(step, bucket, at)), 1.0, 1e-9);
  }
  EXPECT_EQ(again->observation_count(), law.observation_count());
  EXPECT_EQ(again->relative_error(), law.relative_error());
  EXPECT_EQ(again->spread(), law.spread());
  // And it goes on learning.
  StepLaw restored = *again;
  const Device slower{.speed = 0.7};
  teach(restored, slower, steps, 300, Kind::InBuckets);
  EXPECT_LT(error_of(restored, slower, steps, Kind::InBuckets), 0.07);
}

TEST(StepLaw, bad_json_is_refused_by_name_of_its_field) {
  Steps steps(3);
  StepLaw law;
  teach(law, {}, steps, 300, Kind::InBuckets);
  const std::string good = law.to_json();
  const auto field_of = [&](const std::string& from, const std::string& to) {
    std::string bad = good;
    const std::size_t at = bad.find(from);
    EXPECT_NE(at, std::string::npos) << from;
    bad.replace(at, from.size(), to);
    const Result<StepLaw> read = StepLaw::from_json(bad);
    EXPECT_FALSE(read) << bad;
    return read ? std::string("none") : read.error().field;
  };
  EXPECT_EQ(field_of("\"coefficients\":[", "\"coefficients\":[1,"), "coefficients");
  EXPECT_EQ(field_of("\"coefficients\":[", "\"coefficients\":[1e300,"), "coefficients");
  EXPECT_EQ(field_of("\"relativeError\":", "\"relativeError\":-"), "relativeError");
  EXPECT_EQ(field_of("\"observations\":300", "\"observations\":\"many\""), "observations");
  EXPECT_EQ(field_of("\"logQuantiles\"", "\"quantiles\""), "logQuantiles");
  EXPECT_EQ(field_of("\"logQuantiles\":[", "\"logQuantiles\":[9,"), "logQuantiles");
  EXPECT_EQ(field_of("\"key\":8", "\"key\":8.5"), "buckets[0].key");
  for (const std::string& text : {std::string(), std::string("[]"), std::string("{"), good.substr(0, good.size() / 2)}) {
    const Result<StepLaw> read = StepLaw::from_json(text);
    ASSERT_FALSE(read) << text;
    EXPECT_EQ(read.error().code, ErrorCode::InvalidArgument);
    EXPECT_FALSE(StepLaws::from_json(text)) << text;
  }
  const Result<StepLaws> nested = StepLaws::from_json(R"({"laws":[{"lane":0,"sharePercent":100,"law":{"observations":-1}}]})");
  ASSERT_FALSE(nested);
  EXPECT_EQ(nested.error().field, "laws[0].law.observations");
  EXPECT_FALSE(StepLaws::from_json(R"({"laws":[{"lane":0,"sharePercent":0,"law":{}}]})"));
}

StepSample sample_of(std::int32_t lane, std::int32_t share, Steps& steps, const Device& device) {
  const StepFeatures step = steps.next();
  return {.lane = lane, .share_percent = share, .features = step, .bucket = 512, .duration = steps.time(device, step, 512)};
}

TEST(StepLaws, an_unknown_lane_or_share_is_derived_from_what_is_nearest) {
  Steps steps(1);
  StepLaws laws;
  EXPECT_EQ(laws.find(0, 100).law, nullptr);
  for (int i = 0; i < 400; ++i) laws.observe(sample_of(0, 100, steps, {}));
  const StepLaws::Found own = laws.find(0, 100);
  ASSERT_NE(own.law, nullptr);
  EXPECT_TRUE(own.seen);
  EXPECT_EQ(own.scale, 1.0);
  EXPECT_EQ(laws.find(1, 100).law, own.law);
  EXPECT_FALSE(laws.find(1, 100).seen);
  EXPECT_EQ(laws.find(1, 100).scale, 1.0);
  EXPECT_EQ(laws.find(0, 40).law, own.law);
  EXPECT_DOUBLE_EQ(laws.find(0, 40).scale, 2.5);
  EXPECT_FALSE(laws.find(0, 40).seen);

  for (int i = 0; i < 400; ++i) laws.observe(sample_of(1, 50, steps, {.speed = 0.5}));
  EXPECT_EQ(laws.find(0, 60).law, laws.find(1, 50).law);
  EXPECT_NEAR(laws.find(0, 60).scale, 50.0 / 60.0, 1e-12);
  EXPECT_EQ(laws.find(0, 90).law, own.law);
  // A law of its own counts only once it has seen enough.
  for (int i = 0; i < 100; ++i) laws.observe(sample_of(0, 50, steps, {.speed = 0.4}));
  EXPECT_FALSE(laws.find(0, 50).seen);
  for (int i = 0; i < 100; ++i) laws.observe(sample_of(0, 50, steps, {.speed = 0.4}));
  EXPECT_TRUE(laws.find(0, 50).seen);
  EXPECT_EQ(laws.observation_count(), 1000u);
  EXPECT_GT(laws.relative_error(), 0.02);
  EXPECT_LT(laws.relative_error(), 0.2);

  const Result<StepLaws> again = StepLaws::from_json(laws.to_json());
  ASSERT_TRUE(again) << again.error().message;
  EXPECT_EQ(again->observation_count(), laws.observation_count());
  const StepFeatures step = steps.next();
  EXPECT_EQ(again->find(1, 50).law->mean(step, 512), laws.find(1, 50).law->mean(step, 512));
}

}  // namespace
}  // namespace rubato::tuner
