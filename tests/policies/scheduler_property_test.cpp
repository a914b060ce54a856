// SPDX-License-Identifier: Apache-2.0
// A short run of the scheduler's property test; scheduler_property_slow.cpp runs it at length.
#include "tests/policies/scheduler_property.h"

namespace rubato::policies {
namespace {

class SchedulerProperty : public testing::TestWithParam<PriorityPolicy> {};

TEST_P(SchedulerProperty, contracts_hold_over_random_steps) {
  PropertyResult total;
  for (std::uint64_t seed = 1; seed <= 40 && !HasFailure(); ++seed) {
    const PropertyResult result = run_random_life({.seed = seed, .policy = GetParam(), .steps = 150, .executable = "policies_tests"});
    total.preemptions += result.preemptions;
    total.cancels += result.cancels;
    total.ended += result.ended;
  }
  EXPECT_GT(total.preemptions, 20u);
  EXPECT_GT(total.cancels, 20u);
  EXPECT_GT(total.ended, 500u);
}

TEST_P(SchedulerProperty, same_seed_same_plans) {
  for (std::uint64_t seed = 100; seed < 104; ++seed) {
    const PropertyOptions options{
        .seed = seed, .policy = GetParam(), .change_policy = true, .steps = 200, .executable = "policies_tests"};
    EXPECT_EQ(run_random_life(options).fingerprint, run_random_life(options).fingerprint) << "seed " << seed;
  }
}

INSTANTIATE_TEST_SUITE_P(Policies, SchedulerProperty, testing::ValuesIn(all_policies),
                         [](const auto& parameter) { return name_of(parameter.param); });

}  // namespace
}  // namespace rubato::policies
