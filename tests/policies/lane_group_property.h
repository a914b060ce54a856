// SPDX-License-Identifier: Apache-2.0
// One random life of a lane group, from a seed: arrivals, cancels at the worst moments, tight pools, changes of every setting,
// steps that end in any order, and copies that take long, fail, are lost, answered late or twice. The Node checks every step.
#pragma once

#include <random>
#include <string>

#include "tests/policies/lane_group_harness.h"
#include "tests/policies/scheduler_property.h"

namespace rubato::policies {

struct LaneGroupPropertyOptions {
  std::uint64_t seed = 0;
  std::int32_t devices = 1;
  std::int32_t lanes_per_device = 1;
  Lockstep lockstep = Lockstep::Off;
  ModelShape model = all_models[0];
  std::int32_t steps = 0;
  std::string executable;  // these two for the line that replays a failure
  std::string test;
};

struct LaneGroupPropertyResult {
  std::uint64_t steps = 0;
  std::uint64_t fingerprint = 0;
  std::uint64_t preemptions = 0;
  std::uint64_t cancels = 0;
  std::uint64_t ended = 0;
  std::uint64_t prefix_hits = 0;
  std::uint64_t evicted_snapshots = 0;
  HandoffCounts handoffs;

  void operator+=(const LaneGroupPropertyResult& other) {
    steps += other.steps;
    preemptions += other.preemptions;
    cancels += other.cancels;
    ended += other.ended;
    prefix_hits += other.prefix_hits;
    evicted_snapshots += other.evicted_snapshots;
    handoffs.moved += other.handoffs.moved;
    handoffs.copied += other.handoffs.copied;
    handoffs.failed += other.handoffs.failed;
    handoffs.expired += other.handoffs.expired;
    handoffs.late_answers += other.handoffs.late_answers;
    handoffs.reservation_waits += other.handoffs.reservation_waits;
    handoffs.switches += other.handoffs.switches;
  }
};

class RandomLife {
 public:
  explicit RandomLife(const LaneGroupPropertyOptions& options)
      : options_(options),
        random_(options.seed * 1000 + static_cast<std::uint64_t>(options.devices * 10 + options.lanes_per_device)),
        limits_(draw_limits()),
        node_({.limits = limits_,
               .knobs = draw_knobs(),
               .replay = "\n  replay: " + options.executable + " --gtest_filter='" + options.test +
                         "' --gtest_random_seed=" + std::to_string(options.seed)}) {
    note_bounds();
    ends_.resize(static_cast<std::size_t>(node_.group().lane_count()));
  }

  LaneGroupPropertyResult run() {
    const std::int32_t arrivals_per_100_events = draw(2, 90);
    for (std::uint64_t event = 0; node_.steps() < static_cast<std::uint64_t>(options_.steps) && good(); ++event) {
      while (draw(1, 100) <= arrivals_per_100_events / draw(1, 2) && node_.group().waiting() < limits_.each.max_waiting) arrive();
      if (draw(1, 30) == 1) cancel_one();
      if (draw(1, 40) == 1) change_settings();
      if (draw(1, 20) == 1) node_.expire();
      if (draw(1, 200) == 1) abandon_one();
      ask_lanes(draw(1, 8) == 1 ? 50 : 100);
      take_copies(draw(1, 4) == 1 ? 30 : 100);
      if (draw(1, 30) == 1) cancel_one();  // now within steps and copies
      next_event();
      if (event % 8 == 0) check();
    }
    drain();
    return result();
  }

 private:
  struct PendingAnswer {
    TimePoint due;
    std::uint64_t epoch = 0;
    Node::Answer what = Node::Answer::Copied;
  };

  static bool good() { return !testing::Test::HasFailure(); }
  std::int32_t draw(std::int32_t low, std::int32_t high) {
    return low + static_cast<std::int32_t>(random_() % static_cast<std::uint64_t>(high - low + 1));
  }

