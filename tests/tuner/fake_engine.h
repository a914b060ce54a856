// SPDX-License-Identifier: Apache-2.0
// A seeded analytic engine under virtual time, for tests of the tuner: attainment as a function of knobs and load with an optimum
// that moves with load, request noise, outliers, cold steps after every change and a queue that outlives a change. And the loop
// that runs a tuner on it.
#pragma once

#include <algorithm>
#include <cmath>
#include <memory>
#include <random>
#include <vector>

#include "tuner/journal.h"
#include "tuner/tuner.h"

namespace rubato::tuner::testing {

struct FakeLoad {
  double rate = 4;      // requests per second
  double prompt = 600;  // tokens
  double output = 60;
};

struct FakeEngineOptions {
  ObjectivesSpec objectives{.ttft = std::chrono::milliseconds(1000), .itl = std::chrono::milliseconds(40), .attainment = 90};
  double noise = 0.2;           // of step times, lognormal
  double outlier_share = 0.01;  // of requests, ten times slower
  int cold_steps = 20;          // five times slower, after every change
  double step_base = 0.004;     // seconds
  double step_per_token = 60e-6;
  std::int32_t waiting_max = 1000;
};

class FakeEngine {
 public:
  FakeEngine(std::uint64_t seed, const FakeEngineOptions& options) : options_(options), random_(seed) {}

  /// The share of requests that would meet both targets in steady state.
  [[nodiscard]] double attainment(const KnobValues& knobs, const FakeLoad& load) const {
    const State s = state(knobs, load);
    const double ordinary = (1 - options_.outlier_share) * (1 - options_.outlier_share);
    const double itl = below(to_seconds(options_.objectives.itl), s.itl, std::hypot(0.1, options_.noise));
    const double ttft = below(to_seconds(options_.objectives.ttft), s.ttft, std::hypot(0.5, options_.noise));
    if (s.utilisation >= 1) return s.triage ? 0.85 * itl * ttft * ordinary / s.utilisation : 0.0;
    return ordinary * itl * ttft;
  }

  void change(const KnobValues& knobs) {
    knobs_ = knobs;
    ++settings_number_;
    cold_ = options_.cold_steps * 5 * (options_.step_base + options_.step_per_token * 256);
  }

  /// Runs for a while; what the loop would measure in that time.
  Window run(const FakeLoad& load, Duration duration) {
    Window w;
    w.begin = now_;
    w.end = now_ + duration;
    w.settings_number = settings_number_;
    w.waiting_begin = queue_;
    const double seconds = to_seconds(duration);
    const State s = state(knobs_, load);
    w.arrivals = load.rate > 0 ? std::poisson_distribution<int>(load.rate * seconds)(random_) : 0;
    const double capacity = s.utilisation > 0 ? load.rate * seconds / s.utilisation : 1e9;
    const int served = std::min(queue_ + w.arrivals, static_cast<int>(s.utilisation < 1 && queue_ == 0 ? 1e9 : capacity));
    int left = queue_ + w.arrivals - served;
    w.rejected = std::max(0, left - options_.waiting_max);
    left -= w.rejected;
    const double per_second = capacity / seconds;
    std::vector<double> ttfts;
    std::vector<double> itls;
    std::normal_distribution<double> normal(0, 1);
    std::uniform_real_distribution<double> uniform(0, 1);
    for (int i = 0; i < served; ++i) {
      const double cold = uniform(random_) * seconds < cold_ ? 5 : 1;
      const double outlier = uniform(random_) < options_.outlier_share ? 10 : 1;
      const bool hopeless = s.triage && s.utilisation >= 1 && uniform(random_) > 0.85 / s.utilisation;
      const double queueing = s.triage && !hopeless ? 0.0 : (queue_ + 0.5 * std::max(0, left - queue_)) / per_second;
      const double ttft =
          (s.ttft * std::exp(0.5 * normal(random_)) * cold * outlier * std::exp(options_.noise * normal(random_))) + queueing +
          (hopeless ? to_seconds(options_.objectives.ttft) : 0.0);
      const double itl = s.itl * std::exp(0.1 * normal(random_)) * std::exp(options_.noise * normal(random_)) * cold * outlier;
      const bool late = ttft > to_seconds(options_.objectives.ttft);
      const bool slow = itl > to_seconds(options_.objectives.itl);
      w.ttft_misses += late ? 1 : 0;
      w.itl_misses += slow ? 1 : 0;
      w.good += late || slow ? 0 : 1;
      ttfts.push_back(ttft);
      itls.push_back(itl);
    }
    w.judged = served + w.rejected;
    w.ttft_misses += w.rejected;
    w.ttft_p50 = quantile(ttfts, 0.5);
    w.ttft_p99 = quantile(ttfts, 0.99);
    w.itl_p50 = quantile(itls, 0.5);
    w.itl_p99 = quantile(itls, 0.99);
    w.prompt_tokens_mean = mean_length(load.prompt, w.arrivals);
    w.output_tokens_mean = mean_length(load.output, served);
    w.arrival_interval_cv = 1;
    w.waiting_end = left;
    w.oldest_wait = from_seconds(left > 0 ? left / per_second : 0.0);
    queue_ = left;
    cold_ = std::max(0.0, cold_ - seconds);
    now_ = w.end;
    return w;
  }

  [[nodiscard]] const KnobValues& knobs() const { return knobs_; }
  [[nodiscard]] TimePoint now() const { return now_; }

 private:
  struct State {
    double itl = 0;
    double ttft = 0;
    double utilisation = 0;
    bool triage = false;
  };

