// SPDX-License-Identifier: Apache-2.0
// What it costs when data-parallel lanes step together, as models need whose layers synchronise all ranks: four lanes under
// virtual time with a fixed step-time model and open-loop arrivals of mixed lengths. One lane in a prefill chunk makes the others
// wait; this shows how much, how far dealing chunks to all lanes in the same step reduces it, and that disaggregation removes it.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <map>
#include <random>
#include <vector>

#include "manifests/check.h"
#include "policies/lane_group.h"

namespace rubato::policies {
namespace {

constexpr std::int32_t device_count = 4;
constexpr std::int32_t budget = 512;
constexpr Duration arrivals_end = std::chrono::seconds(120);

Duration step_cost(const StepFeatures& features) {
  return from_seconds(4e-3 + 50e-6 * (features.tokens - features.decode_rows) + 100e-6 * features.decode_rows);
}

Duration copy_cost(std::size_t blocks) {
  return from_seconds(0.5e-3 + 20e-6 * static_cast<double>(blocks));
}

struct Case {
  const char* name;
  Lockstep lockstep;
  Mode mode;
};

struct Request {
  SequenceRequest scheduled;
  std::int32_t left = 0;
  TimePoint last_token;
};

// Mostly short prompts, some long ones; Poisson arrivals. The same for every case.
std::vector<Request> make_requests(double per_second) {
  std::mt19937_64 random(20);
  std::exponential_distribution<double> pause(per_second);
  std::lognormal_distribution<double> prompt(std::log(300.0), 1.0);
  std::uniform_int_distribution<std::int32_t> output(20, 240);
  std::vector<Request> requests;
  TimePoint now{std::chrono::seconds(1)};
  const TimePoint end = now + arrivals_end;
  while ((now += from_seconds(pause(random))) < end) {
    Request request;
    request.left = output(random);
    request.scheduled = {.id = SequenceId{requests.size()},
                         .arrival = now,
                         .prompt_tokens = std::clamp(static_cast<std::int32_t>(prompt(random)), 16, 6000),
                         .max_new_tokens = request.left,
                         .ttft_target = std::chrono::seconds(1),
                         .itl_target = std::chrono::milliseconds(50)};
    requests.push_back(request);
  }
  return requests;
}

double quantile(std::vector<double>& values, double share) {
  CHECK(!values.empty());
  std::sort(values.begin(), values.end());
  return values[static_cast<std::size_t>(share * static_cast<double>(values.size() - 1))];
}

class Simulation {
 public:
  Simulation(const Case& what, double per_second)
      : requests_(make_requests(per_second)),
        group_({.each = {.max_model_len = 8192, .max_num_seqs = 256, .max_waiting = 20000, .block_count = 40000},
                .devices = device_count,
                .max_handoffs = 64,
                .lockstep = what.lockstep},
               {.number = 1,
                .knobs = {.max_num_batched_tokens = budget,
                          .max_num_seqs = 256,
                          .priority_policy = PriorityPolicy::DecodeFirst,
                          .mode = what.mode}}) {}

  void run() {
    while (next_ < requests_.size() || !group_.idle()) {
      ask_lanes();
      while (const std::optional<CopyOrder> order = group_.next_copy(now_)) {
        answers_.emplace(now_ + copy_cost(order->blocks.size()), order->epoch);
      }
      next_event();
    }
  }

  void print(const Case& what) {
    const LockstepCounts& counts = group_.lockstep();
    const double stepping = seconds_of(counts.stepping);
    const double waiting = seconds_of(counts.waiting);
    std::printf("| %-24s | %6.1f %% | %6.1f | %6.1f | %7.1f | %8.1f | %6.1f |\n", what.name,
                stepping > 0 ? 100 * waiting / (stepping + waiting) : 0.0, quantile(gaps_, 0.5), quantile(gaps_, 0.99),
                quantile(first_, 0.5), quantile(first_, 0.99), seconds_of(now_ - TimePoint{std::chrono::seconds(1)}));
  }

 private:
  struct Step {
    const StepPlan* plan = nullptr;
    TimePoint began;
    TimePoint end;
  };

