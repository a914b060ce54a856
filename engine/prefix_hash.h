// SPDX-License-Identifier: Apache-2.0
// What full blocks of tokens are known by in the prefix cache: each block's hash is that of the block before it and its own
// tokens, so that it stands for all tokens from the start of the sequence on.
//
// A hit is trusted: whoever has a block's hash is given what is cached under it, without a look at the tokens. So nobody may be
// able to make two prefixes with one hash. Clients choose tokens and salts, hence the hash is keyed with what no client knows
// (SipHash-2-4 with 128 bits of key and result, Aumasson and Bernstein 2012, a pseudorandom function): without the key colliding
// prefixes can only be met by chance, at some 2^64 blocks. The key is drawn at start and never shown, nor is any hash.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

#include "engine/tokens.h"
#include "policies/ids.h"

namespace rubato::engine {

/// 128 secret bits.
struct PrefixKey {
  std::uint64_t low = 0;
  std::uint64_t high = 0;
};

/// SipHash-2-4-128. The result's bytes are those of low, then those of high, each from the lowest on.
[[nodiscard]] BlockHash sip_hash_128(const PrefixKey& key, std::span<const std::byte> message);

class PrefixHasher {
 public:
  explicit PrefixHasher(const PrefixKey& key) : key_(key) {}

  /// What stands before the first block. Requests with different salts share nothing.
  [[nodiscard]] BlockHash root(std::string_view salt) const;
  /// The hash of a block; parent: of the block before it, or the root. CHECKs that there are kv_block_tokens tokens.
  [[nodiscard]] BlockHash next(const BlockHash& parent, std::span<const TokenId> block) const;

 private:
  PrefixKey key_;
};

}  // namespace rubato::engine
