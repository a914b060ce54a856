// SPDX-License-Identifier: Apache-2.0
// A short run of the lane group's property test; lane_group_property_slow.cpp runs it at length.
#include "tests/policies/lane_group_property.h"

namespace rubato::policies {
namespace {

class LaneGroupProperty : public testing::TestWithParam<NodeShape> {};

TEST_P(LaneGroupProperty, contracts_hold_over_random_steps) {
  LaneGroupPropertyResult total;
  const std::vector<std::uint64_t> seeds = seeds_from(1, 40);
  for (const std::uint64_t seed : seeds) {
    total += run_random_life(GetParam(), seed, 150, "policies_tests");
    if (HasFailure()) return;
  }
  if (seeds.size() == 1) return;
  EXPECT_GT(total.steps, 5000u);
  EXPECT_GT(total.preemptions, 5u);
  EXPECT_GT(total.cancels, 100u);
  if (GetParam().devices * GetParam().lanes_per_device == 1) return;
  EXPECT_GT(total.handoffs.switches, 50u);
  EXPECT_GT(total.handoffs.reservation_waits, 20u);
  if (GetParam().devices == 1) {
    EXPECT_GT(total.handoffs.moved, 100u);
  } else {
    EXPECT_GT(total.handoffs.copied, 100u);
    EXPECT_GT(total.handoffs.failed, 10u);
    EXPECT_GT(total.handoffs.expired, 5u);
    EXPECT_GT(total.handoffs.late_answers, 5u);
  }
}

TEST_P(LaneGroupProperty, contracts_hold_with_states_and_a_prefix_cache) {
  for (const ModelShape& model : all_models) {
    SCOPED_TRACE(model.name);
    LaneGroupPropertyResult total;
    const std::vector<std::uint64_t> seeds = seeds_from(1, 10);
    for (const std::uint64_t seed : seeds) {
      total += run_random_life(GetParam(), seed, 150, "policies_tests", model);
      if (HasFailure()) return;
    }
    if (seeds.size() == 1) continue;
    EXPECT_EQ(total.prefix_hits > (model.few_states ? 0u : 100u), model.caching);
    EXPECT_EQ(total.evicted_snapshots > 10u, model.caching && model.recurrent);
    if (GetParam().devices > 1) {
      EXPECT_GT(total.handoffs.copied, 10u);
    }
  }
}

TEST_P(LaneGroupProperty, same_seed_same_plans_and_copies) {
  for (const std::uint64_t seed : seeds_from(100, 7)) {
    const ModelShape& model = all_models[seed % std::size(all_models)];
    EXPECT_EQ(run_random_life(GetParam(), seed, 200, "policies_tests", model).fingerprint,
              run_random_life(GetParam(), seed, 200, "policies_tests", model).fingerprint)
        << "seed " << seed;
  }
}

INSTANTIATE_TEST_SUITE_P(Nodes, LaneGroupProperty, testing::ValuesIn(all_shapes),
                         [](const auto& parameter) { return name_of(parameter.param); });

}  // namespace
}  // namespace rubato::policies
