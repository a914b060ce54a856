// SPDX-License-Identifier: Apache-2.0
#include "daemon/step_measurement.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <random>
#include <stop_token>
#include <utility>
#include <vector>

#include "daemon/lane_threads.h"
#include "engine/lanes.h"
#include "manifests/check.h"
#include "manifests/layers.h"
#include "policies/step_shapes.h"

namespace rubato {
namespace {

constexpr std::int32_t budget_count = 5;
constexpr std::int32_t rounds_per_budget = 6;
constexpr std::uint64_t observations_min = 2 * tuner::StepLaws::law_observations_min;
constexpr std::int32_t extra_lengths_max = 10;
constexpr std::int32_t warm_steps = 2;  // of each lane after a change of shapes: caches are cold

/// A whole number between two ends, every octave as likely as the next.
std::int32_t by_octaves(std::mt19937_64& random, std::int32_t low, std::int32_t high) {
  const double uniform = static_cast<double>(random() >> 11) * 0x1p-53;
  const double value = std::exp2(std::log2(low) + uniform * (std::log2(high) - std::log2(low)));
  return std::clamp(static_cast<std::int32_t>(std::lround(value)), low, high);
}

/// From the least budget to the largest, in equal steps of octaves.
std::int32_t budget_at(const IntegerKnob& bounds, std::int32_t index) {
  const double octaves = std::log2(bounds.max) - std::log2(bounds.min);
  return static_cast<std::int32_t>(std::lround(std::exp2(std::log2(bounds.min) + octaves * index / (budget_count - 1))));
}

/// What one round asks for.
struct Round {
  std::int32_t sequences = 1;
  std::int32_t prompt_max = 1;
};

class Measurement {
 public:
  Measurement(LoadedModel& model, const KnobsSpec& knobs, const MeasurementOptions& options)
      : options_(options),
        knobs_(knobs),
        limits_(serving_limits(model.plan.limits)),
        random_(options.seed),
        vocabulary_(model.plan.config.vocabulary),
        lanes_(pointers(model),
               {.limits = limits_, .initial = {.number = 1, .knobs = knobs_at(budget_at(knobs.max_num_batched_tokens, 0), 1)}}) {}

  ~Measurement() { put_back_shapes(); }
  Measurement(const Measurement&) = delete;
  Measurement& operator=(const Measurement&) = delete;

  Result<tuner::StepLaws> run() {
    // The largest first: it takes what memory there is to take.
    for (std::int32_t index = budget_count - 1; index >= 0; --index) {
      const std::int32_t budget = budget_at(knobs_.max_num_batched_tokens, index);
      if (auto shaped = use_shapes(budget); !shaped) return Unexpected(std::move(shaped).error());
      for (std::int32_t round = 0; round < rounds_per_budget; ++round) {
        const TimePoint until = options_.now() + options_.length / (budget_count * rounds_per_budget);
        if (auto ran = run_round(budget, draw_round(), until); !ran) return Unexpected(std::move(ran).error());
      }
    }
    // Slow steps: what is cheap goes on until the laws can be believed, within bounds.
    const TimePoint give_up = options_.now() + extra_lengths_max * options_.length;
    while (laws_.observation_count() < observations_min && options_.now() < give_up) {
      if (auto ran = run_round(budget_at(knobs_.max_num_batched_tokens, 0), draw_round(), options_.now()); !ran)
        return Unexpected(std::move(ran).error());
    }
    return std::move(laws_);
  }

 private:
  static std::vector<engine::Backend*> pointers(const LoadedModel& model) {
    std::vector<engine::Backend*> all;
    for (const auto& backend : model.backends) all.push_back(backend.get());
    return all;
  }

  [[nodiscard]] KnobValues knobs_at(std::int32_t budget, std::int32_t sequences) const {
    KnobValues values = initial_knobs(knobs_);
    values.mode = Mode::Chunked;
    values.priority_policy = PriorityPolicy::DecodeFirst;  // chunks as large as the budget allows
    values.max_num_batched_tokens = budget;
    values.max_num_seqs = std::clamp(sequences, 1, std::max(1, budget - min_prefill_quantum));
    return values;
  }

  Round draw_round() {
    const std::int32_t length_max = lanes_.group().effective_max_len();
    return {.sequences = by_octaves(random_, 1, std::max(1, limits_.each.max_num_seqs)),
            .prompt_max = by_octaves(random_, std::min(16, length_max - 1), length_max - 1)};
  }

