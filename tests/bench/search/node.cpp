// SPDX-License-Identifier: Apache-2.0
// See node.h.
#include "tests/bench/search/node.h"

#include <algorithm>
#include <unordered_map>

namespace rubato::study {
namespace {

using std::chrono::seconds;

constexpr int window_stretch_max = 4;  // as in the daemon: a window that lacks requests ends after this many lengths

tuner::SimulationOptions simulation_options(const KnobValues& initial, std::uint64_t seed) {
  return {.limits = node_limits(), .initial = initial, .seed = seed, .shapes = true, .outstanding_max = outstanding_max};
}

// The loop of one run.
class LiveRun {
 public:
  LiveRun(std::span<const tuner::TrafficRequest> traffic, const tuner::StepCost& cost, Controller& controller,
          const NodeOptions& options)
      : traffic_(traffic),
        controller_(controller),
        options_(options),
        tuning_(tuning_spec()),
        node_(simulation_options(options.initial, options.seed), cost) {
    run_.changes.push_back({.at = TimePoint{}, .knobs = options.initial, .reason = "Initial"});
    run_.slots.resize(static_cast<std::size_t>((options.horizon + options.slot - Duration(1)) / options.slot));
    if (controller.listens()) {
      node_.on_step = [&controller](const tuner::StepSample& sample) { controller.on_step(sample); };
    }
    for (const tuner::TrafficRequest& request : traffic) node_.add(request);
  }

  NodeRun run() {
    const TimePoint end = TimePoint{} + options_.horizon;
    settled_at_ = TimePoint{} + tuning_.settle;
    TimePoint next{};
    while (node_.now() < end) {
      next = std::min(std::max(next + controller_.tick_period(), node_.now() + Duration(1)), end);
      advance(next);
      tick(next);
    }
    const TimePoint last = end + options_.drain_max;
    for (TimePoint at = std::max(end, node_.now()) + seconds(2); at <= last && judged_ < expected(); at += seconds(2)) advance(at);
    judge_the_rest(end);
    return std::move(run_);
  }

 private:
  void advance(TimePoint until) {
    node_.run_until(until);
    if (controller_.listens()) {
      for (; arrived_ < traffic_.size() && traffic_[arrived_].arrival <= until; ++arrived_) {
        const SequenceId id{arrived_ + 1};
        ids_[traffic_[arrived_].arrival.time_since_epoch().count()] = id;
        controller_.on_arrival(id, traffic_[arrived_]);
      }
    }
    for (const tuner::SimulatedRequest& request : node_.take_requests(false)) {
      count(request, outcome_of(request, until) == Outcome::Good);
      if (!controller_.listens()) continue;
      const auto found = ids_.find(request.request.arrival.time_since_epoch().count());
      if (found == ids_.end()) continue;
      controller_.on_end(found->second, until, request);
      ids_.erase(found);
    }
  }

  // As daemon/tuning_loop: open once settled, close when long enough and with enough requests.
  void tick(TimePoint now) {
    if (std::optional<Move> move = controller_.on_tick({.now = now, .node = node_, .window_open = !settled_at_})) {
      make(*move);
      return;
    }
    if (settled_at_) {
      if (now < *settled_at_) return;
      node_.open(changed_);
      opened_ = now;
      settled_at_.reset();
      return;
    }
    const Duration open_for = now - opened_;
    if (open_for < tuning_.window) return;
    if (open_for < window_stretch_max * tuning_.window && node_.so_far().judged < tuning_.min_requests) return;
    const tuner::Window window = node_.close();
    ++run_.windows;
    if (std::optional<Move> move = controller_.on_window(window)) {
      make(*move);
      if (settled_at_) return;
    }
    node_.open(changed_);
    opened_ = now;
  }

  void make(const Move& move) {
    if (move.thinking > Duration::zero()) advance(node_.now() + move.thinking);
    if (move.knobs == node_.knobs()) return;
    node_.apply(move.knobs);
    changed_ = node_.now();
    settled_at_ = changed_ + tuning_.settle;
    run_.changes.push_back({.at = changed_, .knobs = move.knobs, .reason = move.reason});
  }

  [[nodiscard]] std::size_t expected() const {
    const TimePoint end = TimePoint{} + options_.horizon;
    return static_cast<std::size_t>(
        std::lower_bound(traffic_.begin(), traffic_.end(), end,
                         [](const tuner::TrafficRequest& request, TimePoint at) { return request.arrival < at; }) -
        traffic_.begin());
  }

  void count(const tuner::SimulatedRequest& request, bool good) {
    const auto slot = static_cast<std::size_t>(request.request.arrival.time_since_epoch() / options_.slot);
    if (slot >= run_.slots.size() || request.request.arrival >= TimePoint{} + options_.horizon) return;
    ++judged_;
    ++run_.slots[slot].requests;
    run_.slots[slot].good += good ? 1 : 0;
  }

