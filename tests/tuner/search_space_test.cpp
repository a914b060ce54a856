// SPDX-License-Identifier: Apache-2.0
#include "tuner/search_space.h"

#include <gtest/gtest.h>

#include <random>
#include <set>

#include "tests/tuner/fake_engine.h"

namespace rubato::tuner {
namespace {

SearchSpace everything_free() {
  SearchSpace space;
  space.base = {.max_num_batched_tokens = 512, .max_num_seqs = 64};
  return space;
}

TEST(SearchSpace, grid_settings_are_legal_distinct_and_in_a_fixed_order) {
  const LegalSettings legal(everything_free());
  const auto grid = legal.grid(1 << 20, 1);
  EXPECT_GT(grid.size(), 500u);
  EXPECT_EQ(grid, legal.grid(1 << 20, 2));
  for (std::size_t i = 0; i < grid.size(); ++i) {
    EXPECT_TRUE(legal.contains(grid[i]));
    EXPECT_EQ(grid[i], legal.canonical(grid[i]));
    for (std::size_t j = 0; j < i; ++j) ASSERT_NE(grid[i], grid[j]);
  }
}

TEST(SearchSpace, grid_above_the_limit_is_a_seeded_sample) {
  const LegalSettings legal(everything_free());
  EXPECT_EQ(legal.grid(100, 1).size(), 100u);
  EXPECT_EQ(legal.grid(100, 1), legal.grid(100, 1));
  EXPECT_NE(legal.grid(100, 1), legal.grid(100, 2));
}

TEST(SearchSpace, margin_is_searched_under_policy_deadline_only) {
  const LegalSettings legal(everything_free());
  std::set<std::int32_t> deadline;
  for (const KnobValues& one : legal.grid(1 << 20, 1)) {
    if (one.priority_policy == PriorityPolicy::Deadline) {
      deadline.insert(one.deadline_margin);
    } else {
      EXPECT_EQ(one.deadline_margin, 20);
    }
  }
  EXPECT_EQ(deadline, (std::set<std::int32_t>{0, 10, 20, 30, 40, 50}));
}

TEST(SearchSpace, clamped_values_are_legal_whatever_came_in) {
  std::mt19937_64 random(7);
  for (int round = 0; round < 20000; ++round) {
    SearchSpace space = everything_free();
    const auto pick = [&](int low, int high) { return low + static_cast<int>(random() % static_cast<unsigned>(high - low + 1)); };
    space.knobs.max_num_batched_tokens.min = pick(1, 200);
    space.knobs.max_num_batched_tokens.max = pick(space.knobs.max_num_batched_tokens.min, 9000);
    space.knobs.max_num_seqs.min = pick(1, 40);
    space.knobs.max_num_seqs.max = pick(space.knobs.max_num_seqs.min, 300);
    if (space.knobs.max_num_batched_tokens.max < space.knobs.max_num_seqs.min + min_prefill_quantum) continue;
    const KnobValues wild{.max_num_batched_tokens = pick(-100, 100000),
                          .max_num_seqs = pick(-100, 1000),
                          .priority_policy = static_cast<PriorityPolicy>(pick(0, 3)),
                          .deadline_margin = pick(-10, 200),
                          .mode = Mode::Chunked,
                          .prefill_share = 50};
    const LegalSettings legal(space);
    ASSERT_TRUE(legal.contains(legal.clamp(wild))) << "round " << round;
    ASSERT_TRUE(legal.contains(legal.canonical(wild))) << "round " << round;
  }
}

TEST(SearchSpace, pinned_knobs_keep_the_base_value_and_the_free_ones_make_room) {
  SearchSpace space = everything_free();
  space.base.max_num_batched_tokens = 40;
  space.max_num_batched_tokens_free = false;
  const LegalSettings legal(space);
  const KnobValues clamped = legal.clamp({.max_num_batched_tokens = 4096, .max_num_seqs = 64});
  EXPECT_EQ(clamped.max_num_batched_tokens, 40);
  EXPECT_EQ(clamped.max_num_seqs, 24);
  for (const KnobValues& one : legal.grid(1 << 20, 1)) EXPECT_EQ(one.max_num_batched_tokens, 40);
}

TEST(SearchSpace, small_ranges_are_taken_value_by_value) {
  SearchSpace space = everything_free();
  space.knobs.max_num_batched_tokens = {.initial = 100, .min = 100, .max = 105};
  space.base = {.max_num_batched_tokens = 100, .max_num_seqs = 64};
  space.max_num_seqs_free = space.priority_policy_free = space.deadline_margin_free = false;
  EXPECT_EQ(LegalSettings(space).grid(100, 1).size(), 6u);
}

TEST(SearchSpace, all_pinned_means_nothing_is_free) {
  SearchSpace space = everything_free();
  EXPECT_TRUE(LegalSettings(space).any_free());
  space.max_num_batched_tokens_free = space.max_num_seqs_free = space.priority_policy_free = space.deadline_margin_free = false;
  EXPECT_FALSE(LegalSettings(space).any_free());
  space.max_num_seqs_free = true;
  space.knobs.max_num_seqs = {.initial = 64, .min = 64, .max = 64};
  EXPECT_FALSE(LegalSettings(space).any_free());
}

TEST(SearchSpace, prefill_share_is_searched_in_disaggregated_mode_only) {
  SearchSpace space = everything_free();
  space.mode_free = space.prefill_share_free = true;
  space.knobs.mode.choices = {Mode::Chunked, Mode::Disaggregated};
  std::set<std::int32_t> shares;
  for (const KnobValues& one : LegalSettings(space).grid(1 << 20, 1)) {
    if (one.mode == Mode::Disaggregated) {
      shares.insert(one.prefill_share);
    } else {
      EXPECT_EQ(one.prefill_share, 50);
    }
  }
  EXPECT_EQ(shares.size(), 9u);
}

TEST(SearchSpace, prefill_devices_are_searched_in_disaggregated_mode_only) {
  SearchSpace space = everything_free();
  space.mode_free = space.prefill_devices_free = true;
  space.knobs.mode.choices = {Mode::Chunked, Mode::Disaggregated};
  space.knobs.prefill_devices.max = 3;
  space.base.prefill_devices = 2;
  std::set<std::int32_t> devices;
  const LegalSettings legal(space);
  for (const KnobValues& one : legal.grid(1 << 20, 1)) {
    EXPECT_EQ(one, legal.canonical(one));
    if (one.mode == Mode::Disaggregated) {
      devices.insert(one.prefill_devices);
    } else {
      EXPECT_EQ(one.prefill_devices, 2);
    }
  }
  EXPECT_EQ(devices, (std::set<std::int32_t>{1, 2, 3}));
  EXPECT_EQ(legal.canonical({.mode = Mode::Chunked, .prefill_devices = 3}).prefill_devices, 2);
  EXPECT_EQ(legal.clamp({.mode = Mode::Disaggregated, .prefill_devices = 9}).prefill_devices, 3);
}

TEST(SearchSpace, with_chunked_the_only_mode_share_devices_and_mode_are_no_dimensions) {
  const auto grid = LegalSettings(everything_free()).grid(1 << 20, 1);
  SearchSpace space = everything_free();
  space.mode_free = space.prefill_share_free = space.prefill_devices_free = true;
  space.knobs.prefill_devices.max = 3;
  EXPECT_EQ(LegalSettings(space).grid(1 << 20, 1), grid);
  space.max_num_batched_tokens_free = space.max_num_seqs_free = space.priority_policy_free = space.deadline_margin_free = false;
  EXPECT_FALSE(LegalSettings(space).any_free());
}

TEST(SearchSpace, a_pinned_mode_disaggregated_leaves_share_and_devices_to_search) {
  SearchSpace space = everything_free();
  space.base.mode = Mode::Disaggregated;
  space.max_num_batched_tokens_free = space.max_num_seqs_free = space.priority_policy_free = space.deadline_margin_free = false;
  EXPECT_FALSE(LegalSettings(space).any_free());
  space.prefill_devices_free = true;
  EXPECT_FALSE(LegalSettings(space).any_free());  // a range of one
  space.knobs.prefill_devices.max = 2;
  EXPECT_TRUE(LegalSettings(space).any_free());
  EXPECT_EQ(LegalSettings(space).grid(100, 1).size(), 2u);
}

TEST(SearchSpace, reservation_is_a_persons_to_set_and_never_searched) {
  SearchSpace space = everything_free();
  space.mode_free = space.prefill_share_free = space.prefill_devices_free = true;
  space.knobs.mode.choices = {Mode::Chunked, Mode::Disaggregated};
  space.base.reservation = Reservation::Early;
  const LegalSettings legal(space);
  for (const KnobValues& one : legal.grid(1 << 20, 1)) ASSERT_EQ(one.reservation, Reservation::Early);
  KnobValues other = legal.clamp(space.base);
  EXPECT_TRUE(legal.contains(other));
  other.reservation = Reservation::LastChunk;
  EXPECT_FALSE(legal.contains(other));
  EXPECT_EQ(legal.clamp(other).reservation, Reservation::Early);
}

}  // namespace
}  // namespace rubato::tuner
