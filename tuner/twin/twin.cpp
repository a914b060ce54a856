// SPDX-License-Identifier: Apache-2.0
#include "tuner/twin/twin.h"

#include <algorithm>
#include <utility>

#include "tuner/twin/twin_state.h"

namespace rubato::tuner {

namespace {

constexpr std::size_t earlier_max = 4;
constexpr std::uint64_t steps_min = StepLaws::law_observations_min;
constexpr std::int32_t checks_min = 2;
// A future longer than this many requests says little more and costs as much again.
constexpr double future_requests_max = 3000;
constexpr Duration future_shortest = std::chrono::seconds(15);
// A glance needs this many judged requests to rank settings by.
constexpr double glance_requests = 300;
constexpr Duration glance_shortest = std::chrono::seconds(10);

double requests_per_second(std::span<const TrafficPhase> phases) {
  double weight = 0;
  double rate = 0;
  for (const TrafficPhase& phase : phases) {
    weight += phase.weight;
    rate += phase.weight * static_cast<double>(phase.requests.size()) / std::max(1e-3, to_seconds(phase.end - phase.begin));
  }
  return weight > 0 ? rate / weight : 0.0;
}

/// Requests without targets of their own carry the objectives of when they came; what counts are those of now.
void use_objectives(TrafficRequest& request, const std::deque<ObjectivesSpec>& earlier, const ObjectivesSpec& now) {
  for (const ObjectivesSpec& was : earlier) {
    if (request.ttft_target == was.ttft && request.itl_target == was.itl) {
      request.ttft_target = now.ttft;
      request.itl_target = now.itl;
      return;
    }
  }
}

}  // namespace

Twin::Twin(const TwinOptions& options) : state_(std::make_unique<State>(options)) {}

Twin::~Twin() = default;

void Twin::set_enabled(bool enabled) {
  state_->enabled = enabled;
}

void Twin::set_objectives(const ObjectivesSpec& objectives) {
  State& state = *state_;
  const ObjectivesSpec was = std::exchange(state.options.objectives, objectives);
  if (was == objectives) return;
  std::erase(state.earlier, objectives);
  state.earlier.push_back(was);
  if (state.earlier.size() > earlier_max) state.earlier.pop_front();
}

void Twin::set_go_on(std::function<bool()> go_on) {
  state_->go_on = std::move(go_on);
  if (!state_->go_on) state_->go_on = [] { return true; };
}

void Twin::observe(const StepSample& sample) {
  laws_.observe(sample);
}

void Twin::adopt(StepLaws laws) {
  laws_ = std::move(laws);
}

bool Twin::trusted() const {
  return status().state == TwinState::Trusted;
}

const TwinStatus& Twin::status() const {
  const State& state = *state_;
  TwinStatus& status = state.status;
  status.steps = laws_.observation_count();
  status.step_error = laws_.relative_error();
  status.correction = state.correction;
  status.simulations_total = state.counts->simulations;
  status.aborted_total = state.counts->aborted;
  status.simulated_total = state.counts->simulated;
  // One window that agreed will do; after one that did not, the correction made of it has to prove itself.
  const bool agreed = !state.off.empty() && !state.off.back();
  const bool learning = status.steps < steps_min || (state.correction.windows < checks_min && !agreed);
  if (!state.enabled) {
    status.state = TwinState::Off;
    status.message = "spec.tuning.twin.enabled is false";
  } else if (learning && !state.distrusted) {
    status.state = TwinState::Learning;
    status.message = "learnt from " + std::to_string(status.steps) + " of " + std::to_string(steps_min) + " steps and " +
                     std::to_string(state.correction.windows) + " of " + std::to_string(checks_min) + " windows";
  } else {
    status.state = state.distrusted ? TwinState::Distrusted : TwinState::Trusted;
    status.message = state.check_message;
  }
  return status;
}

SimulationOptions Twin::State::simulation(const KnobValues& knobs) const {
  return {.limits = options.limits,
          .initial = knobs,
          .seed = options.seed,
          .shapes = options.shapes,
          .learns = true,
          .handoff_per_block = {},
          .outstanding_max = options.outstanding_max};
}

std::unique_ptr<TwinStudy> Twin::study(std::vector<TrafficPhase> phases) const {
  const State& twin = *state_;
  std::size_t requests = 0;
  for (const TrafficPhase& phase : phases) requests += phase.requests.size();
  if (!twin.enabled || requests < requests_min || laws_.observation_count() < steps_min) return nullptr;
  for (TrafficPhase& phase : phases) {
    for (TrafficRequest& request : phase.requests) use_objectives(request, twin.earlier, twin.options.objectives);
  }
  const double rate = std::max(1e-3, requests_per_second(phases));
  auto state = std::make_unique<TwinStudy::State>();
  state->length = std::min(twin.options.future_length, std::max(future_shortest, from_seconds(future_requests_max / rate)));
  state->futures =
      bootstrap_futures(phases, {.length = state->length, .count = std::max(1, twin.options.futures), .seed = twin.options.seed});
  if (state->futures.empty()) return nullptr;
  state->glance_length =
      std::clamp(from_seconds(glance_requests / rate), std::min(glance_shortest, state->length), state->length);
  state->options = twin.options;
  state->go_on = twin.go_on;
  state->cost = std::make_unique<LawCost>(std::make_shared<const StepLaws>(laws_),
                                          twin.options.limits.devices * twin.options.limits.lanes_per_device);
  state->correction = twin.correction;
  state->attainment_error = twin.attainment_error;
  state->counts = twin.counts;
  return std::unique_ptr<TwinStudy>(new TwinStudy(std::move(state)));
}

}  // namespace rubato::tuner
