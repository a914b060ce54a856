// SPDX-License-Identifier: Apache-2.0
// The tuning loop with a twin under virtual time, against an engine that is the real scheduler on a made-up cost of steps:
// arrivals, ends and steps are fed as the daemon feeds them, once a second; windows, alarms and progress are handed to the tuner.
#pragma once

#include <cmath>
#include <memory>
#include <random>
#include <unordered_map>
#include <vector>

#include "tuner/load_watch.h"
#include "tuner/tuner.h"
#include "tuner/twin/simulation.h"
#include "tuner/twin/twin.h"

namespace rubato::tuner::testing {

/// 4 ms per step and 60 us per token, with scatter.
class MadeUpCost final : public StepCost {
 public:
  double base = 4e-3;
  double token = 60e-6;
  double context = 30e-9;
  double scatter = 0.05;

  [[nodiscard]] Duration duration(const SimulatedStep& step) const override {
    const policies::StepFeatures& features = *step.features;
    const double normal = std::sqrt(2.0) * inverse_error(2 * step.draw - 1);
    return from_seconds((base + token * features.tokens + context * features.context) * std::exp(scatter * normal));
  }

 private:
  static double inverse_error(double x) {  // Winitzki 2008
    const double a = 0.147;
    const double l = std::log(1 - x * x);
    const double t = 2 / (M_PI * a) + l / 2;
    return std::copysign(std::sqrt(std::sqrt(t * t - l / a) - t), x);
  }
};

struct SimulatedLoad {
  double rate = 6;  // requests per second
  double prompt = 600;
  double output = 60;
};

struct SimulatedLoopOptions {
  ObjectivesSpec objectives{.ttft = std::chrono::milliseconds(800), .itl = std::chrono::milliseconds(40), .attainment = 90};
  KnobValues initial{.max_num_batched_tokens = 2048, .max_num_seqs = 64, .priority_policy = PriorityPolicy::DecodeFirst};
  TuningSpec tuning{};
  std::uint64_t seed = 1;
  Journal* journal = nullptr;
  bool twin = true;
  std::vector<PriorityPolicy> policies{PriorityPolicy::DecodeFirst, PriorityPolicy::PrefillFirst, PriorityPolicy::ShortestFirst};
};

class SimulatedLoop {
 public:
  explicit SimulatedLoop(const SimulatedLoopOptions& options)
      : options_(options),
        random_(options.seed),
        engine_({.limits = limits(), .initial = options.initial, .seed = options.seed}, cost),
        twin_({.limits = limits(), .shapes = false, .objectives = options.objectives, .seed = options.seed}),
        watch_({}),
        tuner_(std::make_unique<Tuner>(tuner_options(), options.journal, options.twin ? &twin_ : nullptr, &watch_)) {
    engine_.on_step = [this](const StepSample& sample) {
      StepSample seen = sample;
      seen.duration = seen.duration * reported_percent / 100;
      twin_.observe(seen);
    };
  }

  static policies::LaneGroupLimits limits() {
    return {.each = {.max_model_len = 8192, .max_num_seqs = 64, .max_waiting = 4096, .block_count = 8192}};
  }
  [[nodiscard]] TunerOptions tuner_options() const {
    TunerOptions options;
    options.space.knobs.max_num_batched_tokens = {.initial = 2048, .min = 96, .max = 4096};
    options.space.knobs.max_num_seqs = {.initial = 64, .min = 16, .max = 64};
    options.space.knobs.priority_policy.choices = options_.policies;
    options.space.base = options_.initial;
    options.objectives = options_.objectives;
    options.tuning = options_.tuning;
    options.seed = options_.seed;
    options.model_key = "simulated";
    options.wall_at_zero = std::chrono::hours(24 * 365 * 50);
    return options;
  }