  LaneGroupLimits draw_limits() {
    LaneGroupLimits limits;
    limits.each.block_count = draw(1, 8) == 1 ? draw(1, 4) : draw(8, draw(1, 2) == 1 ? 24 : 60);
    limits.each.max_model_len = draw(2, limits.each.block_count * kv_block_tokens * 2);
    limits.each.max_num_seqs = draw(1, 12);
    limits.each.max_waiting = draw(1, 30);
    limits.each.token_tile = draw(1, 3) == 1 ? 1 : draw(1, 160);
    limits.each.growth_reserve_tokens = draw(0, 2) == 0 ? default_growth_reserve_tokens : draw(0, 1) * draw(0, 40);
    limits.devices = options_.devices;
    limits.lanes_per_device = options_.lanes_per_device;
    limits.max_handoffs = draw(1, 3) == 1 ? draw(1, 2) : draw(2, 16);
    limits.handoff_lease = std::chrono::milliseconds(draw(5, 60));
    limits.lockstep = options_.lockstep;
    shape_limits(options_.model, limits.each, [this](std::int32_t low, std::int32_t high) { return draw(low, high); });
    return limits;
  }

  KnobValues draw_knobs() {
    KnobValues knobs;
    const std::int32_t kind = draw(1, 3);
    knobs.max_num_seqs = draw(1, limits_.each.max_num_seqs);
    knobs.max_num_batched_tokens =
        kind == 1 ? draw(1, 33) : knobs.max_num_seqs + min_prefill_quantum + draw(0, kind == 2 ? 16 : 400);
    knobs.priority_policy = all_policies[draw(0, 3)];
    knobs.deadline_margin = draw(0, 50);
    knobs.mode = draw(1, 3) == 1 ? Mode::Chunked : Mode::Disaggregated;
    knobs.reservation = static_cast<Reservation>(draw(0, 2));
    knobs.prefill_devices = draw(1, std::max(options_.devices - 1, 1));
    return knobs;
  }

  void arrive() {
    const std::int32_t longest = node_.group().effective_max_len();
    if (longest < 2) return;
    RequestOptions request;
    request.prompt_tokens = draw(1, draw(1, 3) == 1 ? longest - 1 : std::min(longest - 1, 40));
    request.max_new_tokens = draw(1, std::min(longest - request.prompt_tokens, draw(1, 3) == 1   ? 600
                                                                               : draw(1, 2) == 1 ? 120
                                                                                                 : 30));
    request.output_tokens = draw(1, 3) == 1 ? draw(1, request.max_new_tokens) : request.max_new_tokens;
    request.ttft_target = std::chrono::milliseconds(draw(0, 3) == 0 ? draw(0, 20) : draw(20, 2000));
    request.itl_target = std::chrono::milliseconds(draw(0, 3) == 0 ? draw(0, 3) : draw(3, 100));
    if (options_.model.caching) {
      share_text(request, node_.streams(), node_.streams().size(), longest,
                 [this](std::int32_t low, std::int32_t high) { return draw(low, high); });
    }
    node_.add(request);
  }

  void cancel_one() {
    if (node_.live().empty()) return;
    node_.cancel(node_.live()[static_cast<std::size_t>(draw(0, static_cast<std::int32_t>(node_.live().size()) - 1))]);
    ++cancels_;
  }

  // Half of the changes are of one knob alone.
  void change_settings() {
    KnobValues knobs = draw_knobs();
    KnobValues one = node_.knobs();
    switch (draw(1, 8)) {
      case 1:
        one.mode = knobs.mode;
        break;
      case 2:
        one.reservation = knobs.reservation;
        break;
      case 3:
        one.prefill_devices = knobs.prefill_devices;
        break;
      case 4:
        one.max_num_seqs = knobs.max_num_seqs;
        break;
      default:
        one = knobs;
    }
    node_.set(one);
    note_bounds();
  }

  void abandon_one() {
    const std::int32_t lane = draw(0, node_.group().lane_count() - 1);
    if (node_.open(lane)) node_.abandon(lane);
  }