  [[nodiscard]] State state(const KnobValues& knobs, const FakeLoad& load) const {
    State s;
    s.triage = knobs.priority_policy == PriorityPolicy::Deadline;
    double chunk = knobs.max_num_batched_tokens;
    if (s.triage) {
      const double allowed = to_seconds(options_.objectives.itl) * (1 - knobs.deadline_margin / 100.0 - 0.15);
      chunk = std::min(chunk, std::max(32.0, (allowed - options_.step_base) / options_.step_per_token));
    }
    const double step = options_.step_base + options_.step_per_token * chunk;
    s.itl = step * (knobs.priority_policy == PriorityPolicy::PrefillFirst ? 2.5 : 1.0);
    const double decodes = std::min<double>(knobs.max_num_seqs, load.rate * load.output * step);
    const double prefill_rate = std::max(1.0, chunk - decodes) / step;
    const double slots = load.rate * load.output * step / knobs.max_num_seqs;
    s.utilisation = std::max(load.rate * load.prompt / prefill_rate, slots);
    const double order = knobs.priority_policy == PriorityPolicy::ShortestFirst ? 0.7 : 1.0;
    const double busy = std::min(s.utilisation, s.triage ? 0.8 : 0.99);  // triage keeps the queue of those it serves short
    const double waiting = busy / (1 - busy);
    s.ttft = load.prompt / prefill_rate * (1 + order * waiting);
    return s;
  }

  static double below(double limit, double median, double deviation) {
    return 0.5 * std::erfc(-std::log(limit / median) / deviation / std::sqrt(2.0));
  }
  static Duration quantile(std::vector<double>& values, double share) {
    if (values.empty()) return {};
    std::sort(values.begin(), values.end());
    const auto rank = static_cast<std::size_t>(std::ceil(share * static_cast<double>(values.size())));
    return from_seconds(values[std::max<std::size_t>(1, rank) - 1]);
  }
  double mean_length(double mean, int count) {
    if (count == 0) return 0;
    constexpr double sigma = 0.7;
    std::lognormal_distribution<double> length(std::log(mean) - 0.5 * sigma * sigma, sigma);
    double sum = 0;
    for (int i = 0; i < count; ++i) sum += length(random_);
    return sum / count;
  }

  FakeEngineOptions options_;
  std::mt19937_64 random_;
  KnobValues knobs_;
  std::uint64_t settings_number_ = 0;
  double cold_ = 0;  // seconds of cold steps left
  int queue_ = 0;
  TimePoint now_{};
};

[[nodiscard]] inline TunerOptions tuner_options(const ObjectivesSpec& objectives, std::uint64_t seed = 1) {
  TunerOptions options;
  options.space.knobs.max_num_batched_tokens = {.initial = 4096, .min = 64, .max = 8192};
  options.space.knobs.priority_policy.choices = {PriorityPolicy::DecodeFirst, PriorityPolicy::PrefillFirst,
                                                 PriorityPolicy::ShortestFirst};
  options.space.base = {.max_num_batched_tokens = 4096, .max_num_seqs = 64, .priority_policy = PriorityPolicy::DecodeFirst};
  options.objectives = objectives;
  options.seed = seed;
  options.model_key = "fake/cpu";
  return options;
}

/// The tuning loop under virtual time: windows in, settings out, settling dropped after every change.
class Loop {
 public:
  Loop(std::uint64_t seed, const FakeEngineOptions& engine_options, const TunerOptions& options, Journal* journal = nullptr)
      : engine(seed, engine_options), options_(options), tuner(std::make_unique<Tuner>(options, journal)) {
    engine.change(tuner->status().incumbent);
    engine.run({}, options_.tuning.settle);
  }

  Decision step(const FakeLoad& load) {
    windows.push_back(engine.run(load, options_.tuning.window));
    const Decision decision = tuner->on_window(windows.back());
    if (decision.apply && *decision.apply != engine.knobs()) {
      engine.change(*decision.apply);
      engine.run(load, options_.tuning.settle);
    }
    decisions.push_back(decision);
    return decision;
  }

  /// Runs until the tuner rests, for at most so many windows; how many it took.
  int settle(const FakeLoad& load, int windows_max) {
    int count = 0;
    bool searched = false;
    while (count < windows_max) {
      ++count;
      const Phase phase = step(load).phase;
      if (phase == Phase::Searching) searched = true;
      if (searched && phase != Phase::Searching) break;
    }
    return count;
  }

  FakeEngine engine;
  std::vector<Window> windows;
  std::vector<Decision> decisions;

 private:
  TunerOptions options_;

 public:
  std::unique_ptr<Tuner> tuner;
};

/// The best expected attainment over a fine grid of budgets, sequences and the policies allowed.
[[nodiscard]] inline double best_attainment(const FakeEngine& engine, const FakeLoad& load, const SearchSpace& space) {
  double best = 0;
  KnobValues knobs = space.base;
  for (const PriorityPolicy policy : space.knobs.priority_policy.choices) {
    knobs.priority_policy = policy;
    for (double budget = space.knobs.max_num_batched_tokens.min; budget <= space.knobs.max_num_batched_tokens.max;
         budget *= 1.05) {
      for (std::int32_t seqs = space.knobs.max_num_seqs.min; seqs <= space.knobs.max_num_seqs.max; seqs += 4) {
        knobs.max_num_batched_tokens = static_cast<std::int32_t>(budget);
        knobs.max_num_seqs = seqs;
        if (knobs.max_num_batched_tokens < seqs + min_prefill_quantum) continue;
        best = std::max(best, engine.attainment(knobs, load));
      }
    }
  }
  return best;
}

}  // namespace rubato::tuner::testing
