// SPDX-License-Identifier: Apache-2.0
// A node whose true step times are made up, under virtual time, with a twin that watches it as the tuning loop has it: steps,
// arrivals and ends are told, windows are checked.
#pragma once

#include <algorithm>
#include <cmath>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <random>
#include <vector>

#include "tuner/twin/simulation.h"
#include "tuner/twin/twin.h"

namespace rubato::tuner::testing {

/// Step times that no law knows.
struct TrueCost final : StepCost {
  double base = 0.006;
  double per_token = 40e-6;
  double per_pair = 2e-9;
  double per_row = 20e-6;
  double per_context = 20e-9;
  double scatter = 0.05;
  double outlier_share = 0.01;
  double outlier = 3;
  std::function<double(TimePoint)> slowdown = [](TimePoint) { return 1.0; };

  [[nodiscard]] Duration duration(const SimulatedStep& step) const override {
    const policies::StepFeatures& features = *step.features;
    const double seconds = base + per_token * step.bucket.value_or(features.tokens) + per_pair * features.attention +
                           per_row * features.decode_rows + per_context * features.context;
    // Outliers are the luckless end of the draw; what is below scatters by a triangle as wide as asked for.
    const double ordinary = std::min(step.draw / (1 - outlier_share), 1.0);
    const double triangle = ordinary < 0.5 ? std::sqrt(2 * ordinary) - 1 : 1 - std::sqrt(2 * (1 - ordinary));
    const double noise = std::exp(scatter * std::sqrt(6.0) * triangle) * (step.draw > 1 - outlier_share ? outlier : 1.0);
    return from_seconds(seconds * noise * slowdown(step.begin) * 100.0 / step.share_percent);
  }
};

struct NodeLoad {
  double rate = 12;  // requests per second
  double prompt = 600;
  double output = 120;
};

[[nodiscard]] inline SearchSpace node_space() {
  SearchSpace space;
  space.knobs.max_num_batched_tokens = {.initial = 512, .min = 128, .max = 2048};
  space.knobs.max_num_seqs = {.initial = 64, .min = 8, .max = 64};
  return space;
}

[[nodiscard]] inline TwinOptions node_options(std::uint64_t seed = 1) {
  return {.limits = {.each = {.max_model_len = 4096, .max_num_seqs = 64, .max_waiting = 1024, .block_count = 8192}},
          .shapes = true,
          .objectives = {.ttft = std::chrono::milliseconds(500), .itl = std::chrono::milliseconds(30), .attainment = 95},
          .seed = seed,
          .future_length = std::chrono::seconds(30),
          .futures = 3};
}

class Traffic {
 public:
  Traffic(std::uint64_t seed, const ObjectivesSpec& objectives) : random_(seed), objectives_(objectives) {}

  [[nodiscard]] std::vector<TrafficRequest> draw(const NodeLoad& load, TimePoint from, TimePoint to) {
    std::exponential_distribution<double> interval(load.rate);
    std::vector<TrafficRequest> requests;
    TimePoint at = from + from_seconds(interval(random_));
    for (; at < to; at += from_seconds(interval(random_))) {
      const std::int32_t output = length(load.output, 600);
      requests.push_back({.arrival = at,
                          .prompt_tokens = length(load.prompt, 3000),
                          .output_tokens = output,
                          .max_new_tokens = 800,
                          .ttft_target = objectives_.ttft,
                          .itl_target = objectives_.itl});
    }
    return requests;
  }

 private:
  std::int32_t length(double mean, double most) {
    constexpr double sigma = 0.7;
    std::lognormal_distribution<double> lengths(std::log(mean) - 0.5 * sigma * sigma, sigma);
    return static_cast<std::int32_t>(std::clamp(lengths(random_), 2.0, most));
  }

  std::mt19937_64 random_;
  ObjectivesSpec objectives_;
};

class Node {
 public:
  Node(const TwinOptions& options, const KnobValues& knobs, std::uint64_t seed, const StepCost& cost)
      : twin(options),
        traffic_(seed, options.objectives),
        simulation_(SimulationOptions{.limits = options.limits,
                                      .initial = knobs,
                                      .seed = seed * 7919,
                                      .shapes = options.shapes,
                                      .handoff_per_block = {}},
                    cost) {
    simulation_.on_step = [this](const StepSample& sample) { twin.observe(sample); };
    simulation_.open(simulation_.now());
  }

  /// Runs a window and tells the twin of it; not yet checked.
  Window run(const NodeLoad& load, Duration length) {
    const TimePoint from = simulation_.now();
    for (const TrafficRequest& request : traffic_.draw(load, from, from + length)) {
      simulation_.add(request);
      TrafficRequest so_far = request;
      so_far.output_tokens = 1;
      ids_[request.arrival] = {++last_id_};
      twin.traffic().arrived({last_id_}, so_far);
    }
    simulation_.run_until(from + length);
    for (const SimulatedRequest& one : simulation_.take_requests(false)) {
      twin.traffic().ended(ids_.at(one.request.arrival), one.request.output_tokens);
    }
    return simulation_.close();
  }

  /// So many windows, each checked.
  void watch(const NodeLoad& load, Duration length, int windows) {
    for (int i = 0; i < windows; ++i) (void)twin.check(run(load, length), simulation_.knobs());
  }

  [[nodiscard]] std::vector<TrafficPhase> recent(Duration length) const {
    const TimePoint end = simulation_.now();
    const TimePoint begin = end - length;
    return {{.requests = twin.traffic().between(begin, end), .begin = begin, .end = end, .weight = 1}};
  }

  [[nodiscard]] Simulation& engine() { return simulation_; }

  Twin twin;

 private:
  Traffic traffic_;
  Simulation simulation_;
  std::map<TimePoint, SequenceId> ids_;
  std::uint64_t last_id_ = 0;
};

/// What these settings really attain under fresh traffic of this load, over so long.
[[nodiscard]] inline Window truth(const TwinOptions& options, const KnobValues& knobs, const StepCost& cost, const NodeLoad& load,
                                  std::uint64_t seed, Duration length) {
  Node node(options, knobs, seed, cost);
  (void)node.run(load, std::chrono::seconds(10));
  return node.run(load, length);
}

}  // namespace rubato::tuner::testing
