// SPDX-License-Identifier: Apache-2.0
// Virtual time: which event comes next, which lanes are asked for a step, and how long steps take while two lanes share a device.
#include "tuner/twin/simulation.h"

#include <algorithm>
#include <cmath>

#include "manifests/check.h"
#include "tuner/twin/counter_draw.h"
#include "tuner/twin/simulation_state.h"

namespace rubato::tuner {
namespace {

constexpr std::int32_t steps_per_question = 64;

/// As long as an idle lane of the daemon sleeps before it looks round by itself.
constexpr Duration look_pause = std::chrono::milliseconds(100);

Duration scaled(Duration duration, double factor) {
  return Duration(static_cast<Duration::rep>(std::llround(static_cast<double>(duration.count()) * factor)));
}

}  // namespace

Simulation::State::State(const SimulationOptions& options_in, const StepCost& cost_in)
    : options(options_in), cost(cost_in), group(options_in.limits, Settings{.number = 1, .knobs = options_in.initial}) {
  const auto lanes = static_cast<std::size_t>(group.lane_count());
  open.resize(lanes);
  seen.resize(lanes);
  outcomes.reserve(static_cast<std::size_t>(options.limits.each.max_num_seqs));
  knobs = group.settings().knobs;
  cut.settings(settings_number);
  cut.open(now, now);
  choose_buckets();
  for (std::int32_t lane = 0; lane < group.lane_count(); ++lane) {
    if (const policies::StepTimeModel* known = cost.step_time(LaneIndex{lane})) group.adopt_step_time(LaneIndex{lane}, *known);
  }
}

void Simulation::State::choose_buckets() {
  if (!options.shapes) return;
  buckets = policies::default_buckets(
      {.budget = knobs.max_num_batched_tokens, .max_num_seqs = knobs.max_num_seqs, .token_tile = options.limits.each.token_tile});
}

void Simulation::State::apply(const KnobValues& wanted) {
  group.apply({.number = ++settings_number, .knobs = wanted}, now);
  knobs = group.settings().knobs;
  cut.settings(settings_number);
  choose_buckets();
}

Duration Simulation::State::duration_of(LaneIndex lane, const OpenStep& step) const {
  const Duration duration = cost.duration({.lane = lane,
                                           .share_percent = step.share_percent,
                                           .features = &step.plan->features,
                                           .bucket = step.bucket,
                                           .begin = step.begin,
                                           .draw = step.draw});
  CHECK(duration > Duration::zero(), "a step of ", step.plan->features.tokens, " tokens costs ", duration.count(), " ns");
  return duration;
}

void Simulation::State::begin_step(LaneIndex lane, const policies::StepPlan& plan) {
  OpenStep& step = open[static_cast<std::size_t>(lane.value)];
  step = OpenStep{};
  step.plan = &plan;
  step.draw = counter_draw(options.seed, static_cast<std::uint64_t>(lane.value), plan.step_number);
  step.begin = step.share_since = now;
  if (options.shapes) {
    if (const auto index = buckets.find(plan.features.tokens)) step.bucket = buckets.tokens[*index];
  }
  step.share_percent = 0;  // none yet: use_shares() gives it one
  // The second lane is the one that prefills, where one does.
  step.contended_percent = std::clamp(lane.value == 0 ? 100 - knobs.prefill_share : knobs.prefill_share, 1, 99);
}

void Simulation::State::note_share(OpenStep& step) const {
  const Duration spent = now - step.share_since;
  if (spent <= step.longest) return;
  step.longest = spent;
  step.longest_share = step.share_percent;
}

// Once everything that ends or begins now has. The two lanes of a device share it while both are in a step; a step that runs
// alone has all of it.
void Simulation::State::use_shares() {
  const bool both = lanes_share_a_device() && open[0].plan != nullptr && open[1].plan != nullptr;
  for (std::size_t i = 0; i < lane_count(); ++i) {
    if (open[i].plan == nullptr) continue;
    use_share(LaneIndex{static_cast<std::int32_t>(i)}, both ? open[i].contended_percent : 100);
  }
}

void Simulation::State::use_share(LaneIndex lane, std::int32_t percent) {
  OpenStep& step = open[static_cast<std::size_t>(lane.value)];
  if (step.share_percent == percent) return;
  if (step.share_percent > 0) {
    note_share(step);
    const double done = to_seconds(now - step.share_since) / to_seconds(step.whole);
    step.left = std::max(step.left - done, 0.0);
  }
  step.share_percent = percent;
  step.share_since = now;
  step.whole = duration_of(lane, step);
  step.end = now + (step.left == 1 ? step.whole : scaled(step.whole, step.left));
}

void Simulation::State::end_step(LaneIndex lane) {
  OpenStep& step = open[static_cast<std::size_t>(lane.value)];
  const policies::StepPlan& plan = *step.plan;
  outcomes.clear();
  for (const policies::PlannedRow& row : plan.rows) {
    if (!row.samples) continue;
    // Made in its place: copying one that has just been written in pieces waits for the writes.
    policies::RowOutcome& outcome = outcomes.emplace_back();
    outcome.id = row.id;
    outcome.finished = take_token(slot_of(row.id));
  }
  const Duration duration = now - step.begin;
  if (on_step != nullptr && *on_step) {
    note_share(step);
    (*on_step)({.lane = lane.value,
                .share_percent = step.longest_share,
                .features = plan.features,
                .bucket = step.bucket,
                .duration = duration});
  }
  step.plan = nullptr;
  group.complete(lane, outcomes, now, options.learns ? duration : Duration::zero());
  for (const policies::RowOutcome& outcome : outcomes) {
    if (outcome.finished) end(slot_of(outcome.id));
  }
  cut.waiting(group.waiting());
  ++steps;
  ++steps_since_asked;
}

// Everything that is due now, always in the same order: steps by lane, the copy, arrivals.
void Simulation::State::finish_due() {
  for (std::size_t i = 0; i < lane_count(); ++i) {
    if (open[i].plan != nullptr && open[i].end <= now) end_step(LaneIndex{static_cast<std::int32_t>(i)});
  }
  if (copy && copy->end <= now) {
    const std::uint64_t epoch = copy->epoch;
    copy.reset();
    group.copied(epoch, {}, now);
  }
  while (!coming.empty() && coming.front().arrival <= now) {
    const TrafficRequest request = coming.front();
    coming.pop_front();
    arrive(request);
  }
}

// What one lane's plan changes may give another one work: until nobody who was asked in vain has a reason to be asked again.
void Simulation::State::ask_lanes() {
  bool again = true;
  while (again) {
    again = false;
    for (std::size_t i = 0; i < lane_count(); ++i) {
      const LaneIndex lane{static_cast<std::int32_t>(i)};
      const std::uint64_t changes = group.changes();
      if (open[i].plan != nullptr || seen[i] == changes) continue;
      seen[i] = changes;
      if (!group.may_have_work(lane)) continue;
      const policies::StepPlan& plan = group.plan(lane, now);
      if (!plan.empty()) begin_step(lane, plan);
      again = again || group.changes() != changes;
    }
  }
}

// One at a time, as the daemon's copier carries them out.
void Simulation::State::begin_copy() {
  if (options.limits.devices == 1 || copy) return;
  group.expire(now);
  if (const auto order = group.next_copy(now))
    copy =
        OpenCopy{.epoch = order->epoch, .end = now + options.handoff_per_block * static_cast<std::int64_t>(order->blocks.size())};
}

bool Simulation::State::any_open() const {
  return std::any_of(open.begin(), open.end(), [](const OpenStep& step) { return step.plan != nullptr; });
}

std::optional<TimePoint> Simulation::State::next_event() const {
  std::optional<TimePoint> next = look_again;
  const auto consider = [&](TimePoint time) {
    if (!next || time < *next) next = time;
  };
  for (const OpenStep& step : open) {
    if (step.plan != nullptr) consider(step.end);
  }
  if (copy) consider(copy->end);
  if (!coming.empty()) consider(coming.front().arrival);
  return next;
}

bool Simulation::State::run_until(TimePoint until, const std::function<bool()>& go_on) {
  CHECK(until >= now, "run_until() into the past, by ", to_seconds(now - until), " s");
  while (now < until) {
    if (steps_since_asked >= steps_per_question) {
      steps_since_asked = 0;
      if (go_on && !go_on()) return false;
    }
    finish_due();
    ask_lanes();
    if (look_again && *look_again <= now) {
      look_again.reset();
      std::fill(seen.begin(), seen.end(), std::nullopt);
      ask_lanes();
    }
    use_shares();
    begin_copy();
    if (!look_again && !group.idle() && !copy && !any_open()) look_again = now + look_pause;
    if (any_open() || copy) look_again.reset();
    const std::optional<TimePoint> next = next_event();
    if (!next || *next >= until) break;
    now = std::max(now, *next);
  }
  now = until;
  return true;
}

Simulation::Simulation(const SimulationOptions& options, const StepCost& cost) : state_(std::make_unique<State>(options, cost)) {
  state_->on_step = &on_step;
}
Simulation::~Simulation() = default;

void Simulation::add(const TrafficRequest& request) {
  state_->add(request);
}
void Simulation::apply(const KnobValues& knobs) {
  state_->apply(knobs);
}
bool Simulation::run_until(TimePoint until, const std::function<bool()>& go_on) {
  return state_->run_until(until, go_on);
}
TimePoint Simulation::now() const {
  return state_->now;
}
const KnobValues& Simulation::knobs() const {
  return state_->knobs;
}
std::uint64_t Simulation::steps() const {
  return state_->steps;
}
std::int32_t Simulation::waiting() const {
  return state_->group.waiting();
}
const policies::LaneGroup& Simulation::group() const {
  return state_->group;
}
void Simulation::open(TimePoint since) {
  state_->cut.open(state_->now, since);
}
Window Simulation::close() {
  return measure(state_->cut.close(state_->now));
}
Window Simulation::so_far() const {
  return measure(state_->cut.so_far(state_->now));
}

}  // namespace rubato::tuner