  // Asks in random order; percent: a lane may be slow to ask.
  void ask_lanes(std::int32_t percent) {
    const std::int32_t lanes = node_.group().lane_count();
    // A plan that comes out empty may still have given a slot or blocks back, or ended a round; chunks may be held for some.
    const std::int32_t passes = 8;
    for (std::int32_t pass = 0; pass < passes && good(); ++pass) {
      const std::int32_t first = draw(0, lanes - 1);
      for (std::int32_t i = 0; i < lanes; ++i) {
        const std::int32_t lane = (first + i) % lanes;
        if (node_.open(lane) || draw(1, 100) > percent) continue;
        if (node_.plan(lane)) ends_[static_cast<std::size_t>(lane)] = node_.now() + std::chrono::microseconds(draw(1, 5000));
      }
      if (node_.any_open()) break;
    }
  }

  void take_copies(std::int32_t percent) {
    while (draw(1, 100) <= percent && good()) {
      const std::optional<std::uint64_t> epoch = node_.take_copy();
      if (!epoch) return;
      const Duration lease = limits_.handoff_lease;
      const TimePoint soon = node_.now() + std::chrono::microseconds(draw(1, 8000));
      switch (draining_ ? 1 : draw(1, 20)) {
        case 17:  // fails
          answers_.push_back({.due = soon, .epoch = *epoch, .what = Node::Answer::Failed});
          break;
        case 18:  // is lost
          node_.forget(*epoch);
          lost_ = true;
          break;
        case 19:  // comes late
          answers_.push_back({.due = node_.now() + lease + lease * draw(1, 150) / 100, .epoch = *epoch});
          break;
        case 20:  // twice
          answers_.push_back({.due = soon, .epoch = *epoch});
          answers_.push_back({.due = soon + std::chrono::microseconds(draw(1, 8000)), .epoch = *epoch});
          break;
        default:
          answers_.push_back({.due = soon, .epoch = *epoch});
      }
    }
  }

  // The next end of a step or answer to a copy; where there is none, time passes.
  void next_event() {
    std::optional<TimePoint> due;
    std::int32_t lane_due = -1;
    for (std::int32_t lane = 0; lane < node_.group().lane_count(); ++lane) {
      const TimePoint end = ends_[static_cast<std::size_t>(lane)];
      if (!node_.open(lane) || (due && *due <= end)) continue;
      due = end;
      lane_due = lane;
    }
    const auto answer =
        std::min_element(answers_.begin(), answers_.end(),
                         [](const PendingAnswer& left, const PendingAnswer& right) { return left.due < right.due; });
    if (answer != answers_.end() && (!due || answer->due < *due)) {
      const PendingAnswer next = *answer;
      answers_.erase(answer);
      node_.advance(std::max(next.due - node_.now(), Duration::zero()));
      node_.answer(next.epoch, next.what);
    } else if (due) {
      node_.advance(std::max(*due - node_.now(), Duration::zero()));
      node_.complete(lane_due);
    } else {
      nothing_due();
    }
  }

  void nothing_due() {
    if (draining_ && !node_.live().empty()) {
      // Only a lost copy may keep what is there from running, and only until its lease is over.
      EXPECT_TRUE(node_.group().copies_open() > 0 && ++stood_still_ < 10)
          << "nothing runs with " << node_.live().size() << " sequences, seed " << options_.seed;
    }
    node_.advance(draining_ ? limits_.handoff_lease : Duration(std::chrono::milliseconds(draw(1, 20))));
    node_.expire();
  }

  // Gaps are counted per lane and never reset, so the widest bounds so far apply.
  void note_bounds() {
    const KnobValues& knobs = node_.knobs();
    const GapBounds bounds = gap_bounds(knobs.priority_policy);
    decode_bound_ = std::max(decode_bound_, bounds.decode_steps);
    prefill_bound_ = std::max(prefill_bound_, bounds.prefill_steps);
    const std::int32_t budget = knobs.max_num_batched_tokens;
    const std::int32_t decodes = limits_.each.max_num_seqs;
    if (budget < decodes + min_prefill_quantum) {
      tight_allowance_ = std::max(tight_allowance_, 2 * ((decodes + budget - 1) / budget));
    }
  }

