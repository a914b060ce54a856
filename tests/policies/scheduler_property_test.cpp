// SPDX-License-Identifier: Apache-2.0
// A short run of the scheduler's property test; scheduler_property_slow.cpp runs it at length.
#include "tests/policies/scheduler_property.h"

namespace rubato::policies {
namespace {

class SchedulerProperty : public testing::TestWithParam<PriorityPolicy> {};

TEST_P(SchedulerProperty, contracts_hold_over_random_steps) {
  PropertyResult total;
  const std::vector<std::uint64_t> seeds = seeds_from(1, 40);
  for (const std::uint64_t seed : seeds) {
    const PropertyResult result = run_random_life(
        {.seed = seed, .policy = GetParam(), .steps = 150, .executable = "policies_tests", .test = name_of_running_test()});
    if (HasFailure()) return;
    total.preemptions += result.preemptions;
    total.cancels += result.cancels;
    total.ended += result.ended;
  }
  if (seeds.size() == 1) return;
  EXPECT_GT(total.preemptions, 20u);
  EXPECT_GT(total.cancels, 20u);
  EXPECT_GT(total.ended, 500u);
}

TEST_P(SchedulerProperty, contracts_hold_with_states_and_a_prefix_cache) {
  for (const ModelShape& model : all_models) {
    SCOPED_TRACE(model.name);
    PropertyResult total;
    const std::vector<std::uint64_t> seeds = seeds_from(1, 16);
    for (const std::uint64_t seed : seeds) {
      const PropertyResult result = run_random_life({.seed = seed,
                                                     .policy = GetParam(),
                                                     .change_policy = seed % 2 == 0,
                                                     .model = model,
                                                     .steps = 150,
                                                     .executable = "policies_tests",
                                                     .test = name_of_running_test()});
      if (HasFailure()) return;
      total.counts.prefix_hits += result.counts.prefix_hits;
      total.counts.evicted_blocks += result.counts.evicted_blocks;
      total.counts.evicted_snapshots += result.counts.evicted_snapshots;
      total.preemptions += result.preemptions;
    }
    if (seeds.size() == 1) continue;
    EXPECT_GT(total.preemptions, model.few_states ? 0u : 5u);
    if (!model.caching) continue;
    EXPECT_GT(total.counts.prefix_hits, model.few_states ? 0u : 1000u);
    EXPECT_EQ(total.counts.evicted_blocks > 100u, model.attention);
    EXPECT_EQ(total.counts.evicted_snapshots > 50u, model.recurrent);
  }
}

TEST_P(SchedulerProperty, same_seed_same_plans) {
  for (const std::uint64_t seed : seeds_from(100, 7)) {
    const PropertyOptions options{.seed = seed,
                                  .policy = GetParam(),
                                  .change_policy = true,
                                  .model = all_models[seed % std::size(all_models)],
                                  .steps = 200,
                                  .executable = "policies_tests",
                                  .test = name_of_running_test()};
    EXPECT_EQ(run_random_life(options).fingerprint, run_random_life(options).fingerprint) << "seed " << seed;
  }
}

INSTANTIATE_TEST_SUITE_P(Policies, SchedulerProperty, testing::ValuesIn(all_policies),
                         [](const auto& parameter) { return name_of(parameter.param); });

}  // namespace
}  // namespace rubato::policies
