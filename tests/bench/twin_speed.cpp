// SPDX-License-Identifier: Apache-2.0
// How much faster than real time the twin's simulation runs, per second of CPU: what a study of settings costs. The simulated
// device is a fast one, so that a second of it holds many steps and tokens; its step times are as the twin has learnt them.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <ctime>
#include <memory>
#include <string>
#include <vector>

#include "manifests/names.h"
#include "tuner/twin/counter_draw.h"
#include "tuner/twin/law_cost.h"
#include "tuner/twin/simulation.h"

namespace rubato::tuner {
namespace {

struct FastDevice final : StepCost {
  explicit FastDevice(double scale_in) : scale(scale_in) {}
  [[nodiscard]] Duration duration(const SimulatedStep& step) const override {
    const double tokens = step.bucket.value_or(step.features->tokens);
    const double seconds = 8e-3 + 18e-6 * tokens + 2e-10 * step.features->attention + 2e-9 * step.features->context;
    return from_seconds(scale * seconds * (0.9 + 0.2 * step.draw) * 100.0 / step.share_percent);
  }
  double scale;
};

struct Load {
  const char* name;
  double rate;          // requests per second
  std::int32_t prompt;  // tokens: all equal, or the median where spread is positive
  std::int32_t output;
  double spread = 0;  // of the logarithm
  double device = 1;  // its step times
  KnobValues knobs;
  std::int32_t lanes = 1;
  bool learns = false;  // as the twin: the schedulers' models stay as they were learnt
};

double normal(std::uint64_t stream, std::uint64_t counter) {
  const double radius = std::sqrt(-2 * std::log(counter_draw(3, stream, 2 * counter)));
  return radius * std::cos(6.283185307179586 * counter_draw(3, stream, 2 * counter + 1));
}

std::int32_t tokens_of(std::int32_t median, double spread, std::uint64_t stream, std::uint64_t counter) {
  if (spread == 0) return median;
  return std::clamp(static_cast<std::int32_t>(median * std::exp(spread * normal(stream, counter))), 1, 3500);
}

std::vector<TrafficRequest> traffic(const Load& load, Duration length) {
  std::vector<TrafficRequest> requests;
  double time = 0;
  for (std::uint64_t i = 0;; ++i) {
    time += -std::log(counter_draw(1, 0, i)) / load.rate;
    if (from_seconds(time) >= length) return requests;
    const std::int32_t output = tokens_of(load.output, load.spread, 2, i);
    requests.push_back({.arrival = TimePoint{} + from_seconds(time),
                        .prompt_tokens = tokens_of(load.prompt, load.spread, 1, i),
                        .output_tokens = output,
                        .max_new_tokens = output,
                        .ttft_target = std::chrono::milliseconds(500),
                        .itl_target = std::chrono::milliseconds(50)});
  }
}

double cpu_seconds() {
  return static_cast<double>(std::clock()) / CLOCKS_PER_SEC;
}

SimulationOptions options_of(const Load& load) {
  return {.limits = {.each = {.max_model_len = 8192, .max_num_seqs = 512, .max_waiting = 4096, .block_count = 65536},
                     .lanes_per_device = load.lanes},
          .initial = load.knobs,
          .shapes = true,
          .learns = load.learns};
}

/// What the twin learns of the device by watching this load.
std::shared_ptr<const StepLaws> watch(const Load& load, const std::vector<TrafficRequest>& requests, const StepCost& device) {
  auto laws = std::make_shared<StepLaws>();
  Simulation simulation(options_of(load), device);
  simulation.on_step = [&](const StepSample& sample) { laws->observe(sample); };
  for (const TrafficRequest& request : requests) simulation.add(request);
  simulation.run_until(requests.back().arrival);
  return laws;
}

void run(const Load& load) {
  const Duration length = std::chrono::seconds(60);
  const std::vector<TrafficRequest> requests = traffic(load, length);
  const FastDevice device(load.device);
  const LawCost cost(watch(load, requests, device), load.lanes);
  double least = 1e9;
  Window window;
  std::uint64_t steps = 0;
  double tokens = 0;
  for (int round = 0; round < 5; ++round) {
    const double begin = cpu_seconds();
    Simulation simulation(options_of(load), cost);
    for (const TrafficRequest& request : requests) simulation.add(request);
    simulation.run_until(TimePoint{} + length);
    window = simulation.close();
    least = std::min(least, cpu_seconds() - begin);
    steps = simulation.steps();
    tokens = 0;
    for (const SimulatedRequest& one : simulation.take_requests(true)) tokens += one.request.output_tokens;
  }
  std::printf("| %s | %s | %.0f | %.1f | %.2f | %.0f | %.2f | %.0f |\n", load.name,
              std::string(to_string(load.knobs.priority_policy)).c_str(), load.rate,
              1e3 * to_seconds(length) / static_cast<double>(steps), window.attainment(), to_seconds(length) / least,
              1e6 * least / static_cast<double>(steps), 1e9 * least / tokens);
}

}  // namespace
}  // namespace rubato::tuner

int main() {
  using rubato::Mode;
  using rubato::PriorityPolicy;
  using rubato::tuner::Load;
  std::printf("| load | policy | requests/s | ms between steps | attainment | times real time | us per step | ns per token |\n");
  std::printf("|---|---|---|---|---|---|---|---|\n");
  for (const PriorityPolicy policy :
       {PriorityPolicy::Deadline, PriorityPolicy::DecodeFirst, PriorityPolicy::PrefillFirst, PriorityPolicy::ShortestFirst}) {
    run(Load{.name = "256 / 48 tokens",
             .rate = 100,
             .prompt = 256,
             .output = 48,
             .knobs = {.max_num_batched_tokens = 2048, .max_num_seqs = 256, .priority_policy = policy}});
  }
  run(Load{.name = "256 / 48 tokens, learning",
           .rate = 100,
           .prompt = 256,
           .output = 48,
           .knobs = {.max_num_batched_tokens = 2048, .max_num_seqs = 256},
           .learns = true});
  run(Load{.name = "256 / 48 tokens, two lanes",
           .rate = 50,
           .prompt = 256,
           .output = 48,
           .knobs = {.max_num_batched_tokens = 2048, .max_num_seqs = 256, .mode = Mode::Disaggregated},
           .lanes = 2});
  for (const PriorityPolicy policy : {PriorityPolicy::Deadline, PriorityPolicy::DecodeFirst}) {
    run(Load{.name = "chat, 200 / 150 tokens, mixed lengths",
             .rate = 30,
             .prompt = 200,
             .output = 150,
             .spread = 0.8,
             .knobs = {.max_num_batched_tokens = 1024, .max_num_seqs = 256, .priority_policy = policy}});
    run(Load{.name = "the same at twice what the device can do",
             .rate = 60,
             .prompt = 400,
             .output = 200,
             .spread = 0.8,
             .knobs = {.max_num_batched_tokens = 1024, .max_num_seqs = 256, .priority_policy = policy}});
  }
  run(Load{.name = "a slow device, 200 / 40 tokens",
           .rate = 3,
           .prompt = 200,
           .output = 40,
           .spread = 0.5,
           .device = 4,
           .knobs = {.max_num_batched_tokens = 256, .max_num_seqs = 64}});
}
