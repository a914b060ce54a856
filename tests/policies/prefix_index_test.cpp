// SPDX-License-Identifier: Apache-2.0
#include "policies/prefix_index.h"

#include <gtest/gtest.h>

#include <map>
#include <random>

namespace rubato::policies {
namespace {

TEST(PrefixIndex, finds_what_was_inserted_and_not_erased_however_hashes_crowd) {
  for (const std::uint64_t spread : {4u, 64u, 1u << 30U}) {  // few different low halves: long runs of neighbours
    std::mt19937_64 random(spread);
    PrefixIndex index(40);
    std::map<BlockHash, std::int32_t> expected;
    for (int i = 0; i < 20000; ++i) {
      const BlockHash hash{.high = random() % 8, .low = random() % spread};
      const auto found = expected.find(hash);
      ASSERT_EQ(index.find(hash), found == expected.end() ? std::nullopt : std::optional(found->second));
      if (found != expected.end()) {
        index.erase(hash);
        expected.erase(found);
      } else if (expected.size() < 40) {
        index.insert(hash, i);
        expected.emplace(hash, i);
      }
      ASSERT_EQ(index.size(), static_cast<std::int32_t>(expected.size()));
      if (i % 16 == 0) index.check_integrity();
    }
  }
}

TEST(PrefixIndex, both_halves_of_a_hash_count) {
  PrefixIndex index(4);
  index.insert({.high = 1, .low = 7}, 10);
  index.insert({.high = 2, .low = 7}, 20);
  EXPECT_EQ(index.find({.high = 1, .low = 7}), 10);
  EXPECT_EQ(index.find({.high = 2, .low = 7}), 20);
  EXPECT_EQ(index.find({.high = 3, .low = 7}), std::nullopt);
  index.erase({.high = 1, .low = 7});
  EXPECT_EQ(index.find({.high = 2, .low = 7}), 20);
}

TEST(PrefixIndexDeathTest, holds_no_more_than_it_was_made_for_and_nothing_twice) {
  PrefixIndex none(0);
  EXPECT_EQ(none.find({}), std::nullopt);
  EXPECT_DEATH(none.insert({}, 1), "capacity=0");
  PrefixIndex two(2);
  two.insert({.high = 0, .low = 1}, 1);
  EXPECT_DEATH(two.insert({.high = 0, .low = 1}, 2), "used=");
  EXPECT_DEATH(two.erase({.high = 0, .low = 2}), "used");
}

}  // namespace
}  // namespace rubato::policies
