// SPDX-License-Identifier: Apache-2.0
#include "policies/block_pool.h"

#include <gtest/gtest.h>

#include <deque>
#include <random>
#include <set>

#include "policies/accounting.h"

namespace rubato::policies {
namespace {

TEST(BlockPool, freed_block_is_reused_last) {
  BlockPool pool(4);
  const BlockId first = pool.take();
  const BlockId second = pool.take();
  pool.give(first);
  EXPECT_NE(pool.take(), first);
  EXPECT_NE(pool.take(), first);
  EXPECT_EQ(pool.take(), first);
  EXPECT_EQ(pool.free_count(), 0);
  pool.give(second);
  EXPECT_EQ(pool.take(), second);
}

TEST(BlockPool, hands_out_each_block_once_in_any_order_of_use) {
  std::mt19937 random(11);
  BlockPool pool(17);
  std::deque<BlockId> held;
  for (int i = 0; i < 5000; ++i) {
    if (pool.free_count() > 0 && (held.empty() || random() % 2 == 0)) {
      held.push_back(pool.take());
    } else {
      std::swap(held[random() % held.size()], held.front());
      pool.give(held.front());
      held.pop_front();
    }
    ASSERT_EQ(std::set<BlockId>(held.begin(), held.end()).size(), held.size());
    ASSERT_EQ(static_cast<std::int32_t>(held.size()) + pool.free_count(), 17);
    pool.check_integrity();
  }
}

constexpr BlockHash first_hash{.high = 1, .low = 1};
constexpr BlockHash second_hash{.high = 1, .low = 2};

TEST(BlockPool, a_cached_block_is_found_while_it_lies_free_and_no_longer_once_it_is_taken) {
  BlockPool pool(2);
  const BlockId block = pool.take();
  EXPECT_TRUE(pool.cache(block, first_hash));
  pool.give(block);
  EXPECT_EQ(pool.find(first_hash), block);
  EXPECT_EQ(pool.free_count(), 2) << "cached and without references is free";
  EXPECT_NE(pool.take(), block);
  EXPECT_EQ(pool.find(first_hash), block);
  EXPECT_EQ(pool.take(), block);
  EXPECT_EQ(pool.find(first_hash), std::nullopt);
  EXPECT_EQ(pool.evicted(), 1u);
  pool.check_integrity();
}

TEST(BlockPool, a_hit_takes_a_free_block_out_of_the_middle_of_the_free_list) {
  BlockPool pool(3);
  const BlockId first = pool.take();
  const BlockId second = pool.take();
  const BlockId third = pool.take();
  EXPECT_TRUE(pool.cache(second, second_hash));
  for (const BlockId block : {first, second, third}) pool.give(block);
  pool.share(second);
  pool.check_integrity();
  EXPECT_EQ(pool.free_count(), 2);
  EXPECT_EQ(pool.take(), first);
  EXPECT_EQ(pool.take(), third);
  EXPECT_EQ(pool.find(second_hash), second);
}

TEST(BlockPool, a_block_is_free_when_the_last_reference_is_given_back) {
  BlockPool pool(2);
  const BlockId block = pool.take();
  EXPECT_TRUE(pool.cache(block, first_hash));
  pool.share(block);
  pool.share(block);
  EXPECT_EQ(pool.shared_references(), 2);
  pool.check_integrity();
  pool.give(block);
  pool.give(block);
  EXPECT_EQ(pool.shared_references(), 0);
  EXPECT_TRUE(pool.is_taken(block));
  EXPECT_EQ(pool.free_count(), 1);
  pool.give(block);
  EXPECT_EQ(pool.free_count(), 2);
  pool.check_integrity();
}

TEST(BlockPool, of_two_blocks_with_the_same_tokens_the_first_is_cached) {
  BlockPool pool(2);
  const BlockId first = pool.take();
  const BlockId second = pool.take();
  EXPECT_TRUE(pool.cache(first, first_hash));
  EXPECT_FALSE(pool.cache(second, first_hash));
  EXPECT_EQ(pool.find(first_hash), first);
  EXPECT_FALSE(pool.is_cached(second));
  EXPECT_EQ(pool.cached_count(), 1);
}

TEST(BlockPoolDeathTest, only_what_is_cached_or_taken_is_shared_and_nothing_is_cached_twice) {
  BlockPool pool(2);
  const BlockId block = pool.take();
  EXPECT_TRUE(pool.cache(block, first_hash));
  EXPECT_DEATH(pool.cache(block, second_hash), "free or cached");
  EXPECT_DEATH(pool.share(BlockId{1}), "nothing to share");
  EXPECT_DEATH(pool.cache(BlockId{1}, second_hash), "free or cached");
}

TEST(BlockPoolDeathTest, a_block_cannot_be_freed_twice) {
  BlockPool pool(2);
  const BlockId block = pool.take();
  pool.give(block);
  EXPECT_DEATH(pool.give(block), "is not taken");
  EXPECT_DEATH(pool.give(BlockId{2}), "block 2 of 2");
}

TEST(Accounting, wants_input_and_growth_but_no_room_for_the_last_token) {
  EXPECT_EQ(blocks_for_tokens(16), 1);
  EXPECT_EQ(blocks_for_tokens(17), 2);
  EXPECT_EQ(blocks_wanted({.known_tokens = 16, .remaining_new_tokens = 1}, 512), 1);
  EXPECT_EQ(blocks_wanted({.known_tokens = 16, .remaining_new_tokens = 2}, 512), 2);
  EXPECT_EQ(blocks_wanted({.known_tokens = 16, .remaining_new_tokens = 1000}, 512), 1 + 32);
  EXPECT_EQ(blocks_wanted({.known_tokens = 16, .remaining_new_tokens = 1000}, 0), 1);
}

TEST(Accounting, a_pool_sized_for_so_many_sequences_admits_so_many_and_one_block_less_does_not) {
  const auto admitted = [](std::int32_t block_count, std::int32_t wanted) {
    PoolLoad load{.block_count = block_count};
    while (may_admit(load, wanted)) {
      load.committed_blocks += wanted;
      ++load.running;
    }
    return load.running;
  };
  for (std::int64_t sequences = 2; sequences < 200; ++sequences) {
    for (const std::int32_t prompt : {1, 16, 100, 2000}) {
      const SequenceLengths lengths{.known_tokens = prompt, .remaining_new_tokens = 300};
      const std::int32_t wanted = blocks_wanted(lengths, default_growth_reserve_tokens);
      const auto blocks = static_cast<std::int32_t>(pool_blocks_for(sequences, lengths, default_growth_reserve_tokens));
      EXPECT_EQ(admitted(blocks, wanted), sequences) << "prompt " << prompt;
      EXPECT_LT(admitted(blocks - 1, wanted), sequences) << "prompt " << prompt;
    }
  }
}

TEST(Accounting, a_sequence_alone_is_always_admitted) {
  EXPECT_TRUE(may_admit({.block_count = 4, .committed_blocks = 0, .running = 0}, 4));
  EXPECT_FALSE(may_admit({.block_count = 4, .committed_blocks = 1, .running = 1}, 3));
  EXPECT_TRUE(may_admit({.block_count = 4, .committed_blocks = 1, .running = 1}, 2));
}

TEST(Accounting, longest_sequence_is_the_smaller_of_model_and_pool) {
  EXPECT_EQ(longest_sequence(4096, 32), 512);
  EXPECT_EQ(longest_sequence(500, 32), 500);
  EXPECT_EQ(longest_sequence(2'000'000'000, 2'000'000'000), 2'000'000'000);
}

}  // namespace
}  // namespace rubato::policies
