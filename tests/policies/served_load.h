// SPDX-License-Identifier: Apache-2.0
// A lane under load for hours of virtual time, for studies: made-up requests of several kinds, a made-up machine, and what each
// request got. Nothing is checked from outside as the scheduler's harness does, so that an hour takes seconds.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <optional>
#include <random>
#include <vector>

#include "manifests/check.h"
#include "policies/scheduler.h"

namespace rubato::policies {

/// A machine like an 8B model on one large GPU: weights are read in 5 ms whatever the step holds; from 200 tokens on it is bound
/// by arithmetic, 25 us a token; keys are read at 35 ns per token of context, a query-key pair takes 0.9 ns, a step 1 ms of
/// overhead. Steps scatter log-normally.
struct Machine {
  double weights = 5e-3;
  double per_token = 25e-6;
  double per_context = 35e-9;
  double per_pair = 0.9e-9;
  double overhead = 1e-3;
  double scatter = 0.04;  // standard deviation of the logarithm

  [[nodiscard]] double seconds(const StepFeatures& step) const {
    return overhead + std::max(weights, per_token * step.tokens) + per_context * step.context + per_pair * step.attention;
  }
};

struct LoadRequest {
  double arrival = 0;  // seconds
  std::int32_t prompt_tokens = 1;
  std::int32_t output_tokens = 1;
  double ttft_target = 1;
  double itl_target = 0.05;
  std::int32_t kind = 0;
};

/// A kind of request: lengths are log-normal, cut to a range.
struct RequestKind {
  double share = 1;
  double prompt_median = 1000;
  double prompt_spread = 0.8;  // of the logarithm
  std::int32_t prompt_max = 8000;
  double output_median = 150;
  double output_spread = 0.7;
  std::int32_t output_max = 1000;
  double ttft_target = 1.0;
  double itl_target = 0.05;
};

/// Machine time that a request takes in steps that end just within its ITL target: one in several thousandths of a second.
inline double work_of(const Machine& machine, const LoadRequest& request) {
  const double prompt = request.prompt_tokens;
  const double output = request.output_tokens;
  const double busy = 1.0 - machine.overhead / request.itl_target;
  return ((prompt + output) * machine.per_token + 0.5 * prompt * prompt * machine.per_pair +
          output * (prompt + 0.5 * output) * machine.per_context) /
         busy;
}

inline LoadRequest draw_request(const std::vector<RequestKind>& kinds, std::mt19937_64& random) {
  std::vector<double> shares;
  for (const RequestKind& kind : kinds) shares.push_back(kind.share);
  std::discrete_distribution<std::int32_t> choose(shares.begin(), shares.end());
  const std::int32_t index = choose(random);
  const RequestKind& kind = kinds[static_cast<std::size_t>(index)];
  const auto length = [&](double median, double spread, std::int32_t most) {
    std::lognormal_distribution<double> draw(std::log(median), spread);
    return static_cast<std::int32_t>(std::clamp(draw(random), 1.0, static_cast<double>(most)));
  };
  return {.prompt_tokens = length(kind.prompt_median, kind.prompt_spread, kind.prompt_max),
          .output_tokens = length(kind.output_median, kind.output_spread, kind.output_max),
          .ttft_target = kind.ttft_target,
          .itl_target = kind.itl_target,
          .kind = index};
}

/// Appends Poisson arrivals for so many seconds, at this share of the machine's capacity.
inline void append_phase(std::vector<LoadRequest>& requests, const Machine& machine, const std::vector<RequestKind>& kinds,
                         double load, double seconds, std::mt19937_64& random) {
  double work = 0;
  std::mt19937_64 sample(12345);
  constexpr int samples = 20000;
  for (int i = 0; i < samples; ++i) work += work_of(machine, draw_request(kinds, sample)) / samples;
  const double begin = requests.empty() ? 0 : requests.back().arrival;
  std::exponential_distribution<double> gap(load / work);
  for (double now = begin + gap(random); now < begin + seconds; now += gap(random)) {
    requests.push_back(draw_request(kinds, random));
    requests.back().arrival = now;
  }
}

/// What a request got; all in seconds.
struct Served {
  double ttft = 0;
  double itl_p99 = 0;
  double ended = 0;
  bool rejected = false;
  std::int64_t older_tokens = 0;    // when it came: left to compute of unfinished prefills, its own included
  std::int64_t older_count = 0;     // such prefills
  std::int64_t prefill_tokens = 0;  // that the lane computed from then to its first token
  [[nodiscard]] bool good(const LoadRequest& request) const {
    return !rejected && ttft <= request.ttft_target && itl_p99 <= request.itl_target;
  }
};

struct ServeOptions {
  SchedulerLimits limits{.max_model_len = 16384, .max_num_seqs = 512, .max_waiting = 200000, .block_count = 40000};
  KnobValues knobs{.max_num_batched_tokens = 8192, .max_num_seqs = 512, .priority_policy = PriorityPolicy::Deadline};
  Machine machine;
  std::uint64_t seed = 1;
};

struct ServeResult {
  std::vector<Served> requests;
  std::uint64_t steps = 0;
  std::int32_t waiting_max = 0;
  std::int32_t chunk_tokens_max = 0;  // of prefill in one step
  SchedulerCounts counts;
};

/// Serves all of them, in the order of their arrivals, until the last has ended.
inline ServeResult serve(const ServeOptions& options, const std::vector<LoadRequest>& requests) {
  Scheduler scheduler(options.limits, {.number = 1, .knobs = options.knobs});
  ServeResult result;
  result.requests.resize(requests.size());
  std::vector<std::vector<float>> gaps(requests.size());
  std::vector<double> last(requests.size(), 0);
  std::vector<std::int32_t> left;
  for (const LoadRequest& request : requests) left.push_back(request.output_tokens);
  std::mt19937_64 random(options.seed);
  std::normal_distribution<double> noise(0.0, options.machine.scatter);
  std::vector<RowOutcome> outcomes;
  std::size_t next = 0;
  double now = 0;
  std::int64_t added = 0;     // tokens of prompts
  std::int64_t computed = 0;  // of prefill
  std::int64_t unfinished = 0;
  const auto at = [](double seconds) { return TimePoint(from_seconds(seconds)); };
  const auto book = [&](std::size_t i) {
    Served& served = result.requests[i];
    if (last[i] == 0) {
      served.ttft = now - requests[i].arrival;
      served.prefill_tokens = computed - served.prefill_tokens;
      --unfinished;
    }
    if (last[i] > 0) gaps[i].push_back(static_cast<float>(now - last[i]));
    last[i] = now;
    if (--left[i] > 0) return false;
    served.ended = now;
    if (!gaps[i].empty()) {
      const auto rank = static_cast<std::ptrdiff_t>(std::ceil(0.99 * static_cast<double>(gaps[i].size()))) - 1;
      std::nth_element(gaps[i].begin(), gaps[i].begin() + rank, gaps[i].end());
      served.itl_p99 = gaps[i][static_cast<std::size_t>(rank)];
    }
    gaps[i] = {};
    return true;
  };
  while (next < requests.size() || !scheduler.idle()) {
    for (; next < requests.size() && requests[next].arrival <= now; ++next) {
      const LoadRequest& request = requests[next];
      const Result<void> taken = scheduler.add({.id = SequenceId{next},
                                                .arrival = at(request.arrival),
                                                .prompt_tokens = request.prompt_tokens,
                                                .max_new_tokens = request.output_tokens,
                                                .ttft_target = from_seconds(request.ttft_target),
                                                .itl_target = from_seconds(request.itl_target)});
      Served& served = result.requests[next];
      served.rejected = !taken;
      if (!taken) continue;
      added += request.prompt_tokens;
      served.older_count = unfinished++;
      served.older_tokens = added - computed;
      served.prefill_tokens = computed;
    }
    const StepPlan& plan = scheduler.plan(at(now));
    if (plan.empty()) {
      CHECK(next < requests.size());
      now = requests[next].arrival;
      continue;
    }
    const double duration = options.machine.seconds(plan.features) * std::exp(noise(random));
    now += duration;
    const std::int32_t chunk_tokens = plan.features.tokens - plan.features.decode_rows;
    computed += chunk_tokens;
    result.chunk_tokens_max = std::max(result.chunk_tokens_max, chunk_tokens);
    outcomes.clear();
    for (const PlannedRow& row : plan.rows) {
      if (row.samples) outcomes.push_back({.id = row.id, .finished = book(row.id.value)});
    }
    scheduler.complete(outcomes, at(now), from_seconds(duration));
    ++result.steps;
    result.waiting_max = std::max(result.waiting_max, static_cast<std::int32_t>(scheduler.counts().waiting));
  }
  result.counts = scheduler.counts();
  return result;
}

/// Share of good ones.
inline double attainment(const std::vector<LoadRequest>& requests, const ServeResult& result) {
  double good = 0;
  for (std::size_t i = 0; i < requests.size(); ++i) good += result.requests[i].good(requests[i]) ? 1 : 0;
  return good / static_cast<double>(std::max<std::size_t>(requests.size(), 1));
}

}  // namespace rubato::policies
