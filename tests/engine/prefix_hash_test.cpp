// SPDX-License-Identifier: Apache-2.0
#include "engine/prefix_hash.h"

#include <gtest/gtest.h>

#include <set>
#include <string>
#include <vector>

namespace rubato::engine {
namespace {

std::string hex_of(const BlockHash& hash) {
  static constexpr char digits[] = "0123456789abcdef";
  std::string text;
  for (const std::uint64_t half : {hash.low, hash.high}) {
    for (unsigned i = 0; i < 64; i += 8) {
      text += digits[half >> (i + 4) & 15U];
      text += digits[half >> i & 15U];
    }
  }
  return text;
}

constexpr PrefixKey published_key{.low = 0x0706050403020100U, .high = 0x0f0e0d0c0b0a0908U};

// The authors' vectors: key 00..0f, message 00, 01, ... of the given length.
TEST(PrefixHash, sip_hash_gives_the_published_vectors) {
  struct Vector {
    std::size_t length;
    const char* hash;
  };
  const Vector vectors[] = {{0, "a3817f04ba25a8e66df67214c7550293"},  {1, "da87c1d86b99af44347659119b22fc45"},
                            {2, "8177228da4a45dc7fca38bdef60affe4"},  {3, "9c70b60c5267a94e5f33b6b02985ed51"},
                            {4, "f88164c12d9c8faf7d0f6e7c7bcd5579"},  {5, "1368875980776f8854527a07690e9627"},
                            {6, "14eeca338b208613485ea0308fd7a15e"},  {7, "a1f1ebbed8dbc153c0b84aa61ff08239"},
                            {8, "3b62a9ba6258f5610f83e264f31497b4"},  {9, "264499060ad9baabc47f8b02bb6d71ed"},
                            {15, "5493e99933b0a8117e08ec0f97cfc3d9"}, {16, "6ee2a4ca67b054bbfd3315bf85230577"},
                            {17, "473d06e8738db89854c066c47ae47740"}, {31, "2939b0183223fafc1723de4f52c43d35"},
                            {32, "7c3956ca5eeafc3e363e9d556546eb68"}, {47, "e61c432b720b19d18ec8d84bdc63151b"},
                            {48, "f7e5aef549f782cf379055a608269b16"}, {63, "5150d1772f50834a503e069a973fbd7c"}};
  for (const Vector& vector : vectors) {
    std::vector<std::byte> message;
    for (std::size_t i = 0; i < vector.length; ++i) message.push_back(static_cast<std::byte>(i));
    EXPECT_EQ(hex_of(sip_hash_128(published_key, message)), vector.hash) << vector.length << " bytes";
  }
}

std::vector<TokenId> block_of(TokenId first) {
  std::vector<TokenId> block(16);
  for (std::size_t i = 0; i < block.size(); ++i) block[i] = first + static_cast<TokenId>(i);
  return block;
}

TEST(PrefixHash, a_block_is_known_by_all_that_stands_before_it) {
  const PrefixHasher hasher(published_key);
  const BlockHash root = hasher.root("");
  std::set<BlockHash> seen{root};
  const auto is_new = [&seen](const BlockHash& hash) { return seen.insert(hash).second; };
  const BlockHash first = hasher.next(root, block_of(0));
  EXPECT_TRUE(is_new(first));
  EXPECT_EQ(hasher.next(root, block_of(0)), first);
  EXPECT_TRUE(is_new(hasher.next(first, block_of(0)))) << "the same tokens, one block further on";
  for (std::size_t i = 0; i < 16; ++i) {
    for (const TokenId bit : {1, 256, 1 << 16, 1 << 24}) {
      std::vector<TokenId> other = block_of(0);
      other[i] ^= bit;
      EXPECT_TRUE(is_new(hasher.next(root, other))) << "token " << i << " bit " << bit;
    }
  }
  std::vector<TokenId> swapped = block_of(0);
  std::swap(swapped[3], swapped[4]);
  EXPECT_TRUE(is_new(hasher.next(root, swapped)));
  EXPECT_TRUE(is_new(hasher.next({.high = first.high ^ 1, .low = first.low}, block_of(0))));
  EXPECT_TRUE(is_new(hasher.next({.high = first.high, .low = first.low ^ 1}, block_of(0))));
}

TEST(PrefixHash, salts_and_keys_share_nothing) {
  const PrefixHasher hasher(published_key);
  std::set<BlockHash> seen;
  for (const std::string& salt :
       {std::string(), std::string("a"), std::string("b"), std::string("a\0", 2), std::string(500, 'a')}) {
    EXPECT_TRUE(seen.insert(hasher.next(hasher.root(salt), block_of(0))).second) << salt.size();
  }
  for (const PrefixKey key : {PrefixKey{.low = published_key.low + 1, .high = published_key.high},
                              PrefixKey{.low = published_key.low, .high = published_key.high + 1}}) {
    EXPECT_TRUE(seen.insert(PrefixHasher(key).next(PrefixHasher(key).root(""), block_of(0))).second);
  }
}

// Who knew a block's message could otherwise send it as a salt.
TEST(PrefixHash, no_salt_stands_for_a_block) {
  const PrefixHasher hasher(published_key);
  const BlockHash root = hasher.root("");
  std::string message;
  for (const std::uint64_t half : {root.low, root.high}) {
    for (unsigned i = 0; i < 64; i += 8) message += static_cast<char>(half >> i & 255U);
  }
  for (const TokenId token : block_of(0)) {
    for (unsigned i = 0; i < 32; i += 8) message += static_cast<char>(static_cast<std::uint32_t>(token) >> i & 255U);
  }
  EXPECT_NE(hasher.root(message), hasher.next(root, block_of(0)));
  EXPECT_NE(hasher.root(std::string(1, '\1') + message), hasher.next(root, block_of(0)));
}

TEST(PrefixHashDeathTest, a_block_has_all_its_tokens) {
  const PrefixHasher hasher(published_key);
  EXPECT_DEATH(static_cast<void>(hasher.next(hasher.root(""), std::vector<TokenId>(15))), "tokens=15");
}

}  // namespace
}  // namespace rubato::engine