  Result<void> use_shapes(std::int32_t budget) {
    put_back_shapes();
    for (std::int32_t lane = 0; lane < lanes_.lane_count(); ++lane) {
      engine::Backend& backend = lanes_.backend(LaneIndex{lane});
      const engine::ShapeLimits shapes = backend.shape_limits();
      if (shapes.count_max == 0) continue;
      const policies::ShapeOptions wanted{.budget = budget,
                                          .max_num_seqs = std::min(limits_.each.max_num_seqs, budget),
                                          .count_max = shapes.count_max,
                                          .token_tile = shapes.token_tile,
                                          .eager_tokens = shapes.eager_tokens};
      policies::StepBuckets buckets = policies::default_buckets(wanted);
      if (std::ssize(buckets.tokens) > shapes.count_max)
        buckets = policies::choose_shapes(policies::StepHistogram(budget, 1), wanted).buckets;
      Result<std::unique_ptr<engine::StepShapes>> built = backend.build_shapes(buckets, std::stop_token());
      if (!built) return Unexpected(std::move(built).error());
      backend.use_shapes(*std::move(built));
      shaped_.push_back(&backend);
    }
    warm_ = warm_steps * lanes_.lane_count();
    return {};
  }

  void put_back_shapes() {
    for (engine::Backend* backend : shaped_) backend->use_shapes(nullptr);
    shaped_.clear();
  }

  void add_request(const Round& round) {
    const std::int32_t length_max = lanes_.group().effective_max_len();
    engine::Request request;
    request.id = SequenceId{next_id_++};
    const std::int32_t prompt =
        std::min(by_octaves(random_, std::max(1, round.prompt_max / 4), round.prompt_max), length_max - 1);
    for (std::int32_t i = 0; i < prompt; ++i)
      request.prompt.push_back(static_cast<TokenId>(random_() % static_cast<std::uint64_t>(vocabulary_)));
    request.sampling.max_new_tokens = std::min(by_octaves(random_, 4, 256), length_max - prompt);
    request.sampling.ignore_eos = true;
    request.arrival = options_.now();
    request.ttft_target = std::chrono::hours(1);
    request.itl_target = std::chrono::hours(1);
    const SequenceId id = request.id;
    const Result<void> added = lanes_.add(std::move(request));
    CHECK(added.has_value(), added.error().message);
    running_.push_back(id);
  }

  Result<void> run_round(std::int32_t budget, const Round& round, TimePoint until) {
    lanes_.apply({.number = ++settings_, .knobs = knobs_at(budget, round.sequences)}, options_.now());
    const auto wanted = static_cast<std::size_t>(lanes_.group().settings().knobs.max_num_seqs);
    do {
      while (running_.size() < wanted) add_request(round);
      bool stepped = false;
      for (std::int32_t lane = 0; lane < lanes_.lane_count(); ++lane) stepped |= step(LaneIndex{lane});
      if (lanes_.failure()) return Unexpected(*lanes_.failure());
      CHECK(stepped, "requests wait and no lane has a step");
    } while (options_.now() < until);
    for (const SequenceId id : running_) lanes_.cancel(id);
    running_.clear();
    return {};
  }

  bool step(LaneIndex lane) {
    if (!lanes_.begin_step(lane, options_.now())) return false;
    lanes_.run_step(lane, options_.now());
    lanes_.end_step(lane, options_.now());
    for (const engine::TokenEvent& event : lanes_.events(lane)) {
      if (event.finish) std::erase(running_, event.id);
    }
    const engine::StepRecord& record = lanes_.record(lane);
    if (warm_ > 0) {
      --warm_;
    } else {
      laws_.observe({.lane = lane.value,
                     .share_percent = 100,
                     .features = record.features,
                     .bucket = record.bucket,
                     .duration = record.end - record.begin});
    }
    return true;
  }

  const MeasurementOptions& options_;
  const KnobsSpec& knobs_;
  const policies::LaneGroupLimits limits_;
  std::mt19937_64 random_;
  const std::int32_t vocabulary_;
  engine::Lanes lanes_;
  tuner::StepLaws laws_;
  std::vector<engine::Backend*> shaped_;
  std::vector<SequenceId> running_;
  std::uint64_t next_id_ = 1;
  std::uint64_t settings_ = 1;
  std::int32_t warm_ = 0;
};

}  // namespace

Result<tuner::StepLaws> measure_steps(LoadedModel& model, const KnobsSpec& knobs, const MeasurementOptions& options) {
  return Measurement(model, knobs, options).run();
}

}  // namespace rubato