  /// Serves this load for so long.
  void run(const SimulatedLoad& load, Duration length) {
    const TimePoint end = engine_.now() + length;
    std::exponential_distribution<double> gap(load.rate);
    TimePoint next = engine_.now() + from_seconds(gap(random_));
    while (engine_.now() < end) {
      const TimePoint until = std::min(end, engine_.now() + std::chrono::seconds(1));
      for (; next < until; next += from_seconds(gap(random_))) arrive(load, next);
      engine_.run_until(until);
      for (const SimulatedRequest& one : engine_.take_requests(false)) note_end(one);
      tick();
    }
  }

  void act(const Decision& decision) {
    decisions.push_back(decision);
    if (!decision.apply || *decision.apply == engine_.knobs()) return;
    engine_.apply(*decision.apply);
    changes.push_back(engine_.now());
    changed_ = engine_.now();
    settled_at_ = engine_.now() + options_.tuning.settle;
  }

  [[nodiscard]] Tuner& tuner() { return *tuner_; }
  [[nodiscard]] Twin& twin() { return twin_; }
  [[nodiscard]] Simulation& engine() { return engine_; }
  [[nodiscard]] bool said(const std::string& reason) const {
    return std::any_of(decisions.begin(), decisions.end(), [&](const Decision& one) { return one.reason == reason; });
  }
  /// Share of good requests of those that ended in the last so many windows.
  [[nodiscard]] double attainment(std::size_t last_windows) const {
    double good = 0;
    double judged = 0;
    for (std::size_t i = windows.size() - std::min(windows.size(), last_windows); i < windows.size(); ++i) {
      good += windows[i].good;
      judged += windows[i].judged;
    }
    return judged > 0 ? good / judged : 0;
  }

  MadeUpCost cost;
  int reported_percent = 100;  // of a step's duration that the twin is told
  std::vector<Decision> decisions;
  std::vector<TimePoint> changes;
  std::vector<Window> windows;

 private:
  void arrive(const SimulatedLoad& load, TimePoint at) {
    std::lognormal_distribution<double> shape(-0.125, 0.5);
    TrafficRequest request{.arrival = at,
                           .prompt_tokens = std::clamp(static_cast<std::int32_t>(load.prompt * shape(random_)), 1, 6000),
                           .output_tokens = std::clamp(static_cast<std::int32_t>(load.output * shape(random_)), 1, 1000),
                           .max_new_tokens = 1000,
                           .ttft_target = options_.objectives.ttft,
                           .itl_target = options_.objectives.itl};
    engine_.add(request);
    const SequenceId id{++last_id_};
    running_[at.time_since_epoch().count()] = id;
    request.output_tokens = 1;  // nobody knows yet
    twin_.traffic().arrived(id, request);
    watch_.arrived(at, request.prompt_tokens);
  }

  void note_end(const SimulatedRequest& one) {
    const auto found = running_.find(one.request.arrival.time_since_epoch().count());
    if (found == running_.end()) return;
    twin_.traffic().ended(found->second, one.request.output_tokens);
    watch_.ended(engine_.now(), one.request.output_tokens);
    running_.erase(found);
  }

  void tick() {
    const TimePoint now = engine_.now();
    if (const auto alarm = watch_.tick(now)) {
      if (const auto decision = tuner_->on_alarm(*alarm, engine_.so_far())) act(*decision);
    }
    if (settled_at_) {
      if (now < *settled_at_) return;
      engine_.open(changed_);
      opened_ = now;
      settled_at_.reset();
      return;
    }
    if (now - opened_ < options_.tuning.window) {
      if (const auto decision = tuner_->on_progress(engine_.so_far())) act(*decision);
      return;
    }
    windows.push_back(engine_.close());
    opened_ = now;
    act(tuner_->on_window(windows.back()));
    if (!settled_at_) engine_.open(changed_);
  }

  SimulatedLoopOptions options_;
  std::mt19937_64 random_;
  Simulation engine_;
  Twin twin_;
  LoadWatch watch_;
  std::unique_ptr<Tuner> tuner_;
  std::uint64_t last_id_ = 0;
  std::unordered_map<std::int64_t, SequenceId> running_;  // by arrival
  TimePoint changed_{};
  TimePoint opened_{};
  std::optional<TimePoint> settled_at_ = TimePoint{};
};

}  // namespace rubato::tuner::testing
