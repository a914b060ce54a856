// SPDX-License-Identifier: Apache-2.0
// One random life of a scheduler, from a seed: arrivals, cancels, tight pools, and settings that change under way, contradicting
// ones included. The World checks every step.
#pragma once

#include <numeric>
#include <random>
#include <string>

#include "tests/policies/scheduler_harness.h"

namespace rubato::policies {

struct PropertyOptions {
  std::uint64_t seed = 0;
  PriorityPolicy policy = PriorityPolicy::Deadline;
  bool change_policy = false;
  ModelShape model = all_models[0];
  std::int32_t steps = 0;
  std::string executable;  // these two for the line that replays a failure
  std::string test;
};

/// The seeds to run: those from first on, or the one that --gtest_random_seed names.
inline std::vector<std::uint64_t> seeds_from(std::uint64_t first, std::uint64_t count) {
  if (const auto chosen = GTEST_FLAG_GET(random_seed); chosen != 0) return {static_cast<std::uint64_t>(chosen)};
  std::vector<std::uint64_t> seeds(count);
  std::iota(seeds.begin(), seeds.end(), first);
  return seeds;
}

inline std::string name_of_running_test() {
  const testing::TestInfo& info = *testing::UnitTest::GetInstance()->current_test_info();
  return std::string(info.test_suite_name()) + "." + info.name();
}

struct PropertyResult {
  std::uint64_t steps = 0;
  std::uint64_t fingerprint = 0;
  std::uint64_t preemptions = 0;
  std::uint64_t cancels = 0;
  std::uint64_t ended = 0;
  SchedulerCounts counts;
};

/// Lets a request begin as others do: with what its family begins with, or with all that was said in an earlier one.
template <class Streams, class Draw>
void share_text(RequestOptions& request, const Streams& streams, std::uint64_t newest, std::int32_t longest, Draw&& draw) {
  const std::int32_t kind = draw(1, 4);
  if (kind == 1) return;
  request.family = static_cast<std::uint64_t>(draw(0, 2));
  request.shared_tokens = kind == 2 ? request.prompt_tokens : draw(0, request.prompt_tokens);
  if (kind != 4 || newest == 0) return;
  const SequenceId earlier{
      newest - static_cast<std::uint64_t>(draw(0, static_cast<std::int32_t>(std::min<std::uint64_t>(newest - 1, 12))))};
  const auto length = static_cast<std::int32_t>(streams.at(earlier).text.size()) + draw(0, 20);
  if (length + request.max_new_tokens > longest) return;
  request.follows = earlier;
  request.prompt_tokens = length;
}

inline PropertyResult run_random_life(const PropertyOptions& options) {
  std::mt19937_64 random(options.seed * 1000 + static_cast<std::uint64_t>(options.policy));
  const auto draw = [&random](std::int32_t low, std::int32_t high) {
    return low + static_cast<std::int32_t>(random() % static_cast<std::uint64_t>(high - low + 1));
  };
  WorldOptions world_options;
  SchedulerLimits& limits = world_options.limits;
  limits.block_count = draw(1, 8) == 1 ? draw(1, 4) : draw(8, 80);
  limits.max_model_len = draw(1, limits.block_count * kv_block_tokens * 2);
  limits.max_num_seqs = draw(1, 24);
  limits.max_waiting = draw(1, 40);
  limits.token_tile = draw(1, 3) == 1 ? 1 : draw(1, 160);
  limits.growth_reserve_tokens = draw(0, 2) == 0 ? default_growth_reserve_tokens : draw(0, 40);
  shape_limits(options.model, limits, draw);
  const auto draw_knobs = [&] {
    KnobValues knobs;
    const std::int32_t kind = draw(1, 3);
    knobs.max_num_seqs = draw(1, limits.max_num_seqs);
    knobs.max_num_batched_tokens =
        kind == 1 ? draw(1, 33) : knobs.max_num_seqs + min_prefill_quantum + draw(0, kind == 2 ? 16 : 400);
    knobs.priority_policy = options.change_policy ? all_policies[draw(0, 3)] : options.policy;
    knobs.deadline_margin = draw(0, 50);
    return knobs;
  };
  world_options.knobs = draw_knobs();
  world_options.replay = "\n  replay: " + options.executable + " --gtest_filter='" + options.test +
                         "' --gtest_random_seed=" + std::to_string(options.seed);
  World world(world_options);
  PropertyResult result;
  const std::int32_t longest = world.scheduler().effective_max_len();
  const std::int32_t arrivals_per_100_steps = draw(2, 120);
  for (std::int32_t step = 0; step < options.steps && !testing::Test::HasFailure(); ++step) {
    while (longest >= 2 && draw(1, 100) <= arrivals_per_100_steps / (draw(1, 2)) &&
           world.scheduler().counts().waiting < limits.max_waiting) {
      RequestOptions request;
      request.prompt_tokens = draw(1, draw(1, 3) == 1 ? longest - 1 : std::min(longest - 1, 40));
      request.max_new_tokens = draw(1, std::min(longest - request.prompt_tokens, draw(1, 3) == 1 ? 600 : 30));
      request.output_tokens = draw(1, 3) == 1 ? draw(1, request.max_new_tokens) : request.max_new_tokens;
      request.ttft_target = std::chrono::milliseconds(draw(0, 3) == 0 ? draw(0, 20) : draw(20, 2000));
      request.itl_target = std::chrono::milliseconds(draw(0, 3) == 0 ? draw(0, 3) : draw(3, 100));
      if (options.model.caching) share_text(request, world.streams(), world.streams().size(), longest, draw);
      world.add(request);
    }
    if (draw(1, 40) == 1 && !world.live().empty()) {
      world.cancel(world.live()[static_cast<std::size_t>(draw(0, static_cast<std::int32_t>(world.live().size()) - 1))]);
      ++result.cancels;
    }
    if (draw(1, 60) == 1) world.set(draw_knobs());
    if (!world.step()) world.advance(std::chrono::milliseconds(draw(1, 20)));
    if (step % 16 == 0) world.scheduler().check_integrity();
  }
  // After arrivals stop: every token is computed once, and once more per preemption, at a progress of at least one token in each
  // period.
  std::uint64_t tokens = 1;
  for (const SequenceId id : world.live()) {
    tokens += static_cast<std::uint64_t>(world.stream(id).options.prompt_tokens + world.stream(id).options.output_tokens);
  }
  if (!testing::Test::HasFailure()) world.drain(40 * tokens + 1000);
  result.fingerprint = world.fingerprint();
  result.counts = world.scheduler().counts();
  result.preemptions = world.scheduler().counts().preemptions;
  result.steps = world.steps();
  result.ended = world.streams().size();
  return result;
}

}  // namespace rubato::policies