  void check() {
    node_.group().check_integrity();
    for (std::int32_t lane = 0; lane < node_.group().lane_count(); ++lane) {
      const SchedulerCounts counts = node_.group().counts(LaneIndex{lane}).scheduler;
      EXPECT_LE(counts.decode_gap_steps_max, decode_bound_ + tight_allowance_) << "lane " << lane << " seed " << options_.seed;
      EXPECT_LE(counts.prefill_gap_steps_max, prefill_bound_) << "lane " << lane << " seed " << options_.seed;
    }
  }

  // After arrivals stop everything ends: every token is computed once, and once more per preemption, at a progress of at least
  // one token in each period.
  void drain() {
    draining_ = true;
    std::uint64_t tokens = 1;
    for (const SequenceId id : node_.live()) {
      tokens += static_cast<std::uint64_t>(node_.stream(id).options.prompt_tokens + node_.stream(id).options.output_tokens);
    }
    const std::uint64_t most = node_.steps() + 40 * tokens + 1000;
    for (std::uint64_t event = 0; !node_.live().empty() && good(); ++event) {
      ASSERT_LT(node_.steps(), most) << node_.live().size() << " sequences have not ended, seed " << options_.seed;
      ask_lanes(100);
      take_copies(100);
      next_event();
      if (event % 8 == 0) node_.expire();
      if (event % 32 == 0) check();
    }
    while ((node_.any_open() || !answers_.empty()) && good()) next_event();
    for (int i = 0; i < 3; ++i) {
      node_.advance(limits_.handoff_lease + std::chrono::milliseconds(1));
      node_.expire();
    }
    if (!good()) return;
    check();
    node_.check_empty();
  }

  LaneGroupPropertyResult result() {
    return {.steps = node_.steps(),
            .fingerprint = node_.fingerprint(),
            .preemptions = node_.preemptions(),
            .cancels = cancels_,
            .ended = node_.streams().size(),
            .prefix_hits = node_.group().totals().prefix_hits,
            .evicted_snapshots = node_.group().totals().evicted_snapshots,
            .handoffs = node_.group().handoffs()};
  }

  const LaneGroupPropertyOptions options_;
  std::mt19937_64 random_;
  const LaneGroupLimits limits_;
  Node node_;
  std::vector<TimePoint> ends_;  // of open steps, by lane
  std::vector<PendingAnswer> answers_;
  std::int32_t decode_bound_ = 0;
  std::int32_t prefill_bound_ = 0;
  std::int32_t tight_allowance_ = 0;
  std::int32_t stood_still_ = 0;
  std::uint64_t cancels_ = 0;
  bool draining_ = false;
  bool lost_ = false;
};

struct NodeShape {
  std::int32_t devices = 1;
  std::int32_t lanes_per_device = 1;
  Lockstep lockstep = Lockstep::Off;
};

inline std::string name_of(const NodeShape& shape) {
  const char* const locksteps[] = {"", "Lockstep", "Aligned"};
  return std::to_string(shape.devices) + "Devices" + std::to_string(shape.devices * shape.lanes_per_device) + "Lanes" +
         locksteps[static_cast<std::size_t>(shape.lockstep)];
}

inline constexpr NodeShape all_shapes[] = {{1, 1, Lockstep::Off}, {1, 2, Lockstep::Off},     {2, 1, Lockstep::Off},
                                           {3, 1, Lockstep::Off}, {4, 1, Lockstep::Off},     {2, 1, Lockstep::On},
                                           {4, 1, Lockstep::On},  {3, 1, Lockstep::Aligned}, {4, 1, Lockstep::Aligned}};

inline LaneGroupPropertyResult run_random_life(const NodeShape& shape, std::uint64_t seed, std::int32_t steps,
                                               const std::string& executable, const ModelShape& model = all_models[0]) {
  RandomLife life({.seed = seed,
                   .devices = shape.devices,
                   .lanes_per_device = shape.lanes_per_device,
                   .lockstep = shape.lockstep,
                   .model = model,
                   .steps = steps,
                   .executable = executable,
                   .test = name_of_running_test()});
  return life.run();
}

}  // namespace rubato::policies
