// SPDX-License-Identifier: Apache-2.0
// Cuts of operations into tasks: always within what kernels and workers can do, and never a worse guess than without a plan.
#include "engine/cpu/tile_plans.h"

#include <gtest/gtest.h>

#include <memory>

namespace rubato::engine::cpu {
namespace {

const std::vector<LinearSize> linear_sizes{{1, 1}, {1, 4096}, {3, 64}, {24, 768}, {86, 1408}, {128, 4096}, {4748, 2048}};

TEST(TilePlans, a_searched_cut_is_valid_and_never_expected_to_be_slower_than_the_eager_one) {
  int better = 0;
  for (const LinearSize& size : linear_sizes) {
    for (const std::int32_t rows : {1, 2, 8, 31, 64, 127, 128, 129, 160, 300, 512, 2048, 4096}) {
      for (const std::int32_t threads : {1, 2, 3, 16, 64}) {
        const LinearCut cut = best_cut(size, rows, threads);
        const LinearCut eager = eager_cut(size, threads);
        EXPECT_GE(cut.rows, 1);
        EXPECT_LE(cut.rows, linear_rows_max);
        EXPECT_GE(cut.panels, 1);
        EXPECT_LE(cut.panels, size.panels);
        EXPECT_LE(cut_time(size, cut, rows, threads), cut_time(size, eager, rows, threads));
        better += cut_time(size, cut, rows, threads) < cut_time(size, eager, rows, threads) ? 1 : 0;
      }
    }
  }
  EXPECT_GT(better, 50);
}

TEST(TilePlans, rows_just_above_a_block_are_cut_evenly) {
  // 130 rows in blocks of 128 would leave a task of 2.
  EXPECT_EQ(best_cut({24, 768}, 130, 2).rows, 65);
}

TEST(TilePlans, each_step_finds_the_plan_of_its_bucket) {
  const policies::StepBuckets buckets{.tokens = {8, 32, 512}, .decode_max = 32};
  const TilePlans::Sizes sizes{.linears = linear_sizes, .attention = {.tokens_max = 16, .per_piece = 4}, .threads = 4};
  const auto set = TilePlans::build(buckets, sizes, {}).value();
  const auto& plans = static_cast<const TilePlans&>(*set);
  EXPECT_EQ(set->buckets(), buckets);
  EXPECT_GT(set->bytes(), 3 * static_cast<std::int64_t>(linear_sizes.size() * sizeof(LinearCut)));
  ASSERT_NE(plans.find(1), nullptr);
  EXPECT_EQ(plans.find(1), plans.find(8));
  EXPECT_NE(plans.find(8), plans.find(9));
  EXPECT_EQ(plans.find(33), nullptr);
  EXPECT_EQ(plans.find(0), nullptr);
  ASSERT_NE(plans.find(500), nullptr);
  for (const std::int32_t rows : {8, 32, 512}) {
    const TilePlan& plan = *plans.find(rows);
    EXPECT_EQ(plan.linears.size(), linear_sizes.size());
    EXPECT_EQ(plan.linears[3], best_cut(linear_sizes[3], rows, 4));
    EXPECT_GE(plan.elementwise_rows, 1);
    EXPECT_LE(plan.elementwise_rows, eager_elementwise_rows);
    EXPECT_GE(plan.attention_tokens, 1);
    EXPECT_LE(plan.attention_tokens, 16);
  }
}

TEST(TilePlans, a_stopped_build_ends_between_two_buckets) {
  std::stop_source stop;
  stop.request_stop();
  const auto built = TilePlans::build({.tokens = {8}, .decode_max = 8}, {.linears = linear_sizes}, stop.get_token());
  ASSERT_FALSE(built);
  EXPECT_EQ(built.error().code, ErrorCode::Cancelled);
}

}  // namespace
}  // namespace rubato::engine::cpu
