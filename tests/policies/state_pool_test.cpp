// SPDX-License-Identifier: Apache-2.0
#include "policies/state_pool.h"

#include <gtest/gtest.h>

namespace rubato::policies {
namespace {

BlockHash hash_of(std::uint64_t number) {
  return {.high = 9, .low = number};
}

StateId keep(StatePool& pool, std::uint64_t number) {
  const StateId state = pool.begin_snapshot(hash_of(number));
  pool.keep_snapshot(state);
  return state;
}

TEST(StatePool, free_slots_are_taken_before_any_snapshot_gives_way) {
  StatePool pool(3);
  const StateId snapshot = keep(pool, 1);
  EXPECT_EQ(pool.available(), 3);
  EXPECT_NE(pool.take(), snapshot);
  EXPECT_NE(pool.take(), snapshot);
  EXPECT_EQ(pool.evicted(), 0u);
  EXPECT_EQ(pool.take(), snapshot);
  EXPECT_EQ(pool.evicted(), 1u);
  EXPECT_EQ(pool.available(), 0);
  EXPECT_FALSE(pool.knows(hash_of(1)));
  pool.check_integrity();
}

TEST(StatePool, the_snapshot_unused_for_longest_gives_way_and_a_hit_makes_it_the_latest) {
  StatePool pool(3);
  const StateId first = keep(pool, 1);
  const StateId second = keep(pool, 2);
  const StateId third = keep(pool, 3);
  pool.pin(first);
  pool.unpin(first);
  EXPECT_EQ(pool.take(), second);
  EXPECT_EQ(pool.take(), third);
  EXPECT_EQ(pool.take(), first);
}

TEST(StatePool, a_pinned_snapshot_stays_until_the_last_pin_is_gone) {
  StatePool pool(2);
  const StateId pinned = keep(pool, 1);
  pool.pin(pinned);
  pool.pin(pinned);
  EXPECT_EQ(pool.available(), 1);
  EXPECT_NE(pool.take(), pinned);
  EXPECT_EQ(pool.available(), 0);
  pool.unpin(pinned);
  EXPECT_EQ(pool.available(), 0);
  EXPECT_EQ(pool.find(hash_of(1)), pinned);
  pool.unpin(pinned);
  EXPECT_EQ(pool.available(), 1);
  pool.check_integrity();
}

TEST(StatePool, a_snapshot_that_is_being_written_is_known_but_neither_found_nor_given_away) {
  StatePool pool(2);
  const StateId writing = pool.begin_snapshot(hash_of(1));
  EXPECT_TRUE(pool.knows(hash_of(1)));
  EXPECT_EQ(pool.find(hash_of(1)), std::nullopt);
  EXPECT_EQ(pool.available(), 1);
  EXPECT_EQ(pool.snapshot_count(), 0);
  pool.check_integrity();
  pool.drop_snapshot(writing);
  EXPECT_FALSE(pool.knows(hash_of(1)));
  EXPECT_EQ(pool.available(), 2);
  pool.check_integrity();
}

TEST(StatePool, a_freed_slot_is_reused_last) {
  StatePool pool(3);
  const StateId first = pool.take();
  pool.give(first);
  EXPECT_NE(pool.take(), first);
  EXPECT_NE(pool.take(), first);
  EXPECT_EQ(pool.take(), first);
}

TEST(StatePoolDeathTest, a_slot_is_given_back_once_and_unpinned_as_often_as_pinned) {
  StatePool pool(2);
  const StateId state = pool.take();
  pool.give(state);
  EXPECT_DEATH(pool.give(state), "does not work");
  EXPECT_DEATH(pool.pin(state), "is no snapshot");
  const StateId snapshot = keep(pool, 1);
  EXPECT_DEATH(pool.unpin(snapshot), "is not pinned");
  EXPECT_DEATH(pool.keep_snapshot(snapshot), "not being written");
  EXPECT_DEATH(pool.give(StateId{2}), "state 2 of 2");
}

}  // namespace
}  // namespace rubato::policies
