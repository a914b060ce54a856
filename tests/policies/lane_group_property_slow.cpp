// SPDX-License-Identifier: Apache-2.0
// At least 100,000 random steps of a lane group for every kind of node.
#include "tests/policies/lane_group_property.h"

namespace rubato::policies {
namespace {

constexpr std::uint64_t steps_at_least = 100000;

class LaneGroupPropertyAtLength : public testing::TestWithParam<NodeShape> {};

TEST_P(LaneGroupPropertyAtLength, contracts_hold_over_random_steps) {
  LaneGroupPropertyResult total;
  const std::vector<std::uint64_t> seeds = seeds_from(1000, 90000);
  for (const std::uint64_t seed : seeds) {
    total += run_random_life(GetParam(), seed, seed % 20 == 0 ? 3000 : 250, "policies_slow_tests");
    if (HasFailure()) return;
    if (total.steps >= 2 * steps_at_least) break;
  }
  if (seeds.size() == 1) return;
  EXPECT_GE(total.steps, steps_at_least);
  EXPECT_GT(total.preemptions, 100u);
  EXPECT_GT(total.cancels, 500u);
  if (GetParam().devices > 1) {
    EXPECT_GT(total.handoffs.copied, 1000u);
    EXPECT_GT(total.handoffs.expired, 50u);
  }
}

TEST_P(LaneGroupPropertyAtLength, contracts_hold_with_states_and_a_prefix_cache) {
  for (const ModelShape& model : all_models) {
    SCOPED_TRACE(model.name);
    LaneGroupPropertyResult total;
    const std::vector<std::uint64_t> seeds = seeds_from(1000, 90000);
    for (const std::uint64_t seed : seeds) {
      total += run_random_life(GetParam(), seed, seed % 20 == 0 ? 3000 : 250, "policies_slow_tests", model);
      if (HasFailure()) return;
      if (total.steps >= steps_at_least / 2) break;
    }
    if (seeds.size() == 1) continue;
    EXPECT_EQ(total.prefix_hits > 1000u, model.caching);
    EXPECT_EQ(total.evicted_snapshots > 500u, model.caching && model.recurrent);
  }
}

INSTANTIATE_TEST_SUITE_P(Nodes, LaneGroupPropertyAtLength, testing::ValuesIn(all_shapes),
                         [](const auto& parameter) { return name_of(parameter.param); });

}  // namespace
}  // namespace rubato::policies