  void judge_the_rest(TimePoint end) {
    for (const tuner::SimulatedRequest& request : node_.take_requests(true)) {
      if (request.request.arrival < end) count(request, outcome_of(request, node_.now()) != Outcome::Bad);
    }
  }

  std::span<const tuner::TrafficRequest> traffic_;
  Controller& controller_;
  const NodeOptions& options_;
  const TuningSpec tuning_;
  tuner::Simulation node_;
  NodeRun run_;
  std::size_t arrived_ = 0;
  std::size_t judged_ = 0;
  std::unordered_map<std::int64_t, SequenceId> ids_;  // of running requests, by arrival
  TimePoint changed_{};
  TimePoint opened_{};
  std::optional<TimePoint> settled_at_;
};

}  // namespace

policies::LaneGroupLimits node_limits() {
  const std::int32_t len_max = prompt_tokens_max + output_tokens_max;
  return {.each = {.max_model_len = len_max, .max_num_seqs = 512, .max_waiting = 2 * outstanding_max, .block_count = 52000}};
}

KnobValues default_settings() {
  return {.max_num_batched_tokens = 2048, .max_num_seqs = 256, .priority_policy = PriorityPolicy::DecodeFirst};
}

tuner::SearchSpace search_space(Space space) {
  tuner::SearchSpace found;
  found.base = default_settings();
  found.knobs.max_num_batched_tokens = {.initial = 2048, .min = 128, .max = 8192};
  found.knobs.max_num_seqs = {.initial = 256, .min = 16, .max = 512};
  found.knobs.priority_policy.initial = PriorityPolicy::DecodeFirst;
  if (space == Space::Static) {
    found.knobs.priority_policy.choices = {PriorityPolicy::DecodeFirst, PriorityPolicy::PrefillFirst,
                                           PriorityPolicy::ShortestFirst};
    found.deadline_margin_free = false;
  }
  return found;
}

TuningSpec tuning_spec() {
  TuningSpec tuning;
  tuning.window = seconds(20);
  tuning.min_requests = 50;
  return tuning;
}

std::int64_t NodeRun::requests() const {
  std::int64_t sum = 0;
  for (const Slot& slot : slots) sum += slot.requests;
  return sum;
}

std::int64_t NodeRun::good() const {
  std::int64_t sum = 0;
  for (const Slot& slot : slots) sum += slot.good;
  return sum;
}

double NodeRun::attainment() const {
  return requests() > 0 ? static_cast<double>(good()) / static_cast<double>(requests()) : 0.0;
}

NodeRun run_node(std::span<const tuner::TrafficRequest> traffic, const tuner::StepCost& cost, Controller& controller,
                 const NodeOptions& options) {
  return LiveRun(traffic, cost, controller, options).run();
}

Outcome outcome_of(const tuner::SimulatedRequest& request, TimePoint now) {
  if (request.rejected) return Outcome::Bad;
  const Duration ttft = request.ttft.value_or(now - request.request.arrival);
  if (ttft > request.request.ttft_target || request.itl_p99 > request.request.itl_target) return Outcome::Bad;
  return request.ended ? Outcome::Good : Outcome::Open;
}

SteadyShare steady_share(std::span<const tuner::TrafficRequest> traffic, const tuner::StepCost& cost, const KnobValues& knobs,
                         const SteadyOptions& options) {
  tuner::Simulation node(simulation_options(knobs, options.seed), cost);
  const TimePoint begin = TimePoint{} + options.warm;
  const TimePoint end = begin + options.measured;
  const auto wanted = [&](const tuner::SimulatedRequest& one) {
    return one.request.arrival >= begin && one.request.arrival < end;
  };
  std::int64_t total = 0;
  for (const tuner::TrafficRequest& request : traffic) {
    node.add(request);
    total += request.arrival >= begin && request.arrival < end ? 1 : 0;
  }
  if (total == 0) return {};
  std::int64_t good = 0;
  std::int64_t bad = 0;
  std::int64_t late = 0;  // under way, and no first token in time
  std::int64_t slow = 0;  // under way with a first token in time, but gaps that are too wide so far
  for (TimePoint at = begin + seconds(5); at <= end + options.after && good + bad + late < total; at += seconds(5)) {
    node.run_until(at);
    late = slow = 0;
    for (const tuner::SimulatedRequest& one : node.take_requests(true)) {
      if (!wanted(one)) continue;
      const Outcome outcome = outcome_of(one, at);
      if (one.ended || one.rejected) {
        (outcome == Outcome::Good ? good : bad) += 1;
      } else {
        const bool waited = one.ttft.value_or(at - one.request.arrival) > one.request.ttft_target;
        (waited ? late : slow) += outcome == Outcome::Bad ? 1 : 0;
      }
    }
    const double most = 1 - static_cast<double>(bad + late) / static_cast<double>(total);
    if (most < options.floor) return {.share = most, .exact = false};
  }
  return {.share = 1 - static_cast<double>(bad + late + slow) / static_cast<double>(total)};
}

}  // namespace rubato::study