  static double seconds_of(Duration duration) { return std::chrono::duration<double>(duration).count(); }

  // Again where nothing came out: an empty plan may end a round, and chunks may be held for a few.
  void ask_lanes() {
    for (std::int32_t pass = 0; pass < 8; ++pass) {
      bool any = false;
      for (std::int32_t lane = 0; lane < device_count; ++lane) {
        Step& step = steps_[static_cast<std::size_t>(lane)];
        if (step.plan == nullptr) {
          const StepPlan& plan = group_.plan(LaneIndex{lane}, now_);
          if (!plan.empty()) step = {.plan = &plan, .began = now_, .end = now_ + step_cost(plan.features)};
        }
        any = any || step.plan != nullptr;
      }
      if (any || group_.idle()) return;
    }
  }

  void next_event() {
    std::optional<TimePoint> due;
    std::int32_t lane_due = 0;
    for (std::int32_t lane = 0; lane < device_count; ++lane) {
      const Step& step = steps_[static_cast<std::size_t>(lane)];
      if (step.plan == nullptr || (due && *due <= step.end)) continue;
      due = step.end;
      lane_due = lane;
    }
    const bool arrival = next_ < requests_.size() && (!due || requests_[next_].scheduled.arrival < *due) &&
                         (answers_.empty() || requests_[next_].scheduled.arrival < answers_.begin()->first);
    if (arrival) {
      now_ = requests_[next_].scheduled.arrival;
      CHECK(group_.add(requests_[next_].scheduled).has_value());
      ++next_;
    } else if (!answers_.empty() && (!due || answers_.begin()->first <= *due)) {
      now_ = answers_.begin()->first;
      const std::uint64_t epoch = answers_.begin()->second;
      answers_.erase(answers_.begin());
      group_.copied(epoch, {}, now_);
    } else {
      CHECK(due.has_value(), "nothing runs");
      now_ = *due;
      book(lane_due);
    }
  }

  void book(std::int32_t lane) {
    Step& step = steps_[static_cast<std::size_t>(lane)];
    outcomes_.clear();
    for (const PlannedRow& row : step.plan->rows) {
      if (!row.samples) continue;
      Request& request = requests_[row.id.value];
      const bool first = request.left == request.scheduled.max_new_tokens;
      (first ? first_ : gaps_).push_back(1e3 * seconds_of(now_ - (first ? request.scheduled.arrival : request.last_token)));
      request.last_token = now_;
      outcomes_.push_back({.id = row.id, .finished = --request.left == 0});
    }
    group_.complete(LaneIndex{lane}, outcomes_, now_, step.end - step.began);
    step.plan = nullptr;
  }

  std::vector<Request> requests_;
  std::size_t next_ = 0;
  LaneGroup group_;
  TimePoint now_{std::chrono::seconds(1)};
  std::array<Step, device_count> steps_;
  std::multimap<TimePoint, std::uint64_t> answers_;
  std::vector<RowOutcome> outcomes_;
  std::vector<double> gaps_;   // between tokens, ms
  std::vector<double> first_;  // to the first one, ms
};

}  // namespace

int run_lockstep_bench() {
  const Case cases[] = {{"each for itself", Lockstep::Off, Mode::Chunked},
                        {"lockstep", Lockstep::On, Mode::Chunked},
                        {"lockstep, aligned", Lockstep::Aligned, Mode::Chunked},
                        {"lockstep, disaggregated", Lockstep::On, Mode::Disaggregated}};
  for (const double per_second : {10.0, 20.0, 30.0, 40.0}) {
    std::printf("\n%.0f requests per second on %d lanes\n\n", per_second, device_count);
    std::printf("| lanes                    | waiting  | ITL p50 | p99 ms | TTFT p50 |   p99 ms | ends s |\n");
    std::printf("|---|---:|---:|---:|---:|---:|---:|\n");
    for (const Case& what : cases) {
      Simulation simulation(what, per_second);
      simulation.run();
      simulation.print(what);
    }
  }
  return 0;
}

}  // namespace rubato::policies

int main() {
  return rubato::policies::run_lockstep_bench();
}
