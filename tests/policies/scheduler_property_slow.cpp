// SPDX-License-Identifier: Apache-2.0
// At least 100,000 random steps for every policy, and as many with the policy changing under way.
#include "tests/policies/scheduler_property.h"

namespace rubato::policies {
namespace {

constexpr std::uint64_t steps_at_least = 100000;

void run_at_length(PriorityPolicy policy, bool change_policy, const ModelShape& model = all_models[0]) {
  PropertyResult total;
  const std::vector<std::uint64_t> seeds = seeds_from(1000, 90000);
  for (const std::uint64_t seed : seeds) {
    const PropertyResult result = run_random_life({.seed = seed,
                                                   .policy = policy,
                                                   .change_policy = change_policy,
                                                   .model = model,
                                                   .steps = seed % 20 == 0 ? 5000 : 400,
                                                   .executable = "policies_slow_tests",
                                                   .test = name_of_running_test()});
    if (testing::Test::HasFailure()) return;
    total.steps += result.steps;
    total.preemptions += result.preemptions;
    total.cancels += result.cancels;
    if (total.steps >= 2 * steps_at_least) break;
  }
  if (seeds.size() == 1) return;
  EXPECT_GE(total.steps, steps_at_least);
  EXPECT_GT(total.preemptions, 50u);
  EXPECT_GT(total.cancels, 500u);
}

class SchedulerPropertyAtLength : public testing::TestWithParam<PriorityPolicy> {};

TEST_P(SchedulerPropertyAtLength, contracts_hold_over_random_steps) {
  run_at_length(GetParam(), false);
}
TEST_P(SchedulerPropertyAtLength, contracts_hold_while_the_policy_changes) {
  run_at_length(GetParam(), true);
}

TEST_P(SchedulerPropertyAtLength, contracts_hold_with_states_and_a_prefix_cache) {
  for (const ModelShape& model : all_models) {
    SCOPED_TRACE(model.name);
    run_at_length(GetParam(), true, model);
  }
}

INSTANTIATE_TEST_SUITE_P(Policies, SchedulerPropertyAtLength, testing::ValuesIn(all_policies),
                         [](const auto& parameter) { return name_of(parameter.param); });

}  // namespace
}  // namespace rubato::policies
